package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/platform/proc"
	"lull/internal/protocol/shimctl"
)

// Config configures a shim.
type Config struct {
	Dir     string // its directory, mode 0700; created if missing
	Exe     string // the lull-shim binary, executed again as the exec stage
	Release string // release of the binary, shown to the daemon
	Log     *slog.Logger

	Gone   time.Duration // time without a daemon after which everything is thawed; default 2 s
	Linger time.Duration // time without a daemon and without a run after which the shim exits; default 1 min
}

// Shim keeps the runs of one host. Create it with New and run it once.
type Shim struct {
	cfg     Config
	dir     *directory
	log     *slog.Logger
	proc    *proc.FS
	boot    string
	started time.Time
	logs    *logs
	srv     *shimctl.Server
	changed chan struct{} // signals a change that Run's deadlines depend on

	begin   sync.RWMutex // held for reading while a program is being started
	thawing sync.Mutex   // held while everything is thawed because no daemon runs

	silentAt time.Time // when watch expects the heartbeat to be missing; owned by watch

	mu      sync.Mutex
	pulse   shimctl.Pulse // the daemon's heartbeat
	pulseFD int
	dog     int                        // pid of the watchdog, 0 for none
	dogFD   int                        // the connection to the watchdog, whose end tells it that this shim has ended; -1 for none
	dogHas  map[string][]keptFD        // what the watchdog holds, by id
	ending  bool                       // no daemon is accepted anymore
	ended   bool                       // no watchdog is started anymore
	runs    map[string]*run            // the newest run of each id, until forgotten
	byPID   map[int]*run               // runs that are our children
	execs   map[int]uint64             // pid -> number of a command inside an instance
	last    uint64                     // number of the last such command
	exits   map[string]exits           // by id, unacknowledged
	held    map[string][]held          // sockets, by id
	dropped map[string][]string        // by id, paths of unix sockets that are no longer held, until id holds them again
	filters map[int]*filter            // descriptors that report binds
	others  map[string]shimctl.Outside // things outside the runs that may be frozen for the daemon
	kept    map[string]int             // descriptors that are kept open for the daemon, by id
	thawed  []shimctl.Thawing          // unacknowledged
	notes   *notifier
	trying  sync.Mutex // held while a handoff is tried
	tried   *shimctl.HandoffCheck
	alone   time.Time // since when no daemon has been connected; zero while one is
}

// exits records how the runs of one id ended, by run.
type exits map[uint64]shimctl.Exit

type key struct {
	id  string
	run uint64
}

// run is one run. Everything except the state is stored in its file too.
type run struct {
	shimctl.Run
	state runState
	exit  shimctl.Exit // kept for a starting run whose stage has ended
}

type runState uint8

const (
	starting runState = iota // the exec stage has not executed the program yet
	alive
	over
)

func (r *run) key() key { return key{r.ID, r.Run.Run} }

// New opens the directory, loads the state of an earlier shim and opens the
// socket. Faulty state files do not stop it: they are logged by name.
func New(cfg Config) (*Shim, error) {
	if cfg.Gone == 0 {
		cfg.Gone = 2 * time.Second
	}
	if cfg.Linger == 0 {
		cfg.Linger = time.Minute
	}
	dir, err := openDirectory(cfg.Dir)
	if err != nil {
		return nil, err
	}
	s := &Shim{cfg: cfg, dir: dir, log: cfg.Log, proc: proc.Live(), started: time.Now(),
		changed: make(chan struct{}, 1), runs: map[string]*run{}, byPID: map[int]*run{},
		execs: map[int]uint64{}, exits: map[string]exits{}, held: map[string][]held{}, dropped: map[string][]string{}, filters: map[int]*filter{}, others: map[string]shimctl.Outside{}, kept: map[string]int{}, alone: time.Now(), dogFD: -1}
	if s.boot, err = s.proc.BootID(); err == nil {
		err = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	}
	if err == nil {
		s.logs, err = newLogs(cfg.Log, s.strangerEnded)
	}
	if err == nil {
		s.notes, err = newNotifier(dir.path + "/bind")
	}
	if err != nil {
		dir.lock.Close()
		return nil, fmt.Errorf("cannot start the shim: %w", err)
	}
	s.srv = &shimctl.Server{Handle: s.handle, Welcome: s.welcome, Joined: s.joined, Left: s.left, Log: cfg.Log}
	if err := s.load(); err != nil {
		s.log.Error("some state files cannot be used", "err", err)
	}
	return s, nil
}

// Run serves the daemon until ctx ends or there has been nothing to keep for
// Config.Linger. Then it thaws every run and returns. The programs continue to
// run.
func (s *Shim) Run(ctx context.Context) error {
	l, err := shimctl.Listen(s.dir.path + "/shim.sock")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	errs := make(chan error, 4)
	for _, part := range []func(context.Context) error{
		func(ctx context.Context) error { return s.srv.Run(ctx, l) }, s.logs.run, s.reap, s.readBinds,
	} {
		wg.Go(func() { errs <- part(ctx) })
	}
	err = s.watch(ctx, errs)
	s.mu.Lock()
	s.ending = true
	s.mu.Unlock()
	cancel()
	wg.Wait()
	s.thawing.Lock()
	s.thaw("the shim ends")
	s.thawing.Unlock()
	s.letOthersRun("the shim ends", func() bool { return true })
	s.mu.Lock()
	s.ended = true
	if s.dogFD >= 0 { // the shim ends because it has nothing to do
		_ = sendKept(s.dogFD, keptMessage{}, nil)
	}
	for id, hs := range s.held {
		if r := s.runs[id]; r == nil || r.state != alive { // a running program continues to listen
			s.dropLocked(id, nil, hs)
			continue
		}
		closeHeld(hs)
	}
	s.mu.Unlock()
	return errors.Join(err, remove(s.dir.path+"/shim.sock"), s.dir.lock.Close())
}

// watch is the shim's timer. It thaws when the daemon has been gone for too
// long, and ends the shim when there is nothing left to do.
func (s *Shim) watch(ctx context.Context, errs <-chan error) error {
	timer := time.NewTimer(s.cfg.Gone)
	defer timer.Stop()
	thawed := time.Time{} // the absence that was already handled
	for {
		s.mu.Lock()
		alone, busy, others := s.alone, s.busyLocked(), len(s.others)
		s.mu.Unlock()
		wait := time.Hour
		if left, watched := s.untilSilent(); alone.IsZero() && watched {
			if left <= 0 {
				s.silentAt = time.Time{}
				s.hung()
				continue
			}
			wait, s.silentAt = left, time.Now().Add(left)
		}
		if !alone.IsZero() {
			left := time.Until(alone.Add(s.cfg.Gone))
			switch {
			case left > 0:
				wait = left
			case thawed != alone:
				thawed = alone
				s.thawIfAlone(alone)
				continue
			case others > 0:
				s.letOthersRun("no daemon", func() bool { return s.isAlone(alone) })
				wait = askAgain
			case !busy && time.Since(alone) >= s.cfg.Linger:
				if !s.end(alone) {
					continue
				}
				s.log.Info("nothing is left to keep")
				return nil
			case !busy:
				wait = time.Until(alone.Add(s.cfg.Linger))
			}
		}
		timer.Reset(max(wait, time.Millisecond))
		select {
		case <-ctx.Done():
			return nil
		case err := <-errs:
			if err != nil || ctx.Err() == nil {
				return errors.Join(err, errEarly(err))
			}
			return nil
		case <-s.changed:
		case <-timer.C:
		}
	}
}

// end decides to end the shim, unless a daemon was accepted after alone or a
// run began. A daemon that connects later is refused, so that none starts a run
// here.
func (s *Shim) end(alone time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ending = s.alone.Equal(alone) && !s.busyLocked()
	return s.ending
}

func errEarly(err error) error {
	if err == nil {
		return errors.New("a part of the shim ended")
	}
	return nil
}

func (s *Shim) busyLocked() bool {
	for _, r := range s.runs {
		if r.state != over {
			return true
		}
	}
	return len(s.execs) > 0
}

func (s *Shim) note() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// welcome ends the absence of a daemon. If the shim is ending, it refuses the
// daemon with CodeGone. It waits for a thaw in progress, so that the daemon
// learns of it before it does anything.
func (s *Shim) welcome() (shimctl.Welcome, error) {
	s.thawing.Lock()
	defer s.thawing.Unlock()
	s.endExecs()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending {
		return shimctl.Welcome{}, shimctl.Errorf(shimctl.CodeGone, "cannot serve a daemon: the shim is ending")
	}
	s.alone = time.Time{}
	s.disarmLocked()
	return shimctl.Welcome{Version: shimctl.Version, Release: s.cfg.Release, PID: os.Getpid(), StartedAt: s.started,
		Thawed: append([]shimctl.Thawing(nil), s.thawed...)}, nil
}

// joined reports to a new daemon every run that ended while none was connected.
func (s *Shim) joined() {
	s.mu.Lock()
	ends := make([]shimctl.Ended, 0, len(s.exits))
	for id, of := range s.exits {
		for n, e := range of {
			ends = append(ends, shimctl.Ended{ID: id, Run: n, Exit: e})
		}
	}
	s.mu.Unlock()
	s.note()
	for _, e := range ends {
		s.srv.Send(shimctl.VerbExited, e)
	}
}

func (s *Shim) left() {
	s.mu.Lock()
	if s.alone.IsZero() { // the daemon was hung, and its absence counts since then
		s.alone = time.Now()
	}
	s.mu.Unlock()
	s.note()
}

// load reads the state of an earlier shim.
func (s *Shim) load() error {
	done, err := s.takeOver()
	defer done()
	if err != nil {
		s.log.Error("the sockets of an earlier shim are not taken over", "err", err)
	}
	ended, err1 := loadAll(s.dir.path+"/exits", validEnded)
	runs, err2 := loadAll(s.dir.path+"/runs", validRun)
	errs := []error{err1, err2}
	for _, e := range ended {
		s.noteExit(key{e.ID, e.Run}, e.Exit)
	}
	for _, r := range runs {
		if err := s.takeUp(r); err != nil {
			errs = append(errs, err)
		}
	}
	if err := s.loadHeld(); err != nil {
		errs = append(errs, err)
	}
	s.resumeTaken()
	s.mu.Lock()
	if len(s.held)+len(s.filters) > 0 { // before done lets the earlier watchdog go
		err = s.watchedLocked()
	}
	s.mu.Unlock()
	errs = append(errs, err)
	if err := s.loadOutside(); err != nil {
		errs = append(errs, err)
	}
	if err := load(s.dir.path+"/thawed.json", &s.thawed); err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// takeUp adopts a run of an earlier shim as far as possible: its log, its end
// (without an exit code) and the duty to thaw it. A run whose end was missed is
// lost.
func (s *Shim) takeUp(r shimctl.Run) error {
	r.Adopted, r.Exit = true, nil
	n := &run{Run: r, state: alive}
	s.mu.Lock()
	if old := s.runs[r.ID]; old != nil && old.state != over {
		s.mu.Unlock()
		if old.Run.Run == r.Run {
			return nil
		}
		return shimctl.Errorf(shimctl.CodeBusy, "cannot adopt run %d of %s: run %d lives", r.Run, r.ID, old.Run.Run)
	}
	s.runs[r.ID] = n
	_, ended := s.exits[r.ID][r.Run]
	if ended {
		n.state = over
	}
	s.mu.Unlock()
	if r.BootID == s.boot {
		if err := s.logs.resume(s.dir.pipe(n.key()), r.LogPath, r.LogMax); err != nil {
			s.log.Warn("the log of a run is not followed", "instance", r.ID, "err", err)
		}
	}
	if ended {
		return nil
	}
	return s.watchStranger(n)
}

// watchStranger waits for the end of a process that is not our child.
func (s *Shim) watchStranger(r *run) error {
	if r.BootID != s.boot {
		s.ends(r, lost())
		return nil
	}
	pidfd, err := unix.PidfdOpen(r.PID, 0)
	if err == unix.ESRCH {
		s.ends(r, lost())
		return nil
	}
	if err != nil {
		return fmt.Errorf("cannot watch process %d of %s: %w", r.PID, r.ID, err)
	}
	// Checked after it was opened, so it is that process or a later one.
	st, err := s.proc.Stat(r.PID)
	if errors.Is(err, proc.ErrGone) || err == nil && (st.Start != r.Start || st.Ended()) {
		unix.Close(pidfd)
		s.ends(r, lost())
		return nil
	}
	if err != nil {
		unix.Close(pidfd)
		return fmt.Errorf("cannot inspect process %d of %s: %w", r.PID, r.ID, err)
	}
	return s.logs.watch(r.PID, pidfd)
}

// noteExit stores an exit. The caller holds mu, or is the only goroutine.
func (s *Shim) noteExit(k key, e shimctl.Exit) {
	if s.exits[k.id] == nil {
		s.exits[k.id] = exits{}
	}
	s.exits[k.id][k.run] = e
}

// dropExits removes the exits of id for which old returns true, and returns
// their keys. The caller holds mu.
func (s *Shim) dropExits(id string, old func(run uint64) bool) (gone []key) {
	for n := range s.exits[id] {
		if old(n) {
			gone = append(gone, key{id, n})
			delete(s.exits[id], n)
		}
	}
	if len(s.exits[id]) == 0 {
		delete(s.exits, id)
	}
	return gone
}

func lost() shimctl.Exit { return shimctl.Exit{At: time.Now(), Lost: true} }

// strangerEnded is called when a watched process that is not our child has ended.
func (s *Shim) strangerEnded(pid int) {
	s.mu.Lock()
	var found *run
	for _, r := range s.runs {
		if r.Adopted && r.state == alive && r.PID == pid {
			found = r
		}
	}
	s.mu.Unlock()
	if found != nil {
		s.ends(found, lost())
	}
}

// ends records how a run ended, first on disk, and reports it to the daemon.
func (s *Shim) ends(r *run, e shimctl.Exit) {
	m := shimctl.Ended{ID: r.ID, Run: r.Run.Run, Exit: e}
	if err := save(s.dir.exitFile(r.key()), m, true); err != nil {
		// The exit is still kept in memory and reported. Its code is lost only if
		// the shim dies before the acknowledgement.
		s.log.Error("an exit is not on disk", "instance", r.ID, "err", err)
	}
	s.mu.Lock()
	r.state = over
	s.noteExit(r.key(), e)
	for _, h := range s.held[r.ID] {
		_ = unix.Listen(h.fd, backlog) // the program may have reduced its backlog
	}
	s.mu.Unlock()
	s.note()
	s.srv.Send(shimctl.VerbExited, m)
}
