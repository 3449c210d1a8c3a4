package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/fleet"
	"lull/internal/idle"
	"lull/internal/link/control"
	"lull/internal/link/tags"
)

// agentSeen is the last report of a worker's agent. The agent's clock may be
// wrong by any amount: its times count as ages against the report's own, and
// are reckoned back from when the report arrived here.
type agentSeen struct {
	r  control.AgentReport
	at time.Time
}

// when is a time of the agent's clock by ours; never later than the report.
func (a *agentSeen) when(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return a.at.Add(-max(a.r.At.Sub(t), 0))
}

// span is how long the agent may be silent: twice its interval (spec, section
// 2.2).
func (a *agentSeen) span() time.Duration { return 2 * time.Duration(a.r.Interval) }

func (a *agentSeen) silent(now time.Time) bool { return a == nil || now.Sub(a.at) > a.span() }

func (a *agentSeen) view(now time.Time) *control.AgentView {
	if a == nil {
		return nil
	}
	return &control.AgentView{ReceivedAt: a.at.UTC().Round(0), Stale: a.silent(now), Report: a.r}
}

// readings are the one that counts, agent, and behind it those it is made of,
// to be shown. It is active if any is, else unknown if any is.
func (a *agentSeen) readings(now time.Time) []idle.Reading {
	if a == nil {
		return []idle.Reading{idle.NotKnown(fleet.SourceAgent, now, "its agent has not reported to this server")}
	}
	whole := idle.Reading{Signal: fleet.SourceAgent, State: idle.Quiet, At: a.at, LastEvent: a.when(a.r.LastUse), MaxAge: idle.Duration(a.span())}
	out := []idle.Reading{whole}
	var active, unknown []string
	for _, r := range a.r.Readings {
		r.At, r.LastEvent, r.MaxAge = a.when(r.At), a.when(r.LastEvent), whole.MaxAge
		if r.At.Before(out[0].At) {
			out[0].At = r.At // as old as the oldest
		}
		switch r.State {
		case idle.Active:
			active = append(active, r.Signal)
		case idle.Unknown:
			unknown = append(unknown, strings.TrimSpace(r.Signal+" "+r.Detail))
		}
		r.Signal = fleet.SourceAgent + ":" + r.Signal
		out = append(out, r)
	}
	switch {
	case len(active) > 0:
		out[0].State, out[0].Detail = idle.Active, strings.Join(active, ", ")
	case len(unknown) > 0:
		out[0].State, out[0].Detail = idle.Unknown, strings.Join(unknown, ", ")
	case len(a.r.Readings) == 0:
		out[0].State, out[0].Detail = idle.Unknown, "it reads no signal"
	}
	return out
}

// age is how old the oldest of its readings is.
func (a *agentSeen) age(now time.Time) time.Duration { return now.Sub(a.readings(now)[0].At) }

// holds are what people and hooks decided on the machine itself. One with an
// end holds until then, whatever became of the agent.
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

// Report takes what the agent of a worker sees. It is false where the worker
// belongs to another server, which must have it instead. A report that is
// older than the one at hand is dropped.
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
		c.kick(e, now) // it may be what a stop waits for
	}
	return true
}

// agent is the last report of the worker's agent, or nil. One of an instance
// that the worker no longer is says nothing.
func (j *job) agent() *agentSeen {
	j.c.mu.Lock()
	defer j.c.mu.Unlock()
	a := j.e.agent
	if a == nil || a.r.InstanceID != "" && j.w.EC2InstanceID != "" && a.r.InstanceID != j.w.EC2InstanceID {
		return nil
	}
	// What was seen before the machine came up is of an earlier boot.
	if s := j.w.RunningSince; s != nil && a.at.Before(*s) {
		return nil
	}
	return a
}

// consult lets the agent make ready before a stop is sent: it runs the
// machine's pre-stop hook, and where it is a source of activity its readings
// have to be as fresh as the final look demands. The order itself is in the
// answers to its reports (see fleet.Worker.AgentConsulted). A silent agent delays
// nothing: where it is a source, the final look finds it unknown.
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
	case !source || a.age(now) <= FinalLook-time.Second:
		return outcome{}, false
	}
	return outcome{Requeue, now.Add(5 * time.Second)}, true // a report comes earlier
}

// concludeTag gives the state tag that the agent wrote before it went down its
// final form. It is for users to read, and nothing follows from it.
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
