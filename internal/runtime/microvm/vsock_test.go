package microvm

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/guest"
	"lull/internal/runtime/microvm/vnet"
)

// withVsock returns files of a machine that seem to support vsock for guests.
func withVsock(t *testing.T) machineFiles {
	t.Helper()
	m := fakeFiles(t, "", "x")
	errtest.None(t, os.WriteFile(m.vhost(), nil, 0o600))
	return m
}

// TestChannels checks which guests get vsock, given the support of the machine
// and of the guests' kernel and the configuration.
func TestChannels(t *testing.T) {
	fine := func() error { return nil }
	if err := withVsock(t).noVsock(fine); err != nil {
		t.Errorf("a machine with everything: %v", err)
	}
	if err := fakeFiles(t, "", "x").noVsock(fine); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "vhost-vsock") {
		t.Errorf("a machine without the device: %v", err)
	}
	if err := withVsock(t).noVsock(func() error { return unix.EAFNOSUPPORT }); !errors.Is(err, unix.EAFNOSUPPORT) {
		t.Errorf("a machine without sockets: %v", err)
	}

	has, lacks := Kernel{Version: "1", VSOCK: true}, Kernel{Version: "1"}
	here, none := withVsock(t), machineFiles{dev: "/nowhere"}
	for _, c := range []struct {
		name    string
		channel Channel
		kernel  Kernel
		files   machineFiles
		net     vnet.Mode
		device  bool
		fault   string
	}{
		{"all there", ChannelAuto, has, here, vnet.Outbound, true, ""},
		{"a kernel that is a file", ChannelAuto, Kernel{VSOCK: true}, here, vnet.Full, true, ""},
		{"a guest that may reach nothing", ChannelAuto, has, here, vnet.None, false, ""},
		{"the same by order", ChannelVsock, has, here, vnet.None, true, ""},
		{"not wanted", ChannelSerial, has, here, vnet.Outbound, false, ""},
		{"no device", ChannelAuto, has, none, vnet.Outbound, false, ""},
		{"no device, by order", ChannelVsock, has, none, vnet.Outbound, false, "vhost-vsock"},
		{"no modules", ChannelAuto, lacks, here, vnet.Outbound, false, ""},
		{"no modules, by order", ChannelVsock, lacks, here, vnet.Outbound, false, "vmw_vsock_virtio_transport"},
	} {
		r := &Runtime{cfg: Config{Channel: c.channel}, files: c.files, listens: fine}
		r.found.Store(&parts{kernel: c.kernel})
		cid, err := r.giveCID(Machine{Net: c.net})
		if (cid != 0) != c.device || (err != nil) != (c.fault != "") || err != nil && !strings.Contains(err.Error(), c.fault) {
			t.Errorf("%s: context id %d, %v", c.name, cid, err)
		}
		if err := c.channel.check(r.noVsock); (err != nil) != (c.fault != "") {
			t.Errorf("%s: taken with %v", c.name, err)
		}
	}
	if err := Channel("pigeon").check(fine); err == nil || !strings.Contains(err.Error(), `"pigeon"`) {
		t.Errorf("an unknown channel: %v", err)
	}
	seen := map[uint32]bool{}
	for range 1000 {
		id := newCID()
		if id < 1<<16 || id > 1<<32-2 || seen[id] {
			t.Fatalf("context id %d", id)
		}
		seen[id] = true
	}
}

// TestWithoutVsock checks that after an error of QEMU's vsock device one start is
// retried and guests get no such device, and that other errors change nothing.
func TestWithoutVsock(t *testing.T) {
	for _, c := range []struct {
		channel Channel
		err     error
		want    bool
	}{
		{ChannelAuto, fmt.Errorf("%w; QEMU says: -device vhost-vsock-pci: no such device", errNoBoot), true},
		{ChannelAuto, fmt.Errorf("%w: EPERM", errVsock), true},
		{ChannelAuto, fmt.Errorf("%w; QEMU says: out of memory", errNoBoot), false},
		{ChannelAuto, errors.New("cannot start: vhost-vsock"), false},
		{ChannelVsock, fmt.Errorf("%w: EPERM", errVsock), false},
	} {
		r := &Runtime{cfg: Config{Channel: c.channel}, files: withVsock(t), listens: func() error { return nil }, log: slog.New(slog.DiscardHandler)}
		r.found.Store(&parts{kernel: Kernel{VSOCK: true}})
		if got := r.doWithoutVsock(c.err); got != c.want || r.doWithoutVsock(c.err) {
			t.Errorf("%s, %v: %t", c.channel, c.err, got)
		}
		cid, err := r.giveCID(Machine{})
		if err != nil || (cid == 0) != c.want {
			t.Errorf("%s, %v: then the next has %d, %v", c.channel, c.err, cid, err)
		}
	}
}

// TestVsockArguments checks that each machine type gets its own kind of device,
// from the last inherited descriptor.
func TestVsockArguments(t *testing.T) {
	r := &Runtime{files: liveFiles}
	for _, c := range []struct {
		rec  runRecord
		want string
	}{
		{runRecord{Machine: Machine{Kind: "q35"}, CID: 70000}, "vhost-vsock-pci,guest-cid=70000,vhostfd=9"},
		{runRecord{Machine: Machine{Kind: "microvm"}, CID: 1<<32 - 2}, "vhost-vsock-device,guest-cid=4294967294,vhostfd=9"},
		{runRecord{Machine: Machine{Kind: "microvm"}, CID: 70000, Root: "/image"}, "vhost-vsock-device,guest-cid=70000,vhostfd=10"},
		{runRecord{Machine: Machine{Kind: "q35"}, CID: 70000, FilesPort: true}, "vhost-vsock-pci,guest-cid=70000,vhostfd=10"},
		{runRecord{Machine: Machine{Kind: "q35"}, CID: 70000, FilesPort: true, Root: "/image", Initrd: "/initrd"}, "vhost-vsock-pci,guest-cid=70000,vhostfd=11"},
		{runRecord{Machine: Machine{Kind: "q35"}, CID: 70000, FilesPort: true, Root: "/image", Layer: true}, "vhost-vsock-pci,guest-cid=70000,vhostfd=12"},
		{runRecord{Machine: Machine{Kind: "q35"}, FilesPort: true, Root: "/image"}, ""},
	} {
		args := r.arguments("id", c.rec)
		n := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, "vhost-vsock") })
		got := ""
		if n > 0 && args[n-1] == "-device" {
			got = args[n]
		}
		if got != c.want {
			t.Errorf("%+v: %q, want %q", c.rec, got, c.want)
		}
		if !slices.ContainsFunc(args, func(a string) bool { return strings.HasSuffix(a, "name=lull.0") }) {
			t.Errorf("%+v: it has no serial port", c.rec)
		}
		if c.rec.FilesPort {
			file := "socket,id=fil,fd=" + strconv.Itoa(9+map[bool]int{true: 1}[c.rec.Root != ""]+map[bool]int{true: 1}[c.rec.Layer])
			if !slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, file+",") }) {
				t.Errorf("%+v: its workspace is not at %s", c.rec, file)
			}
		}
	}
}

// TestContextID checks that a context ID that is taken is replaced, also in the
// record, before QEMU gets it.
func TestContextID(t *testing.T) {
	dir := t.TempDir()
	w := &Work{r: &Runtime{cfg: Config{Dir: dir}, files: withVsock(t)}, id: "x", rec: runRecord{Run: 3, CID: 70000}}
	errtest.None(t, os.MkdirAll(w.r.dir("x"), 0o700))
	taken := map[uint32]bool{70000: true}
	w.r.setCID = func(_ int, cid uint32) error {
		if taken[cid] {
			return unix.EADDRINUSE
		}
		return nil
	}
	rec := w.rec.restored()
	f, err := w.openVsock(&rec)
	errtest.None(t, err)
	f.Close()
	kept, err := readRecord(w.r.dir("x"))
	if err != nil || rec.CID == 70000 || rec.CID == 0 || kept.CID != rec.CID || w.rec.CID != rec.CID || kept.Run != 3 {
		t.Errorf("it has %d, its record %+v, %v", rec.CID, kept, err)
	}
	w.r.setCID = func(int, uint32) error { return unix.EADDRINUSE }
	if f, err := w.openVsock(&rec); f != nil || !errors.Is(err, errVsock) {
		t.Errorf("every context id is taken: %v", err)
	}
	w.r.files.dev = "/nowhere"
	if f, err := w.openVsock(&rec); f != nil || !errors.Is(err, errVsock) || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("there is no device: %v", err)
	}
	if f, err := w.openVsock(&runRecord{}); f != nil || err != nil {
		t.Errorf("a guest without: %v, %v", f, err)
	}
}

// TestVsockSnapshot checks that a guest saved with a vsock device is refused where
// it cannot have one, with that reason, and that a guest saved without one is
// restored.
func TestVsockSnapshot(t *testing.T) {
	with, without := manifest{QEMU: "7", Vsock: true}, manifest{QEMU: "7"}
	for _, c := range []struct {
		name    string
		man     manifest
		channel Channel
		files   machineFiles
		why     string
	}{
		{"as before", with, ChannelAuto, withVsock(t), ""},
		{"the device went", with, ChannelAuto, machineFiles{dev: "/nowhere"}, "vhost-vsock"},
		{"the setting changed", with, ChannelSerial, withVsock(t), "virtio-serial only"},
		{"the device came", without, ChannelAuto, withVsock(t), ""},
		{"never had one", without, ChannelSerial, machineFiles{dev: "/nowhere"}, ""},
	} {
		w := &Work{r: &Runtime{cfg: Config{Channel: c.channel}, files: c.files, listens: func() error { return nil }}}
		w.r.found.Store(&parts{kernel: Kernel{VSOCK: true}})
		err := w.checkVsock(&c.man)
		var bad *instance.SnapshotError
		switch {
		case c.why == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.why != "" && (!errors.As(err, &bad) || !strings.Contains(bad.Reason, "vsock device") || !strings.Contains(bad.Reason, c.why)):
			t.Errorf("%s: %v", c.name, err)
		}
	}
	var bad *instance.SnapshotError
	if err := with.fits(without); !errors.As(err, &bad) || !strings.Contains(bad.Reason, "vsock") {
		t.Errorf("a machine without it fits one with it: %v", err)
	}
	if err := with.fits(with); err != nil {
		t.Errorf("the same does not fit: %v", err)
	}
}

// TestVsockKernel checks that a kernel supports vsock only with all modules, each a
// file or built in, and that only a guest with a vsock device gets the files.
func TestVsockKernel(t *testing.T) {
	dir := t.TempDir()
	lib := filepath.Join(dir, "lib", "modules", "1")
	names := append([]string{"virtio_ring", "virtio", "virtio_pci", "failover", "net_failover", "virtio_net", "virtio_console", "virtio_blk", "overlay"},
		"vsock", "vmw_vsock_virtio_transport")
	for _, f := range append([]string{"boot/vmlinuz-1", "harness"}, names...) {
		at := filepath.Join(dir, f)
		if !strings.Contains(f, "/") && f != "harness" {
			at = filepath.Join(lib, f+".ko")
		}
		errtest.None(t, errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, []byte(f), 0o644)))
	}
	if k, err := FindKernel(dir); err != nil || k.VSOCK {
		t.Errorf("a kernel without the module in the middle: %t, %v", k.VSOCK, err)
	}
	errtest.None(t, os.WriteFile(filepath.Join(lib, "modules.builtin"), []byte("net/vmw_vsock_virtio_transport_common.ko\n"), 0o644))
	k, err := FindKernel(dir)
	if err != nil || !k.VSOCK || len(k.Vsock) != 2 {
		t.Fatalf("a kernel that has it built in: %+v, %v", k, err)
	}
	r := &Runtime{cfg: Config{Dir: filepath.Join(dir, "data"), Harness: filepath.Join(dir, "harness")}}
	r.found.Store(&parts{kernel: k})
	for _, on := range []bool{true, false} {
		name, err := r.initramfs(Machine{}, false, on)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(name)
		errtest.None(t, err)
		files := unpack(t, b)
		if got := files["lib/lull/vsock.ko"] == "vsock" && files["lib/lull/vmw_vsock_virtio_transport.ko"] == "vmw_vsock_virtio_transport"; got != on {
			t.Errorf("a guest with a vsock device (%t) has its modules: %t", on, got)
		}
	}
}

// TestSilentVsock checks that an idempotent request is repeated over the serial
// port if vsock does not answer in time or is cut. A peer that answers late is used
// again, and its pending requests are answered. A peer that never answers is
// closed.
func TestSilentVsock(t *testing.T) {
	w := (&Runtime{cfg: Config{LookLimit: waitLimit, CallLimit: waitLimit}, log: slog.New(slog.DiscardHandler)}).newWork("x")
	defer w.loops.Wait()
	defer w.cancel()
	harness := func(say func(guest.Request) (any, error)) *os.File {
		t.Helper()
		near, far := ends(t)
		go func() { _ = guest.NewPeer(far).Run(nil, say) }()
		return near
	}
	cpu := func(n int64) func(guest.Request) (any, error) {
		return func(guest.Request) (any, error) { return guest.HealthAnswer{CPU: n}, nil }
	}
	port := harness(cpu(1))
	w.peer = guest.NewPeer(port)
	w.loops.Go(func() { _ = w.converse(port, w.peer, true) })
	over := func(c *os.File) (v *vsockPeer, ended chan error) {
		ended = make(chan error, 1)
		w.loops.Go(func() { ended <- w.speakVsock(c) })
		until(t, "it is called over vsock", func() bool { _, v = w.voice(); return v != nil })
		return v, ended
	}
	look := func(name string, want int64) {
		t.Helper()
		var a guest.HealthAnswer
		if err := w.ask(t.Context(), waitLimit, guest.Health, nil, &a); err != nil || a.CPU != want {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
	given := func(name string, ended chan error) {
		t.Helper()
		select {
		case <-ended:
		case <-time.After(waitLimit):
			t.Fatalf("%s: it is not given up", name)
		}
		look(name, 1)
	}

	v, ended := over(harness(cpu(2)))
	look("it answers", 2)
	v.c.Close()
	given("it is cut", ended)

	v, ended = over(harness(func(guest.Request) (any, error) { return nil, errors.New("cannot") }))
	var refused *guest.Error
	if err := w.ask(t.Context(), waitLimit, guest.Health, nil, nil); !errors.As(err, &refused) {
		t.Errorf("a refusal is %v", err)
	}
	if _, now := w.voice(); now != v {
		t.Error("who refuses is not asked again")
	}
	v.c.Close()
	given("it refuses", ended)

	goOn := make(chan struct{})
	v, ended = over(harness(func(q guest.Request) (any, error) { <-goOn; return guest.HealthAnswer{CPU: 3}, nil }))
	early := make(chan error, 1)
	go func() { early <- callOn(t.Context(), v.Peer, waitLimit, guest.Exec, nil, nil) }()
	w.r.cfg.LookLimit = 50 * time.Millisecond
	look("it is slow", 1)
	w.r.cfg.LookLimit = waitLimit
	if _, now := w.voice(); now != nil {
		t.Error("what is slow is called")
	}
	close(goOn)
	until(t, "it is called again", func() bool { _, now := w.voice(); return now == v })
	if err := <-early; err != nil {
		t.Errorf("what it was asked before: %v", err)
	}
	look("it was slow", 3)
	v.c.Close()
	given("it was slow", ended)

	w.r.cfg.LookLimit, w.r.cfg.CallLimit = 50*time.Millisecond, 50*time.Millisecond
	never := make(chan struct{})
	_, ended = over(harness(func(guest.Request) (any, error) { <-never; return nil, nil }))
	look("it is silent", 1)
	w.r.cfg.LookLimit = waitLimit
	given("it is silent", ended)
	close(never)
}

// ends returns both ends of a connection.
func ends(t *testing.T) (near, far *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	errtest.None(t, err)
	near, far = os.NewFile(uintptr(fds[0]), "near"), os.NewFile(uintptr(fds[1]), "far")
	t.Cleanup(func() { near.Close(); far.Close() })
	return near, far
}
