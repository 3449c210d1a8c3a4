package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"lull/internal/lib/httpx"
	"lull/internal/protocol/hostctl"
)

// silence precedes each measured connection, so that a running
// program is as cold as a paused one.
const silence = 2 * time.Millisecond

// wakePart alternates between a connection to a paused program and one to a
// running program. It does so for a single-threaded program and for a Go program,
// because the kernel thaws every thread of a program before any of them may run.
func wakePart(ctx context.Context, s settings) (err error) {
	d, err := startDaemon(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	bin, err := tiny(d.dir)
	if err != nil {
		return err
	}
	for _, p := range []struct {
		name    string
		command func(addr string) ([]string, error)
	}{
		{"one thread", func(addr string) ([]string, error) {
			_, port, err := net.SplitHostPort(addr)
			return []string{bin, port}, err
		}},
		{"Go program", self},
	} {
		addr, err := freeAddr()
		if err != nil {
			return err
		}
		command, err := p.command(addr)
		if err != nil {
			return err
		}
		name := strings.ToLower(strings.ReplaceAll(p.name, " ", "-"))
		if err := d.run(ctx, name, addr, time.Minute, command...); err != nil {
			return err
		}
		if err := wakes(ctx, d, s, name, addr, p.name); err != nil {
			return err
		}
	}
	return nil
}

func wakes(ctx context.Context, d *daemon, s settings, name, addr, title string) error {
	var asleep, awake []time.Duration
	for range s.wakes {
		if err := pause(ctx, d, name); err != nil {
			return err
		}
		for _, into := range []*[]time.Duration{&asleep, &awake} {
			<-time.After(silence)
			t, err := firstByte(addr)
			if err != nil {
				return err
			}
			*into = append(*into, t)
		}
	}
	o, err := d.Get(ctx, name)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(os.Stdout, 2, 8, 2, ' ', 0)
	fmt.Fprintf(w, "%s: %d of each; it says it was woken %d times\trunning\tpaused\tadded\tratio\twanted\t\n", title, s.wakes, o.WakeCount)
	for _, q := range []struct {
		name   string
		p      float64
		wanted string
	}{{"p50", 0.5, "at most +100 us"}, {"p90", 0.9, ""}, {"p99", 0.99, "ratio at most 2"}, {"p99.9", 0.999, ""}} {
		a, b := quantile(awake, q.p), quantile(asleep, q.p)
		fmt.Fprintf(w, "connect to first byte, %s\t%.0f us\t%.0f us\t%+.0f us\t%.2f\t%s\t\n", q.name, a, b, b-a, b/a, q.wanted)
	}
	return w.Flush()
}

// pause pauses an instance as soon as its last connection is closed.
func pause(ctx context.Context, d *daemon, name string) error {
	return wait(ctx, 10*time.Second, func() error {
		_, err := d.Do(ctx, name, "pause", nil)
		var refused *httpx.Problem
		if errors.As(err, &refused) && refused.Status != http.StatusConflict {
			return nil
		}
		return err
	})
}

// freezePart measures how long instances that fall asleep by their timers take to
// freeze.
func freezePart(ctx context.Context, s settings) (err error) {
	const instances, after = 10, 500 * time.Millisecond
	d, err := startDaemon(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	var addrs []string
	for n := range instances {
		addr, err := freeAddr()
		if err != nil {
			return err
		}
		command, err := self(addr)
		if err != nil {
			return err
		}
		if err := d.run(ctx, fmt.Sprint("p", n), addr, after, command...); err != nil {
			return err
		}
		addrs = append(addrs, addr)
	}
	var late, seen []time.Duration
	for len(late) < s.freezes {
		left := make([]time.Time, instances)
		for range 2 { // the second client meets a running program, so only a probe can notice it
			for n, addr := range addrs {
				if _, err := firstByte(addr); err != nil {
					return err
				}
				left[n] = time.Now()
				<-time.After(time.Duration(n) * time.Millisecond)
			}
			<-time.After(rand.N(after / 2))
		}
		gone := time.Now()
		for n := range addrs {
			var o hostctl.Instance
			err := wait(ctx, 30*time.Second, func() (err error) {
				if o, err = d.Get(ctx, fmt.Sprint("p", n)); err == nil && (o.State != "paused" || !o.LastPausedAt.After(gone)) {
					err = fmt.Errorf("%s is %s", o.Name, o.State)
				}
				return err
			})
			if err != nil {
				return err
			}
			late = append(late, o.LastPausedAt.Sub(o.LastActivityAt.Add(after)))
			seen = append(seen, o.LastPausedAt.Sub(left[n].Add(after)))
		}
	}
	w := tabwriter.NewWriter(os.Stdout, 2, 8, 2, ' ', 0)
	fmt.Fprintf(w, "%d natural pauses, pause-after %s\tp50\tp90\tp99\twanted\t\n", len(late), after)
	for _, row := range []struct {
		name, wanted string
		times        []time.Duration
	}{{"last activity + pause-after to frozen and checked again", "p50 50 ms, p99 150 ms", late},
		{"the client's last byte + pause-after to the same, with the time until a probe sees that it left", "", seen}} {
		fmt.Fprintf(w, "%s\t%.1f ms\t%.1f ms\t%.1f ms\t%s\t\n", row.name,
			quantile(row.times, 0.5)/1000, quantile(row.times, 0.9)/1000, quantile(row.times, 0.99)/1000, row.wanted)
	}
	return w.Flush()
}
