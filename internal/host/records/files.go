// Package records stores what a host must know after a restart: one record per
// instance, and the halts in effect. A Saver decides when a record is written;
// Files puts it on disk.
package records

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/lockfile"
	"lull/internal/lib/segment"
)

// maxRecord bounds a record file.
const maxRecord = 1 << 20

// Files stores records as one sealed file per instance: a header line with a
// checksum, then readable JSON. A file is replaced as a whole and synced, so a
// crash leaves either the old or the new one.
type Files struct {
	dir  string
	lock *os.File
}

// OpenFiles opens dir for this process alone. A second daemon on the same
// directory gets an error that names the first.
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
	return f, nil
}

// Close releases the directory.
func (f *Files) Close() error { return f.lock.Close() }

// Dir is the data directory.
func (f *Files) Dir() string { return f.dir }

func (f *Files) instances() string { return filepath.Join(f.dir, "instances") }

func (f *Files) path(id string) string { return filepath.Join(f.instances(), id+".json") }

// Put implements Store.
func (f *Files) Put(r *instance.Record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("cannot encode the record of %s: %w", r.Spec.Name, err)
	}
	return segment.WriteSealed(f.path(r.ID), b, 0o600)
}

// Delete implements Store.
func (f *Files) Delete(id string) error {
	if err := os.Remove(f.path(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Load reads every record. A file that is truncated, corrupt or not a record
// yields an error that names it and says what to do. The valid records are
// returned too, and nothing is dropped or changed.
func (f *Files) Load() ([]instance.Record, error) {
	if _, err := segment.RemoveTemporary(f.instances()); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(f.instances())
	if err != nil {
		return nil, fmt.Errorf("cannot read the records: %w", err)
	}
	var recs []instance.Record
	var errs []error
	names := map[string]string{}
	for _, e := range entries {
		path := filepath.Join(f.instances(), e.Name())
		b, err := segment.ReadSealed(path, maxRecord)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		r, err := decodeRecord(b)
		switch {
		case err != nil:
		case r.ID+".json" != e.Name():
			err = fmt.Errorf("it holds the record of %s", r.ID)
		case names[r.Spec.Name] != "":
			err = fmt.Errorf("it has the same name as %s", names[r.Spec.Name])
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("cannot use the record %s: %w; restore it from a backup, or move it away to continue without it", path, err))
			continue
		}
		names[r.Spec.Name] = path
		recs = append(recs, r)
	}
	return recs, errors.Join(errs...)
}

// decodeRecord reads one record's JSON.
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
		return r, fmt.Errorf("its state %q is not known", r.State)
	}
	return r, nil
}

// haltFile returns the path of the file that stores the host's own halt or the
// fleet's as last reported by the server.
func (f *Files) haltFile(fleet bool) string {
	if fleet {
		return filepath.Join(f.dir, "fleet-halt")
	}
	return filepath.Join(f.dir, "halt")
}

// Halted reads the host's own halt; nil for none. A file that does not name who
// set it, as written by earlier versions, is a halt without an end that began
// when the file was written.
func (f *Files) Halted() (*idle.HaltedBy, error) { return f.readHalt(false) }

// FleetHalt reads the fleet's halt as last reported by the server; nil for
// none. An unreadable file counts as a halt without an end.
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

// KeepHalt makes the host's own halt durable or, with nil, removes it.
func (f *Files) KeepHalt(h *idle.HaltedBy) error { return f.keepHalt(h, false) }

// KeepFleetHalt makes the fleet's halt durable or, with nil, removes it.
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

// Commands returns the IDs of the server's commands that have begun on this
// host, oldest first.
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

// KeepCommands makes the IDs of commands durable.
func (f *Files) KeepCommands(ids []string) error {
	return segment.WriteFile(filepath.Join(f.dir, "commands"), []byte(strings.Join(ids, "\n")+"\n"), 0o600)
}
