package programs

import (
	"bufio"
	"errors"
	"fmt"
	"io"
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

// server is a program that gets its listening socket by bind handoff.
type server struct {
	name  string
	redis bool
	proto string // as in instance.Endpoint
	// command returns the program's command line for an address. dir is a
	// directory of its own. For a unix socket, host is the path.
	command func(t *testing.T, dir, host, port string) []string
	host    *daemontest.Host // the host that runs it; set by stage
}

// awaiting records what a client is waiting for, as evidence in case no answer
// arrives. The caller must call answered when the client is done.
func (s server) awaiting(addr string) (answered func()) {
	if s.host == nil {
		return func() {}
	}
	return s.host.Awaiting(s.name, "a client of "+addr, nil)
}

// servers are seven kinds of programs. Some bind the exposed address, one binds
// every address, one binds the exposed address as IPv6, and two have several
// processes.
var servers = []server{
	{name: "python", command: func(t *testing.T, _, host, port string) []string {
		return []string{installed(t, "python3", "/usr/bin/python3", "python3"), "-m", "http.server", port, "--bind", host}
	}},
	{name: "nginx", command: func(t *testing.T, dir, host, port string) []string {
		return nginx(t, dir, net.JoinHostPort(host, port)+" reuseport")
	}},
	{name: "node", command: func(t *testing.T, _, _, port string) []string { // binds all addresses of both families
		return []string{installed(t, "nodejs", "node"), "-e", "require('http').createServer((q,s)=>s.end('here\\n')).listen(" + port + ")"}
	}},
	{name: "go", command: func(t *testing.T, _, host, port string) []string {
		return []string{daemontest.Program("serve"), net.JoinHostPort(host, port)}
	}},
	{name: "java", command: func(t *testing.T, _, host, port string) []string { // binds ::ffff:127.0.0.1
		dir, err := filepath.Abs("testdata")
		errtest.None(t, err)
		return []string{installed(t, "default-jre-headless", "java"), "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-cp", dir, "Serve", host, port}
	}},
	{name: "redis", redis: true, command: func(t *testing.T, dir, host, port string) []string {
		return []string{installed(t, "redis-server", "redis-server"), "--bind", host, "--port", port, "--save", "", "--dir", dir}
	}},
	{name: "gunicorn", command: func(t *testing.T, dir, host, port string) []string {
		return gunicorn(t, dir, net.JoinHostPort(host, port))
	}},
}

func nginx(t *testing.T, dir, listen string) []string {
	path := installed(t, "nginx-light", "nginx", "/usr/sbin/nginx")
	conf := fmt.Sprintf(`daemon off; worker_processes 2; pid %[1]s/pid; error_log stderr error;
events { worker_connections 256; }
http {
  access_log off;
  client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
  server { listen %[2]s; location / { return 200 "here\n"; } }
}
`, dir, listen)
	errtest.None(t, os.WriteFile(dir+"/nginx.conf", []byte(conf), 0o644))
	return []string{path, "-p", dir, "-c", dir + "/nginx.conf", "-e", "stderr"}
}

func gunicorn(t *testing.T, dir, bind string) []string {
	app := "def app(environ, start_response):\n    start_response('200 OK', [('Content-Length', '5')])\n    return [b'here\\n']\n"
	errtest.None(t, os.WriteFile(dir+"/app.py", []byte(app), 0o644))
	return []string{installed(t, "gunicorn", "gunicorn"), "--workers", "2", "--chdir", dir, "--bind", bind, "app:app"}
}

// visit is one client: it connects, sends a request and reads the answer.
func (s server) visit(addr string) error {
	defer s.awaiting(addr)()
	network := "tcp"
	if s.proto != "" {
		network = s.proto
	}
	c, err := net.DialTimeout(network, addr, daemontest.WaitLimit)
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(daemontest.WaitLimit))
	ask, want := "GET / HTTP/1.0\r\nHost: here\r\n\r\n", " 200 "
	if s.redis {
		ask, want = "PING\r\n", "+PONG"
	}
	if _, err := io.WriteString(c, ask); err != nil {
		return err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err == nil && !strings.Contains(line, want) {
		err = fmt.Errorf("answered with %q", line)
	}
	return err
}

// crowd counts the outcomes of clients.
type crowd struct {
	mu       sync.Mutex
	answered int
	refused  int
	lost     int
	first    error
}

// refused reports whether a client was rejected: nothing listens, the socket's
// file is missing, or its queue is full.
func refused(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EAGAIN)
}

func (c *crowd) note(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil:
		c.answered++
		return
	case refused(err):
		c.refused++
	default:
		c.lost++
	}
	if c.first == nil {
		c.first = err
	}
}

func (c *crowd) String() string {
	s := fmt.Sprintf("%d answered, %d refused, %d lost", c.answered, c.refused, c.lost)
	if c.first != nil {
		s += fmt.Sprintf("; first: %v", c.first)
	}
	return s
}

// arrive lets n clients come at random times within d, and waits for them.
func (c *crowd) arrive(s server, addr string, n int, d time.Duration) {
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			<-time.After(rand.N(d))
			c.note(s.visit(addr))
		})
	}
	wg.Wait()
}

// stage launches a server that falls asleep soon and is then stopped.
func (s *server) stage(t *testing.T, h *daemontest.Host) (name, addr string) {
	t.Helper()
	s.host = h
	dir, err := os.MkdirTemp(h.Dir, s.name)
	if err == nil {
		err = os.Chmod(dir, 0o777)
	}
	if err != nil {
		t.Fatal(err)
	}
	addr = daemontest.Addr(t)
	host, port, _ := net.SplitHostPort(addr)
	if s.proto == instance.ProtoUnix {
		addr = dir + "/app.sock"
		host, port = addr, ""
	}
	h.Launch(instance.Spec{Name: s.name, Command: s.command(t, dir, host, port), Workdir: dir,
		PauseAfter: daemontest.Seconds(100 * time.Millisecond), StopAfter: daemontest.Seconds(100 * time.Millisecond),
		ReadyTimeout: idle.Duration(3 * time.Minute), StopGrace: idle.Duration(10 * time.Second), Restart: instance.RestartAlways,
		Expose: []instance.Endpoint{{Proto: s.proto, Listen: addr, Target: addr, Path: instance.PathDirect}}})
	return s.name, addr
}

func handoffHost(t *testing.T, who *account) *daemontest.Host {
	cfg := daemontest.Config{Args: []string{"--probe", "50ms", "--stop-all"}}
	if who != nil {
		cfg.UID, cfg.GID = who.uid, who.gid
	}
	return daemontest.Start(t, cfg)
}

// started returns how often an instance was started.
func started(t *testing.T, h *daemontest.Host, name string) (n int) {
	t.Helper()
	err := h.Kept(t.Context(), "", func(string) {}, func(e hostctl.Event) error {
		if e.Instance == name && e.Type == "started" {
			n++
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestHandoff lets lull stop programs while clients come before, during and after
// each stop and the next start. No client may be refused or lost. Some starts are
// restarts by a user, and one follows a crash.
//
// LULL_HANDOFF_STARTS is the number of starts of each program.
func TestHandoff(t *testing.T) {
	starts := scaletest.Count(t, "LULL_HANDOFF_STARTS", 5)
	for _, s := range servers {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			h := handoffHost(t, nil)
			name, addr := s.stage(t, h)
			if o := h.Show(name); o.Deaf != "" || !o.Wakes {
				t.Fatalf("a connection does not wake it: %s", o.Deaf)
			}
			c := s.rounds(t, h, name, addr, starts, 0)
			o := h.Show(name)
			t.Logf("REPORT handoff %s: %d starts, %s, %d crashes", s.name, started(t, h, name)-1, c, o.RestartCount)
			if c.refused+c.lost > 0 {
				t.Errorf("%s: %s", s.name, c)
			}
			h.Must(name, "stop") // stopped by a user, so its port is closed
			if err := s.visit(addr); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("a connection to what a user stopped: %v, want it refused", err)
			}
		})
	}
}

// rounds lets clients come around starts until there were enough of them. The
// first round is of kind from.
func (s server) rounds(t *testing.T, h *daemontest.Host, name, addr string, starts, from int) *crowd {
	t.Helper()
	c := &crowd{}
	took := time.Second
	for n := from; started(t, h, name) <= starts; n++ {
		switch {
		case n%5 == 3: // a restart on request: clients that come after it begins must wait
			c.note(s.visit(addr))
			before := h.Show(name)
			done := make(chan struct{})
			go func() {
				defer close(done)
				if _, err := h.Do(t.Context(), name, "restart", nil); err != nil {
					t.Errorf("cannot restart it: %v", err)
				}
			}()
			h.Until(name, "its restart has begun", func(o hostctl.Instance) bool {
				return o.PID != before.PID || o.State == "stopping" || o.State == "starting"
			})
			c.arrive(s, addr, 6, took)
			<-done
		case n%5 == 4: // in whatever state it is
			c.arrive(s, addr, 6, took+300*time.Millisecond)
		case n == 2 && s.name != "nginx" && s.name != "gunicorn": // a crash, only of programs without workers that outlive it
			c.note(s.visit(addr))
			o := h.Show(name)
			if o.PID != 0 && syscall.Kill(o.PID, syscall.SIGKILL) == nil {
				h.Until(name, "its end is known", func(now hostctl.Instance) bool { return now.PID != o.PID })
			}
			c.arrive(s, addr, 6, took)
		default:
			h.Await(name, "stopped")
			begun := time.Now()
			c.note(s.visit(addr))
			took = min(time.Since(begun), 10*time.Second)
			h.Await(name, "stopped")
			c.arrive(s, addr, 8, took*3/2)
		}
	}
	return c
}

// TestHandoffKilled kills the supervisor, the daemon or both while clients start
// a program. No client may be refused or lost, the record must be kept, and the
// program must be started exactly once.
func TestHandoffKilled(t *testing.T) {
	rounds := scaletest.Count(t, "LULL_HANDOFF_KILLS", 2)
	for _, s := range servers {
		if s.name != "go" && s.name != "nginx" {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			h := handoffHost(t, nil)
			name, addr := s.stage(t, h)
			id := h.Show(name).ID
			for _, victim := range []string{"shim", "daemon", "both"} {
				c := &crowd{}
				for range rounds {
					h.Await(name, "stopped")
					var wg sync.WaitGroup
					wg.Go(func() { c.arrive(s, addr, 6, 200*time.Millisecond) })
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
					daemontest.Wait(t, "it serves again", func() (bool, string) {
						err := s.visit(addr)
						return err == nil, fmt.Sprint(err)
					})
					if o := h.Show(name); o.ID != id {
						t.Fatalf("its record was lost: %s is %s now", id, o.ID)
					}
				}
				h.Await(name, "stopped")
				daemontest.Wait(t, "no process of it is left", func() (bool, string) { m := h.Marked()[id]; return len(m) == 0, fmt.Sprint(m) })
				t.Logf("REPORT handoff %s, %s killed: %d rounds, %s", s.name, victim, rounds, c)
				if c.refused+c.lost > 0 {
					t.Errorf("%s killed: %s", victim, c)
				}
			}
		})
	}
}

// TestHandoffClosed checks that a program that closes its port and continues to
// run refuses clients as it would without lull. After it has ended, a connection
// must start it again.
func TestHandoffClosed(t *testing.T) {
	t.Parallel()
	h := handoffHost(t, nil)
	addr, file := daemontest.Addr(t), h.Dir+"/close"
	host, port, _ := net.SplitHostPort(addr)
	never, wake := idle.Duration(0), true
	h.Launch(instance.Spec{Name: "closer", PauseAfter: &never, Restart: instance.RestartNo, Workdir: "/",
		WakeFromStopped: &wake,
		Command: []string{installed(t, "python3", "/usr/bin/python3", "python3"), "-c", `
import os, socket, sys, time
host, port, file = sys.argv[1:]
s = socket.create_server((host, int(port)))
while not os.path.exists(file):
    s.settimeout(0.05)
    try:
        c, _ = s.accept()
        c.recv(100)
        c.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        c.close()
    except TimeoutError:
        pass
s.close()
while os.path.exists(file):
    time.sleep(0.05)
`, host, port, file}, Expose: []instance.Endpoint{{Listen: addr, Target: addr, Path: instance.PathDirect}}})
	s := servers[0]
	if err := s.visit(addr); err != nil {
		t.Fatalf("a client of the open port: %v", err)
	}
	before := h.Show("closer")
	errtest.None(t, os.WriteFile(file, nil, 0o600))
	daemontest.Wait(t, "clients of the closed port are refused", func() (bool, string) {
		c, err := net.DialTimeout("tcp", addr, daemontest.WaitLimit)
		if err == nil {
			c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED), fmt.Sprint(err)
	})
	if o := h.Show("closer"); o.State != "running" || o.PID != before.PID {
		t.Errorf("it is %s as process %d, want the running %d", o.State, o.PID, before.PID)
	}
	if err := os.Remove(file); err != nil { // makes the program end
		t.Fatal(err)
	}
	h.Await("closer", "stopped")
	if err := s.visit(addr); err != nil {
		t.Errorf("a client after the end: %v", err)
	}
}

// TestHandoffUser checks that a connection also starts an ordinary user's stopped
// programs, that these run with no_new_privs, and that this is reported.
func TestHandoffUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it needs root, to run a daemon as another user")
	}
	t.Parallel()
	h := handoffHost(t, ordinary(t))
	local := unixServers[0]
	local.name, local.proto = "local", instance.ProtoUnix
	for _, s := range []server{servers[0], local} {
		s.asUser(t, h)
	}
}

func (s server) asUser(t *testing.T, h *daemontest.Host) {
	t.Helper()
	name, addr := s.stage(t, h)
	o := h.Show(name)
	if o.Deaf != "" || !o.NoNewPrivs {
		t.Fatalf("no_new_privs %v, and a connection does not wake it: %q", o.NoNewPrivs, o.Deaf)
	}
	c := &crowd{}
	for range 3 {
		h.Await(name, "stopped")
		c.arrive(s, addr, 8, time.Second)
	}
	t.Logf("REPORT handoff of an ordinary user, %s: %s", s.name, c)
	if c.refused+c.lost > 0 {
		t.Error(c)
	}
}

// TestHandoffRefused checks a host under a seccomp filter with a listener, where
// no other such filter can be installed. Its programs must run without a handoff,
// the host must report why, and only the relayed port can start a stopped
// program.
func TestHandoffRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it needs root")
	}
	t.Parallel()
	outer := handoffHost(t, nil)
	listen, dir := daemontest.Addr(t), outer.Dir+"/inner"
	socket := dir + "/socket/host.sock"
	errtest.None(t, os.MkdirAll(filepath.Dir(socket), 0o700))
	never := idle.Duration(0)
	outer.Launch(instance.Spec{Name: "inner", PauseAfter: &never, Restart: instance.RestartNo, Workdir: "/",
		Command: []string{daemontest.Program("lull"), "host", "--data", dir + "/data", "--socket", socket, "--probe", "50ms", "--metrics", listen},
		Expose:  []instance.Endpoint{{Listen: listen, Target: listen}}})
	cl, err := hostctl.NewClient(socket)
	errtest.None(t, err)
	inner := &daemontest.Host{Client: cl, T: t, Dir: outer.Dir}
	s := servers[3] // go
	direct, relayed, target := daemontest.Addr(t), daemontest.Addr(t), daemontest.Addr(t)
	for name, e := range map[string]instance.Endpoint{"direct": {Listen: direct, Target: direct}, "relayed": {Listen: relayed, Target: target}} {
		inner.Launch(instance.Spec{Name: name, Command: []string{daemontest.Program("serve"), e.Target}, Workdir: "/",
			PauseAfter: daemontest.Seconds(100 * time.Millisecond), StopAfter: daemontest.Seconds(100 * time.Millisecond), Expose: []instance.Endpoint{e}})
		defer inner.Remove(t.Context(), name)
	}
	if o := inner.Show("direct"); !strings.Contains(o.Deaf, "seccomp") {
		t.Errorf("why a connection does not wake it: %q, want the filter in it", o.Deaf)
	}
	if o := inner.Show("relayed"); o.Deaf != "" {
		t.Errorf("a connection to the relay does not wake it: %q", o.Deaf)
	}
	inner.Await("direct", "stopped")
	inner.Await("relayed", "stopped")
	if err := s.visit(direct); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a connection to the stopped program: %v, want it refused", err)
	}
	if err := s.visit(relayed); err != nil {
		t.Errorf("a connection to the relay: %v", err)
	}
}
