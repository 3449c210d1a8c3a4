package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// between is the time from the pause of a guest to its save. It is long enough to
// measure all guests while paused and while reclaimed.
const between = time.Minute

// holder holds a lease on guests that must stay at a step while it is measured. A
// lease blocks deeper steps and does not wake a guest.
const holder = "bench"

// source is the guest from which the others are cloned.
const source = "source"

// herd is a group of guests on which everything is done at the same time.
type herd struct {
	*rig
	names []string
	addrs []string
}

// storm saves and wakes many guests at once: first as clones that share the
// memory of one saved guest, then each with its own memory.
func (r *rig) storm(ctx context.Context) error {
	n := r.s.guests
	if n == 0 {
		return nil
	}
	fmt.Printf("\n%d guests at once; %d restores at a time, %s of memory for all\n", n, r.s.wakes, r.s.budget)
	before := resident(r.cmd.Process.Pid)
	h, err := r.clones(ctx, n)
	if err != nil {
		return err
	}
	daemon := func(how string) {
		fmt.Printf("%-28s %.2f MiB for each guest, all %s\n", "the daemon holds", float64(resident(r.cmd.Process.Pid)-before)/float64(n)/(1<<20), how)
	}
	daemon("hibernated")
	for _, what := range []string{"clones", "own memory"} {
		if err := h.wake(what); err != nil {
			return err
		}
		daemon("running")
		if err := h.held(ctx, what+", running"); err != nil {
			return err
		}
		if err := h.sleep(ctx, what); err != nil {
			return err
		}
	}
	if err := h.wake("own memory"); err != nil {
		return err
	}
	s, err := r.Status(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("%-28s at most %d waited for their turn, %d were refused, %d pushed down for others\n", "admission", s.Room.Longest, s.Room.Refused, s.Room.Pushed)
	return nil
}

// clones makes n clones of one guest.
func (r *rig) clones(ctx context.Context, n int) (*herd, error) {
	addr, err := r.guest(ctx, source, func(s *instance.Spec) { s.ReclaimAfter, s.HibernateAfter = 1, idle.Duration(between) })
	if err == nil {
		_, err = firstByte(addr)
	}
	if err != nil {
		return nil, err
	}
	h := &herd{rig: r}
	took := make([]time.Duration, n)
	var saved int64
	for k := range n {
		name := fmt.Sprint("clone", k)
		addr, err := freeAddr()
		if err != nil {
			return nil, err
		}
		c := hostctl.Clone{Name: name, Expose: []instance.Endpoint{{Listen: addr, Target: "127.0.0.1:80"}}}
		var o hostctl.Instance
		began := time.Now()
		err = r.tries(ctx, func() (err error) { // the connection to the source may not have ended yet
			if k == 0 {
				err = r.pause(ctx, source)
			}
			if err == nil {
				o, err = r.Clone(ctx, source, c)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		took[k], saved = time.Since(began), saved+o.SavedBytes
		h.names, h.addrs = append(h.names, name), append(h.addrs, addr)
	}
	row("cloned, one after the other", took, nil)
	fmt.Printf("%-28s %.2f MiB on disk, beside the memory that it shares\n", "a clone", float64(saved)/float64(n)/(1<<20))
	return h, nil
}

// tries retries f until it succeeds.
func (r *rig) tries(ctx context.Context, f func() error) error {
	var last error
	err := r.until(ctx, func() bool { last = f(); return last == nil })
	return errors.Join(err, last)
}

// wake connects a client to every guest at once. A client whose wake times out
// retries.
func (h *herd) wake(what string) error {
	n := len(h.names)
	took, again := make([]time.Duration, n), make([]int, n)
	began := time.Now()
	err := each(n, func(k int) error {
		for {
			_, err := firstByte(h.addrs[k])
			if took[k] = time.Since(began); err == nil || took[k] > waitLimit {
				return err
			}
			again[k]++
		}
	})
	if err != nil {
		return fmt.Errorf("cannot wake %d guests at once: %w", n, err)
	}
	total, vain := time.Since(began), 0
	for _, c := range again {
		vain += c
	}
	row(what+", woken", took, nil)
	fmt.Printf("%-28s %s until the last had its first byte; %d times a client was held in vain and came again\n", "", total.Round(time.Millisecond), vain)
	return nil
}

// sleep moves all guests down the ladder together, one step at a time, and saves
// them at once.
func (h *herd) sleep(ctx context.Context, what string) error {
	hold := func() error {
		return each(len(h.names), func(k int) error {
			_, err := h.Hold(ctx, h.names[k], hostctl.LeaseRequest{Holder: holder, TTL: idle.Duration(time.Hour)})
			return err
		})
	}
	drop := func() error {
		return each(len(h.names), func(k int) error { _, err := h.Release(ctx, h.names[k], holder); return err })
	}
	if err := hold(); err != nil {
		return err
	}
	_ = each(len(h.names), func(k int) error { return h.pause(ctx, h.names[k]) }) // reach repeats this for those that are woken in the meantime
	if _, err := h.reach(ctx, "paused"); err != nil {
		return err
	}
	due := time.Now().Add(between)
	if err := errors.Join(h.held(ctx, what+", paused"), drop()); err != nil {
		return err
	}
	if _, err := h.reach(ctx, "reclaimed"); err != nil {
		return err
	}
	if err := errors.Join(hold(), h.held(ctx, what+", reclaimed")); err != nil {
		return err
	}
	if err := h.until(ctx, func() bool { return time.Now().After(due) }); err != nil {
		return err
	}
	began := time.Now()
	if err := drop(); err != nil {
		return err
	}
	list, err := h.reach(ctx, "hibernated")
	if err != nil {
		return err
	}
	total := time.Since(began)
	var took []time.Duration
	var bytes int64
	for _, o := range list {
		if d, ok := saving(o); ok {
			took = append(took, d)
		}
		bytes += o.SavedBytes
	}
	row(what+", saved durably", took, nil)
	fmt.Printf("%-28s %s until the last was on disk, %.1f MiB each\n", "", total.Round(time.Millisecond), float64(bytes)/float64(len(list))/(1<<20))
	return h.held(ctx, what+", hibernated")
}

// rungs are the steps of the ladder, in order.
var rungs = map[string]int{"paused": 1, "reclaimed": 2, "hibernated": 3}

// reach waits until all guests are at a step or below it, and prints their
// progress. It pauses a guest again that was woken by the late end of a
// connection.
func (h *herd) reach(ctx context.Context, rung string) (list []hostctl.Instance, err error) {
	began, told := time.Now(), time.Now()
	for {
		if list, err = h.others(h.List(ctx)); err != nil {
			return nil, err
		}
		n := 0
		for _, o := range list {
			switch {
			case rungs[o.State] >= rungs[rung]:
				n++
			case o.State == "running":
				_ = h.pause(ctx, o.ID) // the loop checks the result
			}
		}
		if n == len(list) {
			return list, nil
		}
		if time.Since(told) > 10*time.Second {
			told = time.Now()
			fmt.Fprintf(os.Stderr, "... %d of %d are %s after %s\n", n, len(list), rung, time.Since(began).Round(time.Second))
		}
		if time.Since(began) > waitLimit {
			return nil, fmt.Errorf("cannot measure: %d of %d are %s after %s", n, len(list), rung, waitLimit)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// others returns a list without the source.
func (h *herd) others(all []hostctl.Instance, err error) (list []hostctl.Instance, _ error) {
	for _, o := range all {
		if o.Name != source {
			list = append(list, o)
		}
	}
	return list, err
}

// held prints the present memory use of the guests.
func (h *herd) held(ctx context.Context, what string) error {
	list, err := h.others(h.ListWithMemory(ctx))
	if err != nil {
		return err
	}
	var sum int64
	for _, o := range list {
		sum += o.MemoryBytes
	}
	holds(what, sum/int64(len(list)))
	return nil
}

// holds prints how much memory one guest uses, and how many would fit.
func holds(what string, bytes int64) {
	fit := "any number"
	if bytes > 0 {
		fit = fmt.Sprintf("%.1f guests", float64(1<<30)/float64(bytes))
	}
	fmt.Printf("%-28s %.1f MiB each, %s in a GiB\n", what, float64(bytes)/(1<<20), fit)
}

// resident returns the memory of a process in bytes; 0 if it cannot be read.
func resident(pid int) int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	var total, rss int64
	if _, err := fmt.Sscan(string(b), &total, &rss); err != nil {
		return 0
	}
	return rss * int64(os.Getpagesize())
}
