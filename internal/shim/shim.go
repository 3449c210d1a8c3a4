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

	Gone   time.Duration // how long without a daemon until everything is thawed; default 2 s
	Linger time.Duration // how long without a daemon and without a run until the shim exits; default 1 min
}

// Shim keeps the runs of one host. New creates one; Run must be called once.
type Shim struct {
	cfg     Config
	dir     *directory
	log     *slog.Logger
	proc    *proc.FS
	boot    string
	started time.Time
	logs    *logs
	srv     *shimctl.Server
	changed chan struct{} // signals that Run must compute its deadlines again

	begin   sync.RWMutex // held for reading while a program is being started
	thawing sync.Mutex   // held while everything is thawed because no daemon runs

	silentAt time.Time // when watch will next check for a missing heartbeat; used only by watch

	mu      sync.Mutex
	pulse   shimctl.Pulse // the daemon's heartbeat
	pulseFD int
	dog     int                        // PID of the watchdog, 0 for none
	dogFD   int                        // connection to the watchdog, which notices its end when this shim ends; -1 for none
	dogHas  map[string][]keptFD        // what the watchdog holds, by ID
	ending  bool                       // no daemon is accepted anymore
	ended   bool                       // no watchdog is started anymore
	runs    map[string]*run            // newest run of each ID, until it is forgotten
	byPID   map[int]*run               // runs whose main processes are children of this shim
	execs   map[int]uint64             // PID of each command inside an instance, and the command's number
	last    uint64                     // number of the latest command
	exits   map[string]exits           // unacknowledged exits by ID
	held    map[string][]held          // held sockets by ID
	dropped map[string][]string        // by ID: paths of unix sockets that are no longer held, until sockets are held under the ID again
	filters map[int]*filter            // by the descriptor on which binds are reported
	units   map[string]*unit           // systemd units by ID
	others  map[string]shimctl.Outside // by ID: things other than runs that the daemon may have frozen
	kept    map[string]int             // by ID: descriptors kept open for the daemon
	thawed  []shimctl.Thawing          // unacknowledged thaws
	notes   *notifier
	trying  sync.Mutex // held while a handoff is tried out
	tried   *shimctl.HandoffCheck
	alone   time.Time // since when no daemon has been connected; zero while one is
}

// exits maps the runs of one ID to their exits.
type exits map[uint64]shimctl.Exit

type key struct {
	id  string
	run uint64
}

// run is one run. Its state is the only field that is not also in its file.
type run struct {
	shimctl.Run
	state runState
	exit  shimctl.Exit // set while starting if the stage has ended
}

type runState uint8

const (
	starting runState = iota // the exec stage has not executed the program yet
	alive
	over
)

func (r *run) key() key { return key{r.ID, r.Run.Run} }

// New opens the directory, loads the state of an earlier shim and opens the socket.
// It logs unreadable state files by name and continues without them.
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
		execs: map[int]uint64{}, exits: map[string]exits{}, held: map[string][]held{}, dropped: map[string][]string{}, filters: map[int]*filter{}, units: map[string]*unit{}, others: map[string]shimctl.Outside{}, kept: map[string]int{}, alone: time.Now(), dogFD: -1}
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

// Run serves the daemon until ctx ends, or until there has been no daemon and
// nothing to keep for Config.Linger. Then it thaws every run and returns. The
// programs continue to run.
func (s *Shim) Run(ctx context.Context) error {
	l, err := shimctl.Listen(s.dir.path + "/shim.sock")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	errs := make(chan error, 5)
	for _, part := range []func(context.Context) error{
		func(ctx context.Context) error { return s.srv.Run(ctx, l) }, s.logs.run, s.reap, s.readBinds, s.serveUnits,
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
	if s.dogFD >= 0 { // tell the watchdog that the shim ends on purpose
		_ = sendKept(s.dogFD, keptMessage{}, nil)
	}
	for id, hs := range s.held {
		if r := s.runs[id]; r == nil || r.state != alive { // a running program keeps its listeners
			s.dropLocked(id, nil, hs)
			continue
		}
		closeHeld(hs)
	}
	s.mu.Unlock()
	return errors.Join(err, remove(s.dir.path+"/shim.sock"), s.dir.lock.Close())
}

// watch is the shim's timer. It thaws everything when no daemon has been connected
// for too long, and ends the shim when there is nothing left to keep.
func (s *Shim) watch(ctx context.Context, errs <-chan error) error {
	timer := time.NewTimer(s.cfg.Gone)
	defer timer.Stop()
	thawed := time.Time{} // start of the last absence of a daemon that was handled
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

// end reports whether the shim now ends. It does not if a daemon has connected
// since alone or a run has begun. After a true result daemons are refused, so that
// no run can start.
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
	return len(s.execs)+len(s.filters) > 0 // without a shim, the binds of a unit that runs on would fail
}

func (s *Shim) note() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// welcome accepts a daemon, or refuses it with CodeGone if the shim is ending. It
// waits for a thaw in progress, so that its answer contains that thaw.
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

// joined reports every unacknowledged exit to a new daemon.
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
	if s.alone.IsZero() { // otherwise the daemon was hung, and counts as absent since then
		s.alone = time.Now()
	}
	s.mu.Unlock()
	s.note()
}

// load reads the state of an earlier shim.
func (s *Shim) load() error {
	if err := s.loadUnits(); err != nil {
		s.log.Error("cannot load the records of some units, which therefore get no sockets", "err", err)
	}
	done, err := s.takeOver()
	defer done()
	if err != nil {
		s.log.Error("cannot take over the sockets of an earlier shim", "err", err)
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
	if len(s.held)+len(s.filters) > 0 { // must precede done, which lets the earlier watchdog end
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

// takeUp adopts a run of an earlier shim: it follows the run's log, waits for its
// end, whose exit code will be unknown, and thaws it if necessary. If the end was
// missed, the run is recorded as lost.
func (s *Shim) takeUp(r shimctl.Run) error {
	r.Adopted, r.Exit = true, nil
	n := &run{Run: r, state: alive}
	s.mu.Lock()
	if old := s.runs[r.ID]; old != nil && old.state != over {
		s.mu.Unlock()
		if old.Run.Run == r.Run {
			return nil
		}
		return shimctl.Errorf(shimctl.CodeBusy, "cannot adopt run %d of %s: run %d is still running", r.Run, r.ID, old.Run.Run)
	}
	s.runs[r.ID] = n
	_, ended := s.exits[r.ID][r.Run]
	if ended {
		n.state = over
	}
	s.mu.Unlock()
	if r.BootID == s.boot {
		if err := s.logs.resume(s.dir.pipe(n.key()), r.LogPath, r.LogMax); err != nil {
			s.log.Warn("cannot follow the log of a run", "instance", r.ID, "err", err)
		}
	}
	if ended {
		return nil
	}
	return s.watchStranger(n)
}

// watchStranger waits for the end of a process that is not a child of this shim.
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
	// Checked after opening: the descriptor is that of this process, or of a later
	// one with the same PID.
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

// noteExit stores an exit in memory. s.mu must be held once Run has been called.
func (s *Shim) noteExit(k key, e shimctl.Exit) {
	if s.exits[k.id] == nil {
		s.exits[k.id] = exits{}
	}
	s.exits[k.id][k.run] = e
}

// dropExits removes the exits of id for which old returns true, and returns their
// keys. s.mu must be held.
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

// strangerEnded handles the end of a process that watchStranger watches.
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

// ends stores how a run ended on disk, and then reports it to the daemon.
func (s *Shim) ends(r *run, e shimctl.Exit) {
	m := shimctl.Ended{ID: r.ID, Run: r.Run.Run, Exit: e}
	if err := save(s.dir.exitFile(r.key()), m, true); err != nil {
		// The exit is still in memory and is reported. Its code is lost only if the
		// shim dies before the daemon acknowledges it.
		s.log.Error("cannot record an exit", "instance", r.ID, "err", err)
	}
	s.mu.Lock()
	r.state = over
	s.noteExit(r.key(), e)
	for _, h := range s.held[r.ID] {
		_ = unix.Listen(h.fd, backlog) // the program may have listened with a shorter backlog
	}
	s.mu.Unlock()
	s.note()
	s.srv.Send(shimctl.VerbExited, m)
}
