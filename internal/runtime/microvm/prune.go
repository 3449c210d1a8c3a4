package microvm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/platform/oci"
)

// The kinds of cached files.
const (
	kindDisk  = "disk"  // ext4 image of a root, rebuilt on demand
	kindBoot  = "boot"  // initramfs or copy of the kernel, rebuilt on demand
	kindGuest = "guest" // files of a guest; orphaned if no instance has them
)

// halfMade is the prefix of the names of files that are still being made.
const halfMade = "new-"

// bootFiles returns the directory of initramfs and kernel files.
func (r *Runtime) bootFiles() string { return filepath.Join(r.cfg.Dir, "boot") }

// clearHalfMade removes the incomplete files of an earlier daemon. The programs
// that made them ended with that daemon (see tied).
func (r *Runtime) clearHalfMade() error {
	var errs []error
	for _, dir := range []string{filepath.Join(r.cfg.Dir, "images"), r.bootFiles(), r.templates(), r.layers()} {
		ents, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		for _, e := range ents {
			if strings.HasPrefix(e.Name(), halfMade) {
				errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("cannot remove incomplete images: %w", err)
	}
	return nil
}

// Images implements instance.ImageKeeper: root images, boot files and files of
// guests.
func (r *Runtime) Images(context.Context) (out []instance.Image, err error) {
	used, err := r.usedFiles()
	if err != nil {
		return nil, err
	}
	has := func(p string) bool { return used[p] }
	guests := map[string]int{} // index in out: a guest can have files in two places
	add := func(dir, kind string, keep func(name string) bool) error {
		ents, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("cannot list images: %w", err)
		}
		for _, e := range ents {
			if strings.HasPrefix(e.Name(), halfMade) { // still being made
				continue
			}
			path := filepath.Join(dir, e.Name())
			i := instance.Image{ID: e.Name(), Kind: kind, InUse: keep(path)}
			if i.MadeAt, i.Bytes, err = oci.DiskUse(path); errors.Is(err, fs.ErrNotExist) {
				continue // deleted concurrently
			} else if err != nil {
				return fmt.Errorf("cannot measure an image: %w", err)
			}
			i.UsedAt = usedAt(path, i.MadeAt)
			if n, more := guests[i.ID]; more && kind == kindGuest {
				out[n].Bytes += i.Bytes
				continue
			}
			if kind == kindGuest {
				guests[i.ID] = len(out)
			}
			out = append(out, i)
		}
		return nil
	}
	runs := func(p string) bool { return r.work(filepath.Base(p)) != nil }
	err = errors.Join(add(filepath.Join(r.cfg.Dir, "images"), kindDisk, has), add(r.bootFiles(), kindBoot, has),
		add(filepath.Join(r.cfg.Dir, "vm"), kindGuest, runs), add(r.layers(), kindGuest, runs))
	return out, err
}

// usedAt returns when a file was last put to use: its access time, but at least
// made. The modification time cannot be used, because saved guests identify a disk
// by it.
func usedAt(path string, made time.Time) time.Time {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Atim.Nano() < made.UnixNano() {
		return made
	}
	return time.Unix(st.Atim.Unix())
}

// touch records that a disk is being put to use.
func touch(path string) error {
	err := unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_OMIT}}, 0)
	if err != nil {
		return fmt.Errorf("cannot record the use of %s: %w", path, err)
	}
	return nil
}

// usedFiles returns the paths of the images and boot files of running and saved
// guests, and of the kernel's copy for the next guest.
func (r *Runtime) usedFiles() (map[string]bool, error) {
	ents, err := os.ReadDir(filepath.Join(r.cfg.Dir, "vm"))
	if err != nil {
		return nil, fmt.Errorf("cannot list guests: %w", err)
	}
	used := map[string]bool{}
	for _, e := range ents {
		rec, err := readRecord(r.dir(e.Name()))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err // their use is unknown
		}
		used[rec.Root], used[rec.Initrd] = true, true
	}
	if r.rights.own {
		if kernel, err := r.kernelCopy(); err == nil { // needed for the next guest
			used[kernel] = true
		}
	}
	return used, nil
}

// RemoveImage implements instance.ImageKeeper.
func (r *Runtime) RemoveImage(ctx context.Context, id string) error {
	if id == "" || id != filepath.Base(id) || id[0] == '.' {
		return fmt.Errorf("cannot remove image %s: invalid image ID", id)
	}
	dir := r.bootFiles()
	switch filepath.Ext(id) {
	case ".ext4":
		dir = filepath.Join(r.cfg.Dir, "images")
	case ".cpio", ".kernel":
	default:
		pids, err := findQEMU(r.dir(id))
		if err == nil && len(pids) > 0 {
			err = fmt.Errorf("cannot remove guest %s: its machine runs", id)
		}
		if err == nil {
			err = r.Forget(ctx, id)
		}
		if err == nil {
			_, err = r.sweepTemplates()
		}
		return err
	}
	if !r.roots.TryLock() { // a guest is starting
		return fmt.Errorf("cannot remove image %s: a guest is starting", id)
	}
	defer r.roots.Unlock()
	path := filepath.Join(dir, id)
	used, err := r.usedFiles()
	if err == nil && used[path] {
		err = errors.New("it is in use")
	}
	if err == nil {
		err = os.Remove(path)
	}
	if err != nil {
		return fmt.Errorf("cannot remove image %s: %w", id, err)
	}
	return nil
}
