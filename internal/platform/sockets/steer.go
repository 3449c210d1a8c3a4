package sockets

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Steering sends new TCP connections to a listening socket other than the one
// bound to their address, whether or not there is one. It is a BPF program in
// this network namespace, and ends with this process.
type Steering struct{ link atomic.Int64 }

// errNoSteering means that this kernel does not support steering.
var errNoSteering = errors.New("the kernel does not steer connections")

// Steer sends the connections to addrs[i] to the listening socket fds[i], until
// Close. The socket must be of its address's family, and of plain TCP, not
// Multipath TCP. An unspecified address stands for all addresses of its family.
// Existing connections are not affected. It requires Linux 5.9 and the right to
// load BPF programs for the network.
func Steer(addrs []netip.AddrPort, fds []int) (*Steering, error) {
	m, err := bpf(unix.BPF_MAP_CREATE, &mapCreate{kind: unix.BPF_MAP_TYPE_SOCKMAP, keySize: 4, valueSize: 8, maxEntries: uint32(len(fds))})
	if err != nil {
		return nil, fmt.Errorf("%w: create a map: %w", errNoSteering, err)
	}
	defer unix.Close(m)
	for n, fd := range fds {
		key, value := uint32(n), uint64(fd)
		_, err := bpf(unix.BPF_MAP_UPDATE_ELEM, &mapUpdate{fd: uint32(m), key: unsafe.Pointer(&key), value: unsafe.Pointer(&value)})
		runtime.KeepAlive(&key)
		runtime.KeepAlive(&value)
		if err != nil {
			return nil, fmt.Errorf("%w: store a socket: %w", errNoSteering, err)
		}
	}
	code := steeringCode(addrs, m)
	license := append([]byte("Dual BSD/GPL"), 0)
	p, err := bpf(unix.BPF_PROG_LOAD, &progLoad{kind: unix.BPF_PROG_TYPE_SK_LOOKUP, count: uint32(len(code)), code: unsafe.Pointer(&code[0]),
		license: unsafe.Pointer(&license[0]), attachType: unix.BPF_SK_LOOKUP})
	runtime.KeepAlive(code)
	runtime.KeepAlive(license)
	if err != nil {
		return nil, fmt.Errorf("%w: load the program: %w", errNoSteering, err)
	}
	defer unix.Close(p)
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	link, err := bpf(unix.BPF_LINK_CREATE, &linkCreate{prog: uint32(p), target: uint32(ns.Fd()), attachType: unix.BPF_SK_LOOKUP})
	if err != nil {
		return nil, fmt.Errorf("%w: attach the program: %w", errNoSteering, err)
	}
	s := &Steering{}
	s.link.Store(int64(link))
	return s, nil
}

// Close ends the steering. Connections that were steered stay with the socket
// that got them. Close may be called again.
func (s *Steering) Close() {
	if fd := s.link.Swap(-1); fd >= 0 {
		unix.Close(int(fd))
	}
}

// The arguments of bpf(2), up to the last field that is not zero.
type (
	mapCreate struct {
		kind, keySize, valueSize, maxEntries uint32
	}
	mapUpdate struct {
		fd, _      uint32
		key, value unsafe.Pointer
	}
	progLoad struct {
		kind, count   uint32
		code, license unsafe.Pointer
		_             [44]byte
		attachType    uint32
	}
	linkCreate struct {
		prog, target, attachType uint32
	}
)

func bpf[T any](command uintptr, args *T) (int, error) {
	for {
		fd, _, errno := unix.Syscall(unix.SYS_BPF, command, uintptr(unsafe.Pointer(args)), unsafe.Sizeof(*args))
		switch errno {
		case 0:
			return int(fd), nil
		case unix.EINTR, unix.EAGAIN:
		default:
			return -1, errno
		}
	}
}

// instruction is one BPF instruction of 8 bytes: code, registers, offset and
// value.
type instruction struct {
	code  uint8
	regs  uint8 // source and destination
	off   int16
	value int32
}

// Offsets in the kernel's struct bpf_sk_lookup.
const (
	lookupFamily   = 8
	lookupProtocol = 12
	lookupLocal4   = 40
	lookupLocal6   = 44
	lookupPort     = 60
)

// Kernel functions that the program calls.
const (
	callMapLookup = 1
	callSkRelease = 86
	callSkAssign  = 124
)

// steeringCode returns the program. It assigns a connection to the socket with
// the index of the first address that matches. If none matches, the kernel
// chooses.
func steeringCode(addrs []netip.AddrPort, sockmap int) (code []instruction) {
	add := func(op uint8, dst, src uint8, off int16, value int32) {
		code = append(code, instruction{op, src<<4 | dst, off, value})
	}
	const (
		mov64reg, mov64, add64 = 0xbf, 0xb7, 0x07
		load32, store32        = 0x61, 0x63
		jne32, jeq64           = 0x56, 0x15
		call, exit, loadImm    = 0x85, 0x95, 0x18
	)
	add(mov64reg, 6, 1, 0, 0)
	rule := func(index int, family int32, port uint16, words []int32, at int16) {
		var misses []int
		want := func(off int16, value int32) {
			add(load32, 2, 6, off, 0)
			misses = append(misses, len(code))
			add(jne32, 2, 0, 0, value)
		}
		want(lookupProtocol, unix.IPPROTO_TCP)
		want(lookupFamily, family)
		want(lookupPort, int32(port))
		for n, w := range words {
			want(at+int16(4*n), w)
		}
		add(mov64, 2, 0, 0, int32(index))
		add(store32, 10, 2, -4, 0)
		add(loadImm, 1, 1, 0, int32(sockmap)) // source 1: value is the descriptor of a map
		add(0, 0, 0, 0, 0)
		add(mov64reg, 2, 10, 0, 0)
		add(add64, 2, 0, 0, -4)
		add(call, 0, 0, 0, callMapLookup)
		misses = append(misses, len(code))
		add(jeq64, 0, 0, 0, 0)
		add(mov64reg, 7, 0, 0, 0)
		add(mov64reg, 1, 6, 0, 0)
		add(mov64reg, 2, 7, 0, 0)
		add(mov64, 3, 0, 0, 0)
		add(call, 0, 0, 0, callSkAssign)
		add(mov64reg, 1, 7, 0, 0)
		add(call, 0, 0, 0, callSkRelease)
		add(mov64, 0, 0, 0, 1)
		add(exit, 0, 0, 0, 0)
		for _, at := range misses {
			code[at].off = int16(len(code) - at - 1)
		}
	}
	for n, a := range addrs {
		switch ip := a.Addr(); {
		case ip.IsUnspecified() && ip.Is4():
			rule(n, unix.AF_INET, a.Port(), nil, 0)
		case ip.IsUnspecified():
			rule(n, unix.AF_INET6, a.Port(), nil, 0)
		case ip.Unmap().Is4():
			b := ip.Unmap().As4()
			rule(n, unix.AF_INET, a.Port(), []int32{int32(binary.NativeEndian.Uint32(b[:]))}, lookupLocal4)
		default:
			b := ip.As16()
			var words []int32
			for k := 0; k < len(b); k += 4 {
				words = append(words, int32(binary.NativeEndian.Uint32(b[k:])))
			}
			rule(n, unix.AF_INET6, a.Port(), words, lookupLocal6)
		}
	}
	add(mov64, 0, 0, 0, 1)
	add(exit, 0, 0, 0, 0)
	return code
}
