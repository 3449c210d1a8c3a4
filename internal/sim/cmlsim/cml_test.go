package cmlsim

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/sim/fault"
	"lull/internal/sim/world"
)

// bench is a world with one worker named h.
type bench struct {
	*CML
	t     testing.TB
	token string
}

func newBench(t testing.TB, p world.Profile) *bench {
	t.Helper()
	w, err := world.New(world.Config{
		Regions: []world.RegionConfig{{Name: "us-east-1"}}, Profiles: map[string]world.Profile{"p": p},
		Workers: []world.WorkerConfig{{Name: "h", Profile: "p"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	return &bench{CML: New(w), t: t}
}

// do sends one request; status 0 means that the connection was dropped.
func (b *bench) do(method, path, body string) (status int, answer string, header http.Header) {
	b.t.Helper()
	r := httptest.NewRequest(method, "https://h"+base+path, strings.NewReader(body))
	if b.token != "" {
		r.Header.Set("Authorization", "Bearer "+b.token)
	}
	w := httptest.NewRecorder()
	defer func() {
		if x := recover(); x != nil {
			if x != http.ErrAbortHandler {
				panic(x)
			}
			status, answer = 0, w.Body.String()
		}
	}()
	b.ServeHTTP(w, r)
	return w.Code, w.Body.String(), w.Header()
}

func (b *bench) want(method, path, body string, status int) string {
	b.t.Helper()
	got, answer, _ := b.do(method, path, body)
	if got != status {
		b.t.Errorf("%s %s: status %d, want %d: %s", method, path, got, status, answer)
	}
	return answer
}

func (b *bench) login() {
	b.t.Helper()
	if err := json.Unmarshal([]byte(b.want("POST", "authenticate", `{"username":"lull","password":"cml"}`, 200)), &b.token); err != nil {
		b.t.Fatalf("the token is no bare JSON string: %v", err)
	}
}

type shown struct {
	Category  string
	Timestamp time.Time
	Data      map[string]any
}

func (b *bench) events() []shown {
	b.t.Helper()
	var out []shown
	if err := json.Unmarshal([]byte(b.want("GET", "telemetry/events", "", 200)), &out); err != nil {
		b.t.Fatal(err)
	}
	return out
}

func TestAuthentication(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, world.Profile{TokenLife: world.Duration(time.Hour)})
		var e struct {
			Code        int
			Description string
		}
		if err := json.Unmarshal([]byte(b.want("GET", "telemetry/events", "", 401)), &e); err != nil || e.Code != 401 || e.Description == "" {
			t.Errorf("%+v, %v", e, err)
		}
		b.want("POST", "authenticate", `{"username":"lull","password":"wrong"}`, 403)
		b.want("POST", "authenticate", `{`, 400)
		b.want("GET", "system_information", "", 200)
		b.login()
		b.want("GET", "authok", "", 200)
		b.want("GET", "nothing", "", 404)
		time.Sleep(time.Hour)
		b.want("GET", "authok", "", 401)
		b.login()
		errtest.None(t, b.w.External("h", "stop", "user"))
		b.want("GET", "authok", "", 0)
		time.Sleep(2 * time.Minute)
		errtest.None(t, b.w.External("h", "start", "user"))
		time.Sleep(10 * time.Minute)
		b.want("GET", "authok", "", 401) // the cold boot has voided the token
	})
}

func TestBoot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, world.Profile{})
		for _, op := range []string{"stop", "start"} {
			errtest.None(t, b.w.External("h", op, "user"))
			time.Sleep(time.Minute)
		}
		seen := []string{}
		for range 60 {
			status, answer, _ := b.do("GET", "system_information", "")
			s := fmt.Sprint(status, strings.Contains(answer, `"ready":true`))
			if len(seen) == 0 || seen[len(seen)-1] != s {
				seen = append(seen, s)
			}
			time.Sleep(10 * time.Second)
		}
		if !slices.Equal(seen, []string{"0 false", "200 false", "200 true"}) {
			t.Errorf("a boot looks like %v", seen)
		}
	})
}

func TestTelemetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, world.Profile{History: 3136, Labs: 2, ClockOffset: world.Duration(7 * time.Minute), HistoryAge: world.Duration(time.Hour)})
		b.login()
		all := b.events()
		if len(all) != 3137 {
			t.Fatalf("%d events", len(all))
		}
		mine := all[3136]
		id := mine.Data["user_id"]
		if mine.Category != "user_activity" || id == world.AdminID || time.Until(mine.Timestamp).Round(time.Second) != 7*time.Minute {
			t.Errorf("our own login is shown as %+v at %s", mine, time.Now())
		}
		_, _, h := b.do("GET", "telemetry", "")
		if at, err := http.ParseTime(h.Get("Date")); err != nil || time.Until(at).Round(time.Second) != 7*time.Minute {
			t.Errorf("Date %q, %v", h.Get("Date"), err)
		}
		b.want("PUT", "telemetry", `{"opt_in":false}`, 204)
		b.want("PUT", "telemetry", `{}`, 400)
		b.login()
		if n := len(b.events()); n != 3137 {
			t.Errorf("%d events: one was collected without opt-in", n)
		}
		if got := b.want("GET", "telemetry", "", 200); !strings.Contains(got, `"opt_in":false`) {
			t.Error(got)
		}
	})
}

func TestAllCategories(t *testing.T) {
	b := newBench(t, world.Profile{Labs: 1})
	for _, c := range world.Categories {
		b.w.HostAt("h", func(h *world.Host, now world.Moment, _ world.Reach) { h.Act(now, c, world.AdminID) })
	}
	b.login()
	got := map[string]bool{}
	for _, e := range b.events() {
		got[e.Category] = true
		if e.Data == nil || e.Timestamp.IsZero() {
			t.Errorf("%+v", e)
		}
	}
	if len(got) != 25 {
		t.Errorf("%d categories", len(got))
	}
}

func TestSpoiledTelemetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, world.Profile{Labs: 1, Spoil: world.Spoil{Late: 0.3, LateBy: world.Duration(5 * time.Minute), Duplicate: 0.2, Reorder: 0.2, Future: 0.2}})
		for range 400 {
			b.w.HostAt("h", func(h *world.Host, now world.Moment, _ world.Reach) { h.Act(now, "start_node", "u") })
			time.Sleep(time.Second)
		}
		b.login()
		loggedIn := time.Now().UnixMilli()
		early := b.events()
		time.Sleep(6 * time.Minute)
		later := b.events()
		future, back := 0, 0
		for k, e := range later {
			if e.Timestamp.After(time.Now().Add(30 * time.Minute)) {
				future++
			} else if k > 0 && e.Timestamp.Before(later[k-1].Timestamp) {
				back++
			}
		}
		if len(later) < 440 || len(early) >= len(later) || future < 40 || back < 40 {
			t.Errorf("%d events, then %d; %d of the future, %d out of order", len(early), len(later), future, back)
		}
		b.w.HostAt("h", func(h *world.Host, now world.Moment, _ world.Reach) {
			if at := h.KnownActivity(now); !at.After(h.LastActivity) || at.UnixMilli() != loggedIn {
				t.Errorf("known activity %s, last %s", at, h.LastActivity)
			}
		})
		spoil := world.Spoil{Malformed: 1}
		errtest.None(t, b.w.Set("h", world.Attributes{Spoil: &spoil}))
		b.w.HostAt("h", func(h *world.Host, now world.Moment, _ world.Reach) { h.Act(now, "start_lab", "u") })
		if err := json.Unmarshal([]byte(b.want("GET", "telemetry/events", "", 200)), &[]shown{}); err == nil {
			t.Error("the malformed event reads well")
		}
	})
}

func TestLabs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, world.Profile{Labs: 3})
		b.login()
		var ids []string
		if err := json.Unmarshal([]byte(b.want("GET", "labs?show_all=true", "", 200)), &ids); err != nil || len(ids) != 3 {
			t.Fatalf("%v, %v", ids, err)
		}
		if got := b.want("GET", "labs", "", 200); got != "[]" {
			t.Errorf("labs of our own: %s", got)
		}
		state := func() string { return b.want("GET", "labs/"+ids[0]+"/state", "", 200) }
		before := state()
		b.want("PUT", "labs/"+ids[0]+"/start", "", 204)
		if before != `"DEFINED_ON_CORE"` || state() != `"STARTED"` {
			t.Errorf("states %s and %s", before, state())
		}
		var stats struct {
			Computes map[string]struct {
				Stats struct {
					Dominfo struct {
						Running int `json:"running_nodes"`
					}
				}
			}
		}
		errtest.None(t, json.Unmarshal([]byte(b.want("GET", "system_stats", "", 200)), &stats))
		for _, c := range stats.Computes {
			if c.Stats.Dominfo.Running < 2 {
				t.Errorf("%d nodes run", c.Stats.Dominfo.Running)
			}
		}
		time.Sleep(2 * time.Second) // the nodes are queued at first
		if got := b.want("GET", "labs/"+ids[0]+"/nodes?data=true", "", 200); !strings.Contains(got, "Booting") {
			t.Errorf("nodes: %s", got)
		}
		time.Sleep(5 * time.Minute)
		if got := b.want("GET", "labs/"+ids[0]+"/nodes?data=true", "", 200); !strings.Contains(got, "Booted") {
			t.Errorf("nodes: %s", got)
		}
		b.want("PUT", "labs/"+ids[0]+"/stop", "", 204)
		if state() != `"STOPPED"` {
			t.Errorf("state %s", state())
		}
		b.want("GET", "labs/none", "", 404)
		b.want("PUT", "labs/none/stop", "", 404)
		b.want("GET", "labs/"+ids[1], "", 200)
		b.want("GET", "labs/"+ids[1]+"/events", "", 200)
		b.want("GET", "labs/"+ids[1]+"/lab_element_state", "", 200)
		b.want("GET", "system_health", "", 200)
		b.want("POST", "system/notices", `{"level":"WARNING","label":"lull","content":"soon","enabled":true}`, 200)
		b.want("POST", "system/notices", `{"level":"LOUD"}`, 400)
		if got := b.want("GET", "system/notices", "", 200); !strings.Contains(got, "soon") {
			t.Error(got)
		}
		var n struct{ ID string }
		errtest.None(t, json.Unmarshal([]byte(b.want("POST", "system/notices", `{"level":"INFO","label":"lull","content":"later","enabled":true}`, 200)), &n))
		b.want("DELETE", "system/notices/"+n.ID, "", 204)
		b.want("DELETE", "system/notices/"+n.ID, "", 404)
		if got := b.want("GET", "system/notices", "", 200); !strings.Contains(got, "soon") || strings.Contains(got, "later") {
			t.Error(got)
		}
	})
}

func TestLicence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, world.Profile{})
		b.login()
		status := func() string {
			var l struct {
				Registration, Authorization struct{ Status string }
			}
			errtest.None(t, json.Unmarshal([]byte(b.want("GET", "licensing", "", 200)), &l))
			return l.Registration.Status + " " + l.Authorization.Status
		}
		expect := func(want string) {
			t.Helper()
			if got := status(); got != want {
				t.Errorf("licence is %s, want %s", got, want)
			}
		}
		expect("NOT_REGISTERED EVAL")
		b.want("DELETE", "licensing/deregistration", "", 400)
		b.want("POST", "licensing/registration", `{"token":"with space"}`, 400)
		b.want("POST", "licensing/registration", `{"token":"bad-token"}`, 204)
		expect("IN_PROGRESS EVAL")
		b.want("POST", "licensing/registration", `{"token":"abc"}`, 409)
		b.want("DELETE", "licensing/deregistration", "", 409)
		time.Sleep(time.Minute)
		expect("FAILED EVAL")
		b.want("POST", "licensing/registration", `{"token":"abc"}`, 204)
		seen := []string{}
		for range 60 {
			if s := status(); len(seen) == 0 || seen[len(seen)-1] != s {
				seen = append(seen, s)
			}
			time.Sleep(time.Second)
		}
		if !slices.Equal(seen, []string{"IN_PROGRESS EVAL", "COMPLETED EVAL", "COMPLETED IN_COMPLIANCE"}) {
			t.Errorf("a registration looks like %v", seen)
		}
		b.want("POST", "licensing/registration", `{"token":"abc"}`, 400)
		b.want("PUT", "licensing/registration/renew", "", 204)
		yes := true
		errtest.None(t, b.w.Set("h", world.Attributes{DeregSlow: &yes}))
		b.want("DELETE", "licensing/deregistration", "", 202)
		expect("NOT_REGISTERED EVAL")
		b.want("DELETE", "licensing/deregistration", "", 400)
	})
}

func TestFaults(t *testing.T) {
	b := newBench(t, world.Profile{History: 500})
	b.login()
	whole := b.want("GET", "telemetry/events", "", 200)
	for _, r := range []fault.Rule{{Kind: fault.Refuse}, {Kind: fault.Error, Status: 502}, {Kind: fault.Truncate, Bytes: 1000}, {Kind: fault.Malform, Bytes: 500}} {
		r.Service, r.Action, r.Target, r.Count = "cml", "GET telemetry/events", "h", 1
		errtest.Get(b.w.Faults.Add(r))(t)
		status, got, _ := b.do("GET", "telemetry/events", "")
		ok := map[fault.Kind]bool{
			fault.Refuse: status == 0 && got == "", fault.Error: status == 502 && strings.Contains(got, "description"),
			fault.Truncate: status == 0 && len(got) == 1000, fault.Malform: status == 200 && len(got) == len(whole) && !json.Valid([]byte(got)),
		}[r.Kind]
		if !ok {
			t.Errorf("%s: status %d, %d bytes", r.Kind, status, len(got))
		}
	}
}

// TestTLS checks that each host is reached at its own address, and that its
// certificate is verified by its key alone.
func TestTLS(t *testing.T) {
	b := newBench(t, world.Profile{})
	srv := httptest.NewUnstartedServer(b.CML)
	srv.TLS = b.TLSConfig()
	srv.StartTLS()
	defer srv.Close()
	cert, err := b.Certificate("h")
	errtest.None(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(cert.Leaf)
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "h"}}
	defer tr.CloseIdleConnections()
	req, err := http.NewRequest("GET", srv.URL+base+"system_information", nil)
	errtest.None(t, err)
	req.Host = "h"
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if resp.Body.Close(); err != nil || !bytes.Contains(body, []byte("2.9.0")) {
		t.Errorf("%s, %v", body, err)
	}
	again, err := newBench(t, world.Profile{}).Certificate("h")
	if err != nil || !bytes.Equal(again.Leaf.RawSubjectPublicKeyInfo, cert.Leaf.RawSubjectPublicKeyInfo) {
		t.Errorf("the key changes with a restart: %v", err)
	}
	if own, err := b.Certificate("127.0.0.1"); err != nil || bytes.Equal(own.Leaf.RawSubjectPublicKeyInfo, cert.Leaf.RawSubjectPublicKeyInfo) {
		t.Errorf("another address has the host's key: %v", err)
	}
}

// discard counts the bytes written to it.
type discard struct{ n int64 }

func (d *discard) Header() http.Header { return http.Header{} }
func (d *discard) WriteHeader(int)     {}
func (d *discard) Write(b []byte) (int, error) {
	d.n += int64(len(b))
	return len(b), nil
}

// BenchmarkTelemetry streams a history of a million events.
func BenchmarkTelemetry(b *testing.B) {
	x := newBench(b, world.Profile{History: 1_000_000})
	x.login()
	b.ReportAllocs()
	for b.Loop() {
		r := httptest.NewRequest("GET", "https://h"+base+"telemetry/events", nil)
		r.Header.Set("Authorization", "Bearer "+x.token)
		d := &discard{}
		x.ServeHTTP(d, r)
		if d.n < 50_000_000 {
			b.Fatalf("%d bytes", d.n)
		}
		b.SetBytes(d.n)
	}
}
