package tartree

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoPath means that a path does not exist below a root.
var ErrNoPath = errors.New("no such file or directory")

// PackInside writes the file or tree at the absolute path at to w. Symbolic links
// are resolved as if root were /. root may have been opened with O_PATH. begun
// reports whether anything was written. Errors include ErrNoPath and
// ErrIrregular.
func PackInside(w io.Writer, root *os.File, at string) (begun bool, err error) {
	f, err := openIn(root, at, unix.O_PATH)
	if err != nil {
		return false, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return false, err
	}
	if st.IsDir() {
		dir, err := os.OpenRoot(procPath(f))
		if err != nil {
			return false, err
		}
		defer dir.Close()
		return true, Pack(w, dir, strings.TrimPrefix(path.Base(at), "/"))
	}
	if !st.Mode().IsRegular() { // opening it could block or have side effects
		return false, ErrIrregular
	}
	file, err := os.Open(procPath(f))
	if err != nil {
		return false, err
	}
	defer file.Close()
	return true, PackFile(w, file, path.Base(at))
}

// UnpackInside unpacks a tar stream at the absolute path at: into the directory
// at or, if it does not exist, under that name in its parent. Symbolic links are
// resolved as in PackInside. If this process is root, new files get the owner of
// that directory. Errors include ErrNoPath.
func UnpackInside(r io.Reader, root *os.File, at string) error {
	as := ""
	f, err := openIn(root, at, unix.O_PATH|unix.O_DIRECTORY)
	if errors.Is(err, ErrNoPath) || errors.Is(err, unix.ENOTDIR) {
		as = path.Base(at)
		f, err = openIn(root, path.Dir(at), unix.O_PATH|unix.O_DIRECTORY)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	var owner unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &owner); err != nil {
		return err
	}
	dir, err := os.OpenRoot(procPath(f))
	if err != nil {
		return err
	}
	defer dir.Close()
	var own func(string) error
	if os.Geteuid() == 0 {
		own = func(name string) error { return dir.Lchown(name, int(owner.Uid), int(owner.Gid)) }
	}
	return Unpack(r, dir, as, own)
}

func openIn(root *os.File, at string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(int(root.Fd()), at, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNoPath
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", at, err)
	}
	return os.NewFile(uintptr(fd), at), nil
}

func procPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }
