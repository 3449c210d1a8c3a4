package realtest

import (
	"bytes"
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
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/idle"
	"lull/internal/instance"
	"lull/internal/link/hostctl"
)

const nobody = 65534

// limit is what anything may take on a machine under load.
const limit = 40 * time.Second

// daemon is a lull host that runs as a child process, with its data.
type daemon struct {
	t    *testing.T
	dir  string
	args []string
	uid  int
	cmd  *exec.Cmd
	gone chan struct{}
	*hostctl.Client
}

// startHost starts a host. At the end of the test it is stopped and nothing of
// it may be left.
func startHost(t *testing.T, args ...string) *daemon { return startHostAs(t, 0, args...) }

func startHostAs(t *testing.T, uid int, args ...string) *daemon {
	t.Helper()
	return startHostAt(t, "", uid, args...)
}

func startHostAt(t *testing.T, under string, uid int, args ...string) *daemon {
	t.Helper()
	dir, err := os.MkdirTemp(under, "lh")
	if err != nil {
		t.Fatal(err)
	}
	if uid != 0 {
		if err := os.Chown(dir, uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	d := &daemon{t: t, dir: dir, uid: uid, args: append([]string{"host", "--data", dir + "/data", "--socket", dir + "/host.sock"}, args...)}
	if d.Client, err = hostctl.NewClient(dir + "/host.sock"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.clean)
	d.start()
	return d
}

// start runs the daemon and waits until it answers.
func (d *daemon) start() {
	d.t.Helper()
	log, err := os.OpenFile(d.dir+"/daemon.log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		d.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(bin, "lull"), d.args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=/", "GORACE=halt_on_error=1 exitcode=66"}
	if d.uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(d.uid), Gid: uint32(d.uid)}}
	}
	if err := cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	d.cmd, d.gone = cmd, make(chan struct{})
	go func(gone chan struct{}) { cmd.Wait(); close(gone) }(d.gone)
	if !waits(limit, func() bool { _, err := d.Status(d.t.Context()); return err == nil || d.over() }) || d.over() {
		d.t.Fatalf("the daemon does not come up:\n%s", d.log())
	}
}

func (d *daemon) over() bool {
	select {
	case <-d.gone:
		return true
	default:
		return false
	}
}

func (d *daemon) kill() {
	d.cmd.Process.Kill()
	<-d.gone
}

// log is the end of what the daemon and its shim said.
func (d *daemon) log() string {
	var out []byte
	for _, f := range []string{"/daemon.log", "/data/shim/shim.log"} {
		b, _ := os.ReadFile(d.dir + f)
		b = quietly(b)
		out = append(out, b[max(0, len(b)-6000):]...)
	}
	return string(out)
}

// shimPID is the process of the shim; 0 when there is none.
func (d *daemon) shimPID() int {
	want := "--dir\x00" + d.dir + "/data/shim\x00"
	for _, pid := range processes() {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && strings.Contains(string(b), want) && !zombie(pid) {
			return pid
		}
	}
	return 0
}

func zombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	after := b[bytes.LastIndexByte(b, ')')+1:]
	return len(after) > 1 && (after[1] == 'Z' || after[1] == 'X')
}

func processes() (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// marked are the living processes of each instance of this daemon, by the mark
// in their environment. LULL_SOCKET tells whose mark it is.
func (d *daemon) marked() map[string][]int {
	out := map[string][]int{}
	for _, pid := range processes() {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil || !bytes.Contains(b, []byte("LULL_SOCKET="+d.dir+"/")) || zombie(pid) {
			continue
		}
		for _, e := range strings.Split(string(b), "\x00") {
			if id, ok := strings.CutPrefix(e, "LULL_INSTANCE_ID="); ok {
				out[id] = append(out[id], pid)
			}
		}
	}
	return out
}

// clean ends everything, and fails the test when something will not end.
func (d *daemon) clean() {
	if d.t.Failed() {
		d.t.Logf("the daemon said:\n%s", d.log())
	}
	if strings.Contains(d.wholeLog(), "DATA RACE") {
		d.t.Errorf("the race detector spoke:\n%s", d.log())
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if !d.over() {
		l, err := d.List(ctx)
		if err != nil {
			d.t.Errorf("cannot list at the end: %v", err)
		}
		var wg sync.WaitGroup
		for _, i := range l {
			wg.Go(func() {
				if err := d.Remove(ctx, i.ID); err != nil {
					d.t.Errorf("cannot remove %s at the end: %v", i.Name, err)
				}
			})
		}
		wg.Wait()
		d.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-d.gone:
		case <-time.After(limit):
			d.t.Errorf("the daemon does not end:\n%s", d.log())
			d.kill()
		}
	}
	if pid := d.shimPID(); pid > 0 {
		syscall.Kill(pid, syscall.SIGTERM)
		if !waits(10*time.Second, func() bool { return d.shimPID() == 0 }) {
			d.t.Errorf("the shim %d does not end", pid)
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	for id, pids := range d.marked() {
		d.t.Errorf("processes %v of instance %s are left", pids, id)
		for _, pid := range pids {
			syscall.Kill(pid, syscall.SIGKILL)
			syscall.Kill(pid, syscall.SIGCONT)
		}
	}
	os.RemoveAll(d.dir)
}

func (d *daemon) wholeLog() string {
	b, _ := os.ReadFile(d.dir + "/daemon.log")
	return string(b)
}

// seconds is a duration as the API takes it.
func seconds(d time.Duration) *idle.Duration { v := idle.Duration(d); return &v }

// spec is an instance of the guest program.
func spec(name string, args ...string) instance.Spec {
	return instance.Spec{Name: name, Command: append([]string{filepath.Join(bin, "guest")}, args...), StopAfter: seconds(0)}
}

// web is a guest that serves port: directly, or behind the relay.
func web(t *testing.T, name string, relay bool, args ...string) (instance.Spec, string) {
	t.Helper()
	at := func() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(freePort(t))) }
	listen := at()
	target := listen
	if relay {
		target = at()
	}
	s := spec(name, append([]string{"serve", "-listen", target}, args...)...)
	s.Expose = []instance.Endpoint{{Listen: listen, Target: target}}
	return s, listen
}

// run creates and starts an instance.
func (d *daemon) run(s instance.Spec) hostctl.Instance {
	d.t.Helper()
	o, err := d.Create(d.t.Context(), hostctl.Create{Spec: s, Start: true})
	if err != nil {
		d.t.Fatalf("cannot run %s: %v", s.Name, err)
	}
	return o
}

func (d *daemon) get(name string) hostctl.Instance {
	d.t.Helper()
	o, err := d.Get(d.t.Context(), name)
	if err != nil {
		d.t.Fatalf("cannot get %s: %v", name, err)
	}
	return o
}

// await waits for a state and returns the instance.
func (d *daemon) await(name, state string) hostctl.Instance {
	d.t.Helper()
	var o hostctl.Instance
	if !waits(limit, func() bool { o = d.get(name); return o.State == state }) {
		d.t.Fatalf("%s is not %s within %s but %s (%s); %+v", name, state, limit, o.State, o.StatusReason, o.Blocks)
	}
	return o
}

// do carries out a verb that must succeed.
func (d *daemon) do(name, verb string) {
	d.t.Helper()
	if _, err := d.Do(d.t.Context(), name, verb, nil); err != nil {
		d.t.Fatalf("cannot %s %s: %v", verb, name, err)
	}
}

func (d *daemon) force(name string) {
	d.t.Helper()
	if _, err := d.Do(d.t.Context(), name, "pause", url.Values{"force": {"true"}}); err != nil {
		d.t.Fatalf("cannot pause %s by force: %v", name, err)
	}
}

// refused says why a verb was refused, "" when it was not.
func refused(err error) string {
	var p *hostctl.Problem
	if errors.As(err, &p) && p.Status == 409 {
		return p.Error()
	}
	return ""
}

// quietly leaves out what happens all the time.
func quietly(log []byte) (out []byte) {
	for line := range bytes.Lines(log) {
		if !bytes.Contains(line, []byte("level=INFO")) {
			out = append(out, line...)
		}
	}
	return out
}
