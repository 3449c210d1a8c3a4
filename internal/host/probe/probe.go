// Package probe converts a runtime's measurements of a workload into readings
// and connections for the idle engine. It is pure, and unknown values stay
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

// Default thresholds of the heartbeat. CPU counts from 1 % of the window, but
// never for less than a few scheduler ticks; net from 512 bytes per 5 s.
const (
	cpuPercent = 1.0
	cpuTicks   = 20 * time.Millisecond
	netBytes   = 512.0
	rateWindow = 5 * time.Second
	diskBytes  = 8192.0 // two pages per 5 s: a program that syncs a record every other second
	diskPage   = 4096.0 // the least that a disk transfers
)

// Thresholds are those at which the work of a workload counts as activity. Zero
// values stand for the defaults.
type Thresholds struct {
	CPUPercent float64 // of one processor, default 1
	NetBytes   float64 // per 5 s, default 512
	DiskBytes  float64 // read and written per 5 s, default 8192
}

// Readings returns the heartbeat readings of a workload between two samples.
// Its own connections stop counting after quiet without a byte; 0 means never.
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

// diskReading judges the bytes that the workload read and wrote between two
// samples. The threshold shrinks with the window, down to one page, so a
// program that keeps writing and syncing is seen however short the window is.
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

// calls counts the outbound connections of an instance that keep it running.
// open are those to other machines, without the ones that
// quiet-connection-after allows to ignore. waiting are those with an unanswered
// request, including those to this machine.
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

// Connections configures how the connections of a workload count.
type Connections struct {
	Endpoints []instance.Endpoint
	// Quiet is how long a connection without traffic still holds; 0 means
	// forever.
	Quiet     time.Duration
	Relay     *relay.Activity // nil if it has no relay
	RelayOwes int             // connections of the relay with an unanswered request
}

// Count returns the number of connections that hold the instance, and the time
// of the last activity; last is the time known before. The relay's count
// includes clients whose backend connection is not established yet.
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
		last = now // idle time begins when the last connection closes, or the last request is answered or abandoned
	}
	if last.After(now) {
		last = now
	}
	return n, last
}

// owes reports whether the client of an inbound connection waits for an answer.
// On the relay path the relay knows which side sent last; the kernel's clock is
// too coarse for that.
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

// Working reports whether the workload is working although its clients have
// been quiet long enough to stop holding. A server that gets no CPU or waits
// for its disk transfers no bytes either, and once frozen it would never
// answer. An unknown reading counts as working.
func Working(w instance.Workload, s instance.Sample, quiet time.Duration) bool {
	t, ok := w.(instance.Toiler)
	if !ok || !slices.ContainsFunc(s.Inbound, func(c instance.Conn) bool { return c.QuietFor >= quiet }) {
		return false
	}
	if still, err := w.Still(); err == nil && still {
		return false // its work was checked before the freeze
	}
	busy, err := t.AtWork()
	return busy || err != nil
}

// BlockUnknownConnections makes connections a signal of leases_only too. An open
// connection holds under every policy, so an unknown count blocks under every
// policy.
func BlockUnknownConnections(e *idle.Evidence) {
	for n := range e.Readings {
		r := &e.Readings[n]
		if r.Signal == "connections" && r.State == idle.Unknown {
			e.Guards = append(e.Guards, idle.Block{Code: idle.SignalUnknown, Signal: r.Signal,
				Sentence: fmt.Sprintf("Unknown: connections, %s. An unknown signal never counts as quiet.", r.Detail)})
		}
	}
}
