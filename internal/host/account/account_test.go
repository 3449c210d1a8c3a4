package account

import (
	"context"
	"slices"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/why"
	"lull/internal/protocol/hostctl"
)

// TestExplain checks which remedies an explanation offers.
func TestExplain(t *testing.T) {
	for _, row := range []struct {
		o    hostctl.Instance
		want []string
	}{
		{hostctl.Instance{Name: "a", State: "running"}, nil},
		{hostctl.Instance{Name: "a", State: "paused"}, []string{"lull resume a"}},
		{hostctl.Instance{Name: "a", State: "hibernated", WakesOnConnection: true}, []string{"a connection to it, or: lull resume a"}},
		{hostctl.Instance{Name: "a", State: "stopped"}, []string{"lull start a"}},
		{hostctl.Instance{Name: "a", State: "stopping"}, []string{}},
	} {
		y := hostctl.Why{Instance: row.o}
		Explain(&y)
		if !slices.Equal(y.Change, row.want) {
			t.Errorf("%s: change %q, want %q", row.o.State, y.Change, row.want)
		}
	}
}

// journal returns its records like the journal of evidence.
type journal []evidence.Record

func (j journal) Read(_ context.Context, q evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
	for _, r := range j {
		if r.Object == q.Object {
			if err := yield(r); err != nil {
				return nil, err
			}
		}
	}
	return nil, nil
}

// TestThen checks that a past state is the one after the last change before that
// time, and that later changes and other instances are ignored.
func TestThen(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(1000+s), 0) }
	change := func(object, to, by string, s int) evidence.Record {
		return evidence.Record{At: at(s), Object: object, Change: &evidence.Change{To: to, By: by, Reason: "r"}}
	}
	j := journal{change("a", "running", "manual", 0), change("b", "stopped", "manual", 5), change("a", "paused", "idle_timeout", 10),
		change("a", "running", "connection", 20), change("a", "stopped", "manual", 30)}
	for _, row := range []struct {
		s                      int
		state, paused, resumed string
	}{{5, "running", "", "manual"}, {15, "paused", "idle_timeout", "manual"}, {25, "running", "idle_timeout", "connection"}, {35, "stopped", "idle_timeout", "connection"}} {
		y, err := Then(t.Context(), j, why.Account{Object: "a", Name: "a", Kind: why.KindInstance}, at(row.s), hostctl.Why{})
		by := func(turn *evidence.Turn) string {
			if turn == nil {
				return ""
			}
			return turn.By
		}
		if err != nil || y.Account.State != row.state || by(y.Paused) != row.paused || by(y.Resumed) != row.resumed {
			t.Errorf("at %d: %s, paused by %q, resumed by %q, %v; want %+v", row.s, y.Account.State, by(y.Paused), by(y.Resumed), err, row)
		}
	}
}
