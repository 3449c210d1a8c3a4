package microvm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/guest"
	"lull/internal/protocol/guest/vsock"
	"lull/internal/runtime/microvm/vnet"
)

// TestVsockSockets runs the tests of package vsock in a guest, whose kernel
// supports vsock within one machine.
func TestVsockSockets(t *testing.T) {
	parts, err := rig()
	need(t, err)
	files := map[string]string{"/bin/vsock.test": compile(t, "lull/internal/protocol/guest/vsock")}
	list := inGuest(files, modulesOf(t, parts.kernel, "vsock", "vmw_vsock_virtio_transport_common", "vsock_loopback"))
	b := newBench(t, func(c *Config) {
		c.Machine = func(string) (Machine, error) { return Machine{Memory: 192 << 20, Files: files}, nil }
	})
	l := b.launch("sockets", 1, "/bin/vsock.test", "-test.v", "-test.timeout", "5m")
	l.Env = []string{"PATH=/bin", "TMPDIR=/tmp", "LULL_VSOCK_LOOPBACK=" + list}
	errtest.Get(b.Start(t.Context(), l))(t)
	e := b.exit()
	log := b.log("sockets")
	if e.Code != 0 || !passed(log, "TestConnect") || !passed(log, "TestChannel") {
		t.Errorf("it ended with %+v:\n%s", e, log)
	}
	b.clean("sockets")
}

// TestPortgateInGuest runs the tests of package portgate in a guest, whose kernel has
// the expression queue of nftables and not the target NFQUEUE of iptables. The package's
// own run uses whichever of them this machine has.
func TestPortgateInGuest(t *testing.T) {
	parts, err := rig()
	need(t, err)
	files := map[string]string{"/bin/portgate.test": compile(t, "lull/internal/platform/portgate")}
	list := inGuest(files, modulesOf(t, parts.kernel, "libcrc32c", "nfnetlink", "nf_tables", "nfnetlink_queue", "nft_queue",
		"nft_fib", "nft_fib_ipv4", "nft_fib_ipv6", "nft_fib_inet"))
	b := newBench(t, func(c *Config) {
		c.Machine = func(string) (Machine, error) { return Machine{Memory: 192 << 20, Files: files}, nil }
	})
	l := b.launch("gate", 1, "/bin/portgate.test", "-test.v", "-test.timeout", "5m")
	l.Env = []string{"PATH=/bin", "TMPDIR=/tmp", "LULL_PORTGATE_MODULES=" + list}
	errtest.Get(b.Start(t.Context(), l))(t)
	e := b.exit()
	log := b.log("gate")
	if e.Code != 0 || !passed(log, "TestGate ") || !passed(log, "TestGateOfUDP") || !passed(log, "TestGateOfTheDead") {
		t.Errorf("it ended with %+v:\n%s", e, log)
	}
	b.clean("gate")
}

// TestVsockRefused checks that guests start without vsock if QEMU cannot create the
// vsock device, unless they require vsock.
func TestVsockRefused(t *testing.T) {
	for _, kind := range []string{"q35", "microvm"} {
		b := newBench(t, func(c *Config) {
			machine := c.Machine
			c.Machine = func(id string) (Machine, error) {
				m, err := machine(id)
				m.Kind = kind
				return m, err
			}
		})
		b.files.dev = withVsock(t).dev // a file, not a device
		b.listens, b.setCID = func() error { return nil }, func(int, uint32) error { return nil }
		b.cfg.Channel = ChannelVsock
		if _, err := b.Start(t.Context(), b.launch("bold", 1, "guest", "serve", ":80")); err == nil || !strings.Contains(err.Error(), "vhost-vsock") {
			t.Errorf("%s: started with %v", kind, err)
		}
		b.clean("bold")
		b.cfg.Channel = ChannelAuto
		w := b.start("meek", "guest", "serve", ":80")
		if _, v := w.voice(); v != nil || w.rec.CID != 0 || b.without.Load() == nil {
			t.Errorf("%s: it has a vsock device: %+v", kind, w.rec)
		}
		if err := w.Sample(nil).CPUErr; err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		errtest.None(t, w.Kill(t.Context()))
		b.clean("meek")
	}
}

// compile builds the test program of a package.
func compile(t *testing.T, pkg string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "program.test")
	cmd := exec.Command("go", "test", "-c", "-trimpath", "-ldflags", "-s -w", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cannot compile the tests of %s: %v: %s", pkg, err, b)
	}
	return out
}

// modulesOf returns the files of a kernel's modules.
func modulesOf(t *testing.T, tree string, names ...string) (files []string) {
	t.Helper()
	k, err := FindKernel(tree)
	errtest.None(t, err)
	all, err := moduleFiles(filepath.Join(tree, "lib", "modules", k.Version))
	errtest.None(t, err)
	for _, name := range names {
		if all[name] == "" {
			t.Fatalf("the kernel %s has no module %s", k.Version, name)
		}
		files = append(files, all[name])
	}
	return files
}

// inGuest adds modules to the files of a guest and returns their list.
func inGuest(files map[string]string, modules []string) string {
	var list []string
	for _, m := range modules {
		at := "/modules/" + filepath.Base(m)
		files[at] = m
		list = append(list, at)
	}
	return strings.Join(list, ":")
}

// TestVsockInside boots a guest that has its own guests and runs TestVsock in
// it, because this machine's kernel may lack vsock. Nested emulation is slow: a
// guest takes minutes to boot there.
func TestVsockInside(t *testing.T) {
	if os.Getenv("LULL_VSOCK_INSIDE") == "" {
		t.Skip("guests inside a guest take ten minutes and more: LULL_VSOCK_INSIDE=1")
	}
	parts, err := rig()
	need(t, err)
	root := t.TempDir()
	for _, p := range []string{"qemu-system-x86_64", "cp"} {
		at, err := exec.LookPath(p)
		errtest.None(t, err)
		program(t, root, at)
	}
	for _, pattern := range []string{"/usr/lib/*/qemu/accel-tcg-x86_64.so", "/usr/share/qemu/*.bin", "/usr/share/qemu/qboot.rom", "/usr/share/seabios/bios*.bin"} {
		names, err := filepath.Glob(pattern)
		errtest.None(t, err)
		for _, n := range names {
			put(t, root, n, n)
		}
	}
	put(t, root, parts.kernel, "/rig/kernel")
	put(t, root, parts.harness, "/rig/lull-harness")
	put(t, root, parts.program, "/rig/guest")
	put(t, root, compile(t, "."), "/rig/microvm.test")
	files := map[string]string{}
	list := inGuest(files, modulesOf(t, parts.kernel, "vhost_iotlb", "vhost", "vsock", "vmw_vsock_virtio_transport_common", "vhost_vsock"))
	for to, from := range files {
		put(t, root, from, to)
	}
	b := newBench(t, func(c *Config) {
		c.Machine = func(string) (Machine, error) { return Machine{Memory: 1536 << 20, CPUs: 2, Root: root}, nil }
	})
	l := b.launch("outer", 1, "/rig/microvm.test", "-test.v", "-test.run", "^TestVsock$", "-test.timeout", "40m")
	l.Env = []string{"PATH=/usr/bin:/bin", "TMPDIR=/tmp", "LULL_RIG=/rig", "LULL_GUEST_KERNEL=/rig/kernel", "LULL_VSOCK_MODULES=" + list}
	errtest.Get(b.Start(t.Context(), l))(t)
	select {
	case e := <-b.exits:
		if t.Log(b.log("outer")); e.Code != 0 || !passed(b.log("outer"), "TestVsock") {
			t.Errorf("it ended with %+v", e)
		}
	case <-time.After(45 * time.Minute):
		t.Fatalf("it does not end:\n%s", b.log("outer"))
	}
	b.clean("outer")
}

// put copies a file or a tree to the files of a guest.
func put(t testing.TB, root, from, to string) {
	t.Helper()
	to = filepath.Join(root, to)
	errtest.None(t, os.MkdirAll(filepath.Dir(to), 0o755))
	if out, err := exec.Command("cp", "-rL", from, to).CombinedOutput(); err != nil {
		t.Fatalf("cannot copy %s: %v: %s", from, err, out)
	}
}

// program copies a program and the libraries that it needs.
func program(t *testing.T, root, path string) {
	t.Helper()
	put(t, root, path, path)
	out, err := exec.Command("ldd", path).Output()
	if err != nil {
		t.Fatalf("cannot tell the libraries of %s: %v", path, err)
	}
	for w := range strings.FieldsSeq(string(out)) {
		if filepath.IsAbs(w) {
			put(t, root, w, w)
		}
	}
}

// TestVsock checks calls to a guest over vsock, with a real kernel on both sides:
// also after a pause, after a restore with another context ID, in a clone, and
// under another daemon. It checks that a connection that falls silent is replaced
// by the serial port, that no guest is mistaken for another, and that a snapshot is
// refused if the device is missing.
func TestVsock(t *testing.T) {
	list := os.Getenv("LULL_VSOCK_MODULES")
	if list == "" {
		t.Skip("TestVsockInside runs it in a guest, with the kernel's modules in LULL_VSOCK_MODULES")
	}
	for _, name := range filepath.SplitList(list) {
		f, err := os.Open(name)
		errtest.None(t, err)
		if err := errors.Join(unix.FinitModule(int(f.Fd()), "", 0), f.Close()); err != nil && !errors.Is(err, unix.EEXIST) {
			t.Fatalf("%s: %v", name, err)
		}
	}
	defer func(d time.Duration) { waitLimit = d }(waitLimit)
	waitLimit = 10 * time.Minute
	for _, kind := range []string{"microvm", "q35"} {
		t.Run(kind, func(t *testing.T) { vsockLife(t, kind) })
	}
}

func vsockLife(t *testing.T, kind string) {
	b := newBench(t, func(c *Config) {
		c.BootLimit, c.CallLimit, c.LookLimit = waitLimit, waitLimit, waitLimit
		c.Log = slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{Level: slog.LevelDebug}))
		machine := c.Machine
		c.Machine = func(id string) (Machine, error) {
			m, err := machine(id)
			m.Kind, m.Net = kind, vnet.Outbound
			return m, err
		}
	})
	began := time.Now()
	step := func(what string) { t.Logf("%6.1f s: %s", time.Since(began).Seconds(), what) }
	w := b.start("first", "guest", "serve", ":80")
	step("booted")
	over := func(w *Work, not *vsockPeer) (v *vsockPeer) {
		t.Helper()
		until(t, "it is called over vsock", func() bool { _, v = w.voice(); return v != nil && v != not })
		return v
	}
	exec := func(id string) {
		t.Helper()
		if o, err := b.Exec(t.Context(), id, instance.Command{Command: []string{"guest", "exit", "3"}}); err != nil || o.ExitCode != 3 {
			t.Fatalf("exec: %+v, %v", o, err)
		}
	}
	v := over(w, nil)
	step("called over vsock")
	exec("first")
	until(t, "its output came", func() bool { return strings.Contains(b.log("first"), "serving :80") })
	step("a command ran")
	compare(t, w)

	freeze := func(w *Work) {
		t.Helper()
		errtest.None(t, w.Freeze(t.Context()))
	}
	freeze(w)
	errtest.None(t, w.Thaw())
	if now := over(w, nil); now != v {
		t.Error("a pause cut the connection")
	}
	exec("first")
	step("paused and woken, on the same connection")

	errtest.None(t, unix.Shutdown(fd(t, v), unix.SHUT_RDWR))
	if err := w.Sample(nil).CPUErr; err != nil {
		t.Errorf("without vsock it is unknown: %v", err)
	}
	v = over(w, v)
	exec("first")
	step("cut, and connected again")

	hibernate := func(w *Work) {
		t.Helper()
		freeze(w)
		errtest.Get(w.Hibernate(t.Context()))(t)
	}
	hibernate(w)
	refusals(t, w)
	// Another guest now has the saved guest's context ID.
	was := w.rec.CID
	thief, _, err := liveFiles.openVsock(was, setCID)
	errtest.None(t, err)
	errtest.None(t, w.Thaw())
	step("restored")
	over(w, v)
	exec("first")
	if w.rec.CID == was {
		t.Error("two have one context id")
	}
	thief.Close()
	step("called over vsock with another context id")

	hibernate(w)
	l := b.launch("second", 1, "guest", "serve", ":80")
	errtest.Get(b.Clone(t.Context(), "first", l))(t)
	other, err := b.Adopt(t.Context(), "second", instance.Identity{Run: 1})
	if err != nil {
		t.Fatal(err)
	}
	second := other.(*Work)
	for _, w := range []*Work{w, second} {
		errtest.None(t, w.Thaw())
		over(w, nil)
	}
	exec("second")
	step("cloned")
	strangers(t, b, w, second)
	step("neither is taken for the other")
	errtest.None(t, second.Kill(t.Context()))

	errtest.None(t, b.Close())
	if b.Runtime, err = New(b.cfg); err != nil {
		t.Fatal(err)
	}
	again, err := b.Adopt(t.Context(), "first", instance.Identity{Run: 1})
	if err != nil {
		t.Fatal(err)
	}
	w = again.(*Work)
	over(w, nil)
	exec("first")
	step("called over vsock by another daemon")
	errtest.None(t, w.Kill(t.Context()))
	b.clean("first")
}

// fd returns the socket of a connection.
func fd(t *testing.T, v *vsockPeer) (n int) {
	t.Helper()
	raw, err := v.c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { n = int(fd) })
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// compare logs how long the guest agent takes to answer over each channel.
func compare(t *testing.T, w *Work) {
	t.Helper()
	w.mu.Lock()
	ways := map[string]*guest.Peer{"serial": w.peer, "vsock": w.fast.Peer}
	w.mu.Unlock()
	took := map[string][]time.Duration{}
	for range 30 {
		for name, p := range ways {
			began := time.Now()
			if err := callOn(t.Context(), p, waitLimit, guest.Hello, nil, nil); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			took[name] = append(took[name], time.Since(began))
		}
	}
	for name, all := range took {
		slices.Sort(all)
		t.Logf("hello over %s: %s p50, %s at least", name, all[len(all)/2], all[0])
	}
}

// refusals checks that a hibernated guest stays hibernated, with the reason, if it
// cannot get its vsock device.
func refusals(t *testing.T, w *Work) {
	t.Helper()
	refused := func(why string) {
		t.Helper()
		var bad *instance.SnapshotError
		if err := w.Thaw(); !errors.As(err, &bad) || !strings.Contains(bad.Reason, "vsock device") || !strings.Contains(bad.Reason, why) {
			t.Errorf("woken with %v, want %s", err, why)
		}
		if !w.Hibernated() {
			t.Error("it is not hibernated any more")
		}
	}
	w.r.files.dev = "/nowhere"
	refused("no such file")
	w.r.files.dev = "/dev"
	w.r.cfg.Channel = ChannelSerial
	refused("virtio-serial alone")
	w.r.cfg.Channel = ChannelAuto
}

// strangers checks that a connection with the right key is accepted only from the
// guest that is expected.
func strangers(t *testing.T, b *bench, one, two *Work) {
	t.Helper()
	for _, c := range []struct{ wanted, comes *Work }{{one, two}, {two, one}, {one, one}} {
		ln, err := vsock.Listen(vsock.Host)
		errtest.None(t, err)
		var k vsock.Key
		rand.Read(k[:])
		ctx, cancel := context.WithCancel(t.Context())
		met := make(chan error, 1)
		go func() {
			conn, err := ln.Accept(ctx, c.wanted.rec.CID, k)
			if err == nil {
				conn.Close()
			}
			met <- err
		}()
		o, err := b.Exec(t.Context(), c.comes.id, instance.Command{Command: []string{"guest", "vsock", strconv.FormatUint(uint64(ln.Port), 10), hex.EncodeToString(k[:])}})
		if err != nil || (o.ExitCode == 0) != (c.wanted == c.comes) {
			t.Errorf("%s instead of %s: %+v, %v", c.comes.id, c.wanted.id, o, err)
		}
		cancel()
		if err := <-met; (err == nil) != (c.wanted == c.comes) {
			t.Errorf("%s instead of %s was accepted: %v", c.comes.id, c.wanted.id, err)
		}
		ln.Close()
	}
}

// passed reports whether the output of go test -v says that a test, or one whose
// name begins with its name, passed.
func passed(log, test string) bool {
	return regexp.MustCompile(`--- PASS: ` + test).MatchString(log)
}
