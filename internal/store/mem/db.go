// Package mem is a store in memory, for tests. It implements the whole contract of
// package store, with faults on demand. It uses only channels and timers, so that it
// runs inside a synctest bubble.
//
// A DB is the store. Each process of a test has its own Client with its own faults,
// so one can be cut off while others continue. No lock is held across a channel, a
// timer or a call out of the package. Nothing is written to disk.
package mem

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"lull/internal/store"
)

// Options limit a DB. The zero value is ready for use.
type Options struct {
	// KeepRevisions is how many revisions automatic compaction keeps; 0 means
	// 100,000.
	KeepRevisions int
	// QuotaBytes is the maximum size of keys and data, including history; above it,
	// puts fail with ErrNoSpace. 0 means no limit.
	QuotaBytes int
}

// DB is a store in memory.
type DB struct {
	opts  Options
	start time.Time

	mu        sync.Mutex
	revision  int64
	compacted int64 // the first revision that can be read
	names     []string
	items     map[string]*item
	history   []store.Batch // by revision, starting at compacted
	size      int
	leases    map[store.LeaseID]*lease
	lastLease store.LeaseID
	watchers  map[*watcher]struct{}
}

// item is one key: its states since the last compaction, oldest first. An absent
// state means that the key was deleted.
type item struct{ states []store.Value }

func (it *item) at(revision int64) store.Value {
	for i := len(it.states) - 1; i >= 0; i-- {
		if it.states[i].ModRevision <= revision {
			return it.states[i]
		}
	}
	return store.Value{}
}

type lease struct {
	ttl   time.Duration
	timer *time.Timer
	keys  map[string]struct{}
}

// New returns an empty store, at revision 1 like etcd.
func New(opts Options) *DB {
	if opts.KeepRevisions == 0 {
		opts.KeepRevisions = 100_000
	}
	return &DB{
		opts: opts, start: time.Now(), revision: 1, compacted: 1,
		items:    map[string]*item{},
		leases:   map[store.LeaseID]*lease{},
		watchers: map[*watcher]struct{}{},
	}
}

// Revision returns the revision of the last change.
func (db *DB) Revision() int64 {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.revision
}

// Compact drops the history before revision.
func (db *DB) Compact(revision int64) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.compact(revision)
}

// SetQuota changes Options.QuotaBytes.
func (db *DB) SetQuota(bytes int) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.opts.QuotaBytes = bytes
}

// Expire ends a lease now, whatever its TTL. Its owner notices at its next renewal.
// Expire reports whether the lease existed.
func (db *DB) Expire(id store.LeaseID) bool {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.endLease(id)
}

// Leases returns the number of leases.
func (db *DB) Leases() int {
	db.mu.Lock()
	defer db.mu.Unlock()
	return len(db.leases)
}

func (db *DB) get(key string) store.Value {
	if it := db.items[key]; it != nil {
		if v := it.at(db.revision); v.Exists() {
			return v
		}
	}
	return store.Value{Key: key}
}

func (db *DB) rangeOf(q store.Query) (store.Page, error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	page := store.Page{Revision: db.revision}
	if q.Revision > 0 {
		page.Revision = q.Revision
	}
	switch {
	case page.Revision > db.revision:
		return store.Page{}, fmt.Errorf("cannot read revision %d, the newest is %d: %w", q.Revision, db.revision, store.ErrInvalid)
	case page.Revision < db.compacted:
		return store.Page{}, &store.CompactedError{Revision: db.compacted}
	}
	i, _ := slices.BinarySearch(db.names, max(q.Keys.Name(), q.After))
	for ; i < len(db.names); i++ {
		name := db.names[i]
		if !q.Keys.Contains(name) {
			break
		}
		v := db.items[name].at(page.Revision)
		if !v.Exists() || (q.After != "" && name <= q.After) {
			continue
		}
		if q.Limit > 0 && len(page.Values) == q.Limit {
			page.More = true
			break
		}
		if q.KeysOnly {
			v.Data = nil
		}
		page.Values = append(page.Values, v)
	}
	return page, nil
}

func (db *DB) commit(t store.Txn) (store.Result, error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	res := store.Result{Succeeded: true}
	for _, c := range t.If {
		if !c.Holds(db.get(c.Key)) {
			res.Succeeded = false
		}
	}
	if res.Succeeded {
		if err := db.admit(t.Then); err != nil {
			return store.Result{}, err
		}
		db.write(t.Then)
	}
	res.Revision = db.revision
	for _, key := range t.Read {
		res.Read = append(res.Read, db.get(key))
	}
	return res, nil
}

// admit rejects puts with an unknown lease, and puts over the quota.
func (db *DB) admit(ops []store.Op) error {
	size := 0
	for _, op := range ops {
		if op.Delete {
			continue
		}
		size += len(op.Key) + len(op.Data)
		if op.Lease != 0 && db.leases[op.Lease] == nil {
			return fmt.Errorf("cannot put %q: no lease %x: %w", op.Key, int64(op.Lease), store.ErrLeaseLost)
		}
	}
	if q := db.opts.QuotaBytes; q > 0 && size > 0 && db.size+size > q {
		return fmt.Errorf("cannot put %d bytes over the quota of %d: %w", size, q, store.ErrNoSpace)
	}
	return nil
}

// write applies ops as the next revision and passes the changes to the watchers. If
// ops change nothing, it does nothing.
func (db *DB) write(ops []store.Op) {
	next := db.revision + 1
	batch := store.Batch{Revision: next}
	for _, op := range ops {
		old := db.get(op.Key)
		if op.Delete && !old.Exists() {
			continue
		}
		v := store.Value{Key: op.Key, ModRevision: next}
		if !op.Delete {
			v.Data = slices.Clone(op.Data)
			v.Lease = op.Lease
			v.Version = old.Version + 1
			v.CreateRevision = old.CreateRevision
			if !old.Exists() {
				v.CreateRevision = next
			}
		}
		db.attach(op.Key, old.Lease, v.Lease)
		db.record(v)
		batch.Events = append(batch.Events, store.Event{Deleted: op.Delete, Value: v})
	}
	if len(batch.Events) == 0 {
		return
	}
	db.revision = next
	db.history = append(db.history, batch)
	for w := range db.watchers {
		w.add(batch)
	}
	if len(db.history) > 2*db.opts.KeepRevisions {
		db.compact(next - int64(db.opts.KeepRevisions))
	}
}

func (db *DB) attach(key string, from, to store.LeaseID) {
	if l := db.leases[from]; l != nil {
		delete(l.keys, key)
	}
	if l := db.leases[to]; l != nil {
		l.keys[key] = struct{}{}
	}
}

func (db *DB) record(v store.Value) {
	it := db.items[v.Key]
	if it == nil {
		it = &item{}
		db.items[v.Key] = it
		i, _ := slices.BinarySearch(db.names, v.Key)
		db.names = slices.Insert(db.names, i, v.Key)
	}
	it.states = append(it.states, v)
	db.size += len(v.Key) + len(v.Data)
}

// compact drops the states that no read at revision or later needs.
func (db *DB) compact(revision int64) {
	revision = min(revision, db.revision)
	if revision <= db.compacted {
		return
	}
	db.compacted = revision
	keep, _ := slices.BinarySearchFunc(db.history, revision, func(b store.Batch, r int64) int {
		return int(b.Revision - r)
	})
	db.history = slices.Clone(db.history[keep:])
	db.size = 0
	db.names = slices.DeleteFunc(db.names, func(name string) bool {
		it := db.items[name]
		for len(it.states) > 1 && it.states[1].ModRevision <= revision {
			it.states = it.states[1:]
		}
		if first := it.states[0]; !first.Exists() && first.ModRevision <= revision {
			it.states = it.states[1:]
		}
		if len(it.states) == 0 {
			delete(db.items, name)
			return true
		}
		it.states = slices.Clone(it.states)
		for _, v := range it.states {
			db.size += len(v.Key) + len(v.Data)
		}
		return false
	})
}

func (db *DB) grant(ttl time.Duration) store.LeaseID {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.lastLease++
	id := db.lastLease
	l := &lease{ttl: ttl, keys: map[string]struct{}{}}
	l.timer = time.AfterFunc(ttl, func() { db.Expire(id) })
	db.leases[id] = l
	return id
}

func (db *DB) renew(id store.LeaseID) error {
	db.mu.Lock()
	defer db.mu.Unlock()
	l := db.leases[id]
	// If the timer has fired, the lease has expired and only waits for the lock.
	if l == nil || !l.timer.Reset(l.ttl) {
		return fmt.Errorf("cannot renew lease %x: %w", int64(id), store.ErrLeaseLost)
	}
	return nil
}

// endLease deletes a lease and its keys, in one revision. It reports whether the
// lease existed.
func (db *DB) endLease(id store.LeaseID) bool {
	l := db.leases[id]
	if l == nil {
		return false
	}
	l.timer.Stop()
	var ops []store.Op
	for key := range l.keys {
		ops = append(ops, store.Delete(key))
	}
	slices.SortFunc(ops, func(a, b store.Op) int {
		if a.Key < b.Key {
			return -1
		}
		return 1
	})
	db.write(ops)
	delete(db.leases, id)
	return true
}
