package machines

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"lull/internal/daemon/host/daemontest"
	"lull/internal/idle"
	"lull/internal/instance"
)

// service is the Python program of the guest: it answers every line with the
// time of its clock and how many lines it has seen.
const service = `import socketserver, threading, time
seen, lock = 0, threading.Lock()
class H(socketserver.StreamRequestHandler):
    def handle(self):
        global seen
        for _ in self.rfile:
            with lock:
                seen += 1
                n = seen
            self.wfile.write(b"%d %d\n" % (time.time_ns(), n))
class S(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
S(("0.0.0.0", 9000), H).serve_forever()
`

const nginxConf = `user root; daemon off; worker_processes 1; pid /tmp/nginx.pid; error_log stderr;
events {}
http { access_log off; client_body_temp_path /tmp/b; proxy_temp_path /tmp/p; fastcgi_temp_path /tmp/f; uwsgi_temp_path /tmp/u; scgi_temp_path /tmp/s;
server { listen 0.0.0.0:80; root /srv; } }
`

const startAll = `#!/bin/sh
redis-server --bind 0.0.0.0 --protected-mode no --save "" --appendonly no --logfile "" &
python3 -S -E /srv/service.py &
exec nginx -p /tmp -c /srv/nginx.conf
`

// tree makes the files of a guest: with LULL_DEBOOTSTRAP a whole Debian, and
// otherwise the programs of this machine with what they need.
func tree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if os.Getenv("LULL_DEBOOTSTRAP") != "" {
		out, err := exec.Command("debootstrap", "--variant=minbase", "--include=nginx-light,redis-server,python3", "bookworm", dir).CombinedOutput()
		if err != nil {
			t.Fatalf("debootstrap: %v\n%s", err, out)
		}
	} else {
		for _, d := range []string{"tmp", "etc", "root", "var/log/nginx", "var/lib/nginx"} {
			if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		var lib string
		for _, p := range []string{"sh", "redis-server", "nginx", "python3"} {
			path, err := exec.LookPath("/usr/bin/" + p) // Debian's, whatever PATH prefers
			if err != nil {
				path, err = exec.LookPath("/usr/sbin/" + p)
			}
			daemontest.Need(t, err, map[string]string{"sh": "dash", "redis-server": "redis-server", "nginx": "nginx-light", "python3": "python3"}[p])
			bring(t, dir, path, filepath.Join(dir, "usr", "bin", p))
			if p == "sh" {
				bring(t, dir, path, filepath.Join(dir, "bin", p))
			}
			if p == "python3" {
				b, err := exec.Command(path, "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))").Output()
				if err != nil {
					t.Fatal(err)
				}
				lib = strings.TrimSpace(string(b))
			}
		}
		modules(t, lib, filepath.Join(dir, lib))
		for name, text := range map[string]string{"passwd": "root:x:0:0::/root:/bin/sh\n", "group": "root:x:0:\n"} {
			if err := os.WriteFile(filepath.Join(dir, "etc", name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	big := make([]byte, 300_000)
	src := rand.NewChaCha8([32]byte{})
	_, _ = src.Read(big) // never fails
	for name, b := range map[string][]byte{"service.py": []byte(service), "nginx.conf": []byte(nginxConf), "start": []byte(startAll), "big": big} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, "srv"), 0o755), os.WriteFile(filepath.Join(dir, "srv", name), b, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// bring copies a program, and the libraries that it is linked to.
func bring(t *testing.T, root, from, to string) {
	t.Helper()
	out, _ := exec.Command("ldd", from).Output() // fails for a static one
	files := map[string]string{from: to}
	for line := range strings.Lines(string(out)) {
		for _, f := range strings.Fields(line) {
			if filepath.IsAbs(f) {
				files[f] = filepath.Join(root, f)
			}
		}
	}
	for from, to := range files {
		b, err := os.ReadFile(from)
		if err == nil {
			err = errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, b, 0o755))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// modules copies Python's own modules without what the service never imports.
func modules(t *testing.T, from, to string) {
	t.Helper()
	skip := map[string]bool{"test": true, "tests": true, "idlelib": true, "lib2to3": true, "ensurepip": true, "distutils": true,
		"tkinter": true, "pydoc_data": true, "dist-packages": true, "site-packages": true, "unittest": true, "asyncio": true}
	err := filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && skip[d.Name()] {
			return fs.SkipDir
		}
		if !d.Type().IsRegular() || strings.Contains(d.Name(), "config-") || strings.HasSuffix(d.Name(), ".a") {
			return nil
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		dst := filepath.Join(to, rel)
		return errors.Join(os.MkdirAll(filepath.Dir(dst), 0o755), os.WriteFile(dst, b, 0o644))
	})
	if err != nil {
		t.Fatal(err)
	}
}

// client checks everything that the guest's programs answer.
type client struct {
	b     *box
	kept  net.Conn // open all the time, to Redis
	in    *bufio.Reader
	n     int // rounds so far, and Redis's counter
	lines int // lines that the service was sent
	sum   [32]byte
	off   time.Duration // largest offset of the guest's clock that was seen
}

func (c *client) redis(command ...string) string {
	c.b.T.Helper()
	var s strings.Builder
	fmt.Fprintf(&s, "*%d\r\n", len(command))
	for _, a := range command {
		fmt.Fprintf(&s, "$%d\r\n%s\r\n", len(a), a)
	}
	if err := c.kept.SetDeadline(time.Now().Add(daemontest.Patience)); err != nil {
		c.b.T.Fatal(err)
	}
	if _, err := io.WriteString(c.kept, s.String()); err != nil {
		c.b.T.Fatalf("redis: %v", err)
	}
	line, err := c.in.ReadString('\n')
	if err != nil {
		c.b.T.Fatalf("redis, on the connection that was open all the time: %v; it is %+v", err, c.b.get())
	}
	line = strings.TrimSpace(line)
	if size, ok := strings.CutPrefix(line, "$"); ok {
		n, err := strconv.Atoi(size)
		if err != nil || n < 0 {
			c.b.T.Fatalf("redis: %q", line)
		}
		v := make([]byte, n+2)
		if _, err := io.ReadFull(c.in, v); err != nil {
			c.b.T.Fatalf("redis: %v", err)
		}
		return string(v[:n])
	}
	return line
}

// visit is one round: the connection that stays, and new ones to all three.
func (c *client) visit() {
	t := c.b.T
	t.Helper()
	c.n++
	if got := c.redis("INCR", "n"); got != ":"+strconv.Itoa(c.n) {
		t.Fatalf("redis counts %s, want %d", got, c.n)
	}
	value := strings.Repeat(strconv.Itoa(c.n), 5000)
	if got := c.redis("SET", "v"+strconv.Itoa(c.n), value); got != "+OK" {
		t.Fatalf("redis: %s", got)
	}
	for k := 1; k <= c.n; k++ {
		if c.redis("GET", "v"+strconv.Itoa(k)) != strings.Repeat(strconv.Itoa(k), 5000) {
			t.Fatalf("redis: the value of round %d is another in round %d", k, c.n)
		}
	}
	h := http.Client{Timeout: daemontest.Patience, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := h.Get("http://" + c.b.addrs[0] + "/big")
	if err != nil {
		t.Fatalf("nginx: %v", err)
	}
	body, err := io.ReadAll(r.Body)
	r.Body.Close()
	if err != nil || sha256.Sum256(body) != c.sum {
		t.Fatalf("nginx: %d bytes, %v, or another checksum", len(body), err)
	}
	began := time.Now()
	p := c.b.dial(2)
	defer p.Close()
	var at int64
	var lines int
	if _, err := fmt.Sscan(c.b.ask(p, "x"), &at, &lines); err != nil {
		t.Fatal(err)
	}
	trip := time.Since(began)
	if c.lines++; lines != c.lines {
		t.Fatalf("the service has seen %d lines, want %d", lines, c.lines)
	}
	off := time.Unix(0, at).Sub(began.Add(trip / 2)).Abs()
	c.off = max(c.off, off)
	if off > trip+5*time.Second {
		t.Fatalf("the guest's clock is %s off", off)
	}
}

// TestProgramsOnEveryRung: nginx, Redis and a Python service in one guest are
// paused, reclaimed and hibernated over and over. Clients that come and one
// that stays see no error, nothing is lost, and the clock is right after each
// wake.
func TestProgramsOnEveryRung(t *testing.T) {
	d := host(t)
	files := tree(t)
	b := run(d, "trio", files, []int{80, 6379, 9000}, func(s *instance.Spec) {
		s.Memory, s.QuietConnectionAfter = 256<<20, idle.Duration(time.Second)
		s.ReclaimAfter, s.HibernateAfter = idle.Duration(2*time.Second), idle.Duration(4*time.Second)
	}, "/bin/sh", "/srv/start")
	big, err := os.ReadFile(filepath.Join(files, "srv", "big"))
	if err != nil {
		t.Fatal(err)
	}
	c := &client{b: b, kept: b.dial(1), sum: sha256.Sum256(big)}
	defer c.kept.Close()
	c.in = bufio.NewReader(c.kept)
	c.visit()
	for _, rung := range []string{"paused", "reclaimed", "hibernated"} {
		woken := 0
		for range rounds(t) {
			b.sinks(rung)
			was := b.get().State
			c.visit()
			if was == rung {
				woken++
			}
		}
		t.Logf("%s: %d rounds, %d woken from it", rung, rounds(t), woken)
	}
	o := b.get()
	if o.RestartCount != 0 || o.BootedAnew != "" || int(o.WakeCount) < 3*rounds(t) {
		t.Errorf("%d wakes, %d restarts, booted anew %q", o.WakeCount, o.RestartCount, o.BootedAnew)
	}
	t.Logf("%d wakes; the guest's clock was at most %s off, its round trip included", o.WakeCount, c.off.Round(time.Millisecond))
}
