package server

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/fleet/audit"
	"lull/internal/lib/memnet"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/store/mem"
)

// commandRig is a fleet of two servers, one and two. The host desk reports to server
// one. Commands reach the function reply, which stands for the host; nil means that
// the host does not answer.
type commandRig struct {
	t        *testing.T
	one, two *Server
	net      *memnet.Network
	token    string
	got      []control.HostCommand
	reply    func(control.HostCommand) *control.HostReply
}

// reports sends a report of desk to server one.
func (r *commandRig) reports(seq uint64, commands bool) {
	r.t.Helper()
	h := control.HostReport{Host: "desk", At: time.Now(), Sequence: seq, StartedAt: time.Now(), Version: "v1", Interval: idle.Duration(time.Minute), Commands: commands,
		Counts: map[string]int{"running": 1}, Instances: []control.HostInstance{{ID: "i1", Name: "web", State: "running", Runtime: "process"}}}
	h.Fit()
	if a, err := r.one.hostReport(r.t.Context(), h); err != nil || a.Resend {
		r.t.Fatal(a, err)
	}
}

// asks sends a request to a server. It returns the status and, depending on that, the
// outcome or the problem's code.
func (r *commandRig) asks(server, method, path, body, key string) (status int, o control.HostOutcome, code string) {
	r.t.Helper()
	time.Sleep(time.Millisecond) // audit entries are ordered by their times
	req, err := http.NewRequestWithContext(r.t.Context(), method, "http://"+server+"/api/v1/hosts/desk/instances/"+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+r.token)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	res, err := (&http.Client{Transport: &http.Transport{DialContext: r.net.DialContext, DisableKeepAlives: true}}).Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	if res.StatusCode >= 400 {
		var p struct{ Type string }
		err = json.Unmarshal(data, &p)
		code = strings.TrimPrefix(p.Type, "urn:lull:problem:")
	} else if method == "POST" {
		err = json.Unmarshal(data, &o)
	}
	if err != nil {
		r.t.Errorf("%s %s: %v in %s", method, path, err, data)
	}
	if res.StatusCode == http.StatusAccepted && res.Header.Get("Location") != "/api/v1/hosts/desk/instances/web/why" {
		r.t.Errorf("202 has the Location %q", res.Header.Get("Location"))
	}
	return res.StatusCode, o, code
}

// outcomes returns the reasons of the audit entries about commands, oldest first;
// entries of requests have none.
func (r *commandRig) outcomes() (out []string) {
	r.t.Helper()
	page, err := r.two.fleet.Audit(r.t.Context(), audit.Query{By: "ada"})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range page.Entries {
		if e.By != (audit.Actor{Name: "ada", Kind: audit.KindUser}) || e.Detail == "" {
			r.t.Errorf("audit entry %+v", e)
		}
		out = append(out, map[string]string{"host_command": "asked"}[e.Action]+e.Reason)
	}
	return out
}

func withCommandRig(t *testing.T, f func(r *commandRig)) {
	synctest.Test(t, func(t *testing.T) {
		db, net := mem.New(mem.Options{}).Client(), &memnet.Network{}
		defer db.Close()
		r := &commandRig{t: t, net: net}
		var stop func()
		r.one, stop = together(t, db, net, "one")
		defer stop()
		r.two, stop = together(t, db, net, "two")
		defer stop()
		var err error
		if _, r.token, err = r.one.tokens.Create(t.Context(), access.Wanted{Name: "ada", Role: access.Operator}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		r.reports(1, true)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			for ctx.Err() == nil {
				for _, c := range r.one.hosts.Turn(ctx, "desk", nil, 20*time.Second).Commands {
					r.got = append(r.got, c)
					time.Sleep(time.Millisecond)
					if a := r.reply(c); a != nil {
						r.one.hosts.Turn(ctx, "desk", []control.HostReply{*a}, 0)
					}
				}
			}
		}()
		defer func() { cancel(); <-done }()
		synctest.Wait()
		f(r)
	})
}

func done(c control.HostCommand) *control.HostReply {
	return &control.HostReply{ID: c.ID, Done: &control.HostDone{Log: []byte("hello\n"), Instance: &control.HostInstance{ID: "i1", Name: "web", State: "paused", Runtime: "process"}}}
}

// TestCommandsOfHosts checks that a command reaches the host through either server,
// and that the audit log has each with its outcome.
func TestCommandsOfHosts(t *testing.T) {
	withCommandRig(t, func(r *commandRig) {
		t := r.t
		r.reply = done
		for _, server := range []string{"one", "two"} {
			status, o, code := r.asks(server, "POST", "web/pause?force=true", "", "")
			if status != 200 || o.Outcome != "done" || o.Instance == nil || o.Instance.State != "paused" {
				t.Errorf("pause through %s: %d %s %+v", server, status, code, o)
			}
		}
		if status, _, code := r.asks("two", "POST", "web/snooze", `{"minutes":90}`, ""); status != 200 {
			t.Errorf("snooze: %d %s", status, code)
		}
		if status, _, code := r.asks("two", "GET", "web/logs?lines=7", "", ""); status != 200 {
			t.Errorf("logs: %d %s", status, code)
		}
		if got := r.outcomes(); !slices.Equal(got, []string{"asked", "done", "asked", "done", "asked", "done", "asked", "done"}) {
			t.Errorf("the audit log has %v", got)
		}
		if len(r.got) != 4 {
			t.Fatalf("the host got %+v", r.got)
		}
		for n, want := range []control.HostCommand{{Verb: "pause", Force: true}, {Verb: "pause", Force: true}, {Verb: "snooze", Snooze: idle.Duration(90 * time.Minute)}, {Verb: "logs", Lines: 7}} {
			c := r.got[n]
			want.ID, want.Instance, want.By, want.Valid = c.ID, "i1", "ada", idle.Duration(control.HostCommandFetch)
			if c != want || c.Check() != nil {
				t.Errorf("the host got %+v, want %+v", c, want)
			}
		}
		for body, path := range map[string]string{`{"minutes":5,"until":"+2h"}`: "web/snooze", `{"until":"yesterday"}`: "web/snooze", `{"until":"+900h"}`: "web/snooze", `{"minutes":5,"x":1}`: "web/snooze", ``: "we%20b/stop"} {
			if status, _, code := r.asks("two", "POST", path, body, ""); status != 422 {
				t.Errorf("%s %s: %d %s", path, body, status, code)
			}
		}
		if len(r.got) != 4 || len(r.outcomes()) != 8 {
			t.Errorf("after invalid requests the host has %d commands, and the audit log %d entries", len(r.got), len(r.outcomes()))
		}
	})
}

// TestOneKeyOneCommand checks that requests with the same idempotency key reach the
// host as one command.
func TestOneKeyOneCommand(t *testing.T) {
	withCommandRig(t, func(r *commandRig) {
		r.reply = done
		for _, server := range []string{"two", "one", "two"} {
			if status, o, code := r.asks(server, "POST", "web/stop", "", "k1"); status != 200 || o.Outcome != "done" {
				r.t.Errorf("through %s: %d %s %+v", server, status, code, o)
			}
		}
		if len(r.got) != 1 {
			r.t.Errorf("the host got %+v", r.got)
		}
		// If a server dies with the request, the key becomes free, but the command's
		// ID stays the same.
		ctx := context.WithValue(r.t.Context(), onceKey{}, "k1")
		if a, b := commandID(ctx), commandID(ctx); a != b {
			r.t.Errorf("with a key, the IDs are %s and %s", a, b)
		}
		if a, b := commandID(r.t.Context()), commandID(r.t.Context()); a == b {
			r.t.Errorf("without a key, both IDs are %s", a)
		}
	})
}

// TestOutcomesOfCommands checks that each failure has its own code, and that an
// unknown outcome is never reported as a success.
func TestOutcomesOfCommands(t *testing.T) {
	withCommandRig(t, func(r *commandRig) {
		t := r.t
		n := 0
		is := func(what, server string, status int, code, outcome string) {
			t.Helper()
			n++
			if s, o, c := r.asks(server, "POST", "web/pause", "", ""); s != status || c != code || o.Outcome != outcome || status == 202 && o.Instance != nil {
				t.Errorf("%s: %d %s %+v, want %d %s %s", what, s, c, o, status, code, outcome)
			}
		}
		r.reply = func(control.HostCommand) *control.HostReply { return nil }
		is("no answer", "one", 202, "", "unknown")
		is("no answer, through another", "two", 202, "", "unknown")
		r.reply = func(control.HostCommand) *control.HostReply {
			go r.net.Reset("one") // server two loses the answer of server one
			return nil
		}
		is("a broken connection between servers", "two", 202, "", "unknown")
		r.reply = func(c control.HostCommand) *control.HostReply {
			return &control.HostReply{ID: c.ID, Status: 504, Code: control.HostOutcomeUnknown}
		}
		is("the host does not know", "two", 202, "", "unknown")
		for code, status := range map[string]int{control.HostRefused: 409, control.HostNotFound: 404, control.HostInvalid: 422, control.HostFailed: 503, control.HostNotCarriedOut: 503, control.HostCommandsOff: 409} {
			r.reply = func(c control.HostCommand) *control.HostReply {
				return &control.HostReply{ID: c.ID, Status: 418, Code: code}
			}
			is(code, "two", status, code, "")
		}
		r.reply = func(c control.HostCommand) *control.HostReply {
			return &control.HostReply{ID: c.ID, Status: 500, Code: "made_up"}
		}
		is("an unknown code", "two", 503, control.HostFailed, "")
		if got := r.outcomes(); len(got) != 2*n || got[1] != control.HostOutcomeUnknown || got[3] != control.HostOutcomeUnknown || got[5] != control.HostOutcomeUnknown {
			t.Errorf("the audit log has %v after %d commands", got, n)
		}
		before, taken := len(r.outcomes()), len(r.got)
		r.reports(2, false)
		is("the host accepts none", "two", 409, control.HostCommandsOff, "")
		r.reports(3, true)
		r.net.Cut("one")
		time.Sleep(time.Second)
		is("the server of the host cannot be reached", "two", 503, "host_unheard", "")
		r.net.Heal("one")
		time.Sleep(4 * time.Minute)
		is("the host is silent", "two", 503, "host_unheard", "")
		if len(r.outcomes()) != before || len(r.got) != taken {
			t.Errorf("the audit log has %d more entries, the host %d more commands", len(r.outcomes())-before, len(r.got)-taken)
		}
	})
}
