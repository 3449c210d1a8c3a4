package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/controller"
	"lull/internal/controller/cmlconsole"
	"lull/internal/controller/ec2cloud"
	"lull/internal/fleet"
	"lull/internal/fleet/settings"
	"lull/internal/lib/memnet"
	"lull/internal/platform/ec2"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/sim"
	"lull/internal/sim/world"
	"lull/internal/store/mem"
)

// cloudRig is a server wired like lull server, with the real SDK and CML client, over
// a simulated cloud on an in-memory network.
type cloudRig struct {
	t     *testing.T
	sim   *sim.Server
	fleet *fleet.Fleet
	ctl   *controller.Controller
	asks  *control.Client // as admin
	web   *http.Client    // for requests to the server
	admin string          // an admin token
	end   func()

	mu   sync.Mutex
	log  strings.Builder // the server's log
	dead map[string]bool // hosts of AWS that do not answer, such as "ec2.eu-north-1"
}

func (r *cloudRig) with(f func()) { r.mu.Lock(); defer r.mu.Unlock(); f() }

// inCloud runs body in a bubble with a fleet that has no workers yet.
func inCloud(t *testing.T, scenario world.Config, settings map[string]any, body func(r *cloudRig)) {
	t.Helper()
	for k, v := range map[string]string{"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
		"AWS_ENDPOINT_URL": "", "AWS_REGION": "", "AWS_PROFILE": ""} {
		t.Setenv(k, v)
	}
	synctest.Test(t, func(t *testing.T) {
		r := newCloudRig(t, scenario, settings)
		defer r.end()
		body(r)
	})
}

// passwords are environment variables of the server.
var passwords = map[string]string{"LAB_PW": "labs", "OLD_PW": "old"}

func newCloudRig(t *testing.T, scenario world.Config, given map[string]any) *cloudRig {
	r := &cloudRig{t: t, dead: map[string]bool{}}
	fatal := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	r.sim, err = sim.New(sim.Options{Scenario: scenario})
	fatal(err)
	var network memnet.Network
	listen := func(addr string) net.Listener {
		l, err := network.Listen(addr)
		fatal(err)
		return l
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := r.sim.Run(ctx, sim.Listeners{API: listen(":443"), CML: listen(":8443")}); err != nil {
			t.Errorf("the simulator ended with %v", err)
		}
	})
	// Connections to AWS's own hosts are made without TLS. A host in dead refuses
	// them.
	aws := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return network.DialContext(ctx, "tcp", "aws:443")
	}}
	toAWS := &http.Client{Transport: plainly(func(q *http.Request) (*http.Response, error) {
		var dead bool
		r.with(func() { dead = r.dead[strings.TrimSuffix(q.URL.Hostname(), ".amazonaws.com")] })
		if dead {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
		}
		q = q.Clone(q.Context())
		q.URL.Scheme = "http"
		return aws.RoundTrip(q)
	})}
	// A machine without a CML has no listener.
	toCML := func(ctx context.Context, nw, addr string) (net.Conn, error) {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		there := false
		r.sim.World.Locate(host, func(i *world.Instance, _ world.Moment) { there = i.Host != nil })
		if !there {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
		}
		return network.DialContext(ctx, nw, addr)
	}

	db := mem.New(mem.Options{}).Client()
	values := map[string]any{"worker_auto_pause_snooze_minutes": 0, "cml_default_password": "env:CML_PW"}
	for k, v := range given {
		values[k] = v
	}
	r.fleet, err = fleet.New(fleet.Options{Store: db, ID: "fleet-1", File: settings.Layer{Values: values}})
	fatal(err)
	log := slog.New(slog.NewTextHandler(logged{r}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	set := &ec2.Set{Accounts: map[string]ec2.Access{"": {HTTP: toAWS}}}
	cmls := cmlconsole.New(cmlconsole.Config{Fleet: r.fleet, Secret: secrets(nil, func(name string) string { return cmp.Or(passwords[name], "cml") }), Port: "8443", Dial: toCML})
	r.ctl, err = controller.New(controller.Config{Fleet: r.fleet, Server: "one", Clouds: ec2cloud.New(set, nil).Cloud, Consoles: cmls.Console, CML: cmls.Probe, Log: log})
	fatal(err)
	tokens := access.New(db)
	admin, err := tokens.First(ctx)
	fatal(err)
	api, err := server.New(server.Options{Fleet: r.fleet, Tokens: tokens, Version: "v1", Live: observed{r.ctl}, Admin: controllerAdmin{r.ctl, "all"}, Log: log,
		Regions: regionsOf(set, func() string { return r.fleet.Settings().AWSDefaultRegion }), Instances: instancesOf(set), PriceSource: pricesOf(set), CML: cmls.Probe})
	fatal(err)
	for _, f := range []func(context.Context) error{r.ctl.Run, api.Run} {
		wg.Go(func() {
			if err := f(ctx); err != nil {
				t.Errorf("it ended with %v", err)
			}
		})
	}
	<-api.Ready()
	<-r.ctl.Ready()
	web := listen("server:7070")
	srv := &http.Server{Handler: api.Handler()}
	wg.Go(func() { srv.Serve(web) })
	tr := &http.Transport{DialContext: network.DialContext}
	r.web, r.admin = &http.Client{Transport: tr}, admin
	r.asks, err = control.NewClient("http://server:7070", admin, r.web)
	fatal(err)
	r.end = func() {
		tr.CloseIdleConnections()
		srv.Close()
		cancel()
		aws.CloseIdleConnections()
		cmls.Close()
		wg.Wait()
		db.Close()
	}
	return r
}

// plainly is a function used as an http.RoundTripper.
type plainly func(*http.Request) (*http.Response, error)

func (f plainly) RoundTrip(q *http.Request) (*http.Response, error) { return f(q) }

// logged is a writer that appends to the rig's log.
type logged struct{ r *cloudRig }

func (l logged) Write(b []byte) (n int, err error) {
	l.r.with(func() { n, err = l.r.log.Write(b) })
	return n, err
}

// pass lets d pass in the bubble.
func (r *cloudRig) pass(d time.Duration) { time.Sleep(d) }

// id returns the EC2 instance ID of a machine.
func (r *cloudRig) id(name string) (id string) {
	r.sim.World.Locate(name, func(i *world.Instance, _ world.Moment) { id = i.ID })
	if id == "" {
		r.t.Fatalf("there is no machine %s", name)
	}
	return id
}

// load gives CloudWatch the CPU load of a machine for each minute of a period.
func (r *cloudRig) load(region, name string, from time.Time, length time.Duration, cpu func(from, to time.Time) float64) {
	m := world.Metric{Account: "111122223333", Region: region, Namespace: "AWS/EC2", Name: "CPUUtilization", Dimensions: world.Tags{{Key: "InstanceId", Value: r.id(name)}}}
	for t := from.Truncate(time.Minute); t.Before(from.Add(length)); t = t.Add(time.Minute) {
		if err := r.sim.World.Put(m, world.Datum{At: t, Value: cpu(t, t.Add(time.Minute))}); err != nil {
			r.t.Fatal(err)
		}
	}
}

// code returns the code of a problem; empty if err is not a problem.
func code(err error) string {
	var p interface{ Code() string }
	if errors.As(err, &p) {
		return p.Code()
	}
	if err != nil {
		return fmt.Sprintf("no problem document: %v", err)
	}
	return ""
}
