package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// What a guest writes over its read-only root goes into a file of its own, its
// layer: an ext4 file system that only the guest ever mounts, as a second disk.
// It is sparse, lies beside the directory of the instance's runs and lasts until
// the instance is forgotten.

func (r *Runtime) layers() string { return filepath.Join(r.cfg.Dir, "layers") }

// layer is the file of an instance's own files. QEMU's user cannot open it: it
// gets it open.
func (r *Runtime) layer(id string) string { return filepath.Join(r.layers(), id) }

// haveLayer sees to it that an instance has its layer, and says whether it has:
// one that was made once is used whatever is configured now.
func (r *Runtime) haveLayer(ctx context.Context, id string) (bool, error) {
	_, err := os.Stat(r.layer(id))
	if err == nil || r.cfg.Layer == 0 && errors.Is(err, os.ErrNotExist) {
		return err == nil, nil
	}
	if errors.Is(err, os.ErrNotExist) {
		err = r.makeLayer(ctx, id)
	}
	if err != nil {
		return false, fmt.Errorf("cannot make the disk of its own files: %w", err)
	}
	return true, nil
}

// makeLayer makes an empty one. It appears by a rename, whole and durable: a
// guest that synced its files has them after a crash of this machine.
func (r *Runtime) makeLayer(ctx context.Context, id string) error {
	mke2fs, err := FindTool("mke2fs")
	if err != nil {
		return fmt.Errorf("%w (Debian package e2fsprogs)", err)
	}
	if err := os.MkdirAll(r.layers(), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(r.layers(), halfMade)
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // nothing is there any more after the rename
	if err := errors.Join(f.Truncate(r.cfg.Layer), f.Close()); err != nil {
		return err
	}
	// What a new sparse file holds need not be written: inode tables, the journal,
	// and no room for growing. After an error of the disk the guest may only read.
	cmd := exec.CommandContext(ctx, mke2fs, "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-J", "size=16", "-O", "^resize_inode",
		"-E", "lazy_itable_init=1,lazy_journal_init=1", "-e", "remount-ro", f.Name())
	if out, err := tied(cmd); err != nil {
		return fmt.Errorf("%w: %.500s", err, out)
	}
	return appear(f.Name(), r.layer(id))
}

// copyLayer gives a clone what the layer of from holds. Nobody writes to that.
func (r *Runtime) copyLayer(ctx context.Context, to, from string) error {
	f, err := os.CreateTemp(r.layers(), halfMade)
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // as above
	if err := errors.Join(f.Close(), copySparse(ctx, f.Name(), r.layer(from))); err != nil {
		return err
	}
	return appear(f.Name(), r.layer(to))
}

// dropLayer removes an instance's layer for good.
func (r *Runtime) dropLayer(id string) error {
	if err := removeAll(r.layer(id)); err != nil {
		return fmt.Errorf("cannot remove the disk of %s: %w", id, err)
	}
	return nil
}

// layerState is what a saved guest knows its layer by: every write to it changes
// that. It is empty for a guest without one.
func (r *Runtime) layerState(id string, rec runRecord) (string, error) {
	if !rec.Layer {
		return "", nil
	}
	st, err := os.Stat(r.layer(id))
	if err != nil {
		return "", fmt.Errorf("cannot find the disk of its own files: %w", err)
	}
	return fmt.Sprintf("%d bytes of %s", st.Size(), st.ModTime().Format(time.RFC3339Nano)), nil
}
