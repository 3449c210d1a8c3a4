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

	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// followEvery is the poll interval of a followed log.
const followEvery = 100 * time.Millisecond

// Logs writes what an instance has printed, oldest first. With follow it
// continues with new output until ctx ends or the instance is gone.
func (h *Host) Logs(ctx context.Context, w http.ResponseWriter, id string, l hostctl.Logs) error {
	i, err := h.find(id)
	if err != nil {
		return err
	}
	keeper, ok := i.rt.(instance.ConsoleKeeper)
	if l.Console && !ok {
		return &RefusedError{Name: i.name(), What: "show the console of", Reason: "runtime " + i.spec().Runtime + " has none: only a microvm has a kernel of its own"}
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
	kept := &logView{}
	parts, err := kept.last(path, l.Tail)
	if err != nil {
		return err
	}
	if copyParts(w, parts) != nil || !l.Follow {
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
		if err != nil || copyParts(w, more) != nil {
			return nil
		}
	}
}

// flushing flushes after each write.
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

// logView remembers how far a log was read, across its rotation. It keeps none
// of the log in memory, since logs may be large.
type logView struct {
	inode  os.FileInfo
	offset int64
}

// logPart is a range of a file to copy.
type logPart struct {
	f        *os.File
	from, to int64
}

// copyParts copies parts to w and closes their files.
func copyParts(w io.Writer, parts []logPart) (err error) {
	for _, p := range parts {
		if err == nil {
			_, err = io.Copy(w, io.NewSectionReader(p.f, p.from, p.to-p.from))
		}
		p.f.Close()
	}
	return err
}

// openPart opens a whole file; it returns no parts if the file does not exist.
func openPart(path string) (parts []logPart, st os.FileInfo, err error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("cannot read the log: %w", err)
	}
	if st, err = f.Stat(); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("cannot read the log: %w", err), f.Close())
	}
	return []logPart{{f, 0, st.Size()}}, st, nil
}

// last returns the last n lines of a log and of the older file beside it; all
// of them if n is negative.
func (v *logView) last(path string, n int) (parts []logPart, err error) {
	var old os.FileInfo
	for {
		newest, st, err := openPart(path)
		if err != nil {
			return nil, err
		}
		if parts, old, err = openPart(path + ".1"); err != nil {
			closeParts(newest)
			return nil, err
		}
		parts = append(parts, newest...)
		if st == nil || old == nil || !os.SameFile(st, old) {
			if v.inode = st; st != nil {
				v.offset = st.Size()
			}
			break
		}
		closeParts(parts) // it was rotated in between
	}
	if n >= 0 {
		if err := lastLines(parts, n); err != nil {
			closeParts(parts)
			return nil, fmt.Errorf("cannot read the log: %w", err)
		}
	}
	return parts, nil
}

func closeParts(parts []logPart) {
	for _, p := range parts {
		p.f.Close()
	}
}

// more returns what was printed since the previous call.
func (v *logView) more(path string) ([]logPart, error) {
	parts, st, err := openPart(path)
	if err != nil || st == nil {
		return nil, err
	}
	if v.inode != nil && !os.SameFile(v.inode, st) { // rotated: the rest of the old file comes first
		old, _, err := openPart(path + ".1")
		if err != nil {
			closeParts(parts)
			return nil, err
		}
		for n := range old {
			old[n].from = min(v.offset, old[n].to)
		}
		parts, v.offset = append(old, parts...), 0
	}
	newest := &parts[len(parts)-1]
	newest.from = min(v.offset, newest.to)
	v.inode, v.offset = st, newest.to
	return parts, nil
}

// logBlock is the block size of the search for lines, in bytes.
const logBlock = 64 << 10

// lastLines moves the start of parts to their last n lines. It reads from the
// end.
func lastLines(parts []logPart, n int) error {
	b := make([]byte, logBlock)
	end := true // nothing was read yet: a newline here ends a line and begins none
	for k := len(parts) - 1; k >= 0; k-- {
		p := &parts[k]
		for at := p.to; at > p.from; {
			size := min(at-p.from, logBlock)
			at -= size
			part := b[:size]
			if _, err := p.f.ReadAt(part, at); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			if end && n > 0 && part[size-1] == '\n' {
				part = part[:size-1]
			}
			end = false
			for i := len(part); n > 0; {
				if i = bytes.LastIndexByte(part[:i], '\n'); i < 0 {
					break
				}
				if n--; n == 0 {
					p.from = at + int64(i) + 1
					n = -1
				}
			}
			if n <= 0 {
				break
			}
		}
		switch n {
		case -1: // it begins here
			n = 0
		case 0: // older lines are not needed
			p.from = p.to
		}
	}
	return nil
}

// removeLogs deletes an instance's logs.
func (h *Host) removeLogs(id string) {
	path := filepath.Join(h.cfg.LogDir, id+".log")
	for _, p := range []string{path, path + ".1"} {
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			h.log.Warn("cannot remove a log", "path", p, "err", err)
		}
	}
}
