package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"text/tabwriter"
	"time"
)

// bare starts the program without lull.
func bare(ctx context.Context) (addr string, stop func(), err error) {
	if addr, err = freeAddr(); err != nil {
		return "", nil, err
	}
	command, err := self(addr)
	if err != nil {
		return "", nil, err
	}
	stop, err = startBare(ctx, addr, command)
	return addr, stop, err
}

// kept starts the program under lull, with the default timers.
func kept(ctx context.Context, d *daemon) (addr string, err error) {
	if addr, err = freeAddr(); err != nil {
		return "", err
	}
	command, err := self(addr)
	if err != nil {
		return "", err
	}
	return addr, d.run(ctx, "program", addr, time.Minute, command...)
}

// directPart compares the program under lull with the same program alone.
func directPart(ctx context.Context, s settings) (err error) {
	d, err := startDaemon(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	with, err := kept(ctx, d)
	if err != nil {
		return err
	}
	without, stop, err := bare(ctx)
	if err != nil {
		return err
	}
	defer stop()
	w := tabwriter.NewWriter(os.Stdout, 2, 8, 2, ' ', 0)
	fmt.Fprintln(w, "\tbare\tlull, direct\tratio (median)\t95 % interval of its mean\twanted\t")
	for _, m := range []struct {
		name   string
		client func(string, time.Time) ([]time.Duration, error)
	}{{"connections", connections}, {"requests, keep-alive", requests}} {
		if err := comparePairs(ctx, s, w, m.name, m.client, with, without); err != nil {
			return err
		}
	}
	return w.Flush()
}

// comparePairs measures A and B in the order AB, BA, AB, ...
func comparePairs(ctx context.Context, s settings, w *tabwriter.Writer, name string,
	client func(string, time.Time) ([]time.Duration, error), with, without string) error {
	var alone, lull []load
	for _, addr := range []string{with, without} { // warm up both
		if _, err := press(s, client, addr); err != nil {
			return err
		}
	}
	for n := range s.pairs {
		order := []string{without, with}
		if n%2 == 1 {
			order = []string{with, without}
		}
		for _, addr := range order {
			if err := ctx.Err(); err != nil {
				return err
			}
			l, err := press(s, client, addr)
			if err != nil {
				return err
			}
			if addr == with {
				lull = append(lull, l)
			} else {
				alone = append(alone, l)
			}
		}
	}
	row := func(what, unit, wanted string, of func(load) float64) {
		var a, b, r []float64
		for n := range alone {
			a, b = append(a, of(alone[n])), append(b, of(lull[n]))
			r = append(r, of(lull[n])/of(alone[n]))
		}
		low, _, high := interval(r)
		fmt.Fprintf(w, "%s, %s\t%.0f %s\t%.0f %s\t%.3f\t%.3f to %.3f\t%s\t\n", name, what, median(a), unit, median(b), unit, median(r), low, high, wanted)
	}
	row("rate", "/s", ">= 0.97", func(l load) float64 { return l.rate })
	row("p50", "us", "", func(l load) float64 { return l.p50 })
	row("p99", "us", "", func(l load) float64 { return l.p99 })
	return nil
}
