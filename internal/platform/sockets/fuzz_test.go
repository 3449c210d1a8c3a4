package sockets

import (
	"bytes"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func all(*Socket) bool { return true }

func FuzzParseAnswer(f *testing.F) {
	f.Add(socketMessage(0, 1, 80), uint32(1))
	f.Add(append(socketMessage(0, 1, 80, 8, 0, 2, 0, 1, 2, 3, 4), message(unix.NLMSG_DONE, 0, 1, errno(0))...), uint32(1))
	f.Add(message(unix.NLMSG_ERROR, unix.NLM_F_DUMP_INTR, 3, errno(unix.EINVAL)), uint32(3))
	f.Add(message(unix.NLMSG_DONE, 0, 1, nil), uint32(1))
	f.Fuzz(func(t *testing.T, b []byte, seq uint32) {
		a, err := parseAnswer(b, seq, nil, all)
		if err == nil && len(a.sockets) > len(b)/(headerSize+messageSize) {
			t.Errorf("%d sockets out of %d bytes", len(a.sockets), len(b))
		}
		for _, s := range a.sockets {
			if !s.Local.IsValid() || !s.Remote.IsValid() {
				t.Errorf("a socket without addresses: %+v", s)
			}
		}
	})
}

func FuzzParseProcNet(f *testing.F) {
	for _, name := range []string{"tcp", "tcp6", "udp"} {
		if b, err := os.ReadFile("/proc/net/" + name); err == nil {
			f.Add(b, name == "tcp6")
		}
	}
	f.Add([]byte("head\n0: 0100007F:1F90 00000000:0000 06 0:0 03:10 0 0 0 1\n"), false)
	f.Fuzz(func(t *testing.T, b []byte, six bool) {
		family := uint8(unix.AF_INET)
		if six {
			family = unix.AF_INET6
		}
		got, err := parseProcNet(bytes.NewReader(b), family, nil, all)
		if err == nil && len(got) > bytes.Count(b, []byte("\n"))+1 {
			t.Errorf("%d sockets", len(got))
		}
		for _, s := range got {
			if !s.Local.IsValid() || !s.Remote.IsValid() {
				t.Errorf("a socket without addresses: %+v", s)
			}
		}
	})
}

// FuzzPortFilter runs the filter program as the kernel would and compares the
// result with the list of ports.
func FuzzPortFilter(f *testing.F) {
	f.Add([]byte{0, 80, 1, 187}, uint16(443))
	f.Add([]byte{0, 80}, uint16(81))
	f.Fuzz(func(t *testing.T, list []byte, port uint16) {
		var ports []uint16
		for ; len(list) >= 2 && len(ports) < maxFilterPorts; list = list[2:] {
			ports = append(ports, uint16(list[0])<<8|uint16(list[1]))
		}
		code := portFilter(ports)
		if len(code) == 0 {
			return
		}
		at := 0
		for at < len(code) {
			yes, no := int(code[at+1]), int(native.Uint16(code[at+2:]))
			var holds bool
			switch code[at] {
			case 2:
				holds = port >= native.Uint16(code[at+6:])
			case 3:
				holds = port <= native.Uint16(code[at+6:])
			}
			if holds {
				at += yes
			} else {
				at += no
			}
		}
		if got, want := at == len(code), (Query{LocalPorts: ports}).matches(&Socket{Local: addrPort(port)}); got != want {
			t.Errorf("the program says %v for %d of %v", got, port, ports)
		}
	})
}
