package guestagent

import (
	"bytes"
	"encoding/hex"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/lib/errtest"
	"lull/internal/protocol/guest"
)

func TestActivity(t *testing.T) {
	base := guest.HealthAnswer{CPU: 1000, Net: 1000}
	for _, c := range []struct {
		name   string
		now    guest.HealthAnswer
		window time.Duration
		want   *beatParams
	}{
		{"nothing", base, 5 * time.Second, nil},
		{"cpu of 1 %", guest.HealthAnswer{CPU: 1050, Net: 1000}, 5 * time.Second, nil},
		{"cpu above 1 %", guest.HealthAnswer{CPU: 1051, Net: 1000}, 5 * time.Second, &beatParams{CPU: 51}},
		{"512 bytes", guest.HealthAnswer{CPU: 1000, Net: 1512}, 5 * time.Second, nil},
		{"513 bytes", guest.HealthAnswer{CPU: 1000, Net: 1513}, 5 * time.Second, &beatParams{Net: 513}},
		{"a longer window", guest.HealthAnswer{CPU: 1000, Net: 2000}, 10 * time.Second, nil},
		{"a connection", guest.HealthAnswer{CPU: 1000, Net: 1000, Outbound: 2}, 5 * time.Second, &beatParams{TCP: 2}},
		{"cpu unknown", guest.HealthAnswer{CPU: 9000, CPUErr: "x", Net: 1000}, 5 * time.Second, nil},
		{"net unknown", guest.HealthAnswer{CPU: 1000, Net: 9000, NetErr: "x"}, 5 * time.Second, nil},
		{"sockets unknown", guest.HealthAnswer{CPU: 1000, Net: 1000, Outbound: 1, TCPErr: "x"}, 5 * time.Second, nil},
		{"fell", guest.HealthAnswer{CPU: 1, Net: 1}, 5 * time.Second, nil},
	} {
		if d := cmp.Diff(c.want, activity(base, c.now, c.window)); d != "" {
			t.Errorf("%s: %s", c.name, d)
		}
	}
}

// TestSockets checks the counts of outbound and waiting connections, and the
// listeners.
func TestSockets(t *testing.T) {
	proc := t.TempDir()
	errtest.None(t, os.Mkdir(filepath.Join(proc, "net"), 0o755))
	line := func(local, remote, state, queues, inode string) string {
		return " 0: " + local + " " + remote + " " + state + " " + queues + " 00:00000000 00000000 0 0 " + inode + " 1\n"
	}
	const head = "  sl  local_address rem_address   st\n"
	const guestPort80, gw = "027FA8C0:0050", "017FA8C0:"
	put := func(name, text string) {
		errtest.None(t, os.WriteFile(filepath.Join(proc, "net", name), []byte(head+text), 0o644))
	}
	put("tcp", line("00000000:0050", "00000000:0000", "0A", "0:0", "10")+
		line(guestPort80, gw+"9C40", "01", "00000000:00000000", "11")+ // inbound, no unread data
		line(guestPort80, gw+"9C41", "01", "00000000:00000005", "12")+ // inbound, unread data
		line(guestPort80, gw+"9C42", "01", "00000000:00000000", "0")+ // inbound, not accepted
		line("027FA8C0:9C50", "08080808:01BB", "01", "0:0", "13")+ // outbound
		line("027FA8C0:9C51", "08080808:01BB", "06", "0:0", "0")+ // outbound, TIME_WAIT
		line("0100007F:9C52", "0100007F:0050", "01", "0:0", "14")) // loopback
	put("udp", line("00000000:0035", "00000000:0000", "07", "0:0", "15"))
	h := &Harness{cfg: Config{Proc: proc}}
	var a guest.HealthAnswer
	errtest.None(t, h.tcp(&a))
	want := guest.HealthAnswer{Outbound: 1,
		Conns:   []guest.WaitingConn{{Port: 80, Remote: 40001, Unread: 5, Accepted: true}, {Port: 80, Remote: 40002}},
		Listens: []guest.ListenAddr{{Network: "tcp", Addr: "0.0.0.0:80"}, {Network: "udp", Addr: "0.0.0.0:53"}}}
	if d := cmp.Diff(want, a); d != "" {
		t.Error(d)
	}
	put("tcp6", " 0: broken\n")
	if err := h.tcp(&a); err == nil || !strings.Contains(err.Error(), "tcp6") {
		t.Errorf("a broken table: %v", err)
	}
}

func FuzzParseTable(f *testing.F) {
	f.Add([]byte("head\n 0: 0100007F:0050 00000000:0000 0A 0:0 0:0 0 0 0 10 1\n"))
	f.Add([]byte("head\n 0: 00000000000000000000000001000000:0050 0:0\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		out, err := parseTable(bytes.NewReader(b))
		if err != nil {
			return
		}
		for _, s := range out {
			if !s.local.IsValid() || !s.remote.IsValid() {
				t.Fatalf("%+v", s)
			}
		}
	})
}

func TestParsePlan(t *testing.T) {
	p, err := ParsePlan("console=ttyS0 quiet lull.ip=192.168.127.2/24 lull.gw=192.168.127.1 lull.dns=192.168.127.1 lull.root=/dev/vda lull.upper=/dev/vdb lull.host=a lull.timer=lapic\n")
	want := Plan{Address: netip.MustParsePrefix("192.168.127.2/24"), Gateway: netip.MustParseAddr("192.168.127.1"),
		Resolver: netip.MustParseAddr("192.168.127.1"), Root: "/dev/vda", Upper: "/dev/vdb", Name: "a", Timer: "lapic"}
	if err != nil || p != want {
		t.Errorf("%+v, %v", p, err)
	}
	for _, bad := range []string{"lull.ip=1.2.3.4", "lull.gw=x", "lull.dns=", "lull.root=vda", "lull.upper="} {
		if _, err := ParsePlan(bad); err == nil || !strings.Contains(err.Error(), strings.Split(bad, "=")[0]) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// TestCheckTimer checks which timers of the kernel are accepted.
func TestCheckTimer(t *testing.T) {
	dir := t.TempDir()
	inUse := filepath.Join(dir, "current_device")
	if err := checkTimer("lapic", inUse); err != nil {
		t.Errorf("a kernel that does not name its timer: %v", err)
	}
	errtest.None(t, os.WriteFile(inUse, []byte("pit\n"), 0o600))
	if err := checkTimer("", inUse); err != nil {
		t.Errorf("any timer is wanted: %v", err)
	}
	if err := checkTimer("pit", inUse); err != nil {
		t.Errorf("the timer that is wanted: %v", err)
	}
	if err := checkTimer("lapic", inUse); err == nil || !strings.Contains(err.Error(), guest.TimerRejected) {
		t.Errorf("another timer: %v", err)
	}
	if err := checkTimer("lapic", dir); err == nil {
		t.Error("a timer that cannot be read was accepted")
	}
}

// TestNetlink checks the messages byte for byte against the kernel's format.
func TestNetlink(t *testing.T) {
	rs := requests(2, netip.MustParsePrefix("192.168.127.2/24"), netip.MustParseAddr("192.168.127.1"))
	want := []string{
		"20000000" + "1000" + "0500" + "00000000" + "00000000" + "00000000" + "02000000" + "01000000" + "01000000",
		"28000000" + "1400" + "0505" + "00000000" + "00000000" + "02180000" + "02000000" + "08000200" + "c0a87f02" + "08000100" + "c0a87f02",
		"2c000000" + "1800" + "0505" + "00000000" + "00000000" + "02000000" + "fe030001" + "00000000" + "08000500" + "c0a87f01" + "08000400" + "02000000",
	}
	for n, r := range rs {
		if got := hex.EncodeToString(r.b); got != want[n] {
			t.Errorf("%s:\n%s, want\n%s", r.what, got, want[n])
		}
	}
}

func TestLook(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"bin", "usr/bin", "etc"} {
		errtest.None(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	for name, mode := range map[string]os.FileMode{"usr/bin/prog": 0o755, "usr/bin/data": 0o644} {
		errtest.None(t, os.WriteFile(filepath.Join(dir, name), nil, mode))
	}
	// An absolute link is resolved inside the root.
	errtest.None(t, os.Symlink("/usr/bin/prog", filepath.Join(dir, "bin/link")))
	errtest.None(t, os.Symlink("/bin/sh", filepath.Join(dir, "bin/outside")))
	root, err := os.Open(dir)
	errtest.None(t, err)
	defer root.Close()
	for _, c := range []struct{ name, path, dir, want string }{
		{"prog", "", "", "/usr/bin/prog"},
		{"prog", "/bin:/usr/bin", "", "/usr/bin/prog"},
		{"prog", "/bin", "", ""},
		{"link", "", "", "/bin/link"},
		{"outside", "", "", ""},
		{"data", "", "", ""},
		{"/usr/bin/prog", "", "", "/usr/bin/prog"},
		{"./prog", "", "/usr/bin", "/usr/bin/prog"},
		{"/usr", "", "", ""},
	} {
		var env []string
		if c.path != "" {
			env = []string{"PATH=" + c.path}
		}
		got, err := lookPath(root, c.name, env, c.dir)
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
	errtest.None(t, os.WriteFile(filepath.Join(dir, "etc/passwd"), []byte("root:x:0:0::/:/bin/sh\nweb:x:33:34::/:/bin/sh\n"), 0o644))
	for user, want := range map[string][2]uint32{"web": {33, 34}, "7": {7, 7}, "7:8": {7, 8}} {
		if c, err := lookUser(dir, user); err != nil || c.Uid != want[0] || c.Gid != want[1] {
			t.Errorf("%s: %+v, %v", user, c, err)
		}
	}
	for _, bad := range []string{"nobody", "7:x"} {
		if _, err := lookUser(dir, bad); err == nil {
			t.Errorf("user %s was found", bad)
		}
	}
}

// TestNames checks that resolv.conf names the host's resolver, and that the image's
// hosts file is kept if there is one.
func TestNames(t *testing.T) {
	root := t.TempDir()
	etc := filepath.Join(root, "etc")
	if err := errors.Join(os.Mkdir(etc, 0o755), os.WriteFile(filepath.Join(etc, "resolv.conf"), []byte("nameserver 8.8.8.8\n"), 0o644),
		os.WriteFile(filepath.Join(etc, "hosts"), []byte("10.0.0.1 db\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	errtest.None(t, writeNames(root, Plan{Name: "web", Resolver: netip.MustParseAddr("10.0.2.3")}))
	for name, want := range map[string]string{"resolv.conf": "nameserver 10.0.2.3\n", "hosts": "10.0.0.1 db\n"} {
		if b, err := os.ReadFile(filepath.Join(etc, name)); err != nil || string(b) != want {
			t.Errorf("%s holds %q, %v", name, b, err)
		}
	}
}
