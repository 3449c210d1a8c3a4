package cmlsim

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/sim/virl2test"
	"lull/internal/sim/world"
)

// library is a session of Cisco's client library with one simulated host.
type library struct {
	*virl2test.Client
	t *testing.T
}

func (b *bench) library(t *testing.T, user, password string) library {
	c := &virl2test.Client{Host: "h", Username: user, Password: password, Do: func(r *http.Request) (*http.Response, error) {
		w := httptest.NewRecorder()
		b.ServeHTTP(w, r)
		return w.Result(), nil
	}}
	return library{c, t}
}

type (
	at  = map[string]string
	obj = map[string]any
)

// do sends the request called name, which must succeed, and returns its decoded
// result.
func (l library) do(name string, path at, body any) any {
	l.t.Helper()
	v, err := l.Call(l.t.Context(), name, path, body)
	if err != nil {
		l.t.Fatal(err)
	}
	return v
}

func (l library) obj(name string, path at, body any) obj {
	l.t.Helper()
	return l.do(name, path, body).(obj)
}

// refused sends the request called name, which must fail with a status.
func (l library) refused(status int, name string, path at, body any) {
	l.t.Helper()
	if _, err := l.Call(l.t.Context(), name, path, body); virl2test.Status(err) != status {
		l.t.Errorf("%s %v %v: %v, want status %d", name, path, body, err, status)
	}
}

func (l library) is(got, want any) {
	l.t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		l.t.Errorf("%v, want %v", got, want)
	}
}

const noID = "8ee2051d-3adb-4e76-9e51-ae63238f15bc"

// TestLibrary sends every request of the library, in the order of its methods, and
// decodes the answers as the library does. The expected results are those of the
// library's own integration tests.
func TestLibrary(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, world.Profile{Labs: 1})
		l := b.library(t, "admin", "cml")
		if err := l.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		sent := map[string]bool{}
		for _, part := range []func(library, *bench) []library{(library).system, (library).labs, (library).elements, (library).accounts, (library).definitions, (library).licensing} {
			for _, c := range append(part(l, b), l) {
				for name := range c.Sent() {
					sent[name] = true
				}
			}
		}
		sent["authenticate"] = l.Logins > 0
		for _, name := range slices.Sorted(maps.Keys(virl2test.Requests)) {
			if !sent[name] {
				t.Errorf("%s was not tried", name)
			}
		}
	})
}

func (l library) system(b *bench) []library {
	l.do("authentication", nil, nil)
	l.do("system_health", nil, nil)
	l.do("system_stats", nil, nil)
	host := l.do("compute hosts", nil, nil).([]any)[0].(obj)
	l.is(l.obj("change compute host", at{"compute_id": host["id"].(string)}, obj{"admission_state": "READY"})["id"], host["id"])
	l.refused(404, "change compute host", at{"compute_id": noID}, obj{"admission_state": "READY"})
	l.do("admit compute hosts", nil, obj{"admission_state": "REGISTERED"})
	l.is(l.obj("new compute hosts", nil, nil)["admission_state"], "REGISTERED")
	b.login()
	b.want("POST", "system/notices", `{"level":"WARNING","label":"lull","content":"soon","enabled":true,"groups":null}`, 200)
	notice := at{"notice_id": l.do("notices", nil, nil).([]any)[0].(obj)["id"].(string)}
	l.is(l.obj("change notice", notice, obj{"enabled": false})["enabled"], false)
	l.refused(400, "change notice", notice, obj{"level": "LOUD"})
	l.do("set maintenance", nil, obj{"maintenance_mode": true})
	l.is(l.obj("set maintenance", nil, obj{"notice": notice["notice_id"]})["resolved_notice"].(obj)["id"], notice["notice_id"])
	l.is(l.obj("maintenance", nil, nil), obj{"maintenance_mode": true, "notice": notice["notice_id"], "resolved_notice": nil})
	l.do("remove notice", notice, nil)
	l.refused(404, "remove notice", notice, nil)
	l.do("external connectors", nil, nil)
	l.do("set session timeout", at{"timeout": "7200"}, nil)
	l.is(l.do("session timeout", nil, nil), 7200)
	l.refused(400, "set session timeout", at{"timeout": "soon"}, nil)
	l.do("resource pools", nil, nil)
	return nil
}

func (l library) labs(b *bench) []library {
	lab, err := l.CreateLab(l.t.Context(), "Library")
	if err != nil {
		l.t.Fatal(err)
	}
	id := at{"lab_id": lab.ID}
	state := func(want string) {
		l.t.Helper()
		l.is(l.do("lab state", id, nil), want)
	}
	state("DEFINED_ON_CORE")
	l.do("change lab", id, obj{"notes": "a note"})
	d := l.obj("lab", id, nil)
	l.is([]any{d["lab_title"], d["lab_notes"], d["node_count"], d["link_count"]}, []any{"Library", "a note", 2, 1})
	l.refused(400, "create lab", nil, obj{"title": ""})
	l.refused(404, "lab", at{"lab_id": noID}, nil)

	if _, err := l.Call(l.t.Context(), "start lab", id, nil); err != nil {
		l.t.Fatal(err)
	}
	l.is(l.do("lab converged", id, nil), false)
	states := l.obj("element states", id, nil)
	l.is(states["nodes"].(obj)[lab.Nodes[0]], "QUEUED")
	if err := l.Wait(l.t.Context(), lab.ID); err != nil {
		l.t.Fatal(err)
	}
	states = l.obj("element states", id, nil)
	l.is([]any{states["nodes"].(obj)[lab.Nodes[1]], states["links"].(obj)[lab.Links[0]], states["interfaces"].(obj)[lab.Interfaces[0]]}, []any{"BOOTED", "STARTED", "STARTED"})
	state("STARTED")
	l.is(len(l.obj("statistics", id, nil)["nodes"].(obj)), 2)
	for _, name := range []string{"lab addresses", "lab events", "connector mappings", "lab resource pools", "build configuration"} {
		l.do(name, id, nil)
	}
	l.refused(400, "remove lab", id, nil)
	l.refused(400, "wipe lab", id, nil)
	text := l.do("download", id, nil).(string)
	for _, op := range []string{"stop", "wipe"} {
		if err := l.Set(l.t.Context(), op, lab.ID); err != nil {
			l.t.Fatal(err)
		}
		state(map[string]string{"stop": "STOPPED", "wipe": "DEFINED_ON_CORE"}[op])
	}

	// The downloaded file describes the same lab.
	v := l.obj("import", at{"title": "Again"}, virl2test.Text(text))
	again := at{"lab_id": v["id"].(string)}
	was, is := l.obj("topology", id, nil), l.obj("topology", again, nil)
	l.is(is["lab"].(obj)["title"], "Again")
	for _, part := range []string{"nodes", "links"} {
		if len(was[part].([]any)) != len(is[part].([]any)) || len(is[part].([]any)) == 0 {
			l.t.Errorf("%s: %v became %v", part, was[part], is[part])
		}
	}
	for k, n := range is["nodes"].([]any) {
		l.is(n.(obj)["label"], was["nodes"].([]any)[k].(obj)["label"])
	}
	for _, bad := range []string{"", "nodes: 7", "lab: {title: x}\nnodes: [{id: n0, label: a, node_definition: none}]",
		"lab: {title: x}\nnodes: []\nlinks: [{id: l0, n1: n0, i1: i0, n2: n1, i2: i0}]"} {
		l.refused(400, "import", nil, virl2test.Text(bad))
	}

	l.do("sample labs", nil, nil)
	sample := l.do("import sample lab", at{"sample_lab_id": "server-triangle.yaml"}, nil).(string)
	l.is(len(l.obj("topology", at{"lab_id": sample}, nil)["nodes"].([]any)), 3)
	l.refused(404, "import sample lab", at{"sample_lab_id": "none"}, nil)
	if _, ok := l.obj("lab tiles", nil, nil)["lab_tiles"].(obj)[lab.ID]; !ok {
		l.t.Error("the lab has no tile")
	}
	l.do("remove lab", id, nil)
	l.refused(404, "topology", id, nil)
	l.refused(404, "start lab", id, nil)
	if slices.Contains(l.do("labs", at{"show_all": "true"}, nil).([]any), any(lab.ID)) {
		l.t.Error("a removed lab is listed")
	}
	return nil
}

func (l library) elements(*bench) []library {
	lab, err := l.CreateLab(l.t.Context(), "Elements")
	if err != nil {
		l.t.Fatal(err)
	}
	id := at{"lab_id": lab.ID}
	of := func(element string) at { return at{"lab_id": lab.ID, "id": element} }
	node := of(lab.Nodes[0])
	l.refused(400, "create node", id, obj{"label": "x", "node_definition": "none"})
	l.refused(400, "create node", id, obj{"label": "", "node_definition": "alpine"})
	populated := l.obj("create node", at{"lab_id": lab.ID, "populate_interfaces": "true"}, obj{"label": "r3", "node_definition": "iosv", "x": 0, "y": 0})["id"].(string)
	l.is(len(l.do("node interfaces", of(populated), nil).([]any)), 4)
	l.do("change node", node, obj{"x": 400, "tags": []string{"core"}, "configuration": "hostname r1"})
	for _, n := range l.obj("topology", at{"lab_id": lab.ID, "exclude_configurations": "false"}, nil)["nodes"].([]any) {
		if n := n.(obj); n["id"] == lab.Nodes[0] {
			l.is([]any{n["x"], n["tags"], n["configuration"], n["label"]}, []any{400, []any{"core"}, "hostname r1", "r1"})
		}
	}
	made := l.do("create interfaces", id, obj{"node": lab.Nodes[0], "slot": 4}).([]any)
	l.is([]any{len(made), made[4].(obj)["slot"], made[4].(obj)["label"]}, []any{5, 4, "eth4"})
	l.do("change interface", of(lab.Interfaces[0]), obj{"mac_address": "52:54:00:00:00:01"})
	l.refused(400, "create link", id, obj{"src_int": lab.Interfaces[0], "dst_int": made[4].(obj)["id"]}) // the first is connected
	l.refused(404, "create link", id, obj{"src_int": noID, "dst_int": made[4].(obj)["id"]})

	state := func(want string) {
		l.t.Helper()
		l.is(l.obj("node state", node, nil)["state"], want)
	}
	state("DEFINED_ON_CORE")
	l.do("start node", node, nil)
	l.is(l.do("lab state", id, nil), "STARTED")
	time.Sleep(2 * time.Second)
	state("STARTED")
	l.is(l.do("node converged", node, nil), false)
	time.Sleep(time.Minute)
	state("BOOTED")
	l.is(l.do("node converged", node, nil), true)
	l.refused(400, "remove node", node, nil)
	l.refused(400, "wipe node", node, nil)
	l.do("extract configuration", node, nil)
	l.do("node addresses", node, nil)
	for _, n := range l.do("nodes", at{"lab_id": lab.ID, "data": "true", "operational": "true", "exclude_configurations": "true"}, nil).([]any) {
		if runs := n.(obj)["operational"].(obj)["compute_id"] != nil; runs != (n.(obj)["id"] == lab.Nodes[0]) {
			l.t.Errorf("node %v has the compute host %v", n.(obj)["id"], n.(obj)["operational"])
		}
	}
	l.do("node", at{"lab_id": lab.ID, "id": lab.Nodes[0], "operational": "true", "exclude_configurations": "true"}, nil)
	l.do("start node", of(lab.Nodes[1]), nil)
	time.Sleep(2 * time.Minute)

	iface, link := of(lab.Interfaces[0]), of(lab.Links[0])
	l.do("stop interface", iface, nil)
	l.is(l.obj("interface state", iface, nil)["state"], "STOPPED")
	l.do("start interface", iface, nil)
	l.is(l.obj("interface state", iface, nil)["state"], "STARTED")
	l.do("stop link", link, nil)
	l.is(l.obj("link", link, nil)["state"], "STOPPED")
	l.do("start link", link, nil)
	l.is(l.do("link converged", link, nil), true)
	l.do("set condition", link, obj{"bandwidth": 50, "latency": 500, "jitter": 0, "loss": 2.0})
	l.is(l.obj("condition", link, nil)["latency"], 500)
	l.do("remove condition", link, nil)
	l.is(len(l.obj("condition", link, nil)), 0)

	for _, op := range []string{"stop", "wipe"} {
		for _, n := range lab.Nodes {
			l.do(op+" node", of(n), nil)
		}
		l.is(l.do("lab state", id, nil), map[string]string{"stop": "STOPPED", "wipe": "DEFINED_ON_CORE"}[op])
	}
	l.do("remove link", link, nil)
	l.refused(404, "link", link, nil)
	l.do("remove interface", of(made[4].(obj)["id"].(string)), nil)
	l.do("create link", id, obj{"src_int": lab.Interfaces[0], "dst_int": lab.Interfaces[1]})
	l.do("remove node", of(lab.Nodes[1]), nil) // removes its link too
	l.is(l.obj("lab", id, nil)["link_count"], 0)
	return nil
}

func (l library) accounts(b *bench) []library {
	user := l.obj("create user", nil, obj{"username": "dora", "password": "moremore"})
	id := at{"user_id": user["id"].(string)}
	l.is([]any{user["fullname"], user["admin"]}, []any{"", false})
	l.refused(422, "create user", nil, obj{"username": "dora", "password": "moremore"})
	l.refused(403, "create user", nil, obj{"username": "eve", "password": "password"})
	l.refused(400, "create user", nil, obj{"username": "eve", "password": "x", "admin": []string{"no-such-role"}})
	l.refused(404, "delete user", at{"user_id": noID}, nil)
	l.is(l.do("user id", at{"username": "dora"}, nil), user["id"])
	l.do("change user", id, obj{"fullname": "Dora"})
	l.is(l.obj("change user", id, obj{"description": "a user"})["fullname"], "Dora")

	// Users see their own labs and not the license.
	dora := b.library(l.t, "dora", "moremore")
	if err := dora.Open(l.t.Context()); err != nil {
		l.t.Fatal(err)
	}
	dora.is(len(dora.do("labs", at{"show_all": "true"}, nil).([]any)), 0)
	lab := dora.obj("create lab", nil, obj{})["id"].(string)
	dora.is(dora.do("labs", nil, nil), []any{lab})
	dora.refused(403, "licensing", nil, nil)
	dora.refused(403, "create user", nil, obj{"username": "eve", "password": "moremore"})
	dora.refused(403, "change user", id, obj{"admin": true})
	l.is(len(l.do("labs", nil, nil).([]any)) < len(l.do("labs", at{"show_all": "true"}, nil).([]any)), true)

	// Changes of password and role, and a logout, end sessions.
	logins := dora.Logins
	again := func(more int, why string) {
		l.t.Helper()
		dora.do("users", nil, nil)
		if logins += more; dora.Logins != logins {
			l.t.Errorf("%d logins after %s, want %d", dora.Logins, why, logins)
		}
	}
	again(0, "nothing")
	dora.do("change user", id, obj{"password": obj{"old_password": "moremore", "new_password": "evenmore"}})
	dora.Password = "evenmore"
	again(1, "a new password")
	l.is(l.obj("change user", id, obj{"admin": true})["admin"], true)
	again(1, "a new role")
	dora.is(len(dora.do("labs", at{"show_all": "true"}, nil).([]any)) > 1, true)
	dora.is(dora.do("logout", nil, nil), true)
	again(1, "a logout")
	other := b.library(l.t, "dora", "evenmore")
	other.do("users", nil, nil)
	dora.do("logout", at{"clear_all_sessions": "true"}, nil)
	again(1, "a logout from all sessions")
	other.do("users", nil, nil)
	l.is(other.Logins, 2)
	self := l.do("user id", at{"username": "admin"}, nil).(string)
	l.refused(400, "change user", at{"user_id": self}, obj{"admin": false})

	// Groups share labs.
	l.do("change user", id, obj{"admin": false})
	shared := l.obj("create lab", nil, obj{"title": "shared"})["id"].(string)
	group := l.obj("create group", nil, obj{"name": "students", "members": []any{id["user_id"]}, "associations": []any{}})
	gid := at{"group_id": group["id"].(string)}
	l.refused(422, "create group", nil, obj{"name": "students"})
	l.refused(400, "create group", nil, obj{"name": ""})
	l.refused(400, "create group", nil, obj{"name": "x", "members": []string{"joe"}})
	l.refused(404, "group", at{"group_id": noID}, nil)
	l.is(l.do("group id", at{"group_name": "students"}, nil), group["id"])
	l.is(l.obj("user", id, nil)["groups"], []any{group["id"]})
	dora.refused(404, "lab", at{"lab_id": shared}, nil)
	share := []any{obj{"id": shared, "permissions": []string{"lab_view"}}}
	l.is(l.obj("change group", gid, obj{"associations": share})["associations"].([]any)[0].(obj)["id"], shared)
	dora.do("lab", at{"lab_id": shared}, nil)
	l.is(l.obj("lab associations", at{"lab_id": shared}, nil)["groups"].([]any)[0].(obj)["id"], group["id"])
	l.do("share lab", at{"lab_id": shared}, obj{"groups": []any{}, "users": []any{obj{"id": id["user_id"], "permissions": []string{"lab_exec"}}}})
	l.is(len(l.obj("group", gid, nil)["associations"].([]any)), 0)
	l.is(len(l.obj("user", id, nil)["associations"].([]any)), 1)
	l.refused(400, "share lab", at{"lab_id": shared}, obj{"groups": []any{obj{"id": noID, "permissions": []string{"lab_view"}}}})
	l.do("groups", nil, nil)
	l.do("delete group", gid, nil)
	l.refused(404, "delete group", gid, nil)
	l.is(l.obj("user", id, nil)["groups"], []any{})

	l.do("delete user", id, nil)
	l.refused(404, "user", id, nil)
	dora.refused(403, "users", nil, nil) // the library gets a 401, and logging in again fails
	return []library{dora}
}

func (l library) definitions(*bench) []library {
	nodes := l.do("node definitions", nil, nil).([]any)
	text := l.do("node definition", at{"definition_id": "iosv"}, nil).(string)
	own := strings.Replace(text, "id: iosv\n", "id: iosv-custom\n", 1)
	l.is(l.do("upload node definition", nil, virl2test.Text(own)), "Success")
	l.refused(422, "upload node definition", nil, virl2test.Text(own))
	l.refused(400, "upload node definition", nil, virl2test.Text("null"))
	l.refused(400, "upload node definition", nil, obj{"id": "test1"})
	l.is(l.do("update node definition", nil, virl2test.Text(own)), "Success")
	l.is(len(l.do("node definitions", nil, nil).([]any)), len(nodes)+1)
	id := at{"definition_id": "iosv-custom"}
	l.is(l.obj("node definition lock", id, true)["general"].(obj)["read_only"], true)
	l.refused(400, "remove node definition", id, nil)
	l.do("node definition lock", id, false)
	l.do("remove node definition", id, nil)
	l.refused(404, "remove node definition", id, nil)

	// An image definition takes its file out of the drop folder and returns it.
	image := obj{"id": "some_image", "node_definition_id": "alpine", "label": "dummy", "disk_image": "dummy.qcow2"}
	l.refused(404, "upload image definition", nil, image)
	if err := l.Upload(l.t.Context(), "dummy.qcow2"); err != nil {
		l.t.Fatal(err)
	}
	l.is(l.do("image files", nil, nil), []any{"dummy.qcow2"})
	before := len(l.do("images of node definition", at{"definition_id": "alpine"}, nil).([]any))
	l.is(l.do("upload image definition", nil, image), "Success")
	l.is(len(l.do("images of node definition", at{"definition_id": "alpine"}, nil).([]any)), before+1)
	l.is(l.do("image files", nil, nil), []any{})
	l.do("image definitions", nil, nil)
	some := at{"definition_id": "some_image"}
	l.do("image definition", some, nil)
	l.is(l.obj("image definition lock", some, true)["read_only"], true)
	l.do("image definition lock", some, false)
	l.do("remove image definition", some, nil)
	l.is(l.do("image files", nil, nil), []any{"dummy.qcow2"})
	l.is(l.do("remove image file", at{"filename": "dummy.qcow2"}, nil), "Success")
	l.refused(404, "remove image file", at{"filename": "dummy.qcow2"}, nil)
	return nil
}

func (l library) licensing(*bench) []library {
	expect := func(registration, authorization string) obj {
		l.t.Helper()
		s := l.obj("licensing", nil, nil)
		l.is([]any{s["registration"].(obj)["status"], s["authorization"].(obj)["status"]}, []any{registration, authorization})
		return s
	}
	expect("NOT_REGISTERED", "EVAL")
	l.do("tech support", nil, nil)
	l.do("set transport", nil, obj{"ssms": "https://gateway.example.net", "proxy": obj{"server": "127.0.0.1", "port": 49152}})
	l.is(l.obj("licensing", nil, nil)["transport"].(obj)["proxy"], obj{"server": "127.0.0.1", "port": 49152})
	l.do("set transport", nil, obj{"ssms": nil, "proxy": obj{"server": nil, "port": nil}})
	transport := expect("NOT_REGISTERED", "EVAL")["transport"].(obj)
	l.is(transport["ssms"], transport["default_ssms"])
	for _, bad := range []any{"", "x\x00y", 1} {
		l.refused(400, "set transport", nil, obj{"ssms": bad, "proxy": obj{"server": nil, "port": nil}})
	}
	l.refused(400, "set product license", nil, "/bad")
	l.refused(400, "set product license", nil, "CML_Enterprise") // it is the active product already
	l.do("set product license", nil, "CML_Personal40")
	l.do("set product license", nil, "CML_Enterprise")

	for _, bad := range []any{-1, nil, "", "token%a\x00bad"} {
		l.refused(400, "register", nil, obj{"token": bad, "reregister": false})
	}
	l.do("register", nil, obj{"token": "BadRegistrationToken", "reregister": false})
	time.Sleep(time.Minute)
	failed := expect("FAILED", "EVAL")
	if why := fmt.Sprint(failed["registration"].(obj)["register_time"].(obj)["failure"]); !strings.Contains(why, "BadRegistrationToken") {
		l.t.Errorf("failure %q", why)
	}
	l.do("register", nil, obj{"token": "abc", "reregister": false})
	time.Sleep(time.Minute)
	was := expect("COMPLETED", "IN_COMPLIANCE")
	l.do("renew authorization", nil, nil)
	l.do("renew registration", nil, nil)
	is := expect("COMPLETED", "IN_COMPLIANCE")
	for _, part := range []string{"registration", "authorization"} {
		if was, is := was[part].(obj)["expires"].(string), is[part].(obj)["expires"].(string); is <= was {
			l.t.Errorf("%s expires %s, and %s after it was renewed", part, was, is)
		}
		time.Sleep(time.Second)
	}
	l.refused(400, "reservation mode", nil, true)

	features := l.do("features", nil, nil).([]any)
	l.is(len(features), 2)
	l.is([]any{features[0].(obj)["in_use"], features[1].(obj)["in_use"]}, []any{1, 0})
	nodes := features[1].(obj)
	l.do("update features", nil, []any{obj{"id": nodes["id"], "count": nodes["max"]}})
	l.is(l.do("features", nil, nil).([]any)[1].(obj)["in_use"], nodes["max"])
	l.do("update features", nil, obj{nodes["id"].(string): 0})
	for _, bad := range []any{[]any{}, obj{}, []any{obj{"id": "unknown", "count": 1}}, []any{obj{"id": nodes["id"], "count": -1}},
		[]any{obj{"id": nodes["id"], "count": nil}}, obj{nodes["id"].(string): "1"}, obj{nodes["id"].(string): 1 << 30}} {
		l.refused(400, "update features", nil, bad)
	}
	expect("COMPLETED", "IN_COMPLIANCE")

	l.do("deregister", nil, nil)
	expect("NOT_REGISTERED", "EVAL")
	l.refused(400, "deregister", nil, nil)
	l.refused(400, "request a reservation", nil, nil)
	l.refused(400, "cancel a reservation", nil, nil)
	for _, bad := range []any{-1, "false", 1.4, "none"} {
		l.refused(400, "reservation mode", nil, bad)
	}
	l.do("reservation mode", nil, true)
	l.refused(400, "register", nil, obj{"token": "abc", "reregister": false})
	l.do("request a reservation", nil, nil)
	l.is(expect("RESERVATION_IN_PROGRESS", "EVAL")["reservation_mode"], true)
	l.do("cancel a reservation", nil, nil)
	expect("NOT_REGISTERED", "EVAL")
	l.do("reservation mode", nil, false)
	return nil
}
