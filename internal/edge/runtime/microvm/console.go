package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// What a guest's kernel prints goes into a ring inside its QEMU: a guest that
// prints a lot neither fills this machine's disk nor waits for anybody, also
// while no daemon is there. From the ring it is taken into a file of the
// instance's, while the guest boots, at every look at it and before its QEMU is
// ended. What is still in the ring of a QEMU that is killed is lost.

const (
	// consoleSize is how much of the output a ring keeps, a power of two.
	consoleSize = 64 << 10
	// consoleKept is how many bytes of it the file of an instance keeps; up to as
	// many older ones lie in a second one.
	consoleKept = 256 << 10
	// bootListen is how often the ring of a guest that boots is emptied.
	bootListen = 250 * time.Millisecond
)

func (r *Runtime) consoles() string { return filepath.Join(r.cfg.Dir, "consoles") }

func (r *Runtime) consoleFile(id string) string { return filepath.Join(r.consoles(), id) }

// Console implements instance.ConsoleKeeper.
func (r *Runtime) Console(ctx context.Context, id string) (string, error) {
	if err := checkID(id); err != nil {
		return "", err
	}
	if w := r.work(id); w != nil {
		w.takeConsole(ctx)
	}
	return r.consoleFile(id), nil
}

// keepConsole adds to an instance's console.
func (r *Runtime) keepConsole(id string, text []byte) error {
	if err := os.MkdirAll(r.consoles(), 0o700); err != nil {
		return fmt.Errorf("cannot keep a guest's console: %w", err)
	}
	f, err := openLog(r.consoleFile(id), consoleKept)
	if err != nil {
		return fmt.Errorf("cannot keep a guest's console: %w", err)
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("cannot keep a guest's console: %w", err)
	}
	return nil
}

// dropConsole removes an instance's console for good.
func (r *Runtime) dropConsole(id string) error {
	return removeAll(r.consoleFile(id), r.consoleFile(id)+".1")
}

// markBoot notes in the console that another kernel begins.
func (w *Work) markBoot() {
	line := fmt.Sprintf("lull: run %d boots at %s\n", w.rec.Run, time.Now().UTC().Format(time.RFC3339))
	if err := w.r.keepConsole(w.id, []byte(line)); err != nil {
		w.r.log.Warn("a guest's console is not kept", "instance", w.id, "error", err)
	}
}

// takeConsole empties the ring into the file, and gives the end of what this run
// has printed so far. A QEMU that is gone or does not answer in time has nothing
// to add.
func (w *Work) takeConsole(ctx context.Context) string {
	w.consoleMu.Lock()
	defer w.consoleMu.Unlock()
	m, err := w.monitor()
	if err != nil {
		return string(w.printedLast)
	}
	ctx, cancel := context.WithTimeout(ctx, w.r.cfg.LookLimit)
	defer cancel()
	text := m.console(ctx)
	if len(text) == 0 {
		return string(w.printedLast)
	}
	w.printedLast = append(w.printedLast, text...)
	if n := len(w.printedLast) - consoleSize; n > 0 {
		w.printedLast = append([]byte(nil), w.printedLast[n:]...)
	}
	if err := w.r.keepConsole(w.id, text); err != nil {
		w.r.log.Warn("a guest's console is not kept", "instance", w.id, "error", err)
	}
	return string(w.printedLast)
}

// watchBoot keeps the console of a guest that boots up to date: its QEMU may be
// killed at any moment.
func (w *Work) watchBoot() {
	for w.pauseFor(bootListen) {
		w.takeConsole(w.qctx)
		select {
		case <-w.born:
			return
		default:
		}
	}
}
