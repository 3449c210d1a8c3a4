package docker

import (
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"lull/internal/core/instance"
	"lull/internal/platform/sockets"
	"lull/internal/runtime/process"
)

// TestMembers checks the relations read from the labels of Compose and of lull.
func TestMembers(t *testing.T) {
	inspected := func(name, labels string, addr string) *details {
		var d details
		if err := json.Unmarshal([]byte(`{"Name":"/`+name+`","Config":{"Labels":{`+labels+`}},"State":{"Running":true,"Pid":99},"NetworkSettings":{"Networks":{"n":{"IPAddress":"`+addr+`"},"m":{}}}}`), &d); err != nil {
			t.Fatal(err)
		}
		return &d
	}
	service := func(project, name string) string {
		return `"com.docker.compose.project":"` + project + `","com.docker.compose.service":"` + name + `"`
	}
	r := &relations{}
	for name, d := range map[string]*details{
		"web":   inspected("shop-web-1", service("shop", "web")+`,"com.docker.compose.depends_on":"db:service_healthy:true,cache:service_started:false"`, "10.0.0.1"),
		"db":    inspected("shop-db-1", service("shop", "db"), "10.0.0.2"),
		"cache": inspected("shop-cache-1", service("shop", "cache")+`,"lull.group":""`, "10.0.0.3"),
		"job":   inspected("shop-job-1", service("shop", "job")+`,"lull.depends-on":"web, other,"`, "10.0.0.4"),
		"other": inspected("other", `"lull.group":"shop"`, "10.0.0.5"),
		"alien": inspected("b-db-1", service("b", "db"), "10.0.0.6"),
		"plain": inspected("plain", `"lull.depends-on":"shop-db-1"`, "10.0.0.7"),
	} {
		r.set(name, memberOf(name, d))
	}
	want := map[string][]string{"web": {"cache", "db"}, "db": nil, "cache": nil, "job": {"other", "web"}, "other": nil, "alien": nil, "plain": {"db"}}
	got := map[string][]string{}
	for m, on := range r.all() {
		slices.Sort(on)
		got[m.id] = on
	}
	if !maps.EqualFunc(got, want, slices.Equal) {
		t.Errorf("dependencies %v, want %v", got, want)
	}
	for addr, want := range map[string]struct {
		other string
		same  bool
	}{"10.0.0.1": {"web", true}, "10.0.0.3": {"cache", false}, "10.0.0.5": {"other", true}, "10.0.0.6": {"alien", false}, "10.0.0.9": {"", false}} {
		if other, same := r.at(netip.MustParseAddr(addr), "db"); other != want.other || same != want.same {
			t.Errorf("%s is of %q, in the group of db: %t", addr, other, same)
		}
	}
	if _, same := r.at(netip.MustParseAddr("10.0.0.7"), "cache"); same {
		t.Error("two containers without a group are in the same one")
	}
}

// TestGoodbye checks that goodbye recognizes connections of containers of the group
// that were asked to exit or have exited, and no others. cache is in the group and
// stays, db was asked to exit, job has exited, and alien is in another group.
func TestGoodbye(t *testing.T) {
	var waiting []sockets.Socket
	fixture := process.Fixture{Sockets: func(sockets.Query) ([]sockets.Socket, error) { return waiting, nil }}
	r := &Runtime{works: map[string]*Work{}}
	for name, addr := range map[string]string{"web": "10.0.0.1", "db": "10.0.0.2", "cache": "10.0.0.3", "job": "10.0.0.4", "alien": "10.0.0.5"} {
		m := member{id: name, name: name, group: "shop", addrs: []netip.Addr{netip.MustParseAddr(addr)}}
		if name == "alien" {
			m.group = "other"
		}
		r.relations.set(name, m)
		r.works[name] = &Work{Work: fixture.Work(name, instance.Identity{}), r: r, container: name}
	}
	web := r.works["web"]
	from := func(addr string) string { return "data on tcp 10.0.0.1:80 from " + addr + ":40000" }
	is := func(why string, want bool) {
		t.Helper()
		if got := web.goodbye(why); got != want {
			t.Errorf("%s, with %v waiting: %t", why, waiting, got)
		}
	}
	const listener = "connection waiting on tcp 0.0.0.0:80"
	wait := func(addrs ...string) {
		waiting = nil
		for n, a := range addrs {
			waiting = append(waiting, sockets.Socket{State: sockets.Established, Remote: netip.AddrPortFrom(netip.MustParseAddr(a), uint16(40000+n))})
		}
	}
	for _, addr := range []string{"10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "192.0.2.1"} {
		is(from(addr), false) // no container is exiting
		wait(addr)
		is(listener, false)
	}
	r.works["db"].asked.Store(true)
	r.works["alien"].asked.Store(true)
	delete(r.works, "job")
	r.relations.set("job", member{id: "job", name: "job", group: "shop"}) // job has no address anymore
	for addr, want := range map[string]bool{"10.0.0.1": false, "10.0.0.2": true, "::ffff:10.0.0.2": true, "10.0.0.3": false, "10.0.0.4": true, "10.0.0.5": false, "192.0.2.1": false} {
		if netip.MustParseAddr(addr).Is4() {
			is(from(addr), want)
		} else {
			is(from("["+addr+"]"), want)
		}
		wait(addr)
		is(listener, want)
		wait("10.0.0.2", addr)
		is(listener, want)
	}
	wait()
	is(listener, false)
	is("data on unix /run/x", false)

	// Another container has got the address of job.
	r.relations.set("late", member{id: "late", name: "late", group: "shop", addrs: []netip.Addr{netip.MustParseAddr("10.0.0.4")}})
	r.works["late"] = &Work{Work: fixture.Work("late", instance.Identity{}), r: r, container: "late"}
	for range 20 { // the order of the map varies
		is(from("10.0.0.4"), false)
	}
}
