package process_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/waittest"
	"lull/internal/runtime/process"
)

// BenchmarkWake reports medians for each freezer: of the time from the kernel's
// event to the thaw, and of a client's time from connect to answer, both when it
// wakes the program and when the program runs.
func BenchmarkWake(b *testing.B) {
	for name, cfg := range map[string]process.Config{"best": {}, "signals": {Signals: true}} {
		b.Run(name, func(b *testing.B) {
			exe, err := os.Executable()
			if err != nil {
				b.Fatal(err)
			}
			cfg.Dir, cfg.Shim, cfg.Log = filepath.Join(b.TempDir(), "shim"), exe, slog.New(slog.NewTextHandler(io.Discard, nil))
			cfg.OnExit = func(string, uint64, instance.Exit) {}
			rt, err := process.New(waittest.Context(b), cfg)
			if err != nil {
				b.Fatal(err)
			}
			done := make(chan error, 1)
			go func() { done <- rt.Run(b.Context()) }()
			addr := port(b, "127.0.0.1")
			w, err := rt.Start(waittest.Context(b), instance.Launch{ID: "bench", Run: 1, Command: []string{exe, "program", "echo", addr},
				Dir: "/", LogPath: filepath.Join(cfg.Dir, "log")})
			if err != nil {
				b.Fatal(err)
			}
			waittest.Until(b, "it answers", func() bool { return ask(addr) == nil })
			var woken, running, cost []time.Duration
			for b.Loop() {
				t := time.Now()
				if err := ask(addr); err != nil {
					b.Fatal(err)
				}
				running = append(running, time.Since(t))
				g, c := sleepThaw(b, w, addr)
				t = time.Now()
				if err := ask(addr); err != nil {
					b.Fatal(err)
				}
				woken = append(woken, time.Since(t))
				cost = append(cost, <-c)
				_ = g
			}
			for unit, all := range map[string][]time.Duration{"ns-running": running, "ns-woken": woken, "ns-close+thaw": cost} {
				sort.Slice(all, func(i, j int) bool { return all[i] < all[j] })
				b.ReportMetric(float64(all[len(all)/2]), unit)
			}
			if err := w.Kill(waittest.Context(b)); err != nil {
				b.Fatal(err)
			}
			var pid int
			if n := strings.Fields(rt.Shim()); len(n) > 1 {
				for _, c := range n[1] {
					pid = pid*10 + int(c-'0')
				}
			}
			_ = syscall.Kill(pid, syscall.SIGTERM)
		})
	}
}

// BenchmarkSample samples a program with ten connections in three states: not run
// since the last sample, run in between, and frozen.
func BenchmarkSample(b *testing.B) {
	exe, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	cfg := process.Config{Dir: filepath.Join(b.TempDir(), "shim"), Shim: exe, OnExit: func(string, uint64, instance.Exit) {}}
	rt, err := process.New(waittest.Context(b), cfg)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- rt.Run(ctx) }()
	addr := port(b, "127.0.0.1")
	w, err := rt.Start(waittest.Context(b), instance.Launch{ID: "bench-sample", Run: 1, Command: []string{exe, "program", "echo", addr},
		Dir: "/", LogPath: filepath.Join(cfg.Dir, "log")})
	if err != nil {
		b.Fatal(err)
	}
	waittest.Until(b, "it answers", func() bool { return ask(addr) == nil })
	var c net.Conn
	for range 10 {
		if c, err = net.Dial("tcp", addr); err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		if _, err := say(c, "hello"); err != nil {
			b.Fatal(err)
		}
	}
	sample := func(b *testing.B) {
		if s := w.Sample(ends(addr)); s.ConnErr != nil || len(s.Inbound) != 10 {
			b.Fatalf("%d connections: %v", len(s.Inbound), s.ConnErr)
		}
	}
	b.Run("idle", func(b *testing.B) {
		for b.Loop() {
			sample(b)
		}
	})
	b.Run("running", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			if _, err := say(c, "hello"); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
			sample(b)
		}
	})
	b.Run("frozen", func(b *testing.B) {
		if err := w.Freeze(waittest.Context(b)); err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			sample(b)
		}
	})
	var pid int
	_, _ = fmt.Sscanf(rt.Shim(), "pid %d", &pid)
	if err := errors.Join(w.Kill(waittest.Context(b)), syscall.Kill(pid, syscall.SIGTERM)); err != nil {
		b.Fatal(err)
	}
	waittest.Until(b, "the shim ends", func() bool { return over(pid) })
	cancel()
	if err := errors.Join(<-done, rt.Close()); err != nil {
		b.Fatal(err)
	}
}

// sleepThaw freezes w until a client comes, and returns the duration of the
// wake.
func sleepThaw(b *testing.B, w instance.Workload, addr string) (instance.Guard, chan time.Duration) {
	b.Helper()
	for {
		if err := w.Freeze(waittest.Context(b)); err != nil {
			b.Fatal(err)
		}
		cost := make(chan time.Duration, 1)
		ready := make(chan instance.Guard, 1)
		g, err := w.Guard(ends(addr), false, func(string) {
			g, ok := <-ready
			if !ok {
				return
			}
			t := time.Now()
			g.Close()
			if err := w.Thaw(); err == nil {
				cost <- time.Since(t)
			}
		})
		if err != nil {
			b.Fatal(err)
		}
		if g.Pending() == "" {
			ready <- g
			close(ready)
			return g, cost
		}
		close(ready)
		g.Close()
		if err := w.Thaw(); err != nil {
			b.Fatal(err)
		}
	}
}
