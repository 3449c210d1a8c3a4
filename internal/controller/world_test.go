package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"path"
	"slices"
	"strconv"
	"sync"
	"time"

	"lull/internal/fleet/sealed"
	"lull/internal/fleet/warning"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
)

// world is a model of a cloud and its CMLs, with state and clocks. It knows nothing
// of the controller. Tests check what happened in it, not which calls were made.
type world struct {
	parts      *parts // describes images and types; nil: they cannot be described
	volumeType string // of all volumes
	mute       bool   // requests for volumes get no answer
	hibernate  []bool // of each stop
	mu         sync.Mutex
	rng        *rand.Rand
	insts      map[string]*machine
	token      map[string]string // client token to instance
	next       int
	calls      map[string]int
	// fault is called before each call. An error with applied means that the call
	// takes effect and its answer is lost.
	fault func(call string) (delay time.Duration, err error, applied bool)
	// unaddressed makes machines run without an address.
	unaddressed bool

	pending time.Duration
	stopped time.Duration
	latency time.Duration
	launchT map[string]int                                           // launches that created an instance, by token
	onStop  func(id string, sent time.Time)                          // called before a stop takes effect, without the lock
	cpuLag  time.Duration                                            // from the end of a window until it can be read
	load    func(id string, end time.Time) (cpu float64, there bool) // replaces cpu if not nil; with the lock held
	loadErr error                                                    // answers every read of the load if not nil
	cpu     *float64                                                 // percent of every machine, as in CloudWatch; nil without CloudWatch
}

type machine struct {
	Instance
	until   time.Time // when State changes to then
	then    string
	ips     int
	protect bool
	risks   []string
	hidden  bool // EC2 does not answer for it

	// CML
	events []cmlEvent // in order of arrival
	optOut bool
	down   bool
	skew   time.Duration // clock error that the adapter does not compensate
	labs   int
	lic    LicenseState
	regErr error
	// onLicense is called before each call about the license, with the lock
	// held. An error is the call's answer.
	onLicense func(call string) error
	licensed  map[string]int // number of calls, by name
	warned    []time.Time
	notices   map[string]warning.Warning // currently shown
	deaf      bool                       // its answers to notices are lost
	fetches   int
	known     bool      // the last completed answer was complete
	answer    time.Time // when the last answer was completed
	newest    time.Time // the newest activity that any answer contained
}

type cmlEvent struct {
	at      time.Time // true time
	arrives time.Time // when it first appears in an answer
}

func newWorld(seed uint64) *world {
	return &world{
		rng: rand.New(rand.NewPCG(seed, 1)), insts: map[string]*machine{}, token: map[string]string{}, calls: map[string]int{},
		pending: 20 * time.Second, stopped: 30 * time.Second, launchT: map[string]int{},
	}
}

func (w *world) advance(m *machine) {
	if m.then != "" && !time.Now().Before(m.until) {
		m.State, m.then = m.then, ""
		switch m.State {
		case "running":
			m.ips++
			if !w.unaddressed {
				m.PrivateIP = fmt.Sprintf("10.0.%d.%d", m.ips, len(w.insts)%250)
			}
			m.Cause, m.Reason = "", ""
		case "stopped", "terminated":
			m.PrivateIP, m.PublicIP = "", ""
		}
	}
}

// enter begins every call: it counts and delays the call, and may fail it.
func (w *world) enter(ctx context.Context, call string) (applied bool, err error) {
	w.mu.Lock()
	w.calls[call]++
	var lag time.Duration
	applied = true
	if w.fault != nil {
		lag, err, applied = w.fault(call)
		applied = applied || err == nil
	}
	lag += w.latency
	w.mu.Unlock()
	if lag > 0 {
		if delay.For(ctx, lag) != nil {
			return false, &CallError{Canceled, ctx.Err()}
		}
	}
	if ctx.Err() != nil {
		return false, &CallError{Canceled, ctx.Err()}
	}
	return applied, err
}

func callErr(k Kind) error { return &CallError{k, fmt.Errorf("cannot call: %s", k)} }

func (w *world) States(ctx context.Context) (map[string]string, error) {
	if _, err := w.enter(ctx, "states"); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]string{}
	for id, m := range w.insts {
		if w.advance(m); !m.hidden {
			out[id] = m.State
		}
	}
	return out, nil
}

// Volumes reads sizes from the volumes' IDs; the type is the world's.
func (w *world) Volumes(ctx context.Context, ids []string) (map[string]worker.Volume, error) {
	if _, err := w.enter(ctx, "volumes"); err != nil {
		return nil, err
	}
	w.mu.Lock()
	mute := w.mute
	w.mu.Unlock()
	if mute {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]worker.Volume{}
	for _, id := range ids {
		gb, err := strconv.Atoi(id[len("vol-"):])
		if err != nil {
			return nil, err
		}
		out[id] = worker.Volume{ID: id, Type: w.volumeType, GB: gb}
	}
	return out, nil
}

func (w *world) Instances(ctx context.Context, ids []string) (map[string]Instance, []string, error) {
	if _, err := w.enter(ctx, "instances"); err != nil {
		return nil, nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	found := map[string]Instance{}
	var missing []string
	for _, id := range ids {
		if m := w.insts[id]; m != nil && !m.hidden {
			w.advance(m)
			found[id] = m.copy()
		} else {
			missing = append(missing, id)
		}
	}
	return found, missing, nil
}

func (m *machine) copy() Instance {
	in := m.Instance
	in.Tags = map[string]string{}
	for k, v := range m.Tags {
		in.Tags[k] = v
	}
	return in
}

func (w *world) Find(ctx context.Context, q Search) ([]Instance, error) {
	if _, err := w.enter(ctx, "find"); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []Instance
	for _, m := range w.insts {
		w.advance(m)
		ok := q.ClientToken == "" || m.ClientToken == q.ClientToken
		for k, v := range q.Tags {
			ok = ok && m.Tags[k] == v
		}
		if q.ImageName != "" {
			match, _ := path.Match(q.ImageName, m.ImageID)
			ok = ok && match
		}
		if ok && !m.hidden {
			out = append(out, m.copy())
		}
	}
	slices.SortFunc(out, func(a, b Instance) int { return cmpString(a.ID, b.ID) })
	return out, nil
}

func cmpString(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func (w *world) Start(ctx context.Context, id string) error {
	applied, err := w.enter(ctx, "start")
	if !applied {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return errors.Join(w.start(id), err)
}

func (w *world) start(id string) error {
	m := w.insts[id]
	if m == nil {
		return callErr(NotFound)
	}
	w.advance(m)
	switch m.State {
	case "stopped":
		m.State, m.then, m.until = "pending", "running", time.Now().Add(w.pending)
		return nil
	case "pending", "running":
		return nil
	}
	return callErr(IncorrectState)
}

func (w *world) Stop(ctx context.Context, id string, hibernate bool) (Stopped, error) {
	sent := time.Now()
	applied, err := w.enter(ctx, "stop")
	if !applied {
		return Stopped{}, err
	}
	if w.onStop != nil {
		w.onStop(id, sent)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hibernate = append(w.hibernate, hibernate)
	return Stopped{Hibernating: hibernate}, errors.Join(w.stop(id, CauseUser), err)
}

func (w *world) stop(id string, cause Cause) error {
	m := w.insts[id]
	if m == nil {
		return callErr(NotFound)
	}
	w.advance(m)
	switch {
	case m.protect:
		return callErr(Protected)
	case m.State == "running":
		m.State, m.then, m.until = "stopping", "stopped", time.Now().Add(w.stopped)
		m.Cause, m.Reason = cause, string(cause)+" initiated"
		return nil
	case m.State == "stopping", m.State == "stopped":
		return nil
	}
	return callErr(IncorrectState)
}

func (w *world) Terminate(ctx context.Context, id string) error {
	applied, err := w.enter(ctx, "terminate")
	if !applied {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.insts[id]
	if m == nil {
		return callErr(NotFound)
	}
	w.advance(m)
	if m.State != "terminated" {
		m.State, m.then, m.until, m.Cause = "shutting-down", "terminated", time.Now().Add(w.stopped), CauseUser
	}
	return err
}

func (w *world) NewestImage(ctx context.Context, pattern string) (string, error) {
	if _, err := w.enter(ctx, "images"); err != nil {
		return "", err
	}
	if pattern == "none*" {
		return "", callErr(NoImage)
	}
	return "ami-0123", nil
}

func (w *world) Run(ctx context.Context, l worker.Launch) (Instance, error) {
	applied, err := w.enter(ctx, "run")
	if !applied {
		return Instance{}, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if id, ok := w.token[l.Token]; ok {
		return w.insts[id].copy(), err
	}
	m := w.add("pending")
	m.Tags, m.ClientToken, m.ImageID, m.Type = l.Tags, l.Token, l.AMIID, l.InstanceType
	w.token[l.Token] = m.ID
	w.launchT[l.Token]++
	return m.copy(), err
}

// add creates an instance.
func (w *world) add(state string) *machine {
	w.next++
	m := &machine{Instance: Instance{ID: fmt.Sprintf("i-%017x", w.next), State: state, LaunchTime: time.Now(), Tags: map[string]string{}}, lic: unregistered}
	if state == "pending" {
		m.then, m.until = "running", time.Now().Add(w.pending)
	}
	w.insts[m.ID] = m
	return m
}

func (w *world) Preflight(ctx context.Context, id string) ([]string, error) {
	if _, err := w.enter(ctx, "preflight"); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.insts[id].risks, nil
}

func (w *world) CreateTags(ctx context.Context, ids []string, tags map[string]string) error {
	if _, err := w.enter(ctx, "tags"); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		for k, v := range tags {
			w.insts[id].Tags[k] = v
		}
	}
	return nil
}

func (w *world) DeleteTags(ctx context.Context, ids []string, keys []string) error {
	if _, err := w.enter(ctx, "tags"); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		for _, k := range keys {
			delete(w.insts[id].Tags, k)
		}
	}
	return nil
}

func (w *world) cloud() Cloud {
	c := Cloud{Observe: w, Move: w, Launch: w, Check: w, Tag: w, Size: w}
	if w.cpu != nil {
		c.Load = w
	}
	if w.parts != nil {
		c.Parts = w.parts
	}
	return c
}

func (w *world) Load(_ context.Context, ids []string, since time.Time) map[string]Load {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls["load"]++
	out := map[string]Load{}
	now := time.Now()
	if back := now.Add(-15 * time.Minute); since.IsZero() || since.After(back) {
		since = back
	}
	for _, id := range ids {
		if w.loadErr != nil {
			out[id] = Load{Err: w.loadErr}
			continue
		}
		l := Load{Period: loadPeriod}
		for end := since.Truncate(loadPeriod).Add(loadPeriod); !end.Add(w.cpuLag).After(now); end = end.Add(loadPeriod) {
			v := *w.cpu
			if w.load != nil {
				var there bool
				if v, there = w.load(id, end); !there {
					continue
				}
			}
			l.Windows, l.CPU = append(l.Windows, LoadWindow{end, v}), &v
		}
		out[id] = l
	}
	return out
}

// loadPeriod is the length of CloudWatch's windows without detailed monitoring.
const loadPeriod = 5 * time.Minute

// console is the CML of one machine.
type console struct {
	w  *world
	id string
}

func (w *world) console(wk worker.Worker) (Console, error) {
	if wk.PrivateIP == "" {
		return nil, errors.New("cannot speak to a worker without an address")
	}
	return console{w, wk.EC2InstanceID}, nil
}

func (c console) Telemetry(ctx context.Context, seen json.RawMessage) worker.Telemetry {
	c.w.mu.Lock()
	m := c.w.insts[c.id]
	m.fetches++
	down, latency := m.down || m.State != "running", c.w.latency
	c.w.mu.Unlock()
	if delay.For(ctx, latency+10*time.Millisecond) != nil || down {
		c.w.mu.Lock()
		m.known = false
		c.w.mu.Unlock()
		return worker.Telemetry{CheckedAt: time.Now(), Unknown: "unreachable", Seen: seen}
	}
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	now := time.Now()
	m.answer, m.known = now, !m.optOut
	if m.optOut {
		return worker.Telemetry{CheckedAt: now, Unknown: "not_opted_in", Seen: seen}
	}
	t := worker.Telemetry{CheckedAt: now, Seen: seen, Recent: []worker.Event{}}
	for _, e := range m.events {
		if e.arrives.After(now) {
			continue
		}
		if e.at.After(m.newest) {
			m.newest = e.at
		}
		at := e.at.Add(c.w.offset(m))
		if at.After(now) {
			at = now
		}
		if at.After(t.Newest) {
			t.Newest = at
		}
		t.Recent = append(t.Recent, worker.Event{Category: "start_lab", Timestamp: e.at.Add(m.skew)})
	}
	slices.SortFunc(t.Recent, func(a, b worker.Event) int { return b.Timestamp.Compare(a.Timestamp) })
	t.Recent = t.Recent[:min(10, len(t.Recent))]
	return t
}

// offset returns the error that remains after a clock offset was measured: up to a
// second late, never early, and different at each reading.
func (w *world) offset(m *machine) time.Duration {
	if m.skew == 0 {
		return 0
	}
	return time.Duration(w.rng.IntN(1000)) * time.Millisecond
}

func (c console) System(ctx context.Context) (System, error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	m := c.w.insts[c.id]
	if m.down || m.State != "running" {
		return System{}, errors.New("cannot reach it")
	}
	n := m.labs
	return System{Version: "2.9.0", Ready: true, Labs: &n, Nodes: &n}, nil
}

func (c console) RunningLabs(ctx context.Context) (int, error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	if m := c.w.insts[c.id]; !m.down {
		return m.labs, nil
	}
	return 0, errors.New("cannot reach it")
}

func (c console) license(call string) (*machine, error) {
	m := c.w.insts[c.id]
	if m.licensed == nil {
		m.licensed = map[string]int{}
	}
	m.licensed[call]++
	if m.onLicense != nil {
		if err := m.onLicense(call); err != nil {
			return m, err
		}
	}
	if m.down || m.State != "running" {
		return m, errors.New("cannot reach it")
	}
	return m, nil
}

// answered is called after a call took effect. An error means that its answer is
// lost.
func (m *machine) answered(call string) error {
	if m.onLicense == nil {
		return nil
	}
	return m.onLicense(call)
}

// States of a license, as CML reports them.
var (
	unregistered = LicenseState{None: true, Registration: "NOT_REGISTERED", Authorization: "EVAL"}
	inProgress   = LicenseState{Seat: true, Registration: "IN_PROGRESS", Authorization: "EVAL"}
	registered   = LicenseState{Done: true, Seat: true, Registration: "COMPLETED", Authorization: "IN_COMPLIANCE"}
	overused     = LicenseState{Failed: true, Seat: true, Registration: "COMPLETED", Authorization: "OUT_OF_COMPLIANCE", Detail: "authorization OUT_OF_COMPLIANCE"}
)

func (c console) Register(_ context.Context, token sealed.Plain, _ bool) error {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	m, err := c.license("register")
	if err != nil {
		return err
	}
	if m.regErr != nil {
		return fmt.Errorf("%w of token %s", m.regErr, token)
	}
	m.lic = inProgress
	return m.answered("registered")
}

func (c console) State(context.Context) (LicenseState, error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	m, err := c.license("state")
	return m.lic, err
}

func (c console) Deregister(context.Context) (bool, error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	m, err := c.license("deregister")
	if err = errors.Join(err, m.regErr); err == nil {
		m.lic = unregistered
		err = m.answered("deregistered")
	}
	return false, err
}

func (c console) Warn(ctx context.Context, x warning.Warning) (string, error) {
	if err := c.Withdraw(ctx, ""); err != nil {
		return "", err
	}
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	m := c.w.insts[c.id]
	m.warned = append(m.warned, x.PauseAt)
	id := fmt.Sprintf("n-%d", len(m.warned))
	m.notices = map[string]warning.Warning{id: x}
	if m.deaf {
		return "", errors.New("the answer is lost")
	}
	return id, nil
}

func (c console) Withdraw(_ context.Context, id string) error {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	m := c.w.insts[c.id]
	if m.down || m.State != "running" {
		return errors.New("cannot reach it")
	}
	if id == "" {
		clear(m.notices)
	}
	delete(m.notices, id)
	return nil
}
