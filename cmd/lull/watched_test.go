package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/why"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/control"
	"lull/internal/sim"
)

// daemon runs a command of lull in this process until the test ends. It returns the
// groups of says in the first line of output that matches.
func daemon(t *testing.T, says *regexp.Regexp, args ...string) []string {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	out, w := io.Pipe()
	ended, early := make(chan struct{}), false // read early only after ended is closed
	go func() {
		defer close(ended)
		code := run(ctx, args, strings.NewReader(""), w, w, os.Getenv)
		early = ctx.Err() == nil
		w.CloseWithError(fmt.Errorf("lull %s ended with %d", args[0], code))
	}()
	found, done := make(chan []string, 1), make(chan struct{})
	var said strings.Builder // read it only once done is closed
	t.Cleanup(func() {
		cancel()
		select {
		case <-done: // ended is closed first
		case <-time.After(patience):
			t.Errorf("lull %s does not end", args[0])
			return
		}
		<-ended
		if early {
			t.Errorf("lull %s ended before the test did:\n%s", args[0], said.String())
		}
	})
	go func() {
		defer close(done)
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			said.WriteString(lines.Text() + "\n")
			if m := says.FindStringSubmatch(lines.Text()); m != nil && len(found) == 0 {
				found <- m[1:]
			}
		}
	}()
	select {
	case m := <-found:
		return m
	case <-done:
		t.Fatalf("lull %s ended before it said %s:\n%s", args[0], says, said.String())
	case <-time.After(patience):
		t.Fatalf("lull %s does not say %s", args[0], says)
	}
	return nil
}

// watched is a real server next to the simulated cloud, with workers that are
// imported and armed.
type watched struct {
	t      *testing.T
	sim    string // URL
	url    string
	token  string
	client *control.Client
	ids    map[string]string // IDs of the workers, by name
	mail   *mailbox
}

func newWatched(t *testing.T) *watched {
	t.Helper()
	dir := filepath.Join("testdata", "dashboard")
	r := &watched{t: t, ids: map[string]string{}}
	at := daemon(t, regexp.MustCompile(`API on (http://\S+), CML on port (\d+)`), "sim", "--listen", "127.0.0.1:0", "--cml-port", "0", "--scenario", filepath.Join(dir, "sim.yaml"))
	r.sim = at[0]
	for k, v := range map[string]string{"AWS_ENDPOINT_URL": r.sim, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "CML_PW": "cml", "RECONCILE_INTERVAL": "1"} {
		t.Setenv(k, v)
	}
	tokens := filepath.Join(t.TempDir(), "token")
	r.url = daemon(t, regexp.MustCompile(`serving on (\S+)`), "server", "--config", filepath.Join(dir, "server.yaml"), "--data", filepath.Join(t.TempDir(), "data"),
		"--listen", "127.0.0.1:0", "--cml-port", at[1], "--admin-token-file", tokens, "--log-level", "error", "--notify-allow", "127.0.0.1")[0]
	b, err := os.ReadFile(tokens)
	if err != nil {
		t.Fatal(err)
	}
	r.token = strings.TrimSpace(string(b))
	if r.client, err = control.NewClient(r.url, r.token, nil); err != nil {
		t.Fatal(err)
	}
	r.mail = &mailbox{links: map[string]map[string]string{}}
	box := httptest.NewServer(r.mail)
	t.Cleanup(box.Close)
	if _, err := control.Write[any](t.Context(), r.client, "PATCH", "/settings", map[string]any{"notify_public_url": r.url,
		"notify_channels": map[string]any{"mail": map[string]any{"type": "webhook", "url": box.URL + "/"}}}); err != nil {
		t.Fatal(err)
	}
	r.fill()
	r.warmUp()
	return r
}

// mailbox is an HTTP server that receives warnings.
type mailbox struct {
	mu    sync.Mutex
	links map[string]map[string]string // links in the last warning about each worker, by verb
}

func (m *mailbox) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var e struct {
		Data struct {
			Worker string            `json:"worker_name"`
			Links  map[string]string `json:"links"`
		} `json:"data"`
	}
	if err := json.NewDecoder(r.Body).Decode(&e); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.Data.Links != nil {
		m.links[e.Data.Worker] = e.Data.Links
	}
}

// link waits for a warning about a worker, and returns one of its links.
func (m *mailbox) link(t *testing.T, worker, verb string) (link string) {
	t.Helper()
	eventually(t, func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		if link = m.links[worker][verb]; link == "" {
			return fmt.Errorf("no warning about %s has come", worker)
		}
		return nil
	})
	return link
}

// fill imports and arms the simulator's instances.
func (r *watched) fill() {
	r.t.Helper()
	res, err := http.Get(r.sim + "/sim/instances")
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	var all []sim.InstanceInfo
	if err := json.NewDecoder(res.Body).Decode(&all); err != nil {
		r.t.Fatal(err)
	}
	for _, i := range all {
		body := map[string]any{"name": i.Name, "aws_region": i.Region, "ec2_instance_id": i.ID, "tls_insecure": true, "owner": strings.Split(i.Name, "-")[0] + "@example.org"}
		if i.Name == "research-1" {
			body["idle_timeout_minutes"] = 7 * 24 * 60
		}
		w, err := control.Write[struct {
			ID string `json:"id"`
		}](r.t.Context(), r.client, "POST", "/workers/import",
			body)
		if err != nil {
			r.t.Fatal(err)
		}
		r.ids[i.Name] = w.ID
	}
	if _, err := control.Write[any](r.t.Context(), r.client, "POST", "/workers/arm", map[string]any{"all": true}); err != nil {
		r.t.Fatal(err)
	}
}

// hosts makes two hosts with instances report: desk, which answers until the test
// ends, and attic, which falls silent.
func (r *watched) hosts() {
	ctx, end := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	r.t.Cleanup(func() { end(); ended.Wait() })
	now := time.Now()
	tell := func(name string, every time.Duration, l ...control.HostInstance) {
		r.t.Helper()
		counts := map[string]int{}
		for n := range l {
			l[n].ID, l[n].Runtime, l[n].CreatedAt, l[n].StateSince, l[n].Enabled = fmt.Sprint("i", n), "process", now, &now, true
			counts[l[n].State]++
		}
		report := control.HostReport{Host: name, At: now, Sequence: 1, StartedAt: now, Version: version, Interval: idle.Duration(every), Counts: counts, Instances: l,
			Memory: control.HostMemory{Limit: 8 << 30}}
		report.Fit()
		if _, err := r.client.ReportHost(ctx, report); err != nil {
			r.t.Fatal(err)
		}
	}
	tell("attic", time.Second, control.HostInstance{Name: "cam", State: "running"})
	tell("desk", 15*time.Minute,
		control.HostInstance{Name: "db", State: "running", IdleFor: 3, Connections: 2, Memory: 200 << 20, Leases: []idle.Lease{{Holder: "ci", Reason: "backup", ExpiresAt: now.Add(time.Hour)}},
			Blocks: []idle.Block{{Code: idle.ConnectionOpen, Sentence: "2 connections are open."}}, Endpoints: []instance.Endpoint{{Listen: "127.0.0.1:5432", Target: "127.0.0.1:5432", Path: "direct"}}},
		control.HostInstance{Name: "web", State: "paused", StatusReason: "idle for 1m0s", LastPausedAt: &now, LastPausedBy: "idle_timeout"})
	ended.Go(func() { // desk answers questions
		turn := control.HostTurn{Answers: []control.HostReply{}, Wait: 10}
		for ctx.Err() == nil {
			q, err := r.client.HostTurn(ctx, "desk", turn)
			turn.Answers = []control.HostReply{}
			if err != nil {
				continue // the test has ended
			}
			for _, x := range q.Questions {
				a := control.HostReply{ID: x.ID, Status: http.StatusNotFound, Detail: "cannot find it"}
				if x.Instance == "db" {
					a = control.HostReply{ID: x.ID, Why: &control.HostWhy{Instance: &control.HostInstance{ID: "i0", Name: "db", State: "running", Runtime: "process"},
						Account: why.Account{Object: "i0", Name: "db", Kind: why.KindInstance, State: "running", Question: "why is it running", Answer: "2 connections are open.",
							At: time.Now(), Verdict: &idle.Verdict{At: time.Now(), Blocks: []idle.Block{{Code: idle.ConnectionOpen, Sentence: "2 connections are open."}}}}}}
				}
				a.Fit()
				turn.Answers = append(turn.Answers, a)
			}
		}
	})
}

// used simulates use of a worker, and requests a check of it.
func (r *watched) used(name string) {
	r.t.Helper()
	body := strings.NewReader(`{"category": "start_lab", "user": "alice"}`)
	res, err := http.Post(r.sim+"/sim/instances/"+name+"/events", "application/json", body)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		r.t.Fatalf("cannot use %s: %s", name, res.Status)
	}
}

func (r *watched) look(name string) {
	r.t.Helper()
	if _, err := r.client.DetectIdle(r.t.Context(), r.ids[name]); err != nil {
		r.t.Fatal(err)
	}
}

// warmUp waits until all workers run, makes some of them be in use, and requests a
// check of all.
func (r *watched) warmUp() {
	r.t.Helper()
	eventually(r.t, func() error {
		l, err := r.client.Workers(r.t.Context(), url.Values{"status": {"RUNNING"}})
		if err == nil && len(l) != len(r.ids)-1 {
			err = fmt.Errorf("%d of %d workers run", len(l), len(r.ids)-1)
		}
		return err
	})
	for _, name := range []string{"routing-1", "routing-2", "campus-1"} {
		r.used(name)
	}
	for name := range r.ids {
		if name != "classroom-2" {
			r.look(name)
		}
	}
}

// eventually repeats look until it returns no error.
func eventually(t *testing.T, look func() error) {
	t.Helper()
	within(t, patience, look)
}

// within is eventually with another timeout.
func within(t *testing.T, d time.Duration, look func() error) {
	t.Helper()
	var err error
	if !waittest.Within(d, func() bool { err = look(); return err == nil }) {
		t.Fatalf("not within %v: %v", d, err)
	}
}
