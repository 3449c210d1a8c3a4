package host

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/tartree"
)

// ReadFiles writes the file or tree at a path of an instance to w as a tar stream.
// It works while the instance sleeps. begun reports whether something was written.
func (h *Host) ReadFiles(w io.Writer, ref, at string) (begun bool, err error) {
	i, root, err := h.filesOf(ref)
	if err != nil {
		return false, err
	}
	defer root.Close()
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
func (h *Host) WriteFiles(r io.Reader, ref, at string) error {
	i, root, err := h.filesOf(ref)
	if err != nil {
		return err
	}
	defer root.Close()
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

// filesOf opens the root directory that the programs of an instance see.
func (h *Host) filesOf(ref string) (*inst, *os.File, error) {
	i, err := h.find(ref)
	if err != nil {
		return nil, nil, err
	}
	refuse := func(reason string) (*inst, *os.File, error) {
		return nil, nil, &RefusedError{Name: i.name(), What: "copy files of", Reason: reason}
	}
	var f *os.File
	switch rt, rooted := i.rt.(instance.Rooted); {
	case rooted:
		f, err = rt.Root(i.id)
	case i.spec().Runtime == "process":
		f, err = os.OpenFile("/", unix.O_PATH|unix.O_DIRECTORY, 0)
	case i.spec().Runtime == "microvm":
		return refuse("the files of a microVM are inside the guest: share a directory with --workspace")
	default:
		return refuse("runtime " + i.spec().Runtime + " has a command of its own for that")
	}
	if err != nil {
		return refuse(err.Error())
	}
	return i, f, nil
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
