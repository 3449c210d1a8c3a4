package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// box is the directory of one instance. Its upper layer holds what the instance
// wrote and lasts until the instance is removed.
type box string

func (b box) upper() string  { return filepath.Join(string(b), "upper") }
func (b box) work() string   { return filepath.Join(string(b), "work") }
func (b box) rootfs() string { return filepath.Join(string(b), "rootfs") }
func (b box) pid() string    { return filepath.Join(string(b), "pid") }
func (b box) log() string    { return filepath.Join(string(b), "runc.log") }
func (b box) kills() string  { return filepath.Join(string(b), "oom-kills") }
func (b box) copied() string { return filepath.Join(string(b), "copied") }

// make creates the directory.
func (b box) make() error {
	for _, d := range []string{string(b), b.upper(), b.work(), b.rootfs()} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return err
		}
	}
	return os.Chmod(b.rootfs(), 0o755)
}

// mount mounts an overlay of root, which stays unchanged, and the instance's layer.
// If the file system does not support overlays, mount copies root once instead.
func (b box) mount(ctx context.Context, root string) error {
	if _, err := os.Stat(b.copied()); err == nil {
		return nil
	}
	// The root of the overlay has the mode and owner of the upper directory.
	var st unix.Stat_t
	if err := unix.Stat(root, &st); err != nil {
		return fmt.Errorf("cannot use %s: %w", root, err)
	}
	if err := errors.Join(os.Chown(b.upper(), int(st.Uid), int(st.Gid)), os.Chmod(b.upper(), fs.FileMode(st.Mode&0o777))); err != nil {
		return err
	}
	opts := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", escape(root), escape(b.upper()), escape(b.work()))
	err := unix.Mount("overlay", b.rootfs(), "overlay", unix.MS_NODEV, opts)
	if err == nil {
		return nil
	}
	if err != unix.EINVAL && err != unix.ENODEV && err != unix.EOPNOTSUPP {
		return fmt.Errorf("cannot mount the container's files over %s: %w", root, err)
	}
	if out, cerr := exec.CommandContext(ctx, "cp", "-a", "--reflink=auto", root+"/.", b.rootfs()).CombinedOutput(); cerr != nil {
		return fmt.Errorf("cannot mount the container's files over %s: %w; cannot copy them instead: %w: %.300s", root, err, cerr, out)
	}
	return os.WriteFile(b.copied(), nil, 0o600)
}

// escape escapes path for use in a mount option, where ':' and ',' separate.
func escape(path string) string {
	return strings.NewReplacer(`\`, `\\`, ",", `\,`, ":", `\:`).Replace(path)
}

// unmount unmounts rootfs, including every mount stacked on it.
func (b box) unmount() error {
	for {
		switch err := unix.Unmount(b.rootfs(), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err {
		case nil:
		case unix.EINVAL, unix.ENOENT: // not mounted
			return nil
		default:
			return fmt.Errorf("cannot unmount %s: %w", b.rootfs(), err)
		}
	}
}

func (b box) write(c bundle) error {
	j, err := json.Marshal(c)
	if err == nil {
		err = os.WriteFile(filepath.Join(string(b), "config.json"), j, 0o600)
	}
	return err
}

// stopSignal returns the stop signal of the last run, or 0 if unknown.
func (b box) stopSignal() syscall.Signal {
	var c bundle
	j, err := os.ReadFile(filepath.Join(string(b), "config.json"))
	if err != nil || json.Unmarshal(j, &c) != nil {
		return 0
	}
	n, _ := strconv.Atoi(c.Annotations[stopSignal]) // absent, so 0, in runs of an earlier version
	return syscall.Signal(n)
}

// apart returns an error if the image root contains the container's own directory.
func apart(root, box string) error {
	real, err := filepath.EvalSymlinks(root)
	if err != nil {
		return fmt.Errorf("cannot use image: %w", err)
	}
	if rel, err := filepath.Rel(real, box); err == nil && rel != ".." && !strings.HasPrefix(rel, "../") {
		return fmt.Errorf("cannot use %s as an image: it contains this host's data directory, to which the container writes", root)
	}
	return nil
}

// mountsBelow returns the mount points below a directory, outer ones first.
func mountsBelow(dir string) (out []string, err error) {
	f, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("cannot list mounts below %s: %w", dir, err)
	}
	for line := range strings.Lines(string(f)) {
		if p := strings.Fields(line); len(p) > 4 && strings.HasPrefix(unescape(p[4]), dir+"/") {
			out = append(out, unescape(p[4]))
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// unescape decodes a path of mountinfo, where \040 is a space.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// readPID returns the container's first process, as runc recorded it.
func (b box) readPID() (int, error) {
	s, err := os.ReadFile(b.pid())
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(s)))
	if err != nil || n < 2 {
		return 0, fmt.Errorf("cannot read %s: %q is not a process", b.pid(), s)
	}
	return n, nil
}

// said returns the last error that runc logged for this run, or "".
func (b box) said() string { return lastError(b.log()) }

// lastError returns the last error in a log of runc.
func lastError(log string) string {
	f, err := os.ReadFile(log)
	if err != nil {
		return ""
	}
	last := ""
	for line := range strings.Lines(string(f[max(0, len(f)-64<<10):])) {
		var e struct{ Level, Msg string }
		if json.Unmarshal([]byte(line), &e) == nil && e.Level == "error" {
			last = e.Msg
		}
	}
	return last
}

// reset removes the files of one run.
func (b box) reset() error {
	var errs []error
	for _, f := range []string{b.pid(), b.log()} {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// noteKills stores the number of the run's processes that the kernel killed for
// lack of memory, and the run's memory limit in bytes.
func (b box) noteKills(kills uint64, limit int64) error {
	tmp := b.kills() + ".new"
	if err := os.WriteFile(tmp, fmt.Appendf(nil, "%d %d\n", kills, limit), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, b.kills())
}

// readKills returns what noteKills stored for the last run, or zeros.
func (b box) readKills() (kills uint64, limit int64, err error) {
	text, err := os.ReadFile(b.kills())
	if errors.Is(err, fs.ErrNotExist) {
		return 0, 0, nil
	}
	if err == nil {
		_, err = fmt.Sscanf(string(text), "%d %d\n", &kills, &limit)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("cannot read %s: %w", b.kills(), err)
	}
	return kills, limit, nil
}

// dropKills deletes what noteKills stored.
func (b box) dropKills() error {
	if err := os.Remove(b.kills()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
