package memnet

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/nettest"
	"pgregory.net/rapid"

	"lull/internal/lib/errtest"
)

func TestPipeIsAConn(t *testing.T) {
	nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
		a, b := Pipe()
		return a, b, func() { a.Close(); b.Close() }, nil
	})
}

func TestDialledIsAConn(t *testing.T) {
	for name, latency := range map[string]time.Duration{"at once": 0, "1ms": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
				a, b, err := dialled(latency)
				if err != nil {
					return nil, nil, nil, err
				}
				return a, b, func() { a.Close(); b.Close() }, nil
			})
		})
	}
}

func dialled(latency time.Duration) (client, server *Conn, err error) {
	n := &Network{}
	n.SetLatency("", latency)
	l, err := n.Listen("server:80")
	if err != nil {
		return nil, nil, err
	}
	a, err := n.Dial("tcp", "server:80")
	if err != nil {
		return nil, nil, err
	}
	b, err := l.Accept()
	if err != nil {
		return nil, nil, err
	}
	return a.(*Conn), b.(*Conn), nil
}

func TestHalfClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b, err := dialled(0)
		errtest.None(t, err)
		defer b.Close()
		defer a.Close()
		a.Write([]byte("question"))
		errtest.None(t, a.CloseWrite())
		got, err := io.ReadAll(b)
		if err != nil || string(got) != "question" {
			t.Fatalf("read %q, %v", got, err)
		}
		if _, err := b.Write([]byte("answer")); err != nil {
			t.Fatalf("the other direction is closed too: %v", err)
		}
		b.Close()
		got, err = io.ReadAll(a)
		if err != nil || string(got) != "answer" {
			t.Fatalf("read %q, %v", got, err)
		}
		if _, err := a.Write([]byte("more")); !errors.Is(err, syscall.EPIPE) {
			t.Fatalf("write after CloseWrite: %v", err)
		}
	})
}

func TestWriteToAClosedReader(t *testing.T) {
	a, b := Pipe()
	b.Close()
	if _, err := a.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("write: %v", err)
	}
	a, b = Pipe()
	b.CloseRead()
	if _, err := a.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("write after CloseRead: %v", err)
	}
	if _, err := b.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("read after CloseRead: %v", err)
	}
	if _, err := b.Write([]byte("y")); err != nil {
		t.Errorf("write after CloseRead: %v", err)
	}
	b.Close()
	if err := b.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("second close: %v", err)
	}
	if err := b.SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("deadline after close: %v", err)
	}
}

func TestAbort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b, err := dialled(time.Second)
		errtest.None(t, err)
		a.Write([]byte("arrived"))
		time.Sleep(time.Second)
		a.Write([]byte("lost"))
		if n := b.Unread(); n != len("arrived") {
			t.Errorf("%d bytes unread", n)
		}
		a.Abort()
		a.Abort()
		got, err := io.ReadAll(b)
		if string(got) != "arrived" || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read %q, %v", got, err)
		}
		if _, err := b.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("write: %v", err)
		}
		b.Close()
	})
}

func TestBufferIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := Pipe()
		a.SetWriteDeadline(time.Now().Add(time.Minute))
		n, err := a.Write(make([]byte, DefaultBuffer+1))
		if n != DefaultBuffer || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("wrote %d, %v", n, err)
		}
		a.SetWriteDeadline(time.Time{})
		done := make(chan error, 1)
		go func() {
			_, err := a.Write([]byte("y"))
			done <- err
		}()
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("a write to a full buffer returned %v", err)
		default:
		}
		if _, err := b.Read(make([]byte, 1)); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestDialErrors(t *testing.T) {
	var n Network
	l, err := n.Listen("db:5432")
	errtest.None(t, err)
	if _, err := n.Listen("db:5432"); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("second listener: %v", err)
	}
	if _, err := n.Listen(""); err == nil {
		t.Error("an empty address was accepted")
	}
	var dns *net.DNSError
	if _, err := n.Dial("tcp", "elsewhere:5432"); !errors.As(err, &dns) || !dns.IsNotFound {
		t.Errorf("unknown host: %v", err)
	}
	for _, addr := range []string{"db:1", "10.0.0.1:1", "/run/x.sock"} {
		if _, err := n.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("dial %s: %v", addr, err)
		}
	}
	l.Close()
	if err := l.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("second close: %v", err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept after close: %v", err)
	}
	if _, err := n.Dial("tcp", "db:5432"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial after close: %v", err)
	}
	if _, err = n.Listen("db:5432"); err != nil {
		t.Errorf("the address was not freed: %v", err)
	}
}

func TestAddresses(t *testing.T) {
	var n Network
	any, _ := n.Listen(":80")
	free, err := n.Listen("127.0.0.1:0")
	errtest.None(t, err)
	if a, ok := free.Addr().(*net.TCPAddr); !ok || a.Port == 0 {
		t.Errorf("address of a free port: %v", free.Addr())
	}
	unix, _ := n.Listen("/run/lull/host.sock")
	for addr, l := range map[string]*Listener{"a.example:80": any, free.Addr().String(): free, "/run/lull/host.sock": unix} {
		c, err := n.Host("10.1.2.3").Dial("tcp", addr)
		errtest.None(t, err)
		s, err := l.Accept()
		errtest.None(t, err)
		if s.RemoteAddr().String() != c.LocalAddr().String() || c.RemoteAddr().String() != addr {
			t.Errorf("%s: %v to %v", addr, c.LocalAddr(), c.RemoteAddr())
		}
		if _, ok := s.RemoteAddr().(*net.TCPAddr); !ok {
			t.Errorf("remote of an IP literal is a %T", s.RemoteAddr())
		}
	}
	if got := n.Conns(); got != 3 {
		t.Errorf("%d connections, want 3", got)
	}
}

func TestBacklog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n Network
		l, _ := n.ListenBacklog("s:1", 2)
		for range 2 {
			errtest.Get(n.Dial("tcp", "s:1"))(t)
		}
		if l.Pending() != 2 {
			t.Errorf("%d pending", l.Pending())
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := n.DialContext(ctx, "tcp", "s:1")
		if ne := net.Error(nil); !errors.As(err, &ne) || !ne.Timeout() {
			t.Errorf("dial to a full backlog: %v", err)
		}
		done := make(chan error, 2)
		for range 2 {
			go func() {
				_, err := n.Dial("tcp", "s:1")
				done <- err
			}()
		}
		synctest.Wait()
		c, err := l.Accept()
		errtest.None(t, err)
		if err := <-done; err != nil {
			t.Errorf("dial after room was made: %v", err)
		}
		l.Close()
		if err := <-done; !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("dial while the listener closed: %v", err)
		}
		c.Close()
	})
}

func TestUnacceptedAreReset(t *testing.T) {
	var n Network
	l, _ := n.Listen("s:1")
	c, err := n.Dial("tcp", "s:1")
	errtest.None(t, err)
	l.Close()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read: %v", err)
	}
}

func TestLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n Network
		n.SetLatency("", time.Millisecond)
		n.SetLatency("far", 50*time.Millisecond)
		l, _ := n.Listen("far:1")
		start := time.Now()
		a, err := n.Dial("tcp", "far:1")
		errtest.None(t, err)
		if d := time.Since(start); d != 100*time.Millisecond {
			t.Errorf("connected after %v", d)
		}
		b, _ := l.Accept()
		a.Write([]byte("x"))
		a.Close()
		start = time.Now()
		got, err := io.ReadAll(b)
		if string(got) != "x" || err != nil || time.Since(start) != 50*time.Millisecond {
			t.Errorf("read %q, %v after %v", got, err, time.Since(start))
		}
		b.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		if _, err := n.DialContext(ctx, "tcp", "far:1"); err == nil {
			t.Error("connected before the round trip was over")
		}
	})
}

func TestCutAndReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n Network
		l, _ := n.Listen("s:1")
		a, _ := n.Host("c").Dial("tcp", "s:1")
		b, _ := l.Accept()
		n.Cut("s")
		n.Cut("s")
		a.Write([]byte("held back"))
		a.(*Conn).CloseWrite()
		b.SetReadDeadline(time.Now().Add(time.Hour))
		if _, err := b.Read(make([]byte, 9)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read across a cut: %v", err)
		}
		b.SetReadDeadline(time.Time{})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := n.DialContext(ctx, "tcp", "s:1"); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("dial across a cut: %v", err)
		}
		time.AfterFunc(time.Minute, func() { n.Heal("s") })
		if got, err := io.ReadAll(b); string(got) != "held back" || err != nil {
			t.Errorf("after healing: %q, %v", got, err)
		}
		c, _ := n.Dial("tcp", "s:1")
		if hit := n.Reset("c"); hit != 1 {
			t.Errorf("reset %d connections, want 1", hit)
		}
		if _, err := b.Write([]byte("x")); !errors.Is(err, net.ErrClosed) && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("write after the reset: %v", err)
		}
		if _, err := c.Write([]byte("x")); err != nil {
			t.Errorf("another host's connection was hit: %v", err)
		}
		l.Close()
	})
}

// TestBytesArriveInOrder checks that, for any sizes and changes of latency, the
// bytes read equal the bytes written, followed by io.EOF.
func TestBytesArriveInOrder(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		sizes := rapid.SliceOfN(rapid.IntRange(0, 100_000), 1, 8).Draw(r, "writes")
		delays := rapid.SliceOfN(rapid.IntRange(0, 20), len(sizes), len(sizes)).Draw(r, "latency in ms")
		readSize := rapid.IntRange(1, 80_000).Draw(r, "read size")
		var sent, got []byte
		var failed error
		synctest.Test(t, func(*testing.T) {
			var n Network
			l, _ := n.Listen("s:1")
			a, _ := n.Dial("tcp", "s:1")
			b, _ := l.Accept()
			go func() {
				for i, size := range sizes {
					n.SetLatency("", time.Duration(delays[i])*time.Millisecond)
					p := bytes.Repeat([]byte{byte(i)}, size)
					sent = append(sent, p...)
					a.Write(p)
				}
				a.Close()
			}()
			buf := make([]byte, readSize)
			for failed == nil {
				var k int
				k, failed = b.Read(buf)
				got = append(got, buf[:k]...)
			}
			b.Close()
		})
		if failed != io.EOF || !bytes.Equal(sent, got) {
			r.Fatalf("sent %d bytes, read %d, ended with %v", len(sent), len(got), failed)
		}
	})
}
