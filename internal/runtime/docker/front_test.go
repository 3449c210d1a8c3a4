package docker

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

// FuzzFront checks that the version in a path does not change which requests wake a
// container, that the reference is one that Docker could know, and that of the
// reading requests only attaching to the program wakes the container.
func FuzzFront(f *testing.F) {
	for _, path := range []string{"/containers/web/exec", "/v1.41/containers/a.b_c-d/attach", "/containers/web/attach/ws", "/v1.24/containers/0a/start",
		"/containers/web/pause", "/exec/0f/start", "/containers/../json/exec", "/containers/web/json", "/containers/json", "/v1.41/exec/0f/json", "/containers/a/b/exec", "/containers//exec", "/exec//start"} {
		f.Add("POST", path)
		f.Add("GET", path)
	}
	f.Fuzz(func(t *testing.T, method, path string) {
		n := needOf(method, path)
		if again := needOf(method, "/v1.41"+path); strings.HasPrefix(path, "/containers/") && again != n {
			t.Errorf("%s %q needs %+v, with a version %+v", method, path, n, again)
		}
		if n == (need{}) {
			return
		}
		if ref := n.container + n.exec; ref == "" || strings.Trim(ref, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") != "" || ref[0] == '.' || !strings.Contains(path, "/"+ref+"/") {
			t.Errorf("%s %q needs %q", method, path, ref)
		}
		if method != "POST" && !(method == "GET" && strings.HasSuffix(path, "/attach/ws")) {
			t.Errorf("%s %q needs %+v", method, path, n)
		}
	})
}

func TestNeed(t *testing.T) {
	for _, c := range []struct {
		method, path string
		want         need
	}{
		{"POST", "/v1.41/containers/web/exec", need{container: "web", command: "docker exec"}},
		{"POST", "/exec/0f/start", need{exec: "0f", command: "docker exec", stream: true}},
		{"POST", "/containers/web/attach", need{container: "web", command: "docker attach", stream: true}},
		{"GET", "/containers/web/attach/ws", need{container: "web", command: "docker attach", stream: true}},
		{"POST", "/containers/web/start", need{container: "web", command: "docker start"}},
		{"POST", "/containers/web/pause", need{container: "web", command: "docker pause"}},
		{"POST", "/containers/web/unpause", need{}},
		{"POST", "/containers/web/stop", need{}},
		{"POST", "/containers/web/kill", need{}},
		{"POST", "/containers/web/wait", need{}},
		{"POST", "/containers/web/attach/ws", need{}},
		{"GET", "/containers/web/exec", need{}},
		{"GET", "/containers/web/json", need{}},
		{"GET", "/containers/web/logs", need{}},
		{"GET", "/containers/web/stats", need{}},
		{"GET", "/containers/web/top", need{}},
		{"GET", "/containers/web/archive", need{}},
		{"POST", "/exec/0f/resize", need{}},
		{"GET", "/exec/0f/json", need{}},
		{"GET", "/events", need{}},
		{"DELETE", "/containers/web", need{}},
	} {
		if got := needOf(c.method, c.path); got != c.want {
			t.Errorf("%s %s needs %+v, want %+v", c.method, c.path, got, c.want)
		}
	}
}

// patience bounds every exchange. It is generous, because no test depends on it.
const patience = time.Minute

// fronted serves an engine and a front of it until the test ends. dial connects to
// the front.
func fronted(t *testing.T, engine http.Handler) (dial func() *net.UnixConn) {
	t.Helper()
	dir := t.TempDir()
	r := &Runtime{cfg: Config{Socket: dir + "/e"}, api: newClient(dir + "/e"), log: slog.New(slog.DiscardHandler)}
	var all sync.WaitGroup
	t.Cleanup(all.Wait)
	for path, h := range map[string]http.Handler{"/e": engine, "/f": r.Front(&ledger{})} {
		ln, err := net.Listen("unix", dir+path)
		errtest.None(t, err)
		srv := &http.Server{Handler: h}
		all.Go(func() { _ = srv.Serve(ln) }) // until it is closed
		t.Cleanup(func() { srv.Close() })
	}
	return func() *net.UnixConn {
		t.Helper()
		c, err := net.Dial("unix", dir+"/f")
		errtest.None(t, err)
		t.Cleanup(func() { c.Close() })
		errtest.None(t, c.SetDeadline(time.Now().Add(patience)))
		return c.(*net.UnixConn)
	}
}

// upper turns the connection into a stream. Once the client has shut down its
// sending side, it sends back everything in upper case.
func upper(w http.ResponseWriter, q *http.Request) {
	body, _ := io.ReadAll(q.Body) // short if the client has gone
	c, buf, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	head := "200 OK\r\n"
	if up := q.Header.Get("Upgrade"); up != "" {
		head = "101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: " + up + "\r\n"
	}
	fmt.Fprintf(c, "HTTP/1.1 %sContent-Type: application/vnd.docker.raw-stream\r\n\r\nready\n", head)
	b, err := io.ReadAll(buf)
	fmt.Fprintf(c, "%s%s%v", body, bytes.ToUpper(b), err)
}

// TestFrontStreams checks that a stream passes the front unchanged, and that one
// direction can end before the other.
func TestFrontStreams(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /containers/{id}/attach", upper)
	mux.HandleFunc("POST /exec/{id}/start", upper)
	mux.HandleFunc("POST /session", upper)
	dial := fronted(t, mux)
	long := strings.Repeat("stdin ", 50_000)
	const upgrade = "Connection: Upgrade\r\nUpgrade: tcp\r\n"
	for name, c := range map[string]struct {
		path, head, body string
		early            bool // the client shuts down its sending side before the response
	}{
		"exec":              {"/exec/0f/start", upgrade, "{}", false},
		"attach":            {"/containers/web/attach?stream=1", upgrade, "", false},
		"without upgrade":   {"/exec/0f/start", "", "{}", false},
		"ends at once":      {"/containers/web/attach", "", "", true},
		"a build's session": {"/session", "Connection: Upgrade\r\nUpgrade: h2c\r\n", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			conn := dial()
			fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: docker\r\n%sContent-Length: %d\r\n\r\n%s", c.path, c.head, len(c.body), c.body)
			send := func() {
				if _, err := io.WriteString(conn, long); err != nil {
					t.Error(err)
				}
				if err := conn.CloseWrite(); err != nil {
					t.Error(err)
				}
			}
			if c.early {
				send()
			}
			in := bufio.NewReader(conn)
			res, err := http.ReadResponse(in, nil)
			errtest.None(t, err)
			if want := map[bool]string{true: "101 UPGRADED", false: "200 OK"}[c.head != ""]; res.Status != want && c.path != "/session" ||
				res.Header.Get("Content-Type") != "application/vnd.docker.raw-stream" || c.head != "" && !strings.Contains(c.head, res.Header.Get("Upgrade")+"\r\n") {
				t.Errorf("%s %v", res.Status, res.Header)
			}
			if l, err := in.ReadString('\n'); l != "ready\n" {
				t.Fatalf("the engine's first words: %q, %v", l, err)
			}
			if !c.early {
				send()
			}
			b, err := io.ReadAll(in)
			if want := c.body + strings.ToUpper(long) + "<nil>"; err != nil || string(b) != want {
				t.Errorf("%d bytes came back, want %d: %.80q, %v", len(b), len(want), b, err)
			}
		})
	}
}

// TestFrontEndsStreams checks that a stream ends at Docker once its client has
// gone, and at the client once Docker has ended it.
func TestFrontEndsStreams(t *testing.T) {
	over := make(chan error, 1)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /containers/talks/attach", func(w http.ResponseWriter, _ *http.Request) {
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		_, err = io.WriteString(c, "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
		for err == nil {
			_, err = io.WriteString(c, "output\n")
		}
		over <- err
	})
	mux.HandleFunc("POST /containers/ends/attach", func(w http.ResponseWriter, _ *http.Request) {
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\nlast words")
		c.Close()
	})
	dial := fronted(t, mux)
	const request = "POST /containers/%s/attach HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
	conn := dial()
	fmt.Fprintf(conn, request, "talks")
	errtest.Get(io.CopyN(io.Discard, conn, 4096))(t)
	conn.Close()
	select {
	case err := <-over:
		if os.IsTimeout(err) {
			t.Error("the engine still streams to a client that has gone")
		}
	case <-time.After(2 * patience):
		t.Fatal("the engine's handler does not end")
	}
	conn = dial()
	fmt.Fprintf(conn, request, "ends")
	if b, err := io.ReadAll(conn); err != nil || !strings.HasSuffix(string(b), "\r\n\r\nlast words") {
		t.Errorf("%q, %v", b, err)
	}
}

// TestFrontPasses checks that requests and responses pass unchanged: headers,
// queries, long bodies, errors, and each chunk as soon as it is sent.
func TestFrontPasses(t *testing.T) {
	more := make(chan string)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /containers/web/attach", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusConflict)
		_, _ = io.WriteString(w, `{"message":"container web is paused"}`)
	})
	mux.HandleFunc("GET /events", func(w http.ResponseWriter, q *http.Request) {
		w.Header()["Content-Type"] = nil
		for l := range more {
			_, _ = io.WriteString(w, l)
			_ = http.NewResponseController(w).Flush()
		}
	})
	mux.HandleFunc("POST /build", func(w http.ResponseWriter, q *http.Request) {
		n, err := io.Copy(io.Discard, q.Body)
		fmt.Fprintf(w, "%d %v %s %q %q %v %s", n, err, q.URL.RawQuery, q.Header["User-Agent"], q.Header["Accept-Encoding"], q.TransferEncoding, q.Host)
	})
	dial := fronted(t, mux)
	ask := func(request string) (*http.Response, *bufio.Reader) {
		t.Helper()
		conn := dial()
		go func() { _, _ = io.WriteString(conn, request) }() // returns when the connection is closed
		in := bufio.NewReader(conn)
		res, err := http.ReadResponse(in, nil)
		errtest.None(t, err)
		return res, in
	}
	body := func(res *http.Response) string {
		t.Helper()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Error(err)
		}
		return string(b)
	}
	res, _ := ask("POST /containers/web/attach HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n")
	if got := body(res); res.StatusCode != http.StatusConflict || got != `{"message":"container web is paused"}` || !res.Close {
		t.Errorf("%s, closes %v: %s", res.Status, res.Close, got)
	}
	for range 2 { // first with a Content-Length, then chunked
		const size = 8 << 20
		head, data := fmt.Sprintf("Content-Length: %d\r\n\r\n", size), strings.Repeat("x", size)
		want := fmt.Sprintf("%d <nil> a=1;2&b=%%2F&c [] [] [] docker", size)
		if res != nil {
			head, data = "Transfer-Encoding: chunked\r\n\r\n", fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", size, data)
			want = strings.Replace(want, "[] docker", "[chunked] docker", 1)
		}
		res, _ = ask("POST /build?a=1;2&b=%2F&c HTTP/1.1\r\nHost: docker\r\n" + head + data)
		if got := body(res); got != want {
			t.Errorf("the engine saw %s, want %s", got, want)
		}
		res = nil
	}
	go func() { more <- "first\n" }()
	res, _ = ask("GET /events HTTP/1.1\r\nHost: docker\r\n\r\n")
	lines := bufio.NewReader(res.Body)
	if l, err := lines.ReadString('\n'); l != "first\n" || res.Header["Content-Type"] != nil { // before the response is complete
		t.Errorf("%q, %v, %v", l, err, res.Header)
	}
	close(more)
	if l, err := lines.ReadString('\n'); l != "" || err != io.EOF {
		t.Errorf("at its end: %q, %v", l, err)
	}
}

// TestFrontWithoutEngine checks that a client gets an error with the reason when
// Docker is unreachable.
func TestFrontWithoutEngine(t *testing.T) {
	r := &Runtime{cfg: Config{Socket: filepath.Join(t.TempDir(), "none")}, log: slog.New(slog.DiscardHandler)}
	r.api = newClient(r.cfg.Socket)
	srv := &http.Server{Handler: r.Front(&ledger{})}
	ln, err := net.Listen("unix", filepath.Join(t.TempDir(), "f"))
	errtest.None(t, err)
	var served sync.WaitGroup
	served.Go(func() { _ = srv.Serve(ln) })
	defer served.Wait()
	defer srv.Close()
	c := newClient(ln.Addr().String())
	for _, path := range []string{"/containers/web/start", "/containers/web/attach"} {
		if err := c.call(t.Context(), "POST", path, nil, nil, nil); !isStatus(err, http.StatusBadGateway) || !strings.Contains(err.Error(), r.cfg.Socket) {
			t.Errorf("%s: %v", path, err)
		}
	}
}
