package share

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// become makes this thread, which is nobody else's, the owner of the directory
// for everything that it does with files from here on: the kernel refuses what
// it refuses the owner, and what is made is the owner's. There is no way back.
func (r *root) become() error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("cannot have a umask of its own: %w", err)
	}
	unix.Umask(0) // the guest's programs have theirs
	uid, gid := uintptr(r.st.Uid), uintptr(r.st.Gid)
	if os.Geteuid() != 0 || uid == 0 {
		return nil
	}
	// By the bare calls, which are for one thread: those of package syscall are
	// for all of them.
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return fmt.Errorf("cannot leave the groups of this user: %w", errno)
	}
	for _, id := range []struct{ call, to uintptr }{{unix.SYS_SETFSGID, gid}, {unix.SYS_SETFSUID, uid}} {
		unix.RawSyscall(id.call, id.to, 0, 0) // says only what it was before
		if now, _, _ := unix.RawSyscall(id.call, ^uintptr(0), 0, 0); now != id.to {
			return fmt.Errorf("cannot become user %d, who owns the workspace", uid)
		}
	}
	return nil
}
