package worker_test

import (
	"strings"
	"testing"
	"time"

	"lull/internal/fleet/worker"
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
		{h(14, 14, 62), true, "3 pauses were 14h long"},
		{h(48, 48, 48), true, "at most 2d"},
		{h(49, 49, 1), false, "more than 2d"},
		{h(1, 100, 2, 200, 3), true, "median"},
	} {
		if got, why := worker.HibernatePays(c.pauses); got != c.want || !strings.Contains(why, c.why) {
			t.Errorf("%v: %v, %q", c.pauses, got, why)
		}
	}
}
