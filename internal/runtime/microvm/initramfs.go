package microvm

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// cpio writes a "newc" archive, the format of an initramfs. Inodes and times are
// fixed, so that the same content gives the same archive.
type cpio struct {
	w    *bufio.Writer
	n    int64
	ino  int
	dirs map[string]bool
	err  error
}

func newCPIO(w io.Writer) *cpio {
	return &cpio{w: bufio.NewWriter(w), dirs: map[string]bool{"/": true, ".": true}}
}

const (
	modeDir  = 0o040755
	modeFile = 0o100644
	modeProg = 0o100755
)

func (c *cpio) write(b []byte) {
	if c.err == nil {
		_, c.err = c.w.Write(b)
	}
	c.n += int64(len(b))
}

func (c *cpio) pad() { c.write(make([]byte, -c.n&3)) }

func (c *cpio) head(name string, mode, size int) {
	c.ino++
	name += "\x00"
	c.write(fmt.Appendf(nil, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		c.ino, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, len(name), 0))
	c.write([]byte(name))
	c.pad()
}

func (c *cpio) parents(name string) {
	dir := path.Dir(name)
	if c.dirs[dir] {
		return
	}
	c.parents(dir)
	c.dirs[dir] = true
	c.head(strings.TrimPrefix(dir, "/"), modeDir, 0)
}

func (c *cpio) file(name string, mode int, b []byte) {
	c.parents(name)
	c.head(strings.TrimPrefix(name, "/"), mode, len(b))
	c.write(b)
	c.pad()
}

func (c *cpio) finish() error {
	c.head("TRAILER!!!", 0, 0)
	c.write(make([]byte, -c.n&511))
	return errors.Join(c.err, c.w.Flush())
}

// maxInitramfs limits the size of one file in an initramfs.
const maxInitramfs = 256 << 20

// writeInitramfs writes the guest's initial root: the guest agent as /init, the
// kernel modules with their load order, and more files by their path in the guest.
func writeInitramfs(w io.Writer, harness string, k Kernel, files map[string]string) error {
	c := newCPIO(w)
	add := func(name string, mode int, from string) error {
		st, err := os.Stat(from)
		if err != nil {
			return fmt.Errorf("cannot put %s into the initramfs: %w", name, err)
		}
		if !st.Mode().IsRegular() || st.Size() > maxInitramfs {
			return fmt.Errorf("cannot add %s to the initramfs: %s is not a file of at most %d bytes", name, from, maxInitramfs)
		}
		b, err := os.ReadFile(from)
		if err != nil {
			return fmt.Errorf("cannot put %s into the initramfs: %w", name, err)
		}
		if st.Mode()&0o111 != 0 {
			mode = modeProg
		}
		c.file(name, mode, b)
		return nil
	}
	if err := add("/init", modeProg, harness); err != nil {
		return err
	}
	if len(k.Modules) > 0 {
		order := ""
		for _, m := range k.Modules {
			if err := add("/lib/lull/"+filepath.Base(m), modeFile, m); err != nil {
				return err
			}
			order += filepath.Base(m) + "\n"
		}
		c.file("/lib/lull/order", modeFile, []byte(order))
	}
	names := make([]string, 0, len(files))
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if !path.IsAbs(name) || path.Clean(name) != name {
			return fmt.Errorf("cannot put %s into the initramfs: want a clean absolute path", name)
		}
		if err := add(name, modeFile, files[name]); err != nil {
			return err
		}
	}
	return c.finish()
}

// initramfs returns a file with the initial root of machine m, including the
// modules for its workspace and vsock device. It is cached and shared under the
// digest of its content.
func (r *Runtime) initramfs(m Machine, workspace, vsock bool) (string, error) {
	with := map[string]string{}
	maps.Copy(with, m.Files)
	if workspace && r.parts().kernel.Fuse != "" {
		with["/lib/lull/fuse.ko"] = r.parts().kernel.Fuse
	}
	if vsock {
		for _, f := range r.parts().kernel.Vsock {
			with["/lib/lull/"+filepath.Base(f)] = f
		}
	}
	dir := r.bootFiles()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("cannot make the initramfs: %w", err)
	}
	tmp, err := os.CreateTemp(dir, halfMade)
	if err != nil {
		return "", fmt.Errorf("cannot make the initramfs: %w", err)
	}
	defer os.Remove(tmp.Name())
	sum := sha256.New()
	err = writeInitramfs(io.MultiWriter(tmp, sum), r.cfg.Harness, r.parts().kernel, with)
	// QEMU runs as another user; only it can enter the directory.
	if err = errors.Join(err, tmp.Chmod(0o644), tmp.Close()); err != nil {
		return "", err
	}
	name := filepath.Join(dir, hex.EncodeToString(sum.Sum(nil)[:16])+".cpio")
	if st, err := os.Stat(name); err == nil && st.Mode().Perm() == 0o644 {
		return name, touch(name)
	}
	if err := appear(tmp.Name(), name); err != nil {
		return "", fmt.Errorf("cannot store the initramfs: %w", err)
	}
	return name, nil
}
