package main

import (
	"errors"
	"io"
	"math"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

// serve is the program under measurement, which echoes every byte.
func serve(addr string) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{c}, make([]byte, 4096))
		}()
	}
}

// self returns the command line that runs serve.
func self(addr string) ([]string, error) {
	exe, err := os.Executable()
	return []string{exe, "-serve", addr}, err
}

// load is the clients' result of one measurement; latencies are in
// microseconds.
type load struct{ rate, p50, p99 float64 }

// connections repeatedly connects, sends a byte, reads it back and closes.
func connections(addr string, until time.Time) (lat []time.Duration, err error) {
	for time.Now().Before(until) {
		d, err := firstByte(addr)
		if err != nil {
			return lat, err
		}
		lat = append(lat, d)
	}
	return lat, nil
}

// firstByte returns the time from the connect to the first byte of the answer.
func firstByte(addr string) (time.Duration, error) {
	began := time.Now()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	b := []byte{'x'}
	if _, err := c.Write(b); err != nil {
		return 0, err
	}
	if _, err := io.ReadFull(c, b); err != nil {
		return 0, err
	}
	return time.Since(began), nil
}

// requests repeatedly sends 200 bytes and reads them back, on one connection.
func requests(addr string, until time.Time) (lat []time.Duration, err error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	b := make([]byte, 200)
	for began := time.Now(); began.Before(until); {
		if _, err := c.Write(b); err != nil {
			return nil, err
		}
		if _, err := io.ReadFull(c, b); err != nil {
			return nil, err
		}
		now := time.Now()
		lat = append(lat, now.Sub(began))
		began = now
	}
	return lat, nil
}

// press runs s.clients clients concurrently and returns their combined result.
func press(s settings, client func(string, time.Time) ([]time.Duration, error), addr string) (load, error) {
	var mu sync.Mutex
	var all []time.Duration
	began := time.Now()
	err := each(s.clients, s.clients, func(int) error {
		lat, err := client(addr, began.Add(s.slice))
		mu.Lock()
		defer mu.Unlock()
		all = append(all, lat...)
		return err
	})
	took := time.Since(began)
	return load{float64(len(all)) / took.Seconds(), quantile(all, 0.5), quantile(all, 0.99)}, err
}

// each calls do for 0 to n-1, at most width at a time.
func each(width, n int, do func(n int) error) error {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	next := 0
	for range width {
		wg.Go(func() {
			for {
				mu.Lock()
				mine := next
				next++
				mu.Unlock()
				if mine >= n {
					return
				}
				if err := do(mine); err != nil {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	if len(errs) > 3 {
		errs = errs[:3]
	}
	return errors.Join(errs...)
}

// quantile returns the p-quantile of durations, in microseconds.
func quantile(d []time.Duration, p float64) float64 {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return float64(d[min(len(d)-1, int(p*float64(len(d))))].Nanoseconds()) / 1000
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}

// interval returns the mean of ratios and its 95 % confidence interval, computed
// from the logarithms with Student's factor for about twenty ratios.
func interval(ratios []float64) (low, mean, high float64) {
	const factor = 2.093
	n := float64(len(ratios))
	sum, square := 0.0, 0.0
	for _, r := range ratios {
		sum += math.Log(r)
	}
	m := sum / n
	for _, r := range ratios {
		square += (math.Log(r) - m) * (math.Log(r) - m)
	}
	half := factor * math.Sqrt(square/max(n-1, 1)/n)
	return math.Exp(m - half), math.Exp(m), math.Exp(m + half)
}
