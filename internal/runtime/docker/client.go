package docker

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
)

// Limits on Docker's responses.
const (
	maxAnswer = 16 << 20
	maxEvent  = 1 << 20
)

// client is a Docker Engine API client over a unix socket, limited to the calls
// that idling needs. Its paths name no API version, so Docker uses its own.
type client struct {
	socket string
	http   http.Client
	own    sync.Map // exec IDs of the commands for which the host already holds the instance
}

func newClient(socket string) *client {
	return &client{socket: socket, http: http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
		MaxIdleConnsPerHost: 8, IdleConnTimeout: time.Minute,
	}}}
}

// statusError is a response with an unsuccessful status.
type statusError struct {
	Status  int
	Message string
}

func (e *statusError) Error() string { return fmt.Sprintf("docker says %d: %s", e.Status, e.Message) }

// isStatus reports whether err is a response with one of the given statuses.
func isStatus(err error, any ...int) bool {
	var s *statusError
	if errors.As(err, &s) {
		for _, n := range any {
			if s.Status == n {
				return true
			}
		}
	}
	return false
}

// unanswered reports whether err leaves open whether Docker has received a request
// and may still carry it out.
func unanswered(err error) bool {
	_, answered := errors.AsType[*statusError](err)
	op, ok := errors.AsType[*net.OpError](err)
	return err != nil && !answered && !(ok && op.Op == "dial")
}

// send makes one request. The caller must close the body.
func (c *client) send(ctx context.Context, method, path string, query url.Values, body any) (*http.Response, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		r = bytes.NewReader(b)
	}
	q, err := http.NewRequestWithContext(ctx, method, "http://docker"+path+"?"+query.Encode(), r)
	if err != nil {
		return nil, err
	}
	if body != nil {
		q.Header.Set("Content-Type", "application/json")
	}
	a, err := c.http.Do(q)
	var where *url.Error
	if errors.As(err, &where) { // omit its URL, in which the host is a placeholder
		err = where.Err
	}
	if err != nil {
		return nil, err
	}
	if a.StatusCode < 300 {
		return a, nil
	}
	return nil, readStatus(a)
}

// readStatus reads the reason of an unsuccessful response.
func readStatus(a *http.Response) error {
	defer a.Body.Close()
	b, err := io.ReadAll(io.LimitReader(a.Body, 64<<10))
	if err != nil {
		return err
	}
	var m struct{ Message string }
	if json.Unmarshal(b, &m) != nil || m.Message == "" {
		m.Message = strings.TrimSpace(string(b))
	}
	return &statusError{a.StatusCode, m.Message}
}

// call makes one request and decodes the response into out unless it is nil.
func (c *client) call(ctx context.Context, method, path string, query url.Values, body, out any) error {
	a, err := c.send(ctx, method, path, query, body)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(io.LimitReader(a.Body, maxAnswer+1))
	if err != nil {
		return err
	}
	if len(b) > maxAnswer {
		return fmt.Errorf("the answer to %s has more than %d bytes", path, maxAnswer)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("cannot read the answer to %s: %w", path, err)
	}
	return nil
}

// details is the result of inspecting a container.
type details struct {
	ID     string `json:"Id"`
	Name   string
	Config struct {
		Labels      map[string]string
		StopSignal  string
		Tty         bool
		Shell       []string
		Healthcheck *struct{ Test []string }
	}
	ExecIDs    []string // IDs of the commands that run beside the program
	HostConfig struct {
		NetworkMode  string
		PortBindings map[string][]struct{ HostIp, HostPort string }
	}

	NetworkSettings struct {
		Networks map[string]struct{ IPAddress, GlobalIPv6Address string }
	}
	State struct {
		Running    bool
		Paused     bool
		Restarting bool
		OOMKilled  bool
		Pid        int
		ExitCode   int
		StartedAt  time.Time
		FinishedAt time.Time
	}
}

func (d *details) name() string { return strings.TrimPrefix(d.Name, "/") }

// runs reports whether the container has a process, paused or not.
func (d *details) runs() bool { return d.State.Running && d.State.Pid > 1 }

func (c *client) inspect(ctx context.Context, id string) (*details, error) {
	var d details
	if err := c.call(ctx, http.MethodGet, "/containers/"+url.PathEscape(id)+"/json", nil, nil, &d); err != nil {
		return nil, err
	}
	if !validID(d.ID) {
		return nil, fmt.Errorf("cannot use the answer about %s: its id is %.80q", id, d.ID)
	}
	return &d, nil
}

// validID reports whether id has Docker's form: 64 hexadecimal digits.
func validID(id string) bool {
	if len(id) != 64 {
		return false
	}
	return strings.Trim(id, "0123456789abcdef") == ""
}

// do performs an operation (verb) on a container.
func (c *client) do(ctx context.Context, id, verb string, query url.Values) error {
	return c.call(ctx, http.MethodPost, "/containers/"+url.PathEscape(id)+"/"+verb, query, nil, nil)
}

// labelled returns the containers, running or not, that have all of labels, each
// KEY or KEY=VALUE. The newest comes first.
func (c *client) labelled(ctx context.Context, labels ...string) (ids []string, err error) {
	f, err := json.Marshal(map[string][]string{"label": labels})
	if err != nil {
		return nil, err
	}
	var l []struct {
		ID string `json:"Id"`
	}
	err = c.call(ctx, http.MethodGet, "/containers/json", url.Values{"all": {"1"}, "filters": {string(f)}}, nil, &l)
	for _, e := range l {
		if validID(e.ID) {
			ids = append(ids, e.ID)
		}
	}
	return ids, err
}

// networks returns the network mode of every container, running or not.
func (c *client) networks(ctx context.Context) (map[string]string, error) {
	var l []struct {
		ID         string `json:"Id"`
		HostConfig struct{ NetworkMode string }
	}
	if err := c.call(ctx, http.MethodGet, "/containers/json", url.Values{"all": {"1"}}, nil, &l); err != nil {
		return nil, err
	}
	modes := map[string]string{}
	for _, e := range l {
		modes[e.ID] = e.HostConfig.NetworkMode
	}
	return modes, nil
}

// event is one event of the event stream.
type event struct {
	Type   string
	Action string
	Actor  struct {
		ID         string
		Attributes map[string]string
	}
}

// events calls ready once the event stream is open, then each for every event about
// a container, including those about its networks. It returns why the stream ended.
func (c *client) events(ctx context.Context, ready func(), each func(event)) error {
	f := `{"type":["container","network"]}`
	a, err := c.send(ctx, http.MethodGet, "/events", url.Values{"filters": {f}}, nil)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	ready()
	return readEvents(a.Body, each)
}

// readEvents reads concatenated JSON objects. It stops at an oversized or invalid
// object, because what follows cannot be trusted.
func readEvents(r io.Reader, each func(event)) error {
	in := &refill{r: r}
	d := json.NewDecoder(in)
	for {
		in.left = maxEvent
		var e event
		if err := d.Decode(&e); err != nil {
			return fmt.Errorf("the stream of events ended: %w", err)
		}
		if e.Type == "network" {
			e.Type, e.Actor.ID = "container", e.Actor.Attributes["container"]
		}
		if e.Type == "container" && validID(e.Actor.ID) {
			each(e)
		}
	}
}

// refill is a reader that limits the size of each object.
type refill struct {
	r    io.Reader
	left int
}

func (f *refill) Read(p []byte) (int, error) {
	if f.left <= 0 {
		return 0, fmt.Errorf("an event has more than %d bytes", maxEvent)
	}
	n, err := f.r.Read(p[:min(len(p), f.left)])
	f.left -= n
	return n, err
}

// demux splits a container's output into its two streams. Each chunk starts with an
// eight-byte header: the stream, then the length.
func demux(r io.Reader, out, errOut io.Writer) error {
	var h [8]byte
	for {
		if _, err := io.ReadFull(r, h[:]); err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
		to := out
		switch h[0] {
		case 0, 1:
		case 2:
			to = errOut
		default:
			return fmt.Errorf("cannot read the output: unknown stream %d", h[0])
		}
		if _, err := io.CopyN(to, r, int64(binary.BigEndian.Uint32(h[4:]))); err != nil {
			return err
		}
	}
}

// exec runs a command in a container and waits for it.
func (c *client) exec(ctx context.Context, id string, q instance.Command, s instance.Streams) (code int, err error) {
	var made struct{ ID string }
	err = c.call(ctx, http.MethodPost, "/containers/"+url.PathEscape(id)+"/exec", nil,
		map[string]any{"AttachStdin": s.In != nil, "AttachStdout": true, "AttachStderr": true, "Tty": s.TTY, "Cmd": q.Command, "Env": q.Env, "WorkingDir": q.Dir}, &made)
	if err != nil {
		return 0, err
	}
	c.own.Store(made.ID, nil)
	defer c.own.Delete(made.ID)
	conn, r, err := c.hijack(ctx, "/exec/"+url.PathEscape(made.ID)+"/start", map[string]any{"Detach": false, "Tty": s.TTY})
	if err != nil {
		if end, ierr := c.inspectExec(ctx, made.ID); ierr == nil && end.ExitCode != nil && (*end.ExitCode == instance.CannotRun || *end.ExitCode == instance.NotThere) {
			err = &instance.CommandError{Code: *end.ExitCode, Err: err}
		}
		return 0, err
	}
	defer conn.Close()
	over := make(chan struct{})
	defer close(over)
	defer func() {
		if ctx.Err() != nil {
			c.signalExec(id, made.ID, unix.SIGKILL)
		}
	}()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if s.In != nil {
		go func() {
			_, _ = io.Copy(conn, s.In) // a command that has stopped reading is not an error
			if !s.TTY {
				_ = conn.CloseWrite()
			}
		}()
	}
	go c.control(ctx, id, made.ID, s, over)
	out := &head{Writer: s.Out}
	if s.TTY {
		_, err = io.Copy(out, r)
	} else {
		err = demux(r, out, s.Err)
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return 0, err
	}
	for { // the exit may be reported shortly after the output ends
		end, err := c.inspectExec(ctx, made.ID)
		if err != nil {
			return 0, err
		}
		if !end.Running && end.ExitCode != nil {
			if *end.ExitCode == instance.CannotRun && strings.Contains(string(out.b), notFound) {
				return instance.NotThere, nil // newer versions of Docker use the same exit code
			}
			return *end.ExitCode, nil
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// notFound is part of the message that Docker prints when a command does not exist.
const notFound = "executable file not found"

// head keeps the beginning of what is written to it.
type head struct {
	io.Writer
	b []byte
}

func (h *head) Write(p []byte) (int, error) {
	h.b = append(h.b, p[:min(len(p), 1<<10-len(h.b))]...)
	return h.Writer.Write(p)
}

// control applies the signals and terminal sizes from s.Control to a running
// command, until over is closed. It retries a terminal size, because Docker refuses
// it until the command has started.
func (c *client) control(ctx context.Context, container, made string, s instance.Streams, over <-chan struct{}) {
	size := s.Size
	for {
		var again <-chan time.Time
		if s.TTY && size.Rows > 0 && size.Cols > 0 {
			q := url.Values{"h": {fmt.Sprint(size.Rows)}, "w": {fmt.Sprint(size.Cols)}}
			if c.call(ctx, http.MethodPost, "/exec/"+url.PathEscape(made)+"/resize", q, nil, nil) == nil {
				size = instance.Size{}
			} else {
				again = time.After(resizeAgain)
			}
		}
		select {
		case m := <-s.Control:
			if m.Signal != 0 {
				c.signalExec(container, made, m.Signal)
			} else {
				size = m.Size
			}
		case <-again:
		case <-over:
			return
		}
	}
}

// resizeAgain is the delay between attempts to set the size of a terminal.
const resizeAgain = 20 * time.Millisecond

// hijack makes a request whose connection then carries the streams of a command.
// The caller must close the connection.
func (c *client) hijack(ctx context.Context, path string, body any) (*net.UnixConn, io.Reader, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, nil, err
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://docker"+path, bytes.NewReader(b))
	if err != nil {
		return nil, nil, err
	}
	for k, v := range map[string]string{"Content-Type": "application/json", "Connection": "Upgrade", "Upgrade": "tcp"} {
		q.Header.Set(k, v)
	}
	dialed, err := (&net.Dialer{}).DialContext(ctx, "unix", c.socket)
	if err != nil {
		return nil, nil, err
	}
	conn := dialed.(*net.UnixConn)
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	r := bufio.NewReader(conn)
	err = q.Write(conn)
	var a *http.Response
	if err == nil {
		a, err = http.ReadResponse(r, q)
	}
	if err == nil && a.StatusCode != http.StatusSwitchingProtocols && a.StatusCode != http.StatusOK {
		err = readStatus(a)
	}
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, nil, err
	}
	return conn, r, nil
}

// execDetails is the result of inspecting a command. Running is true and Pid 0
// while the command is being started. Running is false if it failed to start.
type execDetails struct {
	ContainerID   string
	Running       bool
	Pid           int
	ExitCode      *int
	ProcessConfig struct {
		Entrypoint string   `json:"entrypoint"`
		Arguments  []string `json:"arguments"`
	}
}

func (x *execDetails) command() string {
	return strings.Join(append([]string{x.ProcessConfig.Entrypoint}, x.ProcessConfig.Arguments...), " ")
}

func (c *client) inspectExec(ctx context.Context, exec string) (x execDetails, err error) {
	err = c.call(ctx, http.MethodGet, "/exec/"+url.PathEscape(exec)+"/json", nil, nil, &x)
	return x, err
}

// signalExec sends a signal to a command in a container, which the Docker API
// cannot do. It signals the command's process group, as a terminal would.
func (c *client) signalExec(container, made string, sig syscall.Signal) {
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	now, err := c.inspectExec(ctx, made)
	for err == nil && now.Running && now.Pid <= 1 { // Docker does not know its PID yet
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
		now, err = c.inspectExec(ctx, made)
	}
	if err != nil || !now.Running {
		return
	}
	fd, err := unix.PidfdOpen(now.Pid, 0)
	if err != nil {
		return // the command has exited
	}
	defer unix.Close(fd)
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", now.Pid))
	// If the container is not named there, Docker runs on another machine, and
	// the PID is not one of this machine.
	if err != nil || !bytes.Contains(groups, []byte(container)) {
		return
	}
	if unix.Kill(-now.Pid, sig) != nil {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0) // fails if it leads no process group or has exited
	}
}

// endLimit bounds the requests made for a command after its caller has gone.
const endLimit = 5 * time.Second

// logs copies a container's output.
func (c *client) logs(ctx context.Context, id string, w io.Writer, l instance.LogQuery) error {
	d, err := c.inspect(ctx, id)
	if err != nil {
		return err
	}
	q := url.Values{"stdout": {"1"}, "stderr": {"1"}, "tail": {"all"}}
	if l.Tail >= 0 {
		q.Set("tail", strconv.Itoa(l.Tail))
	}
	for name, on := range map[string]bool{"follow": l.Follow, "timestamps": l.Times} {
		if on {
			q.Set(name, "1")
		}
	}
	for name, t := range map[string]time.Time{"since": l.Since, "until": l.Until} {
		if !t.IsZero() {
			q.Set(name, fmt.Sprintf("%d.%09d", t.Unix(), t.Nanosecond()))
		}
	}
	a, err := c.send(ctx, http.MethodGet, "/containers/"+url.PathEscape(id)+"/logs", q, nil)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	if d.Config.Tty { // a single raw stream
		_, err = io.Copy(w, a.Body)
		return err
	}
	return demux(a.Body, w, w)
}
