package adopted

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/protocol/shimctl"
	"lull/internal/runtime/process"
)

// Limits of a work.
const (
	checkEvery = time.Second     // interval of the checks of a frozen program for actions of others
	shimLimit  = 2 * time.Second // time limit for a request to the shim
	listAgain  = time.Second     // delay before a group that could not be listed is listed again
)

// Work is one adopted program; it implements instance.Workload.
type Work struct {
	*process.Work
	r        *Runtime
	id       string
	cgroupID uint64 // 0 for a process tree
	unit     *unit  // nil for anything but a unit
	ctx      context.Context
	stop     func() // cancels ctx

	noted []shimctl.Process // the list last stored by noteKin, by PID. Guarded by the host's lock of the instance

	awaiting atomic.Bool // set while awaitThaw runs

	mu    sync.Mutex
	ident instance.Identity // its PID is that of a living process, as far as known
	// again is set while a freeze by an earlier daemon may be in effect, froze
	// while a freeze by this daemon is. If neither is set, a freeze was made by
	// others.
	again, froze bool
}

// Identity implements instance.Workload.
func (w *Work) Identity() instance.Identity {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ident
}

// mine reports whether lull has frozen the program, or may have.
func (w *Work) mine() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.again || w.froze
}

func (w *Work) setFroze(on bool) {
	w.mu.Lock()
	w.again, w.froze = false, on
	w.mu.Unlock()
}

// errFrozenByOthers is the reason why Freeze does nothing.
var errFrozenByOthers = errors.New("it is already frozen, but not by lull")

// Freeze implements instance.Workload. The shim is informed first, so that the
// program stays frozen only while a daemon exists that can wake it.
func (w *Work) Freeze(ctx context.Context) error {
	if still, err := w.Still(); err != nil || still && !w.mine() {
		if err == nil {
			err = errFrozenByOthers
			w.frozenByOthers()
		}
		return err
	}
	if err := w.tellShim(ctx); err != nil {
		return err
	}
	err := w.freeze(ctx)
	if err == nil {
		w.setFroze(true)
		if err = w.tellShim(ctx); err == nil { // includes processes that were forked in the meantime
			return nil
		}
		return errors.Join(err, w.Thaw())
	}
	w.setFroze(false)
	w.Froze(false) // all processes run again, so no heartbeat is needed
	w.forgetInShim()
	return err
}

func (w *Work) freeze(ctx context.Context) error {
	if w.unit != nil {
		return w.freezeUnit(ctx)
	}
	return w.Work.Freeze(ctx)
}

func (w *Work) thaw() error {
	if w.unit != nil {
		return w.thawUnit()
	}
	return w.Work.Thaw()
}

// tellShim tells the shim how to thaw the program. For a process tree it must be
// called again whenever the processes change.
func (w *Work) tellShim(ctx context.Context) error {
	if w.cgroupID != 0 {
		if w.told() {
			return nil
		}
		return w.r.cfg.Process.ThawWhenGone(ctx, w.id, w.ident.Cgroup, nil)
	}
	if _, err := w.PIDs(); err != nil {
		return fmt.Errorf("cannot list the processes of %s: %w", w.id, err)
	}
	kin := w.Kin()
	changed, err := w.noteKin(kin)
	if err != nil || w.told() && !changed {
		return err
	}
	return w.r.cfg.Process.ThawWhenGone(ctx, w.id, "", kin)
}

// told reports whether the shim already knows how to thaw the program.
func (w *Work) told() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.froze
}

// forgetInShim tells the shim that the program runs. If that fails, the shim thaws
// the program needlessly when this daemon has ended.
func (w *Work) forgetInShim() {
	ctx, cancel := context.WithTimeout(context.Background(), shimLimit)
	defer cancel()
	if err := w.r.cfg.Process.ThawWhenGone(ctx, w.id, "", nil); err != nil {
		w.r.cfg.Log.Warn("the shim may thaw an adopted program", "instance", w.id, "err", err)
	}
}

// Thaw implements instance.Workload.
func (w *Work) Thaw() error {
	if err := w.thaw(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	w.setFroze(false)
	w.forgetInShim()
	return nil
}

// Signal implements instance.Workload. A program that lull did not start gets
// no signal; systemd stops a unit.
func (w *Work) Signal(sig syscall.Signal) error {
	if w.unit != nil && sig == syscall.SIGTERM {
		return w.stopUnit()
	}
	return errors.New("lull did not start it, and does not signal it")
}

// Kill implements instance.Workload. A program that lull did not start is
// thawed and released, not killed. If lull has asked systemd to stop a unit,
// Kill waits until that is done.
func (w *Work) Kill(ctx context.Context) error {
	if w.unit != nil {
		if err := w.unit.awaitStop(ctx); err != nil {
			return err
		}
		if err := w.r.cfg.Process.DropSpares(ctx, w.id); err != nil {
			return err
		}
	}
	if w.mine() {
		if err := w.Thaw(); err != nil {
			return err
		}
	}
	if w.stop(); w.unit != nil {
		w.r.lose(w)
	}
	return nil
}

// Sample implements instance.Workload.
func (w *Work) Sample(ports []instance.Endpoint) instance.Sample {
	s := w.Work.Sample(ports)
	if w.unit != nil {
		w.sampleUnit(&s)
	}
	if !w.mine() {
		if still, err := w.Still(); err == nil && still {
			w.frozenByOthers()
		}
	}
	return s
}

// frozenByOthers reports a freeze by others now, and their thaw when it happens.
func (w *Work) frozenByOthers() {
	w.r.cfg.Observe(w.id, "it was frozen outside lull")
	w.awaitThaw()
}

// awaitThaw waits for the thaw of a program that others froze, and reports it. It
// also returns once lull freezes or thaws the program.
func (w *Work) awaitThaw() {
	if !w.awaiting.CompareAndSwap(false, true) {
		return
	}
	w.r.wakes.Go(func() {
		defer w.awaiting.Store(false)
		for {
			select {
			case <-time.After(checkEvery):
			case <-w.ctx.Done():
				return
			}
			if w.told() {
				return // heedOthers checks it from now on
			}
			if still, err := w.Still(); err == nil && !still {
				w.r.cfg.Observe(w.id, thawedByOthers)
				return
			}
		}
	})
}

const thawedByOthers = "it was thawed outside lull"

// Guard implements instance.Workload. Besides the sockets, it watches the frozen
// program for actions of others: a signal wakes it, and a thaw is reported.
func (w *Work) Guard(ports []instance.Endpoint, outbound bool, wake func(string)) (instance.Guard, error) {
	ls, err := w.Listeners()
	if err != nil {
		return nil, err
	}
	for _, l := range ls { // no setting names the UDP ports of an adopted program
		if l.Network == instance.ProtoUDP {
			ports = append(ports[:len(ports):len(ports)], instance.Endpoint{Proto: l.Network, Listen: l.Addr, Target: l.Addr, Path: instance.PathDirect})
		}
	}
	g, err := w.Work.Guard(ports, outbound, wake)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.r.wakes.Go(func() { w.heedOthers(ctx, wake) })
	if w.unit != nil {
		w.unit.wake.Store(&wake)
		return &guard{g, func() { w.unit.wake.Store(nil); cancel() }}, nil
	}
	return &guard{g, cancel}, nil
}

type guard struct {
	instance.Guard
	cancel func()
}

func (g *guard) Close() {
	g.cancel()
	g.Guard.Close()
}

// heedOthers checks a frozen program until ctx ends.
func (w *Work) heedOthers(ctx context.Context, wake func(string)) {
	t := time.NewTicker(checkEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if still, err := w.Still(); err == nil && !still {
			w.r.cfg.Observe(w.id, thawedByOthers)
		} else if why := w.signaled(); why != "" {
			wake(why)
		}
	}
}

// signaled describes a signal that is pending for the frozen program and not
// blocked, or returns "".
func (w *Work) signaled() string {
	pids, err := w.PIDs()
	if err != nil {
		return ""
	}
	for _, pid := range pids {
		if sig := pendingSignal(pid); sig != 0 {
			return fmt.Sprintf("process %d was sent %s", pid, unix.SignalName(sig))
		}
	}
	return ""
}

// awaitEnd waits until every process of the program has ended, or ctx ends.
func (w *Work) awaitEnd(ctx context.Context) {
	for {
		ident := w.Identity()
		if !awaitExit(ctx, ident.PID, ident.Start) {
			return
		}
		if w.cgroupID == 0 || !w.succeeded(ctx) {
			break
		}
	}
	if ctx.Err() == nil {
		w.r.ended(w)
	}
}

// succeeded chooses another process of the group to wait for, after the previous
// one has ended. It returns false if the group is empty or ctx has ended.
func (w *Work) succeeded(ctx context.Context) bool {
	for {
		pid, err := w.r.oldest(w.Group())
		if err == nil && pid == 0 {
			return false
		}
		if err == nil {
			s, serr := w.r.fs.Stat(pid)
			if serr != nil {
				continue // this one has ended too
			}
			w.mu.Lock()
			w.ident.PID, w.ident.Start = pid, s.Start
			w.mu.Unlock()
			return true
		}
		select {
		case <-time.After(listAgain):
		case <-ctx.Done():
			return false
		}
	}
}

// awaitExit waits until a process has exited. It returns false if ctx ends first.
func awaitExit(ctx context.Context, pid int, start uint64) bool {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return exitPolled(ctx, pid, start) // the process has ended, or the kernel has no pidfds
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	if exited(pid, start) { // checked after opening: the descriptor is that of this process, or of a later one with the same PID
		return true
	}
	defer context.AfterFunc(ctx, func() { f.Close() })()
	c, err := f.SyscallConn()
	if err == nil {
		err = c.Read(func(fd uintptr) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return n > 0 && err == nil
		})
	}
	if err != nil && ctx.Err() == nil {
		return exitPolled(ctx, pid, start)
	}
	return ctx.Err() == nil
}

func exitPolled(ctx context.Context, pid int, start uint64) bool {
	for !exited(pid, start) {
		select {
		case <-time.After(checkEvery):
		case <-ctx.Done():
			return false
		}
	}
	return true
}
