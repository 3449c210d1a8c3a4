package shim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"lull/internal/platform/cgroup"
	"lull/internal/protocol/shimctl"
)

// Limits for requests to other programs to thaw something.
const (
	askLimit   = 5 * time.Second // short, because a daemon that connects must wait for it
	askAgain   = 2 * time.Second
	maxReply   = 16 << 10
	maxRequest = 1 << 10 // maximum length of a path, in bytes
)

// outside adds or deletes the entry of something that may be frozen and is not a
// run.
func (s *Shim) outside(_ context.Context, q *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Outside
	if err := q.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if m.Socket == "" && m.Group == "" && len(m.Tree) == 0 {
		if err := validID(m.ID); err != nil {
			return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot remove an outside entry: %v", err)
		}
		return shimctl.Answer{}, s.dropOutside(m.ID)
	}
	if err := validOutside(m); err != nil {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot store an outside entry: %v", err)
	}
	s.mu.Lock()
	s.others[m.ID] = m
	s.mu.Unlock()
	return shimctl.Answer{}, save(s.dir.outsideFile(m.ID), m, false)
}

func (s *Shim) dropOutside(id string) error {
	s.mu.Lock()
	delete(s.others, id)
	s.mu.Unlock()
	return remove(s.dir.outsideFile(id))
}

func (s *Shim) loadOutside() error {
	all, err := loadAll(s.dir.path+"/outside", validOutside)
	for _, o := range all {
		s.others[o.ID] = o
	}
	return err
}

func validOutside(o shimctl.Outside) error {
	if err := validID(o.ID); err != nil {
		return err
	}
	if o.Group != "" || len(o.Tree) > 0 {
		return validInPlace(o)
	}
	if !filepath.IsAbs(o.Socket) {
		return fmt.Errorf("%q is not the absolute path of a socket", o.Socket)
	}
	if o.QMP && o.Path == "" {
		return nil
	}
	if o.QMP || len(o.Path) > maxRequest || !strings.HasPrefix(o.Path, "/") ||
		strings.ContainsFunc(o.Path, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return fmt.Errorf("%.100q is not a valid request path", o.Path)
	}
	return nil
}

// validInPlace checks an entry of something that the daemon freezes itself.
func validInPlace(o shimctl.Outside) error {
	switch {
	case o.Socket != "" || o.Path != "" || o.QMP || o.Group != "" && len(o.Tree) > 0:
		return errors.New("want one of a socket, a control group and processes")
	case o.Group != "" && (!filepath.IsAbs(o.Group) || len(o.Group) > maxRequest):
		return fmt.Errorf("%.100q is not the absolute directory of a control group", o.Group)
	}
	for _, p := range o.Tree {
		if p.PID <= 1 {
			return fmt.Errorf("%d is not a process to continue", p.PID)
		}
	}
	return nil
}

// letOthersRun thaws what a daemon that has ended may have left frozen and what is
// not a run, partly by requests to other programs. It does so only while still
// returns true. Failures are left for the next call. A daemon that connects is
// served between two requests.
func (s *Shim) letOthersRun(why string, still func() bool) {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.others))
	s.mu.Unlock()
	silent := map[string]bool{} // sockets that did not answer, so that another request would hang too
	for _, o := range all {
		if o.Socket != "" && silent[o.Socket] {
			continue
		}
		if err := s.letOneRun(o, why, still); err != nil {
			s.log.Error("cannot thaw something for an earlier daemon", "id", o.ID, "socket", o.Socket, "group", o.Group, "err", err)
			silent[o.Socket] = true
		}
	}
}

func (s *Shim) letOneRun(o shimctl.Outside, why string, still func() bool) error {
	s.thawing.Lock()
	defer s.thawing.Unlock()
	if !still() {
		return nil
	}
	ask := askToThaw
	switch {
	case o.QMP:
		ask = continueGuest
	case o.Group != "":
		ask = thawGroup
	case len(o.Tree) > 0:
		ask = s.continueTree
	}
	was, err := ask(o)
	if err != nil {
		return err
	}
	if was {
		s.log.Warn("thawed", "why", why, "id", o.ID, "by", o.Socket)
	}
	if was && o.Path == "" { // Docker reports a thaw by a request to it
		err = s.remember([]string{o.ID})
	}
	return errors.Join(err, s.dropOutside(o.ID))
}

// thawGroup thaws a control group. It succeeds if the group no longer exists. was
// reports whether the group was frozen.
func thawGroup(o shimctl.Outside) (was bool, err error) {
	g, err := cgroup.At(o.Group)
	if err == nil {
		was, err = g.Held()
	}
	if err == nil && was {
		err = g.Thaw()
	}
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return was, err
}

// continueTree continues the stopped processes of a tree. was reports whether there
// were any.
func (s *Shim) continueTree(o shimctl.Outside) (was bool, err error) {
	var stopped []int
	var errs []error
	for _, p := range o.Tree {
		st, err := s.proc.Stat(p.PID)
		if err != nil || st.Start != p.Start {
			continue // the process has ended
		}
		pids, err := s.proc.Tree(p.PID, "", nil)
		errs = append(errs, err)
		for _, pid := range pids {
			if !slices.Contains(stopped, pid) && s.stops(pid) {
				stopped = append(stopped, pid)
			}
		}
	}
	if len(stopped) == 0 {
		return false, nil // nothing is stopped, so an error of the listing does not matter
	}
	return true, errors.Join(append(errs, cgroup.ContinueEach(stopped))...)
}

// stops reports whether a process is stopped, or will be: a process that waits in
// the kernel stops when that wait is over.
func (s *Shim) stops(pid int) bool {
	if st, err := s.proc.Stat(pid); err != nil || st.State == 'T' {
		return err == nil
	}
	pending, err := s.proc.Pending(pid, syscall.SIGSTOP)
	return err == nil && pending
}

// askToThaw makes one request to thaw an object. was reports whether the object was
// frozen. It is no error if the object has gone or already runs.
func askToThaw(o shimctl.Outside) (was bool, err error) {
	c, err := net.DialTimeout("unix", o.Socket, askLimit)
	if err != nil {
		return false, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(askLimit)); err != nil {
		return false, err
	}
	// The request is written without an HTTP library, to keep this program small.
	if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: outside\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", o.Path); err != nil {
		return false, err
	}
	b, err := io.ReadAll(io.LimitReader(c, maxReply))
	var status int
	if n, _ := fmt.Sscanf(string(b), "HTTP/1.1 %d", &status); n != 1 {
		return false, errors.Join(fmt.Errorf("%s answers %.100q", o.Socket, b), err)
	}
	switch {
	case status >= 200 && status < 300:
		return true, nil
	case status == 404, status == 409, strings.Contains(string(b), "is not paused"):
		return false, nil
	}
	return false, fmt.Errorf("%s answers %.300q", o.Socket, b)
}

// continueGuest continues a guest that QEMU has paused. It leaves a guest in any
// other state alone, for example while it is saved or restored, or while its disk
// is full. It succeeds if QEMU has ended. was reports whether the guest was paused.
func continueGuest(o shimctl.Outside) (was bool, err error) {
	c, err := net.DialTimeout("unix", o.Socket, askLimit)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(askLimit)); err != nil {
		return false, err
	}
	answers := json.NewDecoder(io.LimitReader(c, maxReply))
	ask := func(command string) (status string, err error) {
		if _, err := fmt.Fprintf(c, "{\"execute\":%q}\n", command); err != nil {
			return "", err
		}
		for {
			var m struct {
				Return *struct{ Status string } `json:"return"`
				Error  *struct{ Desc string }   `json:"error"`
			}
			if err := answers.Decode(&m); err != nil {
				return "", fmt.Errorf("%s: %s: %w", o.Socket, command, err)
			}
			switch { // QEMU's greeting and events are skipped
			case m.Error != nil:
				return "", fmt.Errorf("%s: %s: %.300q", o.Socket, command, m.Error.Desc)
			case m.Return != nil:
				return m.Return.Status, nil
			}
		}
	}
	if _, err := ask("qmp_capabilities"); err != nil {
		return false, err
	}
	status, err := ask("query-status")
	if err != nil || status != "paused" {
		return false, err
	}
	_, err = ask("cont")
	return err == nil, err
}
