package microvm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"lull/internal/core/instance"
	"lull/internal/platform/oci"
)

// A clone starts as a hibernated guest that uses another guest's saved memory,
// a template, which is never written. The template is mapped privately, so all
// clones share the pages that none of them changed. When a clone is itself
// saved, its state includes its whole memory, and from its next wake on it is
// an ordinary guest with its own memory.

// templates returns the directory of templates, one subdirectory each.
func (r *Runtime) templates() string { return filepath.Join(r.cfg.Dir, "templates") }

// memoryPath returns the file that a guest's memory is mapped from.
func (r *Runtime) memoryPath(id string, rec runRecord) string {
	if rec.Template != "" {
		return filepath.Join(r.templates(), rec.Template, memoryFile)
	}
	return filepath.Join(r.dir(id), memoryFile)
}

func newMachineID() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// Clone implements instance.Cloner.
func (r *Runtime) Clone(ctx context.Context, from string, l instance.Launch) (saved int64, err error) {
	if err := errors.Join(checkID(from), checkID(l.ID)); err != nil {
		return 0, err
	}
	w := r.work(from)
	if w == nil || !w.hibernated() {
		return 0, errors.New("it is not hibernated")
	}
	if open, _ := w.net.Opens(); len(open) > 0 {
		return 0, fmt.Errorf("%d clients are connected to it, and a copy would answer them too", len(open))
	}
	man, err := readManifest(r.dir(from))
	if err == nil && man == nil {
		err = &instance.SnapshotError{Reason: "its manifest is missing"}
	}
	if err != nil {
		return 0, err
	}
	now := manifest{QEMU: man.QEMU, Vsock: man.Vsock} // the wake compares the rest
	if err := errors.Join(w.checkFiles(man), r.bindMachine(&now, from, w.rec)); err != nil {
		return 0, err
	}
	if err := man.fits(now); err != nil {
		return 0, err
	}
	r.cloning.Lock() // a new template has no user yet
	defer r.cloning.Unlock()
	free, err := r.reserveToClone(w, man, l.ID)
	if err != nil {
		return 0, err
	}
	defer free()
	rec := w.rec
	rec.Run, rec.LogPath, rec.LogMax, rec.Clone = l.Run, l.LogPath, l.LogMax, true
	rec.Workspace = l.Workspace // without this every access to it fails in the guest
	if rec.CID != 0 {
		rec.CID = newCID()
	}
	if !man.Full && rec.Template == "" {
		if rec.Template, err = r.template(ctx, from, man); err != nil {
			return 0, fmt.Errorf("cannot store its memory for clones: %w", err)
		}
	}
	man.Template = rec.Template
	if err := r.forget(ctx, l.ID); err != nil {
		return 0, err
	}
	if err := r.put(ctx, w, rec, man, l.ID); err != nil {
		return 0, errors.Join(fmt.Errorf("cannot write the clone: %w", err), r.forget(context.WithoutCancel(ctx), l.ID))
	}
	return man.State, nil
}

// put writes the files of a hibernated guest, the manifest last.
func (r *Runtime) put(ctx context.Context, w *Work, rec runRecord, man *manifest, id string) error {
	dir := r.dir(id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := copySparse(ctx, filepath.Join(dir, stateFile), w.path(stateFile)); err != nil {
		return err
	}
	if rec.Layer {
		if err := r.copyLayer(ctx, id, w.id); err != nil {
			return err
		}
	}
	var err error
	if man.Layer, err = r.layerState(id, rec); err != nil {
		return err
	}
	if err := writeRecord(dir, rec); err != nil {
		return err
	}
	return man.write(dir)
}

// template copies the memory of a hibernated guest, unless an earlier clone of
// the same state did. It appears by an atomic rename.
func (r *Runtime) template(ctx context.Context, from string, man *manifest) (string, error) {
	home := r.templateHome(man)
	name := filepath.Base(home)
	if _, err := os.Stat(home); err == nil {
		return name, nil
	}
	if err := os.MkdirAll(r.templates(), 0o700); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(r.templates(), halfMade)
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp) // a no-op after the rename
	ram := filepath.Join(tmp, memoryFile)
	if err := copySparse(ctx, ram, filepath.Join(r.dir(from), memoryFile)); err != nil {
		return "", err
	}
	// QEMUs of several users open it; the directory keeps everyone else out.
	if err := os.Chmod(ram, 0o666); err != nil {
		return "", err
	}
	return name, appear(tmp, home)
}

// templateHome returns the directory of the template of a saved guest's memory.
func (r *Runtime) templateHome(man *manifest) string {
	return filepath.Join(r.templates(), man.Digest[:min(16, len(man.Digest))]+fmt.Sprintf("-%x", man.At.UnixNano()))
}

// copySparse copies a file durably, keeping holes and sharing blocks if the file
// system supports it.
func copySparse(ctx context.Context, to, from string) error {
	out, err := tied(exec.CommandContext(ctx, "cp", "--sparse=always", "--reflink=auto", "--", from, to))
	if err != nil {
		return fmt.Errorf("cannot copy %s: %w: %.300s", from, err, out)
	}
	return syncPath(to)
}

// sweepTemplates removes unused templates and returns the bytes freed.
func (r *Runtime) sweepTemplates() (freed int64, err error) {
	r.cloning.Lock()
	defer r.cloning.Unlock()
	list, err := os.ReadDir(r.templates())
	if errors.Is(err, os.ErrNotExist) || err == nil && len(list) == 0 {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	guests, err := os.ReadDir(filepath.Join(r.cfg.Dir, "vm"))
	if err != nil {
		return 0, err
	}
	used := map[string]bool{}
	for _, g := range guests {
		rec, err := readRecord(r.dir(g.Name()))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0, err // keep everything if in doubt
		}
		used[rec.Template] = true
	}
	for _, t := range list {
		if used[t.Name()] {
			continue
		}
		path := filepath.Join(r.templates(), t.Name())
		_, n, uerr := oci.DiskUse(path)
		if rerr := errors.Join(uerr, os.RemoveAll(path)); rerr != nil {
			err = errors.Join(err, fmt.Errorf("cannot remove a template: %w", rerr))
			continue
		}
		freed += n
	}
	return freed, err
}
