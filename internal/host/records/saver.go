package records

import (
	"hash/fnv"
	"sync"
	"time"

	"lull/internal/core/instance"
)

// saveLag delays the write of a record that may follow its change. It leaves
// the CPUs to a program that was just woken, and combines changes that come
// together.
const saveLag = 20 * time.Millisecond

// Store keeps records across restarts.
type Store interface {
	Put(r *instance.Record) error // returns once it is durable
	// Note is Put without waiting for the disk. When it returns nil, the record
	// survives the end of this process, but survives a power failure only after a
	// later Put or once the kernel has written it back.
	Note(r *instance.Record) error
	Delete(id string) error
}

// Owner is an instance whose record a Saver writes.
type Owner interface {
	Record() instance.Record // the current record
	Removed() bool           // reports whether it was removed; its record is not written anymore
	MarkRemoved()
}

// Saver writes records. Write is for changes that must be durable before they
// are acted on. A record that may follow its change is queued by WriteLater, or
// by NoteLater if a power failure may undo the change. The generation of a record prevents an older one from overwriting a newer one.
type Saver struct {
	to        Store
	find      func(id string) Owner          // nil if it no longer exists
	onTrouble func(id string, trouble error) // called when writes begin to fail, and with nil when they succeed again

	mu      sync.Mutex
	written map[string]uint64 // generation that survives this process
	durable map[string]uint64 // generation that survives a power failure
	dirty   map[string]queued
	kick    chan struct{}
	done    chan struct{}
	trouble *trouble // nil while writes succeed
	// order serializes the writes of an instance, so that what is checked
	// before a write still applies after it. Instances share the slots.
	order [64]chan struct{}
}

// queued is a record to be written soon.
type queued struct {
	Owner
	noted bool // Note suffices: it need not survive a power failure
}

// trouble is why records cannot be written.
type trouble struct {
	err error
	id  string // instance whose write failed last
}

// retryEvery is the retry interval while writes fail.
const retryEvery = time.Second

// Failing returns why records cannot be written; nil while they can.
func (s *Saver) Failing() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.trouble == nil {
		return nil
	}
	return s.trouble.err
}

// put writes a record, durably or not, and notes whether records can be
// written.
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

// try retries the write that failed last, with the current record. If there is
// nothing to write because the change was undone, writes count as working
// again.
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
		s.trouble = nil // the next write shows if the disk still fails
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

// NewSaver returns a saver that writes to a store. find returns the instance
// with an ID, nil for none. told is called when writes begin to fail, with the
// ID of the instance, and with a nil error when they succeed again.
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

// Write stores r, a record of o, durably, unless a newer one is stored or o was
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
	case stale && durable && lost: // the newer one was only noted
		rec := o.Record()
		return s.put(&rec, true)
	case stale:
		return nil
	}
	return s.put(r, durable)
}

// Remove deletes the record of o and marks o as removed. A write of it that is
// pending or in progress does not bring the record back.
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

// WriteLater writes the present record of o soon, durably.
func (s *Saver) WriteLater(o Owner, id string) { s.later(id, queued{Owner: o}) }

// NoteLater writes the present record of o soon. A power failure may undo it.
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

// Forget drops what is known about an instance that no longer exists.
func (s *Saver) Forget(id string) {
	s.mu.Lock()
	delete(s.dirty, id)
	delete(s.written, id)
	delete(s.durable, id)
	s.mu.Unlock()
}

// Run writes queued records until Stop, then the remaining ones.
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

// Stop ends Run.
func (s *Saver) Stop() { close(s.done) }

// flush writes the dirty records and reports whether it tried any. An instance
// in a transition is written at its end or by the next flush. One that cannot
// be written stays dirty.
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

// Written returns the generation of the record that survives this process; 0
// for none.
func (s *Saver) Written(id string) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.written[id]
}

// Loaded records the generation that an earlier daemon stored.
func (s *Saver) Loaded(id string, generation uint64) {
	s.mu.Lock()
	s.written[id], s.durable[id] = generation, generation
	s.mu.Unlock()
}
