package process

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"lull/internal/platform/proc"
)

// pids lists every process of the tree. Without a control group, if lull started
// the tree, these are the main process, its descendants, and processes whose
// parents have exited, which are children of the shim. If fresh is set, the latter
// are searched for now. Otherwise a recent search may be used, which thousands of
// instances share.
func (w *Work) pids(fresh bool) ([]int, error) {
	if w.group != nil {
		return w.group.PIDs()
	}
	if w.kin != nil {
		return w.kinPIDs()
	}
	// The main process's PID may belong to another process now, whose tree is not
	// ours.
	roots := []int{w.ident.PID}
	if s, err := w.r.fs.Stat(w.ident.PID); err == nil && s.Start != w.ident.Start {
		roots = nil
	}
	astray, err := w.r.strays.of(w, fresh)
	errs := []error{err}
	var all []int
	for _, root := range append(roots, astray...) {
		pids, err := w.r.fs.Tree(root, "", nil)
		all, errs = append(all, pids...), append(errs, err)
	}
	slices.Sort(all)
	return slices.Compact(all), errors.Join(errs...)
}

// strays finds processes whose parents have exited, by their mark. It skips the
// main processes of all runs, so on most hosts it reads no environment at all.
type strays struct {
	r *Runtime

	mu     sync.Mutex
	at     time.Time
	byID   map[string][]int
	hidden []proc.Stat // processes whose environment cannot be read
	err    error
}

// of returns the strays of w. An error means that a process whose environment
// cannot be read may belong to w too.
func (s *strays) of(w *Work, fresh bool) ([]int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if fresh || time.Since(s.at) > sharedFor {
		s.scan()
	}
	errs := []error{s.err}
	for _, h := range s.hidden {
		if h.Start >= w.ident.Start { // a process older than w cannot belong to it
			errs = append(errs, fmt.Errorf("cannot determine the owner of process %d: no right to read its environment", h.PID))
		}
	}
	return slices.Clone(s.byID[w.id]), errors.Join(errs...)
}

// scan reads the children of the shim. If a shim has died, it also reads those of
// init, which has taken over the children of that shim. s.mu must be held.
func (s *strays) scan() {
	s.at, s.byID, s.hidden, s.err = time.Now(), map[string][]int{}, nil, nil
	s.r.mu.Lock()
	reapers := []int{s.r.client.Welcome.PID}
	mains := make(map[int]bool, len(s.r.works))
	for _, w := range s.r.works {
		mains[w.ident.PID] = true
	}
	if s.r.orphaned {
		reapers = append(reapers, 1)
	}
	s.r.mu.Unlock()
	for _, reaper := range reapers {
		children, err := childrenOf(reaper)
		if err != nil {
			s.err = errors.Join(s.err, err)
			continue
		}
		for _, pid := range children {
			if !mains[pid] && pid > 1 {
				s.add(pid)
			}
		}
	}
}

func (s *strays) add(pid int) {
	path := fmt.Sprintf("/proc/%d/environ", pid)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrPermission) {
		if st, serr := s.r.fs.Stat(pid); serr == nil && !st.Ended() && owned(pid) {
			s.hidden = append(s.hidden, st)
		}
		return
	}
	if err != nil {
		return // the process has ended
	}
	for e := range bytes.SplitSeq(b, []byte{0}) {
		if id, ok := strings.CutPrefix(string(e), mark("")); ok {
			s.byID[id] = append(s.byID[id], pid)
			return
		}
	}
}

// owned reports whether a process runs as this process's user. A process of another
// user cannot be an instance's unless this process runs as root, which can read
// every environment.
func owned(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	_, line, _ := bytes.Cut(b, []byte("\nUid:\t"))
	word, _, _ := bytes.Cut(line, []byte("\t"))
	return string(word) == strconv.Itoa(os.Getuid())
}

// childrenOf lists the children of all threads of a process. On a kernel without
// children files it searches all processes for those with this parent.
func childrenOf(pid int) ([]int, error) {
	tids, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil, fmt.Errorf("cannot list the children of process %d: %w", pid, err)
	}
	var out []int
	for _, tid := range tids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, tid.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			if _, serr := os.Stat(fmt.Sprintf("/proc/%d/task/%s", pid, tid.Name())); serr != nil {
				continue // the thread has ended, and another one has its children
			}
			return byParent(pid)
		}
		if err != nil {
			return nil, fmt.Errorf("cannot list the children of process %d: %w", pid, err)
		}
		for word := range bytes.FieldsSeq(b) {
			n, err := strconv.Atoi(string(word))
			if err != nil {
				return nil, fmt.Errorf("cannot list the children of process %d: %w", pid, err)
			}
			out = append(out, n)
		}
	}
	return out, nil
}

func byParent(pid int) ([]int, error) {
	all, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var out []int
	for _, e := range all {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if st, err := proc.Live().Stat(n); err == nil && st.PPID == pid {
			out = append(out, n)
		}
	}
	return out, nil
}
