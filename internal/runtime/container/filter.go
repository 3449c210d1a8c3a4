package container

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// seccomp is a system call filter in runc's format.
type seccomp struct {
	Default string      `json:"defaultAction"`
	Archs   []string    `json:"architectures,omitempty"`
	Calls   []callsRule `json:"syscalls"`
}

type callsRule struct {
	Names  []string  `json:"names"`
	Action string    `json:"action"`
	Errno  *uint     `json:"errnoRet,omitempty"`
	Args   []argRule `json:"args,omitempty"`
}

type argRule struct {
	Index    uint   `json:"index"`
	Value    uint64 `json:"value"`
	ValueTwo uint64 `json:"valueTwo"`
	Op       string `json:"op"`
}

// denied lists the system calls that are denied to every container: those that
// affect the whole kernel or other containers' keys, and those that create
// namespaces, on which most container escapes rely. Docker denies them by default
// too.
var denied = []string{"acct", "add_key", "bpf", "clock_adjtime", "clock_settime", "create_module", "delete_module", "fanotify_init",
	"finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "get_kernel_syms", "init_module", "io_uring_enter", "io_uring_register",
	"io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "mount", "mount_setattr",
	"move_mount", "move_pages", "nfsservctl", "open_by_handle_at", "open_tree", "perf_event_open", "pivot_root", "process_vm_readv",
	"process_vm_writev", "query_module", "quotactl", "quotactl_fd", "reboot", "request_key", "setns", "settimeofday", "stime", "swapoff",
	"swapon", "_sysctl", "sysfs", "syslog", "umount", "umount2", "unshare", "uselib", "userfaultfd", "ustat", "vhangup", "vm86", "vm86old"}

// namespaceFlags are clone's flags that create namespaces.
var namespaceFlags = []uint64{unix.CLONE_NEWNS, unix.CLONE_NEWUTS, unix.CLONE_NEWIPC, unix.CLONE_NEWUSER, unix.CLONE_NEWPID,
	unix.CLONE_NEWNET, unix.CLONE_NEWCGROUP}

// filter denies the calls in denied and allows all others.
func filter() *seccomp {
	f := &seccomp{Default: "SCMP_ACT_ALLOW", Calls: []callsRule{
		{Names: denied, Action: "SCMP_ACT_ERRNO"},
		// clone3 passes its flags in memory, which a filter cannot read. C
		// libraries fall back to clone on ENOSYS.
		{Names: []string{"clone3"}, Action: "SCMP_ACT_ERRNO", Errno: new(uint(unix.ENOSYS))},
	}}
	for _, flag := range namespaceFlags {
		f.Calls = append(f.Calls, callsRule{Names: []string{"clone"}, Action: "SCMP_ACT_ERRNO",
			Args: []argRule{{0, flag, flag, "SCMP_CMP_MASKED_EQ"}}})
	}
	switch runtime.GOARCH { // each architecture has a second table of system calls, for 32-bit programs
	case "amd64":
		f.Archs = []string{"SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"}
	case "arm64":
		f.Archs = []string{"SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"}
	}
	return f
}

// Filters returns why the system calls of containers cannot be filtered on this
// machine, or nil if they can.
func Filters(runc string) error {
	if _, err := os.Stat("/proc/sys/kernel/seccomp/actions_avail"); err != nil {
		return errors.New("this kernel has no seccomp filter")
	}
	b, err := exec.Command(runc, "--version").Output()
	if err != nil {
		return fmt.Errorf("cannot ask runc for its version: %w", err)
	}
	if !strings.Contains(string(b), "libseccomp") {
		return errors.New("this runc was built without seccomp")
	}
	return nil
}
