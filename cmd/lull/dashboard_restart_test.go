package main

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"lull/bench/rig"
	"lull/internal/fleet/audit"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
)

// TestDashboardServerRestarts kills and restarts a real server under an open page,
// again and again, while things happen. It checks that everything that was
// acknowledged is then on the page, once and in order, and that the newest entry on
// the page never gets older.
func TestDashboardServerRestarts(t *testing.T) {
	chrome := startBrowser(t)
	bin, err := exec.LookPath("lull")
	errtest.None(t, err)
	r, err := rig.New(t.Context(), rig.Region{Bin: bin, Scenario: "regions: [{name: us-east-1}]\nprofiles: {used: {labs: 1, history: 20, history_age: 1m, history_span: 100h}}\nworkers: [{name: lab, count: 3, type: m5.large, profile: used}]\n"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	serve := func() string {
		errtest.None(t, r.Serve(t.Context(), "--log-level", "error"))
		return strings.TrimPrefix(r.URL, "http://")
	}
	way := newRoad(t, serve())
	w := open(t, chrome, "http://"+way.l.Addr().String()+"/audit")
	w.login(r.Token)
	w.until(`document.querySelector('.link.live')`)
	w.mu.Lock()
	w.cut = true
	w.mu.Unlock()
	js[bool](w, `(() => {
		window.tops = []
		new MutationObserver(() => { const top = Number(document.querySelector('#entries [data-entry]')?.dataset.entry ?? 0); if (top !== window.tops.at(-1)) window.tops.push(top) })
			.observe(document.querySelector('main'), {subtree: true, childList: true, attributes: true})
		return true
	})()`)
	acknowledged := 0
	snooze := func() error {
		_, err := control.Write[any](t.Context(), r.Client, "POST", "/workers/"+r.IDs[acknowledged%3]+"/snooze", map[string]any{"minutes": 60 + acknowledged})
		if err == nil {
			acknowledged++
		}
		return err
	}
	for round := range 3 {
		for range 10 {
			errtest.None(t, snooze())
		}
		gone := make(chan error)
		go func() { // keep connecting until the server no longer answers
			for snooze() == nil {
			}
			close(gone)
		}()
		errtest.None(t, r.Server.Process.Kill())
		_ = r.Server.Wait() // an error, because it was killed
		<-gone
		w.until(`document.querySelector('.link.offline')`)
		to := serve()
		for range 10 { // until the page has noticed that the server is gone
			errtest.None(t, snooze())
		}
		way.lead(to)
		w.until(`document.querySelector('.link.live')`)
		l, err := control.Read[control.List[audit.Entry]](t.Context(), r.Client, "/audit?newest=true&limit=1000&action=snoozed")
		errtest.None(t, err)
		var want []int64
		for _, e := range l.Items {
			want = append(want, e.ID)
		}
		if len(want) < acknowledged {
			t.Fatalf("round %d: %d entries of %d changes", round, len(want), acknowledged)
		}
		// Repeated entries are folded into the row of the newest.
		const shown = `[...document.querySelectorAll('#entries [data-entry]')].flatMap((e) => [e.dataset.entry, ...(e.dataset.folded ?? '').split(' ').filter(Boolean)]).map(Number)`
		w.until(`((all) => $1.every((id) => all.includes(id)))(`+shown+`)`, want)
		got := slices.DeleteFunc(js[[]int64](w, shown), func(id int64) bool { return !slices.Contains(want, id) })
		if !slices.Equal(got, want) {
			t.Errorf("round %d: the page shows %v, want %v", round, got, want)
		}
	}
	tops := js[[]int64](w, `window.tops`)
	if !slices.IsSorted(tops) || len(tops) < 3 { // at least one for each round; several changes may be drawn at once
		t.Errorf("the newest entry that is shown went back: %v", tops)
	}
	report := fmt.Sprintf("dashboard over 3 killed servers: %d changes, each on the page once", acknowledged)
	t.Log(report)
	keep(t, "report.txt", func() []byte { return []byte(report + "\n") })
}
