package segment

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Options limit a log.
type Options struct {
	SegmentBytes int64         // maximum size of a file; 0 means 8 MiB, at most MaxFile
	SegmentAge   time.Duration // maximum age of a file's first record when another is added; 0 means no limit
	MaxBytes     int64         // maximum size of all files; 0 means 2 GiB. The newest file is always kept.
}

// buffered is how many bytes of records are buffered before they are written.
const buffered = 64 << 10

// file is one segment of a log.
type file struct {
	path    string
	first   uint64 // number of its first record, from the file's name
	head    head
	headErr error
	size    int64
}

// Log is an open ring of segment files. It is safe for concurrent use.
type Log struct {
	dir  string
	opts Options
	lock *os.File

	commit sync.Mutex // held by the Sync in progress; acquired before mu

	mu     sync.Mutex
	files  []*file  // oldest first
	active *os.File // last element of files; nil until the next append creates it
	buf    []byte   // encoded records to be written at the end of active
	next   uint64   // number of the next record
	latest int64    // latest time of all records
	synced uint64   // every record before this number is on disk
	broken error    // a failed fsync; set permanently, because nothing is guaranteed afterwards
}

// ErrLocked is wrapped by the error of Open if another process has the log
// open.
var ErrLocked = errors.New("another process has it open")

// Open opens the log in dir, which it creates with mode 0700 if needed. It cuts
// off damage that a crash left at the end of the newest file (Torn), and returns
// it with other damage to that file. Damage to older files is reported when they
// are read.
func Open(dir string, opts Options) (*Log, []*Damage, error) {
	if opts.SegmentBytes <= 0 {
		opts.SegmentBytes = 8 << 20
	}
	opts.SegmentBytes = min(opts.SegmentBytes, MaxFile)
	if opts.MaxBytes <= 0 {
		opts.MaxBytes = 2 << 30
	}
	l := &Log{dir: dir, opts: opts, next: 1, latest: math.MinInt64}
	damage, err := l.open()
	if err != nil {
		if l.lock != nil {
			l.lock.Close()
		}
		if l.active != nil {
			l.active.Close()
		}
		return nil, nil, fmt.Errorf("cannot open the log %s: %w", dir, err)
	}
	return l, damage, nil
}

func (l *Log) open() ([]*Damage, error) {
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(l.dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	l.lock = lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, ErrLocked
		}
		return nil, err
	}
	if l.files, err = list(l.dir); err != nil {
		return nil, err
	}
	damage, err := l.recover()
	l.synced = l.next
	return damage, err
}

// list reads the names and headers of a log's files, and returns the files oldest
// first.
func list(dir string) ([]*file, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var files []*file
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".seg")
		if !ok || !e.Type().IsRegular() {
			continue
		}
		first, err := strconv.ParseUint(name, 16, 64)
		if err != nil || len(name) != 16 {
			return nil, fmt.Errorf("%s is not the name of a segment file: move it away", filepath.Join(dir, e.Name()))
		}
		f := &file{path: filepath.Join(dir, e.Name()), first: first}
		if err := f.readHead(); err != nil {
			return nil, err
		}
		if f.headErr == nil && f.head.first != first {
			return nil, fmt.Errorf("%s begins with record %d, which does not match its name: move it away", f.path, f.head.first)
		}
		files = append(files, f)
	}
	slices.SortFunc(files, func(a, b *file) int { return strings.Compare(a.path, b.path) })
	return files, nil
}

func (f *file) readHead() error {
	in, err := os.Open(f.path)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	f.size = info.Size()
	b := make([]byte, headSize)
	n, err := io.ReadFull(in, b)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	f.head, f.headErr = decodeHead(b[:n])
	return nil
}

// recover finds the end of the log. It removes the newest file if that has no
// records.
func (l *Log) recover() ([]*Damage, error) {
	var damage []*Damage
	for len(l.files) > 0 {
		f := l.files[len(l.files)-1]
		data, err := readFile(f.path, f.size)
		if err != nil {
			return nil, err
		}
		var met []*Damage
		c := scan(f.path, data, func(_ Record, d *Damage) bool {
			if d != nil {
				met = append(met, d)
			}
			return true
		})
		if len(met) > 0 && !c.damaged {
			met[0].Torn = true
			if err := cut(f.path, c.good); err != nil {
				return nil, err
			}
			f.size = c.good
		}
		damage = append(damage, met...)
		if c.records == 0 && !c.damaged {
			// The file may have a valid header but no record; the next append
			// recreates it.
			l.next = max(l.next, f.first)
			if err := os.Remove(f.path); err != nil {
				return nil, err
			}
			l.files = l.files[:len(l.files)-1]
			continue
		}
		l.next = max(l.next, c.last+1, f.first+1)
		if l.latest, err = l.latestBefore(len(l.files) - 1); err != nil {
			return nil, err
		}
		l.latest = max(l.latest, c.latest)
		if c.damaged {
			return damage, nil // left unchanged; the next append creates a new file
		}
		l.active, err = os.OpenFile(f.path, os.O_WRONLY|os.O_APPEND, 0)
		return damage, err
	}
	return damage, syncDir(l.dir)
}

// latestBefore returns the latest time of all records before the ith file. It is
// in that file's header; if that cannot be read, the previous file is scanned.
func (l *Log) latestBefore(i int) (int64, error) {
	latest := int64(math.MinInt64)
	for ; i >= 0; i-- {
		if l.files[i].headErr == nil {
			return max(latest, l.files[i].head.prior), nil
		}
		if i > 0 {
			data, err := readFile(l.files[i-1].path, l.files[i-1].size)
			if err != nil {
				return 0, err
			}
			latest = max(latest, scan(l.files[i-1].path, data, nil).latest)
		}
	}
	return latest, nil
}

func cut(path string, size int64) error {
	out, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer out.Close()
	if err := out.Truncate(size); err != nil {
		return err
	}
	return out.Sync()
}

// Append adds a record and returns its number. The record is durable once a later
// Sync has returned. An error means that the record was not added, or that an
// earlier write has failed; Sync then returns an error too.
func (l *Log) Append(at time.Time, payload []byte) (uint64, error) {
	if len(payload) > MaxRecord {
		return 0, fmt.Errorf("cannot append %d bytes to the log %s: a record has at most %d", len(payload), l.dir, MaxRecord)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken != nil {
		return 0, l.broken
	}
	if err := l.reserve(at, int64(recordSize+len(payload))); err != nil {
		return 0, fmt.Errorf("cannot append to the log %s: %w", l.dir, err)
	}
	number := l.next
	l.buf = appendRecord(l.buf, number, at, payload)
	l.next++
	l.latest = max(l.latest, at.UnixNano())
	return number, nil
}

// reserve makes sure that there is an active file, and room in the buffer for a
// record of the given size.
func (l *Log) reserve(at time.Time, size int64) error {
	if l.active != nil {
		f := l.files[len(l.files)-1]
		full := f.size+int64(len(l.buf))+size > l.opts.SegmentBytes
		old := l.opts.SegmentAge > 0 && at.Sub(time.Unix(0, f.head.begun)) >= l.opts.SegmentAge
		if full || old {
			if err := l.seal(); err != nil {
				return err
			}
		}
	}
	if l.active == nil {
		if err := l.create(at); err != nil {
			return err
		}
	}
	if len(l.buf) > 0 && int64(len(l.buf))+size > buffered {
		return l.flush()
	}
	return nil
}

// seal makes the active file durable and closes it.
func (l *Log) seal() error {
	if err := l.flush(); err != nil {
		return err
	}
	if err := l.active.Sync(); err != nil {
		return l.fail(err)
	}
	l.synced = l.next
	err := l.active.Close()
	l.active = nil
	return err
}

func (l *Log) create(at time.Time) error {
	h := head{first: l.next, begun: at.UnixNano(), prior: l.latest}
	path := filepath.Join(l.dir, fmt.Sprintf("%016x.seg", l.next))
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = out.Write(h.encode())
	if err == nil {
		err = syncDir(l.dir)
	}
	if err != nil {
		return errors.Join(err, out.Close(), os.Remove(path))
	}
	l.active = out
	l.files = append(l.files, &file{path: path, first: l.next, head: h, size: headSize})
	return l.trim()
}

// trim removes the oldest files until the rest fits the limit.
func (l *Log) trim() error {
	total := int64(0)
	for _, f := range l.files {
		total += f.size
	}
	// Calculate as if the active file had its full size.
	for len(l.files) > 1 && total+l.opts.SegmentBytes-headSize > l.opts.MaxBytes {
		total -= l.files[0].size
		if err := l.removeOldest(); err != nil {
			return err
		}
	}
	return nil
}

func (l *Log) removeOldest() error {
	if err := os.Remove(l.files[0].path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	l.files = l.files[1:]
	return nil
}

// Drop removes the oldest files, as long as all of a file's records are before
// the given time. It returns the number of files. The newest file is kept.
func (l *Log) Drop(before time.Time) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for len(l.files) > 1 && l.files[1].headErr == nil && l.files[1].head.prior < before.UnixNano() {
		if err := l.removeOldest(); err != nil {
			return n, fmt.Errorf("cannot drop the oldest file of the log %s: %w", l.dir, err)
		}
		n++
	}
	return n, nil
}

// DropBefore removes the oldest files, as long as all of a file's records have
// numbers below n. The newest file is kept.
func (l *Log) DropBefore(n uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.files) > 1 && l.files[1].first <= n {
		if err := l.removeOldest(); err != nil {
			return fmt.Errorf("cannot drop the oldest file of the log %s: %w", l.dir, err)
		}
	}
	return nil
}

// flush writes the buffer. After a short write the rest stays in it, and the
// next flush continues there.
func (l *Log) flush() error {
	if len(l.buf) == 0 {
		return nil
	}
	n, err := l.active.Write(l.buf)
	l.files[len(l.files)-1].size += int64(n)
	l.buf = l.buf[:copy(l.buf, l.buf[n:])]
	return err
}

// fail records a failed fsync permanently. The kernel may have dropped the pages,
// so a later successful fsync would prove nothing.
func (l *Log) fail(err error) error {
	l.broken = fmt.Errorf("cannot make the log %s durable, open it again: %w", l.dir, err)
	return l.broken
}

// Flush passes every record appended before the call to the kernel. The records
// then survive the end of the process, but not a crash of the machine.
func (l *Log) Flush() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken != nil {
		return l.broken
	}
	if err := l.flush(); err != nil {
		return fmt.Errorf("cannot write to the log %s: %w", l.dir, err)
	}
	return nil
}

// Sync returns nil once every record appended before the call is on disk.
// Concurrent calls share one fsync.
func (l *Log) Sync() error {
	l.mu.Lock()
	want := l.next
	l.mu.Unlock()
	l.commit.Lock()
	defer l.commit.Unlock()
	l.mu.Lock()
	if l.broken != nil || l.synced >= want {
		defer l.mu.Unlock()
		return l.broken
	}
	if err := l.flush(); err != nil {
		defer l.mu.Unlock()
		return fmt.Errorf("cannot write to the log %s: %w", l.dir, err)
	}
	out, upTo := l.active, l.next
	l.mu.Unlock()
	err := out.Sync()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.synced >= upTo {
		return nil // the file was sealed in the meantime, which syncs too; out may be closed
	}
	if err != nil {
		return l.fail(err)
	}
	l.synced = upTo
	return nil
}

// Discard releases the log without writing the buffer. It is for a log that has
// failed, and must not be called concurrently with other methods. A partly
// written record is cut off by the next Open.
func (l *Log) Discard() error {
	var err error
	if l.active != nil {
		err = l.active.Close()
	}
	return errors.Join(err, l.lock.Close())
}

// Close makes everything durable and releases the log. It must not be called
// twice or concurrently with other methods.
func (l *Log) Close() error {
	err := l.Sync()
	if l.active != nil {
		err = errors.Join(err, l.active.Close())
	}
	return errors.Join(err, l.lock.Close())
}
