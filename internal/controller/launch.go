package controller

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"strconv"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
)

// pending launches the instance.
func (j *job) pending(ctx context.Context) outcome {
	cloud, err := j.cloud()
	if err != nil {
		return j.note(ctx, err.Error())
	}
	// A launch that was never attempted, because no server got to it, is not overdue.
	overdue := j.overdue(j.s.ProvisioningTimeout) && (j.w.Launch != nil || j.w.StatusReason != "")
	if j.w.RetryLook || overdue {
		if out, done := j.earlier(ctx, cloud); done {
			return out
		}
	}
	if overdue {
		return j.fail(ctx, audit.ProvisionFailed, "not launched within "+j.s.ProvisioningTimeout.String()+": "+j.w.StatusReason)
	}
	if j.w.Launch == nil {
		if out, done := j.resolve(ctx, cloud); done {
			return out
		}
	}
	launch, err := j.f.LaunchCall(&j.w)
	if err != nil {
		return j.note(ctx, "cannot launch yet: "+err.Error())
	}
	call, cancel, err := j.sh.call(ctx)
	if err != nil {
		return outcome{Result: Requeue}
	}
	defer cancel()
	j.c.count.calls.add("run")
	in, err := cloud.Launch.Run(call, launch)
	switch {
	case err != nil && hopeless(KindOf(err)):
		return j.fail(ctx, audit.ProvisionFailed, "EC2 refused the launch: "+err.Error())
	case err != nil:
		return j.note(ctx, "cannot launch yet: "+err.Error())
	}
	return j.launched(ctx, in)
}

// launched records the instance that a launch created.
func (j *job) launched(ctx context.Context, in Instance) outcome {
	err := j.to(ctx, power.WorkerProvisioning, "", func(w *worker.Worker, tx *worker.Tx) {
		w.EC2InstanceID, w.EC2State, w.RetryLook, w.MissingSince = in.ID, in.State, false, nil
		tx.Note(audit.Entry{Action: audit.Provisioned, Detail: in.ID, Generation: w.LaunchGeneration})
	})
	if err != nil {
		return j.failedWrite(err)
	}
	j.c.count.provisioned.Add(1)
	return outcome{Result: Success, Next: j.now.Add(j.s.ReconcileInterval)}
}

// earlier looks for the result of an earlier launch, by its client token and by the
// worker's tag. If it finds an instance, the worker adopts it. If not, a user's retry
// continues with the next generation.
func (j *job) earlier(ctx context.Context, cloud Cloud) (outcome, bool) {
	in, ok, err := j.findLaunch(ctx, cloud)
	switch {
	case err != nil:
		return j.note(ctx, "cannot look for an earlier launch: "+err.Error()), true
	case ok:
		return j.launched(ctx, in), true
	case !j.w.RetryLook:
		return outcome{}, false
	}
	err = j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
		w.RetryLook, w.Launch, w.AMIID = false, nil, ""
		w.LaunchGeneration++
		tx.Note(audit.Entry{Action: "launch_again", Detail: "the earlier launch created no instance", Generation: w.LaunchGeneration})
		return nil
	})
	if err != nil {
		return j.failedWrite(err), true
	}
	return outcome{}, false
}

// findLaunch finds a live instance of this worker.
func (j *job) findLaunch(ctx context.Context, cloud Cloud) (Instance, bool, error) {
	searches := []Search{{Tags: map[string]string{j.s.TagPrefix + "worker-id": j.w.ID}}}
	if j.w.Launch != nil {
		searches = append(searches, Search{ClientToken: j.w.Launch.Token})
	}
	for _, q := range searches {
		j.c.count.calls.add("find")
		found, err := cloud.Observe.Find(ctx, q)
		if err != nil {
			return Instance{}, false, err
		}
		for _, in := range found {
			if in.State != "terminated" && in.State != "shutting-down" {
				return in, true, nil
			}
		}
	}
	return Instance{}, false, nil
}

// resolve computes the launch parameters and writes them before the call. A
// missing template or region leads to FAILED with that cause.
func (j *job) resolve(ctx context.Context, cloud Cloud) (outcome, bool) {
	j.c.mu.Lock()
	tmpl, ok := j.c.tmpls[j.w.TemplateName]
	j.c.mu.Unlock()
	if !ok {
		t, err := j.f.Template(ctx, j.w.TemplateName)
		if _, missing := asNotFound(err); missing {
			return j.fail(ctx, audit.ProvisionFailed, fmt.Sprintf("there is no template %q", j.w.TemplateName)), true
		} else if err != nil {
			return j.failedWrite(err), true
		}
		tmpl = t
	}
	region, ok := j.s.Region(j.w.AWSRegion)
	if !ok {
		return j.fail(ctx, audit.ProvisionFailed, fmt.Sprintf("there is no configuration of region %q", j.w.AWSRegion)), true
	}
	if err := region.Launchable(); err != nil {
		return j.fail(ctx, audit.ProvisionFailed, err.Error()), true
	}
	ami := j.w.AMIID
	if ami == "" {
		j.c.count.calls.add("images")
		newest, err := cloud.Launch.NewestImage(ctx, tmpl.AMINameFilter)
		if err != nil && hopeless(KindOf(err)) {
			return j.fail(ctx, audit.ProvisionFailed, "no image: "+err.Error()), true
		} else if err != nil {
			return j.note(ctx, "cannot find the image yet: "+err.Error()), true
		}
		ami = newest
	}
	userData, err := j.f.LaunchUserData(tmpl)
	if err != nil {
		return j.fail(ctx, audit.ProvisionFailed, err.Error()), true
	}
	root, out, ok := j.root(ctx, cloud, tmpl, ami)
	if !ok {
		return out, true
	}
	err = j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error {
		now := tx.Now
		if w.InstanceType == "" {
			w.InstanceType = tmpl.InstanceType
		}
		w.AMIID = ami
		w.Launch = &worker.Launch{
			Token: w.ID + "-" + strconv.FormatInt(w.LaunchGeneration, 10), Generation: w.LaunchGeneration, AMIID: ami,
			InstanceType: w.InstanceType, SubnetID: region.SubnetID, SecurityGroupIDs: region.SecurityGroupIDs,
			KeyName: region.KeyName, IAMInstanceProfile: tmpl.IAMInstanceProfile, UserData: userData, Agent: tmpl.Agent,
			Tags: j.tags(w, region), ResolvedAt: now, SentAt: &now,
			Hibernation: root.hibernation, HibernationOff: root.off, RootVolume: root.volume,
		}
		return nil
	})
	if err != nil {
		return j.failedWrite(err), true
	}
	return outcome{}, false
}

// rooted describes the root volume of a launch.
type rooted struct {
	hibernation bool
	off         string // why hibernation is off although the policy may hibernate
	volume      *worker.LaunchVolume
}

// root decides on hibernation and the root volume. If ok is false, the worker waits
// or has failed, and out is the outcome.
func (j *job) root(ctx context.Context, cloud Cloud, tmpl launch.Template, ami string) (r rooted, out outcome, ok bool) {
	want, asked := false, tmpl.RootVolume
	switch tmpl.Hibernation {
	case launch.HibernationOn:
		want = true
	case launch.HibernationOff:
	default:
		action := j.f.PolicyWith(j.now, &j.w, &tmpl).PauseAction
		want = action == worker.ActionHibernate || action == worker.ActionAuto
	}
	if asked == nil {
		asked = &launch.RootVolume{}
	}
	gb := max(asked.GB, tmpl.Capacity.StorageGB)
	if !want && gb == 0 && *asked == (launch.RootVolume{}) {
		return r, out, true
	}
	m, err := Machine{Why: "images and types cannot be described"}, error(nil)
	if cloud.Parts != nil {
		j.c.count.calls.add("describe-machine")
		m, err = cloud.Parts.Machine(ctx, ami, cmp.Or(j.w.InstanceType, tmpl.InstanceType))
	}
	switch {
	case err != nil && !hopeless(KindOf(err)):
		return r, j.note(ctx, "cannot describe the machine yet: "+err.Error()), false
	case err != nil:
		m = Machine{Why: err.Error()}
	}
	if want && !m.Hibernates {
		if tmpl.Hibernation == launch.HibernationOn {
			return r, j.fail(ctx, audit.ProvisionFailed, "it cannot hibernate: "+m.Why), false
		}
		r.off = m.Why
	}
	r.hibernation = want && m.Hibernates
	if gb == 0 && *asked == (launch.RootVolume{}) && !r.hibernation {
		return r, out, true
	}
	if m.RootDevice == "" {
		return r, j.fail(ctx, audit.ProvisionFailed, "its root volume cannot be set: "+cmp.Or(m.Why, "the image has no EBS root volume")), false
	}
	r.volume = &worker.LaunchVolume{Device: m.RootDevice, GB: max(gb, m.RootGB), Type: asked.Type, Encrypted: asked.Encrypted}
	if r.hibernation { // the memory needs space besides the image's data
		r.volume.Encrypted = true
		r.volume.GB = max(gb, m.RootGB+(m.MemoryMiB+1023)/1024)
	}
	return r, out, true
}

// tags returns the tags of a new instance. The worker's tags override the
// region's, and our own override both.
func (j *job) tags(w *worker.Worker, region settings.Region) map[string]string {
	tags := map[string]string{}
	maps.Copy(tags, region.DefaultTags)
	maps.Copy(tags, w.Tags)
	tags["Name"] = w.Name
	tags[j.s.TagPrefix+"worker-id"] = w.ID
	tags[j.s.TagPrefix+"template"] = w.TemplateName
	tags[j.s.TagPrefix+"managed-by"] = j.c.fleet.ID()
	return tags
}

// provisioning waits until EC2 reports running.
func (j *job) provisioning(ctx context.Context) outcome {
	if j.w.EC2InstanceID == "" {
		return j.fail(ctx, audit.ProvisionFailed, "the worker has no instance ID")
	}
	if !j.fresh {
		return outcome{Result: Requeue}
	}
	switch j.seen {
	case "":
		if j.overdue(j.s.ProvisioningTimeout) {
			return j.fail(ctx, audit.ProvisionFailed, "EC2 has not shown the instance for "+j.s.ProvisioningTimeout.String())
		}
		return j.lost(ctx)
	case "running":
		return j.step(ctx, power.WorkerStarting, "", func(w *worker.Worker, tx *worker.Tx) { now := tx.Now; w.StartSentAt = &now; w.MissingSince = nil })
	case "pending":
		if j.overdue(j.s.ProvisioningTimeout) {
			return j.fail(ctx, audit.ProvisionFailed, "still pending after "+j.s.ProvisioningTimeout.String())
		}
		return outcome{Result: Requeue}
	case "terminated", "shutting-down":
		if j.inst == nil {
			return outcome{Result: Requeue}
		}
		if j.inst.Cause == CauseServer {
			// Nothing of this launch remains, so a retry launches another instance.
			err := j.to(ctx, power.WorkerFailed, "EC2 ended the launch: "+j.inst.Reason, func(w *worker.Worker, tx *worker.Tx) {
				w.EC2InstanceID, w.EC2State = "", ""
				tx.Note(audit.Entry{Action: audit.ProvisionFailed, Detail: w.StatusReason})
			})
			if err != nil {
				return j.failedWrite(err)
			}
			return outcome{Result: Retry}
		}
	}
	if out, drifted := j.drift(ctx); drifted {
		return out
	}
	return outcome{Result: Retry}
}

// starting waits until EC2 reports running and an address, and requests a start
// if none is in progress.
func (j *job) starting(ctx context.Context) outcome {
	code, why := j.noStart()
	switch {
	case j.w.EC2InstanceID == "":
		return j.fail(ctx, "start_failed", "the worker has no instance ID")
	case j.w.DesiredStatus == power.WorkerStopped && j.w.Intent != nil:
		return j.step(ctx, power.WorkerStopping, "", nil)
	case !j.fresh:
		return outcome{Result: Requeue}
	case j.seen == "running" && j.inst != nil && j.inst.PrivateIP != "":
		return j.up(ctx)
	case j.seen == "stopped" && code != "" && !j.wasUp() && (j.w.StartSentAt == nil || j.shows(*j.w.StartSentAt, time.Minute)):
		// A halt or dry run also holds a start that is in progress. The worker waits
		// as if it had not begun.
		return j.step(ctx, power.WorkerStopped, "does not start: "+why, func(w *worker.Worker, _ *worker.Tx) { w.StartSentAt = nil })
	case j.overdue(j.s.ProvisioningTimeout) && (j.seen != "stopped" || j.w.StartSentAt != nil || j.w.StatusReason != ""):
		return j.fail(ctx, "start_failed", fmt.Sprintf("EC2 reports %q after %s: %s", j.seen, idle.Human(j.s.ProvisioningTimeout), j.w.StatusReason))
	}
	switch j.seen {
	case "pending", "running":
		if j.w.EC2State != j.seen {
			if err := j.write(ctx, func(w *worker.Worker, _ *worker.Tx) error { w.EC2State = j.seen; return nil }); err != nil {
				return j.failedWrite(err)
			}
		}
		return outcome{Result: Requeue}
	case "stopping":
		return outcome{Result: Requeue}
	case "stopped":
		if j.wasUp() {
			break // it was up, and was stopped outside lull
		}
		if s := j.w.StartSentAt; s != nil && !j.shows(*s, time.Minute) {
			return outcome{Result: Requeue} // wait until the call's effect is visible
		}
		return j.start(ctx)
	}
	if out, drifted := j.drift(ctx); drifted {
		return out
	}
	return outcome{Result: Retry}
}

// wasUp reports whether EC2 has shown the effect of the start.
func (j *job) wasUp() bool { return j.w.EC2State == "pending" || j.w.EC2State == "running" }

// up confirms RUNNING.
func (j *job) up(ctx context.Context) outcome {
	in, asked := j.inst, j.w.StartAskedAt
	err := j.writeBy(ctx, audit.ByController, false, func(w *worker.Worker, tx *worker.Tx) error {
		w.EC2State = "running"
		w.PublicIP, w.PrivateIP, w.InstanceType, w.AMIID = in.PublicIP, in.PrivateIP, in.Type, in.ImageID
		w.HTTPSEndpoint = endpoint(in)
		w.TakeTags(in.Tags, j.s.TagPrefix)
		if w.DesiredStatus == power.WorkerStopped && w.Intent == nil {
			w.DesiredStatus = power.WorkerRunning
		}
		found := w.Imported && w.LastPausedAt == nil && w.StartOrigin == worker.OriginNone
		w.Resumed(tx)
		if found && in.LaunchTime.Before(tx.Now) && !in.LaunchTime.IsZero() {
			w.RunningSince = &in.LaunchTime // an imported instance has been running since its launch
		}
		return nil
	})
	if err != nil {
		return j.failedWrite(err)
	}
	j.c.count.started.Add(1)
	t := j.endResume(ctx, asked)
	j.live = live{nextCheck: j.live.nextCheck, traced: t}
	j.resumed(asked)
	return j.again()
}

func endpoint(in *Instance) string { return worker.Endpoint(in.PublicIP, in.PrivateIP) }

// start calls StartInstances, after recording the call.
func (j *job) start(ctx context.Context) outcome {
	if out, ok := j.ours(ctx, "start"); !ok {
		return out
	}
	cloud, err := j.cloud()
	if err != nil {
		return j.note(ctx, err.Error())
	}
	if err := j.write(ctx, func(w *worker.Worker, tx *worker.Tx) error { now := tx.Now; w.StartSentAt = &now; return nil }); err != nil {
		return j.failedWrite(err)
	}
	call, cancel, err := j.sh.call(ctx)
	if err != nil {
		return outcome{Result: Requeue}
	}
	defer cancel()
	if j.w.StartOrigin == worker.OriginAuto { // a halt also ends the retries of an automatic start
		call, cancel = context.WithTimeout(call, FinalCheckAge-time.Second)
		defer cancel()
	}
	j.c.count.calls.add("start")
	call, span := j.span(j.resuming(call, j.w.StartAskedAt), "ec2.start")
	defer span.End()
	err = cloud.Move.Start(call, j.w.EC2InstanceID)
	fault(span, err)
	switch k := KindOf(err); {
	case err == nil, k == IncorrectState, k == NotFound:
		return outcome{Result: Requeue} // the next observation shows the outcome
	case hopeless(k) || k == Protected:
		return j.fail(ctx, "start_failed", "EC2 refused the start: "+err.Error())
	}
	// The call had no effect, so the next attempt need not wait for it.
	why := "cannot start yet: " + err.Error()
	if err := j.write(ctx, func(w *worker.Worker, _ *worker.Tx) error { w.StartSentAt, w.StatusReason = nil, why; return nil }); err != nil {
		return j.failedWrite(err)
	}
	return outcome{Result: Retry}
}
