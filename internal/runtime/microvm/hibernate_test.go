package microvm

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/guest"
)

// TestHibernate checks that a saved guest holds no memory and has no process,
// that an open connection continues afterwards, several times, that a restarted
// daemon finds the guest, and that a damaged image is refused and not run.
func TestHibernate(t *testing.T) {
	b := newBench(t, nil)
	w := b.start("hib", "guest", "serve", ":80")
	listening(t, w, "80")
	if _, err := w.Hibernate(t.Context()); err == nil {
		t.Error("a running guest was hibernated")
	}
	c := dial(t, w)
	talk(t, c, "before")
	for n := range 3 {
		errtest.None(t, w.Freeze(t.Context()))
		began := time.Now()
		size, err := w.Hibernate(t.Context())
		errtest.None(t, err)
		t.Logf("round %d: saved %d MiB durably in %s", n, size>>20, time.Since(began).Round(time.Millisecond))
		if held, err := w.Memory(); err != nil || held != 0 {
			t.Errorf("it holds %d bytes, %v", held, err)
		}
		if p, err := findQEMU(b.dir("hib")); err != nil || len(p) != 0 {
			t.Errorf("processes %v, %v", p, err)
		}
		woken := make(chan string, 1)
		g, err := w.Guard(nil, false, func(why string) { woken <- why })
		if err != nil {
			t.Fatal(err)
		}
		errtest.Get(c.Write([]byte("x\n")))(t)
		select {
		case <-woken:
		case <-time.After(waitLimit):
			t.Fatal("data for a hibernated guest did not wake it")
		}
		g.Close()
		before := time.Now()
		errtest.None(t, w.Thaw())
		got := make([]byte, 2)
		if _, err := c.Read(got); err != nil || string(got) != "x\n" {
			t.Fatalf("the old connection: %q, %v", got, err)
		}
		t.Logf("round %d: restored to the first byte in %s", n, time.Since(before).Round(time.Millisecond))
		o, err := b.Exec(t.Context(), "hib", instance.Command{Command: []string{"guest", "time"}})
		ns, perr := strconv.ParseInt(strings.TrimSpace(o.Stdout), 10, 64)
		if err != nil || perr != nil || time.Unix(0, ns).Before(before) {
			t.Errorf("the guest's clock is behind by %s (%v, %v)", before.Sub(time.Unix(0, ns)), err, perr)
		}
	}
	c.Close()

	// A guest that was sent the time late is sent it again.
	wrong := newClockCall()
	wrong.UnixNano -= int64(time.Hour)
	errtest.None(t, w.call(t.Context(), callLimit, guest.SetClock, wrong, nil))
	w.clockLate.Store(true)
	until(t, "its clock is right", func() bool { w.Sample(nil); return !w.clockLate.Load() })
	if off, way, known := w.probe(t.Context()); !known || off.Abs() > time.Minute {
		t.Errorf("the guest's clock is off by %s, seen over a way of %s, %t", off, way, known)
	}

	save := func() {
		t.Helper()
		errtest.None(t, w.Freeze(t.Context()))
		errtest.Get(w.Hibernate(t.Context()))(t)
	}
	save()
	errtest.None(t, b.Close())
	w = b.next("hib")
	if !w.Hibernated() {
		t.Fatal("it was not found hibernated")
	}
	errtest.None(t, w.Thaw())
	c = dial(t, w)
	talk(t, c, "another daemon")
	c.Close()

	save()
	good, err := os.ReadFile(w.path(manifestFile))
	errtest.None(t, err)
	with := func(change func(*manifest)) func() error {
		return func() error {
			var man manifest
			if err := json.Unmarshal(good, &man); err != nil {
				return err
			}
			change(&man)
			b, err := json.Marshal(man)
			if err != nil {
				return err
			}
			return os.WriteFile(w.path(manifestFile), b, 0o600)
		}
	}
	for _, d := range []struct {
		name, why string
		harm      func() error
	}{
		{"another kernel", "another kernel", with(func(m *manifest) { m.Kernel = "0" })},
		{"another QEMU", "another QEMU", with(func(m *manifest) { m.QEMU = "1.0.0" })},
		{"another machine", "another machine", with(func(m *manifest) { m.Machine = "0" })},
		{"another disk", "another root image", with(func(m *manifest) { m.Root = "1 bytes of yesterday" })},
		{"another format", "format 0", with(func(m *manifest) { m.Version = 0 })},
		{"a manifest that is cut", "damaged", func() error { return os.WriteFile(w.path(manifestFile), good[:len(good)/2], 0o600) }},
		{"a truncated state", "damaged", func() error { return os.Truncate(w.path(stateFile), 1000) }},
		{"no state", "cannot be read", func() error { return os.Remove(w.path(stateFile)) }},
		{"a short memory", "memory has", func() error { return os.Truncate(w.path(memoryFile), 1<<20) }},
		{"no manifest", "manifest is missing", func() error { return os.Remove(w.path(manifestFile)) }},
	} {
		errtest.None(t, errors.Join(os.WriteFile(w.path(manifestFile), good, 0o600), d.harm()))
		var bad *instance.SnapshotError
		if err := w.Thaw(); !errors.As(err, &bad) || !strings.Contains(bad.Reason, d.why) {
			t.Errorf("%s: %v", d.name, err)
		}
		if !w.Hibernated() {
			t.Errorf("%s: it is not hibernated any more", d.name)
		}
	}
	errtest.None(t, w.Kill(t.Context()))
	b.clean("hib")
	if _, err := b.Start(t.Context(), b.launch("hib", 2, "guest", "exit", "0")); err != nil {
		t.Fatalf("a cold boot after it: %v", err)
	}
	<-b.exits // the exit of the killed run
	if e := b.exit(); e.Code != 0 {
		t.Errorf("exit %+v", e)
	}
	b.clean("hib")
}

// TestGuestsClocks checks which clock source the guest's kernel uses, on every
// machine type, and that a pause does not make it abandon that clock.
func TestGuestsClocks(t *testing.T) {
	for _, kind := range []string{"microvm", "q35"} {
		t.Run(kind, func(t *testing.T) {
			b := newBench(t, func(c *Config) {
				made := c.Machine
				c.Machine = func(id string) (Machine, error) {
					m, err := made(id)
					m.Kind = kind
					return m, err
				}
			})
			w := b.start("clocks", "guest", "serve", ":80")
			listening(t, w, "80")
			read := func(file string) string {
				o, err := b.Exec(t.Context(), "clocks", instance.Command{Command: []string{"guest", "cat", file}})
				if err != nil {
					t.Fatal(err)
				}
				return o.Stdout
			}
			fine := func() bool {
				source := strings.TrimSpace(read("/sys/devices/system/clocksource/clocksource0/current_clocksource"))
				return (source == "tsc" || source == "kvm-clock") && regexp.MustCompile(`\.hres_active\s*: 1`).MatchString(read("/proc/timer_list"))
			}
			until(t, "it has a steady clock and timers finer than a tick", fine)
			errtest.None(t, w.Freeze(t.Context()))
			errtest.Get(w.Hibernate(t.Context()))(t)
			errtest.None(t, w.Thaw())
			uptime := func() float64 {
				s, _, _ := strings.Cut(read("/proc/uptime"), " ")
				v, err := strconv.ParseFloat(s, 64)
				errtest.None(t, err)
				return v
			}
			// The guest's kernel compares its clocks twice a second.
			began := uptime()
			until(t, "two seconds pass in the guest", func() bool { return uptime() > began+2 })
			if !fine() {
				t.Errorf("after a hibernation: %s\n%s", read("/sys/devices/system/clocksource/clocksource0/current_clocksource"), read("/proc/timer_list"))
			}
		})
	}
}

// TestSavedInFullSpeech checks that a guest can be saved and restored repeatedly
// while its program writes to its log all the time, so that its port always has
// data in flight.
func TestSavedInFullSpeech(t *testing.T) {
	b := newBench(t, nil)
	w := b.start("speech", "guest", "flood", "1000000")
	for n := range scaletest.N(t, 5) {
		errtest.None(t, w.Freeze(t.Context()))
		errtest.Get(w.Hibernate(t.Context()))(t)
		if err := w.Thaw(); err != nil {
			t.Fatalf("save %d: %v", n, err)
		}
	}
}

// TestKilledWhileRestored kills QEMU at random moments of a restore. It checks that
// a guest whose manifest still exists is hibernated, and comes back with its
// counter.
func TestKilledWhileRestored(t *testing.T) {
	b := newBench(t, nil)
	w := b.start("killed", "guest", "serve", ":80")
	listening(t, w, "80")
	c := dial(t, w)
	talk(t, c, "before")
	survived := 0
	window := 300 * time.Millisecond // so wide that about half of the kills hit the restore
	want, rounds := scaletest.N(t, 3), 0
	for n := 0; survived < want && n < 14*want; n++ {
		rounds++
		errtest.None(t, w.Freeze(t.Context()))
		errtest.Get(w.Hibernate(t.Context()))(t)
		after := time.Duration(rand.Int64N(int64(window)))
		hit := make(chan bool, 1)
		go func() {
			var p []process
			for len(p) == 0 && t.Context().Err() == nil {
				p, _ = findQEMU(b.dir("killed"))
			}
			timer := time.NewTimer(after)
			defer timer.Stop()
			<-timer.C
			_ = unix.Kill(p[0].pid, unix.SIGKILL)
			_, err := os.Stat(w.path(manifestFile))
			hit <- err == nil // whether QEMU was killed during the restore
		}()
		err := w.Thaw()
		if <-hit {
			survived++
			window = window * 3 / 2
			if err == nil || !w.Hibernated() {
				t.Fatalf("round %d, killed after %s: %v, hibernated %t", n, after, err, w.Hibernated())
			}
			if err := w.Thaw(); err != nil {
				t.Fatalf("round %d, killed after %s: not restored afterwards: %v", n, after, err)
			}
			talk(t, c, fmt.Sprint("round ", n))
			continue
		}
		window = window * 2 / 3
		select { // the guest already ran, and ended with its QEMU
		case <-b.exits:
		case <-time.After(waitLimit):
			t.Fatalf("round %d, killed after %s: nothing was reported", n, after)
		}
		w = b.start("killed", "guest", "serve", ":80")
		listening(t, w, "80")
		c = dial(t, w)
	}
	t.Logf("%d of %d kills came while it was restored", survived, rounds)
	if survived == 0 {
		t.Error("no kill came while it was restored")
	}

	// A state that QEMU itself rejects is reported: the guest has to boot.
	errtest.None(t, w.Freeze(t.Context()))
	errtest.Get(w.Hibernate(t.Context()))(t)
	man, err := readManifest(b.dir("killed"))
	errtest.None(t, err)
	errtest.None(t, os.WriteFile(w.path(stateFile), []byte("no state of a machine"), 0o600))
	if man.Digest, man.State, err = digest(w.path(stateFile)); err == nil {
		err = man.write(b.dir("killed"))
	}
	if err != nil {
		t.Fatal(err)
	}
	var unusable *instance.SnapshotError
	if err := w.Thaw(); !errors.As(err, &unusable) || !strings.Contains(unusable.Reason, "QEMU") || !w.Hibernated() {
		t.Errorf("a state that QEMU gives up on: %v", err)
	}
}
