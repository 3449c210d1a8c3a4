package containers

import (
	"fmt"
	"testing"

	"lull/internal/host/daemontest"
	"lull/internal/protocol/hostctl"
)

// ofProject returns the labels of a container of a Compose project.
func ofProject(project, service, dependsOn string) []string {
	var args []string
	for _, l := range []string{"project=" + project, "service=" + service, "container-number=1", "oneoff=False", "depends_on=" + dependsOn} {
		args = append(args, "--label", "com.docker.compose."+l)
	}
	return args
}

// TestDockerGroup checks that the containers of a Compose project sleep together
// although one has an idle connection to another, and that a client of one wakes
// all, dependencies first. A connection from a container of another project must
// keep them awake.
func TestDockerGroup(t *testing.T) {
	t.Parallel()
	k := newDock(t)
	at := daemontest.Addr(t)
	run := func(name, program string, more ...string) {
		t.Helper()
		args := append([]string{"run", "-d", "--name", name, "--label", "lull.pause-after=2s"}, more...)
		k.Must(append(args, "box:1", "sh", "-c", program)...)
		k.known(name)
	}
	const serve = "exec guest serve -listen 0.0.0.0:8080"
	run("shop-db-1", serve, ofProject("shop", "db", "")...)
	talks := func(to string) string {
		return fmt.Sprintf("sleep 100000 | nc %s 8080 & ", k.Say("inspect", "-f", "{{.NetworkSettings.IPAddress}}", to))
	}
	run("shop-web-1", talks("shop-db-1")+serve, append(ofProject("shop", "web", "db:service_started:false"), "-p", at+":8080")...)
	k.answers(at)
	both := func(state string) {
		t.Helper()
		for _, name := range []string{"shop-web-1", "shop-db-1"} {
			k.d.Await(name, state)
		}
	}
	both("paused")
	if o := k.d.Show("shop-web-1"); o.Group != "shop" || len(o.DependsOn) != 1 || o.DependsOn[0] != "shop-db-1" {
		t.Errorf("its group is %q, and it depends on %q", o.Group, o.DependsOn)
	}
	web, db := k.d.Show("shop-web-1"), k.d.Show("shop-db-1")
	if db.LastPausedAt.Before(*web.LastPausedAt) {
		t.Errorf("db was paused at %v, web at %v", db.LastPausedAt, web.LastPausedAt)
	}
	if err := say(at, "hello"); err != nil {
		t.Error(err)
	}
	k.d.Until("shop-db-1", "it was woken for web", func(o hostctl.Instance) bool { return o.WakeCount > db.WakeCount })
	both("paused")

	// A container of another project as a client.
	run("other", talks("shop-db-1")+"exec sleep 100000", "--label", "lull.pause-after=0")
	k.d.Until("shop-db-1", "its client holds it", func(o hostctl.Instance) bool { return o.State == "running" && o.Connections == 1 })
	k.d.Until("shop-web-1", "db holds it", func(o hostctl.Instance) bool {
		for _, b := range o.Blocks {
			if b.Code == "group_in_use" && b.Holder == "shop-db-1" {
				return true
			}
		}
		return false
	})
	k.Must("rm", "-f", "other")
	both("paused")

	// Stopping a member closes its connection to another one. That wakes the
	// other one, but not the third.
	run("shop-cache-1", serve, ofProject("shop", "cache", "")...)
	both("paused")
	cache := k.d.Await("shop-cache-1", "paused")
	db = k.d.Show("shop-db-1")
	if _, err := k.d.Do(t.Context(), "shop-web-1", "stop", nil); err != nil {
		t.Fatal(err)
	}
	k.d.Until("shop-db-1", "it has seen the end of its connection and sleeps", func(o hostctl.Instance) bool { return o.WakeCount > db.WakeCount && o.State == "paused" })
	if o := k.d.Show("shop-cache-1"); o.WakeCount != cache.WakeCount || o.State != "paused" {
		t.Errorf("%s, resumed by %s", daemontest.Describe(o), o.LastResumedBy)
	}
}
