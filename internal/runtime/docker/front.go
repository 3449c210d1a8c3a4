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

// The engine refuses some requests for a paused container, and reports no event
// of them. The front is an API that clients use in place of the engine's. It
// forwards every request. For those requests it first wakes a container that the
// host paused, and holds it until the response ends.

// needsRun matches the paths of what the engine refuses for a paused container.
// The engine itself resolves the reference.
var needsRun = regexp.MustCompile(`^(?:/v[0-9.]+)?/(?:containers/([a-zA-Z0-9][a-zA-Z0-9_.-]*)/(exec|attach|attach/ws|start|pause)|exec/([a-zA-Z0-9]+)/start)$`)

// need names the container that a request requires to run, or the command whose
// container it is.
// The zero need requires nothing.
type need struct {
	container string // name or id
	exec      string // id of the command that is started
	command   string // what a user typed, for display
	stream    bool   // the connection may become a stream in both directions
}

// needOf returns what a request requires.
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

// front forwards requests to the engine.
type front struct {
	r     *Runtime
	h     Host
	proxy *httputil.ReverseProxy
}

// Front returns the handler of the socket in front of Docker's own. Its server
// must not limit how long a request or a response takes.
func (r *Runtime) Front(h Host) http.Handler {
	f := &front{r: r, h: h}
	f.proxy = &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host, p.Out.URL.RawQuery = "http", "docker", p.In.URL.RawQuery
		},
		// A connection that is kept may be one to an engine that has ended.
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

// unreachable responds as the engine does, in JSON.
func (r *Runtime) unreachable(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadGateway)
	_ = json.NewEncoder(w).Encode(map[string]string{"message": fmt.Sprintf("lull cannot reach Docker at %s: %v", r.cfg.Socket, err)})
}

func (f *front) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	w.Header()["Content-Type"] = nil // none unless the engine sets one
	n := needOf(q.Method, q.URL.Path)
	if n.stream {
		f.stream(w, q, n)
		return
	}
	defer f.hold(q.Context(), n)()
	f.proxy.ServeHTTP(w, q)
}

// hold wakes the container that a request needs, if the host paused it, and
// holds it until leave is called. If it cannot, the engine's response tells the
// client why.
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
		// It may run on, detached from its client.
		if err := f.r.findCommand(ctx, f.h, d.ID, n.exec); err != nil {
			f.r.log.Warn("cannot find a command again", "container", d.name(), "command", n.command, "err", err)
		}
	})
}

// stream forwards a request whose connection the engine turns into a stream in
// both directions, with or without an upgrade. Each direction ends on its own.
// The container is held until that of the engine ends.
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
	// A client that ends its direction now is not one that has gone.
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
	q.Header.Del("Expect") // it was fulfilled
	if _, ok := q.Header["User-Agent"]; !ok {
		q.Header["User-Agent"] = nil // none, not Go's
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
		_ = res.Write(client) // otherwise the client has gone
		return
	}
	var head bytes.Buffer
	fmt.Fprintf(&head, "HTTP/1.1 %s\r\n", res.Status)
	_ = res.Header.Write(&head) // no error is possible
	head.WriteString("\r\n")
	var sending sync.WaitGroup
	sending.Go(func() {
		if _, err := io.Copy(engine, buffered); err == nil {
			closeWrite(engine)
		} else {
			_, _ = io.Copy(io.Discard, buffered) // the engine has ended; a client that still sends must not see an error
		}
		// An engine that has nothing to send does not notice that its client has
		// gone.
		awaitGone(client)
		engine.Close()
	})
	if _, err = io.Copy(client, io.MultiReader(&head, in)); err == nil {
		closeWrite(client)
	}
	leave()
	_ = client.SetReadDeadline(time.Now().Add(apiLimit)) // for the client to end its direction
	sending.Wait()
}

// awaitGone waits until the peer has closed a connection, not only ended its
// direction, or until the read deadline.
func awaitGone(c net.Conn) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = raw.Read(func(fd uintptr) bool {
		for {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd)}}, 0) // what is always reported: POLLHUP and errors
			if err != unix.EINTR {
				return n > 0 || err != nil
			}
		}
	})
}

// closeWrite ends one direction of a connection.
func closeWrite(c net.Conn) {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite() // the peer may have gone
	}
}

// share gives the front the owner of Docker's own socket, and at most its mode.
func (r *Runtime) share() {
	if r.cfg.Front == "" {
		return
	}
	if err := r.shareFront(); err != nil {
		r.log.Error("cannot give the front the owner and mode of Docker's socket", "front", r.cfg.Front, "socket", r.cfg.Socket, "err", err)
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
	if err := os.Chmod(r.cfg.Front, 0o600); err != nil { // it is never open to another group
		return err
	}
	if err := os.Lchown(r.cfg.Front, int(want.Uid), int(want.Gid)); err != nil {
		return err
	}
	return os.Chmod(r.cfg.Front, mode)
}
