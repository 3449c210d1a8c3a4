package host

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
	"lull/internal/lib/errtest"
)

// measured returns the values of a host's metrics, by name{label,label}. A
// histogram has one value for its count and one for its sum.
func (r *rig) measured() map[string]float64 {
	r.t.Helper()
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(r.Collector()); err != nil {
		r.t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetValue())
			}
			name := fmt.Sprintf("%s{%s}", strings.TrimPrefix(f.GetName(), "lull_"), strings.Join(labels, ","))
			out[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			if h := m.GetHistogram(); h != nil {
				out[name+"count"], out[name+"sum"] = float64(h.GetSampleCount()), h.GetSampleSum()
			}
		}
	}
	return out
}

func (r *rig) measures(want map[string]float64) {
	r.t.Helper()
	got := r.measured()
	for name, v := range want {
		if g, ok := got[name]; !ok || math.Abs(g-v) > 1e-6 {
			r.t.Errorf("%s is %v (there: %t), want %v", name, g, ok, v)
		}
	}
}

// TestMeasures checks that a wake is measured from the first request until the
// instance runs, including the time in the queue. Wakes that nothing waits for, and
// requests that lead to no wake, are not measured.
func TestMeasures(t *testing.T) {
	inRoom(t, 1000, 1, func(r *rig) {
		r.k.Restore = time.Second
		never := idle.Duration(0)
		r.measures(map[string]float64{"instance_wake_seconds{hibernated,process}count": 0, "instance_events_total{wake_failed}": 0, "instances{process,running}": 0})
		for _, name := range []string{"a", "b"} {
			r.run(name, func(s *instance.Spec) { deep(s); s.Memory, s.StopAfter = 100*mib, &never })
		}
		held := int64(0)
		for _, o := range r.List(true) {
			held += o.MemoryBytes
		}
		r.measures(map[string]float64{"instance_wake_seconds{stopped,process}count": 2, "instances{process,running}": 2, "instance_memory_bytes{process,running}": float64(held),
			"host_memory_budget_bytes{}": 1000 * mib, "host_memory_free_bytes{}": 800 * mib})
		time.Sleep(8 * time.Minute)
		r.is("a", power.Hibernated)
		r.is("b", power.Hibernated)
		var wg sync.WaitGroup
		for _, name := range []string{"a", "b"} {
			wg.Go(func() {
				c, err := r.gates[name].Arrive(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				c.Close()
			})
		}
		synctest.Wait()
		r.measures(map[string]float64{"host_waiting{}": 1, "host_memory_free_bytes{}": 900 * mib})
		wg.Wait()
		r.measures(map[string]float64{"instance_wake_seconds{hibernated,process}count": 2, "instance_wake_seconds{hibernated,process}sum": 1 + 2, // one waited in the queue
			"instance_events_total{resumed}": 2, "instance_events_total{hibernated}": 2, "host_waiting{}": 0})

		id := r.run("thin", nil)
		time.Sleep(62 * time.Second)
		r.is("thin", power.Paused)
		c := r.k.Connect(id)
		r.is("thin", power.Running)
		c.Close()
		r.measures(map[string]float64{"instance_wake_seconds{paused,process}count": 1, "instance_wake_seconds{paused,process}sum": 0})

		// A client that was refused does not count as waiting for a start hours
		// later.
		errtest.None(t, r.Stop(r.ctx, "thin", ByManual, true))
		if _, err := r.gates["thin"].Arrive(r.ctx); err == nil {
			t.Error("a stopped one took a client")
		}
		time.Sleep(time.Hour)
		errtest.None(t, r.Start(r.ctx, "thin", ByManual))
		r.measures(map[string]float64{"instance_wake_seconds{stopped,process}count": 4, "instance_wake_seconds{stopped,process}sum": 0})

		// Nor does a client that arrived while the instance ran.
		errtest.None(t, r.Resume(r.ctx, "thin", ByManual))
		time.Sleep(62 * time.Second)
		r.is("thin", power.Paused)
		errtest.None(t, r.Resume(r.ctx, "thin", ByManual))
		r.measures(map[string]float64{"instance_wake_seconds{paused,process}count": 2, "instance_wake_seconds{paused,process}sum": 0})

		// Nor does a client whose wake failed, because it may come back much later.
		time.Sleep(8 * time.Minute)
		r.is("a", power.Hibernated)
		r.k.Fail(hosttest.Thawing, errors.New("not now"))
		if _, err := r.gates["a"].Arrive(r.ctx); err == nil {
			t.Error("a wake that fails served a client")
		}
		r.k.Fail(hosttest.Thawing, nil)
		time.Sleep(20 * time.Minute)
		r.is("a", power.Hibernated)
		if _, err := r.gates["a"].Arrive(r.ctx); err != nil {
			t.Error(err)
		}
		r.measures(map[string]float64{"instance_wake_seconds{hibernated,process}count": 3, "instance_wake_seconds{hibernated,process}sum": 1 + 2 + 1, "instance_events_total{wake_failed}": 1})

		errtest.None(t, r.Halt(&idle.HaltedBy{}, ByManual))
		r.measures(map[string]float64{"host_halted{}": 1})
		errtest.None(t, r.Halt(nil, ByManual))

		// A host that ends wakes all paused instances, but no client waited for
		// that.
		errtest.None(t, r.Start(r.ctx, "thin", ByManual))
		time.Sleep(62 * time.Second)
		r.is("thin", power.Paused)
		r.shut()
		r.is("thin", power.Running)
		r.measures(map[string]float64{"instance_wake_seconds{paused,process}count": 2})
	})
}
