package machines

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/protocol/hostctl"
)

// clone pauses b and clones it. The end of an earlier connection may wake b
// again, so clone retries.
func (b *box) clone(name string) *box {
	b.T.Helper()
	listen := daemontest.Addr(b.T)
	var o hostctl.Instance
	daemontest.Wait(b.T, b.name+" is cloned", func() (bool, string) {
		_, perr := b.Do(b.T.Context(), b.name, "pause", url.Values{"force": {"true"}})
		var err error
		o, err = b.Clone(b.T.Context(), b.name, hostctl.Clone{Name: name, Expose: []instance.Endpoint{{Listen: listen, Target: "127.0.0.1:80"}}})
		if err != nil && strings.Contains(err.Error(), "are connected") {
			// Deliver the end of a connection that arrived right before the
			// pause; a sleeping guest cannot receive it.
			_, _ = b.Do(b.T.Context(), b.name, "resume", nil)
		}
		return err == nil, fmt.Sprint(err, perr)
	})
	if o.State != "hibernated" || o.PID != 0 {
		b.T.Errorf("the clone %s is %s with process %d", name, o.State, o.PID)
	}
	return &box{Host: b.Host, name: name, addrs: []string{listen}}
}

// inside returns the content of a file in the guest.
func (b *box) inside(file string) string {
	b.T.Helper()
	x, err := b.Exec(b.T.Context(), b.name, hostctl.ExecRequest{Command: []string{"guest", "cat", file}})
	if err != nil || x.ExitCode != 0 {
		b.T.Fatalf("%s in %s: %+v, %v", file, b.name, x, err)
	}
	return strings.TrimSpace(x.Stdout)
}

// TestClones checks that two clones of a guest continue from its snapshot,
// independently and under their own names, while the guest itself continues too.
// One clone is hibernated and restored, also after a kill of the daemon. Finally
// the memory that they shared must be released.
func TestClones(t *testing.T) {
	d := host(t)
	a := run(d, "a", small(t), []int{80}, nil, "guest", "serve", ":80")
	a.send("count")
	open := a.dial(0)
	a.ask(open, "hello")
	a.pause()
	if _, err := d.Clone(t.Context(), "a", hostctl.Clone{Name: "no"}); err == nil || !strings.Contains(err.Error(), "are connected") {
		t.Errorf("a guest with a client was cloned: %v", err)
	}
	open.Close()
	b := a.clone("b")
	c := a.clone("c")
	for _, x := range []struct {
		who  *box
		want string
	}{{b, "2"}, {b, "3"}, {c, "2"}, {a, "2"}, {c, "3"}} {
		if got := x.who.send("count"); got != "counted "+x.want {
			t.Errorf("%s %s, want %s", x.who.name, got, x.want)
		}
	}
	seen := map[string]string{}
	for _, x := range []*box{a, b, c} {
		name := x.inside("/proc/sys/kernel/hostname")
		if name != x.get().ID {
			t.Errorf("%s calls itself %s, it is %s", x.name, name, x.get().ID)
		}
		for _, own := range []string{name, x.inside("/proc/sys/kernel/random/uuid")} {
			if seen[own] != "" {
				t.Errorf("%s and %s have both %s", seen[own], x.name, own)
			}
			seen[own] = x.name
		}
	}
	if id := b.inside("/etc/machine-id"); len(id) != 32 || id == c.inside("/etc/machine-id") {
		t.Errorf("the machine id of b is %q, as c's", id)
	}
	t.Logf("held: %d MiB by the guest, %d and %d by its clones", a.get().MemoryBytes>>20, b.get().MemoryBytes>>20, c.get().MemoryBytes>>20)

	e := b.clone("e") // a clone of a clone
	d.Kill()
	d.Boot()
	if got := b.send("count"); got != "counted 4" {
		t.Errorf("b %s after it was on disk", got)
	}
	if got := e.send("count"); got != "counted 4" {
		t.Errorf("e %s", got)
	}
	for _, x := range []*box{a, b, c, e} {
		if err := d.Remove(t.Context(), x.name); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(filepath.Join(d.Dir, "data", "vm", "templates")); err != nil || len(left) > 0 {
		t.Errorf("templates are left: %v, %v", left, err)
	}
}
