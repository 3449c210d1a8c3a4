package process_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"
	"lull/internal/platform/sockets"
	"lull/internal/runtime/process"
)

// TestSampleAgreesWithTheKernel checks that a sample shows the connections that the
// kernel lists, whatever clients do and whether or not the program is frozen. It
// also checks that the end of the last connection is never reported as earlier than
// it was.
func TestSampleAgreesWithTheKernel(t *testing.T) {
	freezers(t, func(t *testing.T, cfg process.Config) {
		h := newHost(t, cfg)
		r := scaletest.Random(t)
		for _, kind := range []string{"echo", "plain", "prefork"} {
			addr := port(t, "127.0.0.1")
			w := h.serve("agrees-"+kind, 1, kind, addr)
			c := &crowd{t: t, r: r, w: w, addr: addr}
			for range scaletest.Count(t, "steps of clients", 10) {
				c.step()
				waittest.NoError(t, kind+" agrees", c.differs)
			}
			c.awaken()
			c.leave(len(c.open))
			waittest.NoError(t, kind+" agrees", c.differs)
			if err := w.Kill(waittest.Context(t)); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// crowd is a set of clients of one program.
type crowd struct {
	t     *testing.T
	r     *rand.Rand
	w     instance.Workload
	addr  string
	open  []net.Conn
	guard instance.Guard // set while the program is frozen
	ended time.Time      // when a client last began to disconnect
}

func (c *crowd) step() {
	c.t.Helper()
	switch c.r.IntN(6) {
	case 0, 1:
		n, err := net.Dial("tcp", c.addr)
		if err != nil {
			c.t.Fatal(err)
		}
		c.open = append(c.open, n)
	case 2:
		if len(c.open) > 0 {
			if _, err := fmt.Fprintln(c.open[c.r.IntN(len(c.open))], "hello"); err != nil {
				c.t.Fatal(err)
			}
		}
	case 3:
		c.leave(c.r.IntN(len(c.open) + 1))
	case 4: // a client that comes and goes between two samples
		if c.guard == nil {
			c.ended = time.Now()
			if err := ask(c.addr); err != nil {
				c.t.Fatal(err)
			}
		}
	case 5:
		if c.guard == nil {
			c.guard, _ = sleep(c.t, c.w, ends(c.addr), false)
		} else {
			c.awaken()
		}
	}
}

func (c *crowd) awaken() {
	if c.guard != nil {
		wake(c.t, c.w, c.guard)
		c.guard = nil
	}
}

// leave closes the first n clients. Some of them reset the connection, after which
// the kernel keeps no trace of it. The others read everything first, because
// closing with unread data sends a reset too.
func (c *crowd) leave(n int) {
	for _, x := range c.open[:n] {
		switch {
		case c.guard != nil: // a reset connection would stay in the frozen program's queue and not be listed
		case c.r.IntN(3) == 0:
			_ = x.(*net.TCPConn).SetLinger(0)
		default:
			_ = x.(*net.TCPConn).CloseWrite()
			_ = x.SetReadDeadline(time.Now().Add(10 * time.Second))
			_, _ = io.Copy(io.Discard, x)
		}
		c.ended = time.Now()
		_ = x.Close()
	}
	c.open = slices.Clone(c.open[n:])
}

// differs returns the difference between a sample and the kernel's list for the
// port, or nil.
func (c *crowd) differs() error {
	c.t.Helper()
	s := lookNow(c.w, ends(c.addr))
	now := time.Now()
	_, p, _ := net.SplitHostPort(c.addr)
	number, _ := strconv.Atoi(p)
	table, err := sockets.Dump(context.Background(), sockets.Query{LocalPorts: []uint16{uint16(number)}, Info: true,
		States: []sockets.State{sockets.Established, sockets.CloseWait}})
	if err != nil || s.ConnErr != nil {
		return fmt.Errorf("unknown: %v, %v", err, s.ConnErr)
	}
	unread, waiting := map[string]uint32{}, 0
	for _, o := range table.Sockets {
		if o.Waiting() {
			waiting++
		} else {
			unread[o.Remote.String()] = o.RQueue
		}
	}
	for _, o := range s.Inbound {
		n, known := unread[o.Remote]
		switch {
		case !o.Accepted:
			waiting--
		case !known || n != o.Unread:
			return fmt.Errorf("%+v has %d bytes to read, and is listed: %t", o, n, known)
		}
		delete(unread, o.Remote)
	}
	if waiting != 0 || len(unread) > 0 {
		return fmt.Errorf("not in the sample: %d that wait and %v", waiting, unread)
	}
	if len(s.Inbound) > 0 || c.guard != nil {
		return nil
	}
	at, err := lastClosed(s)
	if err != nil || at.After(now.Add(20*time.Millisecond)) || at.Before(c.ended.Add(-20*time.Millisecond)) { // the kernel's clock
		return fmt.Errorf("the last connection ended at %v, after %v: %v", at, c.ended, err)
	}
	return nil
}
