package shimctl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"

	"golang.org/x/sys/unix"
)

const testPatience = waittest.Timeout

// serve runs s and returns the path of its socket.
func serve(t *testing.T, s *Server) string {
	t.Helper()
	// The path is longer than a socket address allows.
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 90))
	errtest.None(t, os.Mkdir(dir, 0o700))
	path := filepath.Join(dir, "shim.sock")
	l, err := Listen(path)
	errtest.None(t, err)
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("the socket is %v, %v, want mode 0600", st.Mode(), err)
	}
	if s.Log == nil {
		s.Log = slog.New(slog.DiscardHandler)
	}
	if s.Welcome == nil {
		s.Welcome = func() (Welcome, error) { return Welcome{Version: Version, PID: os.Getpid()}, nil }
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return path
}

func TestDescriptorsTravel(t *testing.T) {
	open := countFDs(t)
	path := serve(t, &Server{Handle: func(_ context.Context, r *Request) (Answer, error) {
		// Return duplicates of the descriptors in reverse order.
		var a Answer
		for i := len(r.FDs) - 1; i >= 0; i-- {
			fd, err := unix.Dup(r.FDs[i])
			if err != nil {
				return Answer{}, err
			}
			a.FDs = append(a.FDs, fd)
		}
		a.Close = true
		return a, nil
	}})
	c, err := Dial(waittest.Context(t), path, Events{})
	if err != nil {
		t.Fatal(err)
	}
	base := countFDs(t)
	for range 50 {
		var give []int
		for i := range MaxFDs {
			fd, err := unix.MemfdCreate(fmt.Sprint(i), unix.MFD_CLOEXEC)
			errtest.None(t, err)
			give = append(give, fd)
		}
		got, err := c.exchange(waittest.Context(t), "turn", nil, give, nil)
		CloseAll(give)
		if err != nil || len(got) != MaxFDs {
			t.Fatalf("%d descriptors came back, %v", len(got), err)
		}
		for i, fd := range got {
			name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
			if want := fmt.Sprintf("/memfd:%d (deleted)", MaxFDs-1-i); err != nil || name != want {
				t.Fatalf("descriptor %d is %s, %v, want %s", i, name, err, want)
			}
			if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Fatalf("descriptor %d would be inherited", i)
			}
		}
		CloseAll(got)
	}
	waittest.Until(t, "no descriptor is left", func() bool { return countFDs(t) == base })
	c.Close()
	waittest.Until(t, "nothing of the connection is left", func() bool { return countFDs(t) <= open+2 })
}

func countFDs(t *testing.T) int {
	list, err := os.ReadDir("/proc/self/fd")
	errtest.None(t, err)
	return len(list)
}

func TestErrorsTravel(t *testing.T) {
	path := serve(t, &Server{Handle: func(_ context.Context, r *Request) (Answer, error) {
		return Answer{}, Errorf(CodeBusy, "cannot start x: %w", syscall.EACCES)
	}})
	c, err := Dial(waittest.Context(t), path, Events{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Start(waittest.Context(t), Start{ID: "x"})
	var e *Error
	if !errors.As(err, &e) || e.Code != CodeBusy || !errors.Is(err, syscall.EACCES) || !strings.HasPrefix(e.Message, "cannot start x") {
		t.Errorf("error %#v", err)
	}
}

func TestOtherVersion(t *testing.T) {
	path := serve(t, &Server{Welcome: func() (Welcome, error) { return Welcome{Version: Version + 1, PID: 77}, nil }})
	_, err := Dial(waittest.Context(t), path, Events{})
	var e *VersionError
	if !errors.As(err, &e) || e.Theirs != Version+1 || e.PID != 77 || !strings.Contains(err.Error(), "77") {
		t.Errorf("error %v, want one that names both versions and the process", err)
	}
}

// TestEvents checks that events arrive in order, and that an event handler may
// call the shim.
func TestEvents(t *testing.T) {
	acked := make(chan Ended, 100)
	s := &Server{}
	s.Handle = func(_ context.Context, r *Request) (Answer, error) {
		var m Ended
		if err := r.Into(&m); err != nil {
			return Answer{}, err
		}
		acked <- m
		return Answer{}, nil
	}
	s.Joined = func() {
		for n := range 100 {
			s.Send(VerbExited, Ended{ID: "x", Run: uint64(n)})
		}
	}
	gone := make(chan struct{})
	s.Left = func() { close(gone) }
	path := serve(t, s)
	ready := make(chan *Client, 1)
	c, err := Dial(waittest.Context(t), path, Events{Ended: func(e Ended) {
		c := <-ready
		if err := c.AckExit(context.Background(), e.ID, e.Run); err != nil {
			t.Error(err)
		}
		ready <- c
	}})
	if err != nil {
		t.Fatal(err)
	}
	ready <- c
	for n := range 100 {
		select {
		case m := <-acked:
			if m.Run != uint64(n) {
				t.Fatalf("event %d came as number %d", m.Run, n)
			}
		case <-time.After(testPatience):
			t.Fatalf("event %d did not come", n)
		}
	}
	(<-ready).Close() // after the answers in the last event handler
	select {
	case <-gone:
	case <-time.After(testPatience):
		t.Fatal("the server does not know that the daemon has gone")
	}
}

// TestLost checks that a canceled request ends, and that a broken connection ends
// every request that waits.
func TestLost(t *testing.T) {
	release := make(chan struct{})
	path := serve(t, &Server{Handle: func(ctx context.Context, _ *Request) (Answer, error) {
		<-release
		return Answer{}, nil
	}})
	c, err := Dial(waittest.Context(t), path, Events{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(waittest.Context(t))
	given := make(chan error, 2)
	go func() { given <- c.AckThawed(ctx) }()
	cancel()
	if err := <-given; !errors.Is(err, context.Canceled) {
		t.Errorf("given up with %v", err)
	}
	go func() { _, err := c.List(waittest.Context(t), ""); given <- err }()
	second, err := Dial(waittest.Context(t), path, Events{}) // replaces the first connection
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if err := <-given; err == nil {
		t.Error("a question on a broken connection was answered")
	}
	close(release)
	<-c.Done()
	c.Close()
}

// TestLaterHelloWins checks that the later of two daemons stays connected even if
// the earlier hello is answered after the later one.
func TestLaterHelloWins(t *testing.T) {
	came, release := make(chan struct{}, 1), make(chan struct{})
	first := make(chan struct{}, 1)
	first <- struct{}{}
	path := serve(t, &Server{
		Handle: func(context.Context, *Request) (Answer, error) { return Answer{Body: List{}}, nil },
		Welcome: func() (Welcome, error) {
			select {
			case <-first:
				came <- struct{}{}
				<-release
			default:
			}
			return Welcome{Version: Version}, nil
		},
	})
	type dialled struct {
		c   *Client
		err error
	}
	held := make(chan dialled, 1)
	go func() {
		c, err := Dial(waittest.Context(t), path, Events{})
		held <- dialled{c, err}
	}()
	<-came
	later, err := Dial(waittest.Context(t), path, Events{})
	if err != nil {
		close(release)
		t.Fatal(err)
	}
	defer later.Close()
	close(release)
	if earlier := <-held; earlier.err == nil {
		defer earlier.c.Close()
		select {
		case <-earlier.c.Done():
		case <-waittest.Context(t).Done():
			t.Error("the earlier connection stays")
		}
	}
	if _, err := later.List(waittest.Context(t), ""); err != nil {
		t.Errorf("the later connection was cut: %v", err)
	}
}

func TestNoise(t *testing.T) {
	path := serve(t, &Server{Handle: func(context.Context, *Request) (Answer, error) { return Answer{}, nil }})
	for name, bytes := range map[string]string{
		"not json": "hello\n", "no hello": `{"id":1,"verb":"list"}` + "\n", "fds that did not come": `{"id":1,"verb":"hello","fds":3}` + "\n",
		"too long": strings.Repeat("x", MaxMessage+8192), "negative": `{"id":1,"verb":"hello","fds":-1}` + "\n",
	} {
		short, done, err := shorten(path)
		errtest.None(t, err)
		conn, err := net.Dial("unix", short)
		done()
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(testPatience))
		_, _ = conn.Write([]byte(bytes)) // the server may close the connection in the middle
		buf := make([]byte, 4096)
		for err == nil {
			_, err = conn.Read(buf)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: the connection stays open", name)
		}
		conn.Close()
	}
	c, err := Dial(waittest.Context(t), path, Events{})
	if err != nil {
		t.Fatalf("after the noise: %v", err)
	}
	c.Close()
}

func FuzzLine(f *testing.F) {
	for _, s := range []string{`{"id":1,"verb":"hello","body":{"version":1}}`, `{"verb":"exit","fds":250}`, `{"fds":251}`, `{"error":{"code":"busy"}}`, `[]`, ``} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := parseLine(b)
		if err == nil && (e.FDs < 0 || e.FDs > MaxFDs) {
			t.Errorf("fds %d", e.FDs)
		}
	})
}
