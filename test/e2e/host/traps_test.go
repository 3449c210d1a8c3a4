package host

import (
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/lib/waittest"
)

// TestDuplicatesAreGone checks that no duplicate of a socket outlives its
// program: when a paused or just woken program is killed, its connection must end
// and its port must be free at once.
func TestDuplicatesAreGone(t *testing.T) {
	t.Parallel()
	d := host(t, "--probe", "100ms", "--pause-after", "200ms")
	s, addr := web(t, "gone", false)
	s.Restart = "no"
	s.QuietConnectionAfter = *daemontest.Seconds(100 * time.Millisecond)
	for n := range 10 {
		if n == 0 {
			d.Launch(s)
		} else {
			d.Must("gone", "start")
		}
		c := mustDial(t, addr)
		errtest.None(t, c.echo("hello"))
		d.Await("gone", "paused")
		pid := d.Show("gone").PID
		if n%2 == 0 { // every second time, kill it just after a wake
			errtest.None(t, c.echo("wake"))
		}
		errtest.None(t, syscall.Kill(pid, syscall.SIGKILL))
		if _, err := io.ReadAll(c.r); err != nil && n%2 == 0 { // the program's exit must end its connection
			var ne net.Error
			if asNet(err, &ne) && ne.Timeout() {
				t.Fatalf("the connection of a dead program stays open: %v", err)
			}
		}
		var ln net.Listener
		daemontest.Wait(t, "the port of a dead program is free", func() (bool, string) {
			var err error
			ln, err = net.Listen("tcp", addr)
			return err == nil, fmt.Sprint(err)
		})
		ln.Close()
		d.Await("gone", "stopped")
	}
	t.Log("REPORT duplicates: 10 programs killed while paused or just woken, each connection ended and each port was free")
}

func asNet(err error, into *net.Error) bool {
	ne, ok := err.(net.Error)
	*into = ne
	return ok
}

// TestNoLeaks checks that hundreds of pauses and wakes leak no descriptor and no
// goroutine.
func TestNoLeaks(t *testing.T) {
	t.Parallel()
	cycles := scaletest.Count(t, "LULL_HOST_CYCLES", 200)
	d := host(t, "--probe", "1s")
	var addrs, names []string
	for n, relay := range []bool{false, true, false, true} {
		s, addr := web(t, fmt.Sprintf("leak%d", n), relay)
		d.Launch(s)
		addrs, names = append(addrs, addr), append(names, s.Name)
	}
	cycle := func(n int) {
		name, addr := names[n%len(names)], addrs[n%len(addrs)]
		daemontest.Wait(t, name+" can be paused", func() (bool, string) {
			_, err := d.Do(t.Context(), name, "pause", nil)
			if err != nil && refused(err) == "" {
				t.Fatal(err)
			}
			return err == nil, fmt.Sprint(err)
		})
		mustAnswer(t, addr)
	}
	for n := range 40 { // first open everything that is opened only once
		cycle(n)
	}
	look := func() (daemon, shim, goroutines int) {
		st, err := d.Status(t.Context())
		errtest.None(t, err)
		return openFiles(t, d.PID()), openFiles(t, d.ShimPID()), st.Goroutines
	}
	files, shimFiles, routines := look()
	begin := time.Now()
	for n := range cycles {
		cycle(n)
	}
	took := time.Since(begin)
	var nowFiles, nowShim, nowRoutines int
	ok := waittest.Within(daemontest.WaitLimit, func() bool {
		nowFiles, nowShim, nowRoutines = look()
		return nowFiles <= files+4 && nowShim <= shimFiles+2 && nowRoutines <= routines+4
	})
	t.Logf("REPORT leaks: %d pauses and wakes in %s; open files of the daemon %d, then %d; of the shim %d, then %d; goroutines %d, then %d",
		cycles, took.Round(time.Millisecond), files, nowFiles, shimFiles, nowShim, routines, nowRoutines)
	if !ok {
		t.Error("something is left of each cycle")
	}
}

func openFiles(t *testing.T, pid int) int {
	t.Helper()
	l, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/fd")
	errtest.None(t, err)
	return len(l)
}
