package main

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/heapprofiler"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"lull/bench/rig"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
	"lull/internal/sim"
)

// crowdScenario has 10,000 instances in three regions, of which three percent run. Of
// those, some are in use, some are idle, and some are unknown.
const crowdScenario = `regions: [{name: us-east-1}, {name: eu-west-1}, {name: us-west-2}]
timing: {pending: 1s, stopping: 1s, background: -1s}
profiles:
  used: {labs: 1, history: 20, history_age: 1m, history_span: 100h}
  left: {history: 20, history_age: 20h, history_span: 400h}
  silent: {no_opt_in: true}
workers:
  - {name: used, count: 100, type: m5.xlarge, profile: used}
  - {name: left, count: 120, type: m5.xlarge, profile: left, elastic_ip: true}
  - {name: left-eu, count: 60, type: m5.2xlarge, profile: left, region: eu-west-1, elastic_ip: true}
  - {name: silent, count: 20, type: m5.xlarge, profile: silent}
  - {name: lab, count: 6500, type: m5.xlarge, state: stopped}
  - {name: west, count: 3200, type: c5.metal, state: stopped, region: us-west-2}
`

// newCrowd runs a real server in a process of its own that owns and observes the
// crowd.
func newCrowd(t *testing.T) *rig.Rig {
	t.Helper()
	bin, err := exec.LookPath("lull")
	errtest.None(t, err)
	n := 0
	r, err := rig.New(t.Context(), rig.Region{Bin: bin, Scenario: crowdScenario, Each: func(in sim.InstanceInfo, w *worker.Worker) {
		w.Owner, w.Tags = fmt.Sprintf("team%d@example.org", n%40), map[string]string{"team": fmt.Sprint(n % 40)}
		n++
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	settings := r.File("server.yaml")
	errtest.None(t, os.WriteFile(settings, []byte("idle_detection_interval: 30\n"), 0o600))
	errtest.None(t, r.Serve(t.Context(), "--config", settings, "--log-level", "error"))
	return r
}

// overview returns the server's overview of the workers that a query selects.
func overview(t *testing.T, c *control.Client, q url.Values) control.Overview {
	t.Helper()
	o, err := control.Read[control.Overview](t.Context(), c, "/overview?"+q.Encode())
	errtest.None(t, err)
	return o
}

// TestDashboardOfTenThousand opens the page of a real server with 10,000 workers of a
// simulated cloud. It scrolls, searches, filters and sorts by mouse and by keyboard
// while the server observes the running workers. It checks that the page holds as few
// rows as with ten workers, and that it shows changes of any of them.
func TestDashboardOfTenThousand(t *testing.T) {
	chrome := startBrowser(t)
	r := newCrowd(t)
	within(t, 5*patience, func() error { // until the running workers have been checked
		o := overview(t, r.Client, url.Values{"limit": {"1"}})
		if o.Total != 10_000 || o.Counts[control.StandingActive] == 0 || o.Counts[control.StandingUnknown] != 20 {
			return fmt.Errorf("%d workers: %v", o.Total, o.Counts)
		}
		return nil
	})
	w := open(t, chrome, r.URL)
	w.login(r.Token)
	w.sees("10,000 workers: [0-9]+ in use")
	w.visit(r.URL) // like a returning visitor
	w.until(`document.querySelectorAll('.list .body .name').length > 5`)
	const useful = `performance.getEntriesByName('lull:fleet')[0]`
	w.until(useful) // an effect sets this, possibly after the rows appear
	took := js[float64](w, useful+`.startTime`)
	w.until(`document.querySelector('[aria-rowcount="10001"]')`)
	w.both("ten-thousand", "light", "dark")
	w.scrolls(overview(t, r.Client, url.Values{"limit": {"1"}, "offset": {"9999"}}).Items[0].Name)
	w.narrows(r)
	w.changes(r)
	errtest.Get(chromedp.Call(w.ctx, heapprofiler.CollectGarbage, cdp.Empty{}))(t)
	heap, nodes := js[float64](w, `performance.memory.usedJSHeapSize`)/(1<<20), js[int](w, `document.querySelectorAll('*').length`)
	report := fmt.Sprintf("dashboard of 10,000 workers on a real server: useful after %.0f ms, %.1f MiB of heap, %d elements", took, heap, nodes)
	t.Log(report)
	keep(t, "report.txt", func() []byte { return []byte(report + "\n") })
	if heap > 64 || nodes > 2500 {
		t.Errorf("the page holds %.1f MiB and %d elements", heap, nodes)
	}
	w.wide(390)
	w.visit(r.URL)
	w.until(`document.querySelectorAll('.list .body .name').length > 3`)
	w.until(`document.documentElement.scrollWidth <= document.documentElement.clientWidth`)
	w.both("ten-thousand-narrow", "light")
}

// scrolls scrolls to the end of the list and back: with the wheel, with End and Home,
// and row by row.
func (w *window) scrolls(last string) {
	w.t.Helper()
	for range 10 {
		if _, err := chromedp.Call(w.ctx, input.DispatchMouseEvent, input.DispatchMouseEventParams{Type: "mouseWheel", X: 600, Y: 600, DeltaX: 0.01, DeltaY: 5200}); err != nil {
			w.t.Fatal(err)
		}
	}
	const seen = `[...document.querySelectorAll('.list .body .row')].filter((e) => { const r = e.getBoundingClientRect(); return r.bottom > 0 && r.top < innerHeight })`
	w.until(`scrollY > 20000 && ` + seen + `.length > 5 && ` + seen + `.every((e) => e.querySelector('.name'))`) // the visible rows have content
	js[bool](w, `(document.activeElement.blur(), true)`)
	w.key("End", 35)
	w.until(seen+`.some((e) => e.querySelector('.name a')?.innerText === $1)`, last)
	w.picture("ten-thousand-end")
	w.key("Home", 36)
	w.until(`scrollY === 0 && document.querySelector('[data-index="0"] .name a')`)
	js[bool](w, `(document.querySelector('[data-index="0"] a').focus(), true)`)
	w.key("PageDown", 34)
	w.until(`document.activeElement.closest('[data-index="10"]')`)
	for n := range 20 {
		w.key("ArrowDown", 40)
		w.until(`document.activeElement.closest('[data-index="` + fmt.Sprint(11+n) + `"]')`)
	}
}

// narrows searches, filters and sorts, and compares what the page shows with the
// server's answers.
func (w *window) narrows(r *rig.Rig) {
	w.t.Helper()
	shows := func(q url.Values) {
		w.t.Helper()
		o := overview(w.t, r.Client, q)
		if o.Matched == 0 {
			w.t.Fatalf("nothing matches %v", q)
		}
		w.until(`document.querySelector('.list')?.getAttribute('aria-rowcount') === $1`, fmt.Sprint(o.Matched+1))
		w.until(`document.querySelector('[data-index="0"] .name a')?.innerText === $1`, o.Items[0].Name)
	}
	js[bool](w, `(document.activeElement.blur(), true)`)
	w.key("/", 191) // works wherever the focus is
	w.until(`document.activeElement.type === 'search'`)
	do(w, chromedp.KeyEvent("team=27 "))
	w.until(`document.activeElement.value === 'team=27 '`)
	shows(url.Values{"q": {"team=27"}}) // the space stays if the user pauses after typing it
	do(w, chromedp.KeyEvent("lab"))
	w.until(`document.activeElement.value === 'team=27 lab'`)
	shows(url.Values{"q": {"team=27 lab"}})
	for range len("team=27 lab") {
		do(w, chromedp.KeyEvent(kb.Backspace))
	}
	shows(url.Values{})
	// Tab continues to the region.
	w.tab()
	w.until(`document.activeElement.closest('label')?.innerText.startsWith('Region')`)
	do(w, chromedp.KeyEvent(kb.ArrowDown))
	shows(url.Values{"aws_region": {"eu-west-1"}})
	w.more("Views", "Longest idle first")
	shows(url.Values{"aws_region": {"eu-west-1"}, "sort": {"idle"}})
	w.press("Owner")
	shows(url.Values{"aws_region": {"eu-west-1"}, "sort": {"owner"}})
	w.pressAt("[aria-sort] button.sort")
	shows(url.Values{"aws_region": {"eu-west-1"}, "sort": {"owner"}, "reverse": {"true"}})
	w.visit(r.URL)
	w.pressAt(".tile.unknown")
	shows(url.Values{"standing": {"unknown"}})
	w.until(`[...document.querySelectorAll('.list .body .badge')].every((e) => e.classList.contains('unknown'))`)
	w.accessible("a filtered fleet of ten thousand")
	w.pressAt(".tile.unknown")
	shows(url.Values{})
}

// changes pauses one of the ten thousand workers and uses another, and checks that
// the page shows both changes.
func (w *window) changes(r *rig.Rig) {
	w.t.Helper()
	w.visit(r.URL + "/?q=left-eu")
	w.until(`document.querySelector('[data-index="0"] .badge:not(.paused)')`)
	row := overview(w.t, r.Client, url.Values{"q": {"left-eu"}}).Items[0]
	if _, err := control.Write[any](w.t.Context(), r.Client, "POST", "/workers/"+row.ID+"/pause", nil); err != nil {
		w.t.Fatal(err)
	}
	w.until(`document.querySelector('[data-index="0"] .name a').innerText === $1 && document.querySelector('[data-index="0"] .badge.paused')`, row.Name)
	row = overview(w.t, r.Client, url.Values{"q": {"left-eu"}, "offset": {"1"}}).Items[0]
	res, err := http.Post(r.Sim+"/sim/instances/"+row.Name+"/events", "application/json", strings.NewReader(`{"category": "start_lab", "user": "alice"}`))
	if err != nil {
		w.t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusOK {
		w.t.Fatalf("cannot use %s: %s", row.Name, res.Status)
	}
	if _, err := r.Client.DetectIdle(w.t.Context(), row.ID); err != nil {
		w.t.Fatal(err)
	}
	w.until(`[...document.querySelectorAll('.list .body .row')].some((e) => e.querySelector('.name a')?.innerText === $1 && e.querySelector('.badge.active'))`, row.Name)
	w.picture("ten-thousand-changed")
}
