package microvm

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/guest"
	"lull/internal/runtime/microvm/vnet"
)

// fakeFiles returns a machine with a /dev/kvm, the given cpuinfo and a KVM module.
func fakeFiles(t *testing.T, cpuinfo, module string) machineFiles {
	t.Helper()
	dir := t.TempDir()
	m := machineFiles{dev: filepath.Join(dir, "dev"), sys: filepath.Join(dir, "sys"), proc: filepath.Join(dir, "proc")}
	for _, d := range []string{m.dev, m.proc, filepath.Join(m.sys, "module", module)} {
		errtest.None(t, os.MkdirAll(d, 0o755))
	}
	for _, f := range []struct{ name, text string }{{filepath.Join(m.dev, "kvm"), ""}, {filepath.Join(m.proc, "cpuinfo"), cpuinfo + "\n"}} {
		errtest.None(t, os.WriteFile(f.name, []byte(f.text), 0o644))
	}
	return m
}

func TestAccelerator(t *testing.T) {
	for _, c := range []struct {
		name, cpuinfo, module string
		dev                   bool
		want                  Accel
	}{
		{"Intel", "flags : fpu vmx sse", "kvm_intel", true, KVM},
		{"AMD module", "flags : fpu", "kvm_amd", true, KVM},
		{"flag alone", "flags : svm", "", true, KVM},
		{"software KVM", "flags : fpu sse", "kvm_pvm", true, TCG},
		{"a flag of another name", "flags : vmx_like", "kvm", true, TCG},
		{"no device", "flags : vmx", "kvm_intel", false, TCG},
	} {
		m := fakeFiles(t, c.cpuinfo, c.module)
		if !c.dev {
			m.dev = "/nowhere"
		}
		if got, why := m.choose(); got != c.want || why == "" {
			t.Errorf("%s: %s (%s), want %s", c.name, got, why, c.want)
		}
	}
}

func TestFindKernel(t *testing.T) {
	dir := t.TempDir()
	put := func(name string) {
		t.Helper()
		errtest.None(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		errtest.None(t, os.WriteFile(filepath.Join(dir, name), []byte(name), 0o644))
	}
	if _, err := FindKernel(dir); err == nil || !strings.Contains(err.Error(), "guest-kernel") {
		t.Errorf("an empty tree: %v", err)
	}
	put("boot/vmlinuz-6.1.0-9-cloud")
	put("boot/vmlinuz-6.1.0-10-cloud")
	const lib = "lib/modules/6.1.0-10-cloud/"
	for _, m := range modules {
		name, _ := strings.CutSuffix(m, "?")
		if name != "virtio_blk" && name != "overlay" && name != "virtio_mmio" {
			put(lib + "kernel/x/" + name + ".ko")
		}
	}
	if _, err := FindKernel(dir); err == nil || !strings.Contains(err.Error(), "virtio_blk") || !strings.Contains(err.Error(), "overlay") ||
		strings.Contains(err.Error(), "virtio_mmio") {
		t.Errorf("missing modules: %v", err)
	}
	put(lib + "kernel/x/overlay.ko")
	errtest.None(t, os.WriteFile(filepath.Join(dir, lib, "modules.builtin"), []byte("kernel/drivers/block/virtio_blk.ko\n"), 0o644))
	k, err := FindKernel(dir)
	errtest.None(t, err)
	if k.Version != "6.1.0-10-cloud" {
		t.Errorf("version %s is not the newest", k.Version)
	}
	var names []string
	for _, m := range k.Modules {
		names = append(names, strings.TrimSuffix(filepath.Base(m), ".ko"))
	}
	want := []string{"virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "failover", "net_failover",
		"virtio_net", "virtio_console", "virtio-rng", "overlay"}
	if d := cmp.Diff(want, names); d != "" {
		t.Error(d)
	}
}

// TestInitramfs checks that the output follows the format, and that the same
// content gives the same bytes.
func TestInitramfs(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"harness": "h", "a.ko": "module", "data": strings.Repeat("d", 5000)} {
		errtest.None(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	in := func(s string) string { return filepath.Join(dir, s) }
	k := Kernel{Modules: []string{in("a.ko")}}
	files := map[string]string{"/bin/x": in("data"), "/srv/deep/y": in("harness")}
	var a, b bytes.Buffer
	errtest.None(t, writeInitramfs(&a, in("harness"), k, files))
	if err := writeInitramfs(&b, in("harness"), k, files); err != nil || !bytes.Equal(a.Bytes(), b.Bytes()) {
		t.Errorf("not the same twice, %v", err)
	}
	got := unpack(t, a.Bytes())
	want := map[string]string{"init": "h", "lib": "", "lib/lull": "", "lib/lull/a.ko": "module", "lib/lull/order": "a.ko\n",
		"bin": "", "bin/x": strings.Repeat("d", 5000), "srv": "", "srv/deep": "", "srv/deep/y": "h"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for _, bad := range []map[string]string{{"x": in("data")}, {"/a/../b": in("data")}, {"/x": dir}, {"/x": in("none")}} {
		if err := writeInitramfs(io.Discard, in("harness"), k, bad); err == nil {
			t.Errorf("%v was taken", bad)
		}
	}
}

// unpack reads an archive by the rules of its format.
func unpack(t *testing.T, b []byte) map[string]string {
	t.Helper()
	out := map[string]string{}
	for {
		var f [13]int
		for n := range f {
			errtest.Get(readHex(b[6+8*n:14+8*n], &f[n]))(t)
		}
		if string(b[:6]) != "070701" {
			t.Fatalf("magic %q", b[:6])
		}
		size, nameLen := f[6], f[11]
		name := string(b[110 : 110+nameLen-1])
		at := (110 + nameLen + 3) &^ 3
		if name == "TRAILER!!!" {
			return out
		}
		out[name] = string(b[at : at+size])
		b = b[(at+size+3)&^3:]
	}
}

func readHex(b []byte, into *int) (int, error) {
	n := 0
	for _, c := range b {
		d := strings.IndexByte("0123456789abcdef", c)
		if d < 0 {
			return 0, io.ErrUnexpectedEOF
		}
		n = n*16 + d
	}
	*into = n
	return len(b), nil
}

func TestMachine(t *testing.T) {
	m, err := Machine{}.withDefaults()
	if err != nil || m.Memory != defaultMemory || m.CPUs != 1 || m.Kind != "q35" {
		t.Errorf("defaults: %+v, %v", m, err)
	}
	for _, c := range []struct {
		m     Machine
		field string
	}{
		{Machine{Memory: 64 << 20}, "memory: 67108864 bytes are less than 96 MiB"}, {Machine{Memory: 128<<20 + 1}, "memory: 134217729 bytes is not a multiple of 1 MiB"},
		{Machine{Memory: maxMemory + 1<<20}, "memory: 1099512676352 bytes are more than 1048576 MiB"}, {Machine{CPUs: 65}, "cpus"}, {Machine{Kind: "pc"}, "machine"},
	} {
		if _, err := c.m.withDefaults(); err == nil || !strings.Contains(err.Error(), c.field) {
			t.Errorf("%+v: %v", c.m, err)
		}
	}
	for _, id := range []string{"", "a/b", "..", ".hidden", strings.Repeat("x", 33)} {
		if checkID(id) == nil {
			t.Errorf("id %q was taken", id)
		}
	}
}

// TestNewNamesEverything checks that one error lists every missing prerequisite.
func TestNewNamesEverything(t *testing.T) {
	_, err := New(Config{Dir: "relative", QEMU: "no-such-qemu", Kernel: "/nowhere", Harness: "/nowhere/lull-harness", Accel: "magic"})
	if err == nil {
		t.Fatal("it was made of nothing")
	}
	for _, want := range []string{"qemu-system-x86", "guest-kernel", "lull-harness", "magic", "absolute path"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
}

// TestWithoutParts checks that a runtime without any prerequisite for starting
// guests still finds and ends the runs of an earlier daemon, and keeps saved
// guests.
func TestWithoutParts(t *testing.T) {
	r, err := New(Config{Dir: t.TempDir(), QEMU: "no-such-qemu", FindKernel: func() (string, error) { return "", errors.New("no guest-kernel") }, Harness: "/nowhere/lull-harness"})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	_, serr := r.Start(t.Context(), instance.Launch{ID: "a", Run: 1})
	w := r.newWork("a")
	w.saved = true
	for what, err := range map[string]error{"missing": r.Missing(), "a start": serr, "a restore": w.Thaw()} {
		for _, want := range []string{"qemu-system-x86", "guest-kernel", "lull-harness"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q is not in: %v", what, want, err)
			}
		}
		if unusable := (*instance.SnapshotError)(nil); errors.As(err, &unusable) {
			t.Errorf("%s throws away what is saved: %v", what, err)
		}
	}
	var gone *instance.GoneError
	if _, err := r.Adopt(t.Context(), "a", instance.Identity{Run: 1}); !errors.As(err, &gone) {
		t.Errorf("a run that is over: %v", err)
	}
	if err := errors.Join(r.End(t.Context(), "a"), r.Forget(t.Context(), "a")); err != nil {
		t.Error(err)
	}
}

func TestProcess(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	errtest.None(t, cmd.Start())
	start, _, err := startTime(cmd.Process.Pid)
	errtest.None(t, err)
	p := process{cmd.Process.Pid, start}
	if !p.alive() || (process{p.pid, start + 1}).alive() {
		t.Error("a process is known by its number and its start")
	}
	done := make(chan struct{})
	go func() { cmd.Wait(); close(done) }()
	if err := p.kill(t.Context()); err != nil || p.alive() {
		t.Errorf("kill: %v", err)
	}
	<-done
}

// TestListenersInside checks that a listener on the guest's own loopback is
// reported as unreachable for clients.
func TestListenersInside(t *testing.T) {
	got := listeners([]guest.ListenAddr{{Network: "tcp", Addr: "127.0.0.1:80"}, {Network: "tcp", Addr: "[::1]:81"},
		{Network: "tcp", Addr: netip.AddrPortFrom(vnet.Guest, 82).String()}, {Network: "udp", Addr: "0.0.0.0:53"}, {Network: "unix", Addr: "/x"}})
	for n, want := range []instance.Listener{{Network: "tcp", Addr: "127.0.0.1:80", Private: true}, {Network: "tcp", Addr: "[::1]:81", Private: true},
		{Network: "tcp", Addr: "0.0.0.0:82"}, {Network: "udp", Addr: "0.0.0.0:53"}} {
		if len(got) != 4 || got[n].Network != want.Network || got[n].Addr != want.Addr || got[n].Private != want.Private {
			t.Fatalf("%+v, want %+v in place %d", got, want, n)
		}
	}
}
