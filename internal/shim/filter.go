package shim

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// trapped is a system call that the filter reports, with its architecture:
// bind(2) and, for programs with an exposed unix socket, unlink(2) and unlinkat(2).
// Those of 32-bit architectures are for 32-bit programs on a 64-bit kernel.
type trapped struct {
	arch uint32
	nr   uint32
}

const (
	archI386   = 0x40000003
	archX86_64 = 0xc000003e
	archARM    = 0x40000028
	archARM64  = 0xc00000b7

	socketcall     = 102 // of i386: bind is its subcall 2, whose arguments are in memory
	socketcallBind = 2
)

var trappedBinds = []trapped{
	{archX86_64, 49}, {archX86_64, 49 | 0x40000000}, // the latter is x32
	{archARM64, 200}, {archI386, 361}, {archARM, 282},
}

// trappedUnlinks lists the calls that remove a file. The value is true for
// unlinkat(2).
var trappedUnlinks = map[trapped]bool{
	{archX86_64, 87}: false, {archX86_64, 87 | 0x40000000}: false, {archX86_64, 263}: true, {archX86_64, 263 | 0x40000000}: true,
	{archARM64, 35}: true, {archI386, 10}: false, {archI386, 301}: true, {archARM, 10}: false, {archARM, 328}: true,
}

// bindFilter returns a seccomp program that reports bind(2) to its listener, and
// the removal of files too if unlinks is set. It allows all other calls.
func bindFilter(unlinks bool) []unix.SockFilter {
	const (
		load   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		ret    = unix.BPF_RET | unix.BPF_K
		nr     = 0 // these are offsets in struct seccomp_data
		arch   = 4
		first  = 16
		allow  = 0x7fff0000
		report = unix.SECCOMP_RET_USER_NOTIF
	)
	calls := map[uint32][]uint32{}
	var archs []uint32
	all := trappedBinds
	if unlinks {
		all = slices.AppendSeq(slices.Clone(all), maps.Keys(trappedUnlinks))
	}
	for _, t := range all {
		if calls[t.arch] == nil {
			archs = append(archs, t.arch)
		}
		calls[t.arch] = append(calls[t.arch], t.nr)
	}
	prog := []unix.SockFilter{{Code: load, K: arch}}
	for _, a := range archs {
		block := []unix.SockFilter{{Code: load, K: nr}}
		for _, n := range calls[a] {
			block = append(block, unix.SockFilter{Code: equal, K: n, Jf: 1}, unix.SockFilter{Code: ret, K: report})
		}
		if a == archI386 {
			block = append(block, unix.SockFilter{Code: equal, K: socketcall, Jf: 3}, unix.SockFilter{Code: load, K: first},
				unix.SockFilter{Code: equal, K: socketcallBind, Jf: 1}, unix.SockFilter{Code: ret, K: report})
		}
		block = append(block, unix.SockFilter{Code: ret, K: allow})
		prog = append(append(prog, unix.SockFilter{Code: equal, K: a, Jf: uint8(len(block))}), block...)
	}
	return append(prog, unix.SockFilter{Code: ret, K: allow})
}

// installFilter puts the calling thread, and the program that it will execute,
// under bindFilter. It returns the descriptor on which binds are reported. Without
// CAP_SYS_ADMIN the kernel requires no_new_privs, which deprives setuid programs of
// their privileges. plain reports whether no_new_privs was not needed.
func installFilter(unlinks bool) (fd int, plain bool, err error) {
	prog := bindFilter(unlinks)
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	const setModeFilter = 1
	install := func() (int, syscall.Errno) {
		fd, _, e := unix.RawSyscall(unix.SYS_SECCOMP, setModeFilter,
			unix.SECCOMP_FILTER_FLAG_NEW_LISTENER|unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW, uintptr(unsafe.Pointer(&fprog)))
		return int(fd), e
	}
	fd, e := install()
	plain = e != unix.EACCES
	if !plain {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return -1, false, fmt.Errorf("set no_new_privs: %w", err)
		}
		fd, e = install()
	}
	runtime.KeepAlive(prog)
	switch e {
	case 0:
		return fd, plain, nil
	case unix.EBUSY:
		return -1, false, fmt.Errorf("install a seccomp filter: this host itself runs under one that reports system calls, and the kernel allows one: %w", e)
	}
	return -1, false, fmt.Errorf("install a seccomp filter: %w", e)
}

// Messages on the exec stage's handoff socket. Each is one byte; with the first
// two, the descriptor is sent.
const (
	saysFiltered  = 'f' // the program's binds are reported
	saysNoPrivs   = 'p' // the same, and the program runs with no_new_privs
	saysNoFilter  = 'n' // the program runs without a filter; the reason follows
	saysContinue  = 'k' // the shim's answer: execute the program
	maxStageWords = 1024
)

// filterSelf is the exec stage's part of a bind handoff. It installs the filter,
// passes the descriptor to the shim, and waits until the shim has it. If the filter
// cannot be installed, the program starts without one; filtered is false then.
func filterSelf(socket int, unlinks bool) (filtered bool, err error) {
	fd, plain, err := installFilter(unlinks)
	filtered = err == nil
	switch {
	case err != nil:
		words := append([]byte{saysNoFilter}, err.Error()...)
		err = unix.Sendmsg(socket, words[:min(len(words), maxStageWords)], nil, nil, unix.MSG_NOSIGNAL)
	case plain:
		err = unix.Sendmsg(socket, []byte{saysFiltered}, unix.UnixRights(fd), nil, unix.MSG_NOSIGNAL)
	default:
		err = unix.Sendmsg(socket, []byte{saysNoPrivs}, unix.UnixRights(fd), nil, unix.MSG_NOSIGNAL)
	}
	if fd >= 0 {
		unix.Close(fd)
	}
	if err != nil {
		return filtered, err
	}
	unix.CloseOnExec(socket)
	for {
		var b [1]byte
		n, err := unix.Read(socket, b[:])
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return filtered, err
		case n == 0:
			return filtered, fmt.Errorf("the shim did not take the descriptor: %w", unix.EPIPE)
		}
		return filtered, nil
	}
}

// stageReport is the report of the exec stage.
type stageReport struct {
	fd      int  // on which the program's binds are reported; -1 without a filter
	noPrivs bool // the program runs with no_new_privs
	why     string
}

// readStage reads the report of the exec stage from the other end of its handoff
// socket. An error means that the stage has ended or does not answer.
func readStage(socket int) (stageReport, error) {
	out := stageReport{fd: -1}
	limit := unix.NsecToTimeval(stageLimit.Nanoseconds())
	if err := unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return out, err
	}
	buf, oob := make([]byte, maxStageWords), make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := unix.Recvmsg(socket, buf, oob, unix.MSG_CMSG_CLOEXEC)
	for err == unix.EINTR {
		n, oobn, _, _, err = unix.Recvmsg(socket, buf, oob, unix.MSG_CMSG_CLOEXEC)
	}
	if err != nil {
		return out, err
	}
	if n == 0 {
		return out, unix.EPIPE
	}
	if buf[0] == saysNoFilter {
		out.why = string(buf[1:n])
		return out, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		return out, fmt.Errorf("cannot take the descriptor of the filter: %d messages: %w", len(msgs), err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return out, fmt.Errorf("cannot take the descriptor of the filter: %w", err)
	}
	out.fd, out.noPrivs = fds[0], buf[0] == saysNoPrivs
	return out, nil
}
