package policy

import (
	"strings"
	"testing"
	"time"

	"lull/internal/core/policy/when"
)

// TestBudgetSaysWhatItHolds checks that a budget by percentage is described with
// the resulting number, and that a budget whose schedule is closed limits
// nothing, however many actions were counted.
func TestBudgetSaysWhatItHolds(t *testing.T) {
	now := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC) // a Monday
	share, from, to := 10.0, when.Clock(13*60), when.Clock(14*60)
	b := Budget{Name: "gently", For: Stops, MaxPercent: &share, PerMinutes: 60}
	spent := Spent{}.Add(now, b.Per())
	if u := b.State(now, spent, 6); u.Free || u.Sentence != "Budget gently is used up: at most 10% stops in 1h, which is 1 now, and 1 counts now." {
		t.Errorf("%+v", u)
	}
	later := Schedule{Name: "later", Zone: "UTC", Windows: []Window{{Days: when.Every, From: from, To: to}}}
	b.During = "later"
	s := New(nil, []Schedule{later}, nil, nil, []Budget{b})
	for _, c := range []struct {
		at   time.Time
		free bool
		says string
	}{{now, true, "does not limit anything now, because its schedule later is not active"}, {now.Add(61 * time.Minute), false, "is used up"}} {
		if u := s.StateOf(c.at, &b, spent.Add(c.at, b.Per()), 6); u.Free != c.free || !strings.Contains(u.Sentence, c.says) {
			t.Errorf("at %s: %+v", c.at, u)
		}
	}
	c := s.Schedules["later"]
	if st, err := c.State(now.Add(61*time.Minute), time.Time{}, nil); err != nil || st.NextOpen == nil || !st.NextOpen.Equal(now.Add(25*time.Hour)) || !st.NextClose.Equal(now.Add(2*time.Hour)) {
		t.Errorf("open, it opens next at %+v, %v", st, err)
	}
}
