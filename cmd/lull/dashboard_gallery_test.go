package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// copies is a fleet of any size whose workers have copies of recorded histories. It
// serves as the fleet's evidence and as its live state.
type copies struct {
	workers []worker.Worker
	of      map[string][]string // IDs of the copies of each recorded worker
	records []evidence.Record
	status  map[string]worker.IdleStatus
	entries []audit.Entry
}

// mostTold is the maximum number of workers with entries in the audit log.
const mostTold = 60

func (p *past) copies(n int) *copies {
	c := &copies{of: map[string][]string{}, status: map[string]worker.IdleStatus{}}
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	last := map[string]evidence.Decision{}
	for _, r := range p.checks {
		c.records = append(c.records, rec.Take(r)...)
		last[r.Object] = r.Decision
	}
	c.records = append(c.records, rec.Flush()...)
	for i := range n {
		base := p.workers[i%len(p.workers)]
		w := base
		if i >= len(p.workers) {
			w.ID, w.Name = fmt.Sprintf("%s-%d", base.ID, i), fmt.Sprintf("%s%d", strings.TrimSuffix(base.Name, "1"), i)
		}
		c.of[base.ID] = append(c.of[base.ID], w.ID)
		d := last[base.ID]
		st := worker.IdleStatus{WorkerID: w.ID, Verdict: d.Verdict, IdleDuration: d.Verdict.IdleMinutes * 60, TimeoutMinutes: time.Duration(d.Policy.Timeout).Minutes(), AutoPauseEnabled: true, CheckedAt: time.Now(), Readings: d.Evidence.Readings}
		switch {
		case w.Status != power.WorkerRunning:
		case i%11 == 5:
			st.Readings = append(slices.Clone(st.Readings), idle.NotKnown("cml", time.Now(), "connection refused"))
			st.Blocks = []idle.Block{{Code: idle.SignalUnknown, Signal: "cml", Sentence: "cml cannot be read: connection refused."}}
		case i%13 == 8:
			st.Blocks = []idle.Block{{Code: idle.LeaseHeld, Holder: "nightly-build", Sentence: "nightly-build holds a lease."}}
		}
		c.status[w.ID] = st
		c.workers = append(c.workers, w)
		for _, e := range p.entries {
			if e.WorkerID == base.ID && i < mostTold {
				e.WorkerID, e.WorkerName = w.ID, w.Name
				c.entries = append(c.entries, e)
			}
		}
	}
	return c
}

func (c *copies) Read(_ context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
	for _, r := range c.records {
		if !q.From.IsZero() && r.At.Before(q.From.Add(-2*time.Hour)) || !q.To.IsZero() && r.At.After(q.To.Add(2*time.Hour)) {
			continue
		}
		for _, id := range c.of[r.Object] {
			if q.Object != "" && q.Object != id {
				continue
			}
			r.Object = id
			if err := yield(r); err != nil {
				return nil, err
			}
		}
	}
	return nil, nil
}

func (c *copies) Observation(_ context.Context, id string) (control.Observation, bool) {
	st, ok := c.status[id]
	return control.Observation{Status: &st}, ok
}

func (c *copies) Report(context.Context, string, control.AgentReport) bool { return true }

func (c *copies) Verdicts(context.Context) map[string]worker.IdleStatus { return c.status }

// put writes the fleet into a store.
func (c *copies) put(t *testing.T, db store.Store) {
	t.Helper()
	var ops []store.Op
	for _, w := range c.workers {
		data, err := store.Codec[worker.Worker]{Version: 1}.Encode("workers/"+w.ID, w)
		if err != nil {
			t.Fatal(err)
		}
		ops = append(ops, store.Put("workers/"+w.ID, data))
	}
	for _, e := range c.entries {
		more, err := audit.Ops(e)
		errtest.None(t, err)
		ops = append(ops, more...)
	}
	for part := range slices.Chunk(ops, 100) {
		errtest.Get(db.Commit(t.Context(), store.Txn{Then: part}))(t)
	}
}

// furnish adds everything but workers that a fleet in use has.
func furnish(t *testing.T, url, token string) {
	t.Helper()
	c, err := control.NewClient(url, token, nil)
	errtest.None(t, err)
	for _, x := range []struct {
		method, path string
		body         map[string]any
	}{
		{"PUT", "/templates/lab", map[string]any{"instance_type": "m5.2xlarge", "ami_name_filter": "lab-*", "description": "CML for classes", "capacity": map[string]any{"cpu_cores": 8, "memory_gb": 32, "storage_gb": 100}}},
		{"PUT", "/schedules/office", map[string]any{"zone": "Europe/Berlin", "windows": []map[string]any{{"days": "mon-fri", "from": "08:00", "to": "18:00"}}}},
		{"POST", "/policies/aggressive/apply", map[string]any{"tags": map[string]string{"team": "training"}}},
		{"POST", "/overrides", map[string]any{"kind": "keep", "selector": map[string]any{"tags": map[string]string{"team": "campus"}}, "reason": "exam week", "until": time.Now().Add(30 * time.Hour).UTC().Format(time.RFC3339)}},
		{"PATCH", "/settings", map[string]any{"notify_channels": map[string]any{"team": map[string]any{"type": "mail", "from": "lull@example.org", "relay": "127.0.0.1:9", "to": []string{"ops@example.org"}}}}},
	} {
		if _, err := control.Write[any](t.Context(), c, x.method, x.path, x.body); err != nil {
			t.Fatalf("%s: %v", x.path, err)
		}
	}
}

// TestDashboardEveryPage opens every page with fleets of several sizes, in light and
// dark, wide and narrow. It checks that each page is accessible, is no wider than the
// window, and scrolls only as a whole. With LULL_SOAK it opens all combinations and
// keeps pictures of whole pages, otherwise a sample.
func TestDashboardEveryPage(t *testing.T) {
	chrome := startBrowser(t)
	soak := os.Getenv("LULL_SOAK") != ""
	sizes := []int{0, 12}
	if soak {
		sizes = []int{0, 1, 12, 3000}
	}
	recorded := newPast()
	for _, n := range sizes {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			c := recorded.copies(n)
			db := mem.New(mem.Options{}).Client()
			t.Cleanup(db.Close)
			c.put(t, db)
			url, token := site(t, db, func(o *server.Options) { o.Evidence, o.Live = c, c })
			if n > 1 {
				furnish(t, url, token)
			}
			w := open(t, chrome, url)
			w.login(token)
			pages := []string{"", "import", "templates", "savings", "hosts", "agents", "policies", "preview", "schedules", "notifications", "audit", "settings", "tokens", "nowhere"}
			if n > 0 {
				pages = append(pages, "workers/w-routing-1")
			}
			for i, page := range pages {
				w.visit(url + "/" + page)
				for j, width := range []int64{1440, 390} {
					for k, scheme := range []string{"light", "dark"} {
						if !soak && i%4 != 2*j+k {
							continue
						}
						w.looks(page, width, scheme, soak)
					}
				}
			}
		})
	}
}

// looks checks a page in one width and theme, after it has finished loading.
func (w *window) looks(page string, width int64, scheme string, whole bool) {
	w.t.Helper()
	name := fmt.Sprintf("%s in %s, %d wide", page, scheme, width)
	w.colours(scheme)
	w.wide(width)
	w.until(`document.querySelector('main h1') && !document.querySelector('main .loading') && !document.querySelector('.plotbox:not(:has(canvas))')`)
	w.accessible(name)
	w.fits(name)
	if boxes := js[[]string](w, `[...document.querySelectorAll('main *:not(textarea)')].filter((e) => /auto|scroll/.test(getComputedStyle(e).overflowY) && e.scrollHeight > e.clientHeight + 2).map((e) => e.outerHTML.slice(0, 100))`); len(boxes) > 0 {
		w.t.Errorf("%s has boxes that scroll by themselves: %q", name, boxes)
	}
	if whole {
		height := min(js[int64](w, `document.documentElement.scrollHeight`), 3000)
		if _, err := chromedp.Call(w.ctx, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{Width: width, Height: height, DeviceScaleFactor: 1}); err != nil {
			w.t.Fatal(err)
		}
	}
	w.picture(fmt.Sprintf("%s-%d-%s", strings.ReplaceAll("fleet/"+page, "/", "-"), width, scheme))
}
