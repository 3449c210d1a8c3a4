package microvm

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// BenchmarkWake measures the time until the first byte of a new client, of a
// running guest and of a frozen one that the client wakes. Clients come at the same
// rate in both cases.
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

// BenchmarkHibernate measures saving a guest, restoring it, and the time until the
// first byte of a new client after that. "written" is the part of saving until all
// data has been written, but is not durable yet. QEMU's CPU time is for machines on
// which wall time means nothing.
func BenchmarkHibernate(b *testing.B) {
	for _, kind := range []string{"microvm", "q35"} {
		b.Run(kind, func(b *testing.B) { benchmarkHibernate(b, kind, false) })
		b.Run(kind+", disk of its own", func(b *testing.B) { benchmarkHibernate(b, kind, true) })
	}
}

// notes collects the durations in the "saved" log lines of a runtime.
type notes map[string][]time.Duration

func (notes) Enabled(context.Context, slog.Level) bool { return true }
func (n notes) WithAttrs([]slog.Attr) slog.Handler     { return n }
func (n notes) WithGroup(string) slog.Handler          { return n }

func (n notes) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Value.Kind() == slog.KindDuration && r.Message == "saved" {
			n[a.Key] = append(n[a.Key], a.Value.Duration())
		}
		return true
	})
	return nil
}

func benchmarkHibernate(b *testing.B, kind string, layer bool) {
	noted := notes{}
	parts, err := rig()
	need(b, err)
	m := Machine{Kind: kind, Memory: 128 << 20, Files: map[string]string{"/bin/guest": parts.program}}
	if layer {
		m.Root, m.Files = b.TempDir(), nil
		put(b, m.Root, parts.program, "/bin/guest")
	}
	bn := newBench(b, func(c *Config) {
		c.Log, c.Machine = slog.New(noted), func(string) (Machine, error) { return m, nil }
		if layer {
			c.Layer = 10 << 30
		}
	})
	w := bn.start("deep", "guest", "serve", ":80")
	listening(b, w, "80")
	var saved, restored, first, spent []time.Duration
	for b.Loop() {
		if err := w.Freeze(b.Context()); err != nil {
			b.Fatal(err)
		}
		began := time.Now()
		if _, err := w.Hibernate(b.Context()); err != nil {
			b.Fatal(err)
		}
		saved = append(saved, time.Since(began))
		began = time.Now()
		if err := w.Thaw(); err != nil {
			b.Fatal(err)
		}
		restored = append(restored, time.Since(began))
		c := dial(b, w)
		talk(b, c, "x")
		first = append(first, time.Since(began))
		c.Close()
		spent = append(spent, processorTime(b, w.proc.pid))
	}
	for name, all := range map[string][]time.Duration{"saved": saved, "restored": restored, "first-byte": first, "qemu-cpu": spent, "written": noted["written"]} {
		slices.Sort(all)
		b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, name+"-ms-p50")
	}
}

// processorTime returns the CPU time of all threads of a process.
func processorTime(b *testing.B, pid int) (sum time.Duration) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(tasks) == 0 {
		b.Fatalf("process %d has no threads: %v", pid, err)
	}
	for _, name := range tasks {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // the thread has ended
		}
		var ns int64
		if _, err := fmt.Sscan(string(text), &ns); err != nil {
			b.Fatal(err)
		}
		sum += time.Duration(ns)
	}
	return sum
}
