package host

import (
	"hash/fnv"
	"sync"
	"time"

	"lull/internal/core/instance"
)

// saveLag delays the write of a record that may follow its change. A program
// that was just woken gets the processors to itself, and changes that come
// together are written once.
const saveLag = 20 * time.Millisecond

// saver writes records. now writes changes that must be durable before they are
// acted on. A wake's record, which may follow the thaw, is queued. The
// generation of a record prevents an older one from overwriting a newer one.
type saver struct {
	to Records

	mu      sync.Mutex
	written map[string]uint64 // generation on disk
	dirty   map[string]*inst
	kick    chan struct{}
	done    chan struct{}
	trouble *recordTrouble             // nil while writes succeed
	find    func(id string) *inst      // nil if it no longer exists
	told    func(i *inst, began error) // called when trouble begins, and with nil when it ends; i may be nil
	// order serializes the writes of an instance, so that what is checked
	// before a write still applies after it. Instances share the slots.
	order [64]chan struct{}
}

// recordTrouble is why records cannot be written.
type recordTrouble struct {
	err error
	id  string // of the instance whose write failed last
}

// retryEvery is the retry interval while writes fail.
const retryEvery = time.Second

// failing returns why records cannot be written; nil while they can.
func (s *saver) failing() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.trouble == nil {
		return nil
	}
	return s.trouble.err
}

// put writes a record and notes whether records can be written.
func (s *saver) put(r *instance.Record) error {
	err := s.to.Put(r)
	s.mu.Lock()
	was := s.trouble
	s.trouble = nil
	if err != nil {
		s.trouble = &recordTrouble{err, r.ID}
	}
	s.mu.Unlock()
	if (was != nil) != (err != nil) {
		s.told(s.find(r.ID), err)
		if err != nil {
			s.kicked()
		}
	}
	return err
}

// try writes the record whose write failed last again, in its present state. If
// its change was undone there is nothing to write, and the disk may have space
// again.
func (s *saver) try() {
	s.mu.Lock()
	id := ""
	if s.trouble != nil {
		id = s.trouble.id
	}
	s.mu.Unlock()
	i := s.find(id)
	if i == nil {
		s.mu.Lock()
		s.trouble = nil // the next write shows whether it is over
		s.mu.Unlock()
		return
	}
	order := s.orderOf(id)
	order <- struct{}{}
	defer func() { <-order }()
	if i.deleted.Load() {
		return
	}
	i.mu.Lock()
	rec := i.rec
	i.mu.Unlock()
	if s.put(&rec) == nil {
		s.mu.Lock()
		s.written[id] = max(s.written[id], rec.Generation)
		s.mu.Unlock()
	}
}

func (s *saver) kicked() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

func newSaver(to Records) *saver {
	s := &saver{to: to, written: map[string]uint64{}, dirty: map[string]*inst{},
		kick: make(chan struct{}, 1), done: make(chan struct{})}
	for n := range s.order {
		s.order[n] = make(chan struct{}, 1)
	}
	return s
}

func (s *saver) orderOf(id string) chan struct{} {
	h := fnv.New32a()
	h.Write([]byte(id))
	return s.order[h.Sum32()%uint32(len(s.order))]
}

// now writes r, a record of i, unless a newer one is on disk already or i was
// removed.
func (s *saver) now(i *inst, r *instance.Record) error {
	order := s.orderOf(r.ID)
	order <- struct{}{}
	defer func() { <-order }()
	if i.deleted.Load() {
		return nil
	}
	s.mu.Lock()
	stale := s.written[r.ID] >= r.Generation
	s.mu.Unlock()
	if stale {
		return nil
	}
	if err := s.put(r); err != nil {
		return err
	}
	s.mu.Lock()
	s.written[r.ID] = max(s.written[r.ID], r.Generation)
	s.mu.Unlock()
	return nil
}

// remove deletes i's record and marks i as deleted. A write of i that is pending
// or in progress does not bring the record back.
func (s *saver) remove(i *inst) error {
	order := s.orderOf(i.id)
	order <- struct{}{}
	defer func() { <-order }()
	if err := s.to.Delete(i.id); err != nil {
		return err
	}
	i.deleted.Store(true)
	return nil
}

// later writes i's record soon.
func (s *saver) later(i *inst) {
	s.mu.Lock()
	s.dirty[i.id] = i
	s.mu.Unlock()
	s.kicked()
}

func (s *saver) forget(id string) {
	s.mu.Lock()
	delete(s.dirty, id)
	delete(s.written, id)
	s.mu.Unlock()
}

func (s *saver) run() {
	for {
		var again <-chan time.Time
		if s.failing() != nil {
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

func (s *saver) stop() { close(s.done) }

// flush writes the dirty records and reports whether it tried any. An instance
// in a transition is written at its end or by the next flush. One that cannot
// be written stays dirty.
func (s *saver) flush() (tried bool) {
	s.mu.Lock()
	batch := s.dirty
	s.dirty = map[string]*inst{}
	s.mu.Unlock()
	for id, i := range batch {
		i.mu.Lock()
		rec := i.rec
		i.mu.Unlock()
		if tried = true; s.now(i, &rec) != nil && !i.deleted.Load() {
			s.mu.Lock()
			s.dirty[id] = i
			s.mu.Unlock()
		}
	}
	return tried
}

// seed records which generation is on disk.
func (s *saver) seed(id string, generation uint64) {
	s.mu.Lock()
	s.written[id] = generation
	s.mu.Unlock()
}
