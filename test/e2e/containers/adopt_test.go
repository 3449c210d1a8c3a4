package containers

import (
	"strings"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/protocol/hostctl"
)

// unlabelled runs a server without labels that ask for lull's control, and
// returns its address.
func (k dock) unlabelled(name string, more ...string) string {
	k.d.T.Helper()
	at := daemontest.Addr(k.d.T)
	k.Must(append(append([]string{"run", "-d", "--name", name, "-p", at + ":8080"}, more...), "box:1", "guest", "serve", "-listen", "0.0.0.0:8080")...)
	k.answers(at)
	return at
}

// TestAdoptContainer adopts and releases containers without labels.
func TestAdoptContainer(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	adopt := func(q hostctl.Adopt) hostctl.Instance {
		t.Helper()
		q.PauseAfter = daemontest.Seconds(time.Hour)
		o, err := k.d.Adopt(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	refused := func(container string) {
		t.Helper()
		if o, err := k.d.Adopt(t.Context(), hostctl.Adopt{Container: container}); err == nil {
			t.Errorf("%s is adopted as %s", container, o.Name)
		}
	}
	at := k.unlabelled("web")
	adopt(hostctl.Adopt{Container: "web"})
	k.known("web")
	refused("web")
	refused(k.Say("inspect", "-f", "{{.Id}}", "web"))
	refused("no-such-container")
	k.serve("labelled")
	refused("labelled")
	if err := k.d.ReleaseAdopted(t.Context(), "labelled"); err == nil {
		t.Error("what its label puts under control is released")
	}
	k.pause("web")
	k.answers(at)
	k.d.Await("web", "running")

	// It stays adopted when it ends and is created again.
	id := k.d.Show("web").ID
	k.Must("stop", "-t", "0", "web")
	k.d.Await("web", "stopped")
	k.Must("rm", "web")
	at = k.unlabelled("web")
	if o := k.known("web"); o.ID != id || o.PauseAfter != 3600 {
		t.Errorf("created again, it is %s, paused after %v s", o.ID, o.PauseAfter)
	}

	// A container of a Compose project stays adopted too, even if its name
	// changes while lull is not running.
	compose := []string{"--label", "com.docker.compose.project=shop", "--label", "com.docker.compose.service=db", "--label", "com.docker.compose.container-number=1", "--label", "com.docker.compose.oneoff=False"}
	k.unlabelled("shop-db-1", compose...)
	id = adopt(hostctl.Adopt{Container: "shop-db-1", Name: "db"}).ID
	for range 2 {
		k.Must("rename", "shop-db-1", "old")
		k.Must("rm", "-f", "old")
		k.d.Await("db", "stopped")
		k.unlabelled("new", compose...)
		k.Must("rename", "new", "shop-db-1")
		if o := k.known("db"); o.ID != id {
			t.Errorf("created again, it is %s and not %s", o.ID, id)
		}
		if err := k.d.Force("db"); err != nil {
			t.Fatal(err)
		}
		k.is("shop-db-1", "paused")
	}
	k.d.Kill()
	k.Must("rm", "-f", "shop-db-1")
	k.unlabelled("shop-db-1", compose...)
	k.d.Boot()
	k.known("db")

	// After the release it runs and is not adopted again.
	k.pause("web")
	if err := k.d.ReleaseAdopted(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	k.is("web", "running")
	k.answers(at)
	l, err := k.d.Adopted(t.Context())
	if err != nil || len(l) != 2 {
		t.Errorf("adopted are %v, %v", l, err)
	}
	k.Must("restart", "-t", "0", "web")
	k.d.Kill()
	k.d.Boot()
	k.known("db")
	if o, err := k.d.Get(t.Context(), "web"); err == nil {
		t.Errorf("%s is adopted again", o.Name)
	}

	// A stopped container can be adopted, and stays stopped.
	k.Must("stop", "-t", "0", "web")
	if o := adopt(hostctl.Adopt{Container: "web"}); o.State != "stopped" || !strings.HasPrefix(k.status("web"), "exited") {
		t.Errorf("%s is %s", o.Name, o.State)
	}
	k.Must("start", "web")
	k.known("web")
}
