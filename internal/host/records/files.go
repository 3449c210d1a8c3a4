// Package records stores what a host must know after a restart: one record per
// instance, and the halts in effect. A Saver decides when a record is written,
// and Files writes it.
package records

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/lockfile"
	"lull/internal/lib/segment"
)

// maxRecord bounds the size of a record file, in bytes.
const maxRecord = 1 << 20

// Files stores one file per instance: a header line with a checksum, and the record
// as readable JSON. A file is always replaced as a whole and synced, so that a
// crash leaves either the old or the new one.
//
// Changes of a record first go to a log, which costs one sync, and reach the file
// later. Load includes them. It must be called before the first Put.
type Files struct {
	dir     string
	lock    *os.File
	changes *changes
}

// OpenFiles opens dir. Only one process can have it open; for another one, the
// error names the first.
func OpenFiles(dir string) (*Files, error) {
	f := &Files{dir: dir}
	for _, d := range []string{dir, f.instances(), filepath.Join(dir, "logs")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("cannot make the data directory: %w", err)
		}
	}
	var err error
	if f.lock, err = lockfile.Take(filepath.Join(dir, "lock")); err != nil {
		if held := (*lockfile.HeldError)(nil); errors.As(err, &held) {
			err = fmt.Errorf("another lull host is running on it: %w", err)
		}
		return nil, fmt.Errorf("cannot use the data directory %s: %w", dir, err)
	}
	if f.changes, err = openChanges(filepath.Join(dir, "changes"), f.instances()); err != nil {
		return nil, errors.Join(fmt.Errorf("cannot use the data directory %s: %w", dir, err), f.lock.Close())
	}
	return f, nil
}

// Close brings the record files up to date and releases the directory.
func (f *Files) Close() error { return errors.Join(f.changes.close(), f.lock.Close()) }

// Damage returns an error if part of the change log could not be read. The records
// that Load returned may then lack changes.
func (f *Files) Damage() []error {
	f.changes.mu.Lock()
	defer f.changes.mu.Unlock()
	return slices.Clone(f.changes.damage)
}

// Dir returns the data directory.
func (f *Files) Dir() string { return f.dir }

func (f *Files) instances() string { return filepath.Join(f.dir, "instances") }

func (f *Files) path(id string) string { return f.changes.path(id) }

// Put implements Store.
func (f *Files) Put(r *instance.Record) error { return f.put(r, true) }

// Note implements Store.
func (f *Files) Note(r *instance.Record) error { return f.put(r, false) }

func (f *Files) put(r *instance.Record, sync bool) error {
	b, err := encode(r)
	if err != nil {
		return err
	}
	if !f.changes.has(r.ID) {
		return f.changes.create(r.ID, b)
	}
	return f.changes.add(r.ID, b, sync)
}

// Delete implements Store.
func (f *Files) Delete(id string) error { return f.changes.remove(id) }

// Load returns all valid records. For each file that is truncated, corrupt or not a
// record, the error names the file and says what to do. Load drops and changes
// nothing. A damaged change log is not an error; see Damage.
func (f *Files) Load() ([]instance.Record, error) {
	if _, err := segment.RemoveTemporary(f.instances()); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(f.instances())
	if err != nil {
		return nil, fmt.Errorf("cannot read the records: %w", err)
	}
	var errs []error
	byID := map[string]instance.Record{}
	for _, e := range entries {
		path := filepath.Join(f.instances(), e.Name())
		b, err := segment.ReadSealed(path, maxRecord)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		r, err := decodeRecord(b)
		if err == nil && r.ID+".json" != e.Name() {
			err = fmt.Errorf("it contains the record of %s", r.ID)
		}
		if err != nil {
			errs = append(errs, unusable(path, err))
			continue
		}
		byID[r.ID] = r
	}
	errs = append(errs, f.changes.replay(byID))
	recs, err := f.distinct(byID)
	if err = errors.Join(append(errs, err)...); err != nil {
		f.changes.loaded = false
	}
	return recs, err
}

func unusable(path string, err error) error {
	return fmt.Errorf("cannot use the record %s: %w; restore it from a backup, or move it away to continue without it", path, err)
}

// distinct returns the records of byID. If two have the same name, the second
// causes an error.
func (f *Files) distinct(byID map[string]instance.Record) (recs []instance.Record, err error) {
	names := map[string]string{}
	for _, id := range slices.Sorted(maps.Keys(byID)) {
		f.changes.mu.Lock()
		f.changes.known[id] = true
		f.changes.mu.Unlock()
		r := byID[id]
		if other := names[r.Spec.Name]; other != "" {
			err = errors.Join(err, unusable(f.path(id), fmt.Errorf("it has the same name as %s", other)))
			continue
		}
		names[r.Spec.Name] = f.path(id)
		recs = append(recs, r)
	}
	return recs, err
}

// decodeRecord decodes a record's JSON.
func decodeRecord(b []byte) (instance.Record, error) {
	var r instance.Record
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		return r, fmt.Errorf("its JSON cannot be read: %w", err)
	}
	if r.ID == "" || strings.ContainsAny(r.ID, "/\x00") {
		return r, errors.New("it has no usable id")
	}
	if err := r.Spec.Validate(); err != nil {
		return r, fmt.Errorf("its spec is invalid: %w", err)
	}
	if !power.InstanceTable.Has(r.State) {
		return r, fmt.Errorf("unknown state %q", r.State)
	}
	return r, nil
}

// haltFile returns the path of the file for the fleet's halt if fleet is set, and
// otherwise for the host's own.
func (f *Files) haltFile(fleet bool) string {
	if fleet {
		return filepath.Join(f.dir, "fleet-halt")
	}
	return filepath.Join(f.dir, "halt")
}

// Halted returns the stored halt of the host itself, or nil. Files of earlier
// versions do not name who set the halt. They stand for a halt without an end that
// began when the file was written.
func (f *Files) Halted() (*idle.HaltedBy, error) { return f.readHalt(false) }

// FleetHalt returns the stored halt of the fleet, or nil. If the file is
// unreadable, it returns a halt without an end.
func (f *Files) FleetHalt() (*idle.HaltedBy, error) {
	h, err := f.readHalt(true)
	if h != nil {
		h.Fleet = true
	}
	return h, err
}

func (f *Files) readHalt(fleet bool) (*idle.HaltedBy, error) {
	file, err := os.Open(f.haltFile(fleet))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	var h idle.HaltedBy
	d := json.NewDecoder(io.LimitReader(file, maxHalt))
	d.DisallowUnknownFields()
	if d.Decode(&h) != nil || h.Since.IsZero() {
		return &idle.HaltedBy{Since: info.ModTime().UTC()}, nil
	}
	return &h, nil
}

// maxHalt bounds the size of a halt file, in bytes.
const maxHalt = 8 << 10

// KeepHalt stores the host's own halt durably, or removes it if h is nil.
func (f *Files) KeepHalt(h *idle.HaltedBy) error { return f.keepHalt(h, false) }

// KeepFleetHalt stores the fleet's halt durably, or removes it if h is nil.
func (f *Files) KeepFleetHalt(h *idle.HaltedBy) error { return f.keepHalt(h, true) }

func (f *Files) keepHalt(h *idle.HaltedBy, fleet bool) error {
	if h != nil {
		data, err := json.Marshal(h)
		if err != nil {
			return err
		}
		return segment.WriteFile(f.haltFile(fleet), append(data, '\n'), 0o600)
	}
	if err := os.Remove(f.haltFile(fleet)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// maxCommands bounds the size of the file of commands, in bytes.
const maxCommands = 256 << 10

// Commands returns the stored IDs of the server's commands that this host has begun
// to carry out, oldest first.
func (f *Files) Commands() (ids []string, err error) {
	file, err := os.Open(filepath.Join(f.dir, "commands"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxCommands+1))
	if err == nil && len(data) > maxCommands {
		err = fmt.Errorf("it is larger than %d KiB", maxCommands>>10)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file.Name(), err)
	}
	return strings.Fields(string(data)), nil
}

// KeepCommands stores the IDs of commands durably.
func (f *Files) KeepCommands(ids []string) error {
	return segment.WriteFile(filepath.Join(f.dir, "commands"), []byte(strings.Join(ids, "\n")+"\n"), 0o600)
}
