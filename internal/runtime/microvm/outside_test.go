package microvm

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
)

// Addresses for TestOutside. They are reserved for documentation, so no machine has
// them.
var (
	webAddr  = netip.MustParseAddr("198.51.100.7")
	nameAddr = netip.MustParseAddr("198.51.100.53")
)

const webName = "web.example."

// TestOutside checks that a guest with outbound access reaches another machine, by
// address and by a name that this machine's name server knows, and that a guest
// without access reaches neither. The "other machine" is a private network
// namespace in which this test runs again: its addresses receive packets although
// no network card has them.
func TestOutside(t *testing.T) {
	const inside = "LULL_TEST_INSIDE_A_NETWORK"
	if os.Getenv(inside) != "" {
		outside(t)
		return
	}
	if testing.Short() {
		t.Skip("a guest boots in seconds")
	}
	parts, err := rig()
	need(t, err)
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes a network")
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestOutside$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=1", "LULL_RIG="+filepath.Dir(parts.harness))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, unix.EPERM) {
		t.Skipf("cannot make namespaces: %v", err)
	}
	if err != nil || !strings.Contains(string(out), "PASS") {
		t.Errorf("%v\n%s", err, out)
	}
}

func outside(t *testing.T) {
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"route", "add", "local", "198.51.100.0/24", "dev", "lo"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("cannot make a network: %v: %s", err, out)
		}
	}
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	errtest.None(t, os.WriteFile(conf, []byte("nameserver "+nameAddr.String()+"\n"), 0o644))
	// This affects only the test's own mount namespace.
	err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if err == nil {
		err = unix.Mount(conf, "/etc/resolv.conf", "", unix.MS_BIND, "")
	}
	if err != nil {
		t.Fatalf("cannot name the name server: %v", err)
	}
	answerNames(t)
	port := greeter(t)

	b := newBench(t, nil)
	for _, mode := range []instance.Net{instance.NetOutbound, instance.NetNone} {
		l := b.launch(string(mode), 1, "guest", "serve", ":80")
		l.Net = mode
		w, err := b.Start(t.Context(), l)
		errtest.None(t, err)
		listening(t, w.(*Work), "80")
		want := "got the host"
		if mode == instance.NetNone {
			want = "refused"
		}
		for _, to := range []string{netip.AddrPortFrom(webAddr, port).String(), net.JoinHostPort(strings.TrimSuffix(webName, "."), strconv.Itoa(int(port)))} {
			o, err := b.Exec(t.Context(), string(mode), instance.Command{Command: []string{"guest", "dial", to}})
			if err != nil || !strings.HasPrefix(o.Stdout, want) {
				t.Errorf("%s from a guest with %s: %+v, %v; want %s", to, mode, o, err, want)
			}
		}
		if err := w.Kill(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// answerNames is a name server for the one name, over UDP, which resolvers try
// first.
func answerNames(t *testing.T) {
	t.Helper()
	c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(nameAddr, 53)))
	errtest.None(t, err)
	var serve sync.WaitGroup
	t.Cleanup(serve.Wait)
	t.Cleanup(func() { c.Close() })
	serve.Go(func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			answer, err := nameAnswer(buf[:n])
			if err == nil {
				_, err = c.WriteToUDPAddrPort(answer, from)
			}
			if err != nil {
				t.Error(err)
			}
		}
	})
}

// nameAnswer returns a DNS answer to question: the address of the one name, or no
// records for any other.
func nameAnswer(question []byte) ([]byte, error) {
	var m dnsmessage.Message
	if err := m.Unpack(question); err != nil || len(m.Questions) != 1 {
		return nil, errors.Join(err, errors.New("cannot answer: want one question"))
	}
	q := m.Questions[0]
	m.Response, m.Authoritative, m.Additionals = true, true, nil
	switch {
	case q.Name.String() != webName:
		m.RCode = dnsmessage.RCodeNameError
	case q.Type == dnsmessage.TypeA:
		m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 60}, Body: &dnsmessage.AResource{A: webAddr.As4()}}}
	}
	return m.Pack()
}
