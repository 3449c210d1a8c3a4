package hosttest

import (
	"bytes"
	"io"
	"math/rand/v2"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl/execstream"
)

// attached is a command whose streams are connected to the test.
type attached struct {
	t       *testing.T
	m       Machine
	in      *io.PipeWriter
	control chan instance.Control
	over    chan struct{}
	rw      io.Closer

	mu     sync.Mutex
	out    bytes.Buffer
	result execstream.Result
	err    error
}

// attach starts a command, or a script with sh -c.
func attach(t *testing.T, m Machine, name string, q execstream.Request, script ...string) *attached {
	t.Helper()
	q.Command.Command = script
	rw := m.Attach(t, name, q)
	r, w := io.Pipe()
	a := &attached{t: t, m: m, in: w, control: make(chan instance.Control), over: make(chan struct{}), rw: rw}
	s := instance.Streams{Out: a, Err: io.Discard, Control: a.control}
	if q.Input {
		s.In = r
	}
	go func() {
		defer close(a.over)
		a.result, a.err = execstream.Run(rw, s)
	}()
	t.Cleanup(func() { rw.Close(); r.Close(); <-a.over })
	return a
}

func (a *attached) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.out.Write(p)
}

func (a *attached) text() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return strings.ReplaceAll(a.out.String(), "\r", "")
}

// says waits until the command has printed what.
func (a *attached) says(what string) {
	a.t.Helper()
	a.m.Until(a.t, "the command prints "+what, func() bool {
		select {
		case <-a.over:
			if !strings.Contains(a.text(), what) {
				a.t.Fatalf("it ended with %+v, %v and printed %q", a.result, a.err, a.text())
			}
		default:
		}
		return strings.Contains(a.text(), what)
	})
}

// ends waits until the command has ended, which must be with this exit code.
func (a *attached) ends(code int) {
	a.t.Helper()
	a.m.Until(a.t, "the command ends", func() bool {
		select {
		case <-a.over:
			return true
		default:
			return false
		}
	})
	if a.err != nil || a.result.ExitCode != code {
		a.t.Errorf("it ended with %+v, %v, want code %d; it printed %.200q", a.result, a.err, code, a.text())
	}
}

// execInput checks commands whose input ends, and commands whose input stays open.
func execInput(t *testing.T, m Machine) {
	m.Run(t, "reads", Serve, soon)
	is(t, m, "reads", "paused")
	const size = 10_000_000
	bytes := make([]byte, size)
	for n := range bytes {
		bytes[n] = byte(rand.Uint32())
	}
	a := attach(t, m, "reads", execstream.Request{Input: true}, "cat")
	_, err := a.in.Write(bytes)
	must(t, err)
	a.m.Until(t, "everything came back before the end of the input", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.out.Len() >= size
	})
	if o, err := m.Get("reads"); err != nil || o.State != "running" {
		t.Errorf("while a command runs, it is %s, %v", o.State, err)
	}
	must(t, a.in.Close())
	a.ends(0)
	if a.out.String() != string(bytes) {
		t.Errorf("got %d of %d bytes, or others", a.out.Len(), size)
	}
	a = attach(t, m, "reads", execstream.Request{Input: true}, "sh", "-c", "wc -c; exit 4")
	_, err = a.in.Write([]byte("12345"))
	must(t, err)
	must(t, a.in.Close())
	a.ends(4)
	if strings.TrimSpace(a.text()) != "5" {
		t.Errorf("it counted %q", a.text())
	}
	// A command that does not read its input is not delayed, and still gets
	// signals.
	a = attach(t, m, "reads", execstream.Request{Input: true}, "sh", "-c", "echo up; exec sleep 1000")
	a.says("up\n")
	go func() { _, _ = a.in.Write(bytes) }() // blocks until the test ends
	a.control <- instance.Control{Signal: syscall.SIGINT}
	a.ends(128 + int(syscall.SIGINT))
	a = attach(t, m, "reads", execstream.Request{}, "no-such-command-anywhere")
	a.ends(instance.NotThere)
	a = attach(t, m, "reads", execstream.Request{}, "/")
	a.ends(instance.CannotRun)
	asks(t, m, "reads")
	remove(t, m, "reads")
}

// execTerminal checks commands on a terminal.
func execTerminal(t *testing.T, m Machine) {
	m.Run(t, "tty", Serve, soon)
	q := execstream.Request{Input: true, TTY: true, Size: instance.Size{Rows: 33, Cols: 101}}
	a := attach(t, m, "tty", q, "sh", "-c", `tty; until [ "$(stty size 2>/dev/null)" = "33 101" ]; do sleep 0.1; done; trap "stty size; exit 5" WINCH; echo up; while :; do sleep 0.1; done`)
	a.says("up\n")
	if !regexp.MustCompile(`^/dev/pts/\d+\nup\n`).MatchString(a.text()) {
		t.Errorf("it is on %q", a.text())
	}
	a.control <- instance.Control{Size: instance.Size{Rows: 44, Cols: 55}}
	a.ends(5)
	if !strings.HasSuffix(a.text(), "44 55\n") {
		t.Errorf("after the change of size it printed %q", a.text())
	}
	// Ctrl-C ends only the command.
	a = attach(t, m, "tty", q, "sh", "-c", `trap "exit 9" INT; echo up; while :; do sleep 0.1; done`)
	a.says("up\n")
	_, err := a.in.Write([]byte{3})
	must(t, err)
	a.ends(9)
	// A client disconnects from an interactive shell.
	a = attach(t, m, "tty", q, "sh")
	_, err = a.in.Write([]byte("echo pid=$$.\n"))
	must(t, err)
	a.says("pid=")
	var pid []string
	m.Until(t, "it prints its PID", func() bool {
		pid = regexp.MustCompile(`pid=(\d+)\.`).FindStringSubmatch(a.text())
		return pid != nil
	})
	must(t, a.rw.Close())
	<-a.over
	ended(t, m, "tty", pid[1])
	asks(t, m, "tty")
	remove(t, m, "tty")
}

// ended waits until a process of an instance has ended.
func ended(t *testing.T, m Machine, name, pid string) {
	t.Helper()
	m.Until(t, "process "+pid+" has ended", func() bool {
		o, err := m.Exec(name, "sh", "-c", "kill -0 "+pid+" 2>/dev/null && ! grep -q '^State:.Z' /proc/"+pid+"/status")
		must(t, err)
		return o.ExitCode != 0
	})
}

// execEnds kills the daemon while commands run that ignore all signals that can be
// ignored. It checks that none of them is left.
func execEnds(t *testing.T, m Machine) {
	m.Run(t, "left", Serve, never)
	var pids []string
	for _, tty := range []bool{false, true} {
		a := attach(t, m, "left", execstream.Request{Input: true, TTY: tty}, "sh", "-c", `trap "" HUP TERM INT PIPE; echo pid=$$.; while :; do sleep 0.1; done`)
		a.says(".\n")
		pids = append(pids, regexp.MustCompile(`pid=(\d+)\.`).FindStringSubmatch(a.text())[1])
	}
	m.Crash(t, func() {})
	is(t, m, "left", "running")
	for _, pid := range pids {
		ended(t, m, "left", pid)
	}
	asks(t, m, "left")
	remove(t, m, "left")
}
