package microvm

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"lull/internal/lib/thread"
	"lull/internal/platform/oci"
	"lull/internal/protocol/guest"
)

// prepareRoot returns the ext4 image of a machine's root, which all guests share
// because they only read it. It fills in the fields of call that the launch leaves
// empty with the command, environment, directory and user of an OCI image.
func (r *Runtime) prepareRoot(ctx context.Context, root string, call *guest.RunCall) (string, error) {
	if isExt4(root) {
		return root, nil
	}
	if r.cfg.Images == nil {
		return r.rootImage(ctx, root, "")
	}
	img, err := r.cfg.Images.Get(ctx, root)
	if err != nil {
		return "", err
	}
	if img.Key == "" {
		return r.rootImage(ctx, img.Root, "")
	}
	call.Command, call.Dir = img.Config.Args(call.Command), img.Config.Dir(call.Dir)
	if len(call.Command) == 0 {
		return "", errors.New("cannot run the microVM: neither the instance nor its image has a command")
	}
	who, err := oci.LookupUser(img.Root, cmp.Or(call.User, img.Config.User))
	if err != nil {
		return "", err
	}
	call.Env = img.Config.Environ(who.Home, call.Env)
	call.User, call.Groups = fmt.Sprintf("%d:%d", who.UID, who.GID), who.Groups
	return r.rootImage(ctx, img.Root, img.Key)
}

// rootImage returns the ext4 image of a directory, cached until the directory
// changes. A root that never changes is cached under the name of its content.
func (r *Runtime) rootImage(ctx context.Context, root, name string) (string, error) {
	image, err := r.makeImage(ctx, root, name)
	if err == nil {
		err = touch(image)
	}
	if err != nil {
		return "", fmt.Errorf("cannot make an image of %s: %w", root, err)
	}
	return image, nil
}

func (r *Runtime) makeImage(ctx context.Context, root, name string) (string, error) {
	dir := filepath.Join(r.cfg.Dir, "images")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	at := func(name string) (string, bool) {
		path := filepath.Join(dir, name+".ext4")
		_, err := os.Stat(path)
		return path, err == nil
	}
	if path, ok := at(name); ok && name != "" {
		return path, nil
	}
	// One at a time: a second guest with the same root finds the image built.
	select {
	case r.making <- struct{}{}:
		defer func() { <-r.making }()
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	sum, entries, size, err := fingerprint(root)
	if err != nil {
		return "", err
	}
	path, ok := at(cmp.Or(name, sum))
	if ok {
		return path, nil
	}
	tmp, err := os.CreateTemp(dir, halfMade)
	if err != nil {
		return "", err
	}
	defer os.Remove(tmp.Name())
	if err := tmp.Close(); err != nil {
		return "", err
	}
	mke2fs, err := FindTool("mke2fs")
	if err != nil {
		return "", fmt.Errorf("%w (Debian package e2fsprogs)", err)
	}
	// Leave space for metadata and rounding; the file is sparse. Use one inode
	// per entry, whatever mke2fs assumes about file sizes.
	mib := (size+entries*inodeSize)>>20*5/4 + 16
	cmd := exec.CommandContext(ctx, mke2fs, "-q", "-F", "-t", "ext4", "-d", root, "-O", "^has_journal", "-m", "0", "-I", strconv.Itoa(inodeSize),
		"-N", strconv.FormatInt(entries+spareInodes, 10), tmp.Name(), fmt.Sprintf("%dM", mib))
	if out, err := tied(cmd); err != nil {
		return "", fmt.Errorf("%w: %.500s", err, out)
	}
	return path, appear(tmp.Name(), path)
}

const (
	inodeSize   = 256  // bytes
	spareInodes = 1024 // for the file system itself and rounding
)

// tied runs a program that the kernel kills when this process ends. The kernel ties
// it to the thread that started it, so that thread waits for it.
func tied(cmd *exec.Cmd) (out []byte, err error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	thread.Own(func() { out, err = cmd.CombinedOutput() })
	return out, err
}

// checkRoot returns what is wrong with a root before anything is started.
func (r *Runtime) checkRoot(root string) error {
	if root == "" {
		return errors.New("it is empty: want a directory, an ext4 image, an image file or a registry reference of the program's files")
	}
	if r.cfg.Images != nil && !filepath.IsAbs(root) {
		return oci.CheckReference(root)
	}
	st, err := os.Stat(root)
	switch {
	case err != nil:
		return err
	case st.IsDir():
		return nil
	case !st.Mode().IsRegular():
		return fmt.Errorf("%s is neither a directory nor a file", root)
	case r.cfg.Images == nil && !isExt4(root):
		return fmt.Errorf("%s is not an ext4 image", root)
	}
	return nil
}

// namesCommand reports whether an image can specify a command.
func namesCommand(root string) bool {
	if st, err := os.Stat(root); err == nil && st.IsDir() {
		_, err := os.Stat(filepath.Join(root, "oci-layout"))
		return err == nil
	}
	return root != "" && !isExt4(root)
}

func isExt4(path string) bool {
	if !filepath.IsAbs(path) {
		return false
	}
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	var magic [2]byte // the magic number of ext2, ext3 and ext4 in the superblock
	_, err = f.ReadAt(magic[:], 1024+56)
	return err == nil && magic == [2]byte{0x53, 0xef}
}

// fingerprint returns a digest over the name, kind, size, owner and times of every
// file of a tree. It also returns the number of entries and the sum of their sizes,
// in bytes of whole blocks.
func fingerprint(root string) (sum string, entries, size int64, err error) {
	h := sha256.New()
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
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
		entries++
		size += 4096
		if st.Mode().IsRegular() {
			size += (st.Size() + 4095) &^ 4095
		}
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)[:16]), entries, size, err
}

// FindTool finds a system tool, also in directories outside a user's PATH.
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
