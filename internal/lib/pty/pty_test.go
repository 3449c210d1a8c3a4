package pty

import (
	"os"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

// late is a writer during whose every write the read deadline of a stream passes.
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

// TestCopyAfterTheDeadline checks that no data of a slow writer is lost while
// the other end of the stream stays open.
func TestCopyAfterTheDeadline(t *testing.T) {
	r, w, err := os.Pipe()
	errtest.None(t, err)
	defer r.Close()
	defer w.Close()
	if _, err := w.Write(make([]byte, 64<<10)); err != nil { // as much as a pipe holds
		t.Fatal(err)
	}
	errtest.None(t, r.SetReadDeadline(time.Now().Add(-time.Hour)))
	l := &late{of: r}
	if Copy(l, r); l.got != 64<<10 {
		t.Errorf("%d bytes were copied, want %d", l.got, 64<<10)
	}
}
