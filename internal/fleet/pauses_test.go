package fleet_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/fleet"
	"lull/internal/power"
	"lull/internal/store"
)

func TestHibernatePays(t *testing.T) {
	h := func(hours ...int) (out []time.Duration) {
		for _, n := range hours {
			out = append(out, time.Duration(n)*time.Hour)
		}
		return out
	}
	for _, c := range []struct {
		pauses []time.Duration
		want   bool
		why    string
	}{
		{nil, false, "0 of its pauses are known"},
		{h(1, 1), false, "2 of its pauses are known"},
		{h(14, 14, 62), true, "3 pauses were 14h0m0s"},
		{h(48, 48, 48), true, "at most 48h"},
		{h(49, 49, 1), false, "more than 48h"},
		{h(1, 100, 2, 200, 3), true, "median"},
	} {
		if got, why := fleet.HibernatePays(c.pauses); got != c.want || !strings.Contains(why, c.why) {
			t.Errorf("%v: %v, %q", c.pauses, got, why)
		}
	}
}

// TestPastPauses reads them from the log: those that have ended, newest first,
// without that of another worker and without one that a termination ended.
func TestPastPauses(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		move := func(id string, from, to power.Worker, after time.Duration) {
			ops, err := fleet.EntryOps(fleet.Entry{Action: "status_changed", WorkerID: id, From: from, To: to})
			if err == nil {
				_, err = fl.Store().Commit(t.Context(), store.Txn{Then: ops})
			}
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(after)
		}
		for i := range 25 {
			move("w", power.WorkerStopping, power.WorkerStopped, time.Duration(i+1)*time.Hour)
			move("w", power.WorkerStopped, power.WorkerStarting, time.Minute)
			move("w", power.WorkerStarting, power.WorkerRunning, time.Hour)
			move("other", power.WorkerStopping, power.WorkerStopped, time.Second)
		}
		move("w", power.WorkerStopping, power.WorkerStopped, time.Hour)
		move("w", power.WorkerStopped, power.WorkerTerminating, 0)
		got, err := fl.PastPauses(t.Context(), "w")
		var want []time.Duration
		for i := 25; i > 5; i-- {
			want = append(want, time.Duration(i)*time.Hour)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%v, want %v: %v", got, want, err)
		}
	})
}
