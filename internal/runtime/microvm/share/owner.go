package share

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// become makes this thread act as the directory's owner in all further file
// operations. The kernel then enforces the owner's permissions, and new files
// belong to the owner. It cannot be undone, so the thread must end afterwards.
func (r *root) become() error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("cannot unshare the umask: %w", err)
	}
	unix.Umask(0) // the guest's programs apply their own umask
	uid, gid := uintptr(r.st.Uid), uintptr(r.st.Gid)
	if os.Geteuid() != 0 || uid == 0 {
		return nil
	}
	// Raw system calls affect one thread; those of package syscall affect all.
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return fmt.Errorf("cannot drop the supplementary groups: %w", errno)
	}
	for _, id := range []struct{ call, to uintptr }{{unix.SYS_SETFSGID, gid}, {unix.SYS_SETFSUID, uid}} {
		unix.RawSyscall(id.call, id.to, 0, 0) // returns only the previous value
		if now, _, _ := unix.RawSyscall(id.call, ^uintptr(0), 0, 0); now != id.to {
			return fmt.Errorf("cannot become user %d, who owns the workspace", uid)
		}
	}
	return nil
}
