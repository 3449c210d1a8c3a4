package containers

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"lull/internal/host/daemontest"
	"lull/internal/lib/scaletest"
)

// ip runs iproute2.
func ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", args, err, out)
	}
}

// machine is a network namespace that acts as a machine.
type machine struct{ name string }

func newMachine(t *testing.T, name string) machine {
	t.Helper()
	m := machine{fmt.Sprintf("lk%d%s", os.Getpid(), name)}
	ip(t, "netns", "add", m.name)
	t.Cleanup(func() { ip(t, "netns", "del", m.name) })
	ip(t, "-n", m.name, "link", "set", "lo", "up")
	return m
}

func (m machine) path() string { return "/run/netns/" + m.name }

// do runs f on a thread in the network namespace of m.
func (m machine) do(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		fd, err := unix.Open(m.path(), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			unix.Close(fd)
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// TestStoppedContainerFromElsewhere checks clients of a port that Docker
// publishes on every address, by docker-proxy and by address translation. Clients
// on another machine, on this one and in another container must all wait while
// the container is stopped, and then be answered by it. No rule may remain in the
// firewall.
func TestStoppedContainerFromElsewhere(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	_, err := exec.LookPath("ip")
	daemontest.Need(t, err, "iproute2")
	here, there := newMachine(t, "a"), newMachine(t, "b")
	ip(t, "-n", here.name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", there.name)
	for _, c := range []struct {
		m    machine
		addr string
	}{{here, "192.0.2.1/24"}, {there, "192.0.2.2/24"}} {
		ip(t, "-n", c.m.name, "addr", "add", c.addr, "dev", "eth0")
		ip(t, "-n", c.m.name, "link", "set", "eth0", "up")
	}
	daemontest.NeedRunc(t)
	engine := daemontest.StartDockerdIn(t, here.path())
	daemontest.Build(t)
	inside := filepath.Join(t.TempDir(), "lull")
	script := fmt.Sprintf("#!/bin/sh\nexec nsenter --net=%s %s \"$@\"\n", here.path(), daemontest.Program("lull"))
	if err := os.WriteFile(inside, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	k := dock{engine, daemontest.Start(t, daemontest.Config{Lull: inside, Args: []string{"--probe", "200ms", "--docker=" + engine.Socket()}})}
	k.Must("run", "-d", "--name", "web", "--label", "lull.pause-after=0", "--label", "lull.stop-after=300ms", "-p", "8080:8080",
		"box:1", "guest", "serve", "-listen", "0.0.0.0:8080")
	k.known("web")
	k.Must("run", "-d", "--name", "beside", "box:1", "sh", "-c", untilTerm)
	clients := map[string]func() error{
		"another machine":       func() error { return there.do(func() error { return say("192.0.2.1:8080", "hello") }) },
		"this machine":          func() error { return here.do(func() error { return say("192.0.2.1:8080", "hello") }) },
		"this machine, locally": func() error { return here.do(func() error { return say("127.0.0.1:8080", "hello") }) },
		"another container": func() error {
			out, err := exec.Command("/usr/bin/docker", "-H", "unix://"+k.Socket(), "exec", "beside", "sh", "-c", "echo hello | nc 192.0.2.1 8080").CombinedOutput()
			if err == nil && !strings.HasPrefix(string(out), "echo hello\n") {
				err = fmt.Errorf("it says %q", out)
			}
			return err
		},
	}
	for who, ask := range clients {
		daemontest.Wait(t, who+" is answered", func() (bool, string) { err := ask(); return err == nil, fmt.Sprint(err) })
	}
	rounds := scaletest.Count(t, "LULL_CONTAINER_STOPS", 1)
	for n := range rounds {
		k.stopped("web")
		answers := make(chan error, len(clients))
		for who, ask := range clients {
			go func() {
				err := ask()
				if err != nil {
					err = fmt.Errorf("%s: %w", who, err)
				}
				answers <- err
			}()
		}
		for range clients {
			if err := <-answers; err != nil {
				t.Errorf("round %d: %v", n+1, err)
			}
		}
		k.d.Await("web", "running")
		for who, ask := range clients { // one after the other, without lull in between
			if err := ask(); err != nil {
				t.Errorf("round %d, running: %s: %v", n+1, who, err)
			}
		}
	}
	t.Logf("REPORT %d stops, %d clients each, on %d ways into the port", rounds, 2*len(clients), len(clients))
}
