package shim_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

// dieTogether kills the shim after the daemon has closed everything that it holds,
// as if both were killed together.
func (b *bench) dieTogether(held ...*letGo) {
	b.t.Helper()
	for _, l := range held {
		l.close()
	}
	b.stop(syscall.SIGKILL)
}

// adoptShim connects to a shim that the watchdog has started, and makes the test
// end that shim.
func (b *bench) adoptShim() {
	b.t.Helper()
	b.connect()
	pid := b.c.Welcome.PID
	b.t.Cleanup(func() {
		_ = syscall.Kill(pid, syscall.SIGTERM)
		waittest.Until(b.t, "the shim that the watchdog started ends", func() bool { s := state(b.t, pid); return s == "gone" || s == "Z" })
	})
}

// TestBothKilledKeepsClients checks that, if the daemon and the shim are killed
// together, the clients in the queue, the binds that arrive and the port survive.
// The next shim is started by a daemon or, if there is none, by the watchdog.
func TestBothKilledKeepsClients(t *testing.T) {
	for _, daemon := range []bool{true, false} {
		t.Run(fmt.Sprintf("a daemon starts the next shim %v", daemon), func(t *testing.T) {
			t.Parallel()
			b := newBench(t).start()
			b.checkHandoff()
			addr, file := freeAddr(t, "tcp", "127.0.0.1"), filepath.Join(t.TempDir(), "go")
			s, fd := b.begin(b.handoff("a", 1, addr, "tcp4 a\nawait "+file+"\nbind a "+addr+"\nserve a"))
			var wg sync.WaitGroup
			ask := func(when string) {
				c, err := net.DialTimeout("tcp", addr, waitLimit) // this client waits in the queue
				if err != nil {
					t.Errorf("%s: %v", when, err)
					return
				}
				wg.Go(func() {
					defer c.Close()
					_ = c.SetDeadline(time.Now().Add(waitLimit))
					if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != "served\n" {
						t.Errorf("%s: answered %q, %v", when, line, err)
					}
				})
			}
			ask("before the kill")
			b.dieTogether(fd)
			ask("after the kill")
			if err := os.WriteFile(file, nil, 0o600); err != nil { // makes the program bind while there is no shim
				t.Fatal(err)
			}
			ask("while it binds")
			if daemon {
				b.start()
			} else {
				b.adoptShim()
			}
			ask("beside the next shim")
			wg.Wait()
			b.waitText(b.logPath("a"), "a=kept4;")
			errtest.None(t, syscall.Kill(s.PID, syscall.SIGKILL))
			b.exit("a", 1)
			if err := b.c.Unhold(waittest.Context(t), "a"); err != nil { // as a user would; now the port must be closed
				t.Fatal(err)
			}
			if c, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
				if err == nil {
					c.Close()
				}
				t.Errorf("a connection after the socket was closed: %v, want it refused", err)
			}
		})
	}
}

// TestKeeperReplaced checks that a watchdog that was killed or does not answer is
// replaced, and that the new one holds everything.
func TestKeeperReplaced(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			b := newBench(t).start()
			addr, other := freeAddr(t, "tcp", "127.0.0.1"), freeAddr(t, "tcp", "127.0.0.1")
			errtest.None(t, b.c.Hold(waittest.Context(t), "a", []string{addr}))
			first := watchdogOf(b.cmd.Process.Pid)
			if first == 0 {
				t.Fatal("there is no watchdog")
			}
			errtest.None(t, syscall.Kill(first, sig))
			// Before it is stopped, one of its threads could still answer.
			waittest.Until(t, "the watchdog is stopped or has ended", func() bool { s := state(t, first); return s == "T" || s == "Z" || s == "gone" })
			errtest.None(t, b.c.Hold(waittest.Context(t), "b", []string{other}))
			waittest.Until(t, "another watchdog", func() bool {
				dog := watchdogOf(b.cmd.Process.Pid)
				return dog != 0 && dog != first && listens(dog) >= 2
			})
			c, err := net.DialTimeout("tcp", addr, waitLimit)
			errtest.None(t, err)
			defer c.Close()
			b.dieTogether()
			b.start()
			l, err := b.c.Holds(waittest.Context(t))
			if err != nil || len(l) != 2 {
				t.Errorf("the next shim holds sockets of %v, %v; want those of a and b", l, err)
			}
			_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			var timeout net.Error
			if _, err := c.Read(make([]byte, 1)); !errors.As(err, &timeout) || !timeout.Timeout() {
				t.Errorf("the client in the queue: %v, want that it waits", err)
			}
		})
	}
}

// listens returns the number of sockets that a watchdog holds.
func listens(pid int) (n int) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	all, _ := os.ReadDir(dir)
	for _, e := range all {
		if to, err := os.Readlink(dir + "/" + e.Name()); err == nil && len(to) > 7 && to[:7] == "socket:" {
			n++
		}
	}
	return n - 2 // without its connection to the shim and its listener for the next shim
}

// TestDyingShim checks that a killed shim whose socket still listens is not taken
// for another shim, so that the watchdog thaws and keeps its descriptors. On a busy
// machine the kernel may not have closed all its descriptors yet.
func TestDyingShim(t *testing.T) {
	t.Parallel()
	b := newBench(t).start()
	_, pid, _ := b.frozen()
	addr := freeAddr(t, "tcp", "127.0.0.1")
	errtest.None(t, b.c.Hold(waittest.Context(t), "b", []string{addr}))
	open := listenerOf(t, b.cmd.Process.Pid)
	if state(t, pid) != "T" {
		t.Skip("the machine is so slow that the shim has thawed it")
	}
	b.dieTogether()
	waittest.Until(t, "the run is thawed", func() bool { return state(t, pid) != "T" })
	_ = syscall.Close(open) // nothing accepts on it
	b.adoptShim()
	if l, err := b.c.Holds(waittest.Context(t)); err != nil || len(l) != 1 {
		t.Errorf("the next shim holds sockets of %v, %v; want those of b", l, err)
	}
}

// listenerOf duplicates the unix socket on which a process listens.
func listenerOf(t *testing.T, pid int) int {
	t.Helper()
	pidfd, err := unix.PidfdOpen(pid, 0)
	errtest.None(t, err)
	defer unix.Close(pidfd)
	for fd := 3; fd < 200; fd++ {
		got, err := unix.PidfdGetfd(pidfd, fd, 0)
		if err == unix.EPERM {
			t.Skip("this machine does not let a parent duplicate descriptors")
		}
		if err != nil {
			continue
		}
		on, _ := unix.GetsockoptInt(got, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		domain, _ := unix.GetsockoptInt(got, unix.SOL_SOCKET, unix.SO_DOMAIN)
		if on == 1 && domain == unix.AF_UNIX {
			return got
		}
		unix.Close(got)
	}
	t.Fatal("it listens on no unix socket")
	return -1
}
