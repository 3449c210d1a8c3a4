// Package unixsock creates the daemons' unix sockets and identifies their peers.
//
// A socket has its mode from the moment it exists. A socket that is being served
// is never removed, and Close removes only the file that its own listener
// created.
package unixsock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Peer is the process that connected, according to the kernel. Its pid may have
// been reused since.
type Peer struct {
	UID, GID, PID int
}

// MaxPath is the kernel's maximum length of a unix socket's path, in bytes.
const MaxPath = 107

// Listen listens on a socket at path. It replaces a socket file that no process
// serves, and returns EADDRINUSE for one that is served. It does not replace a
// file that is not a socket. Closing the listener removes the file.
func Listen(path string, mode fs.FileMode) (*Listener, error) {
	l, err := listen(path, mode)
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %s: %w", path, err)
	}
	return l, nil
}

func listen(path string, mode fs.FileMode) (*Listener, error) {
	if len(path) > MaxPath {
		return nil, fmt.Errorf("the path has %d bytes, a socket's has at most %d", len(path), MaxPath)
	}
	if err := clear(path); err != nil {
		return nil, err
	}
	// bind gives the file the mode of the socket's descriptor, minus the umask,
	// so the descriptor's mode is set first.
	narrow := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), uint32(mode)) }), err)
	}}
	made, err := narrow.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	l := made.(*net.UnixListener)
	l.SetUnlinkOnClose(false)
	err = os.Chmod(path, mode)
	var info fs.FileInfo
	if err == nil {
		info, err = os.Lstat(path)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close(), os.Remove(path))
	}
	return &Listener{UnixListener: l, path: path, file: info}, nil
}

// clear returns an error if path is being served, and removes a socket file that
// is not.
func clear(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("a file that is not a socket has that name: remove or rename it")
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		c.Close()
		return fmt.Errorf("another process serves there: %w", syscall.EADDRINUSE)
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, syscall.ECONNREFUSED):
		return os.Remove(path)
	}
	return err
}

// Listener is a listening socket that removes its file when it is closed.
type Listener struct {
	*net.UnixListener
	path string
	file fs.FileInfo
}

// Close stops listening and removes the socket file if it is still this
// listener's.
func (l *Listener) Close() error {
	if now, err := os.Lstat(l.path); err == nil && os.SameFile(now, l.file) {
		if err := os.Remove(l.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errors.Join(fmt.Errorf("cannot remove %s: %w", l.path, err), l.UnixListener.Close())
		}
	}
	return l.UnixListener.Close()
}
