package containers

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/hostctl"
)

// shop is a Compose project with nginx in front of an API in Python. The API
// counts each request in PostgreSQL and in Redis, over persistent connections.
// The programs are those of this machine.
const shop = `
version: "3.8"
x-program: &program
  image: base:1
  volumes: ["/usr:/usr:ro", "./files:/files:ro"]
  labels: &idle
    lull.pause-after: 1s
services:
  web:
    <<: *program
    command: nginx -c /files/nginx.conf
    ports: ["${AT}:8080"]
    depends_on: [api]
    labels: {<<: *idle, lull.depends-on: api}
  api:
    <<: *program
    command: python3 /files/api.py
    stop_signal: SIGINT # as the first process it ignores SIGTERM
    depends_on: [db, cache]
    labels: {<<: *idle, lull.depends-on: "db,cache"}
  db:
    <<: *program
    user: nobody
    command: sh /files/db.sh
    stop_signal: SIGINT # it does not wait for its clients
  cache:
    <<: *program
    user: nobody
    command: redis-server --bind 0.0.0.0 --protected-mode no --dir /data --save "" --appendonly yes
`

// shopFiles are the configuration files of its services, by name.
var shopFiles = map[string]string{
	"nginx.conf": `daemon off; pid /tmp/nginx.pid; error_log stderr; worker_processes 1; user root;
events {}
http {
  access_log off; client_body_temp_path /tmp/b; proxy_temp_path /tmp/p; fastcgi_temp_path /tmp/f; uwsgi_temp_path /tmp/u; scgi_temp_path /tmp/s;
  resolver 127.0.0.11 valid=1s ipv6=off;
  server { listen 8080; location / { set $api api; proxy_pass http://$api:8000; } }
}
`,
	"db.sh": `set -e
bin=$(dirname "$(ls /usr/lib/postgresql/*/bin/postgres | tail -1)")
if [ ! -e /data/db/PG_VERSION ]; then
  "$bin/initdb" -D /data/db -U postgres -A trust -N --locale=C -E UTF8 >/dev/null
  echo "host all all 0.0.0.0/0 trust" >>/data/db/pg_hba.conf
fi
exec "$bin/postgres" -D /data/db -c listen_addresses='*' -c unix_socket_directories=/tmp
`,
	"api.py": `import http.server, socket, subprocess, glob

psql = sorted(glob.glob("/usr/lib/postgresql/*/bin/psql"))[-1]

class Redis:
    def __init__(self):
        self.s = socket.create_connection(("cache", 6379)); self.f = self.s.makefile("rb")
    def count(self):
        self.s.sendall(b"INCR requests\r\n")
        line = self.f.readline()
        if not line.startswith(b":"): raise OSError(line)
        return int(line[1:])

class Postgres:
    def __init__(self):
        self.p = subprocess.Popen([psql, "-h", "db", "-U", "postgres", "-qtA"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.p.stdin.write("create table if not exists requests (n serial);\n")
    def count(self):
        self.p.stdin.write("insert into requests default values; select count(*) from requests;\n"); self.p.stdin.flush()
        line = self.p.stdout.readline()
        if not line: raise OSError("psql has ended")
        return int(line)

open_now = {}
def count(kind):
    for again in (True, False): # a connection that was kept may have ended
        try:
            if kind not in open_now: open_now[kind] = kind()
            return open_now[kind].count()
        except (OSError, ValueError):
            open_now.pop(kind, None)
            if not again: raise

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        try: body, status = "%d %d\n" % (count(Postgres), count(Redis)), 200
        except Exception as e: body, status = repr(e) + "\n", 500
        self.send_response(status); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body.encode())
    def log_message(self, *a): pass

http.server.HTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
`,
}

// baseImage imports an image whose containers mount this machine's /usr for their
// programs.
func (k dock) baseImage() {
	k.d.T.Helper()
	dir := k.d.T.TempDir()
	for _, d := range []string{"usr", "etc", "proc", "dev", "sys", "run", "files", "tmp", "data", "var/log/nginx", "var/lib/nginx"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			k.d.T.Fatal(err)
		}
	}
	for _, l := range []string{"bin", "sbin", "lib", "lib64"} {
		if err := os.Symlink("usr/"+l, filepath.Join(dir, l)); err != nil {
			k.d.T.Fatal(err)
		}
	}
	accounts := map[string]string{"passwd": "root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/data:/bin/sh\n", "group": "root:x:0:\nnogroup:x:65534:\n"}
	for name, text := range accounts {
		if err := os.WriteFile(filepath.Join(dir, "etc", name), []byte(text), 0o644); err != nil {
			k.d.T.Fatal(err)
		}
	}
	for _, d := range []string{"tmp", "data"} {
		if err := os.Chmod(filepath.Join(dir, d), 0o777); err != nil {
			k.d.T.Fatal(err)
		}
	}
	file := filepath.Join(k.d.T.TempDir(), "base.tar")
	if out, err := exec.Command("tar", "-C", dir, "-cf", file, ".").CombinedOutput(); err != nil {
		k.d.T.Fatalf("%v: %s", err, out)
	}
	k.Must("import", file, "base:1")
}

// TestCompose checks that a Compose project of four services sleeps, paused or
// stopped, and answers the first request correctly each time. LULL_COMPOSE names
// a Compose program other than Debian's.
func TestCompose(t *testing.T) {
	compose := os.Getenv("LULL_COMPOSE")
	if compose == "" {
		found, err := exec.LookPath("docker-compose")
		daemontest.Need(t, err, "docker-compose")
		compose = found
	}
	k := newDock(t)
	k.baseImage()
	dir, at := t.TempDir(), daemontest.Addr(t)
	files := map[string]string{"compose.yaml": shop}
	for name, text := range shopFiles {
		files["files/"+name] = text
	}
	if err := os.Mkdir(filepath.Join(dir, "files"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) {
		t.Helper()
		cmd := exec.Command(compose, append([]string{"-p", "shop", "-f", filepath.Join(dir, "compose.yaml")}, args...)...)
		cmd.Env = append(os.Environ(), "DOCKER_HOST=unix://"+k.Socket(), "AT="+at)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("compose %s: %v: %s", args, err, out)
		}
	}
	run("up", "-d")
	defer run("down", "-t", "0")
	names := strings.Fields(k.Say("ps", "-a", "--format", "{{.Names}}"))
	if len(names) != 4 {
		t.Fatalf("containers %v", names)
	}
	for _, name := range names {
		k.known(name)
	}
	client := &http.Client{Timeout: daemontest.WaitLimit, Transport: &http.Transport{DisableKeepAlives: true}}
	get := func() string {
		a, err := client.Get("http://" + at)
		if err != nil {
			return err.Error()
		}
		defer a.Body.Close()
		b, err := io.ReadAll(a.Body)
		return fmt.Sprint(strings.TrimSpace(string(b)), err)
	}
	daemontest.Wait(t, "the project is ready", func() (bool, string) { got := get(); return got == "1 1<nil>", got })
	served := 1
	for _, c := range []struct {
		sleeps    string
		stopAfter time.Duration
	}{{"paused", 0}, {"stopped", 1500 * time.Millisecond}} {
		t.Run(c.sleeps, func(t *testing.T) {
			d := k.d.In(t)
			for _, name := range names {
				if _, err := d.Change(t.Context(), name, hostctl.Change{StopAfter: daemontest.Seconds(c.stopAfter)}); err != nil {
					t.Fatal(err)
				}
			}
			rounds := scaletest.Count(t, "LULL_COMPOSE_ROUNDS", 1)
			right := 0
			for n := range rounds {
				for _, name := range names {
					d.Until(name, "it sleeps", func(o hostctl.Instance) bool { return o.State == c.sleeps })
				}
				served++
				if got, want := get(), fmt.Sprintf("%d %d<nil>", served, served); got != want {
					t.Errorf("after sleep %d: %q, want %q", n+1, got, want)
					break // the counters are off from now on
				}
				right++
			}
			t.Logf("REPORT compose, %s: %d of %d first requests were answered correctly", c.sleeps, right, rounds)
		})
	}
}
