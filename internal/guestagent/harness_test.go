package guestagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/guest"
)

const waitLimit = waittest.Timeout

// port behaves like a virtio-serial port: while its other end is closed, reads end
// and writes wait.
type port struct {
	mu     sync.Mutex
	cond   *sync.Cond
	c      net.Conn
	closed bool
}

func newPort() *port {
	p := &port{}
	p.cond = sync.NewCond(&p.mu)
	return p
}

func (p *port) now() net.Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.c
}

func (p *port) Read(b []byte) (int, error) {
	c := p.now()
	if c == nil {
		return 0, io.EOF
	}
	n, err := c.Read(b)
	if err != nil {
		p.leave(c)
		err = io.EOF
	}
	return n, err
}

func (p *port) leave(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.c == c {
		p.c = nil
	}
}

func (p *port) Write(b []byte) (int, error) {
	for {
		p.mu.Lock()
		for p.c == nil && !p.closed {
			p.cond.Wait()
		}
		c, closed := p.c, p.closed
		p.mu.Unlock()
		if closed {
			return 0, os.ErrClosed
		}
		if n, err := c.Write(b); err == nil {
			return n, nil
		}
		p.leave(c)
	}
}

func (p *port) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.c != nil {
		p.c.Close()
	}
	p.cond.Broadcast()
	return nil
}

// host is the other end of a port, once it is connected.
type host struct {
	*guest.Peer
	c net.Conn

	mu   sync.Mutex
	log  []byte
	lost uint64
	said []guest.Request
	exit chan guest.ExitNote
	out  map[uint64]string // output of commands, by their number
}

// ends returns the two ends of a connection.
func ends(t *testing.T) (near, far net.Conn) {
	t.Helper()
	dir := t.TempDir()
	ln, err := net.Listen("unix", filepath.Join(dir, "c"))
	errtest.None(t, err)
	defer ln.Close()
	c, err := net.Dial("unix", ln.Addr().String())
	errtest.None(t, err)
	far, err = ln.Accept()
	errtest.None(t, err)
	return c, far
}

func newHost(t *testing.T, c net.Conn) *host {
	h := &host{Peer: guest.NewPeer(c), c: c, exit: make(chan guest.ExitNote, 4), out: map[uint64]string{}}
	var run sync.WaitGroup
	run.Go(func() { _ = h.Run(nil, h.handle) })
	t.Cleanup(func() { c.Close(); run.Wait() })
	return h
}

func (p *port) connect(t *testing.T) *host {
	t.Helper()
	c, far := ends(t)
	h := newHost(t, c)
	p.mu.Lock()
	p.c = far
	p.cond.Broadcast()
	p.mu.Unlock()
	return h
}

func (h *host) handle(q guest.Request) (any, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch q.Method {
	case guest.Log:
		var n guest.LogNote
		if err := json.Unmarshal(q.Params, &n); err != nil {
			return nil, err
		}
		h.log, h.lost = append(h.log, n.Data...), h.lost+n.Dropped
	case guest.Output:
		var n guest.OutputNote
		if err := json.Unmarshal(q.Params, &n); err != nil || len(n.Data) > guest.MaxOutput || n.Stream != 1 {
			return nil, errors.Join(err, errors.New("that is no part of stdout"))
		}
		h.out[n.Number] += string(n.Data)
	case guest.Exited:
		var n guest.ExitNote
		if err := json.Unmarshal(q.Params, &n); err != nil {
			return nil, err
		}
		h.exit <- n
	default:
		h.said = append(h.said, q)
		if strings.Contains(string(q.Params), "refuse") {
			return nil, errors.New("cannot do that")
		}
	}
	return nil, nil
}

func (h *host) text() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return string(h.log)
}

func (h *host) printed(number uint64) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.out[number]
}

func (h *host) methods() (out []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, q := range h.said {
		out = append(out, q.Method)
	}
	return out
}

func (h *host) do(t *testing.T, method string, params, result any) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	return h.Call(ctx, method, params, result)
}

func (h *host) must(t *testing.T, method string, params, result any) {
	t.Helper()
	errtest.None(t, h.do(t, method, params, result))
}

// begin runs a harness until the test ends, and returns its port.
func begin(t *testing.T, change func(*Config)) *port {
	t.Helper()
	p := newPort()
	cfg := Config{Channel: p, Card: "lo", Beat: 50 * time.Millisecond, SetClock: func(time.Time) error { return nil },
		Seed: func([]byte) error { return nil }, PowerOff: func() error { return nil }}
	if change != nil {
		change(&cfg)
	}
	h, err := New(cfg)
	errtest.None(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		p.Close()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(waitLimit):
			t.Error("the harness does not end")
		}
	})
	return p
}

func shell(line string) guest.RunCall {
	return guest.RunCall{Command: []string{"sh", "-c", line}, Env: []string{"PATH=/usr/bin:/bin", "FROM=host"}}
}

func TestRunLogsExit(t *testing.T) {
	h := begin(t, nil).connect(t)
	var a guest.HelloAnswer
	h.must(t, guest.Hello, nil, &a)
	if a.Version != guest.Version || a.Boot == "" || a.Running || a.Exit != nil {
		t.Errorf("hello: %+v", a)
	}
	if err := h.do(t, guest.Exec, guest.ExecCall{Command: []string{"true"}}, nil); err == nil {
		t.Error("a command ran without a workload")
	}
	h.must(t, guest.Run, shell(`echo out $FROM; echo err >&2; read x; exit 5`), nil) // has no input, so read returns EOF
	n := <-h.exit
	if n.Code != 5 || n.Signal != 0 {
		t.Errorf("exit %+v", n)
	}
	if got := h.text(); got != "out host\nerr\n" {
		t.Errorf("log %q: it must be complete before the exit is told", got)
	}
	h.must(t, guest.Hello, nil, &a)
	if a.Running || a.Exit == nil || a.Exit.Code != 5 {
		t.Errorf("hello after the end: %+v", a)
	}
	if err := h.do(t, guest.Run, shell("true"), nil); err == nil {
		t.Error("a second workload was accepted")
	}
}

// TestAbandonedCommands checks that commands whose host has gone are killed, and
// that other calls are answered while the maximum number of commands runs.
func TestAbandonedCommands(t *testing.T) {
	p := begin(t, nil)
	h := p.connect(t)
	h.must(t, guest.Hello, nil, nil)
	h.must(t, guest.Run, shell("sleep 1000"), nil)
	dir := t.TempDir()
	answers := make(chan guest.ExecAnswer, maxCommands)
	var calls sync.WaitGroup
	for n := range maxCommands {
		calls.Go(func() {
			var a guest.ExecAnswer
			q := guest.ExecCall{Number: uint64(n + 1), Command: []string{"sh", "-c", fmt.Sprintf("echo $$ >%s/%d.new; mv %[1]s/%[2]d.new %[1]s/%[2]d; sleep 1000", dir, n)}}
			if err := h.Call(t.Context(), guest.Exec, q, &a); err == nil {
				answers <- a
			}
		})
	}
	pids := make([]int, maxCommands)
	for n := range pids {
		pids[n] = pidIn(t, filepath.Join(dir, strconv.Itoa(n)))
	}
	err := h.do(t, guest.Exec, guest.ExecCall{Command: []string{"true"}}, nil)
	if no, ok := errors.AsType[*guest.Error](err); !ok || no.Code != guest.Refused {
		t.Errorf("one command too many: %v", err)
	}
	h.must(t, guest.Health, nil, nil)
	errtest.None(t, h.Notify(guest.Cancel, guest.CancelCall{Number: 3}))
	if a := <-answers; a.Code != 137 {
		t.Errorf("cancelled: %+v", a)
	}
	goneBy(t, pids[2])
	h.must(t, guest.Exec, guest.ExecCall{Command: []string{"true"}}, nil)
	h.c.Close() // the daemon dies, and another one connects
	calls.Wait()
	next := p.connect(t)
	next.must(t, guest.Hello, nil, nil)
	for _, pid := range pids {
		goneBy(t, pid)
	}
	var a guest.HealthAnswer
	if next.must(t, guest.Health, nil, &a); !a.Running {
		t.Error("the workload was ended too")
	}
}

// pidIn waits until a file contains a PID, and returns it.
func pidIn(t *testing.T, path string) (pid int) {
	t.Helper()
	waittest.Until(t, "a command runs", func() bool {
		b, err := os.ReadFile(path)
		if err == nil {
			pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
		}
		return err == nil
	})
	return pid
}

// goneBy waits until a process has ended.
func goneBy(t *testing.T, pid int) {
	t.Helper()
	waittest.Until(t, "a command is killed", func() bool { return syscall.Kill(pid, 0) != nil })
}

func TestExecSignalHealth(t *testing.T) {
	h := begin(t, nil).connect(t)
	h.must(t, guest.Run, shell(`trap 'echo bye; exit 9' TERM; while :; do sleep 0.05; done`), nil)
	for _, c := range []struct {
		q    guest.ExecCall
		want guest.ExecAnswer
	}{
		{guest.ExecCall{Command: []string{"sh", "-c", "echo $FROM $ALSO; pwd; exit 3"}, Env: []string{"ALSO=exec"}, Dir: "/tmp"},
			guest.ExecAnswer{Code: 3, Stdout: []byte("host exec\n/tmp\n")}},
		{guest.ExecCall{Command: []string{"sh", "-c", "kill -9 $$"}}, guest.ExecAnswer{Code: 137}},
		{guest.ExecCall{Command: []string{"sleep", "1000"}, Timeout: 50}, guest.ExecAnswer{Code: 137}},
		{guest.ExecCall{Command: []string{"sh", "-c", "sleep 1000 & echo parent"}}, guest.ExecAnswer{Stdout: []byte("parent\n")}},
	} {
		var a guest.ExecAnswer
		h.must(t, guest.Exec, c.q, &a)
		if a.Code != c.want.Code || string(a.Stdout) != string(c.want.Stdout) {
			t.Errorf("%v: %+v", c.q.Command, a)
		}
	}
	var big guest.ExecAnswer
	h.must(t, guest.Exec, guest.ExecCall{Command: []string{"sh", "-c", "seq 1 100000; echo last"}}, &big)
	if !big.Truncated || len(big.Stdout) != guest.MaxOutput || !strings.HasPrefix(string(big.Stdout), "1\n2\n") {
		t.Errorf("long output without notes: %d bytes, truncated %v", len(big.Stdout), big.Truncated)
	}
	var all guest.ExecAnswer
	h.must(t, guest.Exec, guest.ExecCall{Number: 7, Command: []string{"sh", "-c", "seq 1 100000; echo err >&2"}}, &all)
	if got := h.printed(7) + string(all.Stdout); all.Truncated || len(got) != 588895 || !strings.HasSuffix(got, "\n99999\n100000\n") || string(all.Stderr) != "err\n" {
		t.Errorf("long output: %d bytes, truncated %v, stderr %q", len(got), all.Truncated, all.Stderr)
	}
	if err := h.do(t, guest.Exec, guest.ExecCall{Command: []string{"no-such-program"}}, nil); err == nil || !strings.Contains(err.Error(), "no-such-program") {
		t.Errorf("a missing program: %v", err)
	}
	var a guest.HealthAnswer
	h.must(t, guest.Health, nil, &a)
	if !a.Running || a.CPUErr == "" || a.NetErr != "" || a.TCPErr != "" || a.Free <= 0 {
		t.Errorf("health without a control group: %+v", a)
	}
	err := h.do(t, "reboot", nil, nil)
	if no, ok := errors.AsType[*guest.Error](err); !ok || no.Code != guest.MethodNotFound {
		t.Errorf("an unknown call: %v", err)
	}
	if err := h.do(t, guest.Signal, guest.SignalCall{Signal: 99}, nil); err == nil {
		t.Error("signal 99 was sent")
	}
	h.must(t, guest.Signal, guest.SignalCall{Signal: 15}, nil)
	if n := <-h.exit; n.Code != 9 {
		t.Errorf("exit %+v", n)
	}
	if err := h.do(t, guest.Signal, guest.SignalCall{Signal: 15}, nil); err == nil {
		t.Error("a signal to what has ended")
	}
}

// pipeSize is the capacity of the pipe from a workload to the guest agent, in
// bytes.
const pipeSize = 64 << 10

// TestHostAway checks that the workload continues at full speed while the host does
// not read its output, and that a host that returns is told what it has missed.
func TestHostAway(t *testing.T) {
	p := begin(t, nil)
	h := p.connect(t)
	mark := filepath.Join(t.TempDir(), "mark")
	h.must(t, guest.Run, shell(`echo first; until [ -e `+mark+`.go ]; do sleep 0.01; done; seq 1 200000; touch `+mark+`; exit 4`), nil)
	waittest.Until(t, "the first line", func() bool { return h.text() == "first\n" })
	h.c.Close()
	waittest.Until(t, "the harness sees it", func() bool { return p.now() == nil })
	errtest.None(t, os.WriteFile(mark+".go", nil, 0o600))
	waittest.Until(t, "the workload writes more than anybody keeps", func() bool { _, err := os.Stat(mark); return err == nil })
	h = p.connect(t)
	var a guest.HelloAnswer
	waittest.Until(t, "the exit is known", func() bool { h.must(t, guest.Hello, nil, &a); return a.Exit != nil })
	if a.Exit.Code != 4 {
		t.Errorf("exit %+v", a.Exit)
	}
	waittest.Until(t, "the end of the output", func() bool { return strings.HasSuffix(h.text(), "\n200000\n") })
	var hl guest.HealthAnswer
	h.must(t, guest.Health, nil, &hl)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lost == 0 || h.lost != hl.Dropped || len(h.log) > ringSize+pipeSize+2*guest.MaxChunk {
		t.Errorf("lost %d, health says %d, kept %d", h.lost, hl.Dropped, len(h.log))
	}
}

// TestStuckHost checks that a host that is connected but does not read blocks
// nothing.
func TestStuckHost(t *testing.T) {
	p := newPort()
	mine, far := net.Pipe()
	p.c = far
	h, err := New(Config{Channel: p, Card: "lo", PowerOff: func() error { return nil }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() { _ = h.Run(ctx) })
	mark := filepath.Join(t.TempDir(), "mark")
	errtest.None(t, h.run(shell("seq 1 200000; touch "+mark+"; exec sleep 1000")))
	waittest.Until(t, "the workload is through", func() bool { _, err := os.Stat(mark); return err == nil })
	mine.Close()
	cancel()
	p.Close()
	run.Wait()
}

func TestClock(t *testing.T) {
	var at time.Time
	var drawn []byte
	named := ""
	h := begin(t, func(c *Config) {
		c.Rename = func(name, machine string) error { named = name + " " + machine; return nil }
		c.SetClock = func(x time.Time) error { at = x; return nil }
		c.Seed = func(b []byte) error { drawn = b; return nil }
	}).connect(t)
	to := time.Now().Add(time.Hour)
	var a guest.ClockAnswer
	h.must(t, guest.SetClock, guest.ClockCall{UnixNano: to.UnixNano(), Seed: make([]byte, 32)}, &a)
	if named != "" {
		t.Errorf("it was renamed to %s although it is no clone", named)
	}
	h.must(t, guest.SetClock, guest.ClockCall{UnixNano: to.UnixNano(), Seed: make([]byte, 32), Name: "c", Machine: "0f"}, nil)
	if named != "c 0f" {
		t.Errorf("a clone is %q", named)
	}
	if at.UnixNano() != to.UnixNano() || len(drawn) != 32 || time.Duration(a.Behind) < 59*time.Minute || time.Duration(a.Behind) > time.Hour {
		t.Errorf("set to %s with %d bytes, behind %s", at, len(drawn), time.Duration(a.Behind))
	}
	for _, n := range []int{0, 15, 513} {
		if err := h.do(t, guest.SetClock, guest.ClockCall{UnixNano: 1, Seed: make([]byte, n)}, nil); err == nil {
			t.Errorf("a seed of %d bytes was taken", n)
		}
	}
}

func TestSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	h := begin(t, func(c *Config) { c.Socket = path }).connect(t)
	h.must(t, guest.Run, shell(`echo socket $LULL_SOCKET; sleep 1000`), nil)
	waittest.Until(t, "the workload knows its socket", func() bool { return h.text() == "socket "+path+"\n" })
	ask := func(c net.Conn, line string) string {
		t.Helper()
		errtest.None(t, c.SetDeadline(time.Now().Add(waitLimit)))
		fmt.Fprintln(c, line)
		b := make([]byte, 512)
		n, err := c.Read(b)
		if err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		return string(b[:n])
	}
	dial := func() net.Conn {
		c, err := net.Dial("unix", path)
		errtest.None(t, err)
		t.Cleanup(func() { c.Close() })
		return c
	}
	a, b := dial(), dial()
	for _, x := range []struct{ line, want string }{
		{`{"jsonrpc":"2.0","id":1,"method":"keepalive","params":{"ttl_ms":1000,"reason":"r","holder":"me"}}`, `"ok":true`},
		{`{"jsonrpc":"2.0","id":2,"method":"keepalive","params":{"ttl_ms":1000,"reason":"refuse"}}`, `cannot do that`},
		{`{"jsonrpc":"2.0","id":3,"method":"next_due","params":{"in_ms":5}}`, `"ok":true`},
		{`{"jsonrpc":"2.0","id":4,"method":"activity","params":{"tcp":1}}`, `reads it itself`},
		{`{"jsonrpc":"2.0","id":5,"method":"busy"}`, `"ok":true`},
	} {
		if got := ask(a, x.line); !strings.Contains(got, x.want) {
			t.Errorf("%s: %s", x.line, got)
		}
	}
	ask(b, `{"jsonrpc":"2.0","id":1,"method":"busy"}`)
	a.Close()
	ask(b, `{"jsonrpc":"2.0","id":1,"method":"keepalive.release"}`)
	count := func(m string) (n int) {
		for _, x := range h.methods() {
			if x == m {
				n++
			}
		}
		return n
	}
	if count(guest.Busy) != 1 || count(guest.Waiting) != 0 {
		t.Errorf("while one is busy: %v", h.methods())
	}
	b.Close() // disconnect without notice
	waittest.Until(t, "none is busy", func() bool { return count(guest.Waiting) == 1 })
}

// TestShutdown checks that a shutdown kills a workload that ignores SIGTERM, with
// its descendants.
func TestShutdown(t *testing.T) {
	off := make(chan struct{})
	h := begin(t, func(c *Config) { c.PowerOff = func() error { close(off); return nil } }).connect(t)
	h.must(t, guest.Run, shell(`trap '' TERM; echo ready; while :; do sleep 0.05; done`), nil)
	waittest.Until(t, "it ignores signals", func() bool { return h.text() == "ready\n" })
	h.must(t, guest.Shutdown, guest.ShutdownCall{Grace: 50}, nil)
	select {
	case <-off:
	case <-time.After(waitLimit):
		t.Fatal("it does not power off")
	}
}

// TestReadings checks that the CPU time is that of the group, including children
// that have exited, and that heartbeats are sent only while the workload is active.
func TestReadings(t *testing.T) {
	group := ""
	for _, base := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		dir := filepath.Join(base, fmt.Sprintf("lull-harness-test-%d", os.Getpid()))
		if os.Mkdir(dir, 0o755) == nil {
			if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err == nil {
				group = dir
				break
			}
			os.Remove(dir)
		}
	}
	if group == "" {
		t.Skip("no control group (v2) can be made here")
	}
	t.Cleanup(func() {
		waittest.Until(t, "the group is empty", func() bool { return os.Remove(group) == nil })
	})
	h := begin(t, func(c *Config) { c.Group, c.Sys = group, t.TempDir() }).connect(t)
	h.must(t, guest.Run, shell(`sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'; echo done; exec sleep 1000`), nil)
	waittest.Until(t, "the child has ended", func() bool { return h.text() == "done\n" })
	var a, b guest.HealthAnswer
	h.must(t, guest.Health, nil, &a)
	if a.CPU <= 0 || a.CPUErr != "" || a.NetErr == "" {
		t.Errorf("health: %+v", a)
	}
	waittest.Until(t, "a heartbeat", func() bool { return len(h.methods()) > 0 })
	for _, m := range h.methods() {
		if m != guest.Activity {
			t.Errorf("said %s", m)
		}
	}
	h.must(t, guest.Health, nil, &b)
	if b.CPU < a.CPU {
		t.Errorf("CPU fell from %d to %d", a.CPU, b.CPU)
	}
}

func TestSmall(t *testing.T) {
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	out := programtest.Build(t, "lull/cmd/lull-harness")
	st, err := os.Stat(out)
	errtest.None(t, err)
	if st.Size() > 6<<20 {
		t.Errorf("lull-harness has %d bytes, at most 6 MiB", st.Size())
	}
	if b, err := exec.Command(out).CombinedOutput(); err == nil || !strings.Contains(string(b), "process 1") {
		t.Errorf("outside a guest: %v, %s", err, b)
	}
}
