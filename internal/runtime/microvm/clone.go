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

// A clone starts as a hibernated guest that uses a template: a copy of the saved
// memory of another guest, which is never written. All clones map the template
// privately, and so share the pages that none of them has changed. When a clone is
// saved, its state includes its whole memory. From its next wake on it is an
// ordinary guest with its own memory.

// templates returns the directory of templates, each of which is a subdirectory.
func (r *Runtime) templates() string { return filepath.Join(r.cfg.Dir, "templates") }

// memoryPath returns the file from which a guest's memory is mapped.
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
	now := manifest{QEMU: man.QEMU, Vsock: man.Vsock} // a wake compares the other fields
	if err := errors.Join(w.checkFiles(man), r.bindMachine(&now, from, w.rec)); err != nil {
		return 0, err
	}
	if err := man.fits(now); err != nil {
		return 0, err
	}
	r.cloning.Lock() // nothing refers to a new template yet, so it could be removed
	defer r.cloning.Unlock()
	free, err := r.reserveToClone(w, man, l.ID)
	if err != nil {
		return 0, err
	}
	defer free()
	rec := w.rec
	rec.Run, rec.LogPath, rec.LogMax, rec.Clone = l.Run, l.LogPath, l.LogMax, true
	rec.Workspace = l.Workspace // without a workspace, every access to it fails in the guest
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

// put writes the files of a hibernated guest with the given ID, copied from those
// of w. The manifest comes last.
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

// template returns the directory of a copy of a hibernated guest's memory. It makes
// the copy, unless one exists for an earlier clone of the same state. The directory
// appears by an atomic rename.
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
	defer os.RemoveAll(tmp) // does nothing after the rename
	ram := filepath.Join(tmp, memoryFile)
	if err := copySparse(ctx, ram, filepath.Join(r.dir(from), memoryFile)); err != nil {
		return "", err
	}
	// The QEMUs of several users open it. The directory keeps all other users out.
	if err := os.Chmod(ram, 0o666); err != nil {
		return "", err
	}
	return name, appear(tmp, home)
}

// templateHome returns the directory of the template of a saved guest's memory.
func (r *Runtime) templateHome(man *manifest) string {
	return filepath.Join(r.templates(), man.Digest[:min(16, len(man.Digest))]+fmt.Sprintf("-%x", man.At.UnixNano()))
}

// copySparse copies a file durably. It keeps holes, and shares blocks if the file
// system can.
func copySparse(ctx context.Context, to, from string) error {
	out, err := tied(exec.CommandContext(ctx, "cp", "--sparse=always", "--reflink=auto", "--", from, to))
	if err != nil {
		return fmt.Errorf("cannot copy %s: %w: %.300s", from, err, out)
	}
	return syncPath(to)
}

// sweepTemplates removes unused templates, and returns the number of bytes freed.
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
			return 0, err // keep all templates if it is unknown which are used
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
