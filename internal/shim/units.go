package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/platform/cgroup"
	"lull/internal/protocol/shimctl"
)

// The program of a systemd unit is started by systemd. A drop-in makes systemd
// execute lull-shim in its place, which puts itself under a filter, passes the
// descriptor that reports its binds to the socket of this file, and becomes the
// program (become.go). From then on the unit's binds are answered like those of any
// other run.

// Limits of the unit socket, which every local user can connect to.
const (
	introLimit  = 5 * time.Second // time limit of one exchange
	maxIntro    = 1 << 10
	introAtOnce = 64
)

// intro is the first message of a program of a unit.
type intro struct {
	Invocation string `json:"invocation"`
}

// Answers to an intro, of one byte each.
const (
	saysPlain   = 'n' // execute the program without a filter
	saysBinds   = 'b' // report binds
	saysUnlinks = 'u' // report binds and the removal of files
)

// unit is a registered unit, as in its file.
type unit struct {
	shimctl.Unit
	State shimctl.UnitState `json:"state,omitzero"`
}

func validUnit(u unit) error {
	if err := validID(u.ID); err != nil {
		return err
	}
	if !strings.HasPrefix(u.Group, "/") || u.Group == "/" || len(u.Group) > maxRequest || strings.Contains(u.Group, "..") {
		return fmt.Errorf("%.100q is not the control group of a unit", u.Group)
	}
	return nil
}

// unit handles the request of the same name.
func (s *Shim) unit(_ context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Unit
	if err := r.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if err := validID(m.ID); err != nil {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot register a unit: %v", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch u := s.units[m.ID]; {
	case m.Forget:
		delete(s.units, m.ID)
		return shimctl.Answer{Body: shimctl.UnitState{}}, remove(s.dir.unitFile(m.ID))
	case m.Group == "" && u == nil:
		return shimctl.Answer{Body: shimctl.UnitState{}}, nil
	case m.Group == "":
		return shimctl.Answer{Body: u.State}, nil
	default:
		n := &unit{Unit: m}
		if u != nil {
			n.State, n.Unlinks = u.State, m.Unlinks || u.Unlinks
		}
		if u != nil && *u == *n {
			return shimctl.Answer{Body: u.State}, nil
		}
		if err := validUnit(*n); err != nil {
			return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot register a unit: %v", err)
		}
		s.units[m.ID] = n
		return shimctl.Answer{Body: n.State}, save(s.dir.unitFile(m.ID), n, false)
	}
}

func (s *Shim) loadUnits() error {
	all, err := loadAll(s.dir.path+"/units", validUnit)
	for _, u := range all {
		s.units[u.ID] = &u
	}
	return err
}

// listenUnits listens at the unit socket.
func (s *Shim) listenUnits() (int, error) {
	name, err := shimctl.UnitSocket(s.dir.path)
	if err != nil {
		return -1, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	if err = unix.Bind(fd, &unix.SockaddrUnix{Name: name}); err == nil {
		err = unix.Listen(fd, introAtOnce)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("listen on %s: %w", name, err)
	}
	return fd, nil
}

// serveUnits takes the descriptors of programs of units until ctx ends. A shim that
// cannot listen works without: those programs then run without a filter.
func (s *Shim) serveUnits(ctx context.Context) error {
	l, err := s.listenUnits()
	if err != nil {
		s.log.Error("no socket can be handed to a unit", "err", err)
		<-ctx.Done()
		return nil
	}
	f := os.NewFile(uintptr(l), "units")
	defer f.Close()
	defer context.AfterFunc(ctx, func() { f.Close() })()
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	slots := make(chan struct{}, introAtOnce)
	for {
		c := -1
		err := raw.Read(func(fd uintptr) bool {
			n, _, err := unix.Accept4(int(fd), unix.SOCK_CLOEXEC)
			if err == nil {
				c = n
			}
			return err != unix.EAGAIN
		})
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("cannot wait for the programs of units: %w", err)
		case c < 0:
			continue // the client has already gone
		}
		id := s.unitOfPeer(c)
		if id == "" { // any user can connect
			_, _ = unix.Write(c, []byte{saysPlain})
			unix.Close(c)
			continue
		}
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			defer unix.Close(c)
			if err := s.introduce(id, c); err != nil {
				s.log.Warn("a unit runs without handoff", "instance", id, "err", err)
			}
		}()
	}
}

// unitOfPeer returns the ID of the unit that the process at the other end of a
// connection belongs to; "" for none.
func (s *Shim) unitOfPeer(c int) string {
	peer, err := unix.GetsockoptUcred(c, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return ""
	}
	in := groupOf(int(peer.Pid))
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, u := range s.units {
		if u.covers(in) {
			return id
		}
	}
	return ""
}

func (u *unit) covers(group string) bool {
	return group == u.Group || strings.HasPrefix(group, u.Group+"/")
}

// groupOf returns the control group of a process in the unified hierarchy; "" if it
// cannot be read.
func groupOf(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSuffix(path, "\n")
		}
	}
	return ""
}

// belongs reports whether a process may be handed the sockets of a unit. The answer is
// true for anything but a unit.
func (s *Shim) belongs(id string, pid int) bool {
	s.mu.Lock()
	u := s.units[id]
	s.mu.Unlock()
	return u == nil || u.covers(groupOf(pid))
}

// introduce takes the descriptor that reports the binds of one run of a unit.
func (s *Shim) introduce(id string, c int) error {
	limit := unix.NsecToTimeval(introLimit.Nanoseconds())
	_ = unix.SetsockoptTimeval(c, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit) // it also works without
	b := make([]byte, maxIntro)
	n, err := unix.Read(c, b)
	if err != nil {
		return err
	}
	var m intro
	if err := json.Unmarshal(b[:n], &m); err != nil {
		return err
	}
	s.mu.Lock()
	u := s.units[id]
	answer := byte(saysPlain)
	if u != nil && u.Unlinks {
		answer = saysUnlinks
	} else if u != nil {
		answer = saysBinds
	}
	s.mu.Unlock()
	if _, err := unix.Write(c, []byte{answer}); err != nil || answer == saysPlain {
		return err
	}
	w, err := readStage(c)
	if err != nil {
		return err
	}
	// Runs follow each other, so the time numbers them.
	err = s.takeFilter(key{id, uint64(time.Now().UnixNano())}, w)
	if err == nil {
		err = s.noteInvocation(id, shimctl.UnitState{Invocation: m.Invocation, NoNewPrivs: w.noPrivs})
	} else {
		err = errors.Join(err, s.noteInvocation(id, shimctl.UnitState{}))
		s.srv.Send(shimctl.VerbHeld, shimctl.HeldChanged{ID: id, Why: err.Error()})
		s.awaitUnheld(id)
	}
	_, werr := unix.Write(c, []byte{saysContinue})
	return errors.Join(err, werr)
}

// noteInvocation records the last run of a unit.
func (s *Shim) noteInvocation(id string, to shimctl.UnitState) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.units[id]
	if u == nil || u.State == to {
		return nil
	}
	u.State = to
	return save(s.dir.unitFile(id), u, false)
}

// vacateLimit is how long the daemon has to take the clients of a unit whose program
// cannot be handed its sockets.
const vacateLimit = 2 * time.Second

// awaitUnheld waits until nothing is held under id, so that the program can bind its
// addresses itself. After vacateLimit the sockets are closed.
func (s *Shim) awaitUnheld(id string) {
	for end := time.Now().Add(vacateLimit); s.holds(id); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			if err := s.setHeld(id, nil); err != nil {
				s.log.Error("the sockets of a unit stay open", "instance", id, "err", err)
			}
			return
		}
	}
}

// pidsOf returns the processes of a unit; ok is false for anything else.
func (s *Shim) pidsOf(id string) (pids []int, ok bool, err error) {
	s.mu.Lock()
	u := s.units[id]
	s.mu.Unlock()
	if u == nil {
		return nil, false, nil
	}
	g, err := cgroup.Lookup(u.Group)
	if err == nil {
		pids, err = g.PIDs()
	}
	return pids, true, err
}
