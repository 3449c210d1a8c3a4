package agent

import (
	"context"
	"net"
	"net/http"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"

	"lull/internal/lib/memnet"
	"lull/internal/platform/ec2"
	"lull/internal/platform/imds"
	"lull/internal/protocol/agentctl"
	"lull/internal/sim"
	"lull/internal/sim/fault"
	simworld "lull/internal/sim/world"
)

// TestAgainstSimulatedCloud checks the agent with the SDK's real clients, against the
// simulator's EC2 and metadata service.
func TestAgainstSimulatedCloud(t *testing.T) {
	for _, tt := range []struct {
		name     string
		worker   simworld.WorkerConfig
		faults   []fault.Rule
		state    string
		phase    string
		alarm    string
		hibernat bool
	}{
		{name: "hibernate", worker: simworld.WorkerConfig{Hibernation: true, TagsInMetadata: true}, state: "stopped", phase: phaseAccepted, hibernat: true},
		{name: "not launched for hibernation", worker: simworld.WorkerConfig{TagsInMetadata: true}, state: "stopped", phase: phaseAccepted},
		{name: "tags by DescribeTags", worker: simworld.WorkerConfig{Hibernation: true}, state: "stopped", phase: phaseAccepted, hibernat: true},
		{name: "metadata answers 401", worker: simworld.WorkerConfig{TagsInMetadata: true}, faults: []fault.Rule{{Service: "imds", Kind: fault.Error, Status: 401}}, state: "stopped", phase: phaseAccepted},
		{name: "metadata answers 403", worker: simworld.WorkerConfig{TagsInMetadata: true}, faults: []fault.Rule{{Service: "imds", Kind: fault.Error, Status: 403}}, state: "stopped", phase: phaseAccepted},
		{name: "metadata answers 503", worker: simworld.WorkerConfig{TagsInMetadata: true}, faults: []fault.Rule{{Service: "imds", Kind: fault.Error, Status: 503}}, state: "stopped", phase: phaseAccepted},
		{name: "metadata hangs", worker: simworld.WorkerConfig{TagsInMetadata: true}, faults: []fault.Rule{{Service: "imds", Kind: fault.Hang}}, state: "stopped", phase: phaseAccepted},
		{name: "DescribeTags is throttled for a while", faults: []fault.Rule{
			{Service: "ec2", Action: "DescribeTags", Kind: fault.Error, Code: "RequestLimitExceeded", Status: 503, Count: 2}}, state: "stopped", phase: phaseAccepted},
		{name: "metadata and DescribeTags fail", worker: simworld.WorkerConfig{TagsInMetadata: true}, faults: []fault.Rule{
			{Service: "imds", Kind: fault.Error, Status: 503}, {Service: "ec2", Action: "DescribeTags", Kind: fault.Error, Code: "RequestLimitExceeded"}},
			state: "running", alarm: "config_unreadable"},
		{name: "stop is denied", worker: simworld.WorkerConfig{TagsInMetadata: true}, faults: []fault.Rule{
			{Service: "ec2", Action: "StopInstances", Kind: fault.Error, Code: "UnauthorizedOperation", Status: 403}}, state: "running", phase: phaseFailed, alarm: "action_failed"},
		{name: "stop is throttled", worker: simworld.WorkerConfig{TagsInMetadata: true}, faults: []fault.Rule{
			{Service: "ec2", Action: "StopInstances", Kind: fault.Error, Code: "RequestLimitExceeded", Status: 503, Count: 2}}, state: "stopped", phase: phaseAccepted},
		{name: "stop protection", worker: simworld.WorkerConfig{TagsInMetadata: true, NoStop: true}, state: "running", phase: phaseFailed, alarm: "action_failed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tt.worker.Name, tt.worker.Region = "m", "us-east-1"
				tt.worker.Image = "ami-0000000000000d012"
				tt.worker.Tags = map[string]string{"lull:idle-timeout": "10m", "lull:hibernate-on-idle": "true"}
				s, err := sim.New(sim.Options{Metadata: "m", Scenario: simworld.Config{
					Regions: []simworld.RegionConfig{{Name: "us-east-1"}}, Workers: []simworld.WorkerConfig{tt.worker}, Faults: tt.faults}})
				if err != nil {
					t.Fatal(err)
				}
				client := serveInMemory(t, s.Handler())
				cloud := EC2{ID: idOf(t, s, "m"), Client: ec2.New(aws.Config{Region: "us-east-1", HTTPClient: client,
					Credentials: credentials.NewStaticCredentialsProvider("AKIASIM", "secret", "")}, "http://cloud", ec2.Limits{})}
				meta := imds.New(imds.Options{Endpoint: "http://127.0.0.1", HTTP: client})
				w := newWorld()
				a, err := New(Options{InstanceID: cloud.ID, BootID: "b", Cheap: w, Tags: []TagSource{meta, cloud}, Cloud: cloud,
					Disk: w, Journal: &MemoryJournal{}, Clocks: w.clocks, Own: w.own})
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- a.Run(ctx) }()
				<-a.Ready()
				time.Sleep(13 * time.Minute)
				synctest.Wait()
				st := mustStatus(t, a)
				checkSim(t, s, st, cloud.ID, tt.state, tt.phase, tt.alarm, tt.hibernat)
				cancel()
				<-ended
				client.CloseIdleConnections()
			})
		})
	}
}

func checkSim(t *testing.T, s *sim.Server, st agentctl.Status, id, state, phase, alarm string, hibernated bool) {
	t.Helper()
	s.World.Locate(id, func(i *simworld.Instance, _ simworld.Moment) {
		if string(i.State) != state || i.Hibernated != hibernated {
			t.Errorf("instance is %s, hibernated %t; want %s, %t; blocks %v, last %+v", i.State, i.Hibernated, state, hibernated, st.Verdict.Blocks, st.Last)
		}
		status, _ := i.Tags.Get("lull:idle-status")
		if action, _ := i.Tags.Get("lull:idle-action"); phase == phaseAccepted && (status != "idle" || action == "") {
			t.Errorf("tags %v", i.Tags)
		}
	})
	if phase != "" && (st.Last == nil || st.Last.Phase != phase) {
		t.Errorf("last action %+v, want %s", st.Last, phase)
	}
	if alarm != "" && !slices.ContainsFunc(st.Alarms, func(x agentctl.Alarm) bool { return x.Code == alarm }) {
		t.Errorf("alarms %v, want %s", st.Alarms, alarm)
	}
}

func idOf(t *testing.T, s *sim.Server, name string) (id string) {
	t.Helper()
	s.World.Locate(name, func(i *simworld.Instance, _ simworld.Moment) { id = i.ID })
	if id == "" {
		t.Fatalf("no instance %s", name)
	}
	return id
}

// serveInMemory serves h until the test ends, and returns a client that reaches it at
// any address.
func serveInMemory(t *testing.T, h http.Handler) *http.Client {
	t.Helper()
	network := &memnet.Network{}
	l, err := network.Listen(":80")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h}
	go srv.Serve(l)
	t.Cleanup(func() { srv.Close() })
	return &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return network.DialContext(ctx, "tcp", "127.0.0.1:80")
	}}}
}
