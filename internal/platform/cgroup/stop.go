package cgroup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/delay"
)

// Processes gives access to a process tree that is stopped by signals.
type Processes interface {
	// Tree returns every process of the tree at one moment. An error together
	// with a list means that the list may be incomplete.
	Tree() ([]int, error)
	// Still reports whether every thread of pid has stopped or exited.
	Still(pid int) (bool, error)
}

// Stop sends SIGSTOP to the process group of root and to every process of its
// tree, including those that left the group, until every thread is in state T
// and two successive scans found no new process. It returns the processes for
// Continue. On an error, or when ctx ends first, all of them are continued.
//
// A process that keeps detaching from its parents (a daemon of a daemon of a
// daemon) during the scan can escape any listing; only a control group holds it.
func Stop(ctx context.Context, root int, p Processes) ([]int, error) {
	if root <= 1 {
		return nil, fmt.Errorf("cannot stop the processes of %d: not an instance", root)
	}
	return stop(ctx, root, p)
}

// StopTree is Stop for a tree whose root's process group may have other
// members: no signal is sent to a group. Its result is for ContinueEach.
func StopTree(ctx context.Context, p Processes) ([]int, error) { return stop(ctx, 0, p) }

func stop(ctx context.Context, root int, p Processes) ([]int, error) {
	for {
		s := stopping{p: p, root: root, still: map[int]bool{}}
		attempt, cancel := context.WithTimeout(ctx, stuckAfter)
		err := s.run(attempt)
		cancel()
		if err == nil {
			return s.pids, nil
		}
		cerr := s.undo()
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return nil, errors.Join(fmt.Errorf("cannot stop the processes of %d: %w", root, err), cerr)
		}
		// A parent in vfork waits in the kernel for a child that is now stopped.
		// Continuing both for a moment resolves that.
		if err := delay.For(ctx, 2*time.Millisecond); err != nil {
			return nil, fmt.Errorf("cannot stop the processes of %d: %w", root, err)
		}
	}
}

// stuckAfter limits one attempt before everything is continued once.
const stuckAfter = 250 * time.Millisecond

// stopping is the state of one attempt to stop a tree.
type stopping struct {
	p     Processes
	root  int   // leader of the process group; 0 for none
	pids  []int // every process ever found
	still map[int]bool
}

func (s *stopping) run(ctx context.Context) error {
	// One signal to the whole group is atomic: no fork in it escapes.
	if s.root > 0 {
		if err := unix.Kill(-s.root, unix.SIGSTOP); err != nil && err != unix.ESRCH {
			return fmt.Errorf("process group: %w", err)
		}
	}
	const calmEnough = 2
	for calm := 0; calm < calmEnough; {
		pids, listErr := s.p.Tree()
		fresh, err := s.signal(pids)
		if err != nil {
			return err
		}
		stable, err := s.recheck(pids)
		if err != nil {
			return err
		}
		if fresh || !stable || listErr != nil {
			calm = 0
		} else {
			calm++
		}
		if ctx.Err() != nil {
			return errors.Join(context.Cause(ctx), listErr)
		}
		if !stable {
			if err := delay.For(ctx, 50*time.Microsecond); err != nil {
				return err
			}
		}
	}
	return nil
}

// signal sends SIGSTOP to those of pids that are not known to have stopped. fresh
// reports whether one of them is new.
func (s *stopping) signal(pids []int) (fresh bool, err error) {
	for _, pid := range pids {
		still, known := s.still[pid]
		if !known {
			fresh = true
			s.pids = append(s.pids, pid)
			s.still[pid] = false
		}
		if still {
			continue
		}
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil && err != unix.ESRCH {
			return fresh, fmt.Errorf("process %d: %w", pid, err)
		}
	}
	return fresh, nil
}

// recheck checks every process again, including stopped ones: a process that
// still ran may have continued another.
func (s *stopping) recheck(pids []int) (bool, error) {
	all := true
	for _, pid := range pids {
		still, err := s.p.Still(pid)
		if err != nil {
			return false, fmt.Errorf("process %d: %w", pid, err)
		}
		s.still[pid] = still
		all = all && still
	}
	return all, nil
}

func (s *stopping) undo() error {
	if s.root > 0 {
		return Continue(s.root, s.pids)
	}
	return ContinueEach(s.pids)
}

// Continue resumes the processes that Stop returned: the group of root in one
// call, then the others. Processes that have exited are skipped.
func Continue(root int, pids []int) error {
	if root <= 1 {
		return fmt.Errorf("cannot continue the processes of %d: not an instance", root)
	}
	var errs []error
	led := unix.Kill(-root, unix.SIGCONT)
	if led != nil && led != unix.ESRCH {
		errs = append(errs, fmt.Errorf("cannot continue the process group of %d: %w", root, led))
	}
	if led == nil { // the leader has continued
		pids = slices.DeleteFunc(slices.Clone(pids), func(pid int) bool { return pid == root })
	}
	return errors.Join(append(errs, ContinueEach(pids))...)
}

// ContinueEach resumes the processes that StopTree returned. Processes that have
// exited are skipped.
func ContinueEach(pids []int) error {
	var errs []error
	for _, pid := range pids {
		if err := unix.Kill(pid, unix.SIGCONT); err != nil && err != unix.ESRCH {
			errs = append(errs, fmt.Errorf("cannot continue process %d: %w", pid, err))
		}
	}
	return errors.Join(errs...)
}
