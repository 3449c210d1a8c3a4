// Package probe converts a runtime's measurements of a workload into readings and
// connections for the idle engine. It has no side effects, and unknown values stay
// unknown.
package probe

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/relay"
)

// Default thresholds for activity: CPU from 1 % of the window, but at least a few
// scheduler ticks; network from 512 bytes per 5 s.
const (
	cpuPercent = 1.0
	cpuTicks   = 20 * time.Millisecond
	netBytes   = 512.0
	rateWindow = 5 * time.Second
	diskBytes  = 8192.0 // two pages per 5 s, as by a program that syncs a record every other second
	diskPage   = 4096.0 // the smallest transfer of a disk
)

// Thresholds are the amounts of work from which a workload counts as active. A zero
// field means the default.
type Thresholds struct {
	CPUPercent float64 // percent of one CPU, default 1
	NetBytes   float64 // bytes per 5 s, default 512
	DiskBytes  float64 // bytes read and written per 5 s, default 8192
}

// Readings returns the readings for what a workload did between two samples.
// Connections that the workload opened stop counting once they have carried no byte
// for quiet; 0 means never.
func (c Thresholds) Readings(base, s instance.Sample, quiet time.Duration, now time.Time) []idle.Reading {
	window := s.At.Sub(base.At)
	first := window <= 0
	out, calls := make([]idle.Reading, 0, 4), called(s, quiet)
	switch {
	case s.CPUErr != nil:
		out = append(out, idle.NotKnown("cpu", now, s.CPUErr.Error()))
	case first || base.CPUErr != nil:
		out = append(out, idle.NotKnown("cpu", now, "only one sample so far, and a rate needs two"))
	default:
		threshold := max(cmp.Or(c.CPUPercent, cpuPercent), cpuTicks.Seconds()/window.Seconds()*100)
		out = append(out, idle.Judge("cpu", round(max(s.CPU-base.CPU, 0).Seconds()/window.Seconds()*100),
			round(threshold), "%", window, now))
	}
	switch {
	case s.NetErr != nil:
		out = append(out, idle.NotKnown("net", now, s.NetErr.Error()))
	case first || base.NetErr != nil:
		out = append(out, idle.NotKnown("net", now, "only one sample so far, and a rate needs two"))
	default:
		moved := float64(s.NetBytes) - float64(base.NetBytes)
		threshold := cmp.Or(c.NetBytes, netBytes) * max(1, window.Seconds()/rateWindow.Seconds())
		out = append(out, idle.Judge("net", max(moved, 0), round(threshold), "bytes", window, now))
	}
	out = append(out, c.diskReading(base, s, now))
	if s.ConnErr != nil {
		out = append(out, idle.NotKnown("tcp", now, s.ConnErr.Error()), idle.NotKnown("connections", now, s.ConnErr.Error()))
	} else {
		tcp := idle.Judge("tcp", float64(max(calls.open, calls.waiting)), 1, "outbound connections", 0, now)
		if calls.waiting > 0 {
			tcp.Detail = fmt.Sprintf("requests without an answer: %d", calls.waiting)
		}
		out = append(out, tcp)
	}
	return out
}

// diskReading returns the reading for the bytes that the workload read and wrote
// between two samples. The threshold shrinks with the window, but not below one
// page, so that a program that keeps writing and syncing counts as active however
// short the window is.
func (c Thresholds) diskReading(base, s instance.Sample, now time.Time) idle.Reading {
	window := s.At.Sub(base.At)
	switch {
	case errors.Is(s.DiskErr, instance.ErrAbsent):
		return idle.Reading{Signal: "disk", State: idle.Absent, At: now, Detail: s.DiskErr.Error()}
	case s.DiskErr != nil:
		return idle.NotKnown("disk", now, s.DiskErr.Error())
	case window <= 0 || base.DiskErr != nil:
		return idle.NotKnown("disk", now, "only one sample so far, and a rate needs two")
	}
	threshold := max(diskPage, cmp.Or(c.DiskBytes, diskBytes)*window.Seconds()/rateWindow.Seconds())
	moved := max(float64(s.DiskBytes)-float64(base.DiskBytes), 0)
	return idle.Judge("disk", moved, round(threshold), "bytes", window, now)
}

func round(f float64) float64 { return float64(int64(f*100+0.5)) / 100 }

// calls counts an instance's outbound connections that keep it awake. open are
// those to other machines that quiet-connection-after does not allow to ignore.
// waiting are those on which the workload waits for an answer, including those to
// this machine.
type calls struct{ open, waiting int }

// called counts the connections that the workload opened.
func called(s instance.Sample, quiet time.Duration) (c calls) {
	c.open = s.Outbound
	for _, o := range s.Calls {
		if o.Awaits() {
			c.waiting++
		}
		if quiet > 0 && !o.Loopback && o.QuietFor >= quiet && !o.Awaits() && o.Unread == 0 {
			c.open--
		}
	}
	c.open = max(c.open, 0)
	return c
}

// Connections configures which connections of a workload keep its instance awake.
type Connections struct {
	Endpoints []instance.Endpoint
	// Quiet is how long a connection without traffic keeps the instance awake; 0
	// means forever.
	Quiet     time.Duration
	Relay     *relay.Activity // nil without a relay
	RelayOwes int             // number of the relay's connections on which the client waits for an answer
}

// Count returns how many connections keep the instance awake, and when the last
// activity was. last is the last activity known before. The relay's connections
// include clients that have no connection to the backend yet.
func (o *Connections) Count(s instance.Sample, now, last time.Time) (int, time.Time) {
	n, owed := 0, false
	for _, c := range s.Inbound {
		moved := now.Add(-c.QuietFor)
		if moved.After(last) {
			last = moved
		}
		waits := !c.Accepted || c.Unread > 0 || owes(c, o.Endpoints)
		if o.Quiet == 0 || c.QuietFor < o.Quiet || waits {
			n++
		}
		owed = owed || waits
	}
	if s.LastClosed.After(last) {
		last = s.LastClosed
	}
	if a := o.Relay; a != nil {
		if a.LastArrival.After(last) {
			last = a.LastArrival
		}
		if a.LastByte.After(last) {
			last = a.LastByte
		}
		if o.Quiet == 0 {
			n = max(n, a.Open)
		} else {
			n, owed = max(n, o.RelayOwes), owed || o.RelayOwes > 0
		}
		n += a.Waiting
	}
	if n > 0 && o.Quiet == 0 || owed {
		last = now // the idle time starts when the last connection closes, or the last request is answered or abandoned
	}
	if last.After(now) {
		last = now
	}
	return n, last
}

// owes reports whether the client of an inbound connection waits for an answer. If
// the kernel's clock is too coarse to tell, owes returns false on the relay path,
// because the relay knows which side sent last.
func owes(c instance.Conn, ports []instance.Endpoint) bool {
	if c.Turn == instance.TurnUnclear {
		for _, e := range ports {
			if e.Path == instance.PathRelay && samePort(e.Target, c.Local) {
				return false
			}
		}
	}
	return c.Owes()
}

func samePort(a, b string) bool {
	_, x, err1 := net.SplitHostPort(a)
	_, y, err2 := net.SplitHostPort(b)
	return err1 == nil && err2 == nil && x == y
}

// Working reports whether the workload is working although its clients have been
// quiet for long enough to be ignored. A server that gets no CPU time, or waits for
// its disk, transfers no bytes either, and if it were frozen it would never answer.
// An unknown reading counts as working.
func Working(w instance.Workload, s instance.Sample, quiet time.Duration) bool {
	t, ok := w.(instance.Toiler)
	if !ok || !slices.ContainsFunc(s.Inbound, func(c instance.Conn) bool { return c.QuietFor >= quiet }) {
		return false
	}
	if still, err := w.Still(); err == nil && still {
		return false // this was checked before the freeze
	}
	busy, err := t.AtWork()
	return busy || err != nil
}

// BlockUnknownConnections makes an unknown number of connections block a pause also
// with leases_only: an open connection keeps an instance awake under every policy.
func BlockUnknownConnections(e *idle.Evidence) {
	for n := range e.Readings {
		r := &e.Readings[n]
		if r.Signal == "connections" && r.State == idle.Unknown {
			e.Guards = append(e.Guards, idle.Block{Code: idle.SignalUnknown, Signal: r.Signal,
				Sentence: fmt.Sprintf("Unknown: connections, %s. An unknown signal never counts as quiet.", r.Detail)})
		}
	}
}
