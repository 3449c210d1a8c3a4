package controller

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/tags"
)

// tagBatch is the number of instances tagged with one call, and tagTick the
// number of workers handled in one turn.
const (
	tagBatch = 200
	tagTick  = 1000
)

// tagging is one worker whose tags differ from its policy, and the tags to write and
// remove.
type tagging struct {
	w    worker.Worker
	sh   *shard
	want map[string]string
	put  map[string]string
	drop []string
}

// key returns a string that is equal for workers that need the same tags written and
// removed.
func (t *tagging) key() string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(t.put)) {
		b.WriteString(k + "\x00" + t.put[k] + "\x00")
	}
	return b.String() + "\x01" + strings.Join(t.drop, "\x00")
}

// policyTags returns the tags from which the agent of w learns its policy; none
// if no policy was assigned. A deadline that came from a tag is not written
// again.
func policyTags(prefix string, w *worker.Worker, r *policy.Resolved) map[string]string {
	var s tags.Settings
	out := map[string]string{}
	if r.Applied {
		day := 24 * time.Hour
		s.Enabled = new(r.Enabled && w.IsIdleDetectionEnabled)
		s.IdleTimeout = new(min(max(time.Duration(r.Timeout), time.Minute), 30*day))
		s.WarnBefore = new(min(time.Duration(r.WarnBefore), day, *s.IdleTimeout)) // an agent rejects one longer than its timeout
		s.Snooze = new(min(time.Duration(r.Snooze), 30*day))
		s.HibernateOnIdle = new(r.PauseAction != worker.ActionStop)
		s.PauseHolder = new("server")
		if w.PauseHolder == worker.HolderAgent {
			s.PauseHolder = new("agent")
		}
		if r.Signals != nil {
			s.Signals = &r.Signals
		}
		for name, to := range map[string]**float64{"cpu": &s.IdleCPU, "gpu": &s.IdleGPU, "network": &s.IdleNetwork, "disk": &s.IdleDisk} {
			if v, ok := r.Thresholds[name]; ok {
				*to = &v
			}
		}
		out[prefix+"policy"] = r.Name
	}
	if w.TTLDeadline != nil && !w.TTLFromTag {
		s.TTLDeadline = w.TTLDeadline
		if w.TTLAction != "" {
			s.TTLAction = &w.TTLAction
		}
	}
	maps.Copy(out, s.Encode(prefix))
	return out
}

// writePolicyTags brings the tags of this server's workers in line with their
// policies. It writes only differences, and tags many instances with one call.
func (c *Controller) writePolicyTags(ctx context.Context) {
	if c.cfg.Shadow || c.fleet.Halted().On || time.Now().Before(c.tagAfter) {
		return
	}
	batches := map[regionKey]map[string][]*tagging{}
	for _, t := range c.untagged() {
		k := keyOf(&t.w)
		if batches[k] == nil {
			batches[k] = map[string][]*tagging{}
		}
		batches[k][t.key()] = append(batches[k][t.key()], t)
	}
	for k, groups := range batches {
		cloud, err := c.cfg.Clouds(k.account, k.name)
		if err != nil || cloud.Tag == nil {
			continue
		}
		for _, g := range groups {
			for part := range slices.Chunk(g, tagBatch) {
				if err := c.tagPart(ctx, cloud, part); err != nil {
					c.tagAfter = time.Now().Add(time.Minute)
					c.log.Warn("cannot write the tags of policies", "region", k.name, "instances", len(part), "err", err)
				}
			}
		}
	}
}

// untag schedules another check of a worker's tags. c.mu must be held.
func (c *Controller) untag(e *entry) {
	e.tagged = false
	if !e.tagging {
		e.tagging = true
		c.retag = append(c.retag, e)
	}
}

// untagged takes up to tagTick workers from c.retag and returns those whose tags
// differ from their policy.
func (c *Controller) untagged() []*tagging {
	type candidate struct {
		w    worker.Worker
		sh   *shard
		have map[string]string
	}
	prefix := c.fleet.Settings().TagPrefix
	var look []candidate
	c.mu.Lock()
	n := 0
	for ; n < len(c.retag) && len(look) < tagTick; n++ {
		e := c.retag[n]
		e.tagging = false
		sh := c.shards[e.shard]
		resting := e.w.Status == power.WorkerRunning || e.w.Status == power.WorkerStopped
		if c.entries[e.id] != e || e.tagged || sh == nil || !resting || !e.w.Armed || e.inst == nil || e.inst.Tags[prefix+"managed-by"] != c.fleet.ID() {
			continue // a change that makes tagging possible adds it to retag again
		}
		e.tagged = true // until untag is called
		look = append(look, candidate{e.w, sh, e.inst.Tags})
	}
	c.retag = slices.Clone(c.retag[n:])
	c.mu.Unlock()
	now := time.Now()
	var out []*tagging
	for _, l := range look {
		r := c.rulesOf(now, &l.w)
		if r.Shadow {
			continue
		}
		t := &tagging{w: l.w, sh: l.sh, want: policyTags(prefix, &l.w, &r), put: map[string]string{}}
		for k, v := range t.want {
			if l.have[k] != v {
				t.put[k] = v
			}
		}
		for _, k := range slices.Sorted(maps.Keys(l.w.PolicyTags)) {
			if _, still := t.want[k]; !still {
				t.drop = append(t.drop, k)
			}
		}
		if len(t.put)+len(t.drop) > 0 || !maps.Equal(t.want, l.w.PolicyTags) {
			out = append(out, t)
		}
	}
	return out
}

// tagPart writes one batch, and records the written tags.
func (c *Controller) tagPart(ctx context.Context, cloud Cloud, part []*tagging) error {
	ids := make([]string, len(part))
	for i, t := range part {
		ids[i] = t.w.EC2InstanceID
	}
	call, cancel, err := part[0].sh.call(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	if len(part[0].put) > 0 {
		c.count.calls.add("tags")
		err = cloud.Tag.CreateTags(call, ids, part[0].put)
	}
	if err == nil && len(part[0].drop) > 0 {
		c.count.calls.add("tags")
		err = cloud.Tag.DeleteTags(call, ids, part[0].drop)
	}
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, t := range part {
			if e := c.entries[t.w.ID]; e != nil {
				c.untag(e)
			}
		}
		return err
	}
	for _, t := range part {
		c.tagWritten(ctx, t)
	}
	return nil
}

func (c *Controller) tagWritten(ctx context.Context, t *tagging) {
	c.mu.Lock()
	if e := c.entries[t.w.ID]; e != nil && e.inst != nil {
		in := *e.inst
		in.Tags = maps.Clone(in.Tags)
		maps.Copy(in.Tags, t.put)
		for _, k := range t.drop {
			delete(in.Tags, k)
		}
		e.inst = &in
	}
	c.mu.Unlock()
	if maps.Equal(t.want, t.w.PolicyTags) {
		return
	}
	_, err := t.sh.fleet.Change(ctx, t.w.ID, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, tx *worker.Tx) error {
		w.PolicyTags = t.want
		tx.Note(audit.Entry{Action: "policy_tags", Detail: strings.Join(slices.Sorted(maps.Keys(t.want)), ", ")})
		return nil
	})
	if err != nil && ctx.Err() == nil {
		c.log.Warn("cannot record the tags of a policy", "worker", t.w.ID, "err", err)
	}
}

// rereadDeadline describes the instance again before lull acts on a deadline that
// came from a tag, because a user on the machine may have extended it since the last
// description. done means that out is the job's outcome.
func (j *job) rereadDeadline(ctx context.Context) (out outcome, done bool) {
	if !j.w.TTLFromTag {
		return outcome{}, false
	}
	cloud, err := j.cloud()
	if err != nil {
		return outcome{Result: Retry}, true
	}
	call, cancel, err := j.sh.call(ctx)
	if err != nil {
		return outcome{Result: Retry}, true
	}
	defer cancel()
	j.c.count.calls.add("instances")
	found, _, err := cloud.Observe.Instances(call, []string{j.w.EC2InstanceID})
	in, known := found[j.w.EC2InstanceID]
	if err != nil || !known {
		j.c.log.Warn("cannot read the ttl-deadline again before acting on it", "worker", j.w.ID, "err", err)
		return outcome{Result: Retry}, true
	}
	j.inst = &in
	return j.adoptDeadline(ctx)
}

// deadlineTag returns the deadline in the tag of w's instance, or nil, and whether
// w's record must follow it. An unreadable tag counts as none; the agent and its
// doctor report it.
func deadlineTag(prefix string, w *worker.Worker, in *Instance) (d *time.Time, follow bool) {
	key := prefix + "ttl-deadline"
	if in == nil || w.TTLDeadline != nil && !w.TTLFromTag {
		return nil, false
	}
	if _, ours := w.PolicyTags[key]; ours {
		return nil, false
	}
	if text, is := in.Tags[key]; is {
		said, _ := tags.Parse(prefix, map[string]string{key: text})
		d = said.TTLDeadline
	}
	if d == nil || w.TTLDeadline == nil {
		return d, d != w.TTLDeadline
	}
	return d, !d.Equal(*w.TTLDeadline)
}

// adoptDeadline copies the deadline in the instance's tag to the record, unless an
// operator set another deadline there. The deadline is then kept even if the agent is
// dead. At the deadline the worker is stopped unless the record says otherwise: a tag
// alone never terminates.
func (j *job) adoptDeadline(ctx context.Context) (outcome, bool) {
	d, follow := deadlineTag(j.s.TagPrefix, &j.w, j.inst)
	if !follow {
		return outcome{}, false
	}
	key := j.s.TagPrefix + "ttl-deadline"
	err := j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
		action := worker.ActionStop
		if w.TTLFromTag {
			action = cmp.Or(w.TTLAction, action)
		}
		w.EndTTL()
		e := audit.Entry{Action: "ttl_dropped", By: audit.ByCloud, Detail: "its tag " + key + " is gone"}
		if d != nil {
			at := d.UTC().Round(0)
			w.TTLDeadline, w.TTLFromTag, w.TTLAction = &at, true, action
			e = audit.Entry{Action: "ttl_adopted", By: audit.ByCloud, Detail: "its tag " + key + " says " + at.Format(time.RFC3339)}
		}
		tx.Note(e)
		return nil
	})
	if err != nil {
		return j.failedWrite(err), true
	}
	return outcome{}, false
}
