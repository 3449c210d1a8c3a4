package records

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/instance"
)

// counted is a Store that records its writes.
type counted struct {
	mu   sync.Mutex
	list []string
}

func (c *counted) add(what string, r *instance.Record) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = append(c.list, fmt.Sprint(what, r.Generation))
	return nil
}

func (c *counted) Put(r *instance.Record) error  { return c.add("put ", r) }
func (c *counted) Note(r *instance.Record) error { return c.add("note ", r) }
func (c *counted) Delete(string) error           { return nil }

// owned is an Owner with a record.
type owned struct{ rec instance.Record }

func (o *owned) Record() instance.Record { return o.rec }
func (o *owned) Removed() bool           { return false }
func (o *owned) MarkRemoved()            {}

// TestNotedIsNotDurable checks that a noted record is written once, without a sync.
// A later durable write of the same or an earlier generation must still sync, with
// the newest record. A record that is queued both ways must be written durably.
func TestNotedIsNotDurable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to, o := &counted{}, &owned{instance.Record{ID: "a", Generation: 1}}
		s := NewSaver(to, func(string) Owner { return o }, func(string, error) {})
		go s.Run()
		waitLag := func() {
			time.Sleep(time.Second)
			synctest.Wait()
		}
		write := func(g uint64) {
			if err := s.Write(o, &instance.Record{ID: "a", Generation: g}); err != nil {
				t.Error(err)
			}
		}
		write(1)
		o.rec.Generation = 3
		s.NoteLater(o, "a")
		waitLag() // notes generation 3
		s.NoteLater(o, "a")
		waitLag() // already written
		write(2)  // puts generation 3
		write(3)  // already durable
		o.rec.Generation = 4
		s.WriteLater(o, "a")
		s.NoteLater(o, "a")
		waitLag() // puts generation 4
		o.rec.Generation = 5
		s.NoteLater(o, "a")
		s.WriteLater(o, "a")
		waitLag() // puts generation 5
		o.rec.Generation = 6
		s.NoteLater(o, "a")
		s.Stop()
		waitLag() // notes generation 6
		if got, want := fmt.Sprint(to.list), "[put 1 note 3 put 3 put 4 put 5 note 6]"; got != want {
			t.Errorf("the writes are %s, want %s", got, want)
		}
	})
}
