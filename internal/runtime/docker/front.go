package docker

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"regexp"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Docker refuses some requests for a paused container, and sends no event about
// them. The front serves the Docker API on another socket for clients that should
// not see this. It forwards every request. Before it forwards one that Docker would
// refuse, it wakes the container if the host paused it, and holds the container
// until the response ends.

// needsRun matches the paths of the requests that Docker refuses for a paused
// container. The reference in a path is resolved by Docker.
var needsRun = regexp.MustCompile(`^(?:/v[0-9.]+)?/(?:containers/([a-zA-Z0-9][a-zA-Z0-9_.-]*)/(exec|attach|attach/ws|start|pause)|exec/([a-zA-Z0-9]+)/start)$`)

// need names the container that must run for a request, directly or by a command in
// it. The zero need means that none must.
type need struct {
	container string // name or id
	exec      string // exec ID of the command that the request starts
	command   string // the command line, for display
	stream    bool   // the connection may become a stream in both directions
}

// needOf returns which container must run for a request.
func needOf(method, path string) need {
	m := needsRun.FindStringSubmatch(path)
	switch {
	case m == nil || (method == http.MethodGet) != (m[2] == "attach/ws") || method != http.MethodGet && method != http.MethodPost:
		return need{}
	case m[3] != "":
		return need{exec: m[3], command: "docker exec", stream: true}
	case m[2] == "attach/ws":
		return need{container: m[1], command: "docker attach", stream: true}
	default:
		return need{container: m[1], command: "docker " + m[2], stream: m[2] == "attach"}
	}
}

// front forwards requests to Docker.
type front struct {
	r     *Runtime
	h     Host
	proxy *httputil.ReverseProxy
}

// Front returns the handler for the front's socket. The server must not limit the
// duration of requests or responses.
func (r *Runtime) Front(h Host) http.Handler {
	f := &front{r: r, h: h}
	f.proxy = &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host, p.Out.URL.RawQuery = "http", "docker", p.In.URL.RawQuery
		},
		// A kept connection could lead to a Docker daemon that has ended.
		Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return r.dial(ctx) }},
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(r.log.Handler(), slog.LevelDebug),
		ErrorHandler:  func(w http.ResponseWriter, _ *http.Request, err error) { r.unreachable(w, err) },
	}
	return f
}

func (r *Runtime) dial(ctx context.Context) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "unix", r.cfg.Socket)
}

// unreachable responds with an error in JSON, as Docker does.
func (r *Runtime) unreachable(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadGateway)
	_ = json.NewEncoder(w).Encode(map[string]string{"message": fmt.Sprintf("lull cannot reach Docker at %s: %v", r.cfg.Socket, err)})
}

func (f *front) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	w.Header()["Content-Type"] = nil // no Content-Type unless Docker's response has one
	n := needOf(q.Method, q.URL.Path)
	if n.stream {
		f.stream(w, q, n)
		return
	}
	defer f.hold(q.Context(), n)()
	f.proxy.ServeHTTP(w, q)
}

// hold wakes the container that a request needs, if the host paused it, and holds
// it until leave is called. On failure leave does nothing, and Docker's response to
// the request tells the client why.
func (f *front) hold(ctx context.Context, n need) (leave func()) {
	nothing := func() {}
	if n == (need{}) {
		return nothing
	}
	ctx, cancel := context.WithTimeout(ctx, apiLimit)
	defer cancel()
	if n.exec != "" {
		x, err := f.r.api.inspectExec(ctx, n.exec)
		if err != nil {
			return nothing
		}
		n.container, n.command = x.ContainerID, x.command()
	}
	d, err := f.r.api.inspect(ctx, n.container)
	if err != nil {
		return nothing
	}
	w := f.r.workOf(d.ID)
	if w == nil {
		return nothing
	}
	if n.exec != "" {
		f.r.api.own.Store(n.exec, nil)
	}
	release, err := f.h.KeepAwake(ctx, w.id, n.command)
	if err != nil {
		f.r.log.Warn("cannot hold a container", "container", d.name(), "for", n.command, "err", err)
		release = nothing
	}
	return sync.OnceFunc(func() {
		defer release()
		if n.exec == "" {
			return
		}
		f.r.api.own.Delete(n.exec)
		ctx, cancel := context.WithTimeout(context.Background(), apiLimit)
		defer cancel()
		// The command may continue without its client.
		if err := f.r.findCommand(ctx, f.h, d.ID, n.exec); err != nil {
			f.r.log.Warn("cannot find a command again", "container", d.name(), "command", n.command, "err", err)
		}
	})
}

// stream forwards a request whose connection Docker turns into a bidirectional
// stream, with or without an upgrade. A direction can end before the other. The
// container is held until Docker has sent everything.
func (f *front) stream(w http.ResponseWriter, q *http.Request, n need) {
	engine, err := f.r.dial(q.Context())
	if err != nil {
		f.r.unreachable(w, err)
		return
	}
	defer engine.Close()
	body, err := io.ReadAll(http.MaxBytesReader(w, q.Body, maxEvent))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	// After Hijack, a client that shuts down its sending side no longer cancels the
	// request's context.
	client, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err) // the server speaks HTTP/1
	}
	defer client.Close()
	leave := f.hold(context.WithoutCancel(q.Context()), n)
	defer leave()

	q.Body, q.ContentLength, q.TransferEncoding = io.NopCloser(bytes.NewReader(body)), int64(len(body)), nil
	if len(body) == 0 {
		q.Body = http.NoBody
	}
	q.Header.Del("Expect") // the server has already answered 100 Continue
	if _, ok := q.Header["User-Agent"]; !ok {
		q.Header["User-Agent"] = nil // a nil value keeps Go from adding its own
	}
	if err := q.Write(engine); err != nil {
		return
	}
	in := bufio.NewReader(engine)
	res, err := http.ReadResponse(in, q)
	if err != nil {
		return
	}
	if streams := res.StatusCode == http.StatusSwitchingProtocols ||
		res.StatusCode == http.StatusOK && res.ContentLength < 0 && res.TransferEncoding == nil; !streams {
		res.Close = true
		_ = res.Write(client) // fails only if the client has gone
		return
	}
	var head bytes.Buffer
	fmt.Fprintf(&head, "HTTP/1.1 %s\r\n", res.Status)
	_ = res.Header.Write(&head) // a bytes.Buffer returns no errors
	head.WriteString("\r\n")
	var sending sync.WaitGroup
	sending.Go(func() {
		if _, err := io.Copy(engine, buffered); err == nil {
			closeWrite(engine)
		} else {
			_, _ = io.Copy(io.Discard, buffered) // Docker has closed its side; the client must still be able to send
		}
		// Docker notices that a client has gone only when it sends something.
		awaitGone(client)
		engine.Close()
	})
	if _, err = io.Copy(client, io.MultiReader(&head, in)); err == nil {
		closeWrite(client)
	}
	leave()
	_ = client.SetReadDeadline(time.Now().Add(apiLimit)) // bounds the wait for the client to shut down its sending side
	sending.Wait()
}

// awaitGone waits until the peer has closed both directions of a connection, or
// until the read deadline.
func awaitGone(c net.Conn) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return // already closed
	}
	_ = raw.Read(func(fd uintptr) bool {
		for {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd)}}, 0) // without Events, Poll reports only POLLHUP and errors
			if err != unix.EINTR {
				return n > 0 || err != nil
			}
		}
	})
}

// closeWrite shuts down the sending side of a connection.
func closeWrite(c net.Conn) {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite() // the peer may have gone
	}
}

// share gives the front's socket the owner and group of Docker's socket, and the
// same or stricter permissions.
func (r *Runtime) share() {
	if r.cfg.Front == "" {
		return
	}
	if err := r.shareFront(); err != nil {
		r.log.Error("cannot set the front socket's owner and mode to those of Docker's socket", "front", r.cfg.Front, "socket", r.cfg.Socket, "err", err)
	}
}

func (r *Runtime) shareFront() error {
	engine, err := os.Stat(r.cfg.Socket)
	if err != nil {
		return err
	}
	now, err := os.Lstat(r.cfg.Front)
	if err != nil {
		return err
	}
	mode := engine.Mode().Perm() & 0o660
	want, have := engine.Sys().(*syscall.Stat_t), now.Sys().(*syscall.Stat_t)
	if now.Mode().Perm() == mode && have.Uid == want.Uid && have.Gid == want.Gid {
		return nil
	}
	if err := os.Chmod(r.cfg.Front, 0o600); err != nil { // so that the socket is never open to the wrong group
		return err
	}
	if err := os.Lchown(r.cfg.Front, int(want.Uid), int(want.Gid)); err != nil {
		return err
	}
	return os.Chmod(r.cfg.Front, mode)
}
