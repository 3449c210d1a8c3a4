package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/shimctl"
)

// directory is the shim's part of the disk:
//
//	shim.lock            held by the living shim
//	shim.sock            the daemon connects here
//	runs/ID.json         one for each run that was started and not forgotten
//	exits/ID.RUN.json    how it ended, until acknowledged
//	held/ID.json         which listening sockets are held for it
//	bind                 the bind that is being answered, for a shim after a killed one
//	pipes/ID.RUN         the named pipe of its output
//	outside/ID.json      what others froze for the daemon, until it is thawed
//	units/ID.json        a systemd unit whose program can be handed sockets
//	thawed.json          what was thawed because no daemon answered, until acknowledged
type directory struct {
	path string
	lock *os.File
}

// maxState bounds the size of a state file, in bytes.
const maxState = 4 << 20

// openDirectory creates the directory and takes the lock.
func openDirectory(path string) (*directory, error) {
	for _, d := range []string{path, path + "/runs", path + "/exits", path + "/pipes", path + "/held", path + "/outside", path + "/units"} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("cannot make the directory of the shim: %w", err)
		}
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("cannot use the directory of the shim: %w", err)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("cannot use %s: its mode is %v, but must be 0700 to keep other users out", path, st.Mode().Perm())
	}
	f, err := os.OpenFile(path+"/shim.lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("cannot lock %s: %w", path, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("cannot start a shim on %s: another one runs there: %w", path, err)
	}
	return &directory{path: path, lock: f}, nil
}

func (d *directory) runFile(id string) string { return filepath.Join(d.path, "runs", id+".json") }

func (d *directory) heldFile(id string) string { return filepath.Join(d.path, "held", id+".json") }

func (d *directory) unitFile(id string) string { return filepath.Join(d.path, "units", id+".json") }

func (d *directory) outsideFile(id string) string {
	return filepath.Join(d.path, "outside", id+".json")
}

func (d *directory) exitFile(k key) string {
	return filepath.Join(d.path, "exits", fmt.Sprintf("%s.%d.json", k.id, k.run))
}

func (d *directory) pipe(k key) string {
	return filepath.Join(d.path, "pipes", fmt.Sprintf("%s.%d", k.id, k.run))
}

// save writes v completely or not at all. With sync, the file survives a crash of
// the machine; otherwise only one of the shim.
func save(path string, v any, sync bool) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("cannot write %s: %w", path, err)
	}
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("cannot write %s: %w", path, err)
	}
	_, err = f.Write(b)
	if err == nil && sync {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("cannot write %s: %w", path, err)
	}
	if sync {
		return syncDir(filepath.Dir(path))
	}
	return nil
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("cannot make %s durable: %w", path, err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("cannot make %s durable: %w", path, err)
	}
	return nil
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("cannot remove a state file: %w", err)
	}
	return nil
}

// load reads a state file. If that is unreadable, the error names it, and the file
// stays.
func load(path string, into any) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	if st.Size() > maxState {
		return fmt.Errorf("cannot read %s: %d bytes, at most %d", path, st.Size(), maxState)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("cannot read %s: %w; if it cannot be repaired, move it away, and stop and start that instance", path, err)
	}
	return nil
}

// loadAll reads every state file of a kind. It returns the valid ones and the
// joined errors of the others.
func loadAll[T any](dir string, check func(T) error) ([]T, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []T
	var errs []error
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasSuffix(path, ".new") {
			_ = os.Remove(path) // an incomplete file, on which nothing relies
			continue
		}
		var v T
		err := load(path, &v)
		if err == nil {
			if cerr := check(v); cerr != nil {
				err = fmt.Errorf("cannot use %s: %w", path, cerr)
			}
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, v)
	}
	return out, errors.Join(errs...)
}

// validRun checks a run that was read from a file or received from the daemon.
func validRun(r shimctl.Run) error {
	if err := validID(r.ID); err != nil {
		return err
	}
	if r.PID <= 1 || r.Run == 0 {
		return fmt.Errorf("pid %d, run %d: want a process and a run", r.PID, r.Run)
	}
	return nil
}

func validEnded(e shimctl.Ended) error {
	if e.Run == 0 {
		return errors.New("run is 0")
	}
	return validID(e.ID)
}

// validID returns an error unless id can be used as a single path element.
func validID(id string) error {
	ok := id != "" && len(id) <= 128 && id[0] != '.'
	for i := range len(id) {
		c := id[i]
		ok = ok && ('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.')
	}
	if !ok {
		return fmt.Errorf("cannot use %q as an id", id)
	}
	return nil
}
