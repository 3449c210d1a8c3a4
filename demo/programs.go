package main

import (
	"bufio"
	"context"
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
	name, addr, user string
	command          []string
	image            string // files of a microVM; empty for a process on this machine
	try              string // what a user types to wake it
	visit            func(addr string) (said string, err error)
}

// visitLimit bounds the wait of one client of the demo.
const visitLimit = time.Minute

// findPrograms prepares the installed programs and names the missing ones.
func findPrograms(s *stage) (found []program, missing []string) {
	for _, find := range []func(*stage) (program, error){webServer, redis, postgres, guest} {
		p, err := find(s)
		if err != nil {
			missing = append(missing, err.Error())
			continue
		}
		found = append(found, p)
	}
	return found, missing
}

func port() (string, error) {
	p, err := freeport.Take()
	return strconv.Itoa(p), err
}

// webServer uses Python if it is installed, otherwise the demo's own server.
func webServer(s *stage) (program, error) {
	n, err := port()
	if err != nil {
		return program{}, err
	}
	addr := "127.0.0.1:" + n
	root := filepath.Join(s.data, "www")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return program{}, err
	}
	if err := os.WriteFile(filepath.Join(root, "index.html"), []byte("I was asleep a moment ago.\n"), 0o644); err != nil {
		return program{}, err
	}
	p := program{name: "web", addr: addr, try: "curl http://" + addr + "/", visit: visitWeb}
	if python, err := exec.LookPath("python3"); err == nil {
		p.command = []string{python, "-m", "http.server", n, "--bind", "127.0.0.1", "--directory", root}
		return p, nil
	}
	self, err := os.Executable()
	p.command = []string{self, "-serve", addr}
	return p, err
}

func serveWeb(addr string) error {
	return (&http.Server{Addr: addr, ReadHeaderTimeout: visitLimit, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "I was asleep a moment ago.\n") // the client may be gone
	})}).ListenAndServe()
}

func visitWeb(addr string) (string, error) {
	c := &http.Client{Timeout: visitLimit, Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := c.Get("http://" + addr + "/")
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 1<<16))
	return fmt.Sprintf("status %d and %d bytes", res.StatusCode, len(b)), err
}

// guest is the demo's own web server in a microVM.
func guest(s *stage) (program, error) {
	lacks := func(what string) (program, error) {
		return program{}, fmt.Errorf("a microVM (%s; see: lull doctor)", what)
	}
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		return lacks("QEMU, Debian package qemu-system-x86")
	}
	if os.Getenv("LULL_GUEST_KERNEL") == "" {
		return lacks("a guest kernel; make demo fetches one where there is a network, and lull guest-kernel")
	}
	n, err := port()
	if err != nil {
		return program{}, err
	}
	self, err := os.Executable()
	if err != nil {
		return program{}, err
	}
	b, err := os.ReadFile(self)
	if err != nil {
		return program{}, err
	}
	image := filepath.Join(s.data, "guest")
	if err := os.MkdirAll(filepath.Join(image, "bin"), 0o755); err != nil {
		return program{}, err
	}
	if err := os.WriteFile(filepath.Join(image, "bin", "web"), b, 0o755); err != nil {
		return program{}, err
	}
	addr := "127.0.0.1:" + n
	return program{name: "guest", addr: addr, image: image, command: []string{"web", "-serve", ":80"}, try: "curl http://" + addr + "/", visit: visitWeb}, nil
}

func redis(s *stage) (program, error) {
	server, err := exec.LookPath("redis-server")
	if err != nil {
		return program{}, fmt.Errorf("Redis (Debian package redis-server)")
	}
	n, err := port()
	if err != nil {
		return program{}, err
	}
	return program{name: "redis", addr: "127.0.0.1:" + n, try: "redis-cli -p " + n + " incr visits", visit: visitRedis,
		command: []string{server, "--port", n, "--bind", "127.0.0.1", "--save", "", "--dir", s.data}}, nil
}

func visitRedis(addr string) (string, error) {
	c, err := net.DialTimeout("tcp", addr, visitLimit)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(visitLimit)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c, "INCR visits\r\n"); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	return "visits is " + strings.Trim(line, ":\r\n"), err
}

// postgres creates a database. As root it runs as Debian's user postgres,
// because PostgreSQL refuses root.
func postgres(s *stage) (program, error) {
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if err != nil || len(found) == 0 {
		return program{}, fmt.Errorf("PostgreSQL (Debian package postgresql)")
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
		return program{}, fmt.Errorf("PostgreSQL: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-N", "--locale=C", "-E", "UTF8")
	cmd.Dir, cmd.SysProcAttr = data, &syscall.SysProcAttr{Credential: cred}
	if out, err := cmd.CombinedOutput(); err != nil {
		return program{}, fmt.Errorf("PostgreSQL: initdb: %w: %s", err, lastLine(out))
	}
	return program{name: "postgres", addr: "127.0.0.1:" + n, user: who, visit: visitPostgres,
		try:     "psql -h 127.0.0.1 -p " + n + " -U postgres -c 'select now()'",
		command: []string{filepath.Join(bin, "postgres"), "-D", data, "-h", "127.0.0.1", "-p", n, "-k", data, "-c", "fsync=off"}}, nil
}

func lastLine(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return lines[len(lines)-1]
}

// databaseUser returns the user that runs PostgreSQL here; nil means the user
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

func visitPostgres(addr string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), visitLimit)
	defer cancel()
	_, n, err := net.SplitHostPort(addr)
	if err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, "psql", "-X", "-A", "-t", "-h", "127.0.0.1", "-p", n, "-U", "postgres", "-c", "select 'forty-two'").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, lastLine(out))
	}
	return "it says " + lastLine(out), nil
}
