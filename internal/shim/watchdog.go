package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/platform/proc"
	"lull/internal/protocol/shimctl"
)

// WatchVerb is the argument, followed by the shim's directory, with which
// lull-shim starts itself as the watchdog: a process that waits for the end of
// the shim and, if no other shim follows, thaws what is frozen.
const WatchVerb = "watchdog"

const (
	dogPipe   = 3                      // the descriptor whose end is the shim's
	dogLook   = 100 * time.Millisecond // between two checks for another shim
	dogWait   = time.Second            // for another shim, before it thaws
	dogAgain  = time.Second            // before a watchdog that ended is replaced
	dogAsks   = 10 * time.Minute       // for those that others have to thaw
	dogMemory = 10                     // GC percent: it does nothing for months
)

// watchedLocked makes sure that a watchdog runs. The caller holds mu.
func (s *Shim) watchedLocked() error {
	if s.dog != 0 || s.ended {
		return nil
	}
	if s.dogEnd == 0 {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			return fmt.Errorf("start the watchdog: %w", err)
		}
		s.dogSide, s.dogEnd = p[0], p[1]
	}
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("start the watchdog: %w", err)
	}
	defer unix.Close(null)
	argv := []string{filepath.Base(s.cfg.Exe), WatchVerb, s.dir.path}
	attr := &syscall.ProcAttr{Dir: "/", Env: append(os.Environ(), "GOMAXPROCS=1"),
		Files: []uintptr{uintptr(null), uintptr(null), 2, uintptr(s.dogSide)}, Sys: &syscall.SysProcAttr{Setsid: true}}
	if s.dog, err = syscall.ForkExec(s.cfg.Exe, argv, attr); err != nil {
		s.dog = 0
		return fmt.Errorf("start the watchdog: %w", err)
	}
	return nil
}

// dogEnded replaces a watchdog that ended. It reports whether pid was one.
func (s *Shim) dogEnded(pid int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dog != pid || pid == 0 {
		return false
	}
	s.dog = 0
	time.AfterFunc(dogAgain, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if err := s.watchedLocked(); err != nil {
			s.log.Error("no watchdog", "err", err)
		}
	})
	return true
}

// Watchdog waits for the end of the shim of dir. It returns an exit code.
func Watchdog(dir string) int {
	debug.SetGCPercent(dogMemory)
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGPIPE)
	log := slog.New(slog.NewTextHandler(os.Stderr, nil)).With("part", "watchdog")
	for b := make([]byte, 1); ; {
		n, err := syscall.Read(dogPipe, b) // blocks without a cost until the shim has ended
		if n == 0 && err == nil {
			break
		}
		if err != nil && err != syscall.EINTR {
			log.Error("cannot wait for the end of the shim", "err", err)
			return 1
		}
	}
	for end := time.Now().Add(dogWait); time.Now().Before(end); time.Sleep(dogLook) {
		if shimAnswers(dir) {
			return 0
		}
	}
	s := &Shim{dir: &directory{path: dir}, log: log, proc: proc.Live(), runs: map[string]*run{}, others: map[string]shimctl.Outside{}}
	if err := s.loadFrozen(); err != nil {
		log.Error("some of the shim's state is not usable", "err", err)
	}
	s.thaw("the shim and the daemon have ended")
	for end := time.Now().Add(dogAsks); len(s.others) > 0 && time.Now().Before(end); time.Sleep(askAgain) {
		s.letOthersRun("the shim and the daemon have ended", func() bool { return !shimAnswers(dir) })
		if shimAnswers(dir) {
			break
		}
	}
	return 0
}

// loadFrozen reads what may be frozen, and what was thawed before.
func (s *Shim) loadFrozen() error {
	runs, err := loadAll(s.dir.path+"/runs", validRun)
	for _, r := range runs {
		s.runs[r.ID] = &run{Run: r, state: alive}
	}
	err = errors.Join(err, s.loadOutside())
	if terr := load(s.dir.path+"/thawed.json", &s.thawed); terr != nil && !errors.Is(terr, os.ErrNotExist) {
		err = errors.Join(err, terr)
	}
	return err
}

// shimAnswers reports whether a shim listens in dir.
func shimAnswers(dir string) bool {
	if os.Chdir(dir) != nil { // the path may be too long for a socket's address
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", "shim.sock")
	if err != nil {
		return false
	}
	c.Close()
	return true
}
