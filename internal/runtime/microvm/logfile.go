package microvm

import (
	"fmt"
	"os"
	"sync"
)

// logFile is an instance's log. When it reaches its limit it is renamed to PATH.1
// and a new file begins.
type logFile struct {
	mu   sync.Mutex
	path string
	max  int64
	f    *os.File
	size int64
}

func openLog(path string, limit int64) (*logFile, error) {
	l := &logFile{path: path, max: limit}
	return l, l.open()
}

func (l *logFile) open() error {
	f, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("cannot open the log: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return fmt.Errorf("cannot open the log: %w", err)
	}
	l.f, l.size = f, st.Size()
	return nil
}

// Write implements io.Writer.
func (l *logFile) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f == nil {
		return 0, os.ErrClosed
	}
	if l.max > 0 && l.size > 0 && l.size+int64(len(b)) > l.max {
		err := l.f.Close()
		l.f = nil
		if err == nil {
			err = os.Rename(l.path, l.path+".1")
		}
		if err != nil {
			return 0, fmt.Errorf("cannot rotate the log: %w", err)
		}
		if err := l.open(); err != nil {
			return 0, err
		}
	}
	n, err := l.f.Write(b)
	l.size += int64(n)
	return n, err
}

func (l *logFile) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f == nil {
		return nil
	}
	err := l.f.Close()
	l.f = nil
	return err
}
