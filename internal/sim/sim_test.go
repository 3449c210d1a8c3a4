package sim

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/sim/world"
)

// ask sends one control request and decodes the answer.
func ask(t *testing.T, h http.Handler, method, path, body string, status int, into any) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
	if w.Code != status {
		t.Errorf("%s %s: status %d, want %d: %s", method, path, w.Code, status, w.Body)
	}
	if into != nil {
		if err := json.Unmarshal(w.Body.Bytes(), into); err != nil {
			t.Errorf("%s %s: %v: %s", method, path, err, w.Body)
		}
	}
}

func TestDefaultScenario(t *testing.T) {
	s, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	var all []InstanceInfo
	ask(t, s.Handler(), "GET", "/sim/instances", "", 200, &all)
	cml := 0
	for _, i := range all {
		if i.CMLVersion != "" {
			cml++
		}
	}
	if cml != 12 || len(all) != 13 {
		t.Errorf("%d workers of %d instances", cml, len(all))
	}
}

func TestControl(t *testing.T) {
	s, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	h := s.Handler()
	state := func() (out InstanceInfo) {
		t.Helper()
		ask(t, h, "GET", "/sim/instances/cml-1", "", 200, &out)
		return out
	}
	ask(t, h, "POST", "/sim/instances/cml-1/events", `{"category":"start_lab","user":"alice"}`, 200, nil)
	ask(t, h, "POST", "/sim/instances/cml-1/events", `{"category":"dance"}`, 400, nil)
	if state().LastActivity == nil {
		t.Error("the injected action is not shown")
	}
	ask(t, h, "POST", "/sim/instances/cml-1/stop", `{"by":"server"}`, 200, nil)
	ask(t, h, "PATCH", "/sim/instances/cml-1", `{"stuck":true}`, 200, nil)
	ask(t, h, "PUT", "/sim/clock", `{"advance":"10m"}`, 200, nil)
	if got := state(); got.State != world.Stopping {
		t.Errorf("a stuck instance is %s", got.State)
	}
	ask(t, h, "PATCH", "/sim/instances/cml-1", `{"stuck":false}`, 200, nil)
	ask(t, h, "PUT", "/sim/clock", `{"advance":"10s","speed":100}`, 200, nil)
	if got := state(); got.State != world.Stopped || got.History[0].By != "server" {
		t.Errorf("%+v", got)
	}
	ask(t, h, "POST", "/sim/instances/cml-1/explode", "", 400, nil)
	ask(t, h, "POST", "/sim/instances/none/start", "", 400, nil)
	ask(t, h, "GET", "/sim/instances/none", "", 404, nil)
	ask(t, h, "PUT", "/sim/clock", `{"speed":-1}`, 400, nil)
	ask(t, h, "PUT", "/sim/clock", `{"advance":"-1h"}`, 400, nil)
	ask(t, h, "PUT", "/sim/clock", `{`, 400, nil)
	var id struct{ ID string }
	ask(t, h, "POST", "/sim/faults", `{"service":"ec2","kind":"error","code":"RequestLimitExceeded"}`, 200, &id)
	ask(t, h, "POST", "/sim/faults", `{"kind":"what"}`, 400, nil)
	ask(t, h, "POST", "/?Action=DescribeInstances&Version=2016-11-15", "", 503, nil)
	ask(t, h, "DELETE", "/sim/faults/"+id.ID, "", 200, nil)
	ask(t, h, "DELETE", "/sim/faults/"+id.ID, "", 404, nil)
	ask(t, h, "POST", "/?Action=DescribeInstances&Version=2016-11-15", "", 403, nil)
	ask(t, h, "POST", "/?Action=What", "", 400, nil)
	var calls map[string]int
	ask(t, h, "DELETE", "/sim/calls", "", 200, &calls)
	if calls["ec2 DescribeInstances"] != 2 {
		t.Errorf("calls: %v", calls)
	}
	ask(t, h, "GET", "/cml/cml-2/api/v0/system_information", "", 200, nil)
}

// serve runs a simulator with a state file on two ports of all loopback addresses.
func serve(t *testing.T, file string) (s *Server, api, cml string, stop func() error) {
	t.Helper()
	s, err := New(Options{State: file})
	if err != nil {
		t.Fatal(err)
	}
	var l Listeners
	for _, x := range []struct {
		to   *net.Listener
		addr *string
	}{{&l.API, &api}, {&l.CML, &cml}} {
		ln, err := net.Listen("tcp4", "0.0.0.0:0")
		errtest.None(t, err)
		*x.to = LoopbackOnly(ln)
		_, *x.addr, _ = net.SplitHostPort(ln.Addr().String())
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, l) }()
	return s, api, cml, func() error { cancel(); return <-done }
}

// TestRun checks a simulator on real sockets: each instance's CML answers by TLS at
// the instance's address and its metadata service at its own address, and the state
// is the same after a restart.
func TestRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "state.json")
	up := func() (s *Server, api, cml string, stop func() error) { return serve(t, file) }
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}, Timeout: 30 * time.Second}
	get := func(url string) string {
		t.Helper()
		resp, err := client.Get(url)
		if err != nil {
			return "unreachable"
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		errtest.None(t, err)
		return string(b)
	}
	s, api, cml, stop := up()
	var first InstanceInfo
	s.World.Find("cml-1", func(i *world.Instance, _ world.Moment) { first = info(i) })
	if got := get(fmt.Sprintf("https://%s:%s/api/v0/system_information", first.PublicIP, cml)); !strings.Contains(got, `"ready":true`) {
		t.Errorf("CML at %s: %s", first.PublicIP, got)
	}
	if got := get(fmt.Sprintf("http://%s:%s/latest/meta-data/instance-id", first.MetadataIP, api)); got != first.ID {
		t.Errorf("metadata at %s: %s", first.MetadataIP, got)
	}
	if got := get(fmt.Sprintf("https://127.99.9.9:%s/api/v0/system_information", cml)); got != "unreachable" {
		t.Errorf("an address of nothing answers: %s", got)
	}
	errtest.None(t, s.World.External("cml-2", "stop", "user"))
	errtest.None(t, stop())
	s, _, cml, stop = up()
	if got := get(fmt.Sprintf("https://%s:%s/api/v0/system_information", first.PublicIP, cml)); !strings.Contains(got, `"ready":true`) {
		t.Errorf("CML after a restart: %s", got)
	}
	s.World.Find("cml-2", func(i *world.Instance, _ world.Moment) {
		if i.State != world.Stopping && i.State != world.Stopped {
			t.Errorf("after a restart cml-2 is %s", i.State)
		}
	})
	errtest.None(t, stop())
}

func TestScenarioFaults(t *testing.T) {
	for _, x := range []struct{ text, says string }{
		{"speed: 60\nspead: 1", "line 2"},
		{"timing: {pending: soon}", "soon"},
		{"workers: [{name: a, profile: none}]", `unknown profile "none"`},
		{"workers: [{name: a}, {name: a}]", "two workers"},
		{"workers: [{name: a, type: x9.huge}]", "x9.huge"},
		{"workers: [{name: a, region: mars}]", "mars"},
		{"profiles: {p: {users: [{name: u, days: someday}]}}\nworkers: [{name: a}]", "someday"},
		{"faults: [{kind: nothing}]\nworkers: [{name: a}]", "nothing"},
		{"address_pool: here\nworkers: [{name: a}]", "here"},
		{"speed: -3\nworkers: [{name: a}]", "-3"},
		{"- 1", "cannot"},
	} {
		c, err := ParseScenario([]byte(x.text))
		if err == nil {
			_, err = New(Options{Scenario: c})
		}
		if err == nil || !strings.Contains(err.Error(), x.says) || !strings.HasPrefix(err.Error(), "cannot ") {
			t.Errorf("%q: %v", x.text, err)
		}
	}
}

func FuzzScenario(f *testing.F) {
	f.Add(defaultScenario)
	f.Add([]byte("workers: [{name: a, count: 3, up: -5h}]"))
	f.Add([]byte("profiles: {p: {labs: 3, users: [{name: u, every: 1s, break: -1h, spread: -1h}]}}\nworkers: [{name: a, profile: p}]"))
	f.Add([]byte("regions: [{}]\naccounts: [{}]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := ParseScenario(b)
		if err != nil || bytes.Count(b, []byte("count")) > 0 && len(c.Workers) > 0 && c.Workers[0].Count > 100 {
			return
		}
		if len(c.Workers) > 100 {
			return
		}
		for k := range c.Workers {
			c.Workers[k].Count = min(c.Workers[k].Count, 10)
		}
		w, err := world.New(c)
		if err != nil {
			return
		}
		w.All(func(*world.Instance, world.Moment) {})
	})
}
