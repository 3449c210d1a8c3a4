// Package pty opens pseudo terminals for commands, and reads the output of
// commands completely.
package pty

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Open opens a pseudo terminal with a size. Programs run on slave, and their
// output is read from master. The caller closes both. Once every descriptor of
// slave is closed, reads from master fail.
func Open(rows, cols uint16) (master, slave *os.File, err error) {
	if master, err = os.OpenFile("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0); err != nil {
		return nil, nil, fmt.Errorf("open a terminal: %w", err)
	}
	err = control(master, func(fd int) error {
		if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
			return err
		}
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
		if errno != 0 {
			return errno
		}
		slave = os.NewFile(n, "/dev/pts")
		return nil
	})
	if err != nil {
		master.Close()
		return nil, nil, fmt.Errorf("open a terminal: %w", err)
	}
	if rows > 0 && cols > 0 {
		err = Resize(master, rows, cols)
	}
	if err != nil {
		master.Close()
		slave.Close()
		return nil, nil, err
	}
	return master, slave, nil
}

// Resize sets the size of a terminal. Its foreground processes get SIGWINCH.
func Resize(master *os.File, rows, cols uint16) error {
	err := control(master, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
	})
	if err != nil {
		return fmt.Errorf("resize a terminal: %w", err)
	}
	return nil
}

// control calls do with the descriptor of f, which stays non-blocking.
func control(f *os.File, do func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var derr error
	return errors.Join(raw.Control(func(fd uintptr) { derr = do(int(fd)) }), derr)
}

// rest bounds the last read from a stream, for bytes that have already arrived.
const rest = 500 * time.Millisecond

// Copy copies from f, a pipe or a master, to w until no writer of f is left. If
// f's read deadline passes, bytes that f contains by then are still copied,
// because w may have been too slow for them.
func Copy(w io.Writer, f *os.File) {
	if _, err := io.Copy(w, f); !errors.Is(err, os.ErrDeadlineExceeded) {
		return
	}
	left := 0
	_ = control(f, func(fd int) (err error) { left, err = unix.IoctlGetInt(fd, unix.TIOCINQ); return err }) // stays 0 if not supported
	if f.SetReadDeadline(time.Now().Add(rest)) == nil {
		b := make([]byte, left)
		n, _ := io.ReadFull(f, b) // read all of it before w is slow again
		_, _ = w.Write(b[:n])
	}
}
