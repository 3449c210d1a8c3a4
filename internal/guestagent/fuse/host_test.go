package fuse

import (
	"errors"
	"io"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/protocol/guest/files"
)

// port behaves like a virtio-serial port: while its other end is closed, reads end
// at once and writes wait.
type port struct {
	mu      sync.Mutex
	changed sync.Cond
	there   bool
	in, out []byte // data to and from the guest
	hellos  int    // number of hellos that take has returned
}

func newPort() *port {
	p := &port{}
	p.changed.L = &p.mu
	return p
}

func (p *port) connect(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.there = on
	p.changed.Broadcast()
}

func (p *port) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.there && len(p.in) == 0 {
		p.changed.Wait()
	}
	if len(p.in) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.in)
	p.in = p.in[n:]
	return n, nil
}

func (p *port) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.there {
		p.changed.Wait()
	}
	p.out = append(p.out, b...)
	p.changed.Broadcast()
	return len(b), nil
}

// give passes data to the guest.
func (p *port) give(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.in = append(p.in, b...)
	p.changed.Broadcast()
}

// take returns the requests that the guest has sent with a key.
func (p *port) take(t *testing.T, k files.Key) (out []files.Request) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	var s files.Stream
	s.Reset(k)
	s.Feed(p.out)
	p.out = nil
	met := false
	for {
		b, err := s.Next()
		errtest.None(t, err)
		if b == nil {
			return out
		}
		q, err := files.ParseRequest(b)
		errtest.None(t, err)
		if q.ID == files.HelloID {
			met = true
			p.hellos++
			continue
		}
		if met && q.Again {
			t.Errorf("the guest repeats %+v after it has said that it is there", q)
		}
		out = append(out, q)
	}
}

// bound runs f in a synctest bubble, with a Host that is not connected yet.
func bound(t *testing.T, f func(t *testing.T, p *port, h *Host)) {
	synctest.Test(t, func(t *testing.T) {
		p := newPort()
		h := NewHost(p)
		go h.send()
		stop := make(chan struct{})
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			buf := make([]byte, 100)
			for {
				if n, _ := p.Read(buf); n > 0 {
					h.take(buf[:n])
				}
				select {
				case <-stop:
					return
				case <-time.After(again):
				}
			}
		}()
		f(t, p, h)
		close(stop)
		p.connect(false)
		<-ended
		close(h.kick)
	})
}

type said struct {
	a  files.Answer
	no syscall.Errno
}

// asked sends a request, and returns a channel for the answer.
func asked(h *Host, q files.Request) chan said {
	ch := make(chan said, 1)
	go func() {
		a, no := h.ask(q)
		ch <- said{a, no}
	}()
	synctest.Wait()
	return ch
}

// TestAskedAgain checks that requests without an answer are sent again on the next
// connection, marked as repeated and in order, and that answers with the key of an
// earlier connection are ignored.
func TestAskedAgain(t *testing.T) {
	bound(t, func(t *testing.T, p *port, h *Host) {
		first := asked(h, files.Request{Op: files.Stat, Path: "a"})
		if got := p.take(t, files.Key{}); len(got) != 0 {
			t.Fatalf("sent before there was a connection: %+v", got)
		}
		one, two := files.Key{1}, files.Key{2}
		h.Connect(one)
		p.connect(true)
		time.Sleep(time.Second)
		if got := p.take(t, one); len(got) != 1 || got[0].Again || got[0].Path != "a" {
			t.Fatalf("sent %+v", got)
		}
		old := files.AppendAnswer(nil, one, &files.Answer{ID: 1, Data: []byte("old")})
		p.give(old[:len(old)-2]) // the daemon dies while it is sending this answer
		time.Sleep(time.Second)
		p.connect(false)
		second := asked(h, files.Request{Op: files.Stat, Path: "b"})
		h.Connect(two)
		p.connect(true)
		time.Sleep(time.Second)
		got := p.take(t, two)
		if len(got) != 2 || !got[0].Again || got[0].Path != "a" || got[1].Path != "b" {
			t.Fatalf("sent %+v", got)
		}
		p.give(old)
		p.give(files.AppendAnswer(nil, two, &files.Answer{ID: got[1].ID, Errno: uint32(syscall.ENOENT)}))
		p.give(files.AppendAnswer(nil, two, &files.Answer{ID: got[0].ID, Data: []byte("new")}))
		if s := <-second; s.no != syscall.ENOENT {
			t.Errorf("the second: %v", s.no)
		}
		if s := <-first; s.no != 0 || string(s.a.Data) != "new" {
			t.Errorf("the first: %v, %q", s.no, s.a.Data)
		}
		if p.hellos != 2 {
			t.Errorf("the guest said %d times that it is there, on 2 connections", p.hellos)
		}
	})
}

// TestNobodyThere checks that a request waits for a host, and fails after
// waitLimit.
func TestNobodyThere(t *testing.T) {
	bound(t, func(t *testing.T, p *port, h *Host) {
		began := time.Now()
		if _, no := h.ask(files.Request{Op: files.Stat}); no != syscall.EIO || time.Since(began) != waitLimit {
			t.Errorf("%v after %s", no, time.Since(began))
		}
		h.Connect(files.Key{1})
		p.connect(true)
		time.Sleep(time.Second)
		if got := p.take(t, files.Key{1}); len(got) != 0 {
			t.Errorf("what was given up was sent: %+v", got)
		}
		late := asked(h, files.Request{Op: files.Stat})
		h.Refuse()
		if s := <-late; s.no != syscall.EIO {
			t.Errorf("refused: %v", s.no)
		}
		if _, no := h.ask(files.Request{Op: files.Stat}); no != syscall.EIO {
			t.Errorf("after a refusal: %v", no)
		}
	})
}

// TestNames checks that node numbers still refer to their files after these were
// renamed or removed.
func TestNames(t *testing.T) {
	tr := newTree()
	found := func(dir uint64, name string, ino uint64, kind uint32) uint64 {
		t.Helper()
		id, no := tr.found(dir, name, &files.Attr{Ino: ino, Mode: kind})
		if no != 0 {
			t.Fatal(no)
		}
		return id
	}
	is := func(id uint64, want string, no syscall.Errno) {
		t.Helper()
		if got, _, err := tr.where(id); got != want || !errors.Is(err, no) {
			t.Errorf("%d is %q (%v), want %q (%v)", id, got, err, want, no)
		}
	}
	d := found(rootID, "d", 10, syscall.S_IFDIR)
	f := found(d, "f", 11, syscall.S_IFREG)
	is(f, "d/f", 0)
	if found(d, "f", 11, syscall.S_IFREG) != f {
		t.Error("one file has two numbers")
	}
	tr.move(tr.kid(rootID, "d"), rootID, "e")
	is(f, "e/f", 0)
	g := found(d, "f", 12, syscall.S_IFREG) // the host has replaced it with another file
	is(f, "", syscall.ESTALE)
	is(g, "e/f", 0)
	tr.opened(g)
	tr.unname(tr.kid(d, "f"))
	is(g, "", syscall.ESTALE)
	if n, last := tr.closed(g); n == nil || !last {
		t.Error("no one closed it for the last time")
	}
	tr.forget(f, 2)
	tr.forget(g, 1)
	tr.forget(d, 1)
	if len(tr.nodes) != 1 {
		t.Errorf("%d numbers are left", len(tr.nodes))
	}
	is(d, "", syscall.ESTALE)
}
