package main

import (
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"
)

// sample is one measurement: a rate per second, and latencies in microseconds.
type sample struct {
	rate, p50, p99, units float64
	cpu                   time.Duration // of the proxy
}

type measurement struct {
	name, unit string
	// client works until a deadline and returns the number of units and the
	// latency of each.
	client func(addr string, until time.Time) (units float64, latencies []time.Duration, err error)
}

var measurements = []measurement{
	{"connections", "per s", connections},
	{"requests", "per s", requests},
	{"throughput", "MB/s", throughput},
}

func (m measurement) run(addr string, s settings) (sample, error) {
	clients := s.clients
	if m.name == "throughput" {
		clients = 1
	}
	var mu sync.Mutex
	var all []time.Duration
	var units float64
	var errs []error
	start := time.Now()
	until := start.Add(s.slice)
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			n, lat, err := m.client(addr, until)
			mu.Lock()
			defer mu.Unlock()
			units += n
			all = append(all, lat...)
			errs = append(errs, err)
		})
	}
	wg.Wait()
	took := time.Since(start)
	if err := errors.Join(errs...); err != nil {
		return sample{}, err
	}
	slices.Sort(all)
	at := func(p float64) float64 {
		return float64(all[min(len(all)-1, int(p*float64(len(all))))].Nanoseconds()) / 1000
	}
	return sample{rate: units / took.Seconds(), p50: at(0.5), p99: at(0.99), units: units}, nil
}

// oneConnection connects, sends one byte, reads it back and closes.
func oneConnection(addr string, buf []byte) (time.Duration, error) {
	start := time.Now()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if _, err := c.Write(buf[:1]); err != nil {
		return 0, err
	}
	if _, err := io.ReadFull(c, buf[:1]); err != nil {
		return 0, err
	}
	return time.Since(start), nil
}

func connections(addr string, until time.Time) (float64, []time.Duration, error) {
	var lat []time.Duration
	buf := make([]byte, 1)
	for time.Now().Before(until) {
		d, err := oneConnection(addr, buf)
		if err != nil {
			return 0, nil, err
		}
		lat = append(lat, d)
	}
	return float64(len(lat)), lat, nil
}

// requests repeatedly sends 200 bytes and reads them back, on one connection.
func requests(addr string, until time.Time) (float64, []time.Duration, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return 0, nil, err
	}
	defer c.Close()
	buf := make([]byte, 200)
	var lat []time.Duration
	for start := time.Now(); start.Before(until); {
		if _, err := c.Write(buf); err != nil {
			return 0, nil, err
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			return 0, nil, err
		}
		now := time.Now()
		lat = append(lat, now.Sub(start))
		start = now
	}
	return float64(len(lat)), lat, nil
}

// throughput repeatedly sends 4 MiB and reads them back. A megabyte counts once
// although it passes the proxy twice.
func throughput(addr string, until time.Time) (float64, []time.Duration, error) {
	const size = 4 << 20
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return 0, nil, err
	}
	defer c.Close()
	out, in := make([]byte, 256<<10), make([]byte, 256<<10)
	var lat []time.Duration
	for time.Now().Before(until) {
		start := time.Now()
		sent := make(chan error, 1)
		go func() {
			for range size / len(out) {
				if _, err := c.Write(out); err != nil {
					sent <- err
					return
				}
			}
			sent <- nil
		}()
		for range size / len(in) {
			if _, err := io.ReadFull(c, in); err != nil {
				return 0, nil, err
			}
		}
		if err := <-sent; err != nil {
			return 0, nil, err
		}
		lat = append(lat, time.Since(start))
	}
	return float64(len(lat)) * size / 1e6, lat, nil
}
