package pty

import (
	"os"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

// late is a writer that lets the read deadline of a stream pass during every
// write.
type late struct {
	got int
	of  *os.File
}

func (l *late) Write(b []byte) (int, error) {
	if err := l.of.SetReadDeadline(time.Now().Add(-time.Hour)); err != nil {
		return 0, err
	}
	l.got += len(b)
	return len(b), nil
}

// TestCopyAfterTheDeadline checks that data that has arrived before the read
// deadline is copied, even if the writer is slow and the other end of the stream
// stays open.
func TestCopyAfterTheDeadline(t *testing.T) {
	r, w, err := os.Pipe()
	errtest.None(t, err)
	defer r.Close()
	defer w.Close()
	if _, err := w.Write(make([]byte, 64<<10)); err != nil { // the capacity of a pipe
		t.Fatal(err)
	}
	errtest.None(t, r.SetReadDeadline(time.Now().Add(-time.Hour)))
	l := &late{of: r}
	if Copy(l, r); l.got != 64<<10 {
		t.Errorf("%d bytes were copied, want %d", l.got, 64<<10)
	}
}
