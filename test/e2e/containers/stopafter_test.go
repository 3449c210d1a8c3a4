package containers

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/host/daemontest"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/hostctl"
)

// stopsAfter runs a server that lull pauses on request and stops soon afterwards.
func (k dock) stopsAfter(name, after string) (at string) {
	k.d.T.Helper()
	return k.serve(name, "--label", "lull.stop-after="+after)
}

// stopped waits until lull has stopped a container.
func (k dock) stopped(name string) hostctl.Instance {
	k.d.T.Helper()
	if err := k.d.Force(name); err != nil {
		k.d.T.Fatal(err)
	}
	o := k.d.Await(name, "stopped")
	k.is(name, "exited")
	return o
}

// refused checks that a port refuses connections and can be bound.
func (k dock) refused(at string) {
	k.d.T.Helper()
	if err := say(at, "hello"); !errors.Is(err, syscall.ECONNREFUSED) {
		k.d.T.Errorf("a client of %s: %v", at, err)
	}
}

// TestStoppedContainer checks that lull stops a container some time after it was
// paused, and that clients of its published port start it again. Each client must
// be answered, and none refused. A container that a user stops must stay stopped.
func TestStoppedContainer(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	at := k.stopsAfter("web", "300ms")
	for n := range scaletest.Count(t, "LULL_CONTAINER_STOPS", 1) {
		o := k.stopped("web")
		if !o.StartsOnConnection {
			t.Fatalf("no connection starts it: %s", daemontest.Describe(o))
		}
		clients := make(chan error, 5)
		for range cap(clients) {
			go func() { clients <- say(at, "hello") }()
		}
		for range cap(clients) {
			if err := <-clients; err != nil {
				t.Errorf("round %d: %v", n, err)
			}
		}
		if o := k.d.Await("web", "running"); o.LastResumedBy != "connection" {
			t.Errorf("started by %s", o.LastResumedBy)
		}
	}

	// A user starts it with docker.
	k.stopped("web")
	k.Must("start", "web")
	k.known("web")
	k.answers(at)

	// A user stops it with docker, or with lull.
	k.Must("stop", "-t", "0", "web")
	k.d.Await("web", "stopped")
	k.refused(at)
	k.Must("start", "web")
	k.known("web")
	k.answers(at)
	k.stopped("web")
	if _, err := k.d.Do(t.Context(), "web", "stop", nil); err != nil {
		t.Fatal(err)
	}
	k.refused(at)
	k.is("web", "exited")
	k.Must("start", "web")
	k.known("web")
	k.answers(at)

	// The daemon is killed and restarted while the container is stopped.
	k.stopped("web")
	k.d.Kill()
	answer := make(chan error, 1)
	go func() { answer <- say(at, "hello") }()
	k.d.Boot()
	if err := <-answer; err != nil {
		t.Errorf("across a restart of the daemon: %v", err)
	}
	k.d.Await("web", "running")

	// The daemon is killed and not restarted: the port is free, and a user can
	// start the container.
	k.stopped("web")
	k.d.Kill()
	daemontest.Wait(t, "the port is let go", func() (bool, string) {
		err := say(at, "hello")
		return errors.Is(err, syscall.ECONNREFUSED), ""
	})
	k.Must("start", "web")
	k.answers(at)
	k.d.Boot()
	k.known("web")
	k.answers(at)

	// Docker is killed and restarted.
	k.stopped("web")
	k.Kill()
	go func() { answer <- say(at, "hello") }()
	k.Start()
	if err := <-answer; err != nil {
		t.Errorf("across a restart of Docker: %v", err)
	}
	k.d.Await("web", "running")

	// The container is removed.
	k.stopped("web")
	k.Must("rm", "web")
	k.forgotten("web")
	k.refused(at)
}

// TestStopIsTakenOver kills the daemon in the middle of a stop, which the next
// daemon completes. No client that comes in between may reach the program that is
// about to exit.
func TestStopIsTakenOver(t *testing.T) {
	k := newDock(t)
	at := daemontest.Addr(t)
	// The program stops serving when it is asked to exit, and exits once the file
	// /end exists.
	const program = `trap 'kill $!; while [ ! -e /end ]; do sleep 0.05; done; rm /end; exit' TERM; guest serve -listen 0.0.0.0:8080 & wait; wait`
	k.Must("run", "-d", "--name", "web", "--label", "lull.pause-after=0", "--label", "lull.stop-after=300ms", "-p", at+":8080", "box:1", "sh", "-c", program)
	k.known("web")
	verbs := []string{"stop", "restart"}
	for _, verb := range verbs[:min(len(verbs), scaletest.N(t, 1))] {
		k.answers(at)
		if verb == "stop" {
			if err := k.d.Force("web"); err != nil {
				t.Fatal(err)
			}
		} else {
			go func() { _, _ = k.d.Do(context.WithoutCancel(t.Context()), "web", "restart", nil) }() // fails, because the daemon is killed
		}
		k.d.Await("web", "stopping")
		daemontest.Wait(t, "its server has ended", func() (bool, string) {
			out := k.Say("top", "web")
			return strings.Count(out, "guest serve") == 1, out // only in the shell's own arguments
		})
		k.d.Kill()
		k.d.Boot()
		answer := make(chan error, 1)
		go func() { answer <- say(at, "hello") }()
		daemontest.Wait(t, "the client waits, or has an answer", func() (bool, string) {
			b, err := os.ReadFile("/proc/net/tcp")
			return err == nil && (len(answer) > 0 || opening(at).Match(b)), string(b)
		})
		k.Must("exec", "web", "touch", "/end")
		if err := <-answer; err != nil {
			t.Errorf("%s: a client that came while it was completed: %v", verb, err)
		}
		k.d.Await("web", "running")
	}
}

// opening matches a connection to an address in state SYN_SENT in /proc/net/tcp.
func opening(at string) *regexp.Regexp {
	a := netip.MustParseAddrPort(at)
	b := a.Addr().As4()
	return regexp.MustCompile(fmt.Sprintf(` %02X%02X%02X%02X:%04X 02 `, b[3], b[2], b[1], b[0], a.Port()))
}

// TestStoppedContainersAreTakenOver checks that, while one daemon takes over from
// another, no port of several stopped containers refuses a client, in whatever
// order the next daemon takes the containers over.
func TestStoppedContainersAreTakenOver(t *testing.T) {
	k := newDock(t)
	at := map[string]netip.AddrPort{}
	for n := range 4 {
		name := fmt.Sprintf("web%d", n)
		at[name] = netip.MustParseAddrPort(k.stopsAfter(name, "300ms"))
	}
	for name := range at {
		k.stopped(name)
	}
	k.d.Kill()
	var wg sync.WaitGroup
	for name, to := range at {
		wg.Go(func() {
			tries := 0
			for ; ; tries++ {
				over, err := knock(to)
				if err != nil {
					t.Errorf("%s: client %d: %v", name, tries+1, err)
				}
				if over || err != nil {
					break
				}
			}
			t.Logf("%s: %d clients", name, tries)
		})
	}
	k.d.Boot()
	wg.Wait()
}

// knock begins a connection and abandons it at once if it is not established.
// made reports whether it was established. The error is that of a refused
// connection.
func knock(to netip.AddrPort) (made bool, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
	if errors.Is(err, unix.EINPROGRESS) {
		if _, perr := unix.Getpeername(fd); perr != nil {
			err = nil
			if code, serr := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); serr == nil && code != 0 {
				err = unix.Errno(code)
			}
			return false, err
		}
		err = nil
	}
	return err == nil, err
}

// TestNotStopped checks that a container that no client could start again stays
// paused.
func TestNotStopped(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	for name, args := range map[string][]string{"quiet": nil, "random": {"-p", "8080"}} {
		args = append([]string{"run", "-d", "--name", name, "--label", "lull.pause-after=0", "--label", "lull.stop-after=100ms"}, args...)
		k.Must(append(args, "box:1", "guest", "serve", "-listen", "0.0.0.0:8080")...)
		k.known(name)
		if err := k.d.Force(name); err != nil {
			t.Fatal(err)
		}
		k.d.Until(name, "it says why it is not stopped", func(o hostctl.Instance) bool {
			return o.State == "paused" && strings.Contains(o.StatusReason, "not stopped")
		})
		k.is(name, "paused")
	}
	if o := k.d.Show("quiet"); time.Since(*o.LastPausedAt) < 0 {
		t.Errorf("%s", daemontest.Describe(o))
	}
}
