package sockets

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/errtest"
)

// partEnv makes the test binary act as a program; nobodyEnv means that the
// tests already run as an ordinary user.
const (
	partEnv   = "LULL_SOCKETS_TEST_PART"
	nobodyEnv = "LULL_SOCKETS_TEST_NOBODY"
)

func TestMain(m *testing.M) {
	switch os.Getenv(partEnv) {
	case "":
		os.Exit(m.Run())
	case "netns":
		loopbackUp()
		fallthrough
	case "server":
		serve(os.Getenv("LULL_SOCKETS_TEST_ADDR"))
	}
}

// serve is a tiny program. It echoes each line. On the line "close" it closes the
// connection and then prints "closed".
func serve(addr string) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		panic(err)
	}
	fmt.Println(l.Addr())
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				panic(err)
			}
			fmt.Println("accepted")
			go func() {
				lines := bufio.NewScanner(c)
				for lines.Scan() {
					if lines.Text() == "close" {
						_ = c.Close()
						fmt.Println("closed")
						return
					}
					_, _ = fmt.Fprintln(c, lines.Text())
				}
				_ = c.Close()
			}()
		}
	}()
	_, _ = io.Copy(io.Discard, os.Stdin)
}

func loopbackUp() {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		panic(err)
	}
	req, err := unix.NewIfreq("lo")
	if err != nil {
		panic(err)
	}
	req.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		panic(err)
	}
	_ = unix.Close(fd)
}

// program is a child process that acts as a program under test.
type program struct {
	*testing.T
	cmd  *exec.Cmd
	out  *bufio.Scanner
	addr string
}

func newProgram(t *testing.T) *program { return startPart(t, "server", "127.0.0.1:0", nil) }

func startPart(t *testing.T, part, addr string, attr *syscall.SysProcAttr) *program {
	t.Helper()
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), partEnv+"="+part, "LULL_SOCKETS_TEST_ADDR="+addr)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = attr
	in, err := cmd.StdinPipe()
	errtest.None(t, err)
	out, err := cmd.StdoutPipe()
	errtest.None(t, err)
	errtest.None(t, cmd.Start())
	p := &program{T: t, cmd: cmd, out: bufio.NewScanner(out)}
	t.Cleanup(func() {
		_ = in.Close()
		p.kill()
	})
	p.addr = p.line()
	return p
}

func (p *program) pid() int { return p.cmd.Process.Pid }

func (p *program) line() string {
	p.Helper()
	if !p.out.Scan() {
		p.Fatalf("the program said nothing: %v", p.out.Err())
	}
	return p.out.Text()
}

func (p *program) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// freeze stops the program and returns when every thread has stopped.
func (p *program) freeze() {
	p.Helper()
	if err := syscall.Kill(p.pid(), syscall.SIGSTOP); err != nil {
		p.Fatal(err)
	}
	var ws syscall.WaitStatus
	for {
		_, err := syscall.Wait4(p.pid(), &ws, syscall.WUNTRACED, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || !ws.Stopped() {
			p.Fatalf("the program did not stop: %v %v", ws, err)
		}
		return
	}
}

func (p *program) thaw() {
	p.Helper()
	if err := syscall.Kill(p.pid(), syscall.SIGCONT); err != nil {
		p.Fatal(err)
	}
}

// dups duplicates every TCP socket of the program, as the runtime does.
func (p *program) dups() []Dup {
	p.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", p.pid())
	entries, err := os.ReadDir(dir)
	if err != nil {
		p.Fatal(err)
	}
	var fds []int
	for _, e := range entries {
		link, _ := os.Readlink(filepath.Join(dir, e.Name()))
		if n, err := strconv.Atoi(e.Name()); err == nil && strings.HasPrefix(link, "socket:") {
			fds = append(fds, n)
		}
	}
	taken, err := Duplicate(p.pid(), fds)
	if err != nil {
		p.Fatal(err)
	}
	var dups []Dup
	for _, fd := range taken {
		in, err := Inspect(fd)
		if err != nil {
			p.Fatal(err)
		}
		d := Dup{FD: fd, Kind: Stream, Name: "tcp " + in.Local.String()}
		if in.Listening {
			d.Kind = Listener
		}
		dups = append(dups, d)
	}
	return dups
}

func (p *program) dial() net.Conn {
	p.Helper()
	c, err := net.Dial("tcp", p.addr)
	if err != nil {
		p.Fatal(err)
	}
	p.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(2 * time.Minute))
	return c
}

// connect connects to the program and waits until it has accepted.
func (p *program) connect() net.Conn {
	p.Helper()
	c := p.dial()
	if got := p.line(); got != "accepted" {
		p.Fatalf("the program said %q", got)
	}
	return c
}

func say(t *testing.T, c net.Conn, text string) {
	t.Helper()
	errtest.Get(fmt.Fprintln(c, text))(t)
}

func expect(t *testing.T, c net.Conn, want string) {
	t.Helper()
	got, err := bufio.NewReader(c).ReadString('\n')
	if err != nil || got != want+"\n" {
		t.Fatalf("heard %q, %v, want %q", got, err, want)
	}
}

// newPoller starts a poller. At the end of the test it checks that all its
// descriptors are closed.
func newPoller(t testing.TB) *Poller {
	t.Helper()
	p, err := NewPoller()
	errtest.None(t, err)
	ran := make(chan error, 1)
	go func() { ran <- p.Run(context.Background()) }()
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if err := <-ran; err != nil && !strings.Contains(err.Error(), ErrClosed.Error()) {
			t.Error(err)
		}
		if p.Len() != 0 {
			t.Errorf("%d guards are left", p.Len())
		}
	})
	return p
}

func guard(t testing.TB, p *Poller, dups []Dup) (*Guard, <-chan string) {
	t.Helper()
	woken := make(chan string, 64)
	g, err := p.Guard(dups, func(reason string) { woken <- reason })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	return g, woken
}

func awaken(t testing.TB, woken <-chan string, prefix string) {
	t.Helper()
	select {
	case reason := <-woken:
		if !strings.HasPrefix(reason, prefix) {
			t.Fatalf("woken by %q, want %q", reason, prefix)
		}
	case <-time.After(2 * time.Minute):
		t.Fatalf("not woken; want %q", prefix)
	}
}

// openFDs counts this process's descriptors.
func openFDs(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	errtest.None(t, err)
	return len(entries)
}

func port(t testing.TB, addr string) uint16 {
	t.Helper()
	_, text, err := net.SplitHostPort(addr)
	errtest.None(t, err)
	n, err := strconv.ParseUint(text, 10, 16)
	errtest.None(t, err)
	return uint16(n)
}

// TestAsOrdinaryUser runs this package's tests again as user nobody, which may
// duplicate only the sockets of its own children.
func TestAsOrdinaryUser(t *testing.T) {
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	if os.Getuid() != 0 {
		t.Skip("this run is an ordinary user's already")
	}
	dir, err := os.MkdirTemp("", "lull-sockets")
	errtest.None(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	errtest.None(t, os.Chmod(dir, 0o777|os.ModeSticky))
	binary, err := os.ReadFile("/proc/self/exe")
	errtest.None(t, err)
	exe := filepath.Join(dir, "sockets.test")
	errtest.None(t, os.WriteFile(exe, binary, 0o755))
	errtest.None(t, os.Chmod(exe, 0o755))
	const nobody = 65534
	cmd := exec.Command(exe, "-test.run=^Test", "-test.v")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), nobodyEnv+"=1", "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("as nobody: %v\n%s", err, out)
	}
	passed := strings.Count(string(out), "--- PASS")
	for _, need := range []string{"TestGuardWakesAFrozenProgram", "TestDuplicateOfAStranger", "TestTrapEndedProgramAccepts", "TestDumpSeesTheBacklog"} {
		if !strings.Contains(string(out), "--- PASS: "+need) {
			t.Errorf("%s did not pass as nobody:\n%s", need, out)
		}
	}
	t.Logf("%d tests passed as nobody", passed)
}
