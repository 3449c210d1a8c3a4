package records

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/segment"
)

// foldSize is the size of the log, in bytes, from which it is folded into the
// record files.
const foldSize = 4 << 20

// changes is a log of records that are newer than their files. Each entry is a
// whole record, and an instance's last entry counts. Adding an entry costs one
// sync, which concurrent callers share, and touches no other file. The files are
// brought up to date when the log has reached foldSize, and at close.
//
// An entry whose instance has no file is ignored, because that instance was
// removed. The first record of a new instance is therefore written to its file.
type changes struct {
	dir   string // directory of the log
	files string // directory of the record files

	// opened is held for reading while log is used, and for writing while it is
	// replaced. log is nil if it could not be opened again.
	opened sync.RWMutex
	log    *segment.Log

	mu      sync.Mutex
	known   map[string]bool   // IDs of the instances that have a file
	newer   map[string][]byte // by ID: encoded records that are newer than the files
	next    int64             // size of the log, in bytes, at which it is next folded
	folding sync.WaitGroup
	busy    bool // a fold is in progress
	loaded  bool // newer contains the whole log
	damage  []error
}

func openChanges(dir, files string) (*changes, error) {
	c := &changes{dir: dir, files: files, known: map[string]bool{}, newer: map[string][]byte{}, next: foldSize}
	return c, c.reopen(nil)
}

// reopen replaces a log that has failed. It loses entries that were only buffered.
func (c *changes) reopen(failed *segment.Log) error {
	c.opened.Lock()
	defer c.opened.Unlock()
	if c.log != failed {
		return nil // another caller has already replaced it
	}
	if c.log = nil; failed != nil {
		_ = failed.Discard()
	}
	log, damage, err := segment.Open(c.dir, segment.Options{SegmentBytes: foldSize / 4, MaxBytes: 1 << 40})
	if err != nil {
		return err
	}
	c.log = log
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range damage {
		c.damage = append(c.damage, d)
	}
	return nil
}

// add appends a record. With sync, the entry survives a power failure; otherwise
// only the end of this process. Calls for the same instance must not be concurrent.
func (c *changes) add(id string, payload []byte, sync bool) error {
	log, err := c.addTo(id, payload, sync)
	if err != nil {
		return errors.Join(err, c.reopen(log))
	}
	c.foldLarge()
	return nil
}

func (c *changes) addTo(id string, payload []byte, sync bool) (*segment.Log, error) {
	c.opened.RLock()
	defer c.opened.RUnlock()
	if c.log == nil {
		return nil, fmt.Errorf("the log %s could not be opened", c.dir)
	}
	c.mu.Lock()
	before := c.newer[id]
	_, err := c.log.Append(time.Now(), payload)
	if err == nil {
		c.newer[id] = payload
	}
	c.mu.Unlock()
	switch {
	case err != nil:
		return c.log, err
	case sync:
		err = c.log.Sync()
	default:
		err = c.log.Flush()
	}
	if err != nil { // the caller undoes the change, so it must not reach the files
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.newer[id] = before; before == nil {
			delete(c.newer, id)
		}
	}
	return c.log, err
}

// create writes the file of a new instance.
func (c *changes) create(id string, payload []byte) error {
	if err := segment.WriteSealed(c.path(id), payload, 0o600); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known[id] = true
	return nil
}

func (c *changes) path(id string) string { return filepath.Join(c.files, id+".json") }

func (c *changes) has(id string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known[id]
}

// remove removes the file of an instance, and thereby its entries.
func (c *changes) remove(id string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := os.Remove(c.path(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	delete(c.known, id)
	delete(c.newer, id)
	return nil
}

// foldLarge folds the log in the background if it has grown large.
func (c *changes) foldLarge() {
	c.opened.RLock()
	defer c.opened.RUnlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.log == nil || c.busy || c.log.Size() < c.next {
		return
	}
	c.busy = true
	c.folding.Go(func() {
		err := c.fold()
		c.opened.RLock()
		defer c.opened.RUnlock()
		c.mu.Lock()
		defer c.mu.Unlock()
		c.busy = false
		if c.next = foldSize; err != nil && c.log != nil { // nothing is lost, because the log is kept
			c.next += c.log.Size()
		}
	})
}

// fold writes newer records to their files, and drops the entries of the log that
// the files then contain.
func (c *changes) fold() error {
	c.opened.RLock()
	defer c.opened.RUnlock()
	if c.log == nil {
		return nil
	}
	c.mu.Lock()
	batch, upTo := c.newer, c.log.Next()
	c.newer = map[string][]byte{}
	c.mu.Unlock()
	sealed := make(map[string][]byte, len(batch))
	for id, payload := range batch {
		sealed[id+".json"] = segment.Seal(payload)
	}
	err := segment.WriteAll(c.files, sealed, 0o600, func(name string, rename func() error) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.known[name[:len(name)-len(".json")]] {
			return nil // the instance was removed meanwhile
		}
		return rename()
	})
	if err == nil {
		return c.log.DropBefore(upTo)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, payload := range batch {
		if c.newer[id] == nil && c.known[id] {
			c.newer[id] = payload
		}
	}
	return err
}

// replay replaces the records in recs for which the log has newer ones.
func (c *changes) replay(recs map[string]instance.Record) error {
	c.opened.RLock()
	defer c.opened.RUnlock()
	if c.log == nil {
		return fmt.Errorf("the log %s could not be opened", c.dir)
	}
	var errs []error
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.newer)
	for entry, err := range c.log.Records(segment.From{}) {
		if damage, ok := errors.AsType[*segment.Damage](err); ok {
			c.damage = append(c.damage, damage)
			continue
		}
		if err != nil {
			return err
		}
		r, err := decodeRecord(entry.Payload)
		if err != nil {
			errs = append(errs, fmt.Errorf("cannot use entry %d of the log %s: %w; start the version of lull that wrote it, or move the folder away to continue with the older records in %s", entry.Number, c.dir, err, c.files))
			continue
		}
		if _, ok := recs[r.ID]; ok {
			recs[r.ID], c.newer[r.ID] = r, bytes.Clone(entry.Payload)
		}
	}
	c.loaded = len(errs) == 0
	return errors.Join(errs...)
}

// close folds the log and removes it. If that fails, or the log was not loaded
// completely, the log is kept for the next Load.
func (c *changes) close() error {
	c.folding.Wait()
	switch {
	case c.log == nil:
		return nil
	case !c.loaded:
		return c.log.Close()
	}
	err := c.fold()
	if err := errors.Join(err, c.log.Close()); err != nil {
		return err
	}
	return os.RemoveAll(c.dir)
}

// encode returns a record as the payload of an entry or a file.
func encode(r *instance.Record) ([]byte, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("cannot encode the record of %s: %w", r.Spec.Name, err)
	}
	return b, nil
}
