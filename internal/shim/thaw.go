package shim

import (
	"errors"
	"os"
	"slices"
	"time"

	"lull/internal/platform/cgroup"
	"lull/internal/protocol/shimctl"
)

// maxThawings bounds the thaws that are stored for the next daemon.
const maxThawings = 20

// thawIfAlone thaws everything if no daemon has been connected since then.
func (s *Shim) thawIfAlone(since time.Time) {
	s.thawing.Lock()
	defer s.thawing.Unlock()
	if s.isAlone(since) {
		s.thaw("no daemon")
		s.endExecs()
		s.dropKept()
	}
}

// isAlone reports whether no daemon has connected since then.
func (s *Shim) isAlone(since time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.alone.Equal(since)
}

// thaw thaws everything that is frozen, and records it for the next daemon, in
// whose records these runs are paused. s.thawing must be held.
func (s *Shim) thaw(why string) {
	s.mu.Lock()
	var runs []shimctl.Run
	for _, r := range s.runs {
		if r.PID > 0 {
			runs = append(runs, r.Run)
		}
	}
	s.mu.Unlock()
	ids := []string{}
	for _, r := range runs {
		frozen, err := s.thawOne(r)
		if err != nil {
			s.log.Error("cannot thaw an instance", "instance", r.ID, "err", err)
		}
		if frozen {
			ids = append(ids, r.ID)
		}
	}
	if len(ids) == 0 {
		return
	}
	slices.Sort(ids)
	s.log.Warn("thawed", "why", why, "count", len(ids), "first", ids[:min(len(ids), shimctl.MaxThawedIDs)])
	if err := s.remember(ids); err != nil {
		s.log.Error("cannot store the list of thawed instances", "err", err)
	}
}

// remember records what was thawed for the next daemon.
func (s *Shim) remember(ids []string) error {
	count := len(ids)
	ids = ids[:min(count, shimctl.MaxThawedIDs)]
	s.mu.Lock()
	s.thawed = append(s.thawed, shimctl.Thawing{At: time.Now(), Count: count, IDs: ids})
	if n := len(s.thawed) - maxThawings; n > 0 {
		s.thawed = s.thawed[n:]
	}
	all := slices.Clone(s.thawed)
	s.mu.Unlock()
	return save(s.dir.path+"/thawed.json", all, true)
}

// thawOne thaws one run and reports whether it was frozen. If the run's main
// process has ended, it thaws the processes that are left.
func (s *Shim) thawOne(r shimctl.Run) (bool, error) {
	if len(r.Cgroups) > 0 {
		g, err := cgroup.Place{}.Open(r.Cgroups[0])
		if errors.Is(err, os.ErrNotExist) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		held, err := g.Held()
		if err == nil && !held {
			return false, nil
		}
		return held, errors.Join(err, g.Thaw())
	}
	// Listing a tree is expensive. If a tree is stopped, so is its main process, so
	// a tree whose main process runs is not listed.
	st, err := s.proc.Stat(r.PID)
	if err == nil && st.Start == r.Start && st.State != 'T' {
		return false, nil
	}
	pids, lerr := s.proc.Tree(r.PID, Mark(r.ID), []int{os.Getpid(), 1})
	if err != nil || st.Start != r.Start {
		pids = slices.DeleteFunc(pids, func(pid int) bool { return pid == r.PID })
	}
	frozen := false
	for _, pid := range pids {
		if p, err := s.proc.Stat(pid); err == nil && p.State == 'T' {
			frozen = true
		}
	}
	if !frozen {
		return false, nil // nothing is stopped, so an error of the listing does not matter
	}
	return true, errors.Join(lerr, cgroup.Continue(r.PID, pids))
}
