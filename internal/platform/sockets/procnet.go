package sockets

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// procNet reads the tables of the calling thread's network namespace.
func procNet(q Query) ([]Socket, error) {
	names := [2]string{"tcp", "tcp6"}
	if q.UDP {
		names = [2]string{"udp", "udp6"}
	}
	var all []Socket
	for i, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		path := "/proc/thread-self/net/" + names[i]
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) && family == unix.AF_INET6 {
			continue // a kernel without IPv6
		}
		if err != nil {
			return nil, err
		}
		all, err = parseProcNet(f, family, all, q.matches)
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
	}
	return all, nil
}

// maxLine bounds a line of /proc/net/tcp, which is 150 bytes.
const maxLine = 4096

// parseProcNet parses a table like /proc/net/tcp: a header line and one line
// per socket.
func parseProcNet(r io.Reader, family uint8, all []Socket, keep func(*Socket) bool) ([]Socket, error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, maxLine), maxLine)
	for n := 1; lines.Scan(); n++ {
		if n == 1 {
			continue
		}
		var s Socket
		if err := parseProcLine(lines.Bytes(), family, &s); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if keep(&s) {
			all = append(all, s)
		}
	}
	return all, lines.Err()
}

// parseProcLine parses one socket: number, local, remote, state, queues, timer,
// retransmits, uid, timeout, inode and more.
func parseProcLine(b []byte, family uint8, s *Socket) error {
	w := bytes.Fields(b)
	if len(w) < 10 {
		return errTruncated
	}
	s.Family = family
	var errs [8]error
	s.Local, errs[0] = parseProcAddr(w[1], family)
	s.Remote, errs[1] = parseProcAddr(w[2], family)
	state, err := strconv.ParseUint(string(w[3]), 16, 8)
	s.State, errs[2] = State(state), err
	wq, rq, _ := bytes.Cut(w[4], []byte(":"))
	s.WQueue, errs[3] = hex32(wq)
	s.RQueue, errs[4] = hex32(rq)
	timer, when, _ := bytes.Cut(w[5], []byte(":"))
	uid, err := strconv.ParseUint(string(w[7]), 10, 32)
	s.UID, errs[5] = uint32(uid), err
	s.Inode, errs[6] = strconv.ParseUint(string(w[9]), 10, 64)
	if string(timer) == "03" {
		ticks, err := hex32(when)
		const tick = 10 * time.Millisecond // clock_t, 100 per second
		s.Expires, errs[7] = time.Duration(ticks)*tick, err
	}
	return errors.Join(errs[:]...)
}

func hex32(b []byte) (uint32, error) {
	n, err := strconv.ParseUint(string(b), 16, 32)
	return uint32(n), err
}

// parseProcAddr parses ADDRESS:PORT. The address is written as words of 32 bits
// in the machine's byte order, the port as a number.
func parseProcAddr(b []byte, family uint8) (netip.AddrPort, error) {
	text, port, _ := bytes.Cut(b, []byte(":"))
	p, err := strconv.ParseUint(string(port), 16, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	var raw, ip [16]byte
	size := 4
	if family == unix.AF_INET6 {
		size = 16
	}
	if len(text) != 2*size {
		return netip.AddrPort{}, fmt.Errorf("address %q has not %d digits", text, 2*size)
	}
	if _, err := hex.Decode(raw[:], text); err != nil {
		return netip.AddrPort{}, err
	}
	for i := 0; i < size; i += 4 {
		native.PutUint32(ip[i:], uint32(raw[i])<<24|uint32(raw[i+1])<<16|uint32(raw[i+2])<<8|uint32(raw[i+3]))
	}
	addr := netip.AddrFrom16(ip).Unmap()
	if size == 4 {
		addr = netip.AddrFrom4([4]byte(ip[:4]))
	}
	return netip.AddrPortFrom(addr, uint16(p)), nil
}
