package server

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/scaletest"
	"lull/internal/platform/etcd/etcdtest"
	"lull/internal/protocol/control"
)

// cluster is three servers on three members of Debian's etcd. Each server has its
// own links to the members and to the cloud.
type cluster struct {
	*region
	kv     *etcdtest.Cluster
	gates  [3][3]*etcdtest.Link // links, by server and member
	clouds [3]*cloudGate
}

// cloudGate forwards a server's calls to the cloud. It can hold back one stop of
// an instance.
type cloudGate struct {
	*httptest.Server
	pass http.Handler

	mu       sync.Mutex
	instance string        // the instance whose stop is held back
	caught   chan struct{} // closed when the stop has arrived here
	release  chan struct{}
}

func newCloudGate(t *testing.T, sim string) *cloudGate {
	u, err := url.Parse(sim)
	if err != nil {
		t.Fatal(err)
	}
	g := &cloudGate{pass: httputil.NewSingleHostReverseProxy(u)}
	g.Server = httptest.NewServer(g)
	t.Cleanup(g.Close)
	return g
}

// hold makes the gate hold back the next stop of an instance until release is
// closed. caught is closed when the stop has arrived.
func (g *cloudGate) hold(instance string) (caught, release chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.instance, g.caught, g.release = instance, make(chan struct{}), make(chan struct{})
	return g.caught, g.release
}

// ServeHTTP implements http.Handler.
func (g *cloudGate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the server canceled its call
	}
	text := string(body)
	g.mu.Lock()
	held := g.instance != "" && strings.Contains(text, "Action=StopInstances") && strings.Contains(text, g.instance)
	caught, release := g.caught, g.release
	if held {
		g.instance = ""
	}
	g.mu.Unlock()
	// A call that is held back continues even if its sender is gone, because it
	// is already on its way.
	out := r.Clone(r.Context())
	if held {
		out = r.Clone(context.WithoutCancel(r.Context()))
		close(caught)
		<-release
	}
	out.Body = io.NopCloser(bytes.NewReader(body))
	g.pass.ServeHTTP(w, out)
}

// newCluster starts the members, the cloud and the servers.
func newCluster(t *testing.T) *cluster {
	c := &cluster{kv: etcdtest.Start(t, 3), region: newRegion(t, "idle_detection_interval: 10\ndrain_timeout_seconds: 5\n")}
	for s := range 3 {
		var urls []string
		for m, at := range c.kv.Endpoints() {
			c.gates[s][m] = etcdtest.NewLink(t, strings.TrimPrefix(at, "http://"))
			urls = append(urls, c.gates[s][m].URL())
		}
		c.clouds[s] = newCloudGate(t, c.sim)
		name := string(rune('a' + s))
		p := c.add(name, c.clouds[s].URL, "--data", filepath.Join(c.dir, name), "--etcd", strings.Join(urls, ","))
		p.start()
	}
	c.template()
	return c
}

// held returns how many shards the given servers own together.
func (c *cluster) held(servers ...int) int {
	n := 0
	for _, s := range servers {
		at := c.servers[s].at.Load()
		if at == nil {
			continue
		}
		var l control.Shards
		if _, err := at.Call(c.t.Context(), "GET", "/admin/shards", nil, &l); err == nil {
			n += len(l.Held)
		}
	}
	return n
}

// takeover waits until the given servers own all shards, and returns how long
// that took since a time.
func (c *cluster) takeover(what string, since time.Time, servers ...int) {
	c.t.Helper()
	c.until(fmt.Sprintf("%s: %v own everything", what, servers), 3*time.Minute, func() bool { return c.held(servers...) == 32 })
	c.t.Logf("%s: everything is claimed %.1f s later, and acted on 3 s after that; wanted 20 s", what, time.Since(since).Seconds())
}

// cut disconnects a server from the store; open reconnects it.
func (c *cluster) cut(server int) {
	for _, g := range c.gates[server] {
		g.Shut()
	}
}

func (c *cluster) open(server int) {
	for _, g := range c.gates[server] {
		g.Open()
	}
}

// isolate disconnects a member from its peers and from all servers, or reconnects
// it.
func (c *cluster) isolate(member int, off bool) {
	if off {
		c.kv.Cut(member)
	} else {
		c.kv.Cut()
	}
	for s := range 3 {
		if off {
			c.gates[s][member].Shut()
		} else {
			c.gates[s][member].Open()
		}
	}
}

// TestServersOnACluster runs three servers on three members of etcd while members
// and servers are killed, stopped and cut off. In the end, nothing may have been
// launched twice, no instance may be without a worker, no worker may be stuck,
// and no counter may have decreased. LULL_CLUSTER_ROUNDS is the number of rounds
// (default 1).
func TestServersOnACluster(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 4))
	c := newCluster(t)
	c.takeover("start", time.Now(), 0, 1, 2)
	made := 0
	names := func(n int) (l []string) {
		for range n {
			l = append(l, fmt.Sprintf("w-%d", made))
			made++
		}
		return l
	}
	for round := range scaletest.Count(t, "LULL_CLUSTER_ROUNDS", 1) {
		// Stop members one after the other, so that a majority remains.
		c.storm(rng, names(20), 3*time.Second)
		m := rng.IntN(3)
		c.kv.Kill(m)
		c.storm(rng, names(5), 2*time.Second)
		c.kv.Restart(m)
		c.kv.AwaitHealthy(m)
		m = rng.IntN(3)
		c.kv.Pause(m)
		c.storm(rng, names(5), 2*time.Second)
		c.kv.Resume(m)
		m = rng.IntN(3)
		c.isolate(m, true)
		c.storm(rng, names(5), 3*time.Second)
		c.isolate(m, false)

		// Kill one server and cut another off from the store, at the same time.
		order := rng.Perm(3)
		dead, alone, left := order[0], order[1], order[2]
		since := time.Now()
		c.servers[dead].kill()
		c.cut(alone)
		at := c.servers[alone].at.Swap(nil) // no request may wait for it
		c.storm(rng, names(5), 2*time.Second)
		c.takeover(fmt.Sprintf("round %d, one killed, one cut off", round), since, left)
		c.servers[dead].start()
		c.open(alone)
		c.servers[alone].at.Store(at)
		c.lateStop(rng, round)
	}
	c.finish()
	l := c.settle()
	c.verify(l)
	t.Logf("%d workers", len(l))
}

// lateStop holds back a server's call to stop a worker, and suspends that server.
// The other servers take over, and a user resumes the worker. Then the call goes
// through: the stop happens late, must be recorded as late, and must be repaired.
func (c *cluster) lateStop(rng *rand.Rand, round int) {
	t := c.t
	t.Helper()
	c.takeover(fmt.Sprintf("round %d, all back", round), time.Now(), 0, 1, 2)
	name := fmt.Sprintf("late-%d", round)
	c.asked[name] = true
	c.finish()
	w := c.await(name, func(w worker.Worker) bool { return w.Status == power.WorkerRunning })
	caught := make(chan int, 3)
	over := make(chan struct{})
	defer close(over)
	var releases []chan struct{}
	for s, g := range c.clouds {
		held, release := g.hold(w.EC2InstanceID)
		releases = append(releases, release)
		go func() {
			select {
			case <-held:
				caught <- s
			case <-over:
			}
		}()
	}
	if _, _, err := c.any(rng).Do(t.Context(), w.ID, "pause", nil); err != nil {
		t.Fatal(err)
	}
	var owner int
	select {
	case owner = <-caught:
	case <-time.After(2 * time.Minute):
		t.Fatal("the stop is not sent")
	}
	since := time.Now()
	p := c.servers[owner]
	p.signal(syscall.SIGSTOP)
	at := p.at.Swap(nil)
	others := slices.DeleteFunc([]int{0, 1, 2}, func(s int) bool { return s == owner })
	c.takeover(fmt.Sprintf("round %d, one stopped", round), since, others...)
	if _, _, err := c.any(rng).Do(t.Context(), w.ID, "resume", nil); err != nil {
		t.Fatal(err)
	}
	c.await(name, func(w worker.Worker) bool { return w.Status == power.WorkerRunning && w.Intent == nil })
	for s, g := range c.clouds {
		g.hold("")
		close(releases[s])
	}
	// The held-back stop takes effect now.
	c.until("the late stop is recorded", 2*time.Minute, func() bool { return c.audited(w.ID, "late_action") > 0 })
	p.signal(syscall.SIGCONT)
	p.at.Store(at)
	w = c.await(name, func(w worker.Worker) bool { return w.Status == power.WorkerRunning && w.Intent == nil })
	if n := c.audited(w.ID, "late_action"); n != 1 || w.ExternalPauseCount != 0 {
		t.Errorf("%s: %d late actions, %d external pauses", name, n, w.ExternalPauseCount)
	}
}

// await waits until the one worker with a name fulfills a condition.
func (c *cluster) await(name string, is func(worker.Worker) bool) (w worker.Worker) {
	c.t.Helper()
	c.until(name+" is as it should be", 3*time.Minute, func() bool {
		l, err := c.any(nil).Workers(c.t.Context(), url.Values{"name": {name}})
		if err != nil || len(l) != 1 {
			return false
		}
		w = l[0]
		return is(w)
	})
	return w
}

// audited returns the number of audit entries with an action for a worker.
func (c *cluster) audited(id, action string) int {
	q := url.Values{"worker_id": {id}, "action": {action}}
	l, err := control.Read[control.List[audit.Entry]](c.t.Context(), c.any(nil).Client, "/audit?"+q.Encode())
	if err != nil {
		return 0
	}
	return len(l.Items)
}
