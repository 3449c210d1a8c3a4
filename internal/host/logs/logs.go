// Package logs reads the log files of instances, which rotate while they are
// read: their last lines, and what is added to them.
package logs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

// followEvery is the poll interval of a followed log.
const followEvery = 100 * time.Millisecond

// Copy writes a log to w, oldest first: its last tail lines, all of them if tail
// is negative. With follow it continues with new output, flushed as it comes,
// until ctx ends, the reader is gone, or source returns an error. source brings
// the log up to date and returns its path; it is called before each read. Copy
// returns an error only if nothing was written yet.
func Copy(ctx context.Context, w http.ResponseWriter, tail int, follow bool, source func() (path string, err error)) error {
	path, err := source()
	if err != nil {
		return err
	}
	kept := &view{}
	parts, err := kept.last(path, tail)
	if err != nil {
		return err
	}
	if copyParts(w, parts) != nil || !follow {
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
		if path, err = source(); err != nil {
			return nil
		}
		more, err := kept.more(path)
		if err != nil || copyParts(w, more) != nil {
			return nil
		}
	}
}

// Tail returns the last n lines of a log.
func Tail(path string, n int) (string, error) {
	parts, err := new(view).last(path, n)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	err = copyParts(&b, parts)
	return b.String(), err
}

// Flushing returns a writer that flushes w after each write.
func Flushing(w http.ResponseWriter) io.Writer {
	return flushing{w, http.NewResponseController(w)}
}

type flushing struct {
	io.Writer
	c *http.ResponseController
}

// Write implements io.Writer.
func (f flushing) Write(p []byte) (int, error) {
	n, err := f.Writer.Write(p)
	if err == nil {
		err = f.c.Flush()
	}
	return n, err
}

// view remembers how far a log was read, across its rotation. It keeps none
// of the log in memory, since logs may be large.
type view struct {
	inode  os.FileInfo
	offset int64
}

// part is a range of a file to copy.
type part struct {
	f        *os.File
	from, to int64
}

// copyParts copies parts to w and closes their files.
func copyParts(w io.Writer, parts []part) (err error) {
	for _, p := range parts {
		if err == nil {
			_, err = io.Copy(w, io.NewSectionReader(p.f, p.from, p.to-p.from))
		}
		p.f.Close()
	}
	return err
}

// openPart opens a whole file; it returns no parts if the file does not exist.
func openPart(path string) (parts []part, st os.FileInfo, err error) {
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
	return []part{{f, 0, st.Size()}}, st, nil
}

// last returns the last n lines of a log and of the older file beside it; all
// of them if n is negative.
func (v *view) last(path string, n int) (parts []part, err error) {
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

func closeParts(parts []part) {
	for _, p := range parts {
		p.f.Close()
	}
}

// more returns what was printed since the previous call.
func (v *view) more(path string) ([]part, error) {
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

// block is the block size of the search for lines, in bytes.
const block = 64 << 10

// lastLines moves the start of parts to their last n lines. It reads from the
// end.
func lastLines(parts []part, n int) error {
	b := make([]byte, block)
	end := true // nothing was read yet: a newline here ends a line and begins none
	for k := len(parts) - 1; k >= 0; k-- {
		p := &parts[k]
		for at := p.to; at > p.from; {
			size := min(at-p.from, block)
			at -= size
			piece := b[:size]
			if _, err := p.f.ReadAt(piece, at); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			if end && n > 0 && piece[size-1] == '\n' {
				piece = piece[:size-1]
			}
			end = false
			for i := len(piece); n > 0; {
				if i = bytes.LastIndexByte(piece[:i], '\n'); i < 0 {
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

// Remove deletes a log and the older file beside it.
func Remove(path string) error {
	var errs []error
	for _, p := range []string{path, path + ".1"} {
		if err := os.Remove(p); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
