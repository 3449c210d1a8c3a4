package events

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"lull/internal/lib/segment"
	"lull/internal/protocol/hostctl"
)

// Bounds of the event log, which holds about ten thousand events.
const (
	maxBytes     = 4 << 20
	segmentBytes = 512 << 10
	queueLength  = 4096
	lossInterval = time.Second            // minimum interval between warnings about lost events
	diskWait     = 100 * time.Millisecond // how long an event waits for the disk at most before it is published
)

// Log keeps up to 4 MiB of a host's events across restarts.
//
// If the daemon is killed, no event that a reader has seen is lost, unless the disk
// took longer than diskWait. Nothing is synced before Close, so a power failure
// loses the events that the kernel has not written yet, by default those of the
// last half minute.
type Log struct {
	log     segment.Values[hostctl.Event]
	say     *slog.Logger
	kept    []hostctl.Event // events of earlier daemons, until a Feed takes them
	dropped bool            // older events have existed
	queue   chan unwritten
	losing  chan struct{} // an event was dropped
	ended   chan struct{}

	mu     sync.Mutex
	closed bool
	behind bool // the disk is slow: events do not wait for it until it has caught up
	lost   int  // events dropped since the last warning, because the disk was too slow
}

// unwritten is an event that is to be written. written is closed once the kernel
// has it or the write has failed.
type unwritten struct {
	hostctl.Event
	written chan struct{}
}

// Open opens or creates the log in dir and reads it.
func Open(dir string, say *slog.Logger) (*Log, error) {
	log, damage, err := segment.OpenValues[hostctl.Event](dir, segment.Options{SegmentBytes: segmentBytes, MaxBytes: maxBytes})
	if err != nil {
		return nil, err
	}
	for _, d := range damage {
		say.Warn("the event log was damaged and has been truncated at the damage", "damage", d)
	}
	l := &Log{log: log, say: say, dropped: log.First() > 1 || len(damage) > 0, queue: make(chan unwritten, queueLength), losing: make(chan struct{}, 1), ended: make(chan struct{})}
	var last uint64
	for e, err := range log.All(segment.From{}) {
		var damage *segment.Damage
		var bad *segment.ValueError
		switch {
		case errors.As(err, &damage):
			say.Warn("some events can no longer be read", "damage", damage)
			l.kept, l.dropped = l.kept[:0], true // from here on the log is complete
		case errors.As(err, &bad):
			say.Warn("an event can no longer be read", "err", bad)
		case err != nil:
			return nil, errors.Join(err, log.Close())
		case e.Seq <= last:
			say.Warn("an event has a lower number than the one before it", "number", e.Seq, "before", last)
		default:
			last = e.Seq
			l.kept = append(l.kept, e)
		}
	}
	go l.write()
	return l, nil
}

// take queues an event for the log. It returns once the event would survive a kill
// of the daemon, or after diskWait.
func (l *Log) take(e hostctl.Event) {
	u := unwritten{e, make(chan struct{})}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return
	}
	wait := !l.behind
	select {
	case l.queue <- u:
	default:
		l.lost++
		wait = false
		select {
		case l.losing <- struct{}{}:
		default:
		}
	}
	l.mu.Unlock()
	if !wait {
		return
	}
	late := time.NewTimer(diskWait)
	defer late.Stop()
	select {
	case <-u.written:
	case <-late.C:
		l.mu.Lock()
		l.behind = true
		l.mu.Unlock()
	}
}

func (l *Log) write() {
	defer close(l.ended)
	var warn <-chan time.Time // nil while nothing was dropped, so that an idle host is not woken
	failed := false
	try := func(err error) {
		if err != nil && !failed {
			l.say.Error("events are not kept over a restart", "err", err)
		}
		failed = err != nil
	}
	for {
		select {
		case u, more := <-l.queue:
			if !more {
				return
			}
			try(l.append(u))
		case <-l.losing:
			if warn == nil {
				warn = time.After(lossInterval)
			}
		case <-warn:
			warn = nil
			l.mu.Lock()
			lost := l.lost
			l.lost = 0
			l.mu.Unlock()
			if lost > 0 {
				l.say.Warn("the disk was too slow for some events, which are not kept over a restart", "events", lost)
			}
		}
	}
}

// append writes u and all events in the queue.
func (l *Log) append(u unwritten) error {
	all := []unwritten{u}
	for n := len(l.queue); n > 0; n-- {
		if u, more := <-l.queue; more {
			all = append(all, u)
		}
	}
	var errs []error
	for _, u := range all {
		errs = append(errs, l.log.Append(u.Time, u.Event))
	}
	errs = append(errs, l.log.Flush())
	for _, u := range all {
		close(u.written)
	}
	l.mu.Lock()
	l.behind = l.behind && len(l.queue) > 0
	l.mu.Unlock()
	return errors.Join(errs...)
}

// Close syncs the log and closes it. Later events are not kept.
func (l *Log) Close() error {
	l.mu.Lock()
	l.closed = true
	close(l.queue)
	l.mu.Unlock()
	<-l.ended
	return l.log.Close()
}
