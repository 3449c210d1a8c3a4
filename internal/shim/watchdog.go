package shim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/unixsock"
	"lull/internal/platform/proc"
	"lull/internal/protocol/shimctl"
)

// WatchVerb is the argument, followed by the shim's directory and PID, with which
// lull-shim starts itself as the watchdog. The watchdog waits for the end of the
// shim. If no other shim follows, it thaws what is frozen and starts one. It holds
// duplicates of the shim's sockets until the next shim has them.
const WatchVerb = "watchdog"

const (
	dogLink   = 3                      // the watchdog's end of its connection to the shim
	dogLook   = 100 * time.Millisecond // interval between checks for another shim
	dogWait   = time.Second            // how long it waits for another shim before it thaws and starts one
	dogStart  = 10 * time.Second       // how long it waits for the shim that it has started
	dogAgain  = time.Second            // delay before a watchdog that has ended is replaced
	dogAsks   = 10 * time.Minute       // how long it asks other programs to thaw what they froze
	dogMemory = 10                     // garbage collection percentage; the watchdog does nothing for months
)

// watchedLocked starts the watchdog if none runs. s.mu must be held.
func (s *Shim) watchedLocked() error {
	if s.dog != 0 || s.ended {
		return nil
	}
	link, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("start the watchdog: %w", err)
	}
	defer unix.Close(link[1])
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		unix.Close(link[0])
		return fmt.Errorf("start the watchdog: %w", err)
	}
	defer unix.Close(null)
	argv := []string{Name, WatchVerb, s.dir.path, strconv.Itoa(os.Getpid())}
	attr := &syscall.ProcAttr{Dir: "/", Env: append(os.Environ(), "GOMAXPROCS=1"),
		Files: []uintptr{uintptr(null), uintptr(null), 2, uintptr(link[1])}, Sys: &syscall.SysProcAttr{Setsid: true}}
	if s.dog, err = syscall.ForkExec(s.cfg.Exe, argv, attr); err != nil {
		s.dog = 0
		unix.Close(link[0])
		return fmt.Errorf("start the watchdog: %w", err)
	}
	limitIO(link[0])
	s.dogFD = link[0]
	s.mirrorAllLocked()
	return nil
}

// dogEnded reports whether pid was the watchdog's, and arranges a replacement if
// so.
func (s *Shim) dogEnded(pid int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dog != pid || pid == 0 {
		return false
	}
	s.dog = 0
	if s.dogFD >= 0 {
		unix.Close(s.dogFD)
	}
	s.dogFD, s.dogHas = -1, nil
	time.AfterFunc(dogAgain, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if err := s.watchedLocked(); err != nil {
			s.log.Error("no watchdog", "err", err)
		}
	})
	return true
}

// Watchdog waits for the end of the shim of dir, whose PID is shim, and then does
// what guard does. It returns an exit code.
func Watchdog(dir, shim string) int {
	debug.SetGCPercent(dogMemory)
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGPIPE)
	log := slog.New(slog.NewTextHandler(os.Stderr, nil)).With("part", "watchdog")
	_, _ = RaiseFiles() // if this fails, the shim has already reported why
	if err := os.Chdir(dir); err != nil {
		log.Error("cannot use the shim's directory", "err", err)
		return 1
	}
	lock, err := os.Stat("shim.lock")
	if err != nil {
		log.Error("cannot use the shim's directory", "err", err)
		return 1
	}
	was, err := strconv.Atoi(shim)
	if err != nil {
		log.Error("cannot watch a shim", "err", err)
		return 1
	}
	k := &keeper{has: map[string]kept{}}
	code := make(chan int, 2)
	if l, err := listenKept(); err != nil {
		log.Error("the next shim cannot take over", "err", err)
	} else {
		go func() {
			err := k.serve(l)
			if err == nil {
				code <- 0
				return
			}
			log.Error("the next shim cannot take over", "err", err)
		}()
	}
	go func() { code <- k.guard(dir, was, lock, log) }()
	return <-code
}

// guard waits for the end of the shim with the PID was, and takes over its duties
// if no other shim comes. lock is the shim's lock file. It returns an exit code.
func (k *keeper) guard(dir string, was int, lock os.FileInfo, log *slog.Logger) int {
	killed, err := k.follow(dogLink) // blocks without cost until the shim has ended
	if err != nil {
		log.Error("cannot wait for the end of the shim", "err", err)
		return 1
	}
	if !killed {
		return 0
	}
	for end := time.Now().Add(dogWait); time.Now().Before(end); time.Sleep(dogLook) {
		if anotherAnswers(dir, was) {
			return 0
		}
	}
	s := &Shim{dir: &directory{path: dir}, log: log, proc: proc.Live(), runs: map[string]*run{}, others: map[string]shimctl.Outside{}}
	if err := s.loadFrozen(); err != nil {
		log.Error("some of the shim's state is not usable", "err", err)
	}
	const why = "the shim and the daemon have ended"
	s.thaw(why)
	// Runs concurrently with the start of the next shim, so that neither waits for
	// the other.
	ask := func() { s.letOthersRun(why, func() bool { return !anotherAnswers(dir, was) }) }
	var asking sync.WaitGroup
	asking.Go(ask)
	if again, err := os.Stat(dir + "/shim.lock"); err != nil || !os.SameFile(lock, again) {
		return 0 // the host's directory was removed
	}
	if !k.empty() || s.anyLives() {
		log.Warn("starting another shim")
		err := startShim(dir)
		if err != nil {
			log.Error("cannot start another shim", "err", err)
		}
		for end := time.Now().Add(dogStart); err == nil && time.Now().Before(end); time.Sleep(dogLook) {
			if anotherAnswers(dir, was) {
				return 0
			}
		}
	}
	asking.Wait()
	for end := time.Now().Add(dogAsks); len(s.others) > 0 && time.Now().Before(end); time.Sleep(askAgain) {
		ask()
		if anotherAnswers(dir, was) {
			break
		}
	}
	return 0
}

// anyLives reports whether the program of any run is alive.
func (s *Shim) anyLives() bool {
	for _, r := range s.runs {
		st, err := s.proc.Stat(r.PID)
		if err == nil && st.Start == r.Start && !st.Ended() {
			return true
		}
	}
	return false
}

// loadFrozen loads what may be frozen, and the stored thaws.
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

// anotherAnswers reports whether a process other than was listens on the shim's
// socket in dir. A killed shim may still listen for a moment.
func anotherAnswers(dir string, was int) bool {
	if os.Chdir(dir) != nil { // the path may be too long for a socket address
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", "shim.sock")
	if err != nil {
		return false
	}
	defer c.Close()
	peer, err := unixsock.PeerOf(c.(*net.UnixConn))
	return err == nil && peer.PID != was
}
