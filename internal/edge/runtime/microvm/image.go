package microvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// rootImage returns the ext4 image of a machine's root: the file itself, or one
// made from a directory, which is kept until the directory changes. Guests
// read it only, so that all of them share it.
func (r *Runtime) rootImage(ctx context.Context, root string) (string, error) {
	st, err := os.Stat(root)
	if err != nil {
		return "", fmt.Errorf("cannot use the root: %w", err)
	}
	if !st.IsDir() {
		return root, nil
	}
	sum, size, err := fingerprint(root)
	if err != nil {
		return "", fmt.Errorf("cannot use the root: %w", err)
	}
	dir := filepath.Join(r.cfg.Dir, "images")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("cannot make an image of %s: %w", root, err)
	}
	name := filepath.Join(dir, sum+".ext4")
	if _, err := os.Stat(name); err == nil {
		return name, nil
	}
	tmp, err := os.CreateTemp(dir, "new-")
	if err != nil {
		return "", fmt.Errorf("cannot make an image of %s: %w", root, err)
	}
	defer os.Remove(tmp.Name())
	if err := tmp.Close(); err != nil {
		return "", fmt.Errorf("cannot make an image of %s: %w", root, err)
	}
	mke2fs, err := FindTool("mke2fs")
	if err != nil {
		return "", fmt.Errorf("cannot make an image of %s: %w (Debian package e2fsprogs)", root, err)
	}
	// Room for metadata and rounding; the file is sparse.
	mib := size>>20*5/4 + 16
	cmd := exec.CommandContext(ctx, mke2fs, "-q", "-F", "-t", "ext4", "-d", root, "-O", "^has_journal", "-m", "0", tmp.Name(), fmt.Sprintf("%dM", mib))
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("cannot make an image of %s: %w: %.500s", root, err, out)
	}
	if err := os.Rename(tmp.Name(), name); err != nil {
		return "", fmt.Errorf("cannot keep the image of %s: %w", root, err)
	}
	return name, nil
}

// checkRoot says what is wrong with a root before anything is started.
func checkRoot(root string) error {
	if root == "" {
		return errors.New("it is empty: want a directory or an ext4 image of the program's files")
	}
	st, err := os.Stat(root)
	switch {
	case err != nil:
		return err
	case st.IsDir():
		return nil
	case !st.Mode().IsRegular():
		return fmt.Errorf("%s is neither a directory nor a file", root)
	}
	f, err := os.Open(root)
	if err != nil {
		return err
	}
	defer f.Close()
	var magic [2]byte // of ext2, ext3 and ext4, in the super block
	if _, err := f.ReadAt(magic[:], 1024+56); err != nil || magic != [2]byte{0x53, 0xef} {
		return fmt.Errorf("%s is no ext4 image", root)
	}
	return nil
}

// fingerprint names the state of a tree by every file's name, kind, size, owner
// and times, and sums the sizes in whole blocks.
func fingerprint(root string) (string, int64, error) {
	h := sha256.New()
	size := int64(0)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		sys, ok := st.Sys().(*syscall.Stat_t)
		if !ok {
			return errors.New("this system's files have no owner")
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%q %v %d %d %d %d %d\n", rel, st.Mode(), st.Size(), sys.Uid, sys.Gid, sys.Mtim.Nano(), sys.Ctim.Nano())
		size += 4096
		if st.Mode().IsRegular() {
			size += (st.Size() + 4095) &^ 4095
		}
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)[:16]), size, err
}

// FindTool looks where system tools are, which is not in everybody's PATH.
func FindTool(name string) (string, error) {
	if p, err := exec.LookPath(name); err == nil {
		return p, nil
	}
	for _, d := range []string{"/usr/sbin", "/sbin"} {
		if p, err := exec.LookPath(filepath.Join(d, name)); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("cannot find %s", name)
}
