package process

import (
	"errors"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
	"lull/internal/platform/sockets"
)

// TestListenersThatMove checks that a socket that was moved after it was found
// causes an error and a new search, and that a socket that may not be duplicated is
// listed as one that cannot be watched.
func TestListenersThatMove(t *testing.T) {
	w := &Work{r: &Runtime{}, net: &namespace{}}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	errtest.None(t, err)
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	errtest.None(t, err)
	defer f.Close()
	in, err := sockets.Inspect(int(f.Fd()))
	errtest.None(t, err)
	file, err := os.Open(os.DevNull)
	errtest.None(t, err)
	defer file.Close()
	at := place{os.Getpid(), int(f.Fd())}
	for name, row := range map[string]struct {
		at    place
		found bool
	}{
		"there":              {at, true},
		"closed":             {place{at.pid, 1 << 19}, false},
		"replaced by a file": {place{at.pid, int(file.Fd())}, false},
		"of no process":      {place{1 << 22, 3}, false},
	} {
		got, err := w.listenersAmong(map[uint64]place{in.Inode: row.at})
		if row.found && (err != nil || len(got) != 1 || !got[0].Watchable || got[0].Addr != l.Addr().String()) ||
			!row.found && (!errors.Is(err, sockets.ErrGone) || got != nil) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	got, err := w.hiddenListeners(nil, map[uint64]place{in.Inode: at}, unix.EPERM)
	if err != nil || len(got) != 1 || got[0].Watchable || got[0].Why == "" || got[0].Addr != l.Addr().String() {
		t.Errorf("one that may not be duplicated: %+v, %v", got, err)
	}
}
