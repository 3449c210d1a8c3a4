package host

import (
	"hash/fnv"
	"sync"
	"time"

	"lull/internal/instance"
)

// saveLag is how long a record that may follow its change waits: a program that
// has just been woken has the processors to itself, and changes that come
// together are written once.
const saveLag = 20 * time.Millisecond

// saver writes records. Changes that must be durable before they are acted on
// are written by now; a wake's record, which may follow the thaw, is queued.
// Writes of one instance never go back: the generation decides.
type saver struct {
	to Records

	mu      sync.Mutex
	written map[string]uint64 // generation on disk
	dirty   map[string]*inst
	kick    chan struct{}
	done    chan struct{}
	// order lets one write of an instance happen at a time: what is looked at
	// before a write must still hold after it. Instances share a few.
	order [64]chan struct{}
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

// now writes r unless something newer of the same instance is on disk already.
func (s *saver) now(r *instance.Record) error {
	order := s.orderOf(r.ID)
	order <- struct{}{}
	defer func() { <-order }()
	s.mu.Lock()
	stale := s.written[r.ID] >= r.Generation
	s.mu.Unlock()
	if stale {
		return nil
	}
	if err := s.to.Put(r); err != nil {
		return err
	}
	s.mu.Lock()
	s.written[r.ID] = max(s.written[r.ID], r.Generation)
	s.mu.Unlock()
	return nil
}

// later writes i's record soon.
func (s *saver) later(i *inst) {
	s.mu.Lock()
	s.dirty[i.id] = i
	s.mu.Unlock()
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

func (s *saver) forget(id string) {
	s.mu.Lock()
	delete(s.dirty, id)
	delete(s.written, id)
	s.mu.Unlock()
}

func (s *saver) run() {
	for {
		select {
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

// flush writes what is dirty. An instance that is in a transition is written
// by that transition's end or by the next flush.
func (s *saver) flush() {
	s.mu.Lock()
	batch := s.dirty
	s.dirty = map[string]*inst{}
	s.mu.Unlock()
	for _, i := range batch {
		i.mu.Lock()
		rec := i.rec
		i.mu.Unlock()
		if err := s.now(&rec); err != nil {
			i.h.log.Error("cannot record", "instance", i.name(), "error", err)
		}
	}
}

// seed notes what is on disk already.
func (s *saver) seed(id string, generation uint64) {
	s.mu.Lock()
	s.written[id] = generation
	s.mu.Unlock()
}
