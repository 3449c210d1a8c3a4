package shim_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
	"lull/internal/lib/freeport"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/shimctl"
)

// script runs the steps of a test program, one per line, and prints the result of
// each bind.
func script(steps string) int {
	socks := map[string]int{}
	lines := strings.Split(strings.TrimSpace(steps), "\n")
	for n, line := range lines {
		f := strings.Fields(line)
		var err error
		switch f[0] {
		case "tcp4", "tcp6", "udp4", "udp6":
			family, kind := unix.AF_INET, unix.SOCK_STREAM
			if strings.HasSuffix(f[0], "6") {
				family = unix.AF_INET6
			}
			if strings.HasPrefix(f[0], "udp") {
				kind = unix.SOCK_DGRAM
			}
			socks[f[1]], err = unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
		case "reuseport":
			err = unix.SetsockoptInt(socks[f[1]], unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		case "v6only":
			err = unix.SetsockoptInt(socks[f[1]], unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
		case "bind":
			report(f[1], socks[f[1]], f[2])
		case "thread":
			done := make(chan struct{})
			go func() { runtime.LockOSThread(); report(f[1], socks[f[1]], f[2]); close(done) }()
			<-done
		case "many": // binds other ports too
			var wg sync.WaitGroup
			for range 50 {
				wg.Go(func() {
					if l, err := net.Listen("tcp", "127.0.0.1:0"); err == nil {
						l.Close()
					} else {
						fmt.Println("many:", err)
					}
				})
			}
			report(f[1], socks[f[1]], f[2])
			wg.Wait()
		case "recv":
			var n int
			buf := make([]byte, 100)
			n, _, err = unix.Recvfrom(socks[f[1]], buf, 0)
			fmt.Printf("got=%s;\n", buf[:n])
		case "unix", "unixgram":
			kind := map[string]int{"unix": unix.SOCK_STREAM, "unixgram": unix.SOCK_DGRAM}[f[0]]
			socks[f[1]], err = unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
		case "bindunix":
			reportUnix(f[1], socks[f[1]], unix.Bind(socks[f[1]], &unix.SockaddrUnix{Name: f[2]}))
		case "unlink":
			err = unix.Unlink(f[1])
		case "unlinkat": // removes a file, given relative to a directory
			var dir int
			if dir, err = unix.Open(f[1], unix.O_PATH|unix.O_CLOEXEC, 0); err == nil {
				err = unix.Unlinkat(dir, f[2], 0)
			}
		case "exists":
			fmt.Printf("exists=%v;\n", exists(f[1]))
		case "cd":
			err = os.Chdir(f[1])
		case "umask":
			var mask int
			if _, err = fmt.Sscanf(f[1], "%o", &mask); err == nil {
				unix.Umask(mask)
			}
		case "mode":
			var st unix.Stat_t
			err = unix.Stat(f[1], &st)
			fmt.Printf("mode=%o;\n", st.Mode&0o7777)
		case "serveuid": // answers each client with the client's user
			err = unix.Listen(socks[f[1]], 128)
			for err == nil {
				var c int
				if c, _, err = unix.Accept4(socks[f[1]], unix.SOCK_CLOEXEC); err == nil {
					peer, perr := unix.GetsockoptUcred(c, unix.SOL_SOCKET, unix.SO_PEERCRED)
					if perr == nil {
						_, err = fmt.Fprintf(os.NewFile(uintptr(c), "client"), "user %d\n", peer.Uid)
					}
					unix.Close(c)
				}
			}
		case "close":
			err = unix.Close(socks[f[1]])
		case "netns":
			runtime.LockOSThread()
			err = unix.Unshare(unix.CLONE_NEWNET)
		case "exec":
			if err = os.Setenv("LULL_TEST_SCRIPT", strings.Join(lines[n+1:], "\n")); err == nil {
				err = unix.Exec("/proc/self/exe", os.Args[:1], os.Environ())
			}
		case "await":
			for !exists(f[1]) {
				<-time.After(time.Millisecond)
			}
		case "serve": // answers clients until it is killed
			err = unix.Listen(socks[f[1]], 128) // with a shorter backlog, the kernel itself drops clients on a busy machine
			for err == nil {
				var c int
				if c, _, err = unix.Accept4(socks[f[1]], unix.SOCK_CLOEXEC); err == nil {
					_, err = unix.Write(c, []byte("served\n"))
					unix.Close(c)
				}
			}
		}
		if err != nil {
			fmt.Println("cannot", line, err)
			return 1
		}
	}
	fmt.Println("done")
	return 0
}

// reportUnix prints whether the socket was replaced by a listening one.
func reportUnix(name string, fd int, err error) {
	what := "own"
	if on, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); on == 1 {
		what = "kept"
	}
	if err != nil {
		what = err.Error()
	}
	fmt.Printf("%s=%s;\n", name, what)
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

// report binds a socket, and prints whether it was replaced by a listening one.
func report(name string, fd int, addr string) {
	ap := netip.MustParseAddrPort(addr)
	var sa unix.Sockaddr = &unix.SockaddrInet6{Port: int(ap.Port()), Addr: ap.Addr().As16()}
	if domain, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); domain == unix.AF_INET {
		sa = &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}
	}
	err := unix.Bind(fd, sa)
	on, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	domain, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	what := "own"
	switch {
	case err != nil:
		what = err.Error()
	case on == 1:
		what = fmt.Sprintf("kept%d", map[int]int{unix.AF_INET: 4, unix.AF_INET6: 6}[domain])
	}
	fmt.Printf("%s=%s;\n", name, what)
}

// handoff returns the start of a script whose binds of addr are handed over.
func (b *bench) handoff(id string, run uint64, addr, steps string) shimctl.Start {
	m := b.launch(id, run, "")
	m.Command = []string{b.exe}
	// The race detector would otherwise delay the program's exit by a second.
	m.Env = append(m.Env, "LULL_TEST_SCRIPT="+steps, "GORACE=atexit_sleep_ms=0")
	m.Handoff = []string{addr}
	return m
}

func (b *bench) checkHandoff() {
	b.t.Helper()
	c, err := b.c.CheckHandoff(waittest.Context(b.t))
	if err != nil {
		b.t.Fatal(err)
	}
	if c.Why != "" {
		b.t.Skipf("sockets cannot be handed over here: %s", c.Why)
	}
}

// begin starts a run, and returns the descriptor on which its binds are reported.
func (b *bench) begin(m shimctl.Start) (shimctl.Started, *letGo) {
	b.t.Helper()
	s, fd, err := b.c.StartHandoff(waittest.Context(b.t), m)
	if err != nil {
		b.t.Fatal(err)
	}
	// There is no descriptor if the program has already ended.
	l := &letGo{FD: fd}
	b.t.Cleanup(func() { l.close(); _ = syscall.Kill(-s.PID, syscall.SIGKILL) })
	return s, l
}

// letGo closes a descriptor at most once, because a concurrent test may soon have
// the same number.
type letGo struct {
	FD   int
	once sync.Once
}

func (l *letGo) close() { l.once.Do(func() { shimctl.CloseAll([]int{l.FD}) }) }

func freeAddr(t *testing.T, network, host string) string {
	t.Helper()
	port, err := freeport.Take()
	errtest.None(t, err)
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	l, err := net.Listen(network, addr)
	if err != nil {
		t.Skipf("this machine cannot listen on %s: %v", host, err)
	}
	l.Close()
	return addr
}

// TestHandoffOfBinds checks which binds get the held socket, and which address form
// that socket then has.
func TestHandoffOfBinds(t *testing.T) {
	b := newBench(t).start()
	b.checkHandoff()
	for n, row := range []struct{ name, host, steps, want string }{
		{"the exposed address", "127.0.0.1", "tcp4 a\nbind a 127.0.0.1:P", "a=kept4"},
		{"another port", "127.0.0.1", "tcp4 a\nbind a 127.0.0.1:0", "a=own"},
		{"another address", "127.0.0.1", "tcp4 a\nbind a 127.0.0.2:P", "a=own"},
		{"UDP", "127.0.0.1", "udp4 a\nbind a 127.0.0.1:P", "a=own"},
		{"closed and bound again", "127.0.0.1", "tcp4 a\nbind a 127.0.0.1:P\nclose a\ntcp4 b\nbind b 127.0.0.1:P", "a=kept4 b=kept4"},
		{"twice", "127.0.0.1", "tcp4 a\nbind a 127.0.0.1:P\ntcp4 b\nbind b 127.0.0.1:P", "a=kept4 b=address already in use"},
		{"twice with SO_REUSEPORT", "127.0.0.1", "tcp4 a\nreuseport a\nbind a 127.0.0.1:P\ntcp4 b\nreuseport b\nbind b 127.0.0.1:P", "a=kept4 b=kept4"},
		{"mapped into IPv6", "127.0.0.1", "tcp6 a\nbind a [::ffff:127.0.0.1]:P", "a=kept6"},
		{"every address of IPv4", "127.0.0.1", "tcp4 a\nbind a 0.0.0.0:P", "a=kept4"},
		{"every address of both families", "127.0.0.1", "tcp6 a\nbind a [::]:P", "a=kept6"},
		{"IPv6", "::1", "tcp6 a\nbind a [::1]:P", "a=kept6"},
		{"every address of IPv6 alone", "::1", "tcp6 a\nv6only a\nbind a [::]:P", "a=kept6"},
		{"after exec", "127.0.0.1", "exec\ntcp4 a\nbind a 127.0.0.1:P", "a=kept4"},
		{"of a thread", "127.0.0.1", "tcp4 a\nthread a 127.0.0.1:P", "a=kept4"},
		{"among many", "127.0.0.1", "tcp4 a\nmany a 127.0.0.1:P", "a=kept4"},
		{"in another network", "127.0.0.1", "netns\ntcp4 a\nbind a 127.0.0.1:P", "a=own"},
	} {
		t.Run(row.name, func(t *testing.T) {
			if strings.HasPrefix(row.steps, "netns") && os.Geteuid() != 0 {
				t.Skip("a network namespace needs root")
			}
			id := fmt.Sprintf("i%d", n)
			addr := freeAddr(t, "tcp", row.host)
			_, port, _ := net.SplitHostPort(addr)
			b.begin(b.handoff(id, 1, addr, strings.ReplaceAll(row.steps, ":P", ":"+port)))
			b.exit(id, 1)
			b.waitText(b.logPath(id), "done")
			for want := range strings.FieldsSeq(strings.ReplaceAll(row.want, "address already in use", "address_already_in_use")) {
				want = strings.ReplaceAll(want, "_", " ") + ";"
				if got := b.text(b.logPath(id)); !strings.Contains(got, want) {
					t.Errorf("printed %q, want %s", got, want)
				}
			}
			if err := b.c.Unhold(waittest.Context(t), id); err != nil {
				t.Error(err)
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

// TestHandoffKeepsClients checks that a client that comes before the program binds,
// or between two runs, is answered, whatever address form the program binds. From
// the second run on, the held socket has the form that the program bound.
func TestHandoffKeepsClients(t *testing.T) {
	b := newBench(t).start()
	b.checkHandoff()
	for n, steps := range []string{"tcp4 a\nawait FILE\nbind a 127.0.0.1:P\nserve a", "tcp6 a\nawait FILE\nbind a [::ffff:127.0.0.1]:P\nserve a",
		"tcp6 a\nawait FILE\nbind a [::]:P\nserve a", "tcp4 a\nawait FILE\nbind a 0.0.0.0:P\nserve a"} {
		id := fmt.Sprintf("i%d", n)
		addr := freeAddr(t, "tcp", "127.0.0.1")
		_, port, _ := net.SplitHostPort(addr)
		for run := range uint64(3) {
			file := filepath.Join(t.TempDir(), "go")
			s, _ := b.begin(b.handoff(id, run+1, addr, strings.NewReplacer(":P", ":"+port, "FILE", file).Replace(steps)))
			var wg sync.WaitGroup
			ask := func() {
				wg.Go(func() {
					c, err := net.DialTimeout("tcp", addr, waitLimit)
					if err != nil {
						t.Errorf("run %d of %q: %v", run+1, steps, err)
						return
					}
					defer c.Close()
					_ = c.SetDeadline(time.Now().Add(waitLimit))
					if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != "served\n" {
						t.Errorf("run %d of %q: answered %q, %v", run+1, steps, line, err)
					}
				})
			}
			for range 10 {
				ask()
			}
			errtest.None(t, os.WriteFile(file, nil, 0o600))
			for range 10 {
				ask()
			}
			wg.Wait()
			errtest.None(t, syscall.Kill(s.PID, syscall.SIGKILL))
			b.exit(id, run+1)
		}
		if got := b.text(b.logPath(id)); strings.Count(got, "a=kept") != 3 {
			t.Errorf("%q printed %q, want three times the kept socket", steps, got)
		}
	}
}

// TestHandoffOutlivesShim checks that a bind waits while the shim is replaced, and
// gets the socket from the next shim, even if the killed shim had read the report
// and not answered.
func TestHandoffOutlivesShim(t *testing.T) {
	for _, read := range []bool{false, true} {
		t.Run(fmt.Sprintf("read %v", read), func(t *testing.T) {
			b := newBench(t).start()
			b.checkHandoff()
			addr, file := freeAddr(t, "tcp", "127.0.0.1"), filepath.Join(t.TempDir(), "go")
			_, fd := b.begin(b.handoff("a", 1, addr, "tcp4 a\nawait "+file+"\nbind a "+addr))
			addrs, fds, err := b.c.Listeners(waittest.Context(t), "a")
			errtest.None(t, err)
			defer shimctl.CloseAll(fds)
			b.stop(syscall.SIGKILL)
			errtest.None(t, os.WriteFile(file, nil, 0o600))
			// Wait until the report can be read: then the program has called bind.
			poll := []unix.PollFd{{Fd: int32(fd.FD), Events: unix.POLLIN}}
			n, err := unix.Poll(poll, int(waitLimit.Milliseconds()))
			for errors.Is(err, unix.EINTR) {
				n, err = unix.Poll(poll, int(waitLimit.Milliseconds()))
			}
			if err != nil || n != 1 {
				t.Fatalf("no bind is reported: %d, %v", n, err)
			}
			if read {
				var notif [80]byte
				if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd.FD), unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&notif))); e != 0 {
					t.Fatal(e)
				}
				left := bytes.NewBuffer(notif[:])
				_ = binary.Write(left, binary.NativeEndian, uint64(1))
				_ = binary.Write(left, binary.NativeEndian, uint32(1))
				left.WriteString("a")
				f, err := os.OpenFile(b.dir+"/bind", os.O_WRONLY, 0)
				if err == nil {
					_, err = f.Write(left.Bytes())
					err = errors.Join(err, f.Close())
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			b.start()
			errtest.None(t, b.c.Keep(waittest.Context(t), "a", addrs, fds))
			errtest.None(t, b.c.GiveFilter(waittest.Context(t), "a", 1, fd.FD))
			b.waitText(b.logPath("a"), "a=kept4;")
		})
	}
}
