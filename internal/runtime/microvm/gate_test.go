package microvm

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/runtime/microvm/share"
)

// ported returns a port behind the gate g, and QEMU's end of it.
func ported(t *testing.T, g *portGate) (port net.Conn, far net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	errtest.None(t, err)
	defer l.Close()
	c, err := net.Dial("unix", l.Addr().String())
	errtest.None(t, err)
	if far, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	if port, err = g.through(c.(*net.UnixConn)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { port.Close(); far.Close() })
	return port, far
}

// TestGate checks that data in both directions waits while a gate is held, and
// arrives complete and in order once the gate is open.
func TestGate(t *testing.T) {
	g := new(portGate)
	port, far := ported(t, g)
	got := make(chan []byte, 1)
	go func() {
		b, err := io.ReadAll(port)
		if err != nil {
			t.Error(err)
		}
		got <- b
	}()
	var want []byte
	for n := range 50 {
		g.hold()
		part := bytes.Repeat([]byte{byte(n)}, 100)
		want = append(want, part...)
		errtest.Get(far.Write(part))(t)
		g.open()
	}
	errtest.None(t, far.(*net.UnixConn).CloseWrite())
	if b := <-got; !bytes.Equal(b, want) {
		t.Errorf("%d bytes arrived, or in another order; %d were sent", len(b), len(want))
	}

	// A reader and a writer are already waiting when the gate is held. Their data
	// must not be transferred.
	port, far = ported(t, g)
	read := make(chan error, 1)
	go func() {
		_, err := port.Read(make([]byte, 1))
		read <- err
	}()
	g.hold()
	wrote := make(chan error, 1)
	go func() {
		_, err := port.Write(bytes.Repeat([]byte("w"), 1<<20))
		wrote <- err
	}()
	errtest.Get(far.Write([]byte("x")))(t)
	errtest.None(t, far.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	if n, err := far.Read(make([]byte, 1)); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("past the held gate came %d bytes, %v", n, err)
	}
	select {
	case err := <-read:
		t.Errorf("the held gate let a reader through: %v", err)
	case err := <-wrote:
		t.Errorf("the held gate let a writer through: %v", err)
	default:
	}
	g.open()
	if err := <-read; err != nil {
		t.Error(err)
	}
	errtest.None(t, far.SetReadDeadline(time.Time{}))
	if _, err := io.ReadFull(far, make([]byte, 1<<20)); err != nil {
		t.Error(err)
	}
	if err := <-wrote; err != nil {
		t.Error(err)
	}

	// Closing a connection makes waiting readers and writers return.
	g.hold()
	go func() {
		_, err := port.Read(make([]byte, 1))
		read <- err
	}()
	errtest.Get(far.Write([]byte("x")))(t)
	port.Close()
	if err := <-read; !errors.Is(err, net.ErrClosed) {
		t.Errorf("a reader of a closed port got %v", err)
	}
	g.open()
}

// TestGuardOfAWorkspace checks that, under a new daemon, a running guest is not
// paused before it has announced itself on its workspace port, because it may be
// waiting for a file. A guest that the earlier daemon paused stays paused.
func TestGuardOfAWorkspace(t *testing.T) {
	quiet := func() string { return "" }
	s := share.New(t.TempDir(), false)
	if got := (&guard{pending: quiet, files: s}).Pending(); got == "" {
		t.Error("nothing holds a guest that has not announced itself")
	}
	if got := (&guard{pending: quiet, files: s, rested: true}).Pending(); got != "" {
		t.Errorf("what an earlier daemon had paused: %s", got)
	}
	if got := (&guard{pending: quiet}).Pending(); got != "" {
		t.Errorf("without a workspace: %s", got)
	}
	w := &Work{sharedDir: sharedDir{files: s}, state: state{leftFrozen: true}}
	w.setFrozen(true)
	if !w.leftFrozen {
		t.Error("it is frozen as before")
	}
	w.setFrozen(false)
	if w.leftFrozen {
		t.Error("it was thawed")
	}
}
