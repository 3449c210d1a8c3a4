package agent

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/protocol/agentctl"
)

// TestHistoryHasItsEdges checks that the history contains the starts and ends of the
// agent and the machine's suspends, so that the time in between does not count as
// watched.
func TestHistoryHasItsEdges(t *testing.T) {
	w, kept := newWorld(), &MemoryJournal{}
	w.tune = func(o *Options) { o.Journal = kept }
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		w.start(t, ctx)
		time.Sleep(10 * time.Minute)
		w.with(func() { w.slept += 3 * time.Hour })
		time.Sleep(10 * time.Minute)
		cancel()
		synctest.Wait()
		list, err := kept.Entries(agentctl.HistoryQuery{})
		errtest.None(t, err)
		if len(list) < 4 || list[0].Kind != "start" || list[len(list)-1].Kind != "end" {
			t.Fatalf("%+v", list)
		}
		i := slices.IndexFunc(list, func(e agentctl.Entry) bool { return e.Kind == "resume" })
		if i < 0 || time.Duration(list[i].Slept).Round(time.Second) != 3*time.Hour {
			t.Errorf("the resume: %+v", list)
		}
	})
}
