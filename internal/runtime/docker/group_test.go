package docker

import (
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
	"testing"
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
