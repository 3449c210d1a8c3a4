package programs

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/hostctl"
)

// unixServers serve on a unix socket. They treat the socket's file differently:
// Redis, gunicorn and Python remove an existing file before they bind; nginx,
// Node and Python remove theirs when they end; gunicorn removes the file by the
// name that its socket is bound to.
var unixServers = []server{
	{name: "python", command: func(t *testing.T, _, path, _ string) []string {
		return []string{installed(t, "python3", "/usr/bin/python3", "python3"), "-c", `
import os, signal, socketserver, sys
path = sys.argv[1]
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\nhere\n")
class Server(socketserver.UnixStreamServer):
    request_queue_size = 128
def end(*_):
    raise SystemExit
signal.signal(signal.SIGTERM, end)
if os.path.exists(path):
    os.unlink(path)
server = Server(path, Handler)
os.chmod(path, 0o640)
try:
    server.serve_forever()
finally:
    server.server_close()
    os.unlink(path)
`, path}
	}},
	{name: "nginx", command: func(t *testing.T, dir, path, _ string) []string { return nginx(t, dir, "unix:"+path) }},
	{name: "node", command: func(t *testing.T, _, path, _ string) []string {
		return []string{installed(t, "nodejs", "node"), "-e", `
const s = require('http').createServer((q, r) => r.end('here\n')).listen('` + path + `');
process.on('SIGTERM', () => s.close(() => process.exit()));`}
	}},
	{name: "redis", redis: true, command: func(t *testing.T, dir, path, _ string) []string {
		return []string{installed(t, "redis-server", "redis-server"), "--port", "0", "--unixsocket", path, "--unixsocketperm", "770", "--save", "", "--dir", dir}
	}},
	{name: "gunicorn", command: func(t *testing.T, dir, path, _ string) []string { return gunicorn(t, dir, "unix:"+path) }},
}

// TestHandoffUnix does the same as TestHandoff for unix sockets. Whatever a
// program does with the file of its socket, no client may find it missing until a
// user stops the program, and no other file may be left in its directory.
//
// LULL_HANDOFF_STARTS is the number of starts of each program.
func TestHandoffUnix(t *testing.T) {
	starts := scaletest.Count(t, "LULL_HANDOFF_STARTS", 3)
	for _, s := range unixServers {
		s.proto = instance.ProtoUnix
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			h := handoffHost(t, nil)
			name, addr := s.stage(t, h)
			if o := h.Show(name); o.Deaf != "" || !o.Wakes {
				t.Fatalf("a connection does not wake it: %s", o.Deaf)
			}
			c := s.rounds(t, h, name, addr, starts, 2)
			o := h.Show(name)
			t.Logf("REPORT handoff unix %s: %d starts, %s, %d crashes", s.name, started(t, h, name)-1, c, o.RestartCount)
			if c.refused+c.lost > 0 {
				t.Errorf("%s: %s\nit said: %s\nthe daemon said: %s", s.name, c, h.Said(name), h.Log())
			}
			if want, ok := map[string]fs.FileMode{"python": 0o640, "redis": 0o770}[s.name]; ok {
				h.Await(name, "stopped")
				if st, err := os.Stat(addr); err != nil || st.Mode().Perm() != want {
					t.Errorf("the socket of the stopped program: %v, %v, want mode %o", st, err, want)
				}
			}
			h.Must(name, "stop")
			if err := s.visit(addr); !refused(err) {
				t.Errorf("a connection to what a user stopped: %v, want it refused", err)
			}
			if left, err := filepath.Glob(filepath.Dir(addr) + "/.lull*"); err != nil || len(left) > 0 {
				t.Errorf("left in its directory: %v, %v", left, err)
			}
		})
	}
}

// udpServers echo every datagram. The datagram that started a program must be in
// its socket.
var udpServers = []server{
	{name: "python", command: func(t *testing.T, _, host, port string) []string {
		return []string{installed(t, "python3", "/usr/bin/python3", "python3"), "-c", `
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], int(sys.argv[2])))
while True:
    data, client = s.recvfrom(2048)
    s.sendto(data, client)
`, host, port}
	}},
	{name: "node", command: func(t *testing.T, _, host, port string) []string {
		return []string{installed(t, "nodejs", "node"), "-e", `
const s = require('dgram').createSocket('udp4');
s.on('message', (m, from) => s.send(m, from.port, from.address));
s.bind(` + port + `, '` + host + `');`}
	}},
}

// resend is after how long a UDP client repeats a datagram without an answer: the
// program may have been stopped between its read and its answer.
const resend = 2 * time.Second

// send is one UDP client. It sends a datagram, repeats it after resend unless
// once is set, and waits for the answer. It fails at once if the machine refuses
// the datagram.
func (s server) send(addr string, once bool) error {
	defer s.awaiting(addr)()
	c, err := net.Dial("udp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	ask, b := fmt.Sprintf("%x", rand.Uint64()), make([]byte, 64)
	for end := time.Now().Add(daemontest.WaitLimit); time.Now().Before(end); {
		wait := time.Now().Add(resend)
		if once {
			wait = end
		}
		if _, err := c.Write([]byte(ask)); err != nil {
			return err
		}
		_ = c.SetReadDeadline(wait)
		n, err := c.Read(b)
		switch {
		case err == nil && string(b[:n]) != ask:
			return fmt.Errorf("answered with %q, want %q", b[:n], ask)
		case err == nil || !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		}
	}
	return errors.New("no answer")
}

func (c *crowd) send(s server, addr string, n int, d time.Duration) {
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			<-time.After(rand.N(d))
			c.note(s.send(addr, false))
		})
	}
	wg.Wait()
}

// TestHandoffDatagram checks that one datagram starts a program that has ended,
// and that the program finds it in its socket and answers it.
func TestHandoffDatagram(t *testing.T) {
	rounds := scaletest.Count(t, "LULL_HANDOFF_STARTS", 3)
	for _, s := range udpServers {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			h := handoffHost(t, nil)
			addr := daemontest.Addr(t)
			host, port, _ := net.SplitHostPort(addr)
			never := idle.Duration(0)
			h.Launch(instance.Spec{Name: s.name, Command: s.command(t, h.Dir, host, port), Workdir: "/", PauseAfter: &never, Restart: instance.RestartNo,
				WakeFromStopped: new(true), Expose: []instance.Endpoint{{Proto: instance.ProtoUDP, Listen: addr, Target: addr}}})
			s.host = h
			for n := range rounds {
				if o := h.Show(s.name); o.PID == 0 || syscall.Kill(o.PID, syscall.SIGKILL) != nil {
					t.Fatalf("it is %s and cannot be killed", o.State)
				}
				h.Await(s.name, "stopped")
				if err := s.send(addr, true); err != nil {
					t.Fatalf("the datagram that starts it for the %d. time: %v\nit said: %s", n+1, err, h.Said(s.name))
				}
				h.Await(s.name, "running")
			}
		})
	}
}

// TestHandoffUDP lets lull stop UDP programs, and lets clients come before,
// during and after starts, restarts and a crash.
//
// LULL_HANDOFF_STARTS is the number of starts of each program.
func TestHandoffUDP(t *testing.T) {
	starts := scaletest.Count(t, "LULL_HANDOFF_STARTS", 3)
	for _, s := range udpServers {
		s.proto = instance.ProtoUDP
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			h := handoffHost(t, nil)
			name, addr := s.stage(t, h)
			if o := h.Show(name); o.Deaf != "" || !o.Wakes {
				t.Fatalf("a datagram does not wake it: %s", o.Deaf)
			}
			c := &crowd{}
			for n := 0; started(t, h, name) <= starts; n++ {
				h.Await(name, "stopped")
				begun := time.Now()
				c.note(s.send(addr, false))
				took := min(time.Since(begun), 10*time.Second)
				switch n % 3 {
				case 0: // a crash, if the program is still running
					if o := h.Show(name); o.PID != 0 {
						_ = syscall.Kill(o.PID, syscall.SIGKILL)
					}
					c.send(s, addr, 6, took)
				case 1:
					wait := sync.WaitGroup{}
					wait.Go(func() { c.send(s, addr, 6, took) })
					if _, err := h.Do(t.Context(), name, "restart", nil); err != nil {
						t.Errorf("cannot restart it: %v", err)
					}
					wait.Wait()
				default:
					h.Await(name, "stopped")
					c.send(s, addr, 8, took*3/2)
				}
			}
			t.Logf("REPORT handoff udp %s: %d starts, %s", s.name, started(t, h, name)-1, c)
			if c.refused+c.lost > 0 {
				t.Errorf("%s: %s\nit said: %s", s.name, c, h.Said(name))
			}
			h.Must(name, "stop")
			if err := s.send(addr, false); !refused(err) {
				t.Errorf("a datagram to what a user stopped: %v, want it refused", err)
			}
		})
	}
}

// TestHandoffKilledUnix does the same as TestHandoffKilled for a unix socket and
// a UDP port.
func TestHandoffKilledUnix(t *testing.T) {
	rounds := scaletest.Count(t, "LULL_HANDOFF_KILLS", 1)
	local, datagrams := unixServers[0], udpServers[0]
	local.proto, datagrams.proto = instance.ProtoUnix, instance.ProtoUDP
	for _, s := range []server{local, datagrams} {
		t.Run(s.proto, func(t *testing.T) {
			t.Parallel()
			h := handoffHost(t, nil)
			name, addr := s.stage(t, h)
			id := h.Show(name).ID
			for _, victim := range []string{"shim", "daemon", "both"} {
				c := &crowd{}
				for range rounds {
					h.Await(name, "stopped")
					var wg sync.WaitGroup
					wg.Go(func() {
						if s.proto == instance.ProtoUDP {
							c.send(s, addr, 6, 200*time.Millisecond)
						} else {
							c.arrive(s, addr, 6, 200*time.Millisecond)
						}
					})
					<-time.After(rand.N(200 * time.Millisecond))
					if victim != "shim" {
						h.Kill()
					}
					if pid := h.ShimPID(); pid != 0 && victim != "daemon" {
						_ = syscall.Kill(pid, syscall.SIGKILL)
					}
					if victim != "shim" {
						h.Boot()
					}
					wg.Wait()
					if o := h.Show(name); o.ID != id {
						t.Fatalf("its record was lost: %s is %s now", id, o.ID)
					}
				}
				h.Await(name, "stopped")
				t.Logf("REPORT handoff %s, %s killed: %d rounds, %s", s.proto, victim, rounds, c)
				if c.refused+c.lost > 0 {
					t.Errorf("%s killed: %s\nthe daemon said: %s", victim, c, h.Log())
				}
			}
		})
	}
}

// TestHandoffUnixFile checks that the file of an exposed socket belongs to the
// program's user from the beginning, and is created again if it was removed. A
// program that removes it and continues to run must refuse clients. Another
// program's socket must not be taken over.
func TestHandoffUnixFile(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it needs root, to run a program as another user")
	}
	t.Parallel()
	h := handoffHost(t, nil)
	who := ordinary(t)
	dir := filepath.Join(h.Dir, "files")
	errtest.None(t, errors.Join(os.Mkdir(dir, 0o755), os.Chown(dir, who.uid, who.gid), os.Chmod(h.Dir, 0o755)))
	addr, file := dir+"/app.sock", dir+"/close"
	never := idle.Duration(0)
	h.Launch(instance.Spec{Name: "closer", PauseAfter: &never, Restart: instance.RestartNo, Workdir: dir, User: fmt.Sprintf("%d:%d", who.uid, who.gid),
		WakeFromStopped: new(true),
		Command: []string{installed(t, "python3", "/usr/bin/python3", "python3"), "-c", `
import os, socket, sys, time
file = sys.argv[1]
s = socket.socket(socket.AF_UNIX)
os.umask(0o117)
s.bind("app.sock")
s.listen(64)
while not os.path.exists(file):
    s.settimeout(0.05)
    try:
        c, _ = s.accept()
        c.recv(100)
        c.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        c.close()
    except OSError: # no client came, or it did not stay
        pass
s.close()
os.unlink("app.sock")
while os.path.exists(file):
    time.sleep(0.05)
`, file}, Expose: []instance.Endpoint{{Proto: "unix", Listen: addr, Target: addr}}})
	s := server{proto: "unix"}
	check := func(when string) {
		t.Helper()
		if err := s.visit(addr); err != nil {
			t.Errorf("%s: a client: %v", when, err)
		}
		st, err := os.Lstat(addr)
		if err != nil {
			t.Errorf("%s: %v", when, err)
			return
		}
		sys := st.Sys().(*syscall.Stat_t)
		if st.Mode() != fs.ModeSocket|0o660 || int(sys.Uid) != who.uid || int(sys.Gid) != who.gid {
			t.Errorf("%s: the socket is %v of %d:%d, want mode 660 of %d:%d", when, st.Mode(), sys.Uid, sys.Gid, who.uid, who.gid)
		}
	}
	check("after a start")
	errtest.None(t, os.WriteFile(file, nil, 0o600))
	daemontest.Wait(t, "clients of the closed socket are refused", func() (bool, string) {
		c, err := net.DialTimeout("unix", addr, daemontest.WaitLimit)
		if err == nil {
			c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED), fmt.Sprint(err) // not refused because its queue is full
	})
	if o := h.Show("closer"); o.State != "running" {
		t.Errorf("it is %s, want running", o.State)
	}
	if err := os.Remove(file); err != nil { // makes the program end
		t.Fatal(err)
	}
	h.Await("closer", "stopped")
	check("after its end")
	l, err := net.Listen("unix", dir+"/other.sock")
	errtest.None(t, err)
	defer l.Close()
	for path, want := range map[string]string{dir + "/none/app.sock": "create it first", file + ".txt": "not a socket"} {
		errtest.None(t, os.WriteFile(file+".txt", nil, 0o600))
		_, err := h.Create(t.Context(), hostctl.Create{Spec: instance.Spec{Name: "other", Command: []string{"true"},
			Expose: []instance.Endpoint{{Proto: "unix", Listen: path, Target: path}}}})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s was accepted: %v, want an error that says %q", path, err, want)
		}
	}
	taken := dir + "/other.sock"
	st, err := os.Lstat(taken)
	errtest.None(t, err)
	before := st.Sys().(*syscall.Stat_t).Ino
	_, err = h.Create(t.Context(), hostctl.Create{Spec: instance.Spec{Name: "other", Restart: instance.RestartNo, Workdir: dir,
		ReadyTimeout: idle.Duration(time.Minute),
		Command:      []string{installed(t, "python3", "/usr/bin/python3", "python3"), "-c", "import socket; socket.socket(socket.AF_UNIX).bind('other.sock')"},
		Expose:       []instance.Endpoint{{Proto: "unix", Listen: taken, Target: taken}}}, Start: true})
	if err == nil {
		t.Error("a program started on the socket of another")
	}
	mine, err := os.Lstat(taken)
	if err != nil || mine.Sys().(*syscall.Stat_t).Ino != before {
		t.Errorf("the socket of another program was replaced: %v, %v", mine, err)
	}
}
