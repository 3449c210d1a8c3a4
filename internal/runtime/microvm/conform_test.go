package microvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/guest"
	"lull/internal/relay"
)

// TestEndings checks that the end of a run is reported once, with the run's output,
// and that nothing of the run is left.
func TestEndings(t *testing.T) {
	b := newBench(t, nil)
	t.Run("by itself", func(t *testing.T) {
		b := b.in(t)
		b.start("e0", "guest", "exit", "42")
		if e := b.exit(); e.Code != 42 || e.Signal != 0 || e.Lost {
			t.Errorf("exit %+v", e)
		}
		if log := b.log("e0"); log != "leaving with 42\n" {
			t.Errorf("log %q", log)
		}
		b.clean("e0")
	})
	t.Run("no such program", func(t *testing.T) {
		b := b.in(t)
		_, err := b.Start(t.Context(), b.launch("e1", 1, "nothing-like-it"))
		if err == nil || !strings.Contains(err.Error(), "nothing-like-it") {
			t.Errorf("start: %v", err)
		}
		b.clean("e1")
	})
	t.Run("asked while frozen", func(t *testing.T) {
		b := b.in(t)
		w := b.start("e2", "guest", "serve", ":80")
		listening(t, w, "80")
		errtest.None(t, w.Freeze(t.Context()))
		errtest.None(t, w.Signal(syscall.SIGTERM))
		thawed := w.Thaw() // fails if the program ends before its clock is set
		if e := b.exit(); e.Code != 7 {
			t.Errorf("exit %+v, thawed: %v", e, thawed)
		}
		if err := w.Kill(t.Context()); err != nil { // the host does that after every end
			t.Error(err)
		}
		if log := b.log("e2"); !strings.HasSuffix(log, "asked to end\n") {
			t.Errorf("log %q", log)
		}
		b.clean("e2")
	})
	t.Run("QEMU is killed while frozen", func(t *testing.T) {
		b := b.in(t)
		w := b.start("e3", "guest", "serve", ":80")
		errtest.None(t, w.Freeze(t.Context()))
		errtest.None(t, syscall.Kill(w.Identity().PID, syscall.SIGKILL))
		if e := b.exit(); e.Signal != 9 {
			t.Errorf("exit %+v", e)
		}
		if err := w.Freeze(t.Context()); err == nil && !w.isFrozen() {
			t.Error("what is gone was frozen")
		}
		if w.Thaw() == nil {
			t.Error("what is gone was thawed")
		}
		b.clean("e3")
	})
	t.Run("the kernel panics", func(t *testing.T) {
		b := b.in(t)
		w := b.start("e4", "guest", "serve", ":80")
		listening(t, w, "80")
		ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
		defer cancel()
		if _, err := b.Exec(ctx, "e4", instance.Command{Command: []string{"guest", "panic"}}); err == nil {
			t.Error("a command ended well in a guest that panicked")
		}
		if e := b.exit(); e.Code == 0 {
			t.Errorf("exit %+v", e)
		}
		if log := b.log("e4"); !strings.Contains(log, "Kernel panic") {
			t.Errorf("the console is not in the log: %q", log)
		}
		b.clean("e4")
	})
}

// owner does with the relay what a host does at least: it pauses the guest, and
// wakes it when a client comes.
type owner struct {
	w     *Work
	in    *relay.Instance
	up    atomic.Bool
	wakes atomic.Int32
}

func (p *owner) Ready(int) (relay.Backend, bool) {
	return relay.Backend{Generation: 1, Dial: func(ctx context.Context) (net.Conn, error) { return p.w.Dial(ctx, "127.0.0.1:80") }}, p.up.Load()
}

func (p *owner) Wake(context.Context, relay.Arrival) error {
	p.wakes.Add(1)
	err := p.w.Thaw()
	if err == nil {
		p.up.Store(true)
		p.in.Release()
	}
	return err
}

// TestRelay checks that clients of the relay reach a guest, that a connection and
// data on an open one wake it, and that a half-close is passed on.
func TestRelay(t *testing.T) {
	b := newBench(t, nil)
	w := b.start("relay", "guest", "serve", ":80")
	listening(t, w, "80")
	r, err := relay.New(relay.Config{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var run sync.WaitGroup
	run.Go(func() {
		if err := r.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	defer run.Wait()
	defer cancel()
	p := &owner{w: w}
	p.up.Store(true)
	in, err := r.Add("relay", p, relay.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	p.in = in
	errtest.Get(in.Listen(ln, 0))(t)
	in.Release()
	pause := func() instance.Guard {
		t.Helper()
		p.up.Store(false)
		in.Hold()
		errtest.None(t, w.Freeze(t.Context()))
		g, err := w.Guard(nil, false, func(string) {})
		if err != nil {
			t.Fatal(err)
		}
		in.Sleep()
		return g
	}
	connect := func() *net.TCPConn {
		t.Helper()
		c, err := net.Dial("tcp", ln.Addr().String())
		errtest.None(t, err)
		return c.(*net.TCPConn)
	}
	first := connect()
	defer first.Close()
	talk(t, first, "before")
	for n := range 5 {
		g := pause()
		if s := w.Sample(nil); len(s.Inbound) == 0 || s.ConnErr != nil {
			t.Errorf("round %d: the open connection is not in the sample: %+v", n, s)
		}
		if n%2 == 0 {
			c := connect()
			talk(t, c, fmt.Sprint("new ", n))
			g.Close()
			talk(t, first, fmt.Sprint("old too ", n))
			// A half-close: the guest sees the end and still answers.
			errtest.None(t, c.CloseWrite())
			if rest, err := io.ReadAll(c); err != nil || string(rest) != "end after 1\n" {
				t.Errorf("after the half-close: %q, %v", rest, err)
			}
			c.Close()
		} else {
			talk(t, first, fmt.Sprint("old ", n))
			g.Close()
		}
	}
	if got := p.wakes.Load(); got != 5 {
		t.Errorf("%d wakes for 5 pauses", got)
	}
	first.Close()
	until(t, "no connection is open", func() bool { return len(w.Sample(nil).Inbound) == 0 })
	if s := w.Sample(nil); s.LastClosed.IsZero() {
		t.Error("it is unknown when the last connection ended")
	}
}

// TestSample checks that readings grow with the program's activity, and only with
// that.
func TestSample(t *testing.T) {
	b := newBench(t, nil)
	w := b.start("sample", "guest", "serve", ":80")
	listening(t, w, "80")
	a := w.Sample(nil)
	errtest.None(t, errors.Join(a.CPUErr, a.NetErr, a.ConnErr))
	// Sampling often must not count as the program's work. The program may still be
	// starting, and the CPU time of an emulated CPU includes that of other
	// processes.
	var quiet instance.Sample
	until(t, "being asked 20 times costs the program next to nothing", func() bool {
		before := w.Sample(nil)
		for range 20 {
			quiet = w.Sample(nil)
		}
		return quiet.CPUErr == nil && quiet.CPU-before.CPU < 100*time.Millisecond
	})
	if o, err := b.Exec(t.Context(), "sample", instance.Command{Command: []string{"guest", "spin"}}); err != nil || o.ExitCode != 0 {
		t.Fatalf("%+v, %v", o, err)
	}
	if s := w.Sample(nil); s.CPU-quiet.CPU < 100*time.Millisecond {
		t.Errorf("a second of work shows as %s", s.CPU-quiet.CPU)
	}
	// The guest's memory is a file of the host. If the guest changes a page that
	// the kernel has written back, that must not count as disk traffic.
	ram, err := os.Open(filepath.Join(b.dir("sample"), memoryFile))
	if err != nil {
		t.Fatal(err)
	}
	defer ram.Close()
	fill := func() uint64 {
		t.Helper()
		if err := ram.Sync(); err != nil {
			t.Fatal(err)
		}
		if o, err := b.Exec(t.Context(), "sample", instance.Command{Command: []string{"guest", "files", "fill", "/in-memory", "16000000", "x"}}); err != nil || o.ExitCode != 0 {
			t.Fatalf("%+v, %v", o, err)
		}
		s := w.Sample(nil)
		if s.DiskErr != nil {
			t.Fatal(s.DiskErr)
		}
		return s.DiskBytes
	}
	if before, after := fill(), fill(); after-before > 1<<20 {
		t.Errorf("16 MB written to memory show as %d bytes written to disk", after-before)
	}
	c := dial(t, w)
	for range 20 {
		talk(t, c, strings.Repeat("x", 1000))
	}
	s := w.Sample(nil)
	if s.NetBytes-quiet.NetBytes < 40000 || len(s.Inbound) != 1 || s.Outbound != 0 {
		t.Errorf("after 40 kB: %+v", s)
	}
	c.Close()
	if n, err := w.Memory(); err != nil || n < 20<<20 {
		t.Errorf("memory %d, %v", n, err)
	}
	if o, err := b.Exec(t.Context(), "sample", instance.Command{Command: []string{"guest", "say",
		`{"jsonrpc":"2.0","id":1,"method":"keepalive","params":{"ttl_ms":5000,"reason":"build"}}`}}); err != nil || !strings.Contains(o.Stdout, `"ok":true`) {
		t.Errorf("a lease from inside: %+v, %v", o, err)
	}
	b.mu.Lock()
	// The first message means that no program is busy.
	if n := len(b.said); n != 2 || b.said[0].Method != guest.Waiting || b.said[1].Method != guest.Keepalive || b.said[1].Params.Reason != "build" {
		t.Errorf("heard %+v", b.said)
	}
	b.mu.Unlock()
	// The guest's clock stops with the guest and is set at the thaw. The pause must
	// be longer than reading the clock takes, or an unset clock would go unnoticed.
	// So that is measured first.
	clock := func() time.Time {
		t.Helper()
		o, err := b.Exec(t.Context(), "sample", instance.Command{Command: []string{"guest", "time"}})
		if err != nil {
			t.Fatal(err)
		}
		ns, err := strconv.ParseInt(strings.TrimSpace(o.Stdout), 10, 64)
		errtest.None(t, err)
		return time.Unix(0, ns)
	}
	asked := time.Now()
	clock()
	trip := time.Since(asked)
	began := time.Now()
	errtest.None(t, w.Freeze(t.Context()))
	frozen := w.Sample(nil)
	if errors.Join(frozen.CPUErr, frozen.ConnErr) != nil || frozen.CPU < s.CPU {
		t.Errorf("a frozen guest: %+v", frozen)
	}
	freed, err := w.Reclaim(t.Context())
	if err != nil || freed < 10<<20 {
		t.Errorf("reclaimed %d, %v", freed, err)
	}
	t.Logf("reclaimed %d MiB", freed>>20)
	for time.Since(began) < 2*trip {
		time.Sleep(trip / 10)
	}
	before := time.Now()
	errtest.None(t, w.Thaw())
	if at := clock(); at.Before(before) {
		t.Errorf("the guest's clock is behind by %s", before.Sub(at))
	}
}

// TestAdopt checks that a restarted daemon finds its guests, running and frozen,
// and reports how a guest has ended while no daemon ran.
func TestAdopt(t *testing.T) {
	b := newBench(t, nil)
	w := b.start("adopt", "guest", "serve", ":80")
	listening(t, w, "80")
	ident := w.Identity()
	again := func(id instance.Identity) (*Work, error) {
		t.Helper()
		errtest.None(t, b.Close())
		r, err := New(b.cfg)
		errtest.None(t, err)
		b.Runtime = r
		w, err := b.Adopt(t.Context(), "adopt", id)
		if err != nil {
			return nil, err
		}
		return w.(*Work), nil
	}
	w, err := again(instance.Identity{Run: 1}) // as if the daemon had died before it recorded the rest
	if err != nil {
		t.Fatal(err)
	}
	if w.Identity() != ident {
		t.Errorf("identity %+v, was %+v", w.Identity(), ident)
	}
	c := dial(t, w)
	talk(t, c, "adopted")
	errtest.None(t, w.Freeze(t.Context()))
	if w, err = again(ident); err != nil {
		t.Fatal(err)
	}
	if !w.isFrozen() {
		t.Error("it was taken over as running")
	}
	if s := w.Sample(nil); s.CPUErr == nil || s.ConnErr == nil {
		t.Error("a guest that was never asked has readings")
	}
	errtest.None(t, w.Thaw())
	c = dial(t, w)
	talk(t, c, "adopted again")
	if s := w.Sample(nil); errors.Join(s.CPUErr, s.NetErr, s.ConnErr) != nil {
		t.Errorf("after the thaw: %+v", s)
	}
	// The guest ends while no daemon runs.
	errtest.Get(c.Write([]byte("crash\n")))(t)
	_, err = io.ReadAll(c)
	t.Logf("the connection ended with %v", err)
	var gone *instance.GoneError
	until(t, "it is taken over or known to be gone", func() bool { // a QEMU that is ending does not answer, so the host tries again
		_, err = again(ident)
		return err == nil || errors.As(err, &gone)
	})
	switch {
	case errors.As(err, &gone):
		if gone.Exit.Code != 42 && !gone.Exit.Lost {
			t.Errorf("gone: %+v", gone.Exit)
		}
	default: // adopted: its end is reported as usual
		if e := b.exit(); e.Code != 42 {
			t.Errorf("exit %+v", e)
		}
	}
	b.clean("adopt")
	if _, err := again(ident); !errors.As(err, &gone) {
		t.Errorf("what is gone was taken over: %v", err)
	}
}

// TestRoot checks that a guest's files can come from a directory and from an
// existing ext4 image, that its writes stay in the guest, and that the program runs
// as the requested user. It uses the other machine type than the rest of the tests.
func TestRoot(t *testing.T) {
	parts, err := rig()
	need(t, err)
	if _, err := FindTool("mke2fs"); err != nil {
		need(t, &absent{"no mke2fs (Debian package e2fsprogs)"})
	}
	root := t.TempDir()
	for _, d := range []string{"usr/bin", "etc", "srv"} {
		errtest.None(t, os.MkdirAll(filepath.Join(root, d), 0o755))
	}
	program, err := os.ReadFile(parts.program)
	errtest.None(t, err)
	for name, f := range map[string]struct {
		b    []byte
		mode os.FileMode
	}{"usr/bin/guest": {program, 0o755}, "etc/passwd": {[]byte("web:x:33:34::/:/bin/sh\n"), 0o644}, "srv/data": {[]byte("from the image"), 0o644}} {
		errtest.None(t, os.WriteFile(filepath.Join(root, name), f.b, f.mode))
	}
	image := filepath.Join(t.TempDir(), "mine.ext4")
	if tool, err := FindTool("mke2fs"); err != nil {
		t.Fatal(err)
	} else if out, err := exec.Command(tool, "-q", "-t", "ext4", "-d", root, image, "64M").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	made, _, err := digest(image)
	errtest.None(t, err)
	b := newBench(t, func(c *Config) {
		c.Machine = func(string) (Machine, error) { return Machine{Memory: 128 << 20, Kind: "microvm"}, nil }
	})
	for id, from := range map[string]string{"directory": root, "image": image} {
		b.runsFrom(t, id, from)
	}
	if _, err := os.Stat(filepath.Join(root, "tmp/x")); err == nil {
		t.Error("a write in the guest reached the directory")
	}
	if is, _, err := digest(image); err != nil || is != made {
		t.Errorf("a guest changed the image: %v", err)
	}
}

// runsFrom starts a guest with root and checks its files.
func (b *bench) runsFrom(t *testing.T, id, root string) {
	t.Helper()
	// The image is built during Start, but the boot's time limit must not include
	// that.
	l := b.launch(id, 1, "guest", "serve", ":8080")
	l.Image, l.User, l.Env = root, "web", []string{"PATH=/usr/bin"}
	errtest.Get(b.Start(t.Context(), l))(t)
	for _, c := range []struct{ args, want string }{
		{"cat /srv/data", "from the image"},
		{"whoami", "33 34\n"},
		{"cat /etc/resolv.conf", "nameserver 192.168.127.1\n"},
		{"write /tmp/x", "written\n"},
		{"cat /tmp/x", "by a guest"},
	} {
		o, err := b.Exec(t.Context(), id, instance.Command{Command: append([]string{"guest"}, strings.Fields(c.args)...)})
		if err != nil || o.Stdout != c.want {
			t.Errorf("%s of the %s: %+v, %v", c.args, id, o, err)
		}
	}
}

// TestFlood checks that a program that prints as fast as it can is not slowed by
// the host and cannot fill the disk, and that its guest still answers.
func TestFlood(t *testing.T) {
	b := newBench(t, nil)
	w := b.start("flood", "guest", "flood")
	until(t, "the log was rotated", func() bool { _, err := os.Stat(filepath.Join(b.cfg.Dir, "flood.log.1")); return err == nil })
	for range 3 {
		errtest.None(t, w.Freeze(t.Context()))
		errtest.None(t, w.Thaw())
	}
	until(t, "it answers", func() bool { return w.Sample(nil).CPUErr == nil })
	for _, f := range []string{"flood.log", "flood.log.1"} {
		if st, err := os.Stat(filepath.Join(b.cfg.Dir, f)); err != nil || st.Size() > 1<<20+guest.MaxChunk {
			t.Errorf("%s: %v, %v", f, st, err)
		}
	}
}

// TestFallback checks that it is recorded if no guest boots with KVM, and that
// other failures to boot are not attributed to KVM.
func TestFallback(t *testing.T) {
	b := newBench(t, nil)
	real := b.parts().qemu
	if err := os.Chmod(b.cfg.Dir, 0o711); err != nil { // QEMU's own user must be able to enter it
		t.Fatal(err)
	}
	b.parts().qemu = filepath.Join(b.cfg.Dir, "qemu")
	b.files = fakeFiles(t, "flags : fpu vmx", "")
	behave := func(with string) {
		t.Helper()
		script := "#!/bin/bash\nkvm=no\nfor a; do case $a in kvm) kvm=yes;; esac; done\n" + with + "\na=(\"${@/#kvm/tcg}\")\nexec " + real + " \"${a[@]/#host/max}\"\n"
		errtest.None(t, os.WriteFile(b.parts().qemu+".new", []byte(script), 0o755))
		errtest.None(t, os.Rename(b.parts().qemu+".new", b.parts().qemu))
	}
	chosen := func(want Accel, because string) {
		t.Helper()
		if a, why := b.Accelerator(); a != want || !strings.Contains(why, because) {
			t.Fatalf("accelerator %s: %s", a, why)
		}
	}
	refused := func(id string) {
		t.Helper()
		if _, err := b.Start(t.Context(), b.launch(id, 1, "guest", "serve", ":80")); err == nil {
			t.Fatalf("%s: it started", id)
		}
		chosen(KVM, "vmx")
	}
	chosen(KVM, "vmx")
	behave("echo 'no guest boots at all' >&2; exit 1")
	refused("never")
	behave("")
	w := b.start("once", "guest", "serve", ":80")
	chosen(KVM, "vmx")
	errtest.None(t, w.Kill(t.Context()))
	behave("[ $kvm = no ] || { echo 'no guest with KVM, now' >&2; exit 1; }")
	refused("later")
	errtest.None(t, os.Remove(filepath.Join(b.cfg.Dir, worksFile)))
	behave("[ $kvm = no ] || { echo 'KVM is a trap here' >&2; exit 1; }")
	b.start("fall", "guest", "serve", ":80")
	chosen(TCG, "KVM failed")
}
