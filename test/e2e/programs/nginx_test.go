package programs

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
)

const page = "it is awake\n"

// nginxAt starts nginx with a master and two workers that serve one page.
func nginxAt(h *daemontest.Host, path instance.Path, quiet time.Duration) *workload {
	server := installed(h.T, "nginx-light", "nginx", "/usr/sbin/nginx")
	installed(h.T, "wrk", "wrk")
	w := place(h, "nginx", path)
	conf, root := filepath.Join(w.Dir, "nginx.conf"), filepath.Join(w.Dir, "www")
	text := fmt.Sprintf(`daemon off; worker_processes 2; pid %[1]s/nginx.pid; error_log stderr error;
events { worker_connections 512; }
http {
  access_log off; keepalive_requests 1000000;
  client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
  server { listen %[2]s reuseport; root %[3]s; }
}
`, w.Dir, w.target, root)
	for _, err := range []error{os.Mkdir(root, 0o755), os.WriteFile(conf, []byte(text), 0o644),
		os.WriteFile(filepath.Join(root, "index.html"), []byte(page), 0o644)} {
		if err != nil {
			h.T.Fatal(err)
		}
	}
	w.launch("", quiet, server, "-p", w.Dir, "-c", conf, "-e", "stderr")
	return w
}

// fetch gets the page n times over one connection of hc.
func (w *workload) fetch(hc *http.Client, n int) {
	defer w.awaiting("a request for the page")()
	for range n {
		res, err := hc.Get("http://" + w.listen + "/")
		if err != nil {
			w.T.Errorf("cannot fetch the page: %v", err)
			return
		}
		b, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || res.StatusCode != http.StatusOK || string(b) != page {
			w.T.Errorf("the page is %q with status %d (%v)", b, res.StatusCode, err)
			return
		}
	}
}

// wrk runs wrk against the page and checks that it reports no error of any kind.
func (w *workload) wrk(d time.Duration, connections int) {
	w.T.Helper()
	out := w.client("wrk", "-t1", fmt.Sprintf("-c%d", connections), fmt.Sprintf("-d%ds", int(d.Seconds())), "--timeout", "30s", "http://"+w.listen+"/")
	if strings.Contains(out, "Socket errors") || strings.Contains(out, "Non-2xx") || !strings.Contains(out, "requests in") {
		w.T.Fatalf("wrk says:\n%s", out)
	}
}

func nginxCycles(w *workload, n int) {
	w.comeAndGo(n, func(cycle int) {
		if cycle%10 == 9 {
			w.wrk(time.Second, 4)
			return
		}
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				tr := &http.Transport{}
				defer tr.CloseIdleConnections()
				w.fetch(&http.Client{Transport: tr, Timeout: daemontest.WaitLimit}, 5)
			})
		}
		wg.Wait()
	})
	w.hammer(func() { w.wrk(3*time.Second, 4) })
}

func TestNginxDirect(t *testing.T) {
	t.Parallel()
	nginxCycles(nginxAt(start(t, nil), instance.PathDirect, 0), cycles(t))
}

func TestNginxRelay(t *testing.T) {
	t.Parallel()
	nginxCycles(nginxAt(start(t, nil), instance.PathRelay, 0), cycles(t))
}

func TestNginxOrdinaryUser(t *testing.T) {
	t.Parallel()
	nginxCycles(nginxAt(start(t, ordinary(t)), instance.PathDirect, 0), cycles(t))
}

// TestNginxQuietConnectionSleeps checks that a server with quiet-connection-after
// sleeps although a browser keeps its connection open, and serves the browser
// over that connection afterwards.
func TestNginxQuietConnectionSleeps(t *testing.T) {
	t.Parallel()
	w := nginxAt(start(t, nil), instance.PathDirect, pauseAfter)
	tr := &http.Transport{MaxConnsPerHost: 1}
	defer tr.CloseIdleConnections()
	hc := &http.Client{Transport: tr, Timeout: daemontest.WaitLimit}
	w.comeAndGo(cycles(t), func(int) { w.fetch(hc, 1) })
}
