package microvm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/protocol/guest"
	"lull/internal/runtime/microvm/vnet"
)

// again is the delay between two attempts to connect.
const again = 100 * time.Millisecond

// bring starts QEMU, waits until the guest has booted, and starts the guest's
// program.
func (w *Work) bring(ctx context.Context, rec runRecord, run guest.RunCall) error {
	w.rec, w.filesFor, w.reportedSpace = rec, run.User, unlimited
	var err error
	if w.net, err = vnet.New(vnet.Config{Mode: rec.Machine.Net}); err != nil {
		return err
	}
	w.markBoot()
	if err := w.launch(rec); err != nil {
		return err
	}
	limit := w.r.cfg.BootLimit
	if rec.Accel == TCG {
		limit *= 3 // a boot takes seconds of CPU time, of which a busy machine gives little
	}
	bctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%w within %s", errNoBoot, limit))
	defer cancel()
	if err := w.connect(bctx); err != nil {
		if errors.Is(err, errMonitorEnded) { // the socket closed because QEMU ended; its exit is reported separately
			select {
			case <-w.gone:
			case <-bctx.Done():
			}
		}
		if w.isGone() {
			err = fmt.Errorf("%w: %w", w.noBoot(), err)
		}
		return w.explain(ctx, err)
	}
	select {
	case <-w.firstAnswer:
	case <-w.gone:
		return w.explain(ctx, fmt.Errorf("%w: QEMU has ended", w.noBoot()))
	case <-bctx.Done():
		return w.explain(ctx, context.Cause(bctx))
	}
	if err := w.setClock(ctx); err != nil {
		return w.explain(ctx, err)
	}
	w.reportSpace(ctx, false)
	if rec.FilesPort {
		if err := w.awaitFiles(bctx); err != nil {
			return w.explain(ctx, err)
		}
	}
	if err := w.call(ctx, max(callLimit, w.r.cfg.CallLimit), guest.Run, run, nil); err != nil {
		return err
	}
	w.moveToVsock()
	return nil
}

// timerTries is how often a guest whose kernel rejected its timer boots again. The
// last of these boots accepts any timer.
const timerTries = 2

// errTimer means that a guest's kernel rejected its timer, and the guest ended. Its
// next boot may accept the timer.
var errTimer = errors.New("the guest's kernel rejected its timer")

// noBoot returns why a guest whose QEMU has ended never answered. It returns an
// errNoBoot only if the accelerator may be the cause: not if the guest agent
// reported an error, the disk was full, or QEMU was killed from outside.
func (w *Work) noBoot() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if sig := w.status.Signal(); w.exited && w.diskFull(sig) != "" {
		return fmt.Errorf("QEMU was killed by signal %d (%s)%s", sig, sig, w.diskFull(sig))
	} else if w.exited && fromOutside(sig) {
		err := fmt.Errorf("QEMU was killed by signal %d (%s)", sig, sig)
		return &instance.EndedError{Exit: instance.Exit{Code: 128 + int(sig), Signal: int(sig), At: time.Now(), Machine: err.Error()}, Err: err}
	}
	if strings.Contains(w.consoleTail, guest.TimerRejected) {
		return errTimer
	}
	if strings.Contains(w.consoleTail, "lull-harness: ") {
		return errors.New("the guest's harness failed")
	}
	return errNoBoot
}

// fromOutside reports whether sig is a signal that a process does not raise by its
// own faults.
func fromOutside(sig syscall.Signal) bool {
	return sig == unix.SIGKILL || sig == unix.SIGTERM || sig == unix.SIGINT || sig == unix.SIGHUP || sig == unix.SIGQUIT
}

// launch starts QEMU and waits for its exit in the background.
func (w *Work) launch(rec runRecord) error {
	vsock, err := w.openVsock(&rec)
	if err != nil {
		return err
	}
	if vsock != nil {
		defer vsock.Close()
	}
	cmd, err := w.r.spawn(w.id, rec, vsock)
	if err != nil {
		return err
	}
	start, _, err := startTime(cmd.Process.Pid)
	if err != nil {
		return errors.Join(fmt.Errorf("cannot identify QEMU's process: %w", err), cmd.Process.Kill(), cmd.Wait())
	}
	w.proc = process{cmd.Process.Pid, start}
	w.mu.Lock()
	w.ident.PID, w.ident.Start = w.proc.pid, w.proc.start
	w.exited = false
	w.mu.Unlock()
	gone := w.gone
	go func() { // awaited by supervise
		_ = cmd.Wait() // the process state has the details
		if cmd.ProcessState != nil {
			w.mu.Lock()
			w.status, w.exited = cmd.ProcessState.Sys().(syscall.WaitStatus)
			w.mu.Unlock()
		}
		close(gone)
	}()
	go w.supervise()
	return nil
}

// explain adds the output of QEMU and of the guest's kernel to err.
func (w *Work) explain(ctx context.Context, err error) error {
	said := w.r.complaint(w.id) // read first, because its file may disappear at any time
	w.mu.Lock()
	if said == "" {
		said = w.complaint
	}
	words := w.consoleTail
	w.mu.Unlock()
	if said != "" {
		err = fmt.Errorf("%w; QEMU says: %s", err, said)
	}
	if words != "" {
		return fmt.Errorf("%w; its console ends with: %s", err, lastLines(words, 12))
	}
	if s := lastLines(w.takeConsole(context.WithoutCancel(ctx)), 12); s != "" {
		err = fmt.Errorf("%w; its console ends with: %s", err, s)
	}
	return err
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// lastWords returns the end of a console's output. If there is a panic it starts
// there, because the kernel prints a lot after the reason.
func lastWords(console string) string {
	if n := strings.LastIndex(console, "Kernel panic"); n >= 0 {
		return strings.TrimSpace(console[strings.LastIndex(console[:n], "\n")+1:])
	}
	return lastLines(console, 40)
}

// connect opens the monitor and keeps the other channels connected.
func (w *Work) connect(ctx context.Context) error {
	m, err := dialMonitor(ctx, w.path(qmpSocket), w.gone, w.event)
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.mon = m
	w.mu.Unlock()
	c, err := w.port(ctx, ctlSocket)
	if err != nil {
		return err
	}
	if err := w.shareFiles(); err != nil {
		return errors.Join(err, c.Close())
	}
	var fc *gatedConn
	if w.rec.FilesPort {
		if fc, err = w.port(ctx, filesSocket); err != nil {
			return errors.Join(err, c.Close())
		}
	}
	p := w.speak(c)
	w.loops.Go(w.carryFrames)
	w.loops.Go(w.watchBoot)
	if fc != nil {
		w.loops.Go(func() { w.carryFiles(fc) })
	}
	w.loops.Go(func() { w.talk(c, p) })
	return nil
}

// event handles an event of the machine.
func (w *Work) event(name string, data json.RawMessage) {
	why := ""
	switch name {
	case "SHUTDOWN":
		var d struct{ Reason string }
		_ = json.Unmarshal(data, &d) // a shutdown without a reason is still one
		why = "the guest powered off: " + d.Reason
	case "BLOCK_IO_ERROR":
		w.ioError(data)
		return
	case "GUEST_PANICKED":
		why = "the guest's kernel panicked"
	case "STOP":
		// Either lull stopped the machine, or the accelerator failed. supervise
		// finds out which.
		why = ""
		select {
		case w.halted <- why:
		default:
		}
		return
	default:
		return
	}
	select {
	case <-w.halted: // a plain stop that is queued is replaced, because it is less specific
	default:
	}
	select {
	case w.halted <- why:
	default:
	}
}

// carryFrames keeps the link between the guest's network card and its network
// connected.
func (w *Work) carryFrames() {
	for w.qctx.Err() == nil {
		c, err := dialSocket(w.qctx, w.path(netSocket), w.gone)
		if err == nil {
			stop := context.AfterFunc(w.qctx, func() { c.Close() })
			err = w.net.Attach(c)
			stop()
		}
		if err != nil && w.qctx.Err() == nil && !w.isGone() {
			w.r.log.Warn("the network of a guest was cut", "instance", w.id, "err", err)
		}
		if !w.pause() {
			return
		}
	}
}

func (w *Work) isGone() bool {
	select {
	case <-w.gone:
		return true
	default:
		return false
	}
}

// pause waits before the next attempt. It returns false if there must not be
// one.
func (w *Work) pause() bool { return w.pauseFor(again) }

func (w *Work) pauseFor(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-w.gone:
		return false
	case <-w.qctx.Done():
		return false
	}
}

// supervise waits until the run ends by itself: the program, the machine or QEMU,
// whichever comes first. Then it shuts down the others and reports the end.
func (w *Work) supervise() {
	defer close(w.over)
	told := false
	for {
		select {
		case <-w.qctx.Done(): // released or hibernated; handled elsewhere
			return
		default:
		}
		select {
		case <-w.gone:
			if w.isOver() {
				w.end()
			}
			return
		case <-w.qctx.Done():
			return
		case n := <-w.note:
			w.mu.Lock()
			w.exit = w.exitOf(n)
			w.mu.Unlock()
			w.powerOff()
		case why := <-w.halted:
			if why == "" {
				why = w.broken()
			}
			if why == "" || told { // "" for a stop by lull; told after quit, whose own event would be a second report
				continue
			}
			told = true
			why = w.obituary(why)
			w.mu.Lock()
			w.poweredOffBy = why
			w.mu.Unlock()
			w.quit()
		}
	}
}

// isOver reports whether QEMU has gone and the run has ended with it. A hibernated
// guest's run has not ended.
func (w *Work) isOver() bool {
	w.endMu.Lock()
	defer w.endMu.Unlock()
	if !w.hibernated() {
		w.ended = true
	}
	return w.ended
}

// broken returns why a machine stopped without a request by lull, or "".
func (w *Work) broken() string {
	m, err := w.monitor()
	if err != nil {
		return ""
	}
	s, err := m.status(w.ctx)
	if err == nil && s == ioErrorStatus {
		w.loops.Go(w.awaitSpace)
		return ""
	}
	if err == nil && (s == "internal-error" || s == "guest-panicked" || s == "shutdown") {
		return "the machine is " + s
	}
	return ""
}

// obituary returns why the machine ended, completing why with the message of a
// kernel panic. It also writes the reason and the end of the console to the
// instance's log, unless the program's exit is known.
func (w *Work) obituary(why string) string {
	w.mu.Lock()
	known := w.exit != nil
	w.mu.Unlock()
	if known {
		return why
	}
	console := lastWords(w.takeConsole(w.ctx))
	w.mu.Lock()
	w.consoleTail = console
	w.mu.Unlock()
	if strings.Contains(console, guest.TimerRejected) {
		return why // its program has not started, and the guest boots again
	}
	if _, err := fmt.Fprintf(w.log, "lull: %s; its console ends with:\n%s\n", why, console); err != nil {
		w.r.log.Error("cannot store how a guest ended", "instance", w.id, "err", err)
	}
	if _, panic, ok := strings.Cut(console, "Kernel panic"); ok {
		panic, _, _ = strings.Cut(panic, "\n")
		why = fmt.Sprintf("%s; its kernel said: Kernel panic%.200s", why, strings.TrimSpace(panic))
	}
	w.r.log.Warn("a virtual machine ended", "instance", w.id, "reason", why)
	return why
}

// powerOff shuts down a guest whose program has ended, and ends QEMU.
func (w *Work) powerOff() {
	limit := offLimit
	if w.rec.Layer { // flush pending writes first
		limit = writeLimit
	}
	// An error does not matter, because QEMU is ended in any case.
	_ = w.call(w.ctx, time.Second, guest.Shutdown, guest.ShutdownCall{}, nil)
	select {
	case <-w.halted:
	case <-w.gone:
		return
	case <-time.After(limit):
	case <-w.ctx.Done():
	}
	w.quit()
}

// quit ends QEMU, by force if it does not respond.
func (w *Work) quit() {
	ctx, cancel := context.WithTimeout(context.Background(), offLimit)
	defer cancel()
	if m, err := w.monitor(); err == nil && m.do(ctx, "quit", nil, nil) == nil {
		select {
		case <-w.gone:
			return
		case <-ctx.Done():
		}
	}
	kctx, kcancel := context.WithTimeout(context.Background(), killLimit)
	defer kcancel()
	if err := w.proc.kill(kctx); err != nil {
		w.r.log.Error("cannot end QEMU", "instance", w.id, "err", err)
	}
}

// end cleans up a run whose QEMU has ended and reports how it ended, once.
func (w *Work) end() { w.cleanup.Do(w.clearAway) }

func (w *Work) clearAway() {
	w.unheed()
	w.release()
	e := w.outcome()
	said := w.r.complaint(w.id)
	w.mu.Lock()
	w.complaint = said // for a start that has not read the output yet
	w.mu.Unlock()
	if said != "" {
		fmt.Fprintf(w.log, "lull: QEMU said: %s\n", said)
	}
	if err := errors.Join(w.log.Close(), w.remove()); err != nil {
		w.r.log.Error("cannot clean up a virtual machine", "instance", w.id, "err", err)
	}
	w.r.drop(w)
	if !w.silent.Load() {
		w.r.cfg.OnExit(w.id, w.ident.Run, e)
	}
	close(w.done)
}

// outcome returns the exit of the guest's program if that was reported. Otherwise
// it returns QEMU's exit, which counts as a failure.
func (w *Work) outcome() instance.Exit {
	select {
	case n := <-w.note:
		return *w.exitOf(n)
	default:
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.exit != nil:
		return *w.exit
	case !w.exited:
		return instance.Exit{Lost: true, At: time.Now(), Machine: cmp.Or(w.poweredOffBy, "QEMU is gone, and its exit status is unknown")}
	case w.status.Signaled():
		sig := w.status.Signal()
		return instance.Exit{Code: 128 + int(sig), Signal: int(sig), At: time.Now(),
			Machine: cmp.Or(w.poweredOffBy, fmt.Sprintf("QEMU was killed by signal %d (%s)", sig, sig)+w.diskFull(sig))}
	}
	// QEMU exited normally. If the guest's program was still running, the guest had
	// failed.
	code := w.status.ExitStatus()
	return instance.Exit{Code: max(code, 1), At: time.Now(), Machine: cmp.Or(w.poweredOffBy, fmt.Sprintf("QEMU exited with code %d", code))}
}

// diskFull describes how a full disk caused QEMU to end by sig, or returns "". A
// guest's memory is a sparse file, and the kernel raises SIGBUS if it cannot
// allocate a block.
func (w *Work) diskFull(sig syscall.Signal) string {
	var fs unix.Statfs_t
	if sig != unix.SIGBUS || unix.Statfs(w.r.cfg.Dir, &fs) != nil {
		return ""
	}
	return fmt.Sprintf(": there is no room for its memory on the file system of %s, or that file system cannot be written; a guest of %d MiB may need that much, and %d MiB are free",
		w.r.cfg.Dir, w.rec.Machine.Memory>>20, int64(fs.Bavail)*fs.Bsize>>20)
}

// exitOf converts a guest's report of its program's end.
func (w *Work) exitOf(n guest.ExitNote) *instance.Exit {
	e := &instance.Exit{Code: n.Code, Signal: n.Signal, At: time.Now()}
	if n.Starved {
		e.Why = instance.Starved("the guest's kernel", w.rec.Machine.Memory)
	}
	return e
}

// release frees this daemon's resources for a guest.
func (w *Work) release() {
	w.cancel()
	w.disconnect()
	if w.net != nil {
		if err := w.net.Close(); err != nil {
			w.r.log.Error("cannot close a guest's network", "instance", w.id, "err", err)
		}
	}
	w.loops.Wait()
}

// disconnect closes the connections to this QEMU.
func (w *Work) disconnect() {
	w.qcancel()
	w.mu.Lock()
	m := w.mon
	w.mon = nil
	w.mu.Unlock()
	if m != nil {
		m.close()
	}
	w.loops.Wait()
}

// letGo releases a guest that keeps running without this daemon.
func (w *Work) letGo() {
	w.release()
	if err := w.log.Close(); err != nil {
		w.r.log.Error("cannot close a guest's log", "instance", w.id, "err", err)
	}
	w.r.drop(w)
}

// takeOver connects to a QEMU that an earlier daemon started. over is non-nil
// if the run has already ended.
func (w *Work) takeOver(ctx context.Context, rec runRecord, p process) (over *instance.Exit, err error) {
	w.proc, w.rec, w.tookOver = p, rec, true
	if w.net, err = vnet.New(vnet.Config{Mode: rec.Machine.Net}); err != nil {
		return nil, err
	}
	fd, err := unix.PidfdOpen(p.pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("cannot watch process %d: %w", p.pid, err)
	}
	pidfd := os.NewFile(uintptr(fd), "pidfd")
	if !p.alive() { // checked after opening the descriptor, which pins the process
		pidfd.Close()
		return nil, fmt.Errorf("cannot watch process %d: it has just ended", p.pid)
	}
	go w.watch(pidfd, w.gone)
	go w.supervise()
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	if err := w.connect(ctx); err != nil {
		return nil, err
	}
	w.moveToVsock()
	s, err := w.mon.status(ctx)
	if err != nil {
		return nil, err
	}
	switch s {
	case "running":
		w.clockLate.Store(true) // if QEMU was continued without a daemon, nothing has set the guest's clock
	case ioErrorStatus: // awaitSpace continues the machine
		w.setFull(true)
		w.loops.Go(w.awaitSpace)
		return nil, nil
	case "paused", "postmigrate": // postmigrate: the guest was being saved
		w.mu.Lock()
		w.leftFrozen = true
		w.mu.Unlock()
		w.setFrozen(true)
		return nil, nil
	default:
		return &instance.Exit{Lost: true, At: time.Now(), Machine: w.obituary("the machine is " + s)}, nil
	}
	select {
	case <-w.firstAnswer:
	case <-w.gone: // QEMU was shutting down
	case <-ctx.Done():
		return nil, fmt.Errorf("cannot reach the harness: %w", context.Cause(ctx))
	}
	return nil, nil // if the program has exited meanwhile, that is reported as usual
}

// watch closes gone when a process that is not a child has ended.
func (w *Work) watch(pidfd *os.File, gone chan struct{}) {
	defer pidfd.Close()
	defer context.AfterFunc(w.ctx, func() { pidfd.Close() })()
	raw, err := pidfd.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool {
			n, perr := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return perr == nil && n > 0
		})
	}
	if err == nil {
		close(gone)
	}
}
