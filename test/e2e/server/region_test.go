package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
	"lull/internal/lib/errtest"
	"lull/internal/lib/httpx"
	"lull/internal/lib/programtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/control"
	"lull/internal/sim"
)

// region is a number of server processes on one store, the simulated cloud, which
// outlives them, and the requests that were made to them.
type region struct {
	t       *testing.T
	sim     string // URL
	dir     string
	cml     string // port
	token   string
	http    *http.Client // client for requests to the servers; nil means http.DefaultClient
	servers []*serverProc

	mu     sync.Mutex
	asked  map[string]bool             // names whose creation was not answered yet
	known  map[string]bool             // names whose creation was answered
	floors map[string]map[string]int64 // by worker: the highest counters that were seen
}

// serverProc is one lull server in its own process. Its fields, except at, belong
// to the test's goroutine.
type serverProc struct {
	r    *region
	name string
	args []string
	cmd  *exec.Cmd
	done chan struct{} // closed when cmd has ended
	log  *os.File
	at   atomic.Pointer[endpoint] // nil while the server is down
}

// endpoint is the address of a running server.
type endpoint struct {
	*control.Client
	url string
}

// newRegion starts the simulated cloud. settings are the common settings of all
// servers.
func newRegion(t *testing.T, settings string) *region {
	// Terminated workers stay listed until the end of the test, however long it
	// takes.
	cfg, err := sim.ParseScenario([]byte("speed: 30\ntiming: {terminated_visible: 10000h}\nregions: [{name: us-east-1}]\nprofiles: {quiet: {labs: 1}}\nlaunched_profile: quiet\nworkers: [{name: other, type: m5.large, profile: quiet}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	world, err := sim.New(sim.Options{Scenario: cfg})
	if err != nil {
		t.Fatal(err)
	}
	api, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	cml, err := net.Listen("tcp", "0.0.0.0:0")
	errtest.None(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- world.Run(ctx, sim.Listeners{API: api, CML: sim.LoopbackOnly(cml)}) }()
	r := &region{t: t, sim: "http://" + api.Addr().String(), dir: t.TempDir(), cml: strconv.Itoa(cml.Addr().(*net.TCPAddr).Port),
		asked: map[string]bool{}, known: map[string]bool{}, floors: map[string]map[string]int64{}}
	t.Cleanup(func() {
		for _, p := range r.servers {
			p.kill()
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the simulator ended with %v", err)
		}
	})
	config := "aws_region_configs:\n  us-east-1: {security_group_ids: [sg-0000000a], subnet_id: subnet-000000a0}\nworker_warn_before_minutes: 0\nreconcile_interval: 1\ncml_default_password: env:CML_PW\n" + settings
	errtest.None(t, os.WriteFile(filepath.Join(r.dir, "s.yaml"), []byte(config), 0o600))
	return r
}

// add returns a server that is not started yet. cloud is the URL of its EC2.
func (r *region) add(name, cloud string, args ...string) *serverProc {
	p := &serverProc{r: r, name: name, args: append([]string{"server", "--listen", "127.0.0.1:0", "--config", filepath.Join(r.dir, "s.yaml"),
		"--cml-port", r.cml, "--log-level", "warn", "--aws-write-rate", "200", "--aws-read-rate", "200"}, args...)}
	p.args = append(p.args, "cloud="+cloud)
	r.servers = append(r.servers, p)
	return p
}

// start runs the server and waits until it answers.
func (p *serverProc) start() {
	t := p.r.t
	t.Helper()
	path := programtest.Build(t, "lull/cmd/lull")
	var err error
	out := filepath.Join(p.r.dir, p.name+".log")
	if p.log, err = os.OpenFile(out, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600); err != nil {
		t.Fatal(err)
	}
	var from int64 // offset of the present process's output
	run := func() {
		if from, err = p.log.Seek(0, io.SeekEnd); err != nil {
			t.Fatal(err)
		}
		last := len(p.args) - 1
		cmd, done := exec.Command(path, p.args[:last]...), make(chan struct{})
		cmd.Env = append(os.Environ(), "AWS_ENDPOINT_URL="+strings.TrimPrefix(p.args[last], "cloud="), "AWS_ACCESS_KEY_ID=test", "AWS_SECRET_ACCESS_KEY=test", "CML_PW=cml")
		cmd.Stdout, cmd.Stderr = p.log, p.log
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		errtest.None(t, cmd.Start())
		p.cmd, p.done = cmd, done
		go func() {
			_ = cmd.Wait() // returns an error if it was killed
			close(done)
		}()
	}
	run()
	p.r.until(p.name+" is ready", 2*time.Minute, func() bool {
		b, err := os.ReadFile(out)
		if err != nil {
			return false
		}
		said := string(b[from:])
		if _, token, ok := line(said, "admin token (shown once): "); ok {
			p.r.token = token
		}
		select {
		case <-p.done: // a server ends without its store; start it again, as systemd would
			run()
			return false
		default:
		}
		_, url, ok := line(said, "serving on ")
		if !ok || p.r.token == "" {
			return false
		}
		client, err := control.NewClient(url, p.r.token, p.r.http)
		errtest.None(t, err)
		if _, err := control.Read[control.Session](t.Context(), client, "/session"); err != nil {
			return false
		}
		p.at.Store(&endpoint{client, url})
		return true
	})
}

// line returns the text before a prefix, and the text after it up to the end of
// the line. ok is false while the line is incomplete.
func line(text, prefix string) (before, rest string, ok bool) {
	before, rest, ok = strings.Cut(text, prefix)
	if !ok {
		return "", "", false
	}
	rest, _, ok = strings.Cut(rest, "\n")
	return before, rest, ok
}

// kill kills the server with SIGKILL. It does nothing if the server is down.
func (p *serverProc) kill() {
	if p.cmd == nil {
		return
	}
	p.at.Store(nil)
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.r.t.Errorf("cannot kill %s: %v", p.name, err)
	}
	<-p.done
	if err := p.log.Close(); err != nil {
		p.r.t.Error(err)
	}
	p.cmd = nil
}

// signal sends a signal to the server.
func (p *serverProc) signal(s syscall.Signal) {
	if err := p.cmd.Process.Signal(s); err != nil {
		p.r.t.Errorf("cannot send %v to %s: %v", s, p.name, err)
	}
}

// template creates the template from which all workers are launched.
func (r *region) template() {
	body := control.TemplateBody{InstanceType: "m5.large", AMINameFilter: "cisco-cml2.9*"}
	if _, err := control.Write[launch.Template](r.t.Context(), r.any(nil).Client, "PUT", "/templates/small", body); err != nil {
		r.t.Fatal(err)
	}
}

// any returns a random server that is up; nil if none is.
func (r *region) any(rng *rand.Rand) *endpoint {
	var up []*endpoint
	for _, p := range r.servers {
		if c := p.at.Load(); c != nil {
			up = append(up, c)
		}
	}
	switch {
	case len(up) == 0:
		return nil
	case rng == nil:
		return up[0]
	}
	return up[rng.IntN(len(up))]
}

// until waits for a condition.
func (r *region) until(what string, within time.Duration, is func() bool) {
	r.t.Helper()
	if !waittest.Within(within, is) {
		for _, p := range r.servers {
			if b, err := os.ReadFile(filepath.Join(r.dir, p.name+".log")); err == nil {
				r.t.Logf("%s:\n%s", p.name, b[max(0, len(b)-4000):])
			}
		}
		r.t.Fatalf("not within %s: %s", within, what)
	}
}

// storm requests workers with these names, and operations on them, from several
// goroutines for the duration live.
func (r *region) storm(rng *rand.Rand, names []string, live time.Duration) {
	ctx, cancel := context.WithTimeout(r.t.Context(), live)
	defer cancel()
	var wg sync.WaitGroup
	todo := make(chan string, len(names))
	for _, name := range names {
		todo <- name
		r.asked[name] = true
	}
	for k := range 6 {
		own := rand.New(rand.NewPCG(rng.Uint64(), 5))
		wg.Go(func() {
			for ctx.Err() == nil {
				if k < 4 {
					select {
					case name := <-todo:
						r.create(ctx, own, name)
						continue
					default:
					}
				}
				r.move(ctx, own)
				if delay.For(ctx, time.Duration(own.Int64N(int64(300*time.Millisecond)))) != nil {
					return
				}
			}
		})
	}
	wg.Wait()
}

// create requests a worker, with the same idempotency key each time it is called
// for a name.
func (r *region) create(ctx context.Context, rng *rand.Rand, name string) {
	to := r.any(rng)
	if to == nil {
		return
	}
	body, err := json.Marshal(map[string]any{"name": name, "template_name": "small", "tls_insecure": true, "accepted_risks": []string{"no_elastic_ip"}})
	if err != nil {
		r.t.Error(err)
		return
	}
	req, err := http.NewRequestWithContext(ctx, "POST", to.url+"/api/v1/workers", bytes.NewReader(body))
	if err != nil {
		r.t.Error(err)
		return
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+r.token)
	req.Header.Set("Idempotency-Key", "key-"+name)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return // killed, or out of time; the request is repeated with the same key
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(res.Body)
	if err != nil {
		return
	}
	if res.StatusCode == http.StatusAccepted || res.StatusCode == http.StatusOK { // 200: an earlier request created it, and it is up
		r.mu.Lock()
		delete(r.asked, name)
		r.known[name] = true
		r.mu.Unlock()
		return
	}
	// 409: the killed server's claim of the key has not expired yet.
	if res.StatusCode != http.StatusConflict && res.StatusCode < 500 {
		r.t.Errorf("create %s: %d %s", name, res.StatusCode, answer)
	}
}

// move requests a random operation on a random worker, and checks the counters of
// all workers.
func (r *region) move(ctx context.Context, rng *rand.Rand) {
	to := r.any(rng)
	if to == nil {
		return
	}
	page, err := control.Read[control.List[worker.Worker]](ctx, to.Client, fmt.Sprintf("/workers?limit=20&after=w-%016x", rng.Uint64()))
	if err != nil || len(page.Items) == 0 {
		return
	}
	r.look(page.Items)
	w := page.Items[rng.IntN(len(page.Items))]
	verbs := []string{"pause", "resume", "pause", "resume", "drain", "cancel-drain", "stop", "start", "idle-detection/disable", "idle-detection/enable", "terminate"}
	verb := verbs[rng.IntN(len(verbs))]
	if verb == "terminate" && rng.IntN(4) > 0 {
		verb = "resume"
	}
	var in any
	if verb == "terminate" {
		in = control.Confirmation{Confirm: w.Name}
	}
	_, _, err = to.Do(ctx, w.ID, verb, in)
	if p, refused := errors.AsType[*httpx.Problem](err); refused && p.Status != http.StatusConflict && p.Status < 500 {
		r.t.Errorf("%s %s: %v", verb, w.Name, err)
	}
}

// look checks that no counter is lower than it was before.
func (r *region) look(l []worker.Worker) {
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
			// Two concurrent calls may get their answers in either order, so an
			// older answer is not a fault.
			if v > was[name] {
				was[name] = v
			}
		}
	}
}

// finish repeats the creation of every worker that was not answered.
func (r *region) finish() {
	r.until("every creation is answered", 4*time.Minute, func() bool {
		r.mu.Lock()
		left := slices.Collect(maps.Keys(r.asked))
		r.mu.Unlock()
		for _, name := range left {
			r.create(r.t.Context(), nil, name)
		}
		return len(left) == 0
	})
}

// settle waits until every worker has reached its desired state, and returns the
// workers.
func (r *region) settle() (l []worker.Worker) {
	var open []string
	defer func() {
		if r.t.Failed() {
			r.t.Log("not settled:", open)
		}
	}()
	r.until("every worker is at rest", 8*time.Minute, func() bool {
		var err error
		if l, err = control.All[worker.Worker](r.t.Context(), r.any(nil).Client, "/api/v1/workers", map[string][]string{"terminated": {"true"}, "limit": {"1000"}}); err != nil {
			return false
		}
		open = nil
		for _, w := range l {
			if w.Status != w.DesiredStatus || w.Intent != nil || power.WorkerTable.IsTransitional(w.Status) {
				open = append(open, fmt.Sprintf("%s is %s, wanted %s: %s", w.Name, w.Status, w.DesiredStatus, w.StatusReason))
			}
		}
		if len(open) > 0 {
			<-time.After(time.Second) // listing everything is expensive for the servers
		}
		return len(open) == 0
	})
	return l
}

// verify compares the records with the simulated cloud.
func (r *region) verify(l []worker.Worker) {
	byName := map[string][]worker.Worker{}
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

// instances checks that each worker has one instance in the simulator, in the
// state that its record says, and that there is no instance without a worker.
func (r *region) instances(byName map[string][]worker.Worker) {
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
		case w.EC2InstanceID == "" && w.Status == power.WorkerTerminated: // it ended before it was launched
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
