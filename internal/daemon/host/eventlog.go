package host

import (
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"

	"lull/internal/base/segment"
	"lull/internal/link/hostctl"
)

// Bounds of the log of events: some ten thousand of them.
const (
	eventLogBytes    = 4 << 20
	eventLogSegment  = 512 << 10
	eventLogQueue    = 4096
	eventLogInterval = time.Second
)

// EventLog keeps a host's events over its restarts, as many as fit into 4 MiB.
// What a machine that loses its power forgets is the last second; of a daemon that
// is killed, no more.
type EventLog struct {
	log     *segment.Log
	say     *slog.Logger
	kept    []hostctl.Event // of earlier daemons, until Events has them
	dropped bool            // there were older ones
	queue   chan hostctl.Event
	ended   chan struct{}

	mu     sync.Mutex
	closed bool
	lost   int // that the disk was too slow for, since the last that was written
}

// OpenEventLog opens or makes the log in dir, and reads it.
func OpenEventLog(dir string, say *slog.Logger) (*EventLog, error) {
	log, damage, err := segment.Open(dir, segment.Options{SegmentBytes: eventLogSegment, MaxBytes: eventLogBytes})
	if err != nil {
		return nil, err
	}
	for _, d := range damage {
		say.Warn("the log of events was damaged and is cut there", "damage", d)
	}
	l := &EventLog{log: log, say: say, dropped: log.First() > 1 || len(damage) > 0, queue: make(chan hostctl.Event, eventLogQueue), ended: make(chan struct{})}
	var last uint64
	for r, err := range log.Records(segment.From{}) {
		var damage *segment.Damage
		if errors.As(err, &damage) {
			say.Warn("some events cannot be read any more", "damage", damage)
			l.kept, l.dropped = l.kept[:0], true // what follows is whole
			continue
		}
		if err != nil {
			return nil, errors.Join(err, log.Close())
		}
		var e hostctl.Event
		if err := json.Unmarshal(r.Payload, &e); err != nil || e.Seq <= last {
			say.Warn("an event cannot be read any more", "number", r.Number, "error", err)
			continue
		}
		last = e.Seq
		l.kept = append(l.kept, e)
	}
	go l.write()
	return l, nil
}

// take keeps an event. It never waits.
func (l *EventLog) take(e hostctl.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	select {
	case l.queue <- e:
	default:
		l.lost++
	}
}

func (l *EventLog) write() {
	defer close(l.ended)
	tick := time.NewTicker(eventLogInterval)
	defer tick.Stop()
	dirty, failed := false, false
	try := func(err error) {
		if err != nil && !failed {
			l.say.Error("events are not kept over a restart", "error", err)
		}
		failed = err != nil
	}
	for {
		select {
		case e, more := <-l.queue:
			if !more {
				return
			}
			b, err := json.Marshal(e)
			if err == nil {
				_, err = l.log.Append(e.Time, b)
			}
			try(err)
			dirty = dirty || err == nil
		case <-tick.C:
			if dirty {
				try(l.log.Sync())
				dirty = false
			}
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

// Close makes everything durable. Events are not kept any more after it.
func (l *EventLog) Close() error {
	l.mu.Lock()
	l.closed = true
	close(l.queue)
	l.mu.Unlock()
	<-l.ended
	return l.log.Close()
}
