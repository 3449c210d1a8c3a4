package microvm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
)

// A guest claims disk space late, because its memory and its own disk are sparse
// files. An operation therefore reserves all the space it may need before it
// begins, when a refusal does no harm yet.

const (
	// layerMountSpace is the space a layer's file system needs for its first mount,
	// mostly for the journal.
	layerMountSpace = 20 << 20
	// stateSpace is the space a saved guest needs beside its memory, with a margin.
	stateSpace = 8 << 20
)

// writes is the space an operation may need below a path.
type writes struct {
	what  string
	path  string // if it does not exist, its nearest existing parent is used
	bytes int64
}

// reserved tracks the space reserved for operations in progress, by file
// system. Without it, two concurrent operations would both count on the same
// free space.
type reserved struct {
	mu    sync.Mutex
	bytes map[uint64]int64
}

// take reserves space; the caller must call free at the end of the operation. take
// returns an *instance.NoRoomError if a file system has less free space than all
// reservations together. Space that an operation has already used counts twice
// until free, so another operation may be refused needlessly, but none begins
// without enough space.
func (r *reserved) take(needs ...writes) (free func(), err error) {
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
		path, dev, err := existingParent(n.path)
		if err != nil {
			return nil, err
		}
		g := groups[dev]
		if g == nil {
			g = &group{path: path}
			groups[dev], devs = g, append(devs, dev)
		}
		g.what, g.bytes = append(g.what, n.what), g.bytes+n.bytes
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, dev := range devs {
		g := groups[dev]
		free, err := freeBytes(g.path)
		if err != nil {
			return nil, err
		}
		if free = max(free-r.bytes[dev], 0); free < g.bytes {
			return nil, &instance.NoRoomError{What: strings.Join(g.what, " and "), Path: g.path, Needs: g.bytes, Free: free}
		}
	}
	if r.bytes == nil {
		r.bytes = map[uint64]int64{}
	}
	for _, dev := range devs {
		r.bytes[dev] += groups[dev].bytes
	}
	return sync.OnceFunc(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, dev := range devs {
			r.bytes[dev] -= groups[dev].bytes
		}
	}), nil
}

// existingParent returns path or its nearest existing parent, and its device.
func existingParent(path string) (string, uint64, error) {
	for {
		var st unix.Stat_t
		err := unix.Stat(path, &st)
		if err == nil {
			return path, st.Dev, nil
		}
		if !errors.Is(err, fs.ErrNotExist) || path == filepath.Dir(path) {
			return "", 0, fmt.Errorf("cannot read the free space of the file system of %s: %w", path, err)
		}
		path = filepath.Dir(path)
	}
}

// freeBytes returns the space at path available to unprivileged processes.
func freeBytes(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, fmt.Errorf("cannot read the free space of the file system of %s: %w", path, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// taken returns the disk usage of a sparse file, 0 if it does not exist.
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

// fileSize returns the nominal size of a file.
func fileSize(path string) (int64, error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

// memoryNeed returns the space that a guest's memory may still claim. A clone's
// memory is not in a file, so it needs none.
func (r *Runtime) memoryNeed(id string, rec runRecord) (writes, error) {
	n := writes{what: "its memory", path: r.dir(id)}
	if rec.Template != "" {
		return n, nil
	}
	has, err := taken(filepath.Join(r.dir(id), memoryFile))
	n.bytes = rec.Machine.Memory - has
	return n, err
}

// reserveToStart reserves space for a guest to boot.
func (r *Runtime) reserveToStart(id string, m Machine) (free func(), err error) {
	needs := []writes{{"its memory", r.dir(id), m.Memory}}
	if has, err := taken(r.layer(id)); err != nil {
		return nil, err
	} else if m.Root != "" && (has > 0 || r.cfg.Layer > 0) {
		needs = append(needs, writes{"its own disk", r.layers(), layerMountSpace - has})
	}
	return r.reserved.take(needs...)
}

// reserveToSave reserves space for a guest's state. A clone's state includes its
// memory.
func (w *Work) reserveToSave() (free func(), err error) {
	n := writes{"its state", w.r.dir(w.id), stateSpace}
	if w.rec.Template != "" {
		n.what, n.bytes = "its state and memory", n.bytes+w.rec.Machine.Memory
	}
	return w.r.reserved.take(n)
}

// reserveToRestore reserves space for restoring a guest.
func (w *Work) reserveToRestore(man *manifest) (free func(), err error) {
	rec := w.rec
	if man.Full {
		rec.Template = "" // once restored, its memory is in its own file
	}
	n, err := w.r.memoryNeed(w.id, rec)
	if err != nil {
		return nil, err
	}
	return w.r.reserved.take(n)
}

// reserveToClone reserves space for a copy of a saved guest: its state, its layer,
// and its memory unless an earlier clone shares it.
func (r *Runtime) reserveToClone(w *Work, man *manifest, to string) (free func(), err error) {
	needs := []writes{{"its state", r.dir(to), man.State}}
	if w.rec.Layer {
		has, err := taken(r.layer(w.id))
		if err != nil {
			return nil, err
		}
		needs = append(needs, writes{"its own disk", r.layers(), has})
	}
	if _, err := os.Stat(r.templateHome(man)); !man.Full && w.rec.Template == "" && err != nil {
		has, err := taken(w.path(memoryFile))
		if err != nil {
			return nil, err
		}
		needs = append(needs, writes{"the memory that clones share", r.templates(), has})
	}
	return r.reserved.take(needs...)
}
