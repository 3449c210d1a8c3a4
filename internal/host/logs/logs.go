// Package logs reads the log files of instances, which may rotate meanwhile. It
// returns their last lines and follows new output.
package logs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/logfile"
)

// followEvery is the poll interval of a followed log.
const followEvery = 100 * time.Millisecond

// TimeForm is the format of the time before each line, if times are requested.
// NoTime stands for an unknown time.
const (
	TimeForm = "2006-01-02T15:04:05.000Z07:00"
	NoTime   = "-"
)

// Copy writes the part of a log that q selects to w, oldest first.
//
// With Follow it continues with new output, which it flushes, until ctx ends, the
// reader disconnects, or source returns an error. source brings the log up to date
// and returns its path; Copy calls it before each read. Copy returns an error only
// if it has not written anything.
func Copy(ctx context.Context, w http.ResponseWriter, q instance.LogQuery, source func() (path string, err error)) error {
	path, err := source()
	if err != nil {
		return err
	}
	kept := &view{}
	parts, err := kept.selected(path, q)
	if err != nil {
		return err
	}
	to := &lines{w: w, times: q.Times}
	if to.copy(parts) != nil || !q.Follow {
		return nil // everything was written, or the reader has disconnected
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
		if err != nil || to.copy(more) != nil {
			return nil
		}
	}
}

// Tail returns the last n lines of a log.
func Tail(path string, n int) (string, error) {
	parts, err := new(view).selected(path, instance.LogQuery{Tail: n})
	if err != nil {
		return "", err
	}
	var b strings.Builder
	err = (&lines{w: &b}).copy(parts)
	return b.String(), err
}

// Flushing returns a writer that flushes w after every write.
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

// view remembers how far a log has been read, also across rotations. It does not
// keep the log in memory, because logs may be large.
type view struct {
	inode  os.FileInfo
	offset int64
}

// part is a range of a log file to be copied.
type part struct {
	f        *os.File
	from, to int64
	times    *logfile.Times
	until    time.Time // when the file was last written
}

func (p part) close() {
	p.f.Close()
	p.times.Close()
}

// lines copies parts to w. If times is set, each line is preceded by its time.
type lines struct {
	w     io.Writer
	times bool
	mid   bool // the next part continues a line
}

// copy copies parts and closes their files.
func (l *lines) copy(parts []part) (err error) {
	for _, p := range parts {
		switch {
		case err != nil:
		case l.times:
			err = l.stamp(p)
		default:
			_, err = io.Copy(l.w, io.NewSectionReader(p.f, p.from, p.to-p.from))
		}
		p.close()
	}
	return err
}

func (l *lines) stamp(p part) error {
	out := bufio.NewWriterSize(l.w, block)
	in := bufio.NewReaderSize(io.NewSectionReader(p.f, p.from, p.to-p.from), block)
	for at := p.from; ; {
		b, err := in.ReadSlice('\n')
		if len(b) > 0 && !l.mid {
			stamp := NoTime
			if t := p.times.At(at); !t.IsZero() {
				stamp = t.UTC().Format(TimeForm)
			}
			out.WriteString(stamp + " ") // an error shows at Flush
		}
		out.Write(b)
		if at += int64(len(b)); len(b) > 0 {
			l.mid = b[len(b)-1] != '\n'
		}
		if err == io.EOF {
			return out.Flush()
		}
		if err != nil && err != bufio.ErrBufferFull {
			return errors.Join(err, out.Flush())
		}
	}
}

// openPart returns the file base+suffix of a log as one part, or no parts if the
// file does not exist.
func openPart(base, suffix string) (parts []part, st os.FileInfo, err error) {
	f, err := os.Open(base + suffix)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("cannot read the log: %w", err)
	}
	if st, err = f.Stat(); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("cannot read the log: %w", err), f.Close())
	}
	return []part{{f, 0, st.Size(), logfile.OpenTimes(base, st), st.ModTime()}}, st, nil
}

// selected returns the part of a log and of its older file that q selects.
func (v *view) selected(path string, q instance.LogQuery) (parts []part, err error) {
	var old os.FileInfo
	for {
		newest, st, err := openPart(path, "")
		if err != nil {
			return nil, err
		}
		if parts, old, err = openPart(path, logfile.Older); err != nil {
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
		closeParts(parts) // the log was rotated meanwhile
	}
	if err = within(parts, q.Since, q.Until); err == nil && q.Tail >= 0 {
		err = lastLines(parts, q.Tail)
	}
	if err != nil {
		closeParts(parts)
		return nil, fmt.Errorf("cannot read the log: %w", err)
	}
	return parts, nil
}

func closeParts(parts []part) {
	for _, p := range parts {
		p.close()
	}
}

// within restricts parts to the lines of a period; a zero time is no bound. Lines
// whose time is unknown are kept if they may belong to the period.
func within(parts []part, since, until time.Time) error {
	if since.IsZero() && until.IsZero() {
		return nil
	}
	whole := true // the previous part ends with a complete line
	cut := false  // the last line of the previous part is not selected, so neither is its rest
	for k := range parts {
		p := &parts[k]
		from, to, first := p.to, p.to, true
		if !p.until.Before(since) {
			from = 0
		}
		for m, ok := p.times.Next(); ok && m.Offset <= p.to; m, ok = p.times.Next() {
			switch in := !m.Time.Before(since); {
			case first && !in:
				from = p.to
			case !first && in && from == p.to:
				from = m.Offset
			}
			if first = false; !until.IsZero() && m.Time.After(until) {
				to = m.Offset
				break
			}
		}
		p.times.Reset()
		var last [1]byte
		var err error
		end := p.to
		if p.from, err = lineFrom(p, min(from, to), whole || !cut); err != nil {
			return err
		}
		if p.to, err = lineFrom(p, to, whole || cut); err != nil {
			return err
		}
		p.from = min(p.from, p.to)
		cut = p.from == p.to || p.to < end
		if end > 0 {
			if _, err := p.f.ReadAt(last[:], end-1); err != nil {
				return err
			}
			whole = last[0] == '\n'
		}
	}
	return nil
}

// lineFrom returns the offset of the first line of p that begins at or after at.
// whole means that a line begins at offset 0.
func lineFrom(p *part, at int64, whole bool) (int64, error) {
	if at == 0 && whole || at == p.to {
		return at, nil
	}
	r := bufio.NewReader(io.NewSectionReader(p.f, max(at-1, 0), p.to-max(at-1, 0)))
	for at = max(at-1, 0); ; {
		b, err := r.ReadSlice('\n')
		at += int64(len(b))
		if err == nil || err == io.EOF {
			return at, nil
		}
		if err != bufio.ErrBufferFull {
			return at, err
		}
	}
}

// more returns the output since the previous call.
func (v *view) more(path string) ([]part, error) {
	parts, st, err := openPart(path, "")
	if err != nil || st == nil {
		return nil, err
	}
	if v.inode != nil && !os.SameFile(v.inode, st) { // the log was rotated, so the rest of the old file comes first
		old, _, err := openPart(path, logfile.Older)
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

// block is how much is read at a time when searching for lines, in bytes.
const block = 64 << 10

// lastLines restricts parts to their last n lines. It reads from the end.
func lastLines(parts []part, n int) error {
	b := make([]byte, block)
	end := true // at the end of the log: a newline there ends the last line
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
		case -1: // the first of the lines begins in this part
			n = 0
		case 0: // older parts are not needed
			p.from = p.to
		}
	}
	return nil
}
