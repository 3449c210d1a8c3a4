package main

import (
	"context"
	"fmt"
	"math"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"

	"lull/bench/rig"
	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	costs "lull/internal/core/savings"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/platform/etcd"
	"lull/internal/platform/journal"
	"lull/internal/platform/oidc/oidctest"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/server/agents"
	"lull/internal/server/web"
	"lull/internal/sim"
	"lull/internal/store"
)

// site serves a server over db, with the dashboard, until the test ends.
func site(t *testing.T, db store.Store, more func(*server.Options)) (url, token string) {
	t.Helper()
	f, err := fleet.New(fleet.Options{Store: db, ID: "site"})
	if err != nil {
		t.Fatal(err)
	}
	tokens := access.New(db)
	if token, err = tokens.First(t.Context()); err != nil {
		t.Fatal(err)
	}
	o := server.Options{Fleet: f, Tokens: tokens, Version: "test", Web: web.Handler()}
	more(&o)
	api, err := server.New(o)
	errtest.None(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- api.Run(ctx) }()
	s := httptest.NewServer(api.Handler())
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		s.CloseClientConnections()
		s.Close()
	})
	<-api.Ready()
	return s.URL, token
}

// past holds the records of some workers and the state that they led to.
type past struct {
	checks  []evidence.Record
	entries []audit.Entry
	workers []worker.Worker
	script  map[string][]slot // activity of each worker, by name
}

// slot is a worker's activity in five minutes: u (in use), i (idle), s (stopped) or ?
// (unknown).
type slot struct {
	at   time.Time
	what byte
}

// habit describes how a worker is used.
type habit struct {
	name, team, size string
	from, to         int // start and end of the working hours
	timeout          time.Duration
	lease            int  // day on whose night a lease is held; -1 for none
	unreadable       bool // CloudWatch cannot be read for some hours
}

const recordedDays = 8

// play simulates a worker for some days with the idle engine: a user works and
// leaves, the worker is warned of and paused, and the user returns the next morning.
func (p *past) play(h habit, now time.Time) {
	id := "w-" + h.name
	begun := now.Add(-recordedDays * 24 * time.Hour)
	w := worker.Worker{ID: id, Name: h.name, AWSRegion: "us-east-1", InstanceType: h.size, TemplateName: "lab", Owner: h.team + "@example.org", Tags: map[string]string{"team": h.team},
		Armed: true, CreatedAt: begun, Status: power.WorkerRunning, DesiredStatus: power.WorkerRunning, IsIdleDetectionEnabled: true, Policy: "balanced"}
	policy := idle.Policy{Name: "balanced", Timeout: idle.Duration(h.timeout), WarnBefore: idle.Duration(10 * time.Minute), Snooze: idle.Duration(30 * time.Minute), CheckInterval: idle.Duration(5 * time.Minute),
		Detection: true, AutoPause: true, Signals: []string{"cml", "cloudwatch"}, Action: "stop"}
	var active, warned, resumed, wake time.Time
	change := func(at time.Time, from, to power.Worker, by audit.Actor, event, reason string) {
		e := audit.Entry{At: at, Action: "status_changed", By: by, WorkerID: id, WorkerName: h.name, Region: w.AWSRegion, From: from, To: to, Reason: reason}
		if event != "" {
			e.Events = []string{event}
		}
		p.entries = append(p.entries, e)
		w.Status, w.StatusSince = to, at
	}
	change(begun, power.WorkerProvisioning, power.WorkerRunning, audit.ByController, "", "")
	var last evidence.Decision
	for n := 0; ; n++ {
		at := begun.Add(time.Duration(n) * 5 * time.Minute)
		if at.After(now) {
			break
		}
		// The simulated days are shifted so that the present is always five in the
		// afternoon.
		day, hour := (n+17*12)/288, (n+17*12)%288/12
		working := hour >= h.from && hour < h.to && day != 3 && (hour != 12 || n%12 > 8)
		did := func(what byte) { p.script[h.name] = append(p.script[h.name], slot{at, what}) }
		if w.Status == power.WorkerStopped {
			if !working {
				did('s')
				continue
			}
			did('u')
			alice := audit.Actor{Name: "alice@example.org", Kind: audit.KindUser}
			change(at, power.WorkerStopped, power.WorkerStarting, alice, "", "manual")
			wake, resumed = at.Add(2*time.Minute), at.Add(2*time.Minute)
			change(wake, power.WorkerStarting, power.WorkerRunning, audit.ByController, audit.EventResumed, "manual")
			w.ManualResumeCount++
			w.LastResumedAt, w.LastResumedBy = &resumed, alice.Name
			continue
		}
		cpu := 1.1 + 0.7*math.Sin(float64(n)/5)
		if working {
			active = at.Add(-time.Minute)
			cpu = max(34+22*math.Sin(float64(n)/7)+9*math.Sin(float64(n)*1.7), 8) // always above the threshold
		}
		if h.lease >= 0 && day == h.lease && hour >= 20 && hour < 23 {
			cpu += 3
		}
		ago := now.Sub(at)
		if h.unreadable && ago > 100*time.Minute && ago < 170*time.Minute {
			did('?')
			continue // not checked
		}
		used := idle.Reading{Signal: "cml", State: idle.Quiet, At: at, LastEvent: active, MaxAge: idle.Duration(15 * time.Minute)}
		if !active.IsZero() && at.Sub(active) < 5*time.Minute {
			used.State = idle.Active
		}
		load := idle.Judge("cloudwatch", math.Round(max(cpu, 0.2)*10)/10, 5, "%", 5*time.Minute, at)
		if h.unreadable && ago > 4*time.Hour && ago < 5*time.Hour {
			load = idle.NotKnown("cloudwatch", at, "throttled")
		}
		switch {
		case working:
			did('u')
		case load.State == idle.Unknown:
			did('?')
		default:
			did('i')
		}
		e := idle.Evidence{Status: "RUNNING", Running: true, LastActivityAt: active, LastResumedAt: resumed, CreatedAt: begun, WarningSentAt: warned, Readings: []idle.Reading{used, load}}
		if load.State == idle.Active {
			e.LastActivityAt = at
		}
		if h.lease >= 0 && day == h.lease && hour >= 17 {
			e.Leases = []idle.Lease{{Holder: "nightly-build", Reason: "the build of the lab images", ExpiresAt: at.Truncate(time.Hour).Add(time.Duration(24-hour) * time.Hour)}}
		}
		last = evidence.Decide(at, policy, e)
		p.checks = append(p.checks, evidence.Record{At: last.Verdict.At, Object: id, Region: w.AWSRegion, Next: at.Add(5 * time.Minute), Decision: last})
		switch {
		case last.Verdict.WarnDue:
			warned = at
		case last.Verdict.Eligible:
			change(at, power.WorkerRunning, power.WorkerStopping, audit.ByController, audit.EventPaused, "idle_timeout")
			change(at.Add(time.Minute), power.WorkerStopping, power.WorkerStopped, audit.ByController, "", "")
			warned, w.DesiredStatus = time.Time{}, power.WorkerStopped
			w.AutoPauseCount++
			stopped := at
			w.LastPausedAt, w.LastPausedBy, w.PauseReason = &stopped, audit.ByController.Name, "idle_timeout"
			continue
		case working:
			warned = time.Time{}
		}
		w.DesiredStatus = power.WorkerRunning
	}
	if !active.IsZero() {
		seen := active
		w.LastActivityAt = &seen
	}
	p.workers = append(p.workers, w)
}

// laptop simulates some days of a machine that is no worker, as its agent reports
// them: in use by day, with a lease one evening, and silent for an hour.
func (p *past) laptop(name string, now time.Time) {
	begun := now.Add(-recordedDays * 24 * time.Hour)
	told := agents.New(func(r evidence.Record) { p.checks = append(p.checks, r) })
	used := begun
	for n := 0; ; n++ {
		at := begun.Add(time.Duration(n) * 5 * time.Minute)
		if at.After(now) {
			break
		}
		ago, hour := now.Sub(at), (n+17*12)%288/12
		if ago > 3*time.Hour && ago < 4*time.Hour {
			continue
		}
		cpu := 1.5 + math.Sin(float64(n)/5)
		if hour >= 9 && hour < 16 {
			cpu, used = math.Round(30+20*math.Sin(float64(n)/7)), at
		}
		r := control.AgentReport{At: at, Sequence: uint64(n + 1), StartedAt: begun, BootID: "b", Version: "v1", Interval: idle.Duration(5 * time.Minute), LastUse: used,
			Readings: []idle.Reading{idle.Judge("cpu", cpu, 5, "%", time.Minute, at), idle.Judge("network", 2, 10, "KB/min", time.Minute, at), {Signal: "users", State: idle.Quiet, At: at, LastEvent: begun}},
			Judged:   &control.AgentJudged{Policy: idle.Policy{Name: "agent", Timeout: idle.Duration(24 * time.Hour), WarnBefore: idle.Duration(5 * time.Minute), CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true, Action: "stop"}}}
		if hour == 16 {
			r.Judged.Leases = []idle.Lease{{Holder: "training", Reason: "epoch 3", ExpiresAt: at.Truncate(time.Hour).Add(time.Hour)}}
		}
		told.Take(name, r, at)
	}
}

// newPast simulates a week of four workers and of a laptop.
func newPast() *past {
	p := &past{script: map[string][]slot{}}
	now := time.Now().UTC().Truncate(time.Second)
	for _, h := range []habit{
		{name: "routing-1", team: "network", size: "m5.2xlarge", from: 8, to: 18, timeout: time.Hour, lease: recordedDays - 2, unreadable: true},
		{name: "campus-1", team: "campus", size: "m5.xlarge", from: 9, to: 16, timeout: 2 * time.Hour, lease: -1},
		{name: "training-1", team: "training", size: "c5.metal", from: 10, to: 13, timeout: 4 * time.Hour, lease: 2},
		{name: "unpriced-1", team: "research", size: "m1.small", from: 7, to: 11, timeout: time.Hour, lease: -1},
	} {
		p.play(h, now)
	}
	p.laptop("lab-7", now)
	slices.SortStableFunc(p.checks, func(a, b evidence.Record) int { return a.At.Compare(b.At) })
	return p
}

// scenario returns a region with the workers in the state in which the week has left
// them.
func (p *past) scenario() string {
	var b strings.Builder
	b.WriteString("regions: [{name: us-east-1}]\ntiming: {background: 1h}\nprofiles: {used: {labs: 3, history: 60, history_age: 2m, history_span: 100h}}\nworkers:\n")
	for _, w := range p.workers {
		fmt.Fprintf(&b, "  - {name: %s, type: %s, profile: used, elastic_ip: true, state: %s}\n", w.Name, w.InstanceType, strings.ToLower(string(w.Status)))
	}
	return b.String()
}

// keep writes the past to the server's store and journal. The server must not be
// running yet.
func (p *past) keep(t *testing.T, r *rig.Rig) {
	t.Helper()
	db, err := etcd.OpenEmbedded(t.Context(), etcd.EmbeddedConfig{Dir: r.File("data"), NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	var ops []store.Op
	for _, e := range p.entries {
		entry, err := audit.Ops(e)
		errtest.None(t, err)
		ops = append(ops, entry...)
	}
	for part := range slices.Chunk(ops, 100) {
		errtest.Get(db.Commit(t.Context(), store.Txn{Then: part}))(t)
	}
	errtest.None(t, db.Close())
	j, _, err := journal.Open(filepath.Join(r.File("data"), "evidence"), journal.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range p.checks {
		j.Take(c)
	}
	errtest.None(t, j.Close())
}

// serve runs a real server in a process of its own, which has recorded the week and
// continues with the workers of a simulated cloud.
func (p *past) serve(t *testing.T, args ...string) *rig.Rig {
	t.Helper()
	bin, err := exec.LookPath("lull")
	errtest.None(t, err)
	r, err := rig.New(t.Context(), rig.Region{Bin: bin, Scenario: p.scenario(), Each: func(in sim.InstanceInfo, w *worker.Worker) {
		i := slices.IndexFunc(p.workers, func(x worker.Worker) bool { return x.Name == in.Name })
		was := p.workers[i]
		was.EC2InstanceID, was.EC2State, was.TLSInsecure, was.PauseHolder, was.License = w.EC2InstanceID, w.EC2State, true, w.PauseHolder, w.License
		was.PublicIP, was.PrivateIP, was.HTTPSEndpoint, was.CMLVersion, was.CMLReady, was.RunningSince = w.PublicIP, w.PrivateIP, w.HTTPSEndpoint, w.CMLVersion, w.CMLReady, w.RunningSince
		was.RecentActivityEvents, was.AcceptedRisks = w.RecentActivityEvents, w.AcceptedRisks
		*w = was
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	p.keep(t, r)
	settings := r.File("server.yaml")
	errtest.None(t, os.WriteFile(settings, []byte("idle_detection_interval: 10\n"), 0o600))
	errtest.None(t, r.Serve(t.Context(), append(args, "--config", settings, "--log-level", "error")...))
	within(t, 5*patience, func() error { // until every worker has been checked, as on a server that was never interrupted
		if o := overview(t, r.Client, url.Values{"standing": {"unknown"}}); o.Matched > 0 {
			return fmt.Errorf("%d workers have not been checked yet", o.Matched)
		}
		return nil
	})
	return r
}

// wide sets the width of the page.
func (w *window) wide(width int64) {
	w.t.Helper()
	if _, err := chromedp.Call(w.ctx, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{Width: width, Height: 1100, DeviceScaleFactor: 1}); err != nil {
		w.t.Fatal(err)
	}
}

// TestDashboardOfThePast reads the records of a real server as a user would: a
// worker's timeline by mouse and by keyboard, why at a past time, the effect of
// another policy, and the savings. It also signs in through an OIDC issuer.
func TestDashboardOfThePast(t *testing.T) {
	chrome := startBrowser(t)
	issuer := oidctest.New(t)
	recorded := newPast()
	r := recorded.serve(t, "--oidc-issuer", issuer.URL, "--oidc-client-id", "lull", "--oidc-role-claim", "groups", "--oidc-roles", "*=viewer")
	url, token, c := r.URL, r.Token, r.Client
	errtest.Get(control.Write[any](t.Context(), c, "PUT", "/templates/lab", map[string]any{"instance_type": "m5.2xlarge", "ami_name_filter": "lab-*", "capacity": map[string]any{"storage_gb": 100}}))(t)
	errtest.Get(control.Write[any](t.Context(), c, "PUT", "/schedules/office", map[string]any{"zone": "UTC", "windows": []map[string]any{{"days": "mon-fri", "from": "08:00", "to": "18:00"}}}))(t)
	w := open(t, chrome, url)
	w.sees("Sign in with 127.0.0.1")
	w.accessible("the login with an issuer")
	w.picture("login")
	w.press("Sign in with 127.0.0.1")
	w.sees(`\(viewer\).*Sign out`)
	w.press("Sign out")
	w.login(token)
	t.Run("timeline", func(t *testing.T) { w.in(t).timeline(url) })
	t.Run("charts", func(t *testing.T) { w.in(t).charts(url) })
	t.Run("agent", func(t *testing.T) { w.in(t).agent(url) })
	t.Run("preview", func(t *testing.T) { w.in(t).preview(url) })
	t.Run("savings", func(t *testing.T) { w.in(t).savings(url) })
	t.Run("heat", func(t *testing.T) { w.in(t).heat(url, recorded) })
	w.wide(390)
	for _, page := range []string{"workers/w-routing-1", "agents/lab-7", "preview", "savings"} {
		w.visit(url + "/" + page)
		w.until(`document.querySelector('.chart svg, .trial, .sums')`)
		w.fits(page)
		w.picture(fmt.Sprintf("narrow-%d", len(page)))
	}
}

func (w *window) timeline(url string) {
	w.visit(url + "/workers/w-routing-1")
	w.sees(`Timeline.*Running.*Unknown.*Signal active`)
	w.until(`document.querySelector('.chart svg path.active')?.getAttribute('d').length > 10`)
	w.wide(1360)
	w.both("timeline", "light", "dark")
	// Unrecorded time is hatched and not shown as quiet.
	w.press("Show as tables")
	w.sees(`States, newest first.*Unknown\s+No data recorded`)
	w.sees(`cloudwatch\s+5 %\s+\d`)
	w.accessible("the tables of a timeline")

	// By keyboard: move an hour back in the timeline, and open why at that time.
	js[bool](w, `(document.querySelector('.chart').focus(), true)`)
	before := js[int](w, `Number(document.querySelector('.chart').getAttribute('aria-valuenow'))`)
	w.key("ArrowLeft", 37)
	w.until(`Number(document.querySelector('.chart').getAttribute('aria-valuenow')) < $1`, before)
	w.key("PageDown", 34)
	w.until(`Number(document.querySelector('.chart').getAttribute('aria-valuenow')) <= $1 - 60`, before)
	w.until(`/Running.*cloudwatch active \d/.test(document.querySelector('.chart').getAttribute('aria-valuetext'))`)
	w.key("Enter", 13)
	w.until(`new URLSearchParams(location.search).get('at')`)
	w.sees(`Explanation for .*Why was it running\?.*From the check at.*cloudwatch\s+active.*What prevented a pause.*Details`)
	w.accessible("why at a past time")
	w.picture("why-then")
	w.press("Close")
	w.until(`!document.querySelector('.past') && location.search === ''`)

	w.press("7 d")
	w.sees(`Paused.*lease held`)
	w.until(`document.querySelectorAll('.mark.pause').length > 3 && document.querySelectorAll('.mark.resume').length > 3`)
	w.both("timeline-week", "dark")
	// By mouse: click in the middle of a pause.
	at := js[[]float64](w, `(() => { const c = document.querySelector('.chart'); c.scrollIntoView({block: 'center'}); const r = c.getBoundingClientRect(); const m = [...document.querySelectorAll('.on.paused')].pop().getBoundingClientRect(); return [m.x + m.width / 2, r.y + 30] })()`)
	do(w, chromedp.MouseClickXY(at[0], at[1]))
	w.sees(`Why was it stopped\?.*stopped it at .*idle timeout`)
	w.press("Close")

	w.until(`document.querySelector('#at')`)
	js[bool](w, `(() => { const e = document.querySelector('#at'); e.value = '2001-02-03T04:05'; e.dispatchEvent(new Event('input', {bubbles: true})); return true })()`)
	w.press("Explain")
	w.sees(`lull did not know it yet|No check at or before that time is recorded`)
	w.press("Close")
}

// charts checks the charts of CPU, activity and cost. In unrecorded time, a chart
// must say unknown and draw no line.
func (w *window) charts(url string) {
	w.visit(url + "/workers/w-routing-1")
	w.until(`['CPU', 'In use', 'Compute cost'].every((c) => document.querySelector('[data-chart="' + c + '"] canvas'))`)
	w.both("charts", "light", "dark")
	cpu := `document.querySelector('[data-chart="CPU"] .plotbox')`
	if n := js[int](w, `Number(`+cpu+`.dataset.gaps)`); n == 0 {
		w.t.Error("unrecorded time is no gap")
	}
	js[bool](w, `(`+cpu+`.focus(), true)`)
	const said = `.getAttribute('aria-valuetext').includes(' %')`
	for range 2 { // to an hour ago
		w.key("ArrowLeft", 37)
	}
	w.until(cpu + said)
	// ink returns how many pixels the line has at a time in the past.
	ink := func(back time.Duration) int {
		return js[int](w, `(() => {
			const plot = document.querySelector('[data-chart="CPU"]'), c = plot.querySelector('canvas'), a = c.getBoundingClientRect(), o = plot.querySelector('.u-over').getBoundingClientRect()
			const probe = document.createElement('i'); probe.style.color = 'var(--accent)'; plot.append(probe)
			const want = getComputedStyle(probe).color.match(/\d+/g).map(Number); probe.remove()
			const x = Math.round((o.left - a.left + o.width * (1 - $1 / 24)) * devicePixelRatio), d = c.getContext('2d').getImageData(x - 1, 0, 3, c.height).data
			let n = 0
			for (let i = 0; i < d.length; i += 4) if ([0, 1, 2].every((k) => Math.abs(d[i + k] - want[k]) < 12)) n++
			return n
		})()`, back.Hours())
	}
	var line, gap int // a chart is drawn again after a change of colors
	if !waittest.Within(patience, func() bool { line, gap = ink(time.Hour), ink(135*time.Minute); return line > 0 && gap == 0 }) {
		w.t.Errorf("the line has %d pixels where there are readings, and %d where there are none", line, gap)
	}
	for range 2 { // to two hours ago, when the worker was not checked
		w.key("ArrowLeft", 37)
	}
	w.until(`!` + cpu + said)
	js[bool](w, `(document.querySelector('[data-chart="CPU"] details').open = true)`)
	w.until(`document.querySelectorAll('[data-chart="CPU"] tbody tr').length === 24`)
	w.accessible("charts")
	w.visit(url + "/workers/w-unpriced-1")
	w.until(`document.querySelector('[data-unpriced]') && !document.querySelector('[data-chart="Compute cost"]')`)
}

// heat compares the cells of the heat map with what the workers did in the script.
func (w *window) heat(url string, p *past) {
	w.visit(url + "/savings?by=worker&days=30")
	w.until(`document.querySelector('.heatcells canvas')?.dataset.rows > 2`)
	w.both("heat", "light", "dark")
	published, err := costs.Published()
	if err != nil {
		w.t.Fatal(err)
	}
	for name, slots := range p.script {
		row := `document.querySelector('[data-heat="w-` + name + `"]')`
		var hours [168]map[byte]int
		idleHours := 0.0
		for _, s := range slots {
			at := s.at.Local()
			h := (int(at.Weekday())+6)%7*24 + at.Hour()
			if hours[h] == nil {
				hours[h] = map[byte]int{}
			}
			hours[h][s.what]++
			if s.what == 'i' {
				idleHours += 1.0 / 12
			}
		}
		cells := js[string](w, row+`.dataset.cells`)
		compared := 0
		for h, did := range hours {
			all := 0
			for _, n := range did {
				all += n
			}
			for what, n := range did {
				if n*10 < all*8 { // a use counts for ten more minutes
					continue
				}
				if compared++; cells[h] != what {
					w.t.Errorf("%s, hour %d of the week: %q, the script has %q: %v", name, h, cells[h], what, did)
				}
			}
		}
		if compared < 100 {
			w.t.Errorf("%s: only %d hours of the week compared", name, compared)
		}
		i := slices.IndexFunc(p.workers, func(x worker.Worker) bool { return x.Name == name })
		price := published.Hour("us-east-1", p.workers[i].InstanceType)
		usd := js[string](w, row+`.dataset.usd`)
		if price == nil && usd != "" {
			w.t.Errorf("%s has no price and costs %q", name, usd)
		}
		if price != nil {
			if got, err := strconv.ParseFloat(usd, 64); err != nil || math.Abs(got-*price*idleHours) > *price*(1+idleHours/10) {
				w.t.Errorf("%s: the idle time costs %s, want about %.2f", name, usd, *price*idleHours)
			}
		}
	}
	js[bool](w, `(document.querySelector('.heatcells').focus(), true)`)
	w.key("ArrowRight", 39)
	w.key("ArrowRight", 39)
	w.until(`document.querySelector('.heatcells').getAttribute('aria-valuenow') === '1' && document.querySelector('.heatcursor')`)
	w.accessible("the heat map")
}

// agent checks the pages about the same past of a machine with an agent.
func (w *window) agent(url string) {
	w.visit(url + "/agents/lab-7")
	w.sees(`lab-7.*Timeline.*Running.*Unknown.*Signal active`)
	w.until(`document.querySelector('.chart svg path.active')?.getAttribute('d').length > 10`)
	w.sees(`Signals.*cpu\s+(active|quiet).*5 %`)
	w.both("agent", "light", "dark")
	w.press("Show as tables")
	w.sees(`States, newest first.*Unknown\s+No data recorded`)
	js[bool](w, `(document.querySelector('.chart').focus(), true)`)
	before := js[int](w, `Number(document.querySelector('.chart').getAttribute('aria-valuenow'))`)
	w.key("PageDown", 34)
	w.until(`Number(document.querySelector('.chart').getAttribute('aria-valuenow')) < $1 - 50`, before) // an hour back from the nearest five minutes
	w.key("Enter", 13)
	w.until(`new URLSearchParams(location.search).get('at')`)
	w.sees(`Explanation for .*Why was it running\?.*From the check at.*cpu\s+(active|quiet)`)
	w.accessible("why at a past time of an agent")
	w.press("Close")
	w.until(`!document.querySelector('.past') && location.search === ''`)
	w.until(`document.querySelector('#at')`)
	js[bool](w, `(() => { const e = document.querySelector('#at'); e.value = '2001-02-03T04:05'; e.dispatchEvent(new Event('input', {bubbles: true})); return true })()`)
	w.press("Explain")
	w.sees(`No check at or before that time is recorded`)
	w.press("Close")
	w.visit(url + "/agents/missing")
	w.sees("Agent missing not found")
	w.forgive("status of 404")
}

// key presses a key by its name.
func (w *window) key(name string, code int64) {
	w.t.Helper()
	for _, kind := range []input.DispatchKeyEventType{"rawKeyDown", "keyUp"} {
		if _, err := chromedp.Call(w.ctx, input.DispatchKeyEvent, input.DispatchKeyEventParams{Type: kind, Key: name, Code: name, WindowsVirtualKeyCode: code}); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *window) preview(url string) {
	w.visit(url + "/policies")
	w.press("Preview aggressive")
	w.sees("Preview.*A preview changes nothing")
	w.until(`document.querySelector('#one-name').value === 'aggressive' && document.querySelector('#one-timeout').value === '15 min'`)
	w.press("Compare with another policy")
	js[bool](w, `(() => { const e = document.querySelector('#two-name'); e.value = 'conservative'; e.dispatchEvent(new Event('change', {bubbles: true})); return true })()`)
	w.press("Preview")
	w.sees(`What it would have done.*aggressive.*conservative.*Pauses\s+\d+\s+\d+.*False stops.*Saved.*\$`)
	w.both("preview", "light", "dark")
	w.press("Pauses of aggressive")
	w.sees("the user came back")

	w.clear("#one-timeout")
	w.enter("#one-timeout", "45")
	w.press("Preview")
	w.sees(`aggressive, changed\s+idle after 45 min`)

	// Other settings of a simulated policy.
	for _, v := range []string{"one-schedule:office", "one-sources:cml,agent"} {
		js[bool](w, `(() => { const [id, v] = $1.split(':'), e = document.querySelector('#' + id); e.value = v; e.dispatchEvent(new Event('change', {bubbles: true})); return true })()`, v)
	}
	w.press("Preview")
	w.sees(`aggressive, changed\s+idle after 45 min, schedule office.*Unknown hours`)
	w.accessible("a preview of what a policy can say")
	w.picture("preview-changed")

	// Thresholds for agents: how the laptop's day is judged with them.
	js[bool](w, `(() => { const e = document.querySelector('#of'); e.value = 'agents'; e.dispatchEvent(new Event('change', {bubbles: true})); return true })()`)
	w.until(`document.querySelector('#one-cpu') && !document.querySelector('#one-schedule')`)
	w.press("Preview")
	w.sees(`What it would have done.*aggressive, changed.*Pauses\s+[1-9]\d*\s`)
	before := js[string](w, `document.querySelector('table.outcomes').innerText.match(/Hours avoided\s+([\d.,]+)/)[1]`)
	w.enter("#one-cpu", "45")
	w.press("Preview")
	w.until(`Number(document.querySelector('table.outcomes')?.innerText.match(/Hours avoided\s+([\d.,]+)/)?.[1].replace(',', '')) > Number($1.replace(',', ''))`, before)
	w.both("preview-agents", "light", "dark")
	w.press("Pauses of aggressive, changed")
	w.until(`document.querySelector('details a[href^="/agents/lab-7?at="]')`)
}

func (w *window) savings(url string) {
	w.press("Savings")
	w.sees(`Savings.*\$[\d,.]+.*saved.*a day.*avoided.*By worker.*unpriced-1\s.*unknown.*routing-1.*All`)
	w.sees(`Remaining idle time.*Lease.*Not recorded|Remaining idle time.*Not recorded.*Lease`)
	w.until(`document.querySelectorAll('.heat rect').length === 168 && document.querySelectorAll('.heat rect.l5').length > 0`)
	w.both("savings", "light", "dark")
	js[bool](w, `(() => { const e = document.querySelector('.filters select'); e.value = 'tag'; e.dispatchEvent(new Event('change', {bubbles: true})); return true })()`)
	w.sees(`By tag team.*training.*network`)
	// The exported file equals the output of the command line.
	js[bool](w, `(() => { const plain = URL.createObjectURL; URL.createObjectURL = (b) => { window.exported = b.text(); return plain.call(URL, b) }; HTMLAnchorElement.prototype.click = () => {}; return true })()`)
	w.press("Export CSV")
	w.until(`window.exported`)
	text := js[string](w, `window.exported`)
	if want := "from,to,tag:team,name,workers,running_hours,avoided_hours"; len(text) < len(want) || text[:len(want)] != want {
		w.t.Errorf("the exported table begins with %.200q", text)
	}
}

// reader is a journal whose first read blocks halfway, until its caller gives up.
type reader struct {
	records []evidence.Record

	mu   sync.Mutex
	slow bool
	gone chan struct{} // closed when the caller has given up
}

func (p *reader) Read(ctx context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
	p.mu.Lock()
	slow := p.slow
	p.slow = false
	p.mu.Unlock()
	for i, r := range p.records {
		if q.Object != "" && r.Object != q.Object || !q.From.IsZero() && r.At.Before(q.From.Add(-2*time.Hour)) || !q.To.IsZero() && r.At.After(q.To.Add(2*time.Hour)) {
			continue
		}
		if err := yield(r); err != nil {
			return nil, err
		}
		if slow && i > len(p.records)/2 {
			for range 5 {
				pause() // so that progress is reported for the next entries
			}
			if err := yield(r); err != nil {
				return nil, err
			}
			<-ctx.Done()
			close(p.gone)
			return nil, ctx.Err()
		}
	}
	return nil, nil
}
