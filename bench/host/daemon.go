package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// binaries are the programs under measurement.
type binaries struct {
	dir  string
	temp bool
}

var programs binaries

func (b *binaries) build(dir string) (err error) {
	if b.dir = dir; dir != "" {
		return nil
	}
	if b.dir, err = os.MkdirTemp("", "lull-bench"); err != nil {
		return err
	}
	b.temp = true
	out, err := exec.Command("go", "build", "-o", b.dir, "lull/cmd/lull", "lull/cmd/lull-shim").CombinedOutput()
	if err != nil {
		return errors.Join(fmt.Errorf("cannot build lull: %w\n%s", err, out), os.RemoveAll(b.dir))
	}
	return nil
}

func (b *binaries) remove() {
	if b.temp {
		_ = os.RemoveAll(b.dir)
	}
}

// daemon is a lull host started by this program.
type daemon struct {
	*hostctl.Client
	dir  string
	cmd  *exec.Cmd
	shim int
}

// startDaemon starts a host with a fresh directory. It has the default probe
// interval of 5 s, unless flags change that.
func startDaemon(ctx context.Context, flags ...string) (*daemon, error) {
	return startDaemonFrom(ctx, programs.dir, flags...)
}

// startDaemonFrom starts a host with the programs in the directory bin.
func startDaemonFrom(ctx context.Context, bin string, flags ...string) (*daemon, error) {
	dir, err := os.MkdirTemp("", "lull-bench-host")
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "host.sock")
	logs, err := os.Create(filepath.Join(dir, "daemon.log"))
	if err != nil {
		return nil, err
	}
	defer logs.Close()
	d := &daemon{dir: dir, cmd: exec.Command(filepath.Join(bin, "lull"),
		append([]string{"host", "--data", filepath.Join(dir, "data"), "--socket", socket, "--stop-after", "0"}, flags...)...)}
	d.cmd.Stdout, d.cmd.Stderr = logs, logs
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := d.cmd.Start(); err != nil {
		return nil, fmt.Errorf("cannot start the daemon: %w", err)
	}
	if d.Client, err = hostctl.NewClient("unix://" + socket); err != nil {
		return nil, err
	}
	var s hostctl.Status
	err = wait(ctx, 20*time.Second, func() error { s, err = d.Status(ctx); return err })
	if err != nil {
		said, _ := os.ReadFile(logs.Name())
		return nil, errors.Join(fmt.Errorf("cannot start the daemon: %w\n%s", err, said), d.end())
	}
	if _, err := fmt.Sscanf(s.Shim, "pid %d", &d.shim); err != nil {
		return nil, errors.Join(fmt.Errorf("cannot find the shim in %q", s.Shim), d.end())
	}
	for _, f := range s.Faults {
		fmt.Printf("note: %s\n", f)
	}
	return d, nil
}

// end removes every instance, and ends the daemon and its shim and removes the
// directory.
func (d *daemon) end() error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	all, err := d.List(ctx)
	if err == nil {
		err = each(64, len(all), func(n int) error { return d.Remove(ctx, all[n].ID) })
	}
	err = errors.Join(err, d.cmd.Process.Signal(syscall.SIGTERM))
	_ = d.cmd.Wait()
	if d.shim > 1 {
		err = errors.Join(err, syscall.Kill(d.shim, syscall.SIGTERM))
	}
	return errors.Join(err, os.RemoveAll(d.dir))
}

// run starts command as an instance that is exposed at addr on the direct path.
func (d *daemon) run(ctx context.Context, name, addr string, pauseAfter time.Duration, command ...string) error {
	after := idle.Duration(pauseAfter)
	_, err := d.Create(ctx, hostctl.Create{Start: true, Spec: instance.Spec{Name: name, Command: command, PauseAfter: &after,
		Expose: []instance.Endpoint{{Listen: addr, Target: addr, Path: instance.PathDirect}}}})
	return err
}

// wait retries try until it succeeds.
func wait(ctx context.Context, limit time.Duration, try func() error) error {
	end := time.Now().Add(limit)
	for {
		err := try()
		if err == nil || time.Now().After(end) {
			return err
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// freeAddr returns an unused address.
func freeAddr() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}
