package shim_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

// TestHandoffOfUnixBinds checks which binds get the held socket of an exposed path,
// and that the socket's file stays whatever the program removes.
func TestHandoffOfUnixBinds(t *testing.T) {
	b := newBench(t).start()
	b.checkHandoff()
	for n, row := range []struct{ name, steps, want string }{
		{"the exposed path", "unix a\nbindunix a DIR/app.sock", "a=kept"},
		{"relative", "cd DIR\nunix a\nbindunix a app.sock", "a=kept"},
		{"through a link", "unix a\nbindunix a LINK/./app.sock", "a=kept"},
		{"another path", "unix a\nbindunix a DIR/b.sock", "a=own"},
		{"of the same name", "cd SUB\nunix a\nbindunix a app.sock", "a=own"},
		{"abstract", "unix a\nbindunix a @DIR/app.sock", "a=own"},
		{"datagrams", "unixgram a\nbindunix a DIR/app.sock", "a=address already in use"},
		{"twice", "unix a\nbindunix a DIR/app.sock\nunix b\nbindunix b DIR/app.sock", "a=kept;b=address already in use"},
		{"closed and bound again", "unix a\nbindunix a DIR/app.sock\nclose a\nunix b\nbindunix b DIR/app.sock", "a=kept;b=kept"},
		{"removed before", "unlink DIR/app.sock\nexists DIR/app.sock\nunix a\nbindunix a DIR/app.sock", "exists=true;a=kept"},
		{"removed in a directory", "unlinkat DIR app.sock\nexists DIR/app.sock\nunix a\nbindunix a DIR/app.sock", "exists=true;a=kept"},
		{"removed, and bound beside the first", "unix a\nbindunix a DIR/app.sock\nunlink LINK/app.sock\nunix b\nbindunix b DIR/app.sock", "a=kept;b=kept"},
		{"removal of another file", "unlink SUB/app.sock\nexists SUB/app.sock", "exists=false"},
		{"mode", "umask 027\nunix a\nbindunix a DIR/app.sock\nmode DIR/app.sock", "a=kept;mode=750"},
	} {
		t.Run(row.name, func(t *testing.T) {
			id, dir := fmt.Sprintf("i%d", n), t.TempDir()
			link, sub, path := dir+"/link", dir+"/sub", dir+"/app.sock"
			errtest.None(t, errors.Join(os.Symlink(dir, link), os.Mkdir(sub, 0o700)))
			if strings.HasPrefix(row.steps, "unlink SUB") {
				errtest.None(t, os.WriteFile(sub+"/app.sock", nil, 0o600))
			}
			b.begin(b.handoff(id, 1, "unix:"+path, strings.NewReplacer("DIR", dir, "LINK", link, "SUB", sub).Replace(row.steps)))
			b.exit(id, 1)
			b.waitText(b.logPath(id), "done")
			for want := range strings.SplitSeq(row.want, ";") {
				if got := b.text(b.logPath(id)); !strings.Contains(got, want+";") {
					t.Errorf("printed %q, want %s", got, want)
				}
			}
			c, err := net.Dial("unix", path)
			if err != nil {
				t.Fatalf("a client after the end of the program: %v", err)
			}
			c.Close()
			if err := b.c.Unhold(waittest.Context(t), id); err != nil {
				t.Error(err)
			}
			if c, err := net.Dial("unix", path); !errors.Is(err, syscall.ENOENT) {
				if err == nil {
					c.Close()
				}
				t.Errorf("a client after the socket was closed: %v, want no file", err)
			}
		})
	}
}

// TestHandoffOfUDPBinds checks that a program receives the datagrams that were sent
// while it did not run, whatever address form it binds.
func TestHandoffOfUDPBinds(t *testing.T) {
	b := newBench(t).start()
	b.checkHandoff()
	for n, bind := range []string{"udp4 a\nbind a 127.0.0.1:P", "udp4 a\nbind a 0.0.0.0:P", "udp6 a\nbind a [::ffff:127.0.0.1]:P", "udp6 a\nbind a [::]:P",
		"tcp4 b\nbind b 127.0.0.1:P\nudp4 a\nbind a 127.0.0.1:P", "udp4 a\nbind a 127.0.0.1:P\nudp4 b\nbind b 127.0.0.1:P"} {
		id := fmt.Sprintf("i%d", n)
		addr := freeAddr(t, "tcp", "127.0.0.1")
		_, port, _ := net.SplitHostPort(addr)
		c, err := net.Dial("udp", addr)
		errtest.None(t, err)
		defer c.Close()
		for run := range uint64(3) {
			say := func() {
				if _, err := fmt.Fprintf(c, "hello %d", run); err != nil {
					t.Errorf("run %d of %q: %v", run, bind, err)
				}
			}
			if run > 0 {
				say()
			}
			b.begin(b.handoff(id, run+1, "udp:"+addr, strings.ReplaceAll(bind, ":P", ":"+port)+"\nrecv a"))
			if run == 0 {
				b.waitText(b.logPath(id), "a=own;")
				say()
			}
			b.waitText(b.logPath(id), fmt.Sprintf("got=hello %d;", run))
			b.exit(id, run+1)
		}
		if got := b.text(b.logPath(id)); strings.Contains(bind, "tcp4 b") && strings.Count(got, "b=own;") != 3 {
			t.Errorf("%q printed %q, want a TCP socket of its own", bind, got)
		}
		if got := b.text(b.logPath(id)); strings.Contains(bind, "udp4 b") && strings.Count(got, "b=address already in use;") != 3 {
			t.Errorf("%q printed %q, want the second bind refused", bind, got)
		}
	}
}

// TestUnixDoor checks that the program accepts no new client while the door is
// shut, and that it serves them, and sees their user, once the door is open again.
// If the door stays shut, the next run serves them.
func TestUnixDoor(t *testing.T) {
	b := newBench(t).start()
	b.checkHandoff()
	dir := t.TempDir()
	path := dir + "/app.sock"
	steps := "umask 0\nunix a\nbindunix a " + path + "\nserveuid a"
	uid := os.Getuid()
	if uid == 0 {
		uid = 65534
		for p := dir; p != "/"; p = filepath.Dir(p) {
			if st, err := os.Stat(p); err == nil && st.Mode().Perm()&0o005 != 0o005 {
				errtest.None(t, os.Chmod(p, 0o755))
			}
		}
	}
	served := func(c net.Conn) {
		t.Helper()
		_ = c.SetDeadline(time.Now().Add(waitLimit))
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != fmt.Sprintf("user %d\n", uid) {
			t.Errorf("answered %q, %v, want user %d", line, err, uid)
		}
		c.Close()
	}
	s, _ := b.begin(b.handoff("a", 1, "unix:"+path, steps))
	b.waitText(b.logPath("a"), "a=kept;")
	door := func(shut bool) {
		t.Helper()
		errtest.None(t, b.c.Door(waittest.Context(t), "a", shut))
	}
	served(dialAs(t, uid, path))
	for range 3 {
		door(true)
		door(true) // repeated, as after an answer that was lost
		waits := []net.Conn{dialAs(t, uid, path), dialAs(t, uid, path)}
		for _, c := range waits {
			_ = c.SetDeadline(time.Now().Add(20 * time.Millisecond))
			if n, err := c.Read(make([]byte, 10)); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("in front of a shut door: %d bytes, %v", n, err)
			}
		}
		door(false)
		for _, c := range waits {
			served(c)
		}
		served(dialAs(t, uid, path))
	}
	door(true)
	waits := dialAs(t, uid, path)
	b.stop(syscall.SIGKILL) // the next shim must find out which file belongs to which socket
	b.start()
	errtest.None(t, syscall.Kill(s.PID, syscall.SIGKILL))
	b.exit("a", 1)
	errtest.None(t, b.c.Hold(waittest.Context(t), "a", []string{"unix:" + path}))
	b.begin(b.handoff("a", 2, "unix:"+path, steps))
	served(waits)
	served(dialAs(t, uid, path))
	if left, _ := filepath.Glob(dir + "/.lull*"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// dialAs connects as another user.
func dialAs(t *testing.T, uid int, path string) net.Conn {
	t.Helper()
	type result struct {
		fd  int
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // not unlocked, so that the thread ends with this goroutine
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil && uid != os.Getuid() {
			if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); e != 0 {
				err = e
			}
		}
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		}
		done <- result{fd, err}
	}()
	r := <-done
	if r.err != nil {
		t.Fatalf("connect as user %d: %v", uid, r.err)
	}
	f := os.NewFile(uintptr(r.fd), "client")
	defer f.Close()
	c, err := net.FileConn(f)
	errtest.None(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}
