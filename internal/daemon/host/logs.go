package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"lull/internal/instance"
	"lull/internal/link/hostctl"
)

// followEvery is how often a log that somebody follows is looked at.
const followEvery = 100 * time.Millisecond

// Logs copies what an instance has printed, the older file first, and with
// follow what it goes on to print, until ctx ends or the instance is gone.
func (h *Host) Logs(ctx context.Context, w http.ResponseWriter, id string, l hostctl.Logs) error {
	i, err := h.find(id)
	if err != nil {
		return err
	}
	keeper, ok := i.rt.(instance.ConsoleKeeper)
	if l.Console && !ok {
		return &RefusedError{Name: i.name(), What: "show the console of", Reason: "runtime " + i.spec.Runtime + " has none: only a microvm has a kernel of its own"}
	}
	if r, ok := i.rt.(instance.LogReader); ok {
		return r.Logs(ctx, id, flushing{w, http.NewResponseController(w)}, l.Tail, l.Follow)
	}
	path := filepath.Join(h.cfg.LogDir, id+".log")
	fresh := func() error { return nil } // brings the file up to date
	if l.Console {
		fresh = func() (err error) { path, err = keeper.Console(ctx, id); return err }
	}
	if err := fresh(); err != nil {
		return err
	}
	kept, err := readLog(path)
	if err != nil {
		return err
	}
	if _, err := w.Write(lastLines(kept.all, l.Tail)); err != nil || !l.Follow {
		return nil // the reader has gone, or has everything
	}
	flush := http.NewResponseController(w)
	for {
		if flush.Flush() != nil || ctx.Err() != nil {
			return nil
		}
		select {
		case <-time.After(followEvery):
		case <-ctx.Done():
			return nil
		}
		if _, err := h.find(id); err != nil {
			return nil
		}
		if fresh() != nil {
			return nil
		}
		more, err := kept.more(path)
		if err != nil {
			return nil
		}
		if _, err := w.Write(more); err != nil {
			return nil
		}
	}
}

// flushing sends each write on at once.
type flushing struct {
	io.Writer
	c *http.ResponseController
}

func (f flushing) Write(p []byte) (int, error) {
	n, err := f.Writer.Write(p)
	if err == nil {
		err = f.c.Flush()
	}
	return n, err
}

// logView remembers how far a log was read, across its rotation.
type logView struct {
	all    []byte
	inode  os.FileInfo
	offset int64
}

func readLog(path string) (*logView, error) {
	v := &logView{}
	old, err := os.ReadFile(path + ".1")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("cannot read the log: %w", err)
	}
	v.all = old
	fresh, err := v.more(path)
	v.all = append(v.all, fresh...)
	return v, err
}

// more returns what was printed since the last look.
func (v *logView) more(path string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("cannot read the log: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("cannot read the log: %w", err)
	}
	var out []byte
	if v.inode != nil && !os.SameFile(v.inode, st) { // rotated: the rest of the old one first
		if o, err := os.Open(path + ".1"); err == nil {
			rest, rerr := io.ReadAll(io.NewSectionReader(o, v.offset, 1<<40))
			if err := errors.Join(rerr, o.Close()); err != nil {
				return nil, fmt.Errorf("cannot read the log: %w", err)
			}
			out = rest
		}
		v.offset = 0
	}
	v.inode = st
	rest, err := io.ReadAll(io.NewSectionReader(f, v.offset, 1<<40))
	if err != nil {
		return nil, fmt.Errorf("cannot read the log: %w", err)
	}
	v.offset += int64(len(rest))
	return append(out, rest...), nil
}

// lastLines returns the last n lines; all of them when n is negative.
func lastLines(b []byte, n int) []byte {
	if n < 0 {
		return b
	}
	end := len(b)
	if end > 0 && b[end-1] == '\n' {
		end--
	}
	for at := end; n > 0; n-- {
		at = bytes.LastIndexByte(b[:at], '\n')
		if at < 0 {
			return b
		}
		if n == 1 {
			return b[at+1:]
		}
	}
	return nil
}

// removeLogs deletes what an instance has printed.
func (h *Host) removeLogs(id string) {
	path := filepath.Join(h.cfg.LogDir, id+".log")
	for _, p := range []string{path, path + ".1"} {
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			h.log.Warn("cannot remove a log", "path", p, "error", err)
		}
	}
}
