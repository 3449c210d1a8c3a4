package sockets

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func list(t testing.TB, q Query) []Socket {
	t.Helper()
	table, err := Dump(context.Background(), q)
	errtest.None(t, err)
	if table.Source != FromDiag {
		t.Fatalf("the source is %s; this kernel has no sock_diag", table.Source)
	}
	return table.Sockets
}

func TestDumpSeesTheBacklog(t *testing.T) {
	p := newProgram(t)
	// TIME_WAIT is left out, because an earlier test may have used the port.
	q := Query{LocalPorts: []uint16{port(t, p.addr)}, States: []State{Listen, Established, CloseWait}, Info: true}
	accepted := p.connect()
	p.freeze()
	waiting := p.dial()
	gone := p.dial()
	_ = gone.Close()
	say(t, waiting, "12345")
	waittest.Until(t, "the bytes", func() bool {
		for _, s := range list(t, q) {
			if s.Remote.String() == waiting.LocalAddr().String() && s.RQueue == 6 {
				return true
			}
		}
		return false
	})
	seen := map[string]Socket{}
	for _, s := range list(t, q) {
		seen[s.Remote.String()] = s
	}
	if len(seen) != 4 {
		t.Errorf("%d sockets, want a listener and three connections: %v", len(seen), seen)
	}
	if s := seen["0.0.0.0:0"]; s.State != Listen || s.RQueue != 2 || s.WQueue < 2 || s.Inode == 0 || s.Waiting() {
		t.Errorf("listener: %+v, want two in its queue", s)
	}
	if s := seen[accepted.LocalAddr().String()]; s.State != Established || s.Inode == 0 || s.Waiting() {
		t.Errorf("accepted: %+v", s)
	}
	if s := seen[waiting.LocalAddr().String()]; s.State != Established || s.Inode != 0 || !s.Waiting() || s.RQueue != 6 {
		t.Errorf("waiting: %+v, want inode 0 and 6 unread bytes", s)
	}
	if s := seen[gone.LocalAddr().String()]; s.State != CloseWait || !s.Waiting() {
		t.Errorf("waiting and gone: %+v", s)
	}
	if s := seen[waiting.LocalAddr().String()]; !s.HasBytes() || s.Traffic.BytesReceived != 6 || s.Traffic.LastReceived > 30*time.Second {
		t.Errorf("traffic: %+v of %d bytes", s.Traffic, s.InfoSize)
	}
	if got := list(t, Query{LocalPorts: q.LocalPorts, States: []State{Listen}}); len(got) != 1 || got[0].State != Listen || got[0].InfoSize != 0 {
		t.Errorf("listeners: %+v", got)
	}
}

func TestDumpTraffic(t *testing.T) {
	p := newProgram(t)
	c := p.connect()
	say(t, c, "123456789")
	expect(t, c, "123456789")
	q := Query{LocalPorts: []uint16{port(t, p.addr)}, States: []State{Established}, Info: true}
	waittest.Until(t, "ten bytes each way", func() bool {
		got := list(t, q)
		// On some sides, the kernel counts the handshake as one acknowledged
		// byte.
		return len(got) == 1 && got[0].Traffic.BytesReceived == 10 && got[0].Traffic.BytesAcked >= 10 && got[0].Traffic.BytesAcked <= 11
	})
	waittest.Until(t, "20 ms of quiet", func() bool {
		s := list(t, q)[0].Traffic
		return s.LastReceived >= 20*time.Millisecond && s.LastSent >= 20*time.Millisecond
	})
}

func TestDumpTimeWait(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	errtest.None(t, err)
	defer l.Close()
	c, err := net.Dial("tcp4", l.Addr().String())
	errtest.None(t, err)
	s, err := l.Accept()
	errtest.None(t, err)
	_ = s.Close() // the server closes first, so TIME_WAIT is on its side
	_ = c.Close()
	for _, from := range []struct {
		name string
		list func(Query) []Socket
	}{
		{"sock_diag", func(q Query) []Socket { return list(t, q) }},
		{"proc", func(q Query) []Socket {
			got, err := procNet(q)
			errtest.None(t, err)
			return got
		}},
	} {
		waittest.Until(t, "TIME_WAIT by "+from.name, func() bool {
			for _, s := range from.list(Query{LocalPorts: []uint16{port(t, l.Addr().String())}, States: []State{TimeWait}}) {
				if s.Remote.String() == c.LocalAddr().String() {
					return s.Inode == 0 && s.Expires > time.Second && s.Expires <= 60*time.Second
				}
			}
			return false
		})
	}
}

func TestDumpUDPAndIPv6(t *testing.T) {
	u, err := net.ListenPacket("udp4", "127.0.0.1:0")
	errtest.None(t, err)
	defer u.Close()
	in := inspect(t, u.(*net.UDPConn))
	got := list(t, Query{UDP: true, LocalPorts: []uint16{in.Local.Port()}})
	if len(got) != 1 || got[0].Inode != in.Inode || got[0].Local != in.Local || got[0].UID != uint32(os.Getuid()) {
		t.Errorf("udp: %+v, want %+v", got, in)
	}
	l, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skipf("no IPv6 on this machine: %v", err)
	}
	defer l.Close()
	in = inspect(t, l.(*net.TCPListener))
	got = list(t, Query{LocalPorts: []uint16{in.Local.Port()}})
	if len(got) != 1 || got[0].Inode != in.Inode || got[0].Local != in.Local || got[0].Family != unix.AF_INET6 {
		t.Errorf("tcp6: %+v, want %+v", got, in)
	}
}

// TestProcAgreesWithDiag compares the two sources on sockets that do not change.
func TestProcAgreesWithDiag(t *testing.T) {
	var ports []uint16
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "[::]:0"} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Logf("without %s: %v", addr, err)
			continue
		}
		defer l.Close()
		ports = append(ports, port(t, l.Addr().String()))
		c, err := net.Dial("tcp", l.Addr().String())
		errtest.None(t, err)
		defer c.Close()
	}
	q := Query{LocalPorts: ports, States: []State{Listen, Established}}
	proc, err := procNet(q)
	errtest.None(t, err)
	key := func(all []Socket) map[string]Socket {
		m := map[string]Socket{}
		for _, s := range all {
			if s.State == Listen {
				s.WQueue = 0 // /proc does not have the limit of the queue
			}
			m[fmt.Sprint(s.Local, s.Remote)] = s
		}
		return m
	}
	if diff := cmp.Diff(key(list(t, q)), key(proc), cmp.Comparer(func(a, b Socket) bool { return a == b })); diff != "" {
		t.Errorf("sock_diag and proc: %s", diff)
	}
	if len(proc) < 2*len(ports) {
		t.Errorf("%d sockets, want a listener and a connection for each of %d ports", len(proc), len(ports))
	}
}

func TestDumpWithManyPorts(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	errtest.None(t, err)
	defer l.Close()
	mine := port(t, l.Addr().String())
	for _, n := range []int{1, 2, 3, maxFilterPorts - 1, maxFilterPorts, 5000} {
		for _, at := range []int{0, n / 2, n - 1} {
			ports := make([]uint16, n)
			for i := range ports {
				ports[i] = uint16(i + 1) // low ports, unused in the ephemeral range
				if ports[i] == mine {
					ports[i] = 1
				}
			}
			ports[at] = mine
			found := 0
			for _, s := range list(t, Query{LocalPorts: ports, States: []State{Listen}}) {
				if s.Local.Port() == mine {
					found++
				}
			}
			if found != 1 {
				t.Errorf("%d ports, mine at %d: found %d times", n, at, found)
			}
		}
	}
}

// TestTheKernelFilters checks that the kernel applies the port filter, so that
// sockets of other ports are not sent at all.
func TestTheKernelFilters(t *testing.T) {
	var all []uint16
	for range 5 {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		errtest.None(t, err)
		defer l.Close()
		all = append(all, port(t, l.Addr().String()))
	}
	c, err := openDiag()
	errtest.None(t, err)
	defer func() { _ = c.close() }()
	errtest.None(t, c.send(request(Query{LocalPorts: all[1:3], States: []State{Listen}}, unix.AF_INET, 7)))
	buf := make([]byte, 64<<10)
	var got []uint16
	for done := false; !done; {
		n, err := c.receive(buf)
		errtest.None(t, err)
		a, err := parseAnswer(buf[:n], 7, nil, func(s *Socket) bool { got = append(got, s.Local.Port()); return true })
		if err != nil {
			t.Fatal(err)
		}
		done = a.done
	}
	if len(got) != 2 || got[0]+got[1] != all[1]+all[2] {
		t.Errorf("the kernel gave the ports %v, want %v", got, all[1:3])
	}
}

func TestDumpInAnotherNamespace(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("entering a network namespace needs CAP_SYS_ADMIN")
	}
	p := startPart(t, "netns", "127.0.0.1:0", &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET})
	ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/net", p.pid()), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	errtest.None(t, err)
	defer unix.Close(ns)
	ours, err := os.Readlink("/proc/self/ns/net")
	errtest.None(t, err)
	for name, q := range map[string]Query{"by process": {NetNSPID: p.pid()}, "by descriptor": {NetNSFD: ns}} {
		got := list(t, q)
		if len(got) != 1 || got[0].Local.String() != p.addr {
			t.Errorf("%s: %v, want only %s", name, got, p.addr)
		}
		table, err := inNamespace(q, func() (Table, error) { s, err := procNet(q); return Table{Sockets: s}, err })
		if err != nil || len(table.Sockets) != 1 || table.Sockets[0].Local.String() != p.addr {
			t.Errorf("proc %s: %v, %v, want only %s", name, table.Sockets, err, p.addr)
		}
	}
	p.freeze() // a guard works in any namespace
	g, _ := guard(t, newPoller(t), p.dups())
	if got := g.Pending(); got != "" {
		t.Errorf("Pending = %q", got)
	}
	if _, err := Dump(context.Background(), Query{NetNSPID: 1, NetNSFD: ns}); err == nil {
		t.Error("a query with two namespaces is answered")
	}
	if _, err := Dump(context.Background(), Query{NetNSPID: 1 << 30}); err == nil || !strings.HasPrefix(err.Error(), "cannot list sockets") {
		t.Errorf("err = %v", err)
	}
	threads, err := os.ReadDir("/proc/self/task")
	errtest.None(t, err)
	for _, thread := range threads {
		now, err := os.Readlink("/proc/self/task/" + thread.Name() + "/ns/net")
		if err == nil && now != ours { // an error means that the thread has ended
			t.Errorf("thread %s stayed in %s", thread.Name(), now)
		}
	}
}

// script is a netlink socket that returns prepared answers.
type script struct {
	answers [][]byte
	sent    int
	closed  *int
}

func (s *script) send([]byte) error { s.sent++; return nil }
func (s *script) close() error      { *s.closed++; return nil }
func (s *script) receive(b []byte) (int, error) {
	if len(s.answers) == 0 {
		return 0, unix.EAGAIN
	}
	n := copy(b, s.answers[0])
	s.answers = s.answers[1:]
	return n, nil
}

// message builds one netlink message.
func message(kind, flags uint16, seq uint32, body []byte) []byte {
	b := make([]byte, headerSize, headerSize+len(body))
	native.PutUint32(b, uint32(headerSize+len(body)))
	native.PutUint16(b[4:], kind)
	native.PutUint16(b[6:], flags)
	native.PutUint32(b[8:], seq)
	return append(b, body...)
}

func socketMessage(flags uint16, seq uint32, port byte, attrs ...byte) []byte {
	body := make([]byte, messageSize)
	body[0], body[1], body[5] = unix.AF_INET, byte(Listen), port
	return message(sockDiagByFamily, flags, seq, append(body, attrs...))
}

func errno(e unix.Errno) []byte {
	code := -int32(e)
	return native.AppendUint32(nil, uint32(code))
}

func TestDumpOfDifficultAnswers(t *testing.T) {
	done := func(seq uint32) []byte { return message(unix.NLMSG_DONE, unix.NLM_F_MULTI, seq, errno(0)) }
	ok := [][]byte{append(socketMessage(0, 1, 80), done(1)...), done(2)}
	cut := socketMessage(0, 1, 80)
	fallback := []Socket{{Inode: 42}}
	for name, tc := range map[string]struct {
		answers [][][]byte // per attempt
		openErr error
		want    Source
		ports   []uint16
		err     error
	}{
		"simple":                    {answers: [][][]byte{ok}, want: FromDiag, ports: []uint16{80}},
		"in two parts":              {answers: [][][]byte{{socketMessage(0, 1, 80), socketMessage(0, 1, 81), done(1), done(2)}}, want: FromDiag, ports: []uint16{80, 81}},
		"left over of another dump": {answers: [][][]byte{append([][]byte{socketMessage(0, 9, 99), done(9)}, ok...)}, want: FromDiag, ports: []uint16{80}},
		"interrupted once": {answers: [][][]byte{
			{append(socketMessage(unix.NLM_F_DUMP_INTR, 1, 79), done(1)...), done(2)}, ok}, want: FromDiag, ports: []uint16{80}},
		"interrupted at its end": {answers: [][][]byte{
			{message(unix.NLMSG_DONE, unix.NLM_F_DUMP_INTR, 1, errno(0)), done(2)}, ok}, want: FromDiag, ports: []uint16{80}},
		"interrupted always": {answers: [][][]byte{
			{socketMessage(unix.NLM_F_DUMP_INTR, 1, 79), done(1)}, {socketMessage(unix.NLM_F_DUMP_INTR, 1, 79), done(1)},
			{socketMessage(unix.NLM_F_DUMP_INTR, 1, 79), done(1)}, {socketMessage(unix.NLM_F_DUMP_INTR, 1, 79), done(1)},
			{socketMessage(unix.NLM_F_DUMP_INTR, 1, 79), done(1)}}, err: ErrInterrupted},
		"overrun":          {answers: [][][]byte{{message(unix.NLMSG_OVERRUN, 0, 1, nil)}, ok}, want: FromDiag, ports: []uint16{80}},
		"truncated":        {answers: [][][]byte{{cut[:len(cut)-8]}}, err: errTruncated},
		"silent":           {answers: [][][]byte{{}}, err: unix.EAGAIN},
		"error":            {answers: [][][]byte{{message(unix.NLMSG_ERROR, 0, 1, errno(unix.EINVAL))}}, err: unix.EINVAL},
		"error at its end": {answers: [][][]byte{{message(unix.NLMSG_DONE, 0, 1, errno(unix.ENOMEM))}}, err: unix.ENOMEM},
		"no such protocol": {answers: [][][]byte{{message(unix.NLMSG_ERROR, 0, 1, errno(unix.ENOENT))}}, want: FromProc},
		"forbidden":        {openErr: unix.EACCES, want: FromProc},
		"no IPv6":          {answers: [][][]byte{{append(socketMessage(0, 1, 80), done(1)...), message(unix.NLMSG_ERROR, 0, 2, errno(unix.ENOENT))}}, want: FromDiag, ports: []uint16{80}},
	} {
		t.Run(name, func(t *testing.T) {
			opened, closed := 0, 0
			open := func() (conn, error) {
				if tc.openErr != nil {
					return nil, tc.openErr
				}
				opened++
				if opened > len(tc.answers) {
					return nil, errors.New("one attempt too many")
				}
				return &script{answers: tc.answers[opened-1], closed: &closed}, nil
			}
			table, err := dump(context.Background(), Query{}, open, func(Query) ([]Socket, error) { return fallback, nil })
			if !errors.Is(err, tc.err) || table.Source != tc.want {
				t.Fatalf("%+v, %v, want %q, %v", table, err, tc.want, tc.err)
			}
			if opened != closed {
				t.Errorf("opened %d, closed %d", opened, closed)
			}
			if tc.want == FromProc {
				if diff := cmp.Diff(uint64(42), table.Sockets[0].Inode); diff != "" {
					t.Error(diff)
				}
				return
			}
			var ports []uint16
			for _, s := range table.Sockets {
				ports = append(ports, s.Local.Port())
			}
			if diff := cmp.Diff(tc.ports, ports); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestDumpEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Dump(ctx, Query{}); !errors.Is(err, context.Canceled) {
		t.Errorf("err = %v", err)
	}
}

func TestShortInfoOfOldKernels(t *testing.T) {
	full := make([]byte, 248)
	native.PutUint32(full[infoLastSent:], 7)
	native.PutUint32(full[infoLastReceived:], 8)
	native.PutUint64(full[infoBytesAcked:], 9)
	native.PutUint64(full[infoBytesReceived:], 10)
	all := Traffic{BytesAcked: 9, BytesReceived: 10, LastSent: 7 * time.Millisecond, LastReceived: 8 * time.Millisecond}
	for _, tc := range []struct {
		size  int
		want  Traffic
		bytes bool
	}{
		{248, all, true},
		{136, all, true},
		{104, Traffic{LastSent: all.LastSent, LastReceived: all.LastReceived}, false}, // Linux 3.2
		{48, Traffic{LastSent: all.LastSent}, false},
		{0, Traffic{}, false},
	} {
		var s Socket
		attr := native.AppendUint16(nil, uint16(4+tc.size))
		attr = append(native.AppendUint16(attr, attrInfo), full[:tc.size]...)
		errtest.None(t, parseMessage(socketMessage(0, 1, 80, attr...)[headerSize:], &s))
		if diff := cmp.Diff(tc.want, s.Traffic); diff != "" || s.InfoSize != tc.size || s.HasBytes() != tc.bytes {
			t.Errorf("%d bytes: %+v %s", tc.size, s, diff)
		}
	}
}

func TestParseProcNet(t *testing.T) {
	const head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	for _, bad := range []string{
		"0: 0100007F:1F90",
		"0: 0100007F:1F90 00000000:0000 0A 0:0 00:0 0 0 0 x",
		"0: 0100007F 00000000:0000 0A 0:0 00:0 0 0 0 1",
		"0: 0100007G:1F90 00000000:0000 0A 0:0 00:0 0 0 0 1",
		"0: 00000000000000000000000001000000:1F90 00000000:0000 0A 0:0 00:0 0 0 0 1",
		"0: 0100007F:1F90 00000000:0000 0A 00 00:0 0 0 0 1",
		strings.Repeat("x", maxLine),
	} {
		if got, err := parseProcNet(strings.NewReader(head+bad+"\n"), unix.AF_INET, nil, func(*Socket) bool { return true }); err == nil {
			t.Errorf("%q is %v, want an error", bad, got)
		}
	}
}
