package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/freeport"
	"lull/internal/protocol/hostctl"
)

// rig is a daemon started by this program, and the files of its guests.
type rig struct {
	*hostctl.Client
	s   settings
	dir string
	cmd *exec.Cmd
}

// newRig builds the programs under measurement and starts a daemon. Its directory
// has a short name, because the length of socket paths is limited.
func newRig(ctx context.Context, s settings) (r *rig, err error) {
	r = &rig{s: s}
	if r.dir, err = os.MkdirTemp("", "lvb"); err != nil {
		return nil, err
	}
	image := filepath.Join(r.dir, "image", "bin")
	if err := os.MkdirAll(image, 0o755); err != nil {
		return r, err
	}
	for _, b := range [][]string{{r.dir + "/", "lull/cmd/lull", "lull/cmd/lull-shim", "lull/cmd/lull-harness"}, {image + "/vm", "lull/bench/vm"}} {
		cmd := exec.CommandContext(ctx, "go", append([]string{"build", "-trimpath", "-ldflags", "-s -w", "-o"}, b...)...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return r, fmt.Errorf("cannot build %v: %w\n%s", b[1:], err, out)
		}
	}
	log, err := os.Create(filepath.Join(r.dir, "log"))
	if err != nil {
		return r, err
	}
	defer log.Close()
	r.cmd = exec.Command(filepath.Join(r.dir, "lull"), "host", "--data", filepath.Join(r.dir, "data"), "--socket", filepath.Join(r.dir, "host.sock"),
		"--vm-machine", s.machine, "--stop-after", "0", "--pause-after", "0",
		"--max-concurrent-boots", strconv.Itoa(s.wakes), "--memory", s.budget, "--start-timeout", "10m")
	r.cmd.Stdout, r.cmd.Stderr = log, log
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := r.cmd.Start(); err != nil {
		r.cmd = nil
		return r, err
	}
	if r.Client, err = hostctl.NewClient("unix://" + filepath.Join(r.dir, "host.sock")); err != nil {
		return r, err
	}
	return r, r.until(ctx, func() bool { _, err := r.Status(ctx); return err == nil })
}

// until polls ok a few times per millisecond until it returns true. Times are
// measured elsewhere.
func (r *rig) until(ctx context.Context, ok func() bool) error {
	for end := time.Now().Add(waitLimit); !ok(); {
		if time.Now().After(end) {
			said, _ := os.ReadFile(filepath.Join(r.dir, "log"))
			return fmt.Errorf("timed out after %s waiting for the daemon\n%s", waitLimit, said)
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (r *rig) end() error {
	var err error
	if r.cmd != nil {
		ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
		defer cancel()
		all, lerr := r.List(ctx)
		s, serr := r.Status(ctx)
		err = errors.Join(lerr, serr)
		for _, o := range all {
			err = errors.Join(err, r.Remove(ctx, o.ID))
		}
		err = errors.Join(err, r.cmd.Process.Signal(syscall.SIGTERM), r.cmd.Wait())
		shim := 0
		if _, serr := fmt.Sscanf(s.Shim, "pid %d", &shim); serr == nil && shim > 1 {
			err = errors.Join(err, syscall.Kill(shim, syscall.SIGTERM))
		}
	}
	return errors.Join(err, os.RemoveAll(r.dir))
}

func freeAddr() (string, error) {
	port, err := freeport.Take()
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), err
}

// guest starts a guest and returns the address of its port.
func (r *rig) guest(ctx context.Context, name string, change func(*instance.Spec)) (addr string, err error) {
	if addr, err = freeAddr(); err != nil {
		return "", err
	}
	s := instance.Spec{Name: name, Runtime: "microvm", Image: filepath.Join(r.dir, "image"), Memory: r.s.mib << 20, Command: []string{"vm", "-serve", ":80"},
		Expose: []instance.Endpoint{{Listen: addr, Target: "127.0.0.1:80"}}}
	if change != nil {
		change(&s)
	}
	_, err = r.Create(ctx, hostctl.Create{Spec: s, Start: true})
	return addr, err
}

// pause pauses a guest manually.
func (r *rig) pause(ctx context.Context, name string) error {
	_, err := r.Do(ctx, name, "pause", url.Values{"force": {"true"}})
	return err
}

// sink puts a guest to sleep at a step of the ladder. If the late end of a
// connection wakes the guest, sink repeats the pause.
func (r *rig) sink(ctx context.Context, name, rung string) (o hostctl.Instance, err error) {
	uerr := r.until(ctx, func() bool {
		if o, err = r.Get(ctx, name); err == nil && o.State == "running" {
			_ = r.pause(ctx, name) // the loop checks the result
			return false
		}
		return err != nil || o.State == rung
	})
	return o, errors.Join(err, uerr)
}

func measure(ctx context.Context, s settings) (err error) {
	r, err := newRig(ctx, s)
	if r != nil {
		defer func() { err = errors.Join(err, r.end()) }()
	}
	if err != nil {
		return err
	}
	began := time.Now()
	if _, err := r.guest(ctx, "boot", nil); err != nil { // the first start also builds the image
		return err
	}
	first := time.Since(began)
	began = time.Now()
	addr, err := r.guest(ctx, "base", nil)
	if err != nil {
		return err
	}
	if _, err := firstByte(addr); err != nil {
		return err
	}
	fmt.Printf("machine %s, %d MiB\ncold boot to first byte: %s (the first one, with its image: %s)\n", s.machine, s.mib,
		time.Since(began).Round(time.Millisecond), first.Round(time.Millisecond))
	if err := r.wakes(ctx); err != nil {
		return err
	}
	if err := r.speed(ctx, addr); err != nil {
		return err
	}
	return r.storm(ctx)
}

// wakes measures wakes from each step of the ladder, alternating with connections
// to a running guest.
func (r *rig) wakes(ctx context.Context) error {
	for _, rung := range []struct {
		name string
		spec func(*instance.Spec)
	}{
		{"paused", nil},
		{"reclaimed", func(s *instance.Spec) { s.ReclaimAfter = 1 }},
		{"hibernated", func(s *instance.Spec) { s.HibernateAfter = 1 }},
	} {
		addr, err := r.guest(ctx, rung.name, rung.spec)
		if err != nil {
			return err
		}
		var base, woken, saved []time.Duration
		var held int64
		for range r.s.rounds {
			if _, err := firstByte(addr); err != nil { // warm up
				return err
			}
			b, err := firstByte(addr)
			if err != nil {
				return err
			}
			base = append(base, b)
			o, err := r.sink(ctx, rung.name, rung.name)
			if err != nil {
				return err
			}
			held = o.MemoryBytes
			if d, ok := saving(o); ok {
				saved = append(saved, d)
			}
			w, err := firstByte(addr)
			if err != nil {
				return err
			}
			woken = append(woken, w)
		}
		row("running", base, nil)
		row("woken from "+rung.name, woken, base)
		if len(saved) > 0 {
			row("saved, durably", saved, nil)
		}
		holds("held while "+rung.name, held)
		if err := r.Remove(ctx, rung.name); err != nil {
			return err
		}
	}
	return nil
}

// saving returns how long it took to save a guest to disk. ok is false if that is
// not known.
func saving(o hostctl.Instance) (time.Duration, bool) {
	_, took, _ := strings.Cut(o.StatusReason, " bytes in ")
	d, err := time.ParseDuration(took)
	return d, err == nil
}

// speed measures the throughput of the relay into a guest, and to the same
// program as a process.
func (r *rig) speed(ctx context.Context, guest string) error {
	target, err := freeAddr()
	if err != nil {
		return err
	}
	process, err := r.guest(ctx, "process", func(s *instance.Spec) {
		s.Runtime, s.Image, s.Memory, s.Command = "process", "", 0, []string{filepath.Join(r.dir, "image", "bin", "vm"), "-serve", target}
		s.Expose[0].Target = target
	})
	if err != nil {
		return err
	}
	var in, beside float64
	for range 3 {
		a, err := throughput(guest, 64<<20)
		if err != nil {
			return err
		}
		b, err := throughput(process, 64<<20)
		if err != nil {
			return err
		}
		in, beside = max(in, a), max(beside, b)
	}
	fmt.Printf("%-28s %.0f MB/s, %.2f of a process behind the relay (%.0f MB/s)\n", "relay into a guest", in, in/beside, beside)
	return errors.Join(r.Remove(ctx, "process"), r.Remove(ctx, "base"), r.Remove(ctx, "boot"))
}
