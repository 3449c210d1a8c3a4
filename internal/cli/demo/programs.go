package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"lull/internal/lib/freeport"
)

// program is a program that the demo runs.
type program struct {
	name, what string
	addr, user string
	command    []string
	image      string // files of the microVM; empty for a process on this machine
	try        string // command that a user can type to wake it
	visit      func(ctx context.Context, addr string) (said string, err error)
}

// visitLimit is how long a client of the demo waits for an answer.
const visitLimit = time.Minute

// page is the answer of the demo's web servers.
const page = "I was asleep a moment ago.\n"

// found is a program of the demo, or the reason why this machine cannot run it.
type found struct {
	name    string
	prepare func(context.Context, *stage) (program, error)
}

var finders = []found{{"web", webServer}, {"redis", redis}, {"postgres", postgres}}

func port() (string, error) {
	p, err := freeport.Take()
	return strconv.Itoa(p), err
}

// webServer uses Python if it is installed, otherwise the demo's own server.
func webServer(_ context.Context, s *stage) (program, error) {
	n, err := port()
	if err != nil {
		return program{}, err
	}
	addr := "127.0.0.1:" + n
	root := filepath.Join(s.data, "www")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return program{}, err
	}
	if err := os.WriteFile(filepath.Join(root, "index.html"), []byte(page), 0o644); err != nil {
		return program{}, err
	}
	p := program{name: "web", what: "Python's web server", addr: addr, try: fetch(addr), visit: visitWeb}
	if python, err := exec.LookPath("python3"); err == nil {
		p.command = []string{python, "-m", "http.server", n, "--bind", "127.0.0.1", "--directory", root}
		return p, nil
	}
	p.what, p.command = "a small web server", []string{s.Program, "demo", "--serve", addr}
	return p, nil
}

// fetch returns a command that fetches a page with a program that is installed here;
// otherwise the page's address.
func fetch(addr string) string {
	if _, err := exec.LookPath("curl"); err == nil {
		return "curl http://" + addr
	}
	if _, err := exec.LookPath("wget"); err == nil {
		return "wget -qO- http://" + addr
	}
	if _, err := exec.LookPath("bash"); err == nil {
		return "bash -c ': >/dev/tcp/" + strings.Replace(addr, ":", "/", 1) + "'"
	}
	return "http://" + addr
}

func visitWeb(ctx context.Context, addr string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, visitLimit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", "http://"+addr+"/", nil)
	if err != nil {
		return "", err
	}
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, io.LimitReader(res.Body, 1<<16))
	return fmt.Sprintf("status %d", res.StatusCode), err
}

// guest returns the demo's own web server in a microVM. missing is why the host
// cannot run microVMs; empty if it can.
func guest(s *stage, missing string) (program, error) {
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		return program{}, errors.New("a microVM: QEMU is not installed (Debian: qemu-system-x86)")
	}
	if s.Kernel == "" && missing != "" {
		return program{}, errors.New("a microVM: no guest kernel; lull guest-kernel fetches one")
	}
	if missing != "" {
		why, _, _ := strings.Cut(missing, "\n")
		return program{}, fmt.Errorf("a microVM: %s", why)
	}
	n, err := port()
	if err != nil {
		return program{}, err
	}
	b, err := os.ReadFile(s.Program)
	if err != nil {
		return program{}, err
	}
	image := filepath.Join(s.data, "guest")
	if err := os.MkdirAll(filepath.Join(image, "bin"), 0o755); err != nil {
		return program{}, err
	}
	if err := os.WriteFile(filepath.Join(image, "bin", "lull"), b, 0o755); err != nil {
		return program{}, err
	}
	addr := "127.0.0.1:" + n
	return program{name: "guest", what: "a web server in a microVM, which sleeps on disk", addr: addr, image: image,
		command: []string{"lull", "demo", "--serve", ":80"}, try: fetch(addr), visit: visitWeb}, nil
}

func redis(_ context.Context, s *stage) (program, error) {
	server, err := exec.LookPath("redis-server")
	if err != nil {
		return program{}, errors.New("not installed (Debian: redis-server)")
	}
	n, err := port()
	if err != nil {
		return program{}, err
	}
	return program{name: "redis", what: "Redis", addr: "127.0.0.1:" + n, try: "redis-cli -p " + n + " incr visits", visit: visitRedis,
		command: []string{server, "--port", n, "--bind", "127.0.0.1", "--save", "", "--dir", s.data}}, nil
}

func visitRedis(ctx context.Context, addr string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, visitLimit)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return "", err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if _, err := io.WriteString(c, "INCR visits\r\n"); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	return "visit number " + strings.Trim(line, ":\r\n"), err
}

// postgres creates a database and returns the server for it. As root it uses Debian's
// user postgres, because PostgreSQL refuses to run as root.
func postgres(ctx context.Context, s *stage) (program, error) {
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if err != nil || len(found) == 0 {
		return program{}, errors.New("not installed (Debian: postgresql)")
	}
	bin := filepath.Dir(found[len(found)-1])
	n, err := port()
	if err != nil {
		return program{}, err
	}
	data := filepath.Join(s.data, "postgres")
	who, cred, err := databaseUser()
	if err == nil {
		err = os.Mkdir(data, 0o700)
	}
	if err == nil && cred != nil {
		err = os.Chown(data, int(cred.Uid), int(cred.Gid))
	}
	if err != nil {
		return program{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-N", "--locale=C", "-E", "UTF8")
	cmd.Dir, cmd.SysProcAttr = data, &syscall.SysProcAttr{Credential: cred}
	if out, err := cmd.CombinedOutput(); err != nil {
		return program{}, fmt.Errorf("initdb: %w: %s", err, lastLine(out))
	}
	return program{name: "postgres", what: "PostgreSQL", addr: "127.0.0.1:" + n, user: who, visit: visitPostgres(bin),
		try:     "psql -h 127.0.0.1 -p " + n + " -U postgres -c 'select now()'",
		command: []string{filepath.Join(bin, "postgres"), "-D", data, "-h", "127.0.0.1", "-p", n, "-k", data, "-c", "fsync=off"}}, nil
}

func lastLine(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return lines[len(lines)-1]
}

// databaseUser returns the user to run PostgreSQL as; a nil credential means the user
// of the demo.
func databaseUser() (string, *syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return "", nil, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		return "", nil, err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return "", nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	return u.Username, &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, err
}

// visitPostgres returns a visit that connects with psql of the installation in bin.
func visitPostgres(bin string) func(context.Context, string) (string, error) {
	return func(ctx context.Context, addr string) (string, error) {
		ctx, cancel := context.WithTimeout(ctx, visitLimit)
		defer cancel()
		_, n, err := net.SplitHostPort(addr)
		if err != nil {
			return "", err
		}
		out, err := exec.CommandContext(ctx, filepath.Join(bin, "psql"), "-X", "-A", "-t", "-h", "127.0.0.1", "-p", n, "-U", "postgres", "-c", "select 42").CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("%w: %s", err, lastLine(out))
		}
		return "select 42 is " + lastLine(out), nil
	}
}
