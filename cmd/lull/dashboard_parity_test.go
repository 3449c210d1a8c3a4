package main

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"lull/internal/core/power"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/sim"
)

const threeMachines = `
speed: 1
timing: {pending: 1s, stopping: 1s, cml_boot: 1s, background: 1h}
profiles: {quiet: {labs: 1}}
workers:
  - {name: first-1, type: m5.large, profile: quiet, elastic_ip: true}
  - {name: first-2, type: m5.large, profile: quiet, elastic_ip: true}
  - {name: first-3, type: m5.large, profile: quiet, elastic_ip: true}
`

// dashboardUser is a user of the dashboard, who checks the effect of each action
// through the API and the simulated cloud.
type dashboardUser struct {
	*window
	url    string
	client *control.Client
}

// worker returns a worker by its name.
func (p *dashboardUser) worker(name string) (worker.Worker, error) {
	l, err := p.client.Workers(p.t.Context(), url.Values{"name": {name}, "terminated": {"true"}})
	if err != nil {
		return worker.Worker{}, err
	}
	if len(l) != 1 {
		return worker.Worker{}, fmt.Errorf("%d workers are named %s", len(l), name)
	}
	return l[0], nil
}

// becomes waits until the API returns a worker for which is returns true.
func (p *dashboardUser) becomes(name, what string, is func(worker.Worker) bool) (w worker.Worker) {
	p.t.Helper()
	eventually(p.t, func() (err error) {
		if w, err = p.worker(name); err == nil && !is(w) {
			err = fmt.Errorf("%s is not %s: %+v", name, what, w)
		}
		return err
	})
	return w
}

// machine returns the simulated machine of a worker.
func (p *dashboardUser) machine(w worker.Worker) sim.InstanceInfo {
	p.t.Helper()
	res, err := http.Get(os.Getenv("AWS_ENDPOINT_URL") + "/sim/instances/" + w.EC2InstanceID)
	if err != nil {
		p.t.Fatal(err)
	}
	defer res.Body.Close()
	var in sim.InstanceInfo
	if err := json.NewDecoder(res.Body).Decode(&in); err != nil {
		p.t.Fatal(err)
	}
	return in
}

// option selects an option in a list.
func (p *dashboardUser) option(css, value string) {
	p.t.Helper()
	p.until(`document.querySelector($1)`, css)
	if !js[bool](p.window, `(() => { const [css, v] = $1, e = document.querySelector(css); e.value = v; e.dispatchEvent(new Event('change', {bubbles: true})); return e.value === v })()`, []string{css, value}) {
		p.t.Fatalf("%s has no %q", css, value)
	}
}

// replace overwrites the content of a field.
func (p *dashboardUser) replace(css, text string) {
	p.t.Helper()
	p.clear(css)
	p.enter(css, text)
}

// closed waits until the open form was accepted.
func (p *dashboardUser) closed() {
	p.t.Helper()
	p.until(`!document.querySelector('dialog[open]')`)
}

// visitWorker opens the page of a worker.
func (p *dashboardUser) visitWorker(w worker.Worker) {
	p.t.Helper()
	p.visit(p.url + "/workers/" + w.ID)
	p.until(`document.querySelector('main h1')?.innerText.includes($1)`, w.Name)
	p.until(`document.title.startsWith($1)`, w.Name)
}

// TestDashboardParity does in the dashboard everything that an operator or admin does
// more than once a month, from the first region to the end of a worker. It checks
// each effect through the API or the simulated cloud.
func TestDashboardParity(t *testing.T) {
	chrome := startBrowser(t)
	address, token, client, machines := emptyFleet(t, threeMachines)
	p := &dashboardUser{window: open(t, chrome, address), url: address, client: client}
	p.until(`document.activeElement?.id === 'token'`)
	p.login(token)
	for _, step := range []struct {
		name string
		do   func(*dashboardUser, []sim.InstanceInfo)
	}{
		{"connect", (*dashboardUser).connect}, {"import", (*dashboardUser).imports}, {"arm", (*dashboardUser).arms}, {"bulk", (*dashboardUser).bulk}, {"template", (*dashboardUser).template},
		{"create", (*dashboardUser).creates}, {"edit", (*dashboardUser).edits}, {"expiry", (*dashboardUser).expiry}, {"license", (*dashboardUser).license}, {"row", (*dashboardUser).rowMenu},
		{"instances", (*dashboardUser).instances}, {"token", (*dashboardUser).tokens}, {"palette", (*dashboardUser).palette}, {"terminate", (*dashboardUser).terminates},
	} {
		if !t.Run(step.name, func(t *testing.T) { p.in(t); step.do(p, machines) }) {
			return
		}
	}
}

func (p *dashboardUser) connect(machines []sim.InstanceInfo) {
	p.until(`document.querySelector('[data-testid=discovery]')?.dataset.state === 'found'`)
	p.accessible("the first steps")
	p.press("Connect a region")
	p.enter("#r-region", machines[0].Region)
	p.press("Network of launched workers")
	p.enter("#r-subnet", "subnet-000000a0")
	p.enter("#r-groups", "sg-0000000a")
	p.accessible("connecting a region")
	p.press("Connect")
	p.closed()
	s, err := control.Read[control.Settings](p.t.Context(), p.client, "/settings")
	if err != nil {
		p.t.Fatal(err)
	}
	i := slices.IndexFunc(s.Items, func(s settings.Setting) bool { return s.Key == "aws_region_configs" })
	b, _ := json.Marshal(s.Items[i].Value)
	var set map[string]struct {
		Groups []string `json:"security_group_ids"`
		Subnet string   `json:"subnet_id"`
	}
	if err := json.Unmarshal(b, &set); err != nil || set[machines[0].Region].Subnet != "subnet-000000a0" || !slices.Equal(set[machines[0].Region].Groups, []string{"sg-0000000a"}) {
		p.t.Errorf("the region is set as %s, %v", b, err)
	}
}

func (p *dashboardUser) imports([]sim.InstanceInfo) {
	for _, name := range []string{"first-1", "first-2"} {
		p.pressAt(`[aria-label="Select ` + name + `"]`)
	}
	p.press("Import 2 selected")
	p.enter("#i-owner", "ada@example.org")
	p.press("CML access")
	p.pressAt("#m-insecure")
	p.accessible("importing")
	p.press("Import")
	p.closed()
	for _, name := range []string{"first-1", "first-2"} {
		p.becomes(name, "imported in dry-run mode", func(w worker.Worker) bool { return !w.Armed && w.Owner == "ada@example.org" && w.TLSInsecure })
	}
	// Import into a fleet that already has workers.
	p.more("Add workers", "Import instances")
	p.pressAt(`[aria-label="Select first-3"]`)
	p.press("Import 1 selected")
	p.replace("#i-name", "third")
	p.press("CML access")
	p.pressAt("#m-insecure")
	p.press("Import")
	p.closed()
	p.becomes("third", "imported", func(w worker.Worker) bool { return w.EC2InstanceID != "" })
	p.until(`location.pathname === '/' && document.querySelectorAll('.list .body .name').length === 3`)
	p.until(`!document.querySelector('.attention')`) // a worker that was just imported needs no attention
}

func (p *dashboardUser) arms([]sim.InstanceInfo) {
	p.press("Arm all")
	p.until(`document.querySelector('dialog[open]')`)
	p.press("Arm all")
	p.closed()
	for _, name := range []string{"first-1", "first-2", "third"} {
		p.becomes(name, "armed", func(w worker.Worker) bool { return w.Armed })
	}
	p.until(`!document.querySelector('.note')`)
}

// bulk applies actions to several workers, each with one confirmation.
func (p *dashboardUser) bulk([]sim.InstanceInfo) {
	for _, name := range []string{"first-1", "first-2", "third"} {
		p.becomes(name, "running", func(w worker.Worker) bool { return w.Status == power.WorkerRunning })
	}
	p.until(`document.querySelectorAll('.list .body .badge:not(.paused, .unknown)').length === 3`)
	p.pressAt(`[aria-label="Select first-1"]`)
	p.pressAt(`[aria-label="Select first-2"]`)
	p.until(`document.querySelector('.bulk')?.innerText.includes('2 selected')`)
	p.accessible("a selection")
	p.press("Snooze for 1 hour")
	p.until(`document.querySelectorAll('dialog[open] .tag').length === 2`)
	p.press("Snooze for 1 hour")
	p.closed()
	for _, name := range []string{"first-1", "first-2"} {
		p.becomes(name, "snoozed", func(w worker.Worker) bool { return w.SnoozedUntil != nil })
	}
	if w, err := p.worker("third"); err != nil || w.SnoozedUntil != nil {
		p.t.Errorf("what was not selected: %v, %v", w.SnoozedUntil, err)
	}
	p.until(`!document.querySelector('.bulk')`)
}

func (p *dashboardUser) template([]sim.InstanceInfo) {
	p.visit(p.url + "/templates")
	p.press("New template")
	p.enter("#t-name", "small")
	p.enter("#t-instance_type", "m5.large")
	p.enter("#t-ami", "cisco-cml2.9*")
	p.enter("#t-cpu_cores", "2")
	p.enter("#t-pause", "1.5 hours")
	p.press("Launch options and CML access")
	p.pressAt("#m-insecure")
	p.accessible("a new template")
	p.picture("template")
	p.press("Save")
	p.closed()
	read := func() launch.Template {
		p.t.Helper()
		t, err := control.Read[launch.Template](p.t.Context(), p.client, "/templates/small")
		if err != nil {
			p.t.Fatal(err)
		}
		return t
	}
	if t := read(); t.InstanceType != "m5.large" || t.Capacity.CPUCores != 2 || t.IdleDetection == nil || t.IdleDetection.HibernateThresholdMinutes != 90 || !t.TLSInsecure {
		p.t.Errorf("the template is %+v", t)
	}
	p.press("Edit small")
	p.replace("#t-description", "for classes")
	p.press("Save")
	p.closed()
	if t := read(); t.Description != "for classes" || t.Capacity.CPUCores != 2 || !t.TLSInsecure {
		p.t.Errorf("the edited template is %+v", t)
	}
}

func (p *dashboardUser) creates([]sim.InstanceInfo) {
	p.visit(p.url)
	p.more("Add workers", "Create from a template…")
	p.enter("#n-name", "made")
	p.enter("#n-owner", "bob@example.org")
	p.accessible("a new worker")
	p.picture("create")
	p.press("Launch")
	p.closed()
	w := p.becomes("made", "running", func(w worker.Worker) bool {
		return w.Status == power.WorkerRunning && w.EC2InstanceID != "" && w.Owner == "bob@example.org"
	})
	if in := p.machine(w); in.State != "running" || in.Type != "m5.large" {
		p.t.Errorf("the machine of the template is %+v", in)
	}
	p.visit(p.url + "/templates")
	p.press("Scale up small")
	p.press("Add worker")
	p.closed()
	eventually(p.t, func() error {
		l, err := p.client.Workers(p.t.Context(), url.Values{"template": {"small"}})
		if err == nil && len(l) != 2 {
			err = fmt.Errorf("%d workers of the template", len(l))
		}
		return err
	})
}

func (p *dashboardUser) edits([]sim.InstanceInfo) {
	w, err := p.worker("first-1")
	if err != nil {
		p.t.Fatal(err)
	}
	p.visitWorker(w)
	p.more("More commands", "Edit…")
	p.enter("#e-idle_timeout", "nonsense")
	p.until(`document.querySelector('#e-idle_timeout').matches(':invalid')`)
	p.replace("#e-idle_timeout", "1h 30m")
	p.replace("#e-name", "renamed")
	p.replace("#e-contacts", "ada@example.org, bob@example.org")
	p.replace("#e-tags", "team=network\nenv=lab")
	p.option("#e-policy", "conservative")
	p.accessible("editing a worker")
	p.picture("edit")
	p.press("Save")
	p.closed()
	got := p.becomes("renamed", "edited", func(w worker.Worker) bool { return w.IdleTimeoutMinutes != nil })
	if *got.IdleTimeoutMinutes != 90 || got.Policy != "conservative" || len(got.Contacts) != 2 || got.Tags["env"] != "lab" || got.Owner != "ada@example.org" {
		p.t.Errorf("the edited worker is %+v", got)
	}
	p.more("More commands", "Edit…")
	p.until(`document.querySelector('#e-idle_timeout')?.value === '1 h 30 min'`)
	p.clear("#e-idle_timeout")
	p.press("Save")
	p.closed()
	p.becomes("renamed", "back to the inherited timeout", func(w worker.Worker) bool { return w.IdleTimeoutMinutes == nil && w.Policy == "conservative" })
}

func (p *dashboardUser) expiry([]sim.InstanceInfo) {
	due := func(what string, hours float64) {
		p.t.Helper()
		p.closed()
		p.becomes("renamed", what, func(w worker.Worker) bool {
			return w.TTLDeadline != nil && math.Abs(time.Until(*w.TTLDeadline).Hours()-hours) < 0.5
		})
	}
	p.more("More commands", "Expiry…")
	p.enter("#x-in", "2 days")
	p.accessible("an expiry")
	p.press("Set expiry")
	due("to expire in two days", 48)
	p.more("More commands", "Expiry…")
	p.press("Extend by 4 h")
	due("extended", 52)
	p.more("More commands", "Expiry…")
	p.press("Clear expiry")
	p.closed()
	p.becomes("renamed", "without an expiry", func(w worker.Worker) bool { return w.TTLDeadline == nil })
}

func (p *dashboardUser) license([]sim.InstanceInfo) {
	p.more("More commands", "CML license…")
	p.enter("#l-token", "token-of-the-test")
	p.accessible("a license")
	p.press("Register")
	p.closed()
	p.becomes("renamed", "registered", func(w worker.Worker) bool { return w.License.Status == worker.LicenseRegistered })
	p.until(`/license registered/.test(document.querySelector('main').innerText)`)
	p.more("More commands", "CML license…")
	p.press("Deregister")
	p.closed()
	p.becomes("renamed", "deregistered", func(w worker.Worker) bool { return w.License.Status == worker.LicenseDeregistered })
}

// rowMenu pauses and resumes a worker from the list, and checks the links to both
// consoles.
func (p *dashboardUser) rowMenu([]sim.InstanceInfo) {
	p.visit(p.url + "/?q=third")
	p.until(`document.querySelectorAll('.list .body .name').length === 1`)
	w, err := p.worker("third")
	if err != nil {
		p.t.Fatal(err)
	}
	p.press("Actions for third")
	p.until(`[...document.querySelectorAll('[role=menu] a')].some((e) => e.href.startsWith('https://us-east-1.console.aws.amazon.com/') && e.href.endsWith($1))`, w.EC2InstanceID)
	p.until(`[...document.querySelectorAll('[role=menu] a')].some((e) => e.href.startsWith($1))`, w.HTTPSEndpoint)
	p.accessible("the menu of a row")
	do(p.window, chromedp.KeyEvent(kb.Escape))
	p.until(`!document.querySelector('[role=menu]')`)
	p.more("Actions for third", "Pause…")
	p.press("Pause")
	p.closed()
	w = p.becomes("third", "stopped", func(w worker.Worker) bool { return w.Status == power.WorkerStopped })
	if in := p.machine(w); in.State != "stopped" {
		p.t.Errorf("the machine of the paused worker is %s", in.State)
	}
	p.until(`document.querySelector('.list .body .badge.paused')`)
	p.more("Actions for third", "Resume")
	p.becomes("third", "running", func(w worker.Worker) bool { return w.Status == power.WorkerRunning })
	p.until(`document.querySelector('.list .body .badge:not(.paused, .starting, .unknown)')`) // while it starts, it is not shown as a problem
}

// tokens creates a token that can sign in, and revokes it.
func (p *dashboardUser) tokens([]sim.InstanceInfo) {
	p.visit(p.url + "/tokens")
	p.press("Create token")
	p.enter("#token-name", "watch")
	p.press("Create")
	p.until(`document.querySelector('dialog .secret')`)
	given := js[string](p.window, `document.querySelector('dialog .secret').innerText`)
	p.press("Done")
	enters := func() int {
		p.t.Helper()
		req, err := http.NewRequestWithContext(p.t.Context(), "GET", p.url+"/api/v1/session", nil)
		if err != nil {
			p.t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+given)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			p.t.Fatal(err)
		}
		defer res.Body.Close()
		return res.StatusCode
	}
	if got := enters(); got != http.StatusOK {
		p.t.Errorf("the new token: %d", got)
	}
	p.press("Revoke watch")
	p.press("Revoke")
	p.closed()
	eventually(p.t, func() error {
		if got := enters(); got != http.StatusUnauthorized {
			return fmt.Errorf("the revoked token: %d", got)
		}
		return nil
	})
}

// palette opens a worker and the list of shortcuts with the keyboard alone.
func (p *dashboardUser) palette([]sim.InstanceInfo) {
	p.visit(p.url + "/tokens")
	p.until(`document.querySelector('main h1')`)
	p.key("?", 191)
	p.sees("Keyboard shortcuts")
	p.accessible("the shortcuts")
	// The palette must stay open although the closing dialog's event arrives later.
	do(p.window, chromedp.Evaluate[bool](`document.querySelector('dialog[open]').close();
		document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'k', ctrlKey: true, bubbles: true}))`))
	if !js[bool](p.window, `new Promise((done) => setTimeout(() => done(document.activeElement?.getAttribute('role') === 'combobox'), 200))`) {
		p.t.Error("the palette closed with the dialog before it")
	}
	do(p.window, chromedp.KeyEvent(kb.Escape))
	p.closed()
	do(p.window, chromedp.KeyEvent("k", chromedp.KeyModifiers(ctrlKey)))
	p.until(`document.activeElement?.getAttribute('role') === 'combobox'`)
	do(p.window, chromedp.KeyEvent("made"))
	p.until(`document.querySelector('[role=option][aria-selected=true]')?.innerText.startsWith('made')`)
	p.accessible("the palette")
	p.picture("palette")
	do(p.window, chromedp.KeyEvent(kb.Enter))
	p.until(`document.querySelector('main h1')?.innerText.startsWith('made')`)
}

// terminates terminates a worker, which requires typing the worker's name.
func (p *dashboardUser) terminates([]sim.InstanceInfo) {
	w, err := p.worker("made")
	if err != nil {
		p.t.Fatal(err)
	}
	p.visitWorker(w)
	p.more("More commands", "Terminate…")
	p.until(`document.querySelector('dialog .danger')?.getAttribute('aria-disabled') === 'true'`)
	p.enter("#t-confirm", "mad")
	p.accessible("the question before a termination")
	do(p.window, chromedp.KeyEvent(kb.Enter)) // the name has not been typed yet
	p.until(`document.querySelector('dialog .danger')?.getAttribute('aria-disabled') === 'true'`)
	if now, err := p.worker("made"); err != nil || now.Status != power.WorkerRunning {
		p.t.Errorf("before the name is complete: %s, %v", now.Status, err)
	}
	p.enter("#t-confirm", "e")
	p.press("Terminate")
	p.closed()
	w = p.becomes("made", "terminated", func(w worker.Worker) bool { return w.Status == power.WorkerTerminated })
	if in := p.machine(w); in.State != "terminated" {
		p.t.Errorf("the machine of the terminated worker is %s", in.State)
	}
}
