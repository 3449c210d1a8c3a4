package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/fleet"
	"lull/internal/link/control"
	"lull/internal/power"
	"lull/internal/sim"
)

// kills is how many times the server is killed: LULL_SERVER_KILLS, or 3.
func kills(t *testing.T) int {
	n := 3
	if s := os.Getenv("LULL_SERVER_KILLS"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil || n < 1 {
			t.Fatalf("LULL_SERVER_KILLS=%q is no count", s)
		}
	}
	return n
}

// region is a server process that can be killed, and the simulated cloud that
// outlives it.
type region struct {
	t         *testing.T
	sim       string // URL
	dir, port string
	cml       string
	token     string
	client    *control.Client
	cmd       *exec.Cmd
	log       *os.File

	mu      sync.Mutex
	created map[string]string           // name to idempotency key, as long as no answer came
	known   map[string]bool             // names whose creation was answered
	floors  map[string]map[string]int64 // by worker: counters that were seen
}

// TestServerSurvivesKills kills the server with SIGKILL at random instants
// while workers are created and moved, and starts it again. In the end nothing
// was launched twice, no worker is stuck, no counter went back, and every call
// with an idempotency key has had its effect once.
func TestServerSurvivesKills(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 3))
	r := newRegion(t)
	n := kills(t)
	for round := range n {
		r.start()
		live := time.Duration(rng.Int64N(int64(24 * time.Second)))
		r.storm(rng, round, live)
		r.kill()
	}
	r.start()
	r.finish()
	l := r.settle()
	r.verify(l)
	t.Logf("%d kills, %d workers", n, len(l))
	r.kill()
}

func newRegion(t *testing.T) *region {
	cfg, err := sim.ParseScenario([]byte("speed: 30\nregions: [{name: us-east-1}]\nprofiles: {quiet: {labs: 1}}\nlaunched_profile: quiet\nworkers: [{name: other, type: m5.large, profile: quiet}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	world, err := sim.New(sim.Options{Scenario: cfg})
	if err != nil {
		t.Fatal(err)
	}
	api, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cml, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- world.Run(ctx, sim.Listeners{API: api, CML: sim.LoopbackOnly(cml)}) }()
	r := &region{t: t, sim: "http://" + api.Addr().String(), dir: t.TempDir(), port: freePort(t), cml: strconv.Itoa(cml.Addr().(*net.TCPAddr).Port),
		created: map[string]string{}, known: map[string]bool{}, floors: map[string]map[string]int64{}}
	t.Cleanup(func() {
		if r.cmd != nil {
			r.kill()
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the simulator ended with %v", err)
		}
	})
	config := "aws_region_configs:\n  us-east-1: {security_group_ids: [sg-0000000a], subnet_id: subnet-000000a0}\nworker_warn_before_minutes: 0\nreconcile_interval: 1\nidle_detection_interval: 10\ncml_default_password: env:CML_PW\n"
	if err := os.WriteFile(filepath.Join(r.dir, "s.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return r
}

// start runs the server and waits until it answers.
func (r *region) start() {
	r.t.Helper()
	path, err := exec.LookPath("lull")
	if err != nil {
		r.t.Fatal(err)
	}
	if r.log, err = os.OpenFile(filepath.Join(r.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		r.t.Fatal(err)
	}
	token := filepath.Join(r.dir, "token")
	r.cmd = exec.Command(path, "server", "--data", filepath.Join(r.dir, "data"), "--listen", "127.0.0.1:"+r.port, "--config", filepath.Join(r.dir, "s.yaml"),
		"--cml-port", r.cml, "--admin-token-file", token, "--log-level", "warn")
	r.cmd.Env = append(os.Environ(), "AWS_ENDPOINT_URL="+r.sim, "AWS_ACCESS_KEY_ID=test", "AWS_SECRET_ACCESS_KEY=test", "CML_PW=cml")
	r.cmd.Stdout, r.cmd.Stderr = r.log, r.log
	if err := r.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.until("the server is ready", time.Minute, func() bool {
		if r.token == "" {
			b, err := os.ReadFile(token)
			if err != nil {
				return false
			}
			r.token = strings.TrimSpace(string(b))
		}
		if r.client, err = control.NewClient("http://127.0.0.1:"+r.port, r.token, nil); err != nil {
			r.t.Fatal(err)
		}
		_, err := control.Read[control.Session](r.t.Context(), r.client, "/session")
		return err == nil
	})
	body := control.TemplateBody{InstanceType: "m5.large", AMINameFilter: "cisco-cml2.9*"}
	if _, err := control.Write[fleet.Template](r.t.Context(), r.client, "PUT", "/templates/small", body); err != nil {
		r.t.Fatal(err)
	}
}

func (r *region) kill() {
	r.t.Helper()
	if err := r.cmd.Process.Kill(); err != nil {
		r.t.Errorf("cannot kill the server: %v", err)
	}
	_ = r.cmd.Wait() // it was killed: that is its outcome
	if err := r.log.Close(); err != nil {
		r.t.Error(err)
	}
	r.cmd = nil
}

// until waits for a condition.
func (r *region) until(what string, within time.Duration, is func() bool) {
	r.t.Helper()
	for end := time.Now().Add(within); !is(); pause() {
		if time.Now().After(end) {
			b, _ := os.ReadFile(filepath.Join(r.dir, "log"))
			r.t.Fatalf("not within %s: %s\n%s", within, what, b[max(0, len(b)-6000):])
		}
	}
}

// storm asks for things from several sides until the time is over.
func (r *region) storm(rng *rand.Rand, round int, live time.Duration) {
	ctx, cancel := context.WithTimeout(r.t.Context(), live)
	defer cancel()
	var wg sync.WaitGroup
	for k := range 3 {
		own := rand.New(rand.NewPCG(rng.Uint64(), 5))
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if i < 2 {
					r.create(ctx, fmt.Sprintf("w-%d-%d-%d", round, k, i), fmt.Sprintf("key-%d-%d-%d", round, k, i))
					continue
				}
				r.move(ctx, own)
				if control.Pause(ctx, time.Duration(own.Int64N(int64(500*time.Millisecond)))) != nil {
					return
				}
			}
		})
	}
	wg.Wait()
}

// create asks for a worker and notes the key while no answer came.
func (r *region) create(ctx context.Context, name, key string) {
	r.mu.Lock()
	r.created[name] = key
	r.mu.Unlock()
	body, err := json.Marshal(map[string]any{"name": name, "template_name": "small", "tls_insecure": true, "accepted_risks": []string{"no_elastic_ip"}})
	if err != nil {
		r.t.Error(err)
		return
	}
	req, err := http.NewRequestWithContext(ctx, "POST", "http://127.0.0.1:"+r.port+"/api/v1/workers", bytes.NewReader(body))
	if err != nil {
		r.t.Error(err)
		return
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+r.token)
	req.Header.Set("Idempotency-Key", key)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return // killed, or out of time: asked again later with the same key
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	if err != nil {
		return
	}
	if res.StatusCode == http.StatusAccepted {
		r.mu.Lock()
		delete(r.created, name)
		r.known[name] = true
		r.mu.Unlock()
		return
	}
	// 409: the claim of the killed server has not ended yet.
	if res.StatusCode != http.StatusConflict && res.StatusCode < 500 {
		r.t.Errorf("create %s: %d %s", name, res.StatusCode, answer)
	}
}

// move does something to some worker, and looks at the counters of all.
func (r *region) move(ctx context.Context, rng *rand.Rand) {
	l, err := r.client.Workers(ctx, nil)
	if err != nil || len(l) == 0 {
		return
	}
	r.look(l)
	w := l[rng.IntN(len(l))]
	verbs := []string{"pause", "resume", "pause", "resume", "drain", "cancel-drain", "stop", "start", "idle-detection/disable", "idle-detection/enable", "terminate"}
	verb := verbs[rng.IntN(len(verbs))]
	if verb == "terminate" && rng.IntN(4) > 0 {
		verb = "resume"
	}
	_, _, err = r.client.Do(ctx, w.ID, verb, nil)
	if p, refused := errors.AsType[*control.Problem](err); refused && p.Status != http.StatusConflict && p.Status < 500 {
		r.t.Errorf("%s %s: %v", verb, w.Name, err)
	}
}

// look holds every counter to what was seen of it before.
func (r *region) look(l []fleet.Worker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range l {
		now := map[string]int64{"auto_pause_count": w.AutoPauseCount, "manual_pause_count": w.ManualPauseCount, "auto_resume_count": w.AutoResumeCount,
			"manual_resume_count": w.ManualResumeCount, "external_pause_count": w.ExternalPauseCount, "external_resume_count": w.ExternalResumeCount}
		was := r.floors[w.ID]
		if was == nil {
			r.floors[w.ID] = now
			continue
		}
		for name, v := range now {
			// Two lookers may pass each other: the older answer is no fault.
			if v > was[name] {
				was[name] = v
			}
		}
	}
}

// finish asks again for every worker whose creation was not answered.
func (r *region) finish() {
	r.until("every creation is answered", 2*time.Minute, func() bool {
		r.mu.Lock()
		left := map[string]string{}
		for name, key := range r.created {
			left[name] = key
		}
		r.mu.Unlock()
		for name, key := range left {
			r.create(r.t.Context(), name, key)
		}
		return len(left) == 0
	})
}

// settle waits until every worker is what it is wanted to be.
func (r *region) settle() (l []fleet.Worker) {
	var open []string
	defer func() {
		if r.t.Failed() {
			r.t.Log("not settled:", open)
		}
	}()
	r.until("every worker is at rest", 4*time.Minute, func() bool {
		var err error
		if l, err = control.All[fleet.Worker](r.t.Context(), r.client, "/api/v1/workers", map[string][]string{"terminated": {"true"}}); err != nil {
			return false
		}
		open = nil
		for _, w := range l {
			if w.Status != w.DesiredStatus || w.Intent != nil || power.WorkerTable.IsTransitional(w.Status) {
				open = append(open, fmt.Sprintf("%s is %s, wanted %s: %s", w.Name, w.Status, w.DesiredStatus, w.StatusReason))
			}
		}
		return len(open) == 0
	})
	return l
}

// verify compares the records with the world.
func (r *region) verify(l []fleet.Worker) {
	byName := map[string][]fleet.Worker{}
	for _, w := range l {
		byName[w.Name] = append(byName[w.Name], w)
	}
	for name := range r.known {
		if n := len(byName[name]); n != 1 {
			r.t.Errorf("worker %s was asked for once with one key, and there are %d", name, n)
		}
	}
	now := map[string]map[string]int64{}
	for _, w := range l {
		now[w.ID] = map[string]int64{"auto_pause_count": w.AutoPauseCount, "manual_pause_count": w.ManualPauseCount, "auto_resume_count": w.AutoResumeCount,
			"manual_resume_count": w.ManualResumeCount, "external_pause_count": w.ExternalPauseCount, "external_resume_count": w.ExternalResumeCount}
		if w.ExternalPauseCount+w.ExternalResumeCount > 0 {
			r.t.Errorf("%s: what lull did itself was taken for external: %d pauses, %d resumes", w.Name, w.ExternalPauseCount, w.ExternalResumeCount)
		}
	}
	for id, was := range r.floors {
		for name, v := range was {
			if now[id][name] < v {
				r.t.Errorf("%s of %s was %d and is %d", name, id, v, now[id][name])
			}
		}
	}
	r.instances(byName)
}

// instances are those of the simulator: each worker has one, in the state
// that its record says, and there is none without a worker.
func (r *region) instances(byName map[string][]fleet.Worker) {
	res, err := http.Get(r.sim + "/sim/instances")
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	var all []sim.InstanceInfo
	if err := json.NewDecoder(res.Body).Decode(&all); err != nil {
		r.t.Fatal(err)
	}
	have, owner := map[string]sim.InstanceInfo{}, map[string]string{}
	for _, i := range all {
		if i.Name != "other" {
			have[i.ID] = i
		}
	}
	want := map[power.Worker]string{power.WorkerRunning: "running", power.WorkerStopped: "stopped", power.WorkerTerminated: "terminated"}
	for name, l := range byName {
		w := l[0]
		i, there := have[w.EC2InstanceID]
		switch {
		case w.EC2InstanceID == "" && w.Status == power.WorkerTerminated: // ended before it was launched
		case !there || string(i.State) != want[w.Status]:
			r.t.Errorf("%s is %s with %q, and the cloud has %q", name, w.Status, w.EC2InstanceID, i.State)
		case owner[i.ID] != "":
			r.t.Errorf("%s and %s have one instance, %s", name, owner[i.ID], i.ID)
		}
		owner[w.EC2InstanceID] = name
	}
	for id := range have {
		if owner[id] == "" {
			r.t.Errorf("instance %s has no worker: it was launched twice or forgotten", id)
		}
	}
	if len(have) == 0 {
		r.t.Error("nothing was launched: the test shows nothing")
	}
}
