package containers

import (
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/hostctl"
)

// stopsAfter runs a server that lull pauses on request, and stops soon after.
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

// refused expects that nothing holds a port.
func (k dock) refused(at string) {
	k.d.T.Helper()
	if err := say(at, "hello"); !errors.Is(err, syscall.ECONNREFUSED) {
		k.d.T.Errorf("a client of %s: %v", at, err)
	}
}

// TestStoppedContainer: lull stops a container some time after it was paused, and
// clients of its published port start it again. Each is answered, and none is
// refused. What a user stops stays stopped.
func TestStoppedContainer(t *testing.T) {
	k := newDock(t)
	at := k.stopsAfter("web", "300ms")
	for n := range scaletest.Count(t, "LULL_CONTAINER_STOPS", 3) {
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

	// The daemon is killed while it is stopped, and comes back.
	k.stopped("web")
	k.d.Kill()
	answer := make(chan error, 1)
	go func() { answer <- say(at, "hello") }()
	k.d.Boot()
	if err := <-answer; err != nil {
		t.Errorf("across a restart of the daemon: %v", err)
	}
	k.d.Await("web", "running")

	// It does not come back: nothing holds the port, and a user can start it.
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

	// Docker is killed, and comes back.
	k.stopped("web")
	k.Kill()
	go func() { answer <- say(at, "hello") }()
	k.Start()
	if err := <-answer; err != nil {
		t.Errorf("across a restart of Docker: %v", err)
	}
	k.d.Await("web", "running")

	// It is removed.
	k.stopped("web")
	k.Must("rm", "web")
	k.forgotten("web")
	k.refused(at)
}

// TestNotStopped: a container that no client could start again stays paused.
func TestNotStopped(t *testing.T) {
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
