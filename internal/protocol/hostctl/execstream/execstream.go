// Package execstream connects a command that a host daemon runs beside an
// instance with the client that requested it, over one connection after an HTTP
// upgrade.
//
// Both sides send frames: one byte for the kind, four for the length (big-endian,
// at most MaxFrame), and the payload. The client sends Input, InputEnd, Resize
// and Signal. It may have sent at most Window bytes of input more than the host
// has acknowledged with Taken, so that a command that does not read its input
// delays nothing else. The host sends Output and Errors as fast as the client
// reads, and Exit at the end. Closing the connection ends the command.
package execstream

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"

	"lull/internal/core/instance"
)

// Protocol is the name of the protocol in the Upgrade header.
const Protocol = "lull-exec.v1"

// Limits of a connection, in bytes.
const (
	MaxFrame = 32 << 10
	Window   = 256 << 10
)

// Kind is the type of a frame's content.
type Kind byte

// The kinds of frames.
const (
	Input    Kind = 'i' // bytes
	InputEnd Kind = 'e'
	Resize   Kind = 'r' // rows and columns, two bytes each
	Signal   Kind = 's' // signal number, one byte
	Taken    Kind = 't' // number of bytes of input, four bytes
	Output   Kind = 'o' // bytes
	Errors   Kind = 'x' // bytes
	Exit     Kind = 'q' // Result as JSON
)

// Request requests a command.
type Request struct {
	instance.Command
	Input bool          `json:"input,omitempty"` // the client sends input; otherwise it is empty
	TTY   bool          `json:"tty,omitempty"`   // on a terminal of the given size
	Size  instance.Size `json:"size,omitzero"`
}

// Result is how a command ended.
type Result struct {
	ExitCode int    `json:"exit_code"`
	Error    string `json:"error,omitempty"` // set if the command did not start, or its end is unknown
}

// conn reads and writes frames. Writes are safe for concurrent use.
type conn struct {
	r  *bufio.Reader
	mu sync.Mutex
	w  io.Writer
}

func (c *conn) write(k Kind, b []byte) error {
	f := make([]byte, 5, 5+len(b))
	f[0] = byte(k)
	binary.BigEndian.PutUint32(f[1:], uint32(len(b)))
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.w.Write(append(f, b...))
	return err
}

// read reads the next frame.
func (c *conn) read() (Kind, []byte, error) {
	var h [5]byte
	if _, err := io.ReadFull(c.r, h[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(h[1:])
	if n > MaxFrame {
		return 0, nil, fmt.Errorf("a frame has %d bytes, at most %d are allowed", n, MaxFrame)
	}
	b := make([]byte, n)
	_, err := io.ReadFull(c.r, b)
	return Kind(h[0]), b, err
}

// stream is a writer that sends one kind of frame.
type stream struct {
	c    *conn
	kind Kind
}

func (s stream) Write(p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		part := p[n:min(len(p), n+MaxFrame)]
		if err = s.c.write(s.kind, part); err == nil {
			n += len(part)
		}
	}
	return n, err
}

// Serve runs a command for the client at the other end of rw, by calling run. The
// context of run ends when the client disconnects. The caller closes rw
// afterwards.
func Serve(ctx context.Context, rw io.ReadWriter, q Request, run func(context.Context, instance.Streams) (int, error)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	c := &conn{r: bufio.NewReader(rw), w: rw}
	control := make(chan instance.Control)
	s := instance.Streams{Out: stream{c, Output}, Err: stream{c, Errors}, TTY: q.TTY, Size: q.Size, Control: control}
	in := newInput(c)
	defer in.end(io.ErrClosedPipe)
	if q.Input {
		s.In = in
	}
	go func() { cancel(fmt.Errorf("the client has disconnected: %w", c.receive(ctx, in, control))) }()
	var out Result
	code, err := run(ctx, s)
	out.ExitCode = code
	if err != nil {
		out = Result{ExitCode: instance.CannotRun, Error: err.Error()}
		if e, ok := errors.AsType[*instance.CommandError](err); ok {
			out.ExitCode = e.Code
		}
	}
	b, err := json.Marshal(out)
	if err != nil {
		return err
	}
	if len(b) > MaxFrame {
		return fmt.Errorf("the result has %d bytes", len(b))
	}
	return c.write(Exit, b)
}

// receive handles the frames of a client until it disconnects.
func (c *conn) receive(ctx context.Context, in *input, control chan<- instance.Control) error {
	for {
		k, b, err := c.read()
		if err != nil {
			return err
		}
		var m instance.Control
		switch {
		case k == Input:
			if err := in.add(b); err != nil {
				return err
			}
			continue
		case k == InputEnd:
			in.end(io.EOF)
			continue
		case k == Resize && len(b) == 4:
			m.Size = instance.Size{Rows: binary.BigEndian.Uint16(b), Cols: binary.BigEndian.Uint16(b[2:])}
		case k == Signal && len(b) == 1:
			if m.Signal, err = instance.ParseSignal(int(b[0])); err != nil {
				return err
			}
		default:
			return fmt.Errorf("unexpected frame %q of %d bytes", k, len(b))
		}
		select {
		case control <- m:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// input holds the bytes that a client has sent and the command has not read, at
// most Window.
type input struct {
	c    *conn
	mu   sync.Mutex
	some *sync.Cond
	b    []byte
	err  error // returned by Read after b; nil while more input may come
}

func newInput(c *conn) *input {
	in := &input{c: c}
	in.some = sync.NewCond(&in.mu)
	return in
}

func (i *input) add(b []byte) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.b)+len(b) > Window {
		return fmt.Errorf("the client sent more than %d bytes ahead", Window)
	}
	if i.err == nil {
		i.b = append(i.b, b...)
		i.some.Broadcast()
	}
	return nil
}

func (i *input) end(err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.err == nil {
		i.err = err
		i.some.Broadcast()
	}
}

// Read implements io.Reader.
func (i *input) Read(p []byte) (int, error) {
	i.mu.Lock()
	for len(i.b) == 0 && i.err == nil {
		i.some.Wait()
	}
	n := copy(p, i.b)
	i.b = i.b[n:]
	err := i.err
	i.mu.Unlock()
	if n == 0 {
		return 0, err
	}
	return n, i.c.write(Taken, binary.BigEndian.AppendUint32(nil, uint32(n)))
}

// Run is the client's side of Serve. It connects a command with s until the
// command ends. Input is sent ahead, up to Window. Run returns an error if the
// connection broke before it knew how the command ended.
func Run(rw io.ReadWriter, s instance.Streams) (Result, error) {
	c := &conn{r: bufio.NewReader(rw), w: rw}
	over := make(chan struct{})
	defer close(over)
	credit := make(chan int, 1)
	credit <- Window
	if s.In != nil {
		go c.sendInput(s.In, credit, over)
	}
	if s.Control != nil {
		go c.sendControl(s.Control, over)
	}
	for {
		k, b, err := c.read()
		switch {
		case err != nil:
			return Result{}, fmt.Errorf("the connection to the host broke: %w", err)
		case k == Output:
			_, err = s.Out.Write(b)
		case k == Errors:
			_, err = s.Err.Write(b)
		case k == Taken && len(b) == 4:
			n := int(binary.BigEndian.Uint32(b))
			select {
			case left := <-credit:
				n += left
			default:
			}
			credit <- n
		case k == Exit:
			var r Result
			if err := json.Unmarshal(b, &r); err != nil {
				return r, fmt.Errorf("read how the command ended: %w", err)
			}
			return r, nil
		}
		if err != nil {
			return Result{}, fmt.Errorf("write the output: %w", err)
		}
	}
}

func (c *conn) sendInput(r io.Reader, credit chan int, over <-chan struct{}) {
	b := make([]byte, MaxFrame)
	for left := 0; ; {
		for left == 0 {
			select {
			case left = <-credit:
			case <-over:
				return
			}
		}
		n, err := r.Read(b[:min(len(b), left)])
		left -= n
		if n > 0 && c.write(Input, b[:n]) != nil {
			return // the reading side returns the error
		}
		if err != nil {
			_ = c.write(InputEnd, nil)
			return
		}
	}
}

func (c *conn) sendControl(ch <-chan instance.Control, over <-chan struct{}) {
	for {
		select {
		case m := <-ch:
			if m.Signal != 0 {
				_ = c.write(Signal, []byte{byte(m.Signal)}) // the reading side returns the error
				continue
			}
			b := binary.BigEndian.AppendUint16(nil, m.Size.Rows)
			_ = c.write(Resize, binary.BigEndian.AppendUint16(b, m.Size.Cols))
		case <-over:
			return
		}
	}
}
