package microvm

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"lull/internal/lib/thread"
)

// User IDs for QEMU, one per instance, from a range that systems leave unassigned
// (systemd lists 1,879,048,192 to 2,147,483,647 as unused).
const (
	firstUser = 1_900_000_000
	users     = 200_000_000
	nobody    = 65534
)

// Capabilities that the host needs to drop QEMU's privileges.
const dropCaps = 1<<unix.CAP_CHOWN | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID

// rights describes how this host can drop QEMU's privileges.
type rights struct {
	root  bool // running as user 0
	own   bool // may run QEMU as its own user
	apart bool // may give QEMU its own network and mount namespaces
	many  bool // one user per instance, not just uid 65534
}

// findRights determines the rights of this host's processes.
func (m machineFiles) findRights(euid int) (r rights) {
	if euid != 0 {
		return r
	}
	r.root = true
	var caps uint64
	status, err := os.ReadFile(filepath.Join(m.proc, "self/status"))
	if err != nil {
		return r
	}
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "CapEff:"); ok {
			if _, err := fmt.Sscanf(strings.TrimSpace(v), "%x", &caps); err != nil {
				return r
			}
		}
	}
	r.apart = caps&(1<<unix.CAP_SYS_ADMIN) != 0
	r.many = m.mapped("uid_map", firstUser, users) && m.mapped("gid_map", firstUser, users)
	r.own = caps&dropCaps == dropCaps && (r.many || m.mapped("uid_map", nobody, 1) && m.mapped("gid_map", nobody, 1))
	return r
}

// mapped reports whether count IDs from from exist in this host's user namespace,
// according to the map in file.
func (m machineFiles) mapped(file string, from, count uint64) bool {
	b, err := os.ReadFile(filepath.Join(m.proc, "self", file))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
		var in, out, n uint64
		if _, err := fmt.Sscan(line, &in, &out, &n); err == nil && from >= in && from+count <= in+n {
			return true
		}
	}
	return false
}

func (r rights) String() string {
	who := "the host's own user"
	switch {
	case r.own && r.many:
		who = "a user for each guest"
	case r.own:
		who = "nobody"
	case r.root:
		who = "root without capabilities, because this root may not change users"
	}
	if r.apart {
		return who + ", no network, no file to write"
	}
	return who
}

// Privileges describes the privileges with which QEMU runs on this machine.
func Privileges() string { return liveFiles.findRights(os.Geteuid()).String() }

// user returns the UID for an instance's QEMU, or false if QEMU runs as the host's
// own user.
func (r rights) user(id string) (int, bool) {
	switch {
	case !r.own:
		return 0, false
	case !r.many:
		return nobody, true
	}
	h := fnv.New32a()
	_, _ = io.WriteString(h, id) // never fails
	return firstUser + int(h.Sum32()%users), true
}

// give makes the user of an instance's QEMU the owner of a file.
func (r rights) give(f *os.File, id string) error {
	uid, ok := r.user(id)
	if !ok {
		return nil
	}
	return f.Chown(uid, uid)
}

// attributes returns the process attributes for an instance's QEMU, which must
// outlive the daemon.
func (r rights) attributes(id string, accel Accel) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setsid: true}
	if r.apart {
		a.Cloneflags = syscall.CLONE_NEWNET // QEMU needs no network, because frames go through an inherited socket
	}
	uid, ok := r.user(id)
	if !ok {
		return a
	}
	a.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}
	var st unix.Stat_t
	if accel == KVM && unix.Stat("/dev/kvm", &st) == nil && st.Mode&0o060 == 0o060 {
		a.Credential.Groups = []uint32{st.Gid}
	}
	return a
}

// start starts a program that can never gain privileges. It sets what the program
// inherits on a dedicated thread.
func (r rights) start(cmd *exec.Cmd) (err error) {
	thread.Own(func() {
		if err = r.strip(); err == nil {
			err = cmd.Start()
		}
	})
	return err
}

// strip removes from this thread, for its children, every way to gain privileges
// and every right to change a file that is not already open.
func (r rights) strip() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("cannot set no_new_privs: %w", err)
	}
	if r.apart {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("cannot create a mount namespace: %w", err)
		}
		err := unix.MountSetattr(unix.AT_FDCWD, "/", unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY, Propagation: unix.MS_PRIVATE})
		if err != nil && err != unix.ENOSYS { // not supported before Linux 5.12
			return fmt.Errorf("cannot make the files read-only: %w", err)
		}
	}
	if !r.root {
		return nil
	}
	for c := 0; c <= 63; c++ {
		switch err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err {
		case nil:
		case unix.EINVAL: // this kernel has no such capability
			return nil
		case unix.EPERM: // a root user with few capabilities, which may not drop this one
			return nil
		default:
			return fmt.Errorf("cannot drop capability %d: %w", c, err)
		}
	}
	return nil
}

// Numbers of the descriptors with which QEMU is started. QEMU opens no file of an
// instance by name.
const (
	qmpFile = 3 + iota
	ctlFile
	netFile
	ramFile
	kernelFile
	initrdFile
	rootFile // present only with a root; a restoring QEMU gets empty files as kernel and initial root
	// After these come, if the guest has them: its layer, the socket of its
	// workspace port and the descriptors of its vsock device.
)

// open opens the files for a QEMU, in the order of their numbers.
func (r *Runtime) open(id string, rec runRecord) (files []*os.File, err error) {
	defer func() {
		if err != nil {
			shut(files)
		}
	}()
	for _, name := range []string{qmpSocket, ctlSocket, netSocket} {
		f, err := listen(filepath.Join(r.dir(id), name))
		if err != nil {
			return files, fmt.Errorf("cannot listen for QEMU: %w", err)
		}
		files = append(files, f)
	}
	ram, err := os.OpenFile(r.memoryPath(id, rec), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return files, fmt.Errorf("cannot make the guest's memory: %w", err)
	}
	files = append(files, ram)
	if rec.Template == "" {
		if err := r.rights.give(ram, id); err != nil {
			return files, fmt.Errorf("cannot make the guest's memory: %w", err)
		}
	}
	more := []string{os.DevNull, os.DevNull}
	if rec.Initrd != "" {
		if more[0], err = r.readableKernel(); err != nil {
			return files, err
		}
		more[1] = rec.Initrd
	}
	if rec.Root != "" {
		more = append(more, rec.Root)
	}
	for _, name := range more {
		f, err := os.Open(name)
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	if rec.Layer {
		f, err := os.OpenFile(r.layer(id), os.O_RDWR, 0)
		if err != nil {
			return files, fmt.Errorf("cannot open its writable disk: %w", err)
		}
		files = append(files, f)
	}
	if rec.FilesPort {
		f, err := listen(filepath.Join(r.dir(id), filesSocket))
		if err != nil {
			return files, fmt.Errorf("cannot listen for QEMU: %w", err)
		}
		files = append(files, f)
	}
	return files, nil
}

func shut(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// listen creates a listening socket before QEMU starts, so that a client can
// connect early. Later daemons connect to it as well.
func listen(path string) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	ln.SetUnlinkOnClose(false)
	f, err := ln.File()
	return f, errors.Join(err, ln.Close())
}

// readableKernel returns the path of a kernel that every user can read. A kernel
// that only root can read, as on some systems, is copied once.
func (r *Runtime) readableKernel() (string, error) {
	st, err := os.Stat(r.parts().kernel.Image)
	if err != nil {
		return "", fmt.Errorf("cannot find the kernel: %w", err)
	}
	if !r.rights.own || st.Mode()&0o004 != 0 {
		return r.parts().kernel.Image, nil
	}
	name, err := r.kernelCopy()
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(name); err == nil {
		return name, nil
	}
	if err := copyFor(name, r.parts().kernel.Image); err != nil {
		return "", fmt.Errorf("cannot copy the kernel: %w", err)
	}
	return name, nil
}

// kernelCopy returns the path at which readableKernel keeps a copy of the current
// kernel.
func (r *Runtime) kernelCopy() (string, error) {
	sum, err := r.sum.of(r.parts().kernel.Image)
	return filepath.Join(r.bootFiles(), sum+".kernel"), err
}

// copyFor copies the file from to name atomically, readable for every user.
func copyFor(name, from string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	tmp, err := os.CreateTemp(filepath.Dir(name), halfMade)
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = io.Copy(tmp, f)
	if err := errors.Join(err, tmp.Chmod(0o644), tmp.Close()); err != nil {
		return err
	}
	return appear(tmp.Name(), name)
}
