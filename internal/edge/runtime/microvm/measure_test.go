package microvm

import (
	"slices"
	"testing"
	"time"
)

// BenchmarkWake compares connecting to a guest that runs with waking one that
// was frozen and connecting to it, to the first byte, in the same rhythm.
func BenchmarkWake(b *testing.B) {
	bn := newBench(b, nil)
	w := bn.start("wake", "guest", "serve", ":80")
	listening(b, w, "80")
	first := func() {
		c := dial(b, w)
		talk(b, c, "x")
		c.Close()
	}
	var running, woken []time.Duration
	for b.Loop() {
		began := time.Now()
		first()
		running = append(running, time.Since(began))
		if err := w.Freeze(b.Context()); err != nil {
			b.Fatal(err)
		}
		began = time.Now()
		if err := w.Thaw(); err != nil {
			b.Fatal(err)
		}
		first()
		woken = append(woken, time.Since(began))
	}
	slices.Sort(running)
	slices.Sort(woken)
	b.ReportMetric(float64(running[len(running)/2].Microseconds()), "running-us-p50")
	b.ReportMetric(float64(woken[len(woken)/2].Microseconds()), "woken-us-p50")
}
