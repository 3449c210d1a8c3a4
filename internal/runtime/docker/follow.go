package docker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/policy/when"
)

// Container labels. Durations have the form 30s or 5m; 0 disables.
const (
	LabelPauseAfter  = "lull.pause-after" // adopts the container; idle time before it is paused
	LabelStopAfter   = "lull.stop-after"  // paused time before it is stopped; default never
	LabelReclaim     = "lull.reclaim-after"
	LabelQuiet       = "lull.quiet-connection-after"
	LabelIdlePolicy  = "lull.idle-policy"      // default or leases_only
	LabelOutbound    = "lull.wake-on-outbound" // true or false
	LabelGroup       = "lull.group"            // default: the Compose project; empty for none
	LabelDepends     = "lull.depends-on"       // comma-separated names of containers, or of services of the project
	labelPrefix      = "lull."
	nameWithoutRules = "docker-" // followed by the container's ID, if its name is not a valid instance name
)

// Host is the part of the host daemon that a follower uses. id is always an
// instance's ID.
type Host interface {
	// AwaitLoaded waits until the host has searched for every run of an earlier
	// daemon.
	AwaitLoaded(ctx context.Context) error
	// ByImage returns the instance that adopted a container.
	ByImage(runtime, image string) (id string, ok bool)
	ImagesOf(runtime string) []string // images of all instances
	Create(ctx context.Context, s instance.Spec) (id string, err error)
	RenamedOutside(ctx context.Context, id, name string) error
	// StartedOutside adopts a running container.
	StartedOutside(ctx context.Context, id, why string) error
	// Observe compares the instance with its workload and records a pause or
	// unpause by others. It must not block.
	Observe(id, why string) error
	Delete(ctx context.Context, id, by string) error
	// RelatedOutside sets the group of an instance, and the IDs of the instances on
	// which it depends.
	RelatedOutside(ctx context.Context, id, group string, dependsOn []string) error
	// KeepAwake keeps an instance awake for a command that runs inside it, until
	// leave is called. If the host paused the instance, KeepAwake first wakes it
	// and waits until it runs. An instance that a user paused with Docker stays
	// paused.
	KeepAwake(ctx context.Context, id, command string) (leave func(), err error)
}

// SpecOf parses a container's labels. Its error names the label of every fault.
func SpecOf(container, name string, labels map[string]string) (instance.Spec, error) {
	s := instance.Spec{Name: instanceName(container, name), Runtime: "docker", Image: container, Restart: instance.RestartNo, StopAfter: new(idle.Duration)}
	var errs []error
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		v := labels[k]
		if !strings.HasPrefix(k, labelPrefix) {
			continue
		}
		var d time.Duration
		var err error
		switch k {
		case LabelPauseAfter, LabelStopAfter, LabelReclaim, LabelQuiet:
			if d, err = when.Span(v); err != nil {
				errs = append(errs, fmt.Errorf("cannot use the label %s: %.100q is not a duration such as 30s", k, v))
			}
		case LabelOutbound:
			if s.WakeOnOutbound, err = strconv.ParseBool(v); err != nil {
				errs = append(errs, fmt.Errorf("cannot use the label %s: %.100q is neither true nor false", k, v))
			}
		case LabelIdlePolicy:
			if s.IdlePolicy = v; v != instance.PolicyDefault && v != instance.PolicyLeasesOnly {
				errs = append(errs, fmt.Errorf("cannot use the label %s: %.100q is neither %s nor %s", k, v, instance.PolicyDefault, instance.PolicyLeasesOnly))
				s.IdlePolicy = ""
			}
		case LabelGroup:
			if v != "" && instance.ValidName(v) != nil {
				errs = append(errs, fmt.Errorf("cannot use the label %s: %.100q is neither empty nor a valid name", k, v))
			}
		case LabelDepends:
		default:
			errs = append(errs, fmt.Errorf("cannot use the label %.100s: lull has no such label", k))
		}
		after := idle.Duration(d)
		switch k {
		case LabelPauseAfter:
			s.PauseAfter = &after
		case LabelStopAfter:
			s.StopAfter = &after
		case LabelReclaim:
			s.ReclaimAfter = after
		case LabelQuiet:
			s.QuietConnectionAfter = after
		}
	}
	return s, errors.Join(append(errs, asLabels(s.Validate()))...)
}

// fields replaces the names of spec fields with their labels.
var fields = strings.NewReplacer("quiet_connection_after", LabelQuiet, "pause_after", LabelPauseAfter, "stop_after", LabelStopAfter,
	"reclaim_after", LabelReclaim, "idle_policy", LabelIdlePolicy, "wake_on_outbound", LabelOutbound)

// asLabels replaces the field names in err with the label names that the user
// knows.
func asLabels(err error) error {
	if err == nil {
		return nil
	}
	return errors.New(fields.Replace(err.Error()))
}

// Backoff between attempts to reach Docker.
const (
	firstRetry = 200 * time.Millisecond
	lastRetry  = 30 * time.Second
)

// Follow keeps h in sync with Docker until ctx ends. It lists all containers at
// first and after each reconnect, and otherwise relies on events.
func (r *Runtime) Follow(ctx context.Context, h Host) error {
	f := &follower{r: r, h: h, due: map[string]bool{}, more: make(chan struct{}, 1)}
	r.mu.Lock()
	r.follower = f
	r.mu.Unlock()
	defer r.beside.removeAll("")
	var drop sync.WaitGroup
	defer drop.Wait()
	drop.Go(func() {
		if h.AwaitLoaded(ctx) != nil {
			return
		}
		if err := r.dropEarlierGate(ctx); err != nil {
			r.log.Warn("clients of stopped containers may wait until they time out", "err", err)
		}
	})
	for wait := firstRetry; ; {
		began := time.Now()
		err := f.once(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if time.Since(began) > lastRetry {
			wait = firstRetry
		}
		r.log.Warn("cannot follow Docker; trying again", "err", err, "again_in", wait)
		select {
		case <-time.After(wait + rand.N(wait/4)):
		case <-ctx.Done():
			return nil
		}
		wait = min(wait*2, lastRetry)
	}
}

// follower applies container changes to the host.
type follower struct {
	r *Runtime
	h Host

	mu    sync.Mutex
	due   map[string]bool // containers waiting to be checked; each is checked once for all its events
	order []string
	more  chan struct{}
}

func (f *follower) want(c string) {
	f.mu.Lock()
	if !f.due[c] {
		f.due[c] = true
		f.order = append(f.order, c)
	}
	f.mu.Unlock()
	select {
	case f.more <- struct{}{}:
	default:
	}
}

func (f *follower) take() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.order) == 0 {
		return ""
	}
	c := f.order[0]
	f.order = f.order[1:]
	delete(f.due, c)
	return c
}

// actions are the events after which a container is checked.
var actions = map[string]bool{"create": true, "start": true, "die": true, "pause": true, "unpause": true, "destroy": true, "stop": true, "kill": true, "restart": true, "oom": true, "rename": true,
	"connect": true, "disconnect": true}

// once follows one event stream until it ends.
func (f *follower) once(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	f.mu.Lock()
	f.due, f.order = map[string]bool{}, nil
	f.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(func() {
		// The list is read after the stream is open, so that no change is missed.
		cancel(f.r.api.events(ctx, func() {
			if err := f.lookAtAll(ctx); err != nil {
				cancel(err)
			}
		}, func(e event) {
			if actions[e.Action] {
				f.want(e.Actor.ID)
			} else if strings.HasPrefix(e.Action, "exec_") {
				if w, exec, unproven := f.command(e); unproven {
					wg.Go(func() { f.r.prove(ctx, w, exec) })
				}
			}
		}))
	})
	defer f.deaf()
	defer wg.Wait()
	for {
		for c := f.take(); c != ""; c = f.take() {
			if err := f.sync(ctx, c); err != nil {
				if isUnreachable(err) {
					cancel(err)
					return err
				}
				f.r.log.Warn("cannot follow a container", "container", c[:12], "err", err)
			}
		}
		f.relate(ctx) // only after every container is known
		select {
		case <-f.more:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// deaf ends the accounting of all commands, because no event will report their end.
// Commands that still run are found again once Docker is reachable.
func (f *follower) deaf() {
	f.r.beside.removeAll("")
	f.r.mu.Lock()
	works := slices.Collect(maps.Values(f.r.works))
	f.r.mu.Unlock()
	for _, w := range works {
		w.checks.endAll()
	}
}

// isUnreachable reports whether err means that Docker did not answer.
func isUnreachable(err error) bool {
	var s *statusError
	var other *hostError
	return !errors.As(err, &s) && !errors.As(err, &other)
}

// hostError is an error of the host, as opposed to one of Docker.
type hostError struct{ err error }

func (e *hostError) Error() string { return e.err.Error() }
func (e *hostError) Unwrap() error { return e.err }

func (f *follower) lookAtAll(ctx context.Context) error {
	f.deaf() // includes commands that the front added while events were interrupted
	f.r.share()
	ids, err := f.r.api.labelled(ctx, LabelPauseAfter)
	if err != nil {
		return err
	}
	modes, err := f.r.api.networks(ctx)
	if err != nil {
		return err
	}
	joined := map[string]string{}
	for c, mode := range modes {
		if whose, ok := strings.CutPrefix(mode, sharesWith); ok {
			joined[c] = whose
		}
	}
	f.r.mu.Lock()
	f.r.joined = joined
	f.r.mu.Unlock()
	f.r.relations.keep(modes)
	// Containers that have disappeared come first, because another container may
	// have taken the name.
	for _, image := range f.h.ImagesOf("docker") {
		if _, there := modes[image]; !there && validID(image) {
			f.want(image)
		}
		if validID(image) {
			continue
		}
		switch d, err := f.r.find(ctx, image); {
		case err == nil:
			ids = append(ids, d.ID)
		case !isStatus(err, 404): // the container does not exist yet
			return err
		}
	}
	for _, c := range ids {
		f.want(c)
	}
	f.r.mu.Lock() // adopted containers may have been removed or have lost their label
	for c := range f.r.works {
		ids = append(ids, c)
	}
	f.r.mu.Unlock()
	for _, c := range ids {
		f.want(c)
	}
	f.r.log.Info("following Docker", "socket", f.r.cfg.Socket, "containers", len(ids))
	return nil
}

// sync applies a container's current state to the host, so the order of events does
// not matter.
func (f *follower) sync(ctx context.Context, c string) error {
	ctx, cancel := context.WithTimeout(ctx, apiLimit)
	defer cancel()
	d, err := f.r.api.inspect(ctx, c)
	if isStatus(err, 404) {
		return f.gone(ctx, c)
	}
	if err != nil {
		return err
	}
	f.r.join(d.ID, d.HostConfig.NetworkMode)
	f.ended(d)
	id, known := f.h.ByImage("docker", d.ID)
	if known {
		if err := f.rename(ctx, id, d); err != nil {
			return err
		}
	} else {
		id, known = f.adopted(d)
	}
	if known {
		f.r.relations.set(d.ID, memberOf(id, d))
	}
	if !d.runs() {
		return nil
	}
	if !known {
		if _, labelled := d.Config.Labels[LabelPauseAfter]; !labelled {
			return nil
		}
		if id, err = f.create(ctx, d); err != nil || id == "" {
			return err
		}
		f.r.relations.set(d.ID, memberOf(id, d))
	}
	if f.r.workOf(d.ID) == nil {
		if err := f.h.StartedOutside(ctx, id, "its container runs"); err != nil {
			return &hostError{err}
		}
	}
	if err := f.findCommands(ctx, d); err != nil {
		return err
	}
	if err := f.h.Observe(id, doneOutside(d)); err != nil {
		return &hostError{err}
	}
	return nil
}

// doneOutside returns the reason for a change that a user made with Docker.
func doneOutside(d *details) string {
	if d.State.Paused {
		return "paused with docker pause: only docker unpause or lull resume wakes it"
	}
	return "resumed with docker unpause"
}

// create adopts a container by its labels. Invalid labels are logged once, and
// shown in the status while the container exists. If the name is taken, the
// instance gets a generated one.
func (f *follower) create(ctx context.Context, d *details) (string, error) {
	s, err := SpecOf(d.ID, d.name(), d.Config.Labels)
	if err == nil {
		var id string
		if id, err = f.h.Create(ctx, s); err != nil {
			s.Name = plainName(d.ID)
			if other, oerr := f.h.Create(ctx, s); oerr == nil {
				id, err = other, nil
			}
		}
		if err == nil {
			f.r.setFault(d.ID, "")
			return id, nil
		}
		err = asLabels(err)
	}
	if f.r.setFault(d.ID, fmt.Sprintf("cannot take over the container %s: %v", d.name(), err)) {
		f.r.log.Error("cannot take over a container", "container", d.name(), "err", err)
	}
	return "", nil
}

// rename gives an adopted container's instance the container's new name, or a
// generated one if that name is taken.
func (f *follower) rename(ctx context.Context, id string, d *details) error {
	if _, labelled := d.Config.Labels[LabelPauseAfter]; !labelled {
		return nil
	}
	err := f.h.RenamedOutside(ctx, id, instanceName(d.ID, d.name()))
	if err != nil {
		err = f.h.RenamedOutside(ctx, id, plainName(d.ID))
	}
	if err != nil {
		return &hostError{err}
	}
	return nil
}

// instanceName returns a container's name in lower case. If that is not a valid
// instance name, it returns plainName's.
func instanceName(container, name string) string {
	if name = strings.ToLower(name); instance.ValidName(name) == nil {
		return name
	}
	return plainName(container)
}

// plainName derives an instance name from a container's id.
func plainName(container string) string { return nameWithoutRules + container[:12] }

// ended reports the end of a container's run to the host.
func (f *follower) ended(d *details) {
	w := f.r.workOf(d.ID)
	if w == nil || d.runs() && d.State.Pid == w.Identity().PID {
		return
	}
	f.r.beside.removeAll(d.ID)
	e := d.exit()
	if d.runs() || d.State.Restarting { // another run has replaced it
		e = instance.Exit{Lost: true, At: time.Now()}
	}
	f.r.drop(w)
	f.r.cfg.OnExit(w.id, w.Identity().Run, e)
}

// gone removes the instance of a deleted container.
func (f *follower) gone(ctx context.Context, c string) error {
	if w := f.r.workOf(c); w != nil {
		f.r.drop(w)
		f.r.cfg.OnExit(w.id, w.Identity().Run, instance.Exit{Lost: true, At: time.Now()})
	}
	f.r.beside.removeAll(c)
	f.r.setFault(c, "")
	f.r.join(c, "")
	f.r.relations.forget(c)
	if id, ok := f.h.ByImage("docker", c); ok {
		if err := f.h.Delete(ctx, id, "external"); err != nil {
			return &hostError{err}
		}
	}
	return nil
}
