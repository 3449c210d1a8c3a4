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
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
)

// service is a Python program for the guest. It answers every line with its clock
// and the number of lines that it has received.
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

// tree creates the root files of a guest: a complete Debian if LULL_DEBOOTSTRAP
// is set, otherwise copies of this machine's programs and their dependencies.
func tree(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if os.Getenv("LULL_DEBOOTSTRAP") != "" {
		suite, mirror := debian(t)
		out, err := exec.Command("debootstrap", "--variant=minbase", "--include=nginx-light,redis-server,python3", suite, dir, mirror).CombinedOutput()
		if err != nil {
			t.Fatalf("debootstrap of %s from %s: %v\n%s", suite, mirror, err, out[max(0, len(out)-4000):])
		}
	} else {
		for _, d := range []string{"tmp", "etc", "root", "var/log/nginx", "var/lib/nginx"} {
			errtest.None(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
		}
		var lib string
		for _, p := range []string{"sh", "redis-server", "nginx", "python3"} {
			path, err := exec.LookPath("/usr/bin/" + p) // Debian's program, even if PATH prefers another
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
				errtest.None(t, err)
				lib = strings.TrimSpace(string(b))
			}
		}
		modules(t, lib, filepath.Join(dir, lib))
		for name, text := range map[string]string{"passwd": "root:x:0:0::/root:/bin/sh\n", "group": "root:x:0:\n"} {
			errtest.None(t, os.WriteFile(filepath.Join(dir, "etc", name), []byte(text), 0o644))
		}
	}
	big := make([]byte, 300_000)
	src := rand.NewChaCha8([32]byte{})
	_, _ = src.Read(big) // a rand.ChaCha8 never fails
	for name, b := range map[string][]byte{"service.py": []byte(service), "nginx.conf": []byte(nginxConf), "start": []byte(startAll), "big": big} {
		errtest.None(t, errors.Join(os.MkdirAll(filepath.Join(dir, "srv"), 0o755), os.WriteFile(filepath.Join(dir, "srv", name), b, 0o755)))
	}
	return dir
}

// debian returns the Debian release of this machine and the mirror that its apt
// uses, because no other may be reachable.
func debian(t *testing.T) (suite, mirror string) {
	t.Helper()
	out, err := exec.Command("apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)",
		"Created-By: Packages", "Origin: Debian", "Component: main").Output()
	if err != nil {
		t.Fatalf("cannot ask apt for its mirror: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		suite, mirror, _ = strings.Cut(strings.TrimSpace(line), " ")
		if !strings.Contains(suite, "-") { // not the updates or backports suites
			return suite, mirror
		}
	}
	t.Fatalf("apt has no mirror of Debian: %q", out)
	return "", ""
}

// bring copies a program and its shared libraries into root.
func bring(t *testing.T, root, from, to string) {
	t.Helper()
	out, _ := exec.Command("ldd", from).Output() // fails for a static program
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

// modules copies Python's modules except those that the service does not import.
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

// client uses the guest's programs and checks every answer.
type client struct {
	b      *box
	kept   net.Conn // a connection to Redis that stays open
	in     *bufio.Reader
	n      int // number of visits, and the value of Redis's counter
	lines  int // lines sent to the service
	sum    [32]byte
	big    string // the file that nginx serves
	script string // wrk's

	drivers             drivers
	loads, naps, served int             // rounds of wrk and redis-benchmark, sleeps during them, and answers
	tries               int             // attempts to put it to sleep
	slowest             time.Duration   // longest time that wrk waited for an answer, including a wake
	offs, ways          []time.Duration // errors of the guest's clock, and the round-trip times of those readings
}

func (c *client) redis(command ...string) string {
	c.b.T.Helper()
	var s strings.Builder
	fmt.Fprintf(&s, "*%d\r\n", len(command))
	for _, a := range command {
		fmt.Fprintf(&s, "$%d\r\n%s\r\n", len(a), a)
	}
	if err := c.kept.SetDeadline(time.Now().Add(daemontest.WaitLimit)); err != nil {
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

// visit checks all three programs once, over the open connection and over new
// ones.
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
	h := http.Client{Timeout: daemontest.WaitLimit, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := h.Get("http://" + c.b.addrs[0] + "/big")
	if err != nil {
		t.Fatalf("nginx: %v", err)
	}
	body, err := io.ReadAll(r.Body)
	r.Body.Close()
	if err != nil || sha256.Sum256(body) != c.sum {
		t.Fatalf("nginx: %d bytes, %v, or another checksum", len(body), err)
	}
	c.clock()
}

// TestProgramsOnEveryRung repeatedly pauses, reclaims and hibernates a guest with
// nginx, Redis and a Python service. Clients that come and go (wrk and
// redis-benchmark among them) and one that stays connected must see no error. No
// data may be lost, and the clock must be right after each wake.
func TestProgramsOnEveryRung(t *testing.T) {
	d := host(t)
	peers(t)
	files := tree(t)
	b := run(d, "trio", files, []int{80, 6379, 9000}, func(s *instance.Spec) {
		s.Memory, s.QuietConnectionAfter = 256<<20, idle.Duration(time.Second)
		s.ReclaimAfter, s.HibernateAfter = idle.Duration(2*time.Second), idle.Duration(4*time.Second)
	}, "/bin/sh", "/srv/start")
	c := &client{b: b, kept: b.dial(1), big: filepath.Join(files, "srv", "big"), script: newScript(t)}
	defer c.kept.Close()
	c.in = bufio.NewReader(c.kept)
	big, err := os.ReadFile(c.big)
	errtest.None(t, err)
	c.sum = sha256.Sum256(big)
	c.visit()
	for _, rung := range []string{"paused", "reclaimed", "hibernated"} {
		woken := 0
		c.slowest = 0
		from := len(c.offs)
		// The end of a client's connection may still be in flight when the guest
		// has reached its step, and wake it early. Such a round does not count.
		for n := 0; woken < rounds(t) && n < 10*rounds(t); n++ {
			b.sinks(rung)
			was := b.get()
			if n%2 == 0 { // alternately woken by new clients and by the connected one
				c.load()
			}
			c.visit()
			if n%2 != 0 {
				c.load()
			}
			if was.State == rung && b.get().WakeCount > was.WakeCount {
				woken++
			}
		}
		if woken != rounds(t) {
			t.Errorf("clients woke it %d times from %s, want %d", woken, rung, rounds(t))
		}
		t.Logf("%s: %d rounds, %d woken from it; the longest answer that wrk had took %s; the guest's clock was off by %s, seen over ways of %s",
			rung, rounds(t), woken, c.slowest.Round(time.Millisecond), spread(c.offs[from:]), spread(c.ways[from:]))
	}
	for n := 0; c.naps == 0 && n < 20; n++ { // traffic may cancel a pause, so repeat
		c.load()
	}
	if c.naps == 0 {
		t.Error("it was never put to sleep under the hands of wrk and redis-benchmark")
	}
	o := b.get()
	if o.RestartCount != 0 || o.BootedAnew != "" || int(o.WakeCount) < 3*rounds(t) {
		t.Errorf("%d wakes, %d restarts, booted anew %q", o.WakeCount, o.RestartCount, o.BootedAnew)
	}
	t.Logf("%d wakes; wrk had %d answers, redis-benchmark %d; %d times put to sleep under their hands", o.WakeCount, c.served, 4*orders*c.loads, c.naps)
}

// spread returns the minimum, the median and the maximum.
func spread(all []time.Duration) string {
	s := slices.Sorted(slices.Values(all))
	show := func(d time.Duration) time.Duration { return d.Round(100 * time.Microsecond) }
	return fmt.Sprintf("%s to %s, p50 %s", show(s[0]), show(s[len(s)-1]), show(s[len(s)/2]))
}
