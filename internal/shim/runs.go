package shim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/platform/cgroup"
	"lull/internal/platform/proc"
	"lull/internal/protocol/shimctl"
)

// Mark returns the environment entry by which an instance's process is recognized
// even if its parents have exited.
func Mark(id string) string { return "LULL_INSTANCE_ID=" + id }

// stageLimit bounds the steps between fork and the execution of the program.
const stageLimit = 20 * time.Second

// handle answers one request.
func (s *Shim) handle(ctx context.Context, r *shimctl.Request) (shimctl.Answer, error) {
	verbs := map[string]func(context.Context, *shimctl.Request) (shimctl.Answer, error){
		shimctl.VerbStart: s.start, shimctl.VerbList: s.list, shimctl.VerbAckExit: s.ackExit,
		shimctl.VerbAckThawed: s.ackThawed, shimctl.VerbHold: s.hold, shimctl.VerbUnhold: s.unhold,
		shimctl.VerbListeners: s.listeners, shimctl.VerbHolds: s.listHeld, shimctl.VerbDup: s.dup, shimctl.VerbExec: s.exec,
		shimctl.VerbForget: s.forget, shimctl.VerbAdopt: s.adopt, shimctl.VerbOutside: s.outside,
		shimctl.VerbFilter: s.filter, shimctl.VerbHandoff: s.checkHandoff,
		shimctl.VerbKeep: s.keep, shimctl.VerbBeat: s.beat, shimctl.VerbRelease: s.release, shimctl.VerbDoor: s.door,
		shimctl.VerbUnit: s.unit,
	}
	do := verbs[r.Verb]
	if do == nil {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot do %q: no such verb", r.Verb)
	}
	return do(ctx, r)
}

func (s *Shim) start(ctx context.Context, q *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Start
	if err := q.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if err := checkStart(m); err != nil {
		return shimctl.Answer{}, err
	}
	r := &run{Run: shimctl.Run{ID: m.ID, Run: m.Run, BootID: s.boot, Cgroups: m.Cgroups, LogPath: m.LogPath, LogMax: m.LogMax, User: m.User,
		Handoff: len(m.Handoff) > 0}}
	if err := s.onceOver(ctx, m.ID, func() error { return s.claim(r) }); err != nil {
		return shimctl.Answer{}, err
	}
	s.begin.RLock()
	defer s.begin.RUnlock()
	var noPrivs bool
	err := s.sweep(ctx, r)
	if err == nil {
		noPrivs, err = s.launch(ctx, r, m)
	}
	if err != nil {
		s.mu.Lock()
		delete(s.byPID, r.PID)
		if s.runs[r.ID] == r {
			delete(s.runs, r.ID)
		}
		s.mu.Unlock()
		s.note()
		return shimctl.Answer{}, errors.Join(err, remove(s.dir.runFile(r.ID)))
	}
	s.mu.Lock()
	early := r.state == over // the program has already ended
	// Whoever starts the next run knows how the earlier ones ended.
	gone := s.dropExits(r.ID, func(run uint64) bool { return run < m.Run })
	if !early {
		r.state = alive
	}
	exit := r.exit
	s.mu.Unlock()
	if early {
		s.ends(r, exit)
	}
	if err := s.removeExits(gone); err != nil {
		s.log.Warn("cannot remove an old exit", "instance", r.ID, "err", err)
	}
	a := shimctl.Answer{Body: shimctl.Started{PID: r.PID, Start: r.Start, NoNewPrivs: noPrivs}, Close: true}
	if len(m.Handoff) > 0 && !early {
		fd, err := s.dupFilter(r.key())
		if err != nil {
			s.log.Warn("the daemon has no duplicate of the bind filter", "instance", r.ID, "err", err)
		} else {
			a.FDs = []int{fd}
		}
	}
	return a, nil
}

// sweepLimit bounds the removal of an earlier run's processes.
const sweepLimit = 5 * time.Second

// sweep kills the processes of an earlier run of the same ID that are left in the
// groups. It also thaws the groups, because a program started in a frozen group
// would never begin.
func (s *Shim) sweep(ctx context.Context, r *run) error {
	if len(r.Cgroups) == 0 {
		return nil
	}
	g, err := cgroup.Place{}.Open(r.Cgroups[0])
	if err != nil {
		return &shimctl.Error{Code: shimctl.CodeStage, Step: "cgroup", Errno: int(errnoOf(err)), Message: err.Error()}
	}
	ctx, cancel := context.WithTimeout(ctx, sweepLimit)
	defer cancel()
	populated, err := g.Populated()
	if err == nil && populated {
		s.log.Warn("ending processes of an earlier run", "instance", r.ID)
		if err = g.Kill(ctx); err == nil {
			err = g.Renew()
		}
	}
	if err == nil {
		err = g.Thaw()
	}
	if err != nil {
		return shimctl.Errorf(shimctl.CodeFailed, "cannot start %s: %w", r.ID, err)
	}
	return nil
}

func errnoOf(err error) (e syscall.Errno) {
	errors.As(err, &e)
	return e
}

func checkStart(m shimctl.Start) error {
	if err := validID(m.ID); err != nil {
		return shimctl.Errorf(shimctl.CodeInvalid, "%v", err)
	}
	bad := ""
	switch {
	case m.Run == 0:
		bad = "run is 0"
	case len(m.Command) == 0 || m.Command[0] == "":
		bad = "command is empty"
	case !filepath.IsAbs(m.Dir):
		bad = fmt.Sprintf("dir %q is not absolute", m.Dir)
	case !filepath.IsAbs(m.LogPath):
		bad = fmt.Sprintf("log_path %q is not absolute", m.LogPath)
	case len(m.Listen) > shimctl.MaxFDs:
		bad = fmt.Sprintf("listen has %d addresses", len(m.Listen))
	case len(m.Handoff) > shimctl.MaxFDs:
		bad = fmt.Sprintf("handoff has %d addresses", len(m.Handoff))
	case len(m.Listen) > 0 && len(m.Handoff) > 0:
		bad = "listen and handoff exclude each other"
	}
	for _, c := range m.Cgroups {
		if !filepath.IsAbs(c) {
			bad = fmt.Sprintf("cgroup %q is not absolute", c)
		}
	}
	if bad != "" {
		return shimctl.Errorf(shimctl.CodeInvalid, "cannot start %s: %s", m.ID, bad)
	}
	return nil
}

// onceOver calls do, which fails unless the run is over. If the process of the run
// has ended and its exit only has to be collected, it waits for that and tries
// again.
func (s *Shim) onceOver(ctx context.Context, id string, do func() error) error {
	ctx, cancel := context.WithTimeout(ctx, sweepLimit)
	defer cancel()
	for {
		err := do()
		var said *shimctl.Error
		if !errors.As(err, &said) || said.Code != shimctl.CodeBusy || !s.collecting(id) {
			return err
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

// collecting reports whether the process of id's run has ended and its exit has not
// been collected yet.
func (s *Shim) collecting(id string) bool {
	s.mu.Lock()
	old := s.runs[id]
	if old == nil || old.state == over {
		s.mu.Unlock()
		return true
	}
	pid, start := old.PID, old.Start
	s.mu.Unlock()
	if pid == 0 {
		return false // the run is starting
	}
	st, err := s.proc.Stat(pid)
	return errors.Is(err, proc.ErrGone) || err == nil && (st.Start != start || st.Ended())
}

// claim makes r the current run of its ID. It fails if another run of that ID is
// active.
func (s *Shim) claim(r *run) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.runs[r.ID]; old != nil && old.state != over {
		return shimctl.Errorf(shimctl.CodeBusy, "cannot start run %d of %s: run %d is still running as process %d", r.Run.Run, r.ID, old.Run.Run, old.PID)
	}
	s.runs[r.ID] = r
	return nil
}

// launch forks the exec stage, stores the run durably, and only then lets the stage
// execute the program. noPrivs reports whether the program runs with no_new_privs.
func (s *Shim) launch(ctx context.Context, r *run, m shimctl.Start) (noPrivs bool, err error) {
	pipe := s.dir.pipe(r.key())
	out, err := s.openPipe(pipe, m.User)
	if err != nil {
		return false, shimctl.Errorf(shimctl.CodeFailed, "cannot start %s: %w", m.ID, err)
	}
	defer unix.Close(out)
	if err := s.logs.follow(pipe, m.LogPath, m.LogMax); err != nil {
		return false, errors.Join(shimctl.Errorf(shimctl.CodeFailed, "cannot start %s: %w", m.ID, err), remove(pipe))
	}
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, fmt.Errorf("cannot open /dev/null: %w", err)
	}
	defer unix.Close(null)
	stdio := [3]int{null, out, out}
	spec := stageSpec{Command: m.Command, Env: append(m.Env, Mark(m.ID)), Dir: m.Dir, User: m.User, Listen: len(m.Listen)}
	f := forking{what: "start " + m.ID, spec: spec, stdio: stdio, cgroups: m.Cgroups}
	f.register = func(pid int, start uint64) error {
		r.PID, r.Start = pid, start
		s.byPID[pid] = r
		return save(s.dir.runFile(r.ID), r.Run, false)
	}
	if len(m.Listen) > 0 {
		if err := s.keepHeld(m.ID, m.Listen); err != nil {
			return false, err
		}
		f.listen = func() ([]int, string, error) { return s.lend(m.ID, m.Listen) }
	}
	if len(m.Handoff) > 0 {
		if err := s.keepHeld(m.ID, m.Handoff); err != nil {
			return false, err
		}
		f.spec.Unlinks = slices.ContainsFunc(m.Handoff, func(a string) bool { _, _, ok := shimctl.UnixAddr(a); return ok })
		f.filtered = func(w stageReport) error {
			noPrivs = w.noPrivs
			return s.takeFilter(r.key(), w)
		}
	}
	err = s.fork(ctx, f)
	return noPrivs, err
}

// lend returns the sockets held under id for addrs, and their names
// for LISTEN_FDNAMES. s.mu must be held.
func (s *Shim) lend(id string, addrs []string) ([]int, string, error) {
	var fds []int
	var names []string
	for _, a := range addrs {
		i := slices.IndexFunc(s.held[id], func(h held) bool { return h.addr == a })
		if i < 0 {
			return nil, "", fmt.Errorf("cannot hand over %s: it is no longer held", a)
		}
		fds = append(fds, s.held[id][i].fd)
		names = append(names, strings.ReplaceAll(a, ":", "_"))
	}
	return fds, strings.Join(names, ":"), nil
}

// openPipe creates the named pipe for a run's output. It opens the pipe in both
// directions, so that the program can write even if nothing reads.
func (s *Shim) openPipe(path, who string) (int, error) {
	s.logs.names.Lock()
	defer s.logs.names.Unlock()
	if err := remove(path); err != nil {
		return -1, err
	}
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return -1, fmt.Errorf("cannot make the pipe %s: %w", path, err)
	}
	if who != "" && os.Geteuid() == 0 {
		// The program's user needs permission, because a program may open
		// /dev/stdout again.
		if uid, gid, _, err := lookup(who); err == nil {
			if err := os.Chown(path, uid, gid); err != nil {
				return -1, errors.Join(err, remove(path))
			}
		}
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, errors.Join(fmt.Errorf("cannot open the pipe %s: %w", path, err), remove(path))
	}
	return fd, nil
}

// exec handles the request to run a command inside an instance.
func (s *Shim) exec(ctx context.Context, q *shimctl.Request) (shimctl.Answer, error) {
	var m shimctl.Exec
	if err := q.Into(&m); err != nil {
		return shimctl.Answer{}, err
	}
	if len(q.FDs) != 3 || len(m.Command) == 0 || m.Command[0] == "" || !filepath.IsAbs(m.Dir) {
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeInvalid, "cannot run a command in %s: want a command, an absolute dir and three descriptors", m.ID)
	}
	s.mu.Lock()
	r := s.runs[m.ID]
	if r == nil || r.state != alive {
		s.mu.Unlock()
		return shimctl.Answer{}, shimctl.Errorf(shimctl.CodeNotFound, "cannot run a command in %s: it is not running", m.ID)
	}
	cgroups := r.Cgroups
	if m.User == "" {
		m.User = r.User
	}
	s.last++
	out := shimctl.Started{Exec: s.last}
	s.mu.Unlock()
	f := forking{what: "run a command in " + m.ID, cgroups: cgroups, stdio: [3]int(q.FDs),
		spec: stageSpec{Command: m.Command, Env: append(m.Env, Mark(m.ID)), Dir: m.Dir, User: m.User, TTY: m.TTY}}
	f.register = func(pid int, start uint64) error {
		out.PID, out.Start = pid, start
		s.execs[pid] = out.Exec
		return nil
	}
	if err := s.fork(ctx, f); err != nil {
		s.mu.Lock()
		delete(s.execs, out.PID)
		s.mu.Unlock()
		return shimctl.Answer{}, err
	}
	return shimctl.Answer{Body: out}, nil
}

// endExecs kills the commands that an earlier daemon has started, with their
// descendants. Nothing reads their output or needs their exit codes anymore.
func (s *Shim) endExecs() {
	s.mu.Lock()
	pids := slices.Collect(maps.Keys(s.execs))
	s.mu.Unlock()
	for _, pid := range pids {
		tree, err := s.proc.Tree(pid, "", nil)
		if err != nil {
			s.log.Warn("cannot list the processes of an earlier daemon's command; some may continue to run", "pid", pid, "err", err)
		}
		for _, p := range append(slices.DeleteFunc(tree, func(p int) bool { return p == pid }), pid) {
			_ = unix.Kill(p, unix.SIGKILL) // fails if it has ended
		}
	}
	if len(pids) > 0 {
		s.log.Warn("ended the commands of an earlier daemon", "count", len(pids))
	}
}
