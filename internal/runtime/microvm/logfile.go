package microvm

import (
	"fmt"
	"os"
	"sync"
	"time"

	"lull/internal/lib/logfile"
)

// logFile is an instance's log. Several goroutines write to it.
type logFile struct {
	mu     sync.Mutex
	f      *logfile.File
	closed bool
}

func openLog(path string, limit int64) (*logFile, error) {
	l := &logFile{f: logfile.New(path, limit)}
	if err := l.f.Open(); err != nil {
		return nil, fmt.Errorf("cannot open the log: %w", err)
	}
	return l, nil
}

// Write implements io.Writer.
func (l *logFile) Write(b []byte) (int, error) {
	if err := l.add(b, time.Now()); err != nil {
		return 0, err
	}
	return len(b), nil
}

// add appends bytes that were printed at the time at.
func (l *logFile) add(b []byte, at time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return os.ErrClosed
	}
	if err := l.f.Add(b, at); err != nil {
		return fmt.Errorf("cannot write the log: %w", err)
	}
	return nil
}

// Close closes the log permanently.
func (l *logFile) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	return l.f.Close()
}
