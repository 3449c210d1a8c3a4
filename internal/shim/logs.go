package shim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/logfile"
)

// Bounds of the logs.
const (
	chunkSize  = 64 << 10               // maximum size of a read; the capacity of a pipe
	queued     = 64                     // chunks between the reader and the writer
	slowDisk   = 100 * time.Millisecond // how long the reader waits for the writer before it drops bytes
	openLogs   = 32                     // number of logs whose files, two each, are kept open
	defaultMax = 10 << 20
)

// logs reads the output pipes of all runs in one goroutine and writes their files
// in another. If the disk is slow or full, output is dropped, and the number of
// dropped bytes is noted in the log. A program is never blocked for long.
type logs struct {
	ep    int
	wake  int // eventfd that makes read return
	log   *slog.Logger
	queue chan chunk
	pool  sync.Pool

	mu   sync.Mutex
	last uint64
	by   map[uint64]*source
	dead func(pid int) // called when a process watched by pidfd has ended

	names sync.Mutex // held while the name of a pipe is created or removed

	open []*sink // those with an open file, the least recently used first; used only by the writer
}

// source is the object of an epoll registration: a pipe or a process.
type source struct {
	fd   int
	sink *sink  // for a pipe
	pid  int    // for a process
	path string // path of the pipe
}

// sink is one log file. Only the writer uses its file.
type sink struct {
	mu      sync.Mutex
	dropped int64
	why     string

	file *logfile.File
}

func newSink(path string, maxSize int64) *sink {
	return &sink{file: logfile.New(path, cmp.Or(max(maxSize, 0), defaultMax))}
}

// chunk is the data of one read. No data means that the pipe has ended.
type chunk struct {
	sink *sink
	b    *[]byte
	n    int
	at   time.Time
}

func newLogs(log *slog.Logger, dead func(pid int)) (*logs, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("cannot watch pipes: %w", err)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err == nil {
		err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, wake, &unix.EpollEvent{Events: unix.EPOLLIN})
	}
	if err != nil {
		unix.Close(ep)
		return nil, fmt.Errorf("cannot watch pipes: %w", err)
	}
	l := &logs{ep: ep, wake: wake, log: log, dead: dead, queue: make(chan chunk, queued), by: map[uint64]*source{}}
	l.pool.New = func() any { b := make([]byte, chunkSize); return &b }
	return l, nil
}

// run reads and writes until ctx ends and everything that was read has been
// written.
func (l *logs) run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() {
		_, _ = unix.Write(l.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	})
	defer stop()
	var writer sync.WaitGroup
	writer.Go(l.write)
	err := l.read(ctx)
	close(l.queue)
	writer.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.by {
		unix.Close(s.fd)
	}
	l.by = nil
	unix.Close(l.ep)
	unix.Close(l.wake)
	return err
}

// add registers a pipe or a pidfd and takes ownership of it.
func (l *logs) add(s *source) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.by == nil {
		unix.Close(s.fd)
		return errors.New("cannot watch a pipe: the shim is ending")
	}
	l.last++
	l.by[l.last] = s
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(uint32(l.last)), Pad: int32(uint32(l.last >> 32))}
	if err := unix.EpollCtl(l.ep, unix.EPOLL_CTL_ADD, s.fd, &ev); err != nil {
		delete(l.by, l.last)
		unix.Close(s.fd)
		return fmt.Errorf("cannot watch a pipe: %w", err)
	}
	return nil
}

// follow copies the pipe at path to the log file until the pipe has no writers.
// Then it removes the pipe.
func (l *logs) follow(path, logPath string, maxSize int64) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("cannot read the pipe %s: %w", path, err)
	}
	return l.add(&source{fd: fd, path: path, sink: newSink(logPath, maxSize)})
}

// resume is follow for a pipe that an earlier shim created. epoll reports the end
// of a pipe only to a reader that has seen a writer, so resume checks once for the
// end itself.
func (l *logs) resume(path, logPath string, maxSize int64) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("cannot read the pipe %s: %w", path, err)
	}
	s := &source{fd: fd, path: path, sink: newSink(logPath, maxSize)}
	if l.drain(s) {
		unix.Close(fd)
		l.finish(s)
		return remove(path)
	}
	return l.add(s)
}

// watch calls dead when the process of pidfd has ended.
func (l *logs) watch(pid, pidfd int) error { return l.add(&source{fd: pidfd, pid: pid}) }

func (l *logs) read(ctx context.Context) error {
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(l.ep, events, -1)
		if ctx.Err() != nil {
			return nil
		}
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("cannot wait for output: %w", err)
		}
		for _, e := range events[:n] {
			id := uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32
			l.mu.Lock()
			s := l.by[id]
			l.mu.Unlock()
			if s == nil {
				continue
			}
			if s.sink == nil {
				l.forget(id, s)
				l.dead(s.pid)
				continue
			}
			if over := l.once(s); over {
				if err := l.unname(s); err != nil {
					l.log.Warn("cannot remove a pipe", "err", err)
				}
				l.forget(id, s)
				l.finish(s)
			}
		}
	}
}

// unname removes the file of a pipe, unless it is already another pipe's: a run
// that was refused and is tried again has the same path.
func (l *logs) unname(s *source) error {
	l.names.Lock()
	defer l.names.Unlock()
	var own, now unix.Stat_t
	if unix.Fstat(s.fd, &own) == nil && unix.Lstat(s.path, &now) == nil && (own.Ino != now.Ino || own.Dev != now.Dev) {
		return nil
	}
	return remove(s.path)
}

func (l *logs) forget(id uint64, s *source) {
	l.mu.Lock()
	delete(l.by, id)
	l.mu.Unlock()
	unix.Close(s.fd)
}

// finish closes the log file of a run that has ended. If the instance is removed,
// an open file would continue to use disk space.
func (l *logs) finish(s *source) {
	l.enqueue(chunk{sink: s.sink, b: l.pool.Get().(*[]byte)})
}

// once reads one chunk from a pipe. over reports whether the pipe has no writers
// left.
func (l *logs) once(s *source) (over bool) {
	b := l.pool.Get().(*[]byte)
	n, err := unix.Read(s.fd, *b)
	if n <= 0 {
		l.pool.Put(b)
		return err == nil || err != unix.EAGAIN && err != unix.EINTR
	}
	l.enqueue(chunk{s.sink, b, n, time.Now()})
	return false
}

// drain reads everything that is in a pipe at present.
func (l *logs) drain(s *source) (over bool) {
	for {
		b := l.pool.Get().(*[]byte)
		n, err := unix.Read(s.fd, *b)
		if n <= 0 {
			l.pool.Put(b)
			return err == nil
		}
		l.enqueue(chunk{s.sink, b, n, time.Now()})
		if n < len(*b) {
			return false
		}
	}
}

// enqueue passes a chunk to the writer. If the writer is too slow, it drops the
// chunk.
func (l *logs) enqueue(c chunk) {
	select {
	case l.queue <- c:
		return
	default:
	}
	t := time.NewTimer(slowDisk)
	defer t.Stop()
	select {
	case l.queue <- c:
	case <-t.C:
		c.sink.drop(c.n, "the disk is too slow")
		l.pool.Put(c.b)
	}
}

func (s *sink) drop(n int, why string) {
	s.mu.Lock()
	s.dropped += int64(n)
	s.why = why
	s.mu.Unlock()
}

func (l *logs) write() {
	for c := range l.queue {
		l.put(c.sink, (*c.b)[:c.n], c.at)
		l.pool.Put(c.b)
		if c.n == 0 {
			c.sink.close()
			l.unlist(c.sink)
		}
	}
	for _, s := range l.open {
		s.close()
	}
	l.open = nil
}

// put appends b to the file of s. Data that cannot be written is dropped and
// counted; the next successful write notes the count.
func (l *logs) put(s *sink, b []byte, at time.Time) {
	s.mu.Lock()
	dropped, why := s.dropped, s.why
	s.dropped = 0
	s.mu.Unlock()
	if dropped > 0 {
		note := fmt.Sprintf("\n[lull] %d bytes of output are missing here: %s\n", dropped, why)
		if err := l.append(s, []byte(note), at); err != nil { // without the note, b would seem to follow what was written before
			s.drop(int(dropped)+len(b), why)
			s.close()
			l.unlist(s)
			return
		}
	}
	if err := l.append(s, b, at); err != nil {
		s.drop(len(b), err.Error())
		s.close() // so that the next attempt opens the path again
		l.unlist(s)
	}
}

// append writes b to the file of s. It opens the file if necessary, and then closes
// the least recently used one.
func (l *logs) append(s *sink, b []byte, at time.Time) error {
	if len(b) == 0 {
		return nil
	}
	if n := len(l.open); n == 0 || l.open[n-1] != s {
		l.unlist(s)
		if len(l.open) >= openLogs {
			l.open[0].close()
			l.open = l.open[1:]
		}
		l.open = append(l.open, s)
	}
	return s.file.Add(b, at)
}

func (l *logs) unlist(s *sink) {
	for i, o := range l.open {
		if o == s {
			l.open = append(l.open[:i], l.open[i+1:]...)
			return
		}
	}
}

func (s *sink) close() { _ = s.file.Close() } // every write has been checked, so closing cannot lose data unnoticed
