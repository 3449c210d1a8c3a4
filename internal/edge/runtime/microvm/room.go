package microvm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"lull/internal/instance"
)

// What a guest writes to this machine comes late: its memory and its own disk are
// sparse files. So it is looked whether there is room for all of it before it is
// begun, where a refusal costs nothing.

const (
	// layerRoom is what the file system of a layer takes to be mounted for the
	// first time, its journal above all.
	layerRoom = 20 << 20
	// stateRoom is what a saved guest takes beside its memory, and some to spare.
	stateRoom = 8 << 20
)

// writes is what a change may write below a path.
type writes struct {
	what  string
	path  string // it, or the nearest of its parents that is there, is on the file system
	bytes int64
}

// haveRoom is a *instance.NoRoomError where a file system has too little for all
// that the needs come to on it.
func haveRoom(needs ...writes) error {
	type group struct {
		path  string
		what  []string
		bytes int64
	}
	var devs []uint64
	groups := map[uint64]*group{}
	for _, n := range needs {
		if n.bytes <= 0 {
			continue
		}
		path, dev, err := standing(n.path)
		if err != nil {
			return err
		}
		g := groups[dev]
		if g == nil {
			g = &group{path: path}
			groups[dev], devs = g, append(devs, dev)
		}
		g.what, g.bytes = append(g.what, n.what), g.bytes+n.bytes
	}
	for _, dev := range devs {
		g := groups[dev]
		free, err := freeBytes(g.path)
		if err != nil {
			return err
		}
		if free < g.bytes {
			return &instance.NoRoomError{What: strings.Join(g.what, " and "), Path: g.path, Needs: g.bytes, Free: free}
		}
	}
	return nil
}

// standing is path or the nearest of its parents that is there, and its device.
func standing(path string) (string, uint64, error) {
	for {
		var st unix.Stat_t
		err := unix.Stat(path, &st)
		if err == nil {
			return path, st.Dev, nil
		}
		if !errors.Is(err, fs.ErrNotExist) || path == filepath.Dir(path) {
			return "", 0, fmt.Errorf("cannot look for room on the file system of %s: %w", path, err)
		}
		path = filepath.Dir(path)
	}
}

// freeBytes is what a process without privileges may still write where path is.
func freeBytes(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, fmt.Errorf("cannot look for room on the file system of %s: %w", path, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// taken is what a sparse file takes on disk, 0 for one that is not there.
func taken(path string) (int64, error) {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	return st.Blocks * 512, nil
}

// fileSize is how large a file says it is.
func fileSize(path string) (int64, error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

// memoryNeed is what a guest's memory may still take of its file's file system. A
// clone's is in no file.
func (r *Runtime) memoryNeed(id string, rec runRecord) (writes, error) {
	n := writes{what: "its memory", path: r.dir(id)}
	if rec.Template != "" {
		return n, nil
	}
	has, err := taken(filepath.Join(r.dir(id), memoryFile))
	n.bytes = rec.Machine.Memory - has
	return n, err
}

// roomToStart says whether a guest that boots finds room.
func (r *Runtime) roomToStart(id string, m Machine) error {
	needs := []writes{{"its memory", r.dir(id), m.Memory}}
	if has, err := taken(r.layer(id)); err != nil {
		return err
	} else if m.Root != "" && (has > 0 || r.cfg.Layer > 0) {
		needs = append(needs, writes{"its own disk", r.layers(), layerRoom - has})
	}
	return haveRoom(needs...)
}

// roomToSave says whether the state of a guest finds room. A clone's has its
// memory in it.
func (w *Work) roomToSave() error {
	n := writes{"its state", w.r.dir(w.id), stateRoom}
	if w.rec.Template != "" {
		n.what, n.bytes = "its state and memory", n.bytes+w.rec.Machine.Memory
	}
	return haveRoom(n)
}

// roomToRestore says whether a guest that is back from disk finds room.
func (w *Work) roomToRestore(man *manifest) error {
	rec := w.rec
	if man.Full {
		rec.Template = "" // from here on its memory is in a file of its own
	}
	n, err := w.r.memoryNeed(w.id, rec)
	if err != nil {
		return err
	}
	return haveRoom(n)
}

// roomToClone says whether a copy of a saved guest finds room: its state, its
// layer, and its memory unless an earlier clone shares that already.
func (r *Runtime) roomToClone(w *Work, man *manifest, to string) error {
	needs := []writes{{"its state", r.dir(to), man.State}}
	if w.rec.Layer {
		has, err := taken(r.layer(w.id))
		if err != nil {
			return err
		}
		needs = append(needs, writes{"its own disk", r.layers(), has})
	}
	if _, err := os.Stat(r.templateHome(man)); !man.Full && w.rec.Template == "" && err != nil {
		has, err := taken(w.path(memoryFile))
		if err != nil {
			return err
		}
		needs = append(needs, writes{"the memory that clones share", r.templates(), has})
	}
	return haveRoom(needs...)
}
