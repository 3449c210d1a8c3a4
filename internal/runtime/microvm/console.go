package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"lull/internal/lib/logfile"
)

// The output of a guest's kernel goes to a ring buffer inside QEMU. However much a
// guest prints, it neither fills the host's disk nor blocks, with or without a
// daemon. The ring is copied to a file of the instance while the guest boots, at
// every probe, and before its QEMU is ended. If QEMU is killed, the ring is lost.

const (
	// consoleSize is the size of a ring in bytes, a power of two.
	consoleSize = 64 << 10
	// consoleKept is the maximum size of an instance's console file, in bytes. One
	// older file of that size is kept too.
	consoleKept = 256 << 10
	// bootListen is how often the ring of a booting guest is copied.
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

// keepConsole appends to an instance's console file.
func (r *Runtime) keepConsole(id string, text []byte) error {
	if err := os.MkdirAll(r.consoles(), 0o700); err != nil {
		return fmt.Errorf("cannot store a guest's console output: %w", err)
	}
	f, err := openLog(r.consoleFile(id), consoleKept)
	if err != nil {
		return fmt.Errorf("cannot store a guest's console output: %w", err)
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("cannot store a guest's console output: %w", err)
	}
	return nil
}

// dropConsole deletes an instance's console files.
func (r *Runtime) dropConsole(id string) error {
	return logfile.Remove(r.consoleFile(id))
}

// markBoot writes to the console file that a new kernel boots.
func (w *Work) markBoot() {
	line := fmt.Sprintf("lull: run %d boots at %s\n", w.rec.Run, time.Now().UTC().Format(time.RFC3339))
	if err := w.r.keepConsole(w.id, []byte(line)); err != nil {
		w.r.log.Warn("a guest's console output is not stored", "instance", w.id, "err", err)
	}
}

// takeConsole copies the ring to the file and returns the last output of this run.
// If QEMU has ended or does not answer in time, nothing is copied.
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
		w.r.log.Warn("a guest's console output is not stored", "instance", w.id, "err", err)
	}
	return string(w.printedLast)
}

// watchBoot copies the console of a booting guest regularly, because its QEMU may
// be killed at any time.
func (w *Work) watchBoot() {
	for w.pauseFor(bootListen) {
		w.takeConsole(w.qctx)
		select {
		case <-w.firstAnswer:
			return
		default:
		}
	}
}
