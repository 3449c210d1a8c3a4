package controller_test

import (
	"context"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"

	"lull/internal/controller"
	"lull/internal/controller/cmlconsole"
	"lull/internal/controller/ec2cloud"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/lib/memnet"
	"lull/internal/platform/ec2"
	"lull/internal/sim"
	"lull/internal/sim/virl2test"
	"lull/internal/sim/world"
	"lull/internal/store/mem"
)

// libraryRig is a fleet of one worker in the simulated cloud, through the real EC2
// and CML clients.
type libraryRig struct {
	t     *testing.T
	fleet *fleet.Fleet
	id    string
	lib   *virl2test.Client // a CML user with Cisco's client library
}

func (r *libraryRig) worker() worker.Worker {
	r.t.Helper()
	w, err := r.fleet.Worker(r.t.Context(), r.id)
	if err != nil {
		r.t.Fatal(err)
	}
	return w
}

// runs lets d pass, and fails the test if the worker is stopped in that time.
func (r *libraryRig) runs(d time.Duration, why string) {
	r.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(30 * time.Second) {
		if w := r.worker(); w.Status != power.WorkerRunning {
			r.t.Fatalf("the worker is %s while %s: %s", w.Status, why, w.PauseReason)
		}
	}
}

// await waits until the worker has a status.
func (r *libraryRig) await(status power.Worker, most time.Duration) {
	r.t.Helper()
	for end := time.Now().Add(most); r.worker().Status != status; time.Sleep(30 * time.Second) {
		if time.Now().After(end) {
			r.t.Fatalf("the worker is %s and not %s after %s", r.worker().Status, status, most)
		}
	}
}

func withLibrary(t *testing.T, timeout time.Duration, body func(*libraryRig)) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		simulated, err := sim.New(sim.Options{Scenario: world.Config{
			Regions: []world.RegionConfig{{Name: weekRegion}}, Profiles: map[string]world.Profile{"p": {}},
			Workers: []world.WorkerConfig{{Name: "h", Type: "t3.small", Profile: "p", Up: world.Duration(time.Minute)}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		var network memnet.Network
		l, err := network.Listen(":80")
		errtest.None(t, err)
		tls, err := network.Listen(":8443")
		errtest.None(t, err)
		running.Go(func() { _ = simulated.Run(ctx, sim.Listeners{API: l, CML: tls}) })
		tr := &http.Transport{DialContext: network.DialContext, DisableKeepAlives: true}
		region := ec2.New(aws.Config{Region: weekRegion, HTTPClient: &http.Client{Transport: tr},
			Credentials: credentials.NewStaticCredentialsProvider("AKIASIM", "x", "")}, "http://cloud", ec2.Limits{})
		db := mem.New(mem.Options{}).Client()
		r := &libraryRig{t: t}
		r.fleet, err = fleet.New(fleet.Options{Store: db, ID: "fleet-1", File: settings.Layer{Values: map[string]any{"discovery_import": "off",
			"worker_idle_timeout_minutes": int(timeout.Minutes()), "worker_auto_pause_snooze_minutes": 0, "worker_warn_before_minutes": 0}}})
		if err != nil {
			t.Fatal(err)
		}
		in := fleet.ImportedWorker{Name: "h", AWSRegion: weekRegion}
		in.TLSInsecure, in.AcceptedRisks = new(true), []string{worker.RiskNoElasticIP}
		simulated.World.Find("h", func(i *world.Instance, _ world.Moment) { in.EC2InstanceID = i.ID })
		anna := audit.Actor{Name: "anna", Kind: audit.KindUser}
		w, err := r.fleet.ImportWorker(ctx, anna, in)
		errtest.None(t, err)
		r.id = w.ID
		errtest.Get(r.fleet.ArmWorker(ctx, anna, w.ID, true))(t)
		consoles := cmlconsole.New(cmlconsole.Config{Fleet: r.fleet, Port: "8443", Dial: network.DialContext,
			Secret: func(sealed.Secret) (sealed.Plain, error) { return "cml", nil }})
		ctl, err := controller.New(controller.Config{Fleet: r.fleet, Server: "one",
			Clouds:   func(string, string) (controller.Cloud, error) { return ec2cloud.Region(region, nil, nil), nil },
			Consoles: consoles.Console})
		if err != nil {
			t.Fatal(err)
		}
		running.Go(func() { _ = ctl.Run(ctx) })
		<-ctl.Ready()
		r.lib = &virl2test.Client{Host: "h", Username: "dora", Password: "cml", Do: func(q *http.Request) (*http.Response, error) {
			q.URL.Scheme = "http"
			return tr.RoundTrip(q)
		}}
		body(r)
		cancel()
		running.Wait()
		consoles.Close()
		db.Close()
		synctest.Wait()
	})
}

// TestLibraryHoldsThePause checks that requests of Cisco's client library prevent a
// pause: each request that CML reports counts from its own time, and the pause comes
// when the last one is older than the timeout.
func TestLibraryHoldsThePause(t *testing.T) {
	const timeout = 30 * time.Minute
	withLibrary(t, timeout, func(r *libraryRig) {
		ctx := r.t.Context()
		do := func(what string, err error) {
			r.t.Helper()
			if err != nil {
				r.t.Fatalf("%s: %v", what, err)
			}
		}
		r.await(power.WorkerRunning, 10*time.Minute)
		r.runs(20*time.Minute, "it was just imported")
		do("log in", r.lib.Open(ctx))
		r.runs(25*time.Minute, "a user logged in within the last 30 min")
		lab, err := r.lib.CreateLab(ctx, "a lab")
		do("create a lab", err)
		do("start the lab", r.lib.Set(ctx, "start", lab.ID))
		r.runs(25*time.Minute, "a lab was started in the last 30 min")
		node := map[string]string{"lab_id": lab.ID, "id": lab.Nodes[0]}
		_, err = r.lib.Call(ctx, "stop node", node, nil)
		do("stop a node", err)
		r.runs(25*time.Minute, "a node was stopped in the last 30 min")
		_, err = r.lib.Call(ctx, "start node", node, nil)
		do("start a node", err)
		r.runs(25*time.Minute, "a node was started in the last 30 min")
		text, err := r.lib.Call(ctx, "download", map[string]string{"lab_id": lab.ID}, nil)
		do("download the lab", err)
		r.runs(25*time.Minute, "a lab was exported in the last 30 min")
		_, err = r.lib.Call(ctx, "import", nil, virl2test.Text(text.(string)))
		do("import the lab", err)
		r.runs(25*time.Minute, "a lab was imported in the last 30 min")
		do("stop the lab", r.lib.Set(ctx, "stop", lab.ID))
		last := time.Now()
		r.runs(25*time.Minute, "the lab was stopped in the last 30 min")
		r.await(power.WorkerStopped, 30*time.Minute)
		if idle := time.Since(last); idle < timeout {
			r.t.Errorf("stopped %s after the lab, timeout %s", idle, timeout)
		}
		if w := r.worker(); w.PauseReason != power.ReasonIdleTimeout {
			r.t.Errorf("stopped because of %s", w.PauseReason)
		}
	})
}
