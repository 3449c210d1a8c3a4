package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/tartree"
)

// ReadFiles writes the file or tree at a path of an instance to w as a tar stream.
// It works while the instance sleeps. begun reports whether something was written.
func (h *Host) ReadFiles(ctx context.Context, w io.Writer, ref, at string) (begun bool, err error) {
	if i, k, done, err := h.keeperOf(ctx, ref); err != nil || k != nil {
		if err != nil {
			return false, err
		}
		defer done()
		begun, err = k.ReadFiles(ctx, i.id, i.absolute(at), w)
		return begun, keeperFault(i, at, err)
	}
	i, root, done, err := h.filesOf(ctx, ref)
	if err != nil {
		return false, err
	}
	defer done()
	at = i.absolute(at)
	f, err := openIn(root, at, unix.O_PATH)
	if err != nil {
		return false, fileFault(i, at, err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return false, fileFault(i, at, err)
	}
	if !st.IsDir() {
		if !st.Mode().IsRegular() {
			return false, &RefusedError{Name: i.name(), What: "copy " + at + " of", Reason: "it is not a file or directory"}
		}
		file, err := os.Open(procPath(f))
		if err != nil {
			return false, fileFault(i, at, err)
		}
		defer file.Close()
		return true, tartree.PackFile(w, file, path.Base(at))
	}
	dir, err := os.OpenRoot(procPath(f))
	if err != nil {
		return false, fileFault(i, at, err)
	}
	defer dir.Close()
	return true, tartree.Pack(w, dir, strings.TrimPrefix(path.Base(at), "/"))
}

// WriteFiles unpacks a tar stream at a path of an instance: into the directory
// there, or under that name in the directory above. What is new belongs to the
// owner of the directory.
func (h *Host) WriteFiles(ctx context.Context, r io.Reader, ref, at string) error {
	if i, k, done, err := h.keeperOf(ctx, ref); err != nil || k != nil {
		if err != nil {
			return err
		}
		defer done()
		return keeperFault(i, at, k.WriteFiles(ctx, i.id, i.absolute(at), r))
	}
	i, root, done, err := h.filesOf(ctx, ref)
	if err != nil {
		return err
	}
	defer done()
	at = i.absolute(at)
	as := ""
	f, err := openIn(root, at, unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		as = path.Base(at)
		f, err = openIn(root, path.Dir(at), unix.O_PATH|unix.O_DIRECTORY)
	}
	if err != nil {
		return fileFault(i, at, err)
	}
	defer f.Close()
	var owner unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &owner); err != nil {
		return fileFault(i, at, err)
	}
	dir, err := os.OpenRoot(procPath(f))
	if err != nil {
		return fileFault(i, at, err)
	}
	defer dir.Close()
	var own func(string) error
	if os.Geteuid() == 0 {
		own = func(name string) error { return dir.Lchown(name, int(owner.Uid), int(owner.Gid)) }
	}
	if err := tartree.Unpack(r, dir, as, own); err != nil {
		return fmt.Errorf("copy to %s of %s: %w", at, i.name(), err)
	}
	return nil
}

// keeperOf returns the runtime of an instance if that copies files itself. The
// instance is kept awake until done is called, if it must be.
func (h *Host) keeperOf(ctx context.Context, ref string) (i *inst, k instance.FileKeeper, done func(), err error) {
	if i, err = h.find(ref); err != nil {
		return nil, nil, nil, err
	}
	k, ok := i.rt.(instance.FileKeeper)
	if !ok {
		return i, nil, nil, nil
	}
	if !k.FilesAwake() {
		return i, k, func() {}, nil
	}
	leave, err := h.hold(ctx, i, "lull cp")
	if err == nil {
		if err = h.Resume(ctx, ref, ByManual); err != nil {
			leave()
		}
	}
	return i, k, leave, err
}

func keeperFault(i *inst, at string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return &NotFoundError{Name: i.name(), File: at}
	}
	return err
}

// filesOf opens the root directory that the programs of an instance see. done closes
// it; until then an instance that is stopped does not start.
func (h *Host) filesOf(ctx context.Context, ref string) (i *inst, root *os.File, done func(), err error) {
	if i, err = h.find(ref); err != nil {
		return nil, nil, nil, err
	}
	release := func() {}
	switch rt, rooted := i.rt.(instance.Rooted); {
	case rooted:
		root, err = rt.Root(i.id)
	case i.spec().Runtime == "process":
		root, err = os.OpenFile("/", unix.O_PATH|unix.O_DIRECTORY, 0)
	case i.spec().Runtime == "microvm":
		err = errors.New("the files of a microVM are inside the guest: share a directory with --workspace, or run tar in it with lull exec -i")
	default:
		err = errors.New("runtime " + i.spec().Runtime + " cannot")
	}
	if rest, ok := i.rt.(instance.RestRooted); ok && err != nil {
		if aerr := i.acquireCtx(ctx); aerr != nil {
			return nil, nil, nil, aerr
		}
		release = i.release
		if i.state() == power.Stopped {
			root, err = rest.RestRoot(ctx, i.id, i.spec().Image)
		}
	}
	if err != nil {
		release()
		return nil, nil, nil, &RefusedError{Name: i.name(), What: "copy files of", Reason: err.Error()}
	}
	return i, root, func() { root.Close(); release() }, nil
}

// absolute resolves a path against the working directory of the instance.
func (i *inst) absolute(at string) string {
	if path.IsAbs(at) {
		return path.Clean(at)
	}
	return path.Join("/", i.spec().Workdir, at)
}

// openIn opens a path with links resolved as inside root.
func openIn(root *os.File, at string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(int(root.Fd()), at, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), at), nil
}

func procPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

func fileFault(i *inst, at string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return &NotFoundError{Name: i.name(), File: at}
	}
	return fmt.Errorf("open %s of %s: %w", at, i.name(), err)
}
