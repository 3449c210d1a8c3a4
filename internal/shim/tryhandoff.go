package shim

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// TryVerb is the argument, followed by the address to bind, with which lull-shim
// starts itself to try out a handoff.
const TryVerb = "try-bind"

// Stage runs the part of lull-shim that args request: the exec stage, the program of a systemd unit, a trial of a
// handoff, or the watchdog. ok is false if args request none of them.
func Stage(args []string) (code int, ok bool) {
	switch {
	case len(args) == 2 && args[1] == StageVerb:
		return ExecStage(), true
	case len(args) == 3 && args[1] == TryVerb:
		return tryBind(args[2]), true
	case len(args) == 4 && args[1] == WatchVerb:
		return Watchdog(args[2], args[3]), true
	}
	return becomeUnit(args)
}

// tryBind binds an address, and prints on standard output whether its socket then
// listens.
func tryBind(addr string) int {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return 2
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()})
	}
	if err == nil && !listening(fd) {
		err = errors.New("it did not get a socket")
	}
	if err != nil {
		fmt.Printf("bind: %v", err)
		return 1
	}
	fmt.Print(tried)
	return 0
}

const tried = "handed over"

// tryID is the ID under which a handoff is tried out. No instance can have it.
const tryID = ".try"

// tryLimit bounds one trial of a handoff.
const tryLimit = 10 * time.Second

// checkHandoff reports whether handoffs work for programs that this shim starts. It
// tries one out from end to end, once, because that depends on the kernel, its
// settings and the rights of this process.
func (s *Shim) checkHandoff(ctx context.Context, _ *shimctl.Request) (shimctl.Answer, error) {
	s.trying.Lock()
	defer s.trying.Unlock()
	if s.tried == nil {
		m, err := s.tryHandoff(ctx)
		if err != nil {
			m.Why = err.Error()
		}
		s.tried = &m
	}
	return shimctl.Answer{Body: *s.tried}, nil
}

func (s *Shim) tryHandoff(ctx context.Context) (m shimctl.HandoffCheck, err error) {
	fd, err := listen("127.0.0.1:0")
	if err != nil {
		return m, err
	}
	f, err := formOf(fd)
	if err != nil {
		unix.Close(fd)
		return m, err
	}
	k := key{tryID, 1}
	s.mu.Lock()
	s.held[tryID] = []held{{addr: f.String(), as: f, fd: fd}}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.held, tryID)
		s.mu.Unlock()
		unix.Close(fd)
	}()
	out, in, err := os.Pipe()
	if err != nil {
		return m, err
	}
	defer out.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		in.Close()
		return m, err
	}
	defer null.Close()
	work := forking{what: "try a handoff", stdio: [3]int{int(null.Fd()), int(in.Fd()), int(in.Fd())},
		spec:     stageSpec{Command: []string{s.cfg.Exe, TryVerb, f.String()}, Env: []string{"GOMAXPROCS=1"}, Dir: "/"},
		register: func(int, uint64) error { return nil }}
	work.filtered = func(w stageReport) error {
		m.NoNewPrivs = w.noPrivs
		return s.takeFilter(k, w)
	}
	err = s.fork(ctx, work)
	in.Close()
	if err != nil {
		return m, err
	}
	_ = out.SetReadDeadline(time.Now().Add(tryLimit))
	var b [256]byte
	n, err := out.Read(b[:])
	if said := string(b[:n]); said != tried {
		return m, fmt.Errorf("a socket could not be handed to a program: %s", said)
	}
	return m, nil
}
