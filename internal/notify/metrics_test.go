package notify_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"lull/internal/fleet/audit"
)

// gauge returns a metric of a process; -1 if it has none of that name.
func (p *process) gauge(name string) (float64, error) {
	reg := prometheus.NewRegistry()
	if err := reg.Register(p.Notifier); err != nil {
		return 0, err
	}
	families, err := reg.Gather()
	for _, f := range families {
		if f.GetName() == name {
			m := f.GetMetric()[0]
			return m.GetGauge().GetValue() + m.GetCounter().GetValue(), err
		}
	}
	return -1, err
}

// TestPendingIsDue checks the metric of pending events: those that wait for a digest
// do not count, those that the receiver delays do, and a process that does not
// deliver reports none. Counters must exist before their first event.
func TestPendingIsDue(t *testing.T) {
	bubble(t, func(ctx context.Context) error {
		w := newTown(`{"ops":{"type":"webhook","url":"http://receiver/","digest":"4h"}}`, 1)
		p, err := w.notifier(ctx)
		if err != nil {
			return err
		}
		is := func(name string, want float64) error {
			if got, err := p.gauge(name); err != nil || got != want {
				return fmt.Errorf("at %s %s is %v, want %v: %w", time.Now().Format(time.TimeOnly), name, got, want, err)
			}
			return nil
		}
		pass(10 * time.Second) // until the channel has begun
		if err := is("lull_notify_dead_total", 0); err != nil {
			return err
		}
		if err := w.happen(ctx, "a", audit.EventPaused); err != nil {
			return err
		}
		pass(3 * time.Hour)
		if err := is("lull_notify_pending", 0); err != nil {
			return err
		}
		if l, err := p.fleet.Deliveries(ctx); err != nil || l[0].Pending != 1 {
			return fmt.Errorf("users see %+v, %w", l, err)
		}
		pass(90 * time.Minute) // the digest is due, and the receiver does not answer
		if err := is("lull_notify_pending", 1); err != nil {
			return err
		}
		end, err := w.serve()
		if err != nil {
			return err
		}
		defer func() { end() }()
		pass(10 * time.Minute)
		if err := is("lull_notify_pending", 0); err != nil {
			return err
		}
		p.end()
		return is("lull_notify_pending", -1)
	})
}
