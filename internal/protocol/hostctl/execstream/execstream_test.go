package execstream

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"

	"lull/internal/core/instance"
)

// TestStreams checks that input arrives completely and with its end, that output
// and the result arrive, and that a signal overtakes input that is not read.
func TestStreams(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	sent := strings.Repeat("0123456789abcdef", 1<<16) // four windows
	control := make(chan instance.Control)
	var out bytes.Buffer
	type end struct {
		r   Result
		err error
	}
	ended := make(chan end, 1)
	go func() {
		r, err := Run(a, instance.Streams{In: strings.NewReader(sent), Out: &out, Err: io.Discard, Control: control})
		ended <- end{r, err}
	}()
	got := make(chan instance.Control)
	go func() {
		control <- instance.Control{Signal: syscall.SIGINT}
		control <- instance.Control{Size: instance.Size{Rows: 3, Cols: 4}}
	}()
	go func() {
		_ = Serve(t.Context(), b, Request{Input: true}, func(_ context.Context, s instance.Streams) (int, error) {
			for range 2 { // before any input is read
				got <- <-s.Control
			}
			if _, err := io.Copy(s.Out, s.In); err != nil {
				return 0, err
			}
			return 0, &instance.CommandError{Code: 7, Err: errors.New("why")}
		})
	}()
	if c := <-got; c.Signal != syscall.SIGINT {
		t.Errorf("got %+v", c)
	}
	if c := <-got; c.Signal != 0 || c.Size != (instance.Size{Rows: 3, Cols: 4}) {
		t.Errorf("got %+v", c)
	}
	if e := <-ended; e.err != nil || e.r != (Result{ExitCode: 7, Error: "why"}) {
		t.Errorf("it ended with %+v", e)
	}
	if out.String() != sent {
		t.Errorf("%d bytes came back of %d", out.Len(), len(sent))
	}
}

// TestClientLeaves checks that a command ends when its client disconnects or
// violates the protocol.
func TestClientLeaves(t *testing.T) {
	frame := func(k Kind, b ...byte) []byte {
		var f bytes.Buffer
		_ = (&conn{w: &f}).write(k, b) // a bytes.Buffer cannot fail
		return f.Bytes()
	}
	for name, sends := range map[string][]byte{
		"leaves":                 nil,
		"unknown frame":          frame('?'),
		"frame too long":         {byte(Input), 1, 0, 0, 0},
		"signal 0":               frame(Signal, 0),
		"signal 65":              frame(Signal, 65),
		"half a size":            frame(Resize, 1, 2),
		"more than the window":   bytes.Repeat(frame(Input, make([]byte, MaxFrame)...), Window/MaxFrame+1),
		"output from the client": frame(Output, 'x'),
		"result from the client": frame(Exit, '{', '}'),
	} {
		t.Run(name, func(t *testing.T) {
			rw := struct {
				io.Reader
				io.Writer
			}{bytes.NewReader(sends), io.Discard}
			err := Serve(t.Context(), rw, Request{}, func(ctx context.Context, _ instance.Streams) (int, error) {
				<-ctx.Done()
				return 0, context.Cause(ctx)
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// FuzzServe sends random bytes as a client. The command must end, at the latest
// when the client disconnects.
func FuzzServe(f *testing.F) {
	f.Add([]byte("i\x00\x00\x00\x01xe\x00\x00\x00\x00r\x00\x00\x00\x04\x00\x01\x00\x02"))
	f.Fuzz(func(t *testing.T, b []byte) {
		rw := struct {
			io.Reader
			io.Writer
		}{bytes.NewReader(b), io.Discard}
		err := Serve(t.Context(), rw, Request{Input: true}, func(ctx context.Context, s instance.Streams) (int, error) {
			for {
				select {
				case <-s.Control:
				case <-ctx.Done():
					return 0, nil
				}
			}
		})
		if err != nil {
			t.Error(err)
		}
	})
}
