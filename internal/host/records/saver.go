package records

import (
	"hash/fnv"
	"sync"
	"time"

	"lull/internal/core/instance"
)

// saveLag is the delay before a queued record is written. It leaves the CPU to a
// program that has just been woken, and combines changes that follow each other
// closely.
const saveLag = 20 * time.Millisecond

// Store keeps records across restarts.
type Store interface {
	Put(r *instance.Record) error // durable once it returns
	// Note is Put without waiting for the disk. Once it returns nil, the record
	// survives the end of this process. It survives a power failure only after a
	// later Put, or once the kernel has written it.
	Note(r *instance.Record) error
	Delete(id string) error
}

// Owner is an instance whose record a Saver writes.
type Owner interface {
	Record() instance.Record // the current record
	Removed() bool           // reports whether the instance was removed; then its record is no longer written
	MarkRemoved()
}

// Saver decides when records are written. Write is for changes that must be durable
// before they take effect. WriteLater queues a record that may be written after its
// change, and NoteLater one that a power failure may undo. By its generation, an
// older record never overwrites a newer one.
type Saver struct {
	to        Store
	find      func(id string) Owner          // returns nil if the instance no longer exists
	onTrouble func(id string, trouble error) // called when writes begin to fail, and with a nil error when they succeed again

	mu      sync.Mutex
	written map[string]uint64 // by ID: the generation that survives the end of this process
	durable map[string]uint64 // by ID: the generation that survives a power failure
	dirty   map[string]queued
	kick    chan struct{}
	done    chan struct{}
	trouble *trouble // nil while writes succeed
	// order has a slot for each instance, shared by several, that is held during a
	// write. What is checked before a write therefore still applies after it.
	order [64]chan struct{}
}

// queued is a record that is to be written soon.
type queued struct {
	Owner
	noted bool // Note is enough: the record need not survive a power failure
}

// trouble is a failure to write records.
type trouble struct {
	err error
	id  string // instance whose write failed last
}

// retryEvery is the interval between attempts while writes fail.
const retryEvery = time.Second

// Failing returns why records cannot be written, or nil.
func (s *Saver) Failing() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.trouble == nil {
		return nil
	}
	return s.trouble.err
}

// put writes a record, durably or not, and records whether writes succeed.
func (s *Saver) put(r *instance.Record, durable bool) error {
	write := s.to.Note
	if durable {
		write = s.to.Put
	}
	err := write(r)
	s.mu.Lock()
	was := s.trouble
	s.trouble = nil
	if err != nil {
		s.trouble = &trouble{err, r.ID}
	} else {
		s.written[r.ID] = max(s.written[r.ID], r.Generation)
		if durable {
			s.durable[r.ID] = max(s.durable[r.ID], r.Generation)
		}
	}
	s.mu.Unlock()
	if (was != nil) != (err != nil) {
		s.onTrouble(r.ID, err)
		if err != nil {
			s.kicked()
		}
	}
	return err
}

// try repeats the write that failed last, with the instance's current record. If
// there is nothing to write because the change was undone, writes count as
// succeeding again.
func (s *Saver) try() {
	s.mu.Lock()
	id := ""
	if s.trouble != nil {
		id = s.trouble.id
	}
	s.mu.Unlock()
	o := s.find(id)
	if o == nil {
		s.mu.Lock()
		s.trouble = nil // the next write will show whether the disk still fails
		s.mu.Unlock()
		return
	}
	order := s.orderOf(id)
	order <- struct{}{}
	defer func() { <-order }()
	if o.Removed() {
		return
	}
	rec := o.Record()
	_ = s.put(&rec, true) // put records the failure
}

func (s *Saver) kicked() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// NewSaver returns a saver that writes to a store. find returns the instance with
// an ID, or nil. onTrouble is called when writes begin to fail, with the instance's
// ID and the error, and with a nil error when they succeed again.
func NewSaver(to Store, find func(id string) Owner, onTrouble func(id string, trouble error)) *Saver {
	s := &Saver{to: to, find: find, onTrouble: onTrouble, written: map[string]uint64{}, durable: map[string]uint64{},
		dirty: map[string]queued{}, kick: make(chan struct{}, 1), done: make(chan struct{})}
	for n := range s.order {
		s.order[n] = make(chan struct{}, 1)
	}
	return s
}

func (s *Saver) orderOf(id string) chan struct{} {
	h := fnv.New32a()
	h.Write([]byte(id))
	return s.order[h.Sum32()%uint32(len(s.order))]
}

// Write stores r, a record of o, durably, unless a newer one is durable or o was
// removed.
func (s *Saver) Write(o Owner, r *instance.Record) error { return s.write(o, r, true) }

// write stores r durably or, if durable is false, with Store.Note.
func (s *Saver) write(o Owner, r *instance.Record, durable bool) error {
	order := s.orderOf(r.ID)
	order <- struct{}{}
	defer func() { <-order }()
	if o.Removed() {
		return nil
	}
	s.mu.Lock()
	stale, lost := s.written[r.ID] >= r.Generation, s.durable[r.ID] < r.Generation
	s.mu.Unlock()
	switch {
	case stale && durable && lost: // the newer record is not durable yet
		rec := o.Record()
		return s.put(&rec, true)
	case stale:
		return nil
	}
	return s.put(r, durable)
}

// Remove deletes the record of o and marks o as removed. A write that is pending or
// in progress does not restore the record.
func (s *Saver) Remove(o Owner, id string) error {
	order := s.orderOf(id)
	order <- struct{}{}
	defer func() { <-order }()
	if err := s.to.Delete(id); err != nil {
		return err
	}
	o.MarkRemoved()
	return nil
}

// WriteLater queues the record of o for a durable write.
func (s *Saver) WriteLater(o Owner, id string) { s.later(id, queued{Owner: o}) }

// NoteLater queues the record of o for a write that a power failure may undo.
func (s *Saver) NoteLater(o Owner, id string) { s.later(id, queued{Owner: o, noted: true}) }

func (s *Saver) later(id string, q queued) {
	s.mu.Lock()
	if was, ok := s.dirty[id]; ok && !was.noted {
		q.noted = false
	}
	s.dirty[id] = q
	s.mu.Unlock()
	s.kicked()
}

// Forget drops the generations of an instance that no longer exists.
func (s *Saver) Forget(id string) {
	s.mu.Lock()
	delete(s.dirty, id)
	delete(s.written, id)
	delete(s.durable, id)
	s.mu.Unlock()
}

// Run writes queued records until Stop, and then those that are left.
func (s *Saver) Run() {
	for {
		var again <-chan time.Time
		if s.Failing() != nil {
			again = time.After(retryEvery)
		}
		select {
		case <-again:
			if !s.flush() {
				s.try()
			}
		case <-s.kick:
			select {
			case <-time.After(saveLag):
			case <-s.done:
			}
			s.flush()
		case <-s.done:
			s.flush()
			return
		}
	}
}

// Stop makes Run return.
func (s *Saver) Stop() { close(s.done) }

// flush writes the queued records and reports whether it tried any. An instance in
// a transition is written at the end of that or by the next flush. A record that
// cannot be written stays queued.
func (s *Saver) flush() (tried bool) {
	s.mu.Lock()
	batch := s.dirty
	s.dirty = map[string]queued{}
	s.mu.Unlock()
	for id, q := range batch {
		rec := q.Record()
		if tried = true; s.write(q.Owner, &rec, !q.noted) != nil && !q.Removed() {
			s.mu.Lock()
			s.dirty[id] = queued{Owner: q.Owner}
			s.mu.Unlock()
		}
	}
	return tried
}

// Written returns the generation of the record that survives the end of this
// process, or 0.
func (s *Saver) Written(id string) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.written[id]
}

// Loaded sets the generation that an earlier daemon has stored.
func (s *Saver) Loaded(id string, generation uint64) {
	s.mu.Lock()
	s.written[id], s.durable[id] = generation, generation
	s.mu.Unlock()
}
