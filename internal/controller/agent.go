package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/protocol/tags"
)

// agentSeen is the last report of a worker's agent. The agent's clock may be
// wrong by any amount: its times count as ages relative to the report's own
// time, and are subtracted from the time at which the report arrived here.
type agentSeen struct {
	r  control.AgentReport
	at time.Time
}

// when converts a time t of the agent's clock to ours. The result is never after
// a.at, when the report arrived. A zero t stays zero.
func (a *agentSeen) when(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return a.at.Add(-max(a.r.At.Sub(t), 0))
}

// span returns how long the agent may be silent: twice its interval.
func (a *agentSeen) span() time.Duration { return 2 * time.Duration(a.r.Interval) }

func (a *agentSeen) silent(now time.Time) bool { return a == nil || now.Sub(a.at) > a.span() }

func (a *agentSeen) view(now time.Time) *control.AgentView {
	if a == nil {
		return nil
	}
	return &control.AgentView{ReceivedAt: a.at.UTC().Round(0), Stale: a.silent(now), Report: a.r}
}

// readings returns the combined reading, agent, followed by its parts, for
// display. agent is active if any part is, otherwise unknown if any part is.
func (a *agentSeen) readings(now time.Time) []idle.Reading {
	if a == nil {
		return []idle.Reading{idle.NotKnown(worker.SourceAgent, now, "its agent has not reported to this server")}
	}
	whole := idle.Reading{Signal: worker.SourceAgent, State: idle.Quiet, At: a.at, LastEvent: a.when(a.r.LastUse), MaxAge: idle.Duration(a.span())}
	out := []idle.Reading{whole}
	var active, unknown []string
	for _, r := range a.r.Readings {
		r.At, r.LastEvent, r.QuietSince, r.MaxAge = a.when(r.At), a.when(r.LastEvent), a.when(r.QuietSince), whole.MaxAge
		if r.At.Before(out[0].At) {
			out[0].At = r.At // the combined reading has the time of its oldest part
		}
		switch r.State {
		case idle.Active:
			active = append(active, r.Signal)
		case idle.Unknown:
			unknown = append(unknown, strings.TrimSpace(r.Signal+" "+r.Detail))
		}
		r.Signal = worker.SourceAgent + ":" + r.Signal
		out = append(out, r)
	}
	switch {
	case len(active) > 0:
		out[0].State, out[0].Detail = idle.Active, strings.Join(active, ", ")
	case len(unknown) > 0:
		out[0].State, out[0].Detail = idle.Unknown, strings.Join(unknown, ", ")
	case len(a.r.Readings) == 0:
		out[0].State, out[0].Detail = idle.Unknown, "the agent reads no signal"
	}
	return out
}

// age returns the age of the oldest reading at now.
func (a *agentSeen) age(now time.Time) time.Duration { return now.Sub(a.readings(now)[0].At) }

// holds returns the blocks that users and hooks set on the machine itself. A hold
// with an end applies until then, even if the agent falls silent.
func (a *agentSeen) holds() []idle.Block {
	if a == nil {
		return nil
	}
	out := slices.Clone(a.r.Holds)
	for i := range out {
		if u := out[i].Until; u != nil {
			t := a.at.Add(u.Sub(a.r.At))
			out[i].Until = &t
		}
	}
	return out
}

// Report processes a report of a worker's agent. It returns false if another
// server owns the worker, which must get the report instead. A report older
// than the present one is dropped.
func (c *Controller) Report(worker string, r control.AgentReport) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.entries[worker]
	if e == nil || c.shards[e.shard] == nil {
		return false
	}
	now := time.Now()
	if old := e.agent; old != nil && old.r.BootID == r.BootID && old.r.StartedAt.Equal(r.StartedAt) && r.Sequence <= old.r.Sequence {
		return true
	}
	e.agent = &agentSeen{r, now}
	if e.w.Intent != nil && e.w.Intent.SentAt == nil {
		c.kick(e, now) // a pending stop may be waiting for this report
	}
	return true
}

// agent returns the last report of the worker's agent, or nil. Reports of an earlier
// EC2 instance or boot do not count.
func (j *job) agent() *agentSeen {
	j.c.mu.Lock()
	defer j.c.mu.Unlock()
	a := j.e.agent
	if a == nil || a.r.InstanceID != "" && j.w.EC2InstanceID != "" && a.r.InstanceID != j.w.EC2InstanceID {
		return nil
	}
	// A report from before the machine came up belongs to an earlier boot.
	if s := j.w.RunningSince; s != nil && a.at.Before(*s) {
		return nil
	}
	return a
}

// consult lets the agent prepare before a stop is sent. The agent runs the
// machine's pre-stop hook, and if it is an activity source, its readings must
// be recent enough for the final check. The agent gets the order in the answers
// to its reports (see fleet.Worker.AgentConsulted). A silent agent delays
// nothing: if it is a source, the final check finds it unknown.
func (j *job) consult(ctx context.Context) (outcome, bool) {
	in, a, now := j.w.Intent, j.agent(), time.Now()
	source := j.wantsAgent() && in.ByReadings()
	if a.silent(now) || !source && a.r.HookSeconds == 0 {
		return outcome{}, false
	}
	if now.After(in.At.Add(time.Duration(a.r.HookSeconds*float64(time.Second)) + 2*a.span() + 30*time.Second)) {
		if source {
			return j.callOff(ctx, nil, "its agent did not get ready in time"), true
		}
		return outcome{}, false
	}
	done := a.r.Ordered
	switch {
	case done == nil || done.Generation != in.Generation || !done.Done:
	case in.ByReadings() && (done.Answer == "veto" || done.Answer == "defer"):
		return j.callOff(ctx, nil, fmt.Sprintf("its pre-stop hook answered %s", done.Answer)), true
	case !source || a.age(now) <= FinalCheckAge-time.Second:
		return outcome{}, false
	}
	return outcome{Requeue, now.Add(5 * time.Second)}, true // the agent's next report usually wakes the job earlier
}

// concludeTag replaces the state tag that the agent wrote before it shut down by its
// final value. The tag is for users; nothing depends on it.
func (j *job) concludeTag(ctx context.Context) {
	if j.inst == nil {
		return
	}
	_, _, key := tags.StateKeys(j.s.TagPrefix)
	final := map[string]string{tags.ActionStopping: tags.ActionStopped, tags.ActionHibernating: tags.ActionHibernated}[j.inst.Tags[key]]
	cloud, err := j.cloud()
	if final == "" || err != nil || cloud.Tag == nil {
		return
	}
	call, cancel, err := j.sh.call(ctx)
	if err != nil {
		return
	}
	defer cancel()
	j.c.count.calls.add("tags")
	if err := cloud.Tag.CreateTags(call, []string{j.w.EC2InstanceID}, map[string]string{key: final}); err != nil {
		j.c.log.Warn("cannot write the final state tag", "worker", j.w.ID, "err", err)
	}
}
