package proc

import (
	"encoding/binary"
	"io/fs"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"lull/internal/core/idle"
)

// OwnWriteSpan is how long after a write by lull the write time of a terminal may
// be lull's: the kernel updates that time in steps of 8 s (drivers/tty/tty_io.c,
// tty_update_time).
const OwnWriteSpan = 8 * time.Second

// OwnWrites records when lull wrote to terminals, so that its own warnings do not
// count as use. The zero value is ready for use. It is safe for concurrent use.
type OwnWrites struct {
	mu    sync.Mutex
	times [8]int64 // seconds since 1970
	next  int
}

// Note records a write at t.
func (o *OwnWrites) Note(t time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.times[o.next%len(o.times)] = t.Unix()
	o.next++
}

// Last returns the time of the newest write; zero for none.
func (o *OwnWrites) Last() time.Time {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.next == 0 {
		return time.Time{}
	}
	return time.Unix(o.times[(o.next-1)%len(o.times)], 0)
}

// covers reports whether a terminal's write time, in seconds, is due to lull. The
// kernel's clock for terminals lags by up to a tick, so a write just after a full
// second may be recorded with the previous second.
func (o *OwnWrites) covers(mtime int64) bool {
	if o == nil {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for i := range min(o.next, len(o.times)) {
		if d := mtime - o.times[i]; d >= -1 && d <= int64(OwnWriteSpan/time.Second) {
			return true
		}
	}
	return false
}

// Terminal is one pseudo terminal.
type Terminal struct {
	Name    string // pts/3
	UID     uint32
	Input   time.Time // when its program last read from it
	Output  time.Time // when it was last written, lull's own writes included
	Changed time.Time // last change of its owner or mode, which is when it was opened
	Event   time.Time // newest input or output other than lull's own
}

// pseudo is a terminal as last seen. Times are seconds since 1970.
type pseudo struct {
	num                 uint64
	label               string
	uid                 uint32
	round               uint32 // number of the last read that saw it
	moved               uint32 // number of the last read that found a new event
	atime, mtime, ctime int64
	event               time.Time
}

type ptsProbe struct {
	path  string
	own   *OwnWrites
	fd    int
	buf   []byte
	seen  []pseudo
	round uint32
	last  time.Time // time of the last read
}

func (p *ptsProbe) close() {
	if p.fd > 0 {
		unix.Close(p.fd)
		p.fd = 0
	}
}

// read lists the terminals and their times. An event counts at its own time or,
// if that is in the future, at the time it was found. With presence, a terminal
// counts by being open.
func (p *ptsProbe) read(now time.Time, presence bool) idle.Reading {
	if err := p.list(now); err != nil {
		p.close()
		return failed(SignalTerminals, now, err)
	}
	r := idle.Reading{Signal: SignalTerminals, State: idle.Quiet, Threshold: 1, Unit: "terminals with input or output", At: now}
	if !p.last.IsZero() {
		r.Window = idle.Duration(now.Sub(p.last))
	}
	since := p.last
	if since.IsZero() {
		since = now.Add(-time.Minute)
	}
	for i := range p.seen {
		t := &p.seen[i]
		if t.event.After(r.LastEvent) {
			r.LastEvent, r.Detail = t.event, t.label
		}
		// Times are whole seconds, so an event may be dated before the previous
		// read although it happened after it.
		if fresh := t.moved == p.round && !p.last.IsZero(); presence || fresh || !t.event.Before(since) {
			r.Value++
		}
	}
	if r.Value > 0 {
		r.State = idle.Active
	}
	if presence && len(p.seen) > 0 {
		r.LastEvent = time.Time{}
	}
	p.last = now
	return r
}

func (p *ptsProbe) list(now time.Time) error {
	if p.fd <= 0 {
		fd, err := unix.Open(p.path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return &fs.PathError{Op: "open", Path: p.path, Err: err}
		}
		p.fd = fd
		if p.buf == nil {
			p.buf = make([]byte, 16<<10)
		}
	}
	if _, err := unix.Seek(p.fd, 0, 0); err != nil {
		return &fs.PathError{Op: "seek", Path: p.path, Err: err}
	}
	p.round++
	for {
		n, err := unix.ReadDirent(p.fd, p.buf)
		if err != nil {
			return &fs.PathError{Op: "list", Path: p.path, Err: err}
		}
		if n == 0 {
			break
		}
		if err := p.entries(p.buf[:n], now); err != nil {
			return err
		}
	}
	kept := p.seen[:0]
	for i := range p.seen {
		if p.seen[i].round == p.round {
			kept = append(kept, p.seen[i])
		}
	}
	p.seen = kept
	return nil
}

// direntName is the offset of the name in a linux_dirent64.
const direntName = 19

// entries inspects every terminal among the directory entries in b.
func (p *ptsProbe) entries(b []byte, now time.Time) error {
	for len(b) >= direntName {
		size := int(binary.NativeEndian.Uint16(b[16:18]))
		if size < direntName+1 || size > len(b) {
			return &fs.PathError{Op: "list", Path: p.path, Err: errMalformed}
		}
		name := b[direntName:size]
		b = b[size:]
		num, ok := terminalNumber(name)
		if !ok {
			continue
		}
		var st unix.Statx_t
		if err := statAt(p.fd, name, &st); err == unix.ENOENT {
			continue // the terminal was closed after it was listed
		} else if err != 0 {
			return &fs.PathError{Op: "stat", Path: p.path, Err: err}
		}
		p.note(num, &st, now)
	}
	return nil
}

// terminalNumber parses a name that ends in NUL. ok is false for names that are
// not terminals, such as ptmx.
func terminalNumber(name []byte) (n uint64, ok bool) {
	for i, c := range name {
		if c == 0 {
			return n, i > 0
		}
		if !digit(c) || i > 9 {
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return 0, false // statx needs the NUL
}

// statAt calls statx with a name that ends in NUL. The standard wrapper would
// allocate a copy of the name.
func statAt(dir int, name []byte, st *unix.Statx_t) unix.Errno {
	_, _, e := unix.Syscall6(unix.SYS_STATX, uintptr(dir), uintptr(unsafe.Pointer(&name[0])),
		unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS, uintptr(unsafe.Pointer(st)), 0)
	return e
}

func (p *ptsProbe) note(num uint64, st *unix.Statx_t, now time.Time) {
	var t *pseudo
	for i := range p.seen {
		if p.seen[i].num == num {
			t = &p.seen[i]
			break
		}
	}
	if t == nil {
		p.seen = append(p.seen, pseudo{num: num, label: "pts/" + utoa(num)})
		t = &p.seen[len(p.seen)-1]
	}
	t.uid, t.round = st.Uid, p.round
	before := t.event
	if t.ctime != st.Ctime.Sec && t.ctime != 0 {
		t.event = latestEvent(t.event, st.Ctime.Sec, now) // the number was reused
	}
	t.ctime = st.Ctime.Sec
	if t.atime != st.Atime.Sec {
		t.atime = st.Atime.Sec
		t.event = latestEvent(t.event, t.atime, now)
	}
	if t.mtime != st.Mtime.Sec {
		t.mtime = st.Mtime.Sec
		if !p.own.covers(t.mtime) {
			t.event = latestEvent(t.event, t.mtime, now)
		}
	}
	if t.event.After(before) {
		t.moved = p.round
	}
}

// latestEvent returns the later of old and the time sec. If sec is in the future,
// now is used instead.
func latestEvent(old time.Time, sec int64, now time.Time) time.Time {
	t := time.Unix(sec, 0)
	if t.After(now) {
		t = now.Round(0)
	}
	if t.After(old) {
		return t
	}
	return old
}

func unixTime(sec int64) time.Time {
	if sec == 0 {
		return time.Time{}
	}
	return time.Unix(sec, 0)
}

func utoa(n uint64) string {
	var b [20]byte
	i := len(b)
	for {
		i--
		b[i] = byte('0' + n%10)
		if n /= 10; n == 0 {
			return string(b[i:])
		}
	}
}
