package sockets

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
)

// UnixSocket is a bound unix socket as /proc/net/unix lists it.
type UnixSocket struct {
	Inode     uint64
	Path      string // abstract names start with @; never empty
	Listening bool
	Connected bool // for an accepted connection the path is its listener's
	Pending   bool // a connection that the listener of that path has not accepted yet; it has no inode
}

// Unix lists the bound unix sockets of a process's network namespace, or of our
// own if pid is 0.
func Unix(pid int) ([]UnixSocket, error) {
	path := "/proc/thread-self/net/unix"
	if pid != 0 {
		path = fmt.Sprintf("/proc/%d/net/unix", pid)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("cannot list unix sockets: %w", err)
	}
	defer f.Close()
	all, err := parseUnix(f)
	if err != nil {
		return nil, fmt.Errorf("cannot list unix sockets: read %s: %w", path, err)
	}
	return all, nil
}

// maxUnixLine bounds a line: a path is at most 108 bytes.
const maxUnixLine = 4096

func parseUnix(r io.Reader) (all []UnixSocket, err error) {
	const (
		accepts   = 1 << 16 // __SO_ACCEPTCON
		pending   = 2       // SS_CONNECTING, for sockets without a file
		connected = 3       // SS_CONNECTED
	)
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, maxUnixLine), maxUnixLine)
	for n := 1; lines.Scan(); n++ {
		f := bytes.SplitN(lines.Bytes(), []byte(" "), 2)
		if n == 1 || len(f) < 2 {
			continue
		}
		// Num: RefCount Protocol Flags Type St Inode Path; the inode is padded.
		f = bytes.Fields(f[1])
		if len(f) < 6 {
			return nil, fmt.Errorf("line %d has %d fields, want 7 or more", n, len(f)+1)
		}
		if len(f) < 7 {
			continue // not bound
		}
		flags, err1 := strconv.ParseUint(string(f[2]), 16, 64)
		state, err2 := strconv.ParseUint(string(f[4]), 16, 8)
		inode, err3 := strconv.ParseUint(string(f[5]), 10, 64)
		if err1 != nil || err2 != nil || err3 != nil {
			return nil, fmt.Errorf("line %d is not of a socket", n)
		}
		_, path, _ := bytes.Cut(lines.Bytes(), append(append([]byte(" "), f[5]...), ' '))
		all = append(all, UnixSocket{Inode: inode, Path: string(path), Listening: flags&accepts != 0, Connected: state == connected, Pending: state == pending && inode == 0})
	}
	return all, lines.Err()
}
