package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"lull/internal/platform/proc"
)

// maxState bounds the size of runc's state file of a container, in bytes.
const maxState = 4 << 20

// Root implements instance.Rooted: it opens the root directory of the container's
// first process, which runc records with its start time.
func (r *Runtime) Root(id string) (*os.File, error) {
	f, err := os.Open(filepath.Join(r.state(), id, "state.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("it does not run: start it first")
	}
	if err != nil {
		return nil, fmt.Errorf("read the state of the container: %w", err)
	}
	defer f.Close()
	var state struct {
		PID   int    `json:"init_process_pid"`
		Start uint64 `json:"init_process_start"`
	}
	if err := json.NewDecoder(io.LimitReader(f, maxState)).Decode(&state); err != nil {
		return nil, fmt.Errorf("read the state of the container: %w", err)
	}
	root, err := os.OpenFile(fmt.Sprintf("/proc/%d/root", state.PID), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, errors.New("it has just ended: start it first")
	}
	// The start time is checked after opening, so the directory is that of this
	// process even if its PID has been reused since.
	if s, err := proc.Live().Stat(state.PID); err != nil || s.Start != state.Start {
		root.Close()
		return nil, errors.New("it has just ended: start it first")
	}
	return root, nil
}

// RestRoot implements instance.RestRooted. It opens the files that the next run
// will see, without mounting them in the file tree.
func (r *Runtime) RestRoot(ctx context.Context, id, image string) (*os.File, error) {
	b := r.box(id)
	if _, err := os.Stat(b.upper()); errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("it was never started: start it first")
	}
	if _, err := os.Stat(b.copied()); err == nil {
		return os.OpenFile(b.rootfs(), unix.O_PATH|unix.O_DIRECTORY, 0)
	}
	img, err := r.cfg.Images.Use(ctx, image, id)
	if err != nil {
		return nil, err
	}
	fsfd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("mount the container's files over %s: %w", img.Root, err)
	}
	defer unix.Close(fsfd)
	lower := strings.NewReplacer(`\`, `\\`, ":", `\:`).Replace(img.Root)
	for _, o := range [][2]string{{"lowerdir", lower}, {"upperdir", b.upper()}, {"workdir", b.work()}} {
		if err := unix.FsconfigSetString(fsfd, o[0], o[1]); err != nil {
			return nil, fmt.Errorf("mount the container's files over %s: %s: %w", img.Root, o[0], err)
		}
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return nil, fmt.Errorf("mount the container's files over %s: %w", img.Root, err)
	}
	fd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("mount the container's files over %s: %w", img.Root, err)
	}
	return os.NewFile(uintptr(fd), b.rootfs()), nil
}
