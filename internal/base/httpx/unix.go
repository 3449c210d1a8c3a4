package httpx

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// Peer is who is at the other end of a unix socket, as the kernel saw it at
// connect. The pid may have been reused since.
type Peer struct {
	UID, GID uint32
	PID      int32
}

type peerKey struct{}

// PeerOf returns the peer of the unix socket that a request came over. It is
// false for TCP and where the kernel would not say.
func PeerOf(ctx context.Context) (Peer, bool) {
	p, ok := ctx.Value(peerKey{}).(Peer)
	return p, ok
}

func withPeer(ctx context.Context, c net.Conn) context.Context {
	if u, ok := c.(*net.UnixConn); ok {
		if p, err := PeerOfConn(u); err == nil {
			return context.WithValue(ctx, peerKey{}, p)
		}
	}
	return ctx
}

// maxUnixPath is what the kernel takes for the name of a unix socket.
const maxUnixPath = 107

// ListenUnix listens on a unix socket that has its mode from the first instant.
// A socket file that nobody answers on is replaced; one that somebody answers
// on gives EADDRINUSE, and anything that is no socket is left alone. Closing
// the listener removes the file.
func ListenUnix(path string, mode fs.FileMode) (net.Listener, error) {
	l, err := listenUnix(path, mode)
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %s: %w", path, err)
	}
	return l, nil
}

func listenUnix(path string, mode fs.FileMode) (net.Listener, error) {
	// It gets its name by a rename, when its mode is right already.
	temporary := fmt.Sprintf("%s.%d", path, os.Getpid())
	if len(temporary) > maxUnixPath {
		return nil, fmt.Errorf("the path has %d bytes, a socket's has at most %d", len(path), maxUnixPath-len(temporary)+len(path))
	}
	if err := claim(path); err != nil {
		return nil, err
	}
	if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: temporary, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	err = os.Chmod(temporary, mode)
	var info fs.FileInfo
	if err == nil {
		info, err = os.Lstat(temporary)
	}
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return nil, errors.Join(err, l.Close(), os.Remove(temporary))
	}
	return &unixListener{UnixListener: l, path: path, file: info}, nil
}

// claim makes sure that nobody serves at path and that only a dead socket is there.
func claim(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("something that is no socket has that name: move it away")
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		c.Close()
		return fmt.Errorf("another process serves there: %w", syscall.EADDRINUSE)
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return err
}

type unixListener struct {
	*net.UnixListener
	path string
	file fs.FileInfo
}

// Addr is the path that clients know.
func (l *unixListener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

// Close stops listening and removes the socket file if it is still this one's.
func (l *unixListener) Close() error {
	if now, err := os.Lstat(l.path); err == nil && os.SameFile(now, l.file) {
		if err := os.Remove(l.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return errors.Join(fmt.Errorf("cannot remove %s: %w", filepath.Clean(l.path), err), l.UnixListener.Close())
		}
	}
	return l.UnixListener.Close()
}
