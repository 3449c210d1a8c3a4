package simtest

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/fleet/sealed"
	"lull/internal/lib/errtest"
	"lull/internal/lib/memnet"
	lullcml "lull/internal/platform/cml"
	"lull/internal/sim"
	"lull/internal/sim/virl2test"
	"lull/internal/sim/world"
)

// cmlHost is one simulated CML, with methods that return clients for it.
type cmlHost struct {
	t   *testing.T
	net *memnet.Network
}

// withCML runs f in a bubble with one simulated CML. Its administrator's
// password is "cml".
func withCML(t *testing.T, f func(context.Context, cmlHost)) {
	synctest.Test(t, func(t *testing.T) {
		s := errtest.Get(sim.New(sim.Options{Scenario: world.Config{
			Regions: []world.RegionConfig{{Name: "us-east-1"}}, Profiles: map[string]world.Profile{"p": {}}, Workers: []world.WorkerConfig{{Name: "h", Profile: "p"}},
		}}))(t)
		h := cmlHost{t, &memnet.Network{}}
		l := errtest.Get(h.net.Listen(":80"))(t)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx, sim.Listeners{API: l}) }()
		f(ctx, h)
		cancel()
		<-done
		synctest.Wait()
	})
}

// library returns a client that behaves like Cisco's library.
func (h cmlHost) library(user, password string) *virl2test.Client {
	tr := &http.Transport{DialContext: h.net.DialContext, DisableKeepAlives: true}
	return &virl2test.Client{Host: "h", Username: user, Password: password, Do: func(r *http.Request) (*http.Response, error) {
		r.URL.Scheme = "http"
		return tr.RoundTrip(r)
	}}
}

// client returns lull's own client.
func (h cmlHost) client(user, password string) *lullcml.Client {
	h.t.Helper()
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		return h.net.DialContext(ctx, network, address)
	}
	c := errtest.Get(lullcml.New(lullcml.Config{URL: "http://h", Username: user, Password: sealed.Plain(password), TLS: lullcml.TLS{Insecure: true}, Dial: dial}))(h.t)
	h.t.Cleanup(c.Close)
	return c
}

// TestLabsOfOthers checks that the running labs are unknown, not zero, for an account
// that is no administrator: CML shows such an account only its own labs.
func TestLabsOfOthers(t *testing.T) {
	withCML(t, func(ctx context.Context, h cmlHost) {
		admin := h.library("admin", "cml")
		errtest.Get(admin.Call(ctx, "create user", nil, map[string]any{"username": "lull", "password": "lullpass"}))(t)
		lab := errtest.Get(h.library("dora", "cml").CreateLab(ctx, "of another user"))(t)
		errtest.Get(admin.Call(ctx, "start lab", map[string]string{"lab_id": lab.ID}, nil))(t)
		c := h.client("lull", "lullpass")
		if n, err := c.CountLabs(ctx); !errors.Is(err, lullcml.ErrUnauthorized) {
			t.Errorf("an account that sees no lab of others counts %+v, %v", n, err)
		}
		id := errtest.Get(admin.Call(ctx, "user id", map[string]string{"username": "lull"}, nil))(t)
		errtest.Get(admin.Call(ctx, "change user", map[string]string{"user_id": id.(string)}, map[string]any{"admin": true}))(t)
		if n, err := c.CountLabs(ctx); err != nil || n != (lullcml.LabCounts{Labs: 1, Started: 1, Nodes: 2}) {
			t.Errorf("an administrator counts %+v, %v", n, err)
		}
		errtest.Get(admin.Call(ctx, "change user", map[string]string{"user_id": id.(string)}, map[string]any{"admin": false}))(t)
		if n, err := c.CountLabs(ctx); !errors.Is(err, lullcml.ErrUnauthorized) {
			t.Errorf("an account that was an administrator counts %+v, %v", n, err)
		}
		c.Close()
	})
}

// TestLicenseStates checks that lull's client reads the states of a license as the
// library does, and that it removes a token that CML repeats in its reason.
func TestLicenseStates(t *testing.T) {
	withCML(t, func(ctx context.Context, h cmlHost) {
		admin, c := h.library("admin", "cml"), h.client("admin", "cml")
		is := func(outcome lullcml.Outcome, none, seat bool) string {
			t.Helper()
			l := errtest.Get(c.Licensing(ctx))(t)
			got, why := l.Outcome()
			if got != outcome || l.None() != none || l.Seat() != seat {
				t.Errorf("%s: %s, none %v, seat %v; want %s, %v, %v", l.Registration.Status, got, l.None(), l.Seat(), outcome, none, seat)
			}
			return why
		}
		is(lullcml.OutcomePending, true, false)
		const bad = "BadRegistrationToken"
		if err := c.Register(ctx, bad, false); err != nil {
			t.Fatal(err)
		}
		is(lullcml.OutcomePending, false, true)
		time.Sleep(time.Minute)
		if why := is(lullcml.OutcomeFailed, false, false); strings.Contains(why, bad) || !strings.Contains(why, "not valid") {
			t.Errorf("reason %q", why)
		}
		for _, x := range []struct {
			name string
			body any
		}{{"reservation mode", true}, {"request a reservation", nil}} {
			errtest.Get(admin.Call(ctx, x.name, nil, x.body))(t)
		}
		is(lullcml.OutcomePending, false, false)
		if got, err := c.Deregister(ctx); err != nil || got != lullcml.NotRegistered {
			t.Errorf("deregistered a reservation: %v, %v", got, err)
		}
		errtest.Get(admin.Call(ctx, "cancel a reservation", nil, nil))(t)
		errtest.Get(admin.Call(ctx, "reservation mode", nil, false))(t)
		errtest.Get(admin.Call(ctx, "register", nil, map[string]any{"token": "abc", "reregister": false}))(t)
		if err := c.AwaitRegistration(ctx, 0); err != nil {
			t.Error(err)
		}
		is(lullcml.OutcomeDone, false, true)
		if got, err := c.Deregister(ctx); err != nil || got != lullcml.Deregistered {
			t.Errorf("%v, %v", got, err)
		}
		is(lullcml.OutcomePending, true, false)
		c.Close()
	})
}
