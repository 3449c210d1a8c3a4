package microvm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// qmpLimit bounds one command. QEMU's main loop answers in well under a
// millisecond, but a busy machine may delay it.
const qmpLimit = 30 * time.Second

// maxQMP limits one message of QEMU, in bytes.
const maxQMP = 1 << 20

// monitor is a QMP client of one QEMU.
type monitor struct {
	c      *net.UnixConn
	events func(name string, data json.RawMessage) // called in order; must not block

	wmu  sync.Mutex
	mu   sync.Mutex
	next int
	wait map[int]chan qmpAnswer
	qemu string // QEMU's version, from the greeting
	err  error
	over chan struct{}
}

var errMonitorEnded = errors.New("the connection to QEMU has ended")

type qmpAnswer struct {
	result json.RawMessage
	err    error
}

type qmpVersion struct {
	QEMU struct {
		Major, Minor, Micro int
	} `json:"qemu"`
	Package string `json:"package"`
}

func (v qmpVersion) String() string {
	return fmt.Sprintf("%d.%d.%d %s", v.QEMU.Major, v.QEMU.Minor, v.QEMU.Micro, v.Package)
}

// qmpError is an error response to a command.
type qmpError struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

func (e *qmpError) Error() string { return "QEMU refused: " + e.Desc }

// dialMonitor connects to a QEMU's monitor and negotiates. It waits until the
// socket appears, ctx ends or gone is closed.
func dialMonitor(ctx context.Context, path string, gone <-chan struct{}, events func(string, json.RawMessage)) (*monitor, error) {
	c, err := dialSocket(ctx, path, gone)
	if err != nil {
		return nil, err
	}
	m := &monitor{c: c, events: events, wait: map[int]chan qmpAnswer{}, over: make(chan struct{})}
	go m.read() // returns when the connection is closed; close waits for it
	if err := m.do(ctx, "qmp_capabilities", nil, nil); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// dialSocket connects to a socket at which QEMU may not listen yet.
func dialSocket(ctx context.Context, path string, gone <-chan struct{}) (*net.UnixConn, error) {
	var d net.Dialer
	for {
		c, err := d.DialContext(ctx, "unix", path)
		if err == nil {
			return c.(*net.UnixConn), nil
		}
		select {
		case <-gone:
			return nil, fmt.Errorf("cannot connect to %s: QEMU has ended", path)
		case <-ctx.Done():
			return nil, fmt.Errorf("cannot connect to %s: %w", path, errors.Join(context.Cause(ctx), err))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (m *monitor) close() {
	m.c.Close()
	<-m.over
}

func (m *monitor) read() {
	defer close(m.over)
	sc := bufio.NewScanner(m.c)
	sc.Buffer(make([]byte, 4096), maxQMP)
	for sc.Scan() {
		var msg struct {
			QMP *struct {
				Version qmpVersion `json:"version"`
			} `json:"QMP"`
			ID     *int            `json:"id"`
			Return json.RawMessage `json:"return"`
			Error  *qmpError       `json:"error"`
			Event  string          `json:"event"`
			Data   json.RawMessage `json:"data"`
		}
		if json.Unmarshal(sc.Bytes(), &msg) != nil {
			break
		}
		switch {
		case msg.QMP != nil:
			m.mu.Lock()
			m.qemu = msg.QMP.Version.String()
			m.mu.Unlock()
		case msg.Event != "":
			m.events(msg.Event, msg.Data)
		case msg.ID != nil:
			a := qmpAnswer{result: msg.Return}
			if msg.Error != nil {
				a.err = msg.Error
			}
			m.mu.Lock()
			ch := m.wait[*msg.ID]
			delete(m.wait, *msg.ID)
			m.mu.Unlock()
			if ch != nil {
				ch <- a
			}
		}
	}
	m.c.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = errMonitorEnded
	for id, ch := range m.wait {
		delete(m.wait, id)
		ch <- qmpAnswer{err: m.err}
	}
}

// do runs a command and decodes its result into result unless that is nil.
func (m *monitor) do(ctx context.Context, command string, args, result any) error {
	return m.doWith(ctx, command, args, result, nil)
}

// doWith is like do, and passes an open file to QEMU.
func (m *monitor) doWith(ctx context.Context, command string, args, result any, file *os.File) error {
	return m.begin(command, args, file)(ctx, result)
}

// begin sends a command, with an open file unless that is nil, and returns a
// function that waits for its response. QEMU executes commands in order, so
// several can share one round trip.
func (m *monitor) begin(command string, args any, file *os.File) (finish func(ctx context.Context, result any) error) {
	failed := func(err error) func(context.Context, any) error {
		return func(context.Context, any) error { return fmt.Errorf("cannot %s: %w", command, err) }
	}
	ch := make(chan qmpAnswer, 1)
	m.mu.Lock()
	if m.err != nil {
		defer m.mu.Unlock()
		return failed(m.err)
	}
	m.next++
	id := m.next
	m.wait[id] = ch
	m.mu.Unlock()
	b, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        int    `json:"id"`
	}{command, args, id})
	if err == nil {
		err = m.send(append(b, '\n'), file)
	}
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, net.ErrClosed) {
		err = fmt.Errorf("%w: %w", errMonitorEnded, err)
	}
	if err != nil {
		m.forget(id)
		return failed(err)
	}
	return func(ctx context.Context, result any) error {
		defer m.forget(id)
		ctx, cancel := context.WithTimeout(ctx, qmpLimit)
		defer cancel()
		select {
		case a := <-ch:
			if a.err != nil {
				return fmt.Errorf("cannot %s: %w", command, a.err)
			}
			if result == nil {
				return nil
			}
			if err := json.Unmarshal(a.result, result); err != nil {
				return fmt.Errorf("cannot read the answer to %s: %w", command, err)
			}
			return nil
		case <-ctx.Done():
			return fmt.Errorf("cannot %s: QEMU does not answer: %w", command, context.Cause(ctx))
		}
	}
}

// forget stops waiting for a response.
func (m *monitor) forget(id int) {
	m.mu.Lock()
	delete(m.wait, id)
	m.mu.Unlock()
}

// ended reports whether the connection is closed.
func (m *monitor) ended() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err != nil
}

// version returns QEMU's version, or "" until a command has been answered.
func (m *monitor) version() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.qemu
}

func (m *monitor) send(b []byte, file *os.File) error {
	m.wmu.Lock()
	defer m.wmu.Unlock()
	if err := m.c.SetWriteDeadline(time.Now().Add(qmpLimit)); err != nil {
		return err
	}
	if file == nil {
		_, err := m.c.Write(b)
		return err
	}
	_, _, err := m.c.WriteMsgUnix(b, unix.UnixRights(int(file.Fd())), nil)
	return err
}

// status returns the machine's run state: running, paused, shutdown,
// internal-error, postmigrate and others.
func (m *monitor) status(ctx context.Context) (string, error) {
	var s struct {
		Status string `json:"status"`
	}
	err := m.do(ctx, "query-status", nil, &s)
	return s.Status, err
}

// console returns the kernel output since the last call, except what the ring has
// already overwritten.
func (m *monitor) console(ctx context.Context) []byte {
	var b []byte // base64, because QEMU's plain text format would end at the first NUL
	if m.do(ctx, "ringbuf-read", map[string]any{"device": "con", "size": consoleSize, "format": "base64"}, &b) != nil {
		return nil
	}
	return b
}
