package main

import (
	_ "embed"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"lull/internal/core/idle"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/warning"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
)

// patience is the time limit for every wait of the browser tests, long enough for a
// loaded machine.
const patience = 2 * time.Minute

var unauthorized = regexp.MustCompile(`\b401\b`)

// finds is a script that returns the element that a user would press to activate a
// name: a button, link or option, in the open dialog if there is one.
const finds = `[...(document.querySelector('dialog[open]') ?? document).querySelectorAll('button, a, summary, label, select')]
	.find((e) => (e.getAttribute('aria-label') ?? e.innerText).trim() === $1 && e.getAttribute('aria-disabled') !== 'true')`

// axe is Deque's accessibility checker (MPL 2.0), unmodified.
//
//go:embed testdata/dashboard/axe.min.js
var axe string

// TestDashboard uses the dashboard of a real server over a simulated cloud in a real
// browser: it opens every page, in light and dark, and performs the actions on it.
func TestDashboard(t *testing.T) {
	chrome := startBrowser(t)
	r := newWatched(t)
	w := open(t, chrome, r.url)
	w.sees("Sign in with a token")
	w.accessible("the login")
	w.enter("#token", "lull_aaaaaaaaaa_aaaaaaaaaaaaaaaaaaaaaaaaaa")
	w.press("Sign in")
	w.until(`document.querySelector('#login-fault')`)
	w.forgive("status of 401")
	w.clear("#token")
	w.login(r.token)
	for _, step := range []struct {
		name string
		do   func(*window, *watched)
	}{{"tabs", (*window).tabs}, {"fleet", (*window).fleet}, {"warning", (*window).warning}, {"worker", (*window).worker}, {"halt", (*window).halt}, {"pages", (*window).pages}} {
		if !t.Run(step.name, func(t *testing.T) { step.do(w.in(t), r) }) {
			return // the next step depends on the state that this one should have reached
		}
	}
}

// tabs checks sessions in several tabs. A tab that a link opens is signed in too.
// Signing out in one tab, or revoking the token, ends the session in both, even in a
// page that is still loading. No script can read what the session needs.
func (w *window) tabs(r *watched) {
	const out, in = `document.querySelector('#token')`, `document.querySelector('nav')`
	other := tab(w.t, w.ctx, r.url+"/audit")
	for _, x := range []*window{w, other} {
		x.mu.Lock()
		x.ended = true
		x.mu.Unlock()
	}
	other.until(in + ` && document.querySelector('#entries')`)
	loading := `const frame = window.requestAnimationFrame.bind(window)
		window.requestAnimationFrame = (f) => {
			const oldValue = localStorage.getItem('lull-session')
			if (window.endWhileLoading && oldValue) { // while the page is first rendered
				window.endWhileLoading = false
				localStorage.removeItem('lull-session') // as another tab does
				window.dispatchEvent(new StorageEvent('storage', {key: 'lull-session', oldValue, newValue: null}))
				window.endedWhileLoading = true
			}
			return frame(f)
		}
		window.endWhileLoading = sessionStorage.getItem('endWhileLoading') === 'yes'
		sessionStorage.removeItem('endWhileLoading')`
	if _, err := chromedp.Call(other.ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: loading}); err != nil {
		w.t.Fatal(err)
	}
	js[bool](other, `(sessionStorage.setItem('endWhileLoading', 'yes'), true)`)
	other.visit(r.url)
	other.until(out)
	if !other.holds(`window.endedWhileLoading`) {
		w.t.Error("the session did not end while the page was loading")
	}
	w.until(out)
	w.login(r.token)
	other.until(in)
	if got := js[string](w, `document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage)`); strings.Contains(got, r.token[len(r.token)-20:]) || strings.Contains(got, "lull_session_") {
		w.t.Errorf("a script can read the token or the cookie: %s", got)
	}
	other.press("Sign out")
	other.until(out)
	w.until(out)
	made, err := control.Write[struct{ ID, Token string }](w.t.Context(), r.client, "POST", "/tokens", map[string]any{"name": "guest", "role": "viewer"})
	if err != nil {
		w.t.Fatal(err)
	}
	other.login(made.Token)
	w.until(in)
	if _, err := control.Write[any](w.t.Context(), r.client, "DELETE", "/tokens/"+made.ID, nil); err != nil {
		w.t.Fatal(err)
	}
	other.visit(r.url)
	other.until(out)
	w.until(out)
	w.login(r.token)
	other.until(in)
}

func (w *window) fleet(r *watched) {
	w.sees("10 workers")
	for standing, n := range map[string]string{"active": "3", "idle": "1", "pausing_soon": "2", "blocked": "2", "unknown": "1", "paused": "1"} {
		w.until(w.tile(standing)+" === $1", n)
	}
	w.both("fleet", "light", "dark")
	w.pressAt(".tile.unknown")
	w.until(`document.querySelectorAll('.list .body .name').length === 1 && document.querySelector('.list .name').innerText.includes('security-1')`)
	w.pressAt(".tile.unknown")
	w.enter("input[type=search]", "example campus")
	w.until(`document.querySelectorAll('.list .body .name').length === 2`)
	w.until(`location.search === '?q=example+campus'`)
	w.visit(r.url + "/?q=no-match")
	w.sees("No matching workers")
	w.accessible("an empty list")
}

// warning checks the links in a warning: opening one changes nothing, however often
// and by whom, and the button on its page acts once.
func (w *window) warning(r *watched) {
	link := r.mail.link(w.t, "campus-2", warning.Extend)
	state := func() worker.Worker {
		w.t.Helper()
		f, err := r.client.Worker(w.t.Context(), r.ids["campus-2"])
		if err != nil {
			w.t.Fatal(err)
		}
		return f
	}
	for _, method := range []string{"GET", "HEAD", "GET"} { // like programs that scan mail
		req, err := http.NewRequestWithContext(w.t.Context(), method, link, nil)
		if err != nil {
			w.t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			w.t.Fatal(err)
		}
		res.Body.Close()
	}
	w.visit(link)
	w.sees(`campus-2.*will be paused at.*Keep it running for another hour\?`)
	w.both("warning", "light", "dark")
	halt := func(on bool) {
		if _, err := control.Write[halt.Halt](w.t.Context(), r.client, "POST", "/halt", map[string]bool{"on": on}); err != nil {
			w.t.Fatal(err)
		}
	}
	halt(true)
	w.visit(link)
	w.sees(`is not stopped for that now: All automatic actions are halted by first-admin since 2.*Keep it running for another hour\?`)
	w.until(`!/will be paused at/.test(document.body.innerText)`)
	halt(false)
	w.visit(link)
	w.sees("will be paused at")
	if s := state(); s.SnoozedUntil != nil {
		w.t.Errorf("opening a link snoozed the worker until %v", s.SnoozedUntil)
	}
	w.press("Extend by an hour")
	w.sees("It is kept running until")
	if s := state(); s.SnoozedUntil == nil {
		w.t.Error("the answer to a warning changed nothing")
	}
	res, err := http.Post(link, "application/x-www-form-urlencoded", nil)
	if err != nil {
		w.t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusGone {
		w.t.Errorf("the same answer again: %s", res.Status)
	}
	w.visit(r.url + "/workers/" + r.ids["campus-2"])
	w.sees(`Snooze protection\s+until .*\((59|1 h)[^)]* left\)`)
}

func (w *window) worker(r *watched) {
	id := r.ids["routing-2"]
	w.visit(r.url + "/workers/" + id)
	w.until(`document.querySelector('h1 .badge.active')`)
	w.sees(`Why is it still running\?\s+Last used .* ago \(cml\); it is idle after 1 h\..*Activity & Lifecycle.*State\s+Active: \d+ (s|min) of 1 h\b.*Auto-pause\s+in \d+ min.*Recent activity`)
	w.until(`document.querySelectorAll('#recent + .scroll tbody tr').length > 3`)
	w.both("worker", "light", "dark")

	w.press("Snooze")
	w.until(`document.querySelector('dialog[open] #until')`)
	w.accessible("the snooze")
	w.press("For 2 hours")
	w.sees(`Snooze protection\s+until .*by first-admin`)
	w.press("End snooze")
	w.sees(`Snooze protection\s+none`)
	w.more("More commands", "Turn off idle detection")
	w.sees(`Idle detection\s+off`)
	w.more("More commands", "Turn on idle detection")
	w.sees(`Idle detection\s+on`)

	w.alone(r)

	w.press("Pause")
	w.sees("Pause routing-2\\?.*even if someone is using it")
	w.accessible("the question before a pause")
	w.press("Pause")
	w.sees(`Last paused.*manual, by first-admin`)
	w.sees("State\\s+Stopped\\b.*How to resume it.*Recent events")
	w.until(`!/not_idle_yet|signal_unknown|What prevents a pause/.test(document.body.innerText)`)
	w.until(`document.querySelector('h1 .badge.paused')`)
	w.press("Resume")
	w.until(`document.querySelector('h1 .badge:is(.active, .idle, .pausing_soon, .checking)') && /Last resumed\s+[^n].*by first-admin/s.test(document.body.innerText)`)

	// For a worker that has not been used lately, badge, answer and state agree.
	w.visit(r.url + "/workers/" + r.ids["research-1"])
	w.until(`document.querySelector('h1 .badge.idle')`)
	w.sees(`Why is it still running\?\s+Idle for 1 h[^.]* of 7 d\..*State\s+Idle: 1 h[^.]* of 7 d\b`)
	w.visit(r.url + "/workers/" + r.ids["security-1"])
	w.code("signal_unknown")
	w.until(`document.querySelector('h1 .badge.unknown')`)
	w.visit(r.url + "/workers/w-none")
	w.sees("Worker w-none not found")
	w.forgive("status of 404")
	w.forgive("status of 404")
}

// alone adds an exception and a policy for the worker that is shown, and removes
// both.
func (w *window) alone(r *watched) {
	w.press("Add exception")
	w.until(`document.querySelector('dialog[open] #o-reason')`)
	w.accessible("an exception for one worker")
	w.enter("#o-reason", "a demo")
	w.press("Add")
	w.sees(`Exception\s+Keep running, until .* by first-admin: a demo`)
	l, err := control.Read[control.List[control.Exception]](w.t.Context(), r.client, "/overrides")
	if err != nil || len(l.Items) != 1 || !slices.Equal(l.Items[0].Selector.Workers, []string{r.ids["routing-2"]}) {
		w.t.Errorf("exceptions: %+v, %v", l.Items, err)
	}
	w.picture("worker-exception")
	w.press("End the exception for routing-2")
	w.until(`!/Keep running, until/.test(document.body.innerText)`)
	choose := func(policy, shows string) {
		w.press("Change policy")
		w.until(`document.querySelector('#w-policy')`)
		js[bool](w, `(() => { const e = document.querySelector('#w-policy'); e.value = $1; e.dispatchEvent(new Event('change', {bubbles: true})); return true })()`, policy)
		w.accessible("the choice of a policy")
		w.press("Apply")
		w.sees(shows)
	}
	choose("conservative", `Policy\s+conservative set on this worker\s+Idle timeout\s+4 h\b`)
	choose("", `Idle timeout\s+1 h\b`)
}

// Modifier keys of the DevTools protocol.
const ctrlKey, shiftKey = 2, 8

func (w *window) halt(r *watched) {
	w.visit(r.url + "/")
	w.press("Halt")
	w.sees("Stop all automatic actions")
	w.enter("#halt-reason", "the network is moved")
	js[bool](w, `(() => { const e = document.querySelector('#halt-hours'); e.value = '4'; e.dispatchEvent(new Event('change', {bubbles: true})); return true })()`)
	w.accessible("the question before a halt")
	w.press("Halt everything")
	w.sees(`Halted\. All.*: the network is moved\. Ends automatically in [34] hours`)
	for _, path := range []string{"/", "/audit", "/settings", "/workers/" + r.ids["campus-1"]} {
		w.visit(r.url + path)
		w.sees(`Halted\. All automatic actions are stopped\s+by first-admin`)
	}
	w.visit(r.url)
	w.until(`document.querySelector('.tile.pausing_soon') && !/paused if nothing happens/.test(document.body.innerText)`)
	w.both("halted", "light")
	w.press("Lift the halt")
	w.until(`!document.querySelector('.banner.halt')`)
}

func (w *window) pages(r *watched) {
	w.hosts(r)
	w.agents(r)
	for i, p := range []struct{ path, text string }{
		{"policies", "aggressive.*hibernates after 15 min.*conservative"},
		{"schedules", "No schedules yet"},
		{"notifications", "mail.*Working.*delivered"},
		{"audit", "Imported.*first-admin"},
		{"settings", "worker_idle_timeout_minutes.*60 minutes"},
		{"tokens", "first-admin"},
	} {
		w.visit(r.url + "/" + p.path)
		w.sees(p.text)
		w.both(p.path, []string{"light", "dark"}[i%2])
	}
	w.visit(r.url + "/settings")
	w.press("Change worker_warn_before_minutes")
	w.clear("#value")
	w.enter("#value", "5000")
	w.press("Save")
	w.refused("is not between")
	w.forgive("status of 422")
	w.clear("#value")
	w.enter("#value", "7")
	w.press("Save")
	w.until(`!document.querySelector('dialog[open]')`)
	w.until(`/worker_warn_before_minutes[^]*?7 minutes\s[^]*?stored/.test(document.body.innerText)`)

	w.visit(r.url + "/tokens")
	w.press("Create token")
	w.enter("#token-name", "night watch")
	w.press("Create")
	w.until(`document.querySelector('dialog[open] .secret')?.innerText.startsWith('lull_')`)
	w.press("Done")
	w.press("Revoke night watch")
	w.sees("Revoke night watch\\?")
	w.press("Revoke")
	w.sees("night watch.*revoked")
	w.visit(r.url + "/nowhere")
	w.sees("Page not found")
	w.early(r)
	w.audit(r)
	w.channels(r)
	w.rules(r)
}

// early checks the savings of a server that has run for minutes only: no rate, no
// weekly pattern and no repeated lines, and a note that there is not enough data yet.
func (w *window) early(r *watched) {
	w.visit(r.url + "/savings")
	w.until(`document.querySelector('[data-testid=early]')`)
	w.until(`!document.querySelector('.heat, .heatmap, [data-chart]')`)
	if text := js[string](w, `document.querySelector('main').innerText`); strings.Contains(text, " a day") {
		w.t.Errorf("the savings of minutes have a rate: %s", text)
	}
	if twice := js[[]string](w, `[...document.querySelectorAll('.causes .what strong, .numbers tbody th')].map((e) => e.innerText).filter((t, i, all) => all.indexOf(t) !== i)`); len(twice) > 0 {
		w.t.Errorf("there twice: %q", twice)
	}
	w.both("savings-early", "light", "dark")
	w.visit(r.url)
	w.until(`document.querySelector('.saved')?.innerText.trim()`)
	if text := js[string](w, `document.querySelector('.saved').innerText`); strings.Contains(text, " a day") {
		w.t.Errorf("the fleet shows a rate: %s", text)
	}
}

// audit searches the audit log by worker, user and kind of actor, back beyond the
// first page, and in the table that is downloaded.
func (w *window) audit(r *watched) {
	for i := range 60 {
		for _, body := range []map[string]any{{"minutes": 60 + i}, {}} {
			if _, err := control.Write[any](w.t.Context(), r.client, "POST", "/workers/"+r.ids["campus-1"]+"/snooze", body); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	w.visit(r.url + "/audit")
	w.sees(`100 entries, older ones not loaded.*Snoozed\s+campus-1\s+first-admin`)
	w.tabTo("Load more")
	do(w, chromedp.KeyEvent(kb.Enter))
	w.until(`document.querySelectorAll('#entries tbody tr').length > 120`)
	w.until(`((all) => new Set(all).size === all.length)([...document.querySelectorAll('#entries tbody tr')].map((e) => e.dataset.entry + e.innerText))`)
	w.enter("input[name=worker]", "routing-2")
	w.enter("input[name=by]", "FIRST")
	js[bool](w, `(document.querySelector('select[name=kind]').value = 'person', true)`)
	w.press("Filter")
	w.until(`/worker_id=/.test(location.search) && document.querySelectorAll('#entries tbody tr').length > 2`)
	w.until(`[...document.querySelectorAll('#entries tbody tr')].every((e) => /routing-2\s+first-admin/.test(e.innerText))`)
	w.until(`document.querySelector('input[name=worker]').value === 'routing-2'`)
	w.both("audit-filtered", "light", "dark")
	js[bool](w, `(() => { const plain = URL.createObjectURL; URL.createObjectURL = (b) => { window.exported = b.text(); return plain.call(URL, b) }; HTMLAnchorElement.prototype.click = () => {}; return true })()`)
	w.press("Export CSV")
	w.until(`window.exported`)
	lines := strings.Split(strings.TrimSpace(js[string](w, `window.exported`)), "\n")
	if want := "at,id,action,worker,worker_id,aws_region,by,by_kind,from,to,reason,detail"; lines[0] != want || len(lines) < 3 ||
		slices.ContainsFunc(lines[1:], func(l string) bool { return !strings.Contains(l, ",routing-2,") }) {
		w.t.Errorf("the exported table is %.400q", lines)
	}
	w.enter("input[name=worker]", "-none")
	w.press("Filter")
	w.until(`document.querySelector('.filters [role=alert]')`)
	w.forgive("status of 404")
	w.visit(r.url + "/audit?by=no-match")
	w.sees("No matching entries")
}

// channels adds a mailbox that also sends to each worker's contacts, changes it on
// the settings page, and removes it.
func (w *window) channels(r *watched) {
	contacts := func() bool {
		w.t.Helper()
		s, err := control.Read[control.Settings](w.t.Context(), r.client, "/settings")
		if err != nil {
			w.t.Fatal(err)
		}
		for _, v := range s.Items {
			if v.Key == "notify_channels" {
				team, _ := v.Value.(map[string]any)["team"].(map[string]any)
				return team["to_contacts"] == true
			}
		}
		return false
	}
	w.visit(r.url + "/notifications")
	w.press("Add channel")
	w.enter("#c-name", "team")
	w.enter("#c-from", "lull@example.org")
	w.enter("#c-relay", "127.0.0.1:9")
	w.press("Save")
	w.refused("it needs 1 to 50 addresses")
	w.forgive("status of 422")
	w.pressAt("#c-to_contacts")
	w.accessible("a new channel")
	w.picture("channel")
	w.press("Save")
	w.sees("team.*Email to each worker's contacts")
	if !contacts() {
		w.t.Error("the box for the workers' contacts changed nothing")
	}
	w.visit(r.url + "/settings")
	w.sees("team: email to each worker's contacts")
	w.press("Change notify_channels")
	w.until(`document.querySelector('#c-which')`)
	js[bool](w, `(() => { const e = document.querySelector('#c-which'); e.value = 'team'; e.dispatchEvent(new Event('change', {bubbles: true})); return true })()`)
	w.until(`document.querySelector('#c-to_contacts').checked`)
	w.enter("#c-to", "ops@example.org")
	w.pressAt("#c-to_contacts")
	w.press("Save")
	w.sees("team: email to ops@example.org")
	if contacts() {
		w.t.Error("the box for the workers' contacts stays")
	}
	w.visit(r.url + "/notifications")
	w.press("Remove team")
	w.press("Remove")
	w.until(`!/Email to ops/.test(document.body.innerText)`)
	w.sees("mail.*Working")
}

// hosts checks the pages about hosts.
func (w *window) hosts(r *watched) {
	r.hosts()
	w.visit(r.url + "/hosts")
	w.sees(`1 of 2 stopped reporting.*attic\s+stopped reporting.*unknown.*desk\s+reporting.*1 running, 1 paused.*200 MiB of 8 GiB`)
	w.both("hosts", "light", "dark")
	w.press("desk")
	w.sees(`db process\s+running.*keeps running\s+lease ci \(backup\), 2 connections.*127\.0\.0\.1:5432.*web process\s+paused`)
	w.both("host", "light", "dark")
	w.press("db")
	for end := time.Now().Add(patience); time.Now().Before(end); do(w, chromedp.Reload()) {
		w.sees(`Why is it running\?.*2 connections are open`)
		if !w.holds(`/did not answer in time/.test(document.body.innerText)`) {
			break // retry: on a loaded machine, desk may miss its time limit of 1.5 s
		}
	}
	w.sees(`Why is it running\?.*2 connections are open.*checked.*2 connections are open`)
	w.code("connection_open")
	w.both("instance", "light", "dark")
	w.visit(r.url + "/hosts/attic")
	w.sees(`Its last report was at.*cam process\s+unknown\s+was running`)
	w.both("a silent host", "light", "dark")
	w.press("cam")
	w.sees(`Readings: unknown`)
	w.visit(r.url + "/hosts/desk/none")
	w.sees("Host desk has no instance none")
	w.forgive("status of 404")
	w.visit(r.url + "/hosts/missing")
	w.sees("Host missing not found")
	w.forgive("status of 404")
}

// agents checks that the page shows which server a machine reports to, and marks
// silent and outdated machines. Two agents of another server are added to the
// listing in the browser; the server's tests check the format of real ones.
func (w *window) agents(r *watched) {
	w.visit(r.url + "/agents")
	w.sees("No agents yet")
	now := time.Now()
	if _, err := control.Write[any](w.t.Context(), r.client, "POST", "/agents/lab-7/report", control.AgentReport{At: now, StartedAt: now, BootID: "b",
		Version: "1.2.3", Interval: idle.Duration(time.Minute), LastUse: now, Idle: 4, Holder: "agent",
		Readings: []idle.Reading{idle.Judge("cpu", 2, 5, "%", time.Minute, now)}}); err != nil {
		w.t.Fatal(err)
	}
	js[bool](w, `(() => {
		const plain = window.fetch
		window.fetch = async (at, o) => {
			const answer = await plain(at, o)
			if (!String(at.url ?? at).includes('/agents?')) return answer
			const list = await answer.json()
			list.items.push({name: 'lab-8', kind: 'agent', server: 'another', reported_at: new Date().toISOString(), age_seconds: 5, version: '0.9.0', outdated: true},
				{name: 'lab-9', kind: 'agent', server: 'another', reported_at: new Date(0).toISOString(), age_seconds: 5e7, version: '1.2.3', stale: true})
			return new Response(JSON.stringify(list), {headers: {'Content-Type': 'application/json'}})
		}
		return true
	})()`)
	w.sees("2 report to server another.*1 has stopped reporting.*1 runs an older version.*lab-7.*Idle for 4 min.*Version 1\\.2\\.3.*cpu.*quiet.*" +
		"lab-8.*to server another.*Reports to server another.*Version 0\\.9\\.0, older than its server.*lab-9.*Stopped reporting")
	w.both("agents", "light")
}

// rules creates a schedule, a policy and an exception, and assigns them to workers.
func (w *window) rules(r *watched) {
	w.visit(r.url + "/schedules")
	w.press("New schedule")
	w.enter("#s-name", "office")
	w.clear("#s-zone")
	w.enter("#s-zone", "Europe/Nowhere")
	w.press("Save")
	w.refused("zone")
	w.forgive("status of 422")
	w.clear("#s-zone")
	w.enter("#s-zone", "Europe/Berlin")
	w.press("Save")
	w.sees("office.*(Open|Closed) now, (opens|closes) in .*Europe/Berlin")
	w.until(`document.querySelectorAll('.week .bar').length === 5`)
	w.both("schedule", "light")
	w.press("Edit office")
	w.until(`document.querySelector('.weekgrid [data-day="4"][data-slot="35"].on') && !document.querySelector('.weekgrid [data-day="5"] .on, .weekgrid [data-slot="36"].on')`)
	w.pressAt(`.weekgrid [data-day="5"][data-slot="20"]`) // Saturday at 10:00
	do(w, chromedp.KeyEvent(kb.ArrowRight, chromedp.KeyModifiers(shiftKey)))
	w.until(`document.querySelector('.weekgrid [data-day="5"][data-slot="21"].on')`)
	w.accessible("the week of a schedule")
	w.picture("week-grid")
	w.press("Save")
	w.until(`!document.querySelector('dialog[open]')`)
	if office, err := control.Read[struct {
		Windows []struct{ Days, From, To string }
	}](w.t.Context(), r.client, "/schedules/office"); err != nil || fmt.Sprint(office.Windows) != "[{mon-fri 08:00 18:00} {sat 10:00 11:00}]" {
		w.t.Errorf("the painted week is %v, %v", office.Windows, err)
	}
	w.press("Edit office")
	w.press("One-time windows, exact times, maintenance and holidays")
	w.clear("#s-windows")
	w.enter("#s-windows", "mon-fri 08:00-18:00\n2026-11-25 22:00-06:00 hold")
	w.enter("#s-grace", "25")
	w.press("Save")
	w.sees(`quiet for 25 min`)
	w.sees(`hold: open, nothing is paused.*2026-11-25 22:00 to 06:00 of the next day\s+hold`)
	w.until(`document.querySelectorAll('.week .bar').length === 6`)
	w.until(`[...document.querySelectorAll('.week text')].every((e) => e.getBoundingClientRect().right <= e.ownerSVGElement.getBoundingClientRect().right)`)
	w.picture("schedule-held")

	w.visit(r.url + "/policies")
	w.press("New policy")
	w.enter("#p-name", "patient")
	w.enter("#p-idle_timeout_minutes", "500")
	w.press("Save")
	w.sees("patient.*pauses after 8 h 20 min")
	w.press("Apply patient")
	w.enter("#a-region", "eu-west-1")
	w.press("Apply")
	w.sees(`Groups.*all in eu-west-1\s+patient`)
	w.press("Add exception")
	w.press("Add")
	w.refused("whole fleet")
	w.enter("#o-workers", "campus-1")
	w.press("Add")
	w.sees("Keep running campus-1, until")
	l, err := control.Read[control.List[control.Exception]](w.t.Context(), r.client, "/overrides")
	if err != nil || len(l.Items) != 1 || !slices.Equal(l.Items[0].Selector.Workers, []string{r.ids["campus-1"]}) {
		w.t.Errorf("exceptions: %+v, %v", l.Items, err)
	}
	w.press("Add exception")
	w.pressAt("#o-all")
	w.press("Add")
	w.sees("Keep running the whole fleet, until")
	w.press("End the exception for the whole fleet")
	w.press("Add exception")
	w.enter("#o-tags", "team=network")
	js[bool](w, `(() => { const e = document.querySelector('#o-until'); e.value = new Date(Date.now() + 7200e3).toISOString().slice(0, 16); e.dispatchEvent(new Event('input', {bubbles: true})); return true })()`)
	w.press("Add")
	w.sees("Keep running team=network, until")
	w.picture("policies-used")
	w.narrow(r.url)
	w.visit(r.url + "/workers/" + r.ids["research-2"])
	w.sees(`Rules.*Policy\s+patient.*Idle timeout\s+8 h 20 min`)
}

// narrow checks pages at the width of a phone: none is wider, and the menu shows
// every page.
func (w *window) narrow(url string) {
	w.t.Helper()
	w.wide(390)
	for page, ready := range map[string]string{"policies": "Groups.*eu-west-1", "settings": "worker_idle_timeout_minutes", "schedules": "office", "": "workers", "tokens": "admin", "audit": "Imported", "notifications": "Notifications"} {
		w.visit(url + "/" + page)
		w.sees(ready)
		w.fits("the page " + page)
		w.until(`document.querySelector('nav').getBoundingClientRect().height < 64`) // the menu has one line
		w.pressAt("nav button.pages")
		w.until(`[...document.querySelectorAll('nav li a, nav .theme select')].every((a) => { const r = a.getBoundingClientRect(); return r.width > 0 && r.left >= 0 && r.right <= innerWidth && r.bottom <= innerHeight })`)
		w.pressAt("nav button.pages")
		w.picture("narrow-" + page)
	}
	w.wide(1360)
}

var resumes = regexp.MustCompile(`(?i)\r\nLast-Event-ID: (\d+)`)
