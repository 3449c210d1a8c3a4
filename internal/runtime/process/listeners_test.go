package process

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"lull/internal/platform/sockets"
)

// TestListenersThatMove checks that a socket that has moved since it was found
// is an error, after which the search is repeated, and that only one that may
// not be duplicated cannot be watched, as long as the program runs.
func TestListenersThatMove(t *testing.T) {
	tcp := []sockets.Socket{{Local: netip.MustParseAddrPort("127.0.0.1:80"), Inode: 1}, {Local: netip.MustParseAddrPort("127.0.0.1:81"), Inode: 2}}
	own := map[uint64]place{1: {pid: 10, fd: 3}}
	for errno, watchable := range map[unix.Errno]bool{unix.EBADF: false, unix.ESRCH: false, unix.EPERM: false, 0: true} {
		l, err := listenersAmong(tcp, nil, own, func(pid int, fds []int) ([]int, error) {
			if errno != 0 {
				return nil, &sockets.DupError{PID: pid, FD: fds[0], Err: errno}
			}
			return nil, nil
		})
		switch moved := errno == unix.EBADF || errno == unix.ESRCH; {
		case moved && (!errors.Is(err, sockets.ErrGone) || l != nil):
			t.Errorf("moved (%v): %v, %v", errno, l, err)
		case !moved && (err != nil || len(l) != 1 || l[0].Watchable != watchable || (l[0].Why == "") != watchable):
			t.Errorf("%v: %+v, %v", errno, l, err)
		}
	}
}
