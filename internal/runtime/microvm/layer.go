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

// A guest's changes to its read-only root go to its layer: a file with an ext4
// file system that only the guest mounts, as a second disk. It is sparse, is
// stored beside the instance's run directory and lasts until the instance is
// forgotten.

func (r *Runtime) layers() string { return filepath.Join(r.cfg.Dir, "layers") }

// layer returns the path of an instance's layer. QEMU's user cannot open it and
// receives an open descriptor.
func (r *Runtime) layer(id string) string { return filepath.Join(r.layers(), id) }

// haveLayer creates an instance's layer if the configuration asks for one and none
// exists. It reports whether the instance has a layer. An existing layer is used
// even if the configuration has changed.
func (r *Runtime) haveLayer(ctx context.Context, id string) (bool, error) {
	_, err := os.Stat(r.layer(id))
	if err == nil || r.cfg.Layer == 0 && errors.Is(err, os.ErrNotExist) {
		return err == nil, nil
	}
	if errors.Is(err, os.ErrNotExist) {
		err = r.makeLayer(ctx, id)
	}
	if err != nil {
		return false, fmt.Errorf("cannot create its writable disk: %w", err)
	}
	return true, nil
}

// makeLayer creates an empty layer. It appears by an atomic, durable rename, so
// that files a guest has synced survive a crash of the host.
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
	defer os.Remove(f.Name()) // a no-op after the rename
	if err := errors.Join(f.Truncate(r.cfg.Layer), f.Close()); err != nil {
		return err
	}
	// A new sparse file need not be zeroed: no lazy inode tables or journal, and
	// no space reserved for growth. After a disk error the guest may only read.
	cmd := exec.CommandContext(ctx, mke2fs, "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-J", "size=16", "-O", "^resize_inode",
		"-E", "lazy_itable_init=1,lazy_journal_init=1", "-e", "remount-ro", f.Name())
	if out, err := tied(cmd); err != nil {
		return fmt.Errorf("%w: %.500s", err, out)
	}
	return appear(f.Name(), r.layer(id))
}

// copyLayer copies the layer of from for a clone. from must not be running.
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

// dropLayer deletes an instance's layer.
func (r *Runtime) dropLayer(id string) error {
	if err := removeAll(r.layer(id)); err != nil {
		return fmt.Errorf("cannot remove the disk of %s: %w", id, err)
	}
	return nil
}

// layerState identifies the content of a saved guest's layer: every write changes
// it. It is empty for a guest without one.
func (r *Runtime) layerState(id string, rec runRecord) (string, error) {
	if !rec.Layer {
		return "", nil
	}
	st, err := os.Stat(r.layer(id))
	if err != nil {
		return "", fmt.Errorf("cannot find its writable disk: %w", err)
	}
	return fmt.Sprintf("%d bytes of %s", st.Size(), st.ModTime().Format(time.RFC3339Nano)), nil
}
