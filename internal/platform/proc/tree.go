package proc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
)

// ErrUnsettled means that processes came or went during every scan of a tree, so
// the list may be incomplete. It is good enough for sampling but does not prove
// that the whole tree was found.
var ErrUnsettled = errors.New("the process tree kept changing while it was read")

// scans bounds how often a tree is scanned until two scans agree.
const scans = 8

// Tree lists root and its descendants. It also lists children of the processes in
// extra (reapers: init, a subreaper) that have mark in their environment, with
// their descendants; these are what a daemonizing program left behind when its
// parent ended. mark is a whole entry, KEY=VALUE; an empty one matches nothing. A
// program that both left its parent and cleared its environment is not found;
// only a cgroup contains it.
//
// The result is sorted, and two successive scans agreed on it. It includes
// zombies. A pid that disappears is not an error; a root that does not exist is
// not in the list. If a process may not be inspected, or no two scans agreed
// (ErrUnsettled), Tree returns the processes found and an error.
func (f *FS) Tree(root int, mark string, extra []int) ([]int, error) {
	var last []int
	for i := range scans {
		pids, err := f.scan(root, mark, extra)
		if err != nil {
			return pids, err
		}
		if i > 0 && slices.Equal(pids, last) {
			return pids, nil
		}
		last = pids
	}
	return last, fmt.Errorf("cannot list the process tree of %d: %w", root, ErrUnsettled)
}

// scan reads the tree once.
func (f *FS) scan(root int, mark string, extra []int) ([]int, error) {
	kin, err := f.kinship(append([]int{root}, extra...))
	if err != nil {
		return nil, err
	}
	w := walk{fs: f, kin: kin, seen: map[int]bool{}}
	if _, err := f.Stat(root); err == nil {
		w.add(root)
	} else if !errors.Is(err, ErrGone) {
		return nil, err
	}
	for _, reaper := range extra {
		if mark == "" {
			break
		}
		for _, pid := range w.children(reaper) {
			if w.seen[pid] || slices.Contains(extra, pid) {
				continue
			}
			marked, err := f.marked(pid, mark)
			if err != nil {
				w.errs = append(w.errs, err)
			} else if marked {
				w.add(pid)
			}
		}
	}
	pids := make([]int, 0, len(w.seen))
	for pid := range w.seen {
		pids = append(pids, pid)
	}
	slices.Sort(pids)
	return pids, errors.Join(w.errs...)
}

// walk collects the processes of one scan.
type walk struct {
	fs   *FS
	kin  map[int][]int // nil: ask the kernel for the children of each process
	seen map[int]bool
	errs []error
	tids []int
}

// add adds pid and everything below it.
func (w *walk) add(pid int) {
	queue := []int{pid}
	for len(queue) > 0 {
		pid, queue = queue[0], queue[1:]
		if w.seen[pid] {
			continue
		}
		w.seen[pid] = true
		queue = append(queue, w.children(pid)...)
	}
}

func (w *walk) children(pid int) []int {
	if w.kin != nil {
		return w.kin[pid]
	}
	var err error
	w.tids, err = w.fs.tids(w.tids[:0], pid)
	if err != nil {
		if !errors.Is(err, ErrGone) {
			w.errs = append(w.errs, err)
		}
		return nil
	}
	var pids []int
	for _, tid := range w.tids {
		pids, err = w.fs.children(pids, pid, tid)
		if err != nil && !errors.Is(err, ErrGone) {
			w.errs = append(w.errs, err)
		}
	}
	return pids
}

// kinship returns the children of every pid, found in one pass over all
// processes. It returns nil if the kernel lists children itself
// (/proc/PID/task/TID/children).
func (f *FS) kinship(pids []int) (map[int][]int, error) {
	listed, err := f.listed(pids)
	if err != nil || listed {
		return nil, err
	}
	var all []int
	s := f.scratch()
	defer s.free()
	if err := s.numbers(func(n int) bool { all = append(all, n); return true }); err != nil {
		return nil, err
	}
	kin := make(map[int][]int)
	for _, pid := range all {
		st, err := f.Stat(pid)
		if errors.Is(err, ErrGone) {
			continue
		}
		if err != nil {
			return nil, err
		}
		kin[st.PPID] = append(kin[st.PPID], pid)
	}
	return kin, nil
}

// listed reports whether the kernel has children files. It checks the first
// process of pids that exists; if none does, it returns true, because there is
// nothing to list.
func (f *FS) listed(pids []int) (bool, error) {
	for _, pid := range pids {
		_, err := f.children(nil, pid, pid)
		if err == nil {
			return true, nil
		}
		if !errors.Is(err, ErrGone) {
			return false, err
		}
		if _, err := f.Stat(pid); err == nil {
			return false, nil
		}
	}
	return true, nil
}

// children appends the children that one task started to into.
func (f *FS) children(into []int, pid, tid int) ([]int, error) {
	s := f.scratch().num(pid).str("/task").num(tid).str("/children")
	defer s.free()
	b, err := s.read()
	if err != nil {
		return into, err
	}
	into, err = parseChildren(into, b)
	if err != nil {
		return into, s.fail(err)
	}
	return into, nil
}

func parseChildren(into []int, b []byte) ([]int, error) {
	for {
		var word []byte
		word, b = field(b)
		if len(word) == 0 {
			return into, nil
		}
		n, rest, ok := number(word)
		if !ok || len(rest) != 0 || n == 0 || n > 1<<31 {
			return into, errors.New("not a list of pids")
		}
		into = append(into, int(n))
	}
}

// marked reports whether the environment of pid has the entry mark. A process
// that has ended has no environment.
func (f *FS) marked(pid int, mark string) (bool, error) {
	s := f.scratch().num(pid).str("/environ")
	defer s.free()
	b, err := s.read()
	switch {
	case errors.Is(err, ErrGone):
		return false, nil
	case err != nil:
		st, statErr := f.Stat(pid)
		if errors.Is(statErr, ErrGone) || statErr == nil && st.Ended() {
			return false, nil // the environ of a zombie belongs to root
		}
		if f.foreign(pid) {
			return false, nil
		}
		return false, err
	}
	return hasEntry(b, mark), nil
}

// foreign reports whether pid belongs to another user, by its real user ID. A
// set-user-ID program that this user starts keeps the real ID. An ordinary user
// cannot have started a foreign process, and could not signal it either.
func (f *FS) foreign(pid int) bool {
	s := f.scratch().num(pid).str("/status")
	defer s.free()
	b, err := s.read()
	if err != nil {
		return false
	}
	_, line, found := bytes.Cut(b, []byte("\nUid:\t"))
	word, _ := field(line)
	uid, rest, ok := number(word)
	return found && ok && len(rest) == 0 && uid != uint64(os.Getuid())
}

// hasEntry reports whether a NUL-separated environment contains an entry.
func hasEntry(environ []byte, mark string) bool {
	for len(environ) > 0 {
		entry := environ
		if end := bytes.IndexByte(environ, 0); end >= 0 {
			entry, environ = environ[:end], environ[end+1:]
		} else {
			environ = nil
		}
		if len(mark) > 0 && string(entry) == mark {
			return true
		}
	}
	return false
}
