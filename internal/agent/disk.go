package agent

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/segment"
	"lull/internal/lib/wall"
)

// Files is the Disk of a real machine.
type Files struct {
	State      string // directory of the persistent state, such as /var/lib/lull/agent
	ConfigFile string // the local file, such as /etc/lull/agent.yaml
	// Clock reads the machine's clocks. They are used to find out whether a
	// completion file is older than the boot. They are read each time, because a
	// clock that is wrong at boot is set later.
	Clock func() wall.Reading
}

var _ Disk = Files{}

// Prepare creates the directories, closed to other users.
func (f Files) Prepare() error {
	if err := os.MkdirAll(f.State, 0o700); err != nil {
		return fmt.Errorf("cannot make the agent's directory: %w", err)
	}
	_, err := segment.RemoveTemporary(f.State)
	return err
}

// Load implements Disk.
func (f Files) Load(name string) ([]byte, error) {
	return segment.ReadSealed(filepath.Join(f.State, name), 16<<20)
}

// Save implements Disk.
func (f Files) Save(name string, b []byte) error {
	return segment.WriteSealed(filepath.Join(f.State, name), b, 0o600)
}

// Config implements Disk. It fails for a file that anyone other than root or the
// agent's own user could have written.
func (f Files) Config() ([]byte, error) {
	if f.ConfigFile == "" {
		return nil, fs.ErrNotExist
	}
	return ReadTrusted(f.ConfigFile, maxConfig+1)
}

// ReadTrusted reads at most limit bytes of a regular file. It fails unless only root
// and the agent's own user can have written the file.
func ReadTrusted(path string, limit int64) ([]byte, error) {
	// Non-blocking, because the path may be a pipe.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		// A dangling symlink is an unreadable file, not a missing one.
		if st, lerr := os.Lstat(path); lerr == nil && st.Mode()&fs.ModeSymlink != 0 {
			return nil, fmt.Errorf("cannot read %s: it is a dangling symbolic link", path)
		}
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if err := trusted(path, file); err != nil {
		return nil, fmt.Errorf("cannot trust %s: %w", path, err)
	}
	return io.ReadAll(io.LimitReader(file, limit))
}

// Completed implements Disk. The file counts only if it is a regular file of this
// boot, and its owner and directory are such that other users cannot forge it.
func (f Files) Completed(path string) (time.Time, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, err
	}
	defer file.Close()
	if err := trusted(path, file); err != nil {
		return time.Time{}, fmt.Errorf("cannot trust %s: %w", path, err)
	}
	st, err := file.Stat()
	if err != nil {
		return time.Time{}, err
	}
	// A reboot empties /run. Elsewhere, a file from an earlier boot must not end a
	// new one. A file from the future is also old: it was written before the clock
	// was set back.
	written, now := st.ModTime(), f.Clock()
	if written.Before(now.Wall.Add(-now.Boot)) {
		return time.Time{}, fmt.Errorf("cannot use %s: it was written at %s, before this boot", path, written.Format(time.RFC3339))
	}
	if written.After(now.Wall.Add(idle.FutureTolerance)) {
		return time.Time{}, fmt.Errorf("cannot use %s: it was written at %s, which is in the future", path, written.Format(time.RFC3339))
	}
	return written, nil
}

// trusted checks an open file and every directory on its path, including those of
// symbolic links. Each must belong to root or to this process's user, and no other
// user may be able to write to it.
func trusted(path string, file *os.File) error {
	st, err := file.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return errors.New("not a regular file")
	}
	if err := ownOnly(st); err != nil {
		return err
	}
	path, err = filepath.Abs(path)
	if err != nil {
		return err
	}
	at, names := "/", strings.Split(path, "/")
	for links := 0; ; {
		st, err := os.Lstat(at)
		if err != nil {
			return err
		}
		switch {
		case st.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(at)
			if links++; err != nil || links > maxLinks {
				return fmt.Errorf("cannot follow %s: %w", at, cmp.Or(err, error(syscall.ELOOP)))
			}
			names = append(strings.Split(target, "/"), names...)
			if at = filepath.Dir(at); filepath.IsAbs(target) {
				at = "/"
			}
			continue
		case st.IsDir():
			if err := ownOnly(st); err != nil {
				return fmt.Errorf("directory %s: %w", at, err)
			}
		}
		if len(names) == 0 {
			return nil
		}
		at, names = filepath.Join(at, names[0]), names[1:]
	}
}

// maxLinks is the maximum number of symbolic links on the path to a file, as in the
// kernel.
const maxLinks = 40

func ownOnly(st fs.FileInfo) error {
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return errors.New("its owner is unknown")
	}
	if sys.Uid != 0 && int(sys.Uid) != os.Geteuid() {
		return fmt.Errorf("it belongs to user %d", sys.Uid)
	}
	if st.Mode().Perm()&0o002 != 0 || st.Mode().Perm()&0o020 != 0 && sys.Gid != 0 {
		return errors.New("writable by other users")
	}
	return nil
}
