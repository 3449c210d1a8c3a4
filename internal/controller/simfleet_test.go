package controller_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/credentials"

	"lull/internal/controller"
	"lull/internal/controller/cmlconsole"
	"lull/internal/controller/ec2cloud"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/memnet"
	"lull/internal/platform/cml"
	"lull/internal/platform/ec2"
	"lull/internal/sim"
	simworld "lull/internal/sim/world"
	"lull/internal/store/mem"
)

const simRegion = "us-east-1"

// simFleet is a fleet in a bubble. Its controller uses the same adapters as lull
// server: the AWS SDK and the CML client speak HTTP to the simulator, through a
// handler of the test.
type simFleet struct {
	t     *testing.T
	sim   *sim.Server
	db    *mem.DB
	fleet *fleet.Fleet
	c     *controller.Controller
	http  *http.Client
	file  map[string]any
	run   int
	end   func()
	kill  func()
}

// newSimFleet makes an empty fleet over the simulated scenario. All requests pass
// through front. Call start to run the controller. It must be called in a bubble,
// with AWS_ENDPOINT_URL=http://cloud.
func newSimFleet(t *testing.T, scenario simworld.Config, set map[string]any, front func(w http.ResponseWriter, r *http.Request, next http.Handler)) *simFleet {
	t.Helper()
	s, err := sim.New(sim.Options{Scenario: scenario})
	if err != nil {
		t.Fatal(err)
	}
	var network memnet.Network
	l, err := network.Listen(":80")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	srv := &http.Server{BaseContext: func(net.Listener) context.Context { return ctx }, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		front(w, r, s.Handler())
	})}
	go srv.Serve(l)
	f := &simFleet{t: t, sim: s, db: mem.New(mem.Options{}), file: set, end: func() {}}
	f.http = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return network.DialContext(ctx, "tcp", "cloud:80")
	}}}
	t.Cleanup(func() {
		f.end()
		cancel()
		f.http.CloseIdleConnections()
		srv.Close()
	})
	mine := f.db.Client()
	t.Cleanup(mine.Close)
	if f.fleet, err = fleet.New(fleet.Options{Store: mine, ID: "fleet-1", File: settings.Layer{Values: set}}); err != nil {
		t.Fatal(err)
	}
	return f
}

// start runs a controller under a new server name.
func (f *simFleet) start() {
	f.t.Helper()
	client := f.db.Client()
	fl, err := fleet.New(fleet.Options{Store: client, ID: "fleet-1", File: settings.Layer{Values: f.file}})
	if err != nil {
		f.t.Fatal(err)
	}
	aws := ec2cloud.New(&ec2.Set{Accounts: map[string]ec2.Access{"": {
		HTTP: f.http, Credentials: credentials.NewStaticCredentialsProvider("AKIASIM", "secret", "")}}}, nil)
	var mu sync.Mutex
	consoles := map[string]controller.Console{}
	f.run++
	f.c, err = controller.New(controller.Config{
		Fleet: fl, Server: "server-" + string(rune('a'+f.run)), Clouds: aws.Cloud, Log: slog.New(slog.NewTextHandler(simLog{f.t}, nil)),
		Consoles: func(w worker.Worker) (controller.Console, error) {
			made := cml.Config{URL: "http://" + w.PrivateIP, Username: "admin", Password: "cml", TLS: cml.TLS{Insecure: true}, HTTP: f.http}
			mu.Lock()
			defer mu.Unlock()
			if old := consoles[made.URL]; old != nil {
				return old, nil
			}
			c, err := cmlconsole.Open(fl, made)
			if err == nil {
				consoles[made.URL] = c
			}
			return c, err
		},
	})
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	c := f.c
	go func() { done <- c.Run(ctx) }()
	f.end = func() {
		cancel()
		if err := <-done; err != nil {
			f.t.Errorf("Run: %v", err)
		}
		client.Close()
		f.end = func() {}
	}
	f.kill = func() { // without a shutdown: its store is cut off first
		client.Close()
		cancel()
		<-done
		f.end = func() {}
	}
}

// adopt imports a simulated instance as a worker.
func (f *simFleet) adopt(name string, p worker.Profile) worker.Worker {
	f.t.Helper()
	var id string
	if !f.sim.World.Locate(name, func(i *simworld.Instance, _ simworld.Moment) { id = i.ID }) {
		f.t.Fatalf("the simulator has no instance %s", name)
	}
	w, err := f.fleet.ImportWorker(f.t.Context(), operator, fleet.ImportedWorker{Name: name, AWSRegion: simRegion, EC2InstanceID: id})
	if err == nil {
		w, err = f.fleet.UpdateWorker(f.t.Context(), operator, w.ID, 0, p)
	}
	if err == nil {
		w, err = f.fleet.ArmWorker(f.t.Context(), operator, w.ID, true)
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return w
}

func (f *simFleet) worker(id string) worker.Worker {
	f.t.Helper()
	w, err := f.fleet.Worker(f.t.Context(), id)
	if err != nil {
		f.t.Fatal(err)
	}
	return w
}

var operator = audit.Actor{Name: "ada", Kind: audit.KindUser}

// simLog is the controller's log, shown by go test -v.
type simLog struct{ t *testing.T }

func (l simLog) Write(b []byte) (int, error) {
	if testing.Verbose() {
		l.t.Logf("%s %s", time.Now().Format(time.TimeOnly), bytes.TrimSpace(b))
	}
	return len(b), nil
}

// formOf reads a request of the query protocol and leaves its body readable.
func formOf(r *http.Request) map[string][]string {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return nil
	}
	r.Body = io.NopCloser(bytes.NewReader(b))
	q := r.Clone(r.Context())
	q.Body = io.NopCloser(bytes.NewReader(b))
	if q.ParseForm() != nil {
		return nil
	}
	return q.PostForm
}
