package fleet

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/rules"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// scalingPrefix begins the keys of the records that serialize scale-ups.
const scalingPrefix = "scaling/"

// NewWorker describes a worker to create.
type NewWorker struct {
	Name         string `json:"name"`
	AWSRegion    string `json:"aws_region,omitempty"` // empty is aws_default_region
	Account      string `json:"account,omitempty"`    // one of aws_accounts; empty is the credentials' own
	TemplateName string `json:"template_name"`
	InstanceType string `json:"instance_type,omitempty"` // overrides the template's
	AMIID        string `json:"ami_id,omitempty"`        // overrides the newest image that matches
	// WorkerID is the ID to use, for a call that may be repeated; empty
	// generates one.
	WorkerID string `json:"-"`
	worker.Profile
}

// ImportedWorker describes an existing instance.
type ImportedWorker struct {
	Name          string `json:"name"`
	AWSRegion     string `json:"aws_region"`
	Account       string `json:"account,omitempty"` // one of aws_accounts; empty is the credentials' own
	EC2InstanceID string `json:"ec2_instance_id"`
	TemplateName  string `json:"template_name,omitempty"`
	// WorkerID is the ID in the instance's tag; empty generates one.
	WorkerID string `json:"-"`
	// Seen is EC2's description of the instance; nil if EC2 was not asked.
	Seen *SeenInstance `json:"-"`
	// Observable is the result of probing the instance; nil leaves the probing to the
	// controller.
	Observable *worker.Observable `json:"-"`
	worker.Profile
}

// SeenInstance is EC2's description of an instance to be imported.
type SeenInstance struct {
	State      string
	Type       string
	PublicIP   string
	PrivateIP  string
	LaunchTime time.Time
	Tags       map[string]string
}

// CreateWorker records a worker that the controller will launch. It is armed.
// Errors: Invalid, NotFound (template).
func (f *Fleet) CreateWorker(ctx context.Context, by audit.Actor, n NewWorker) (worker.Worker, error) {
	w, e, err := f.prepare(ctx, by, n)
	if err != nil {
		return worker.Worker{}, err
	}
	return f.insert(ctx, w, e)
}

// prepare returns the record of a worker to launch, and the audit entry of its
// creation, without writing either.
func (f *Fleet) prepare(ctx context.Context, by audit.Actor, n NewWorker) (worker.Worker, audit.Entry, error) {
	tmpl, err := f.Template(ctx, n.TemplateName)
	if err != nil {
		return worker.Worker{}, audit.Entry{}, err
	}
	if !tmpl.Enabled {
		return worker.Worker{}, audit.Entry{}, &failure.Refused{Command: "create from", Name: tmpl.Name, Reason: "template_disabled", Detail: "the template is disabled"}
	}
	w, err := f.newWorker(n.Account, n.AWSRegion, n.Name, n.Profile)
	if err != nil {
		return worker.Worker{}, audit.Entry{}, err
	}
	if n.InstanceType != "" && !launch.InstanceType.MatchString(n.InstanceType) {
		return worker.Worker{}, audit.Entry{}, failure.Invalidf("instance_type", "%.40q is not an EC2 instance type", n.InstanceType)
	}
	if n.AMIID != "" && !strings.HasPrefix(n.AMIID, "ami-") {
		return worker.Worker{}, audit.Entry{}, failure.Invalidf("ami_id", "%.40q is not the id of an image", n.AMIID)
	}
	if n.WorkerID != "" {
		if err := failure.CheckName("worker_id", n.WorkerID); err != nil {
			return worker.Worker{}, audit.Entry{}, err
		}
		w.ID = n.WorkerID
	}
	tmpl.Inherit(&w, n.Profile)
	w.TemplateName, w.InstanceType, w.AMIID = n.TemplateName, n.InstanceType, n.AMIID
	w.Status, w.DesiredStatus, w.Armed, w.LaunchGeneration = power.WorkerPending, power.WorkerRunning, true, 1
	return w, audit.Entry{Action: "created", Events: []string{audit.EventCreated}, By: by, To: w.Status}, nil
}

var instanceID = regexp.MustCompile(`^i-(?:[0-9a-f]{8}|[0-9a-f]{17})$`)

// ImportWorker records an existing instance. It starts in dry run, and its
// first observation determines the desired status. Errors: Invalid, Conflict.
func (f *Fleet) ImportWorker(ctx context.Context, by audit.Actor, n ImportedWorker) (worker.Worker, error) {
	w, err := f.Candidate(ctx, n)
	if err != nil {
		return worker.Worker{}, err
	}
	e := audit.Entry{Action: "imported", Events: []string{audit.EventImported}, By: by, To: w.Status, Detail: n.EC2InstanceID}
	if w.ActivitySourcesReason != "" {
		e.Detail += "; activity sources: " + w.ActivitySourcesReason
	}
	return f.insert(ctx, w, e)
}

// Candidate returns the record that ImportWorker would write, without writing
// it. Errors: Invalid.
func (f *Fleet) Candidate(ctx context.Context, n ImportedWorker) (worker.Worker, error) {
	if !instanceID.MatchString(n.EC2InstanceID) {
		return worker.Worker{}, failure.Invalidf("ec2_instance_id", "%.40q is not the id of an instance", n.EC2InstanceID)
	}
	if n.Name == "" {
		n.Name = n.EC2InstanceID
	}
	w, err := f.newWorker(n.Account, n.AWSRegion, n.Name, n.Profile)
	if err != nil {
		return worker.Worker{}, err
	}
	if n.WorkerID != "" {
		if err := failure.CheckName("worker_id", n.WorkerID); err != nil {
			return worker.Worker{}, err
		}
		w.ID = n.WorkerID
	}
	w.TemplateName, w.EC2InstanceID, w.Imported = n.TemplateName, n.EC2InstanceID, true
	w.License.Status = worker.LicenseUnknown
	w.Status, w.DesiredStatus = power.WorkerUnknown, power.WorkerRunning
	w.StatusReason = "imported, not observed yet"
	if in := n.Seen; in != nil {
		w.InstanceType, w.PublicIP, w.PrivateIP, w.HTTPSEndpoint = in.Type, in.PublicIP, in.PrivateIP, worker.Endpoint(in.PublicIP, in.PrivateIP)
		w.TakeTags(in.Tags, f.Settings().TagPrefix)
	}
	if len(w.ActivitySources) > 0 {
		return w, nil
	}
	p, err := f.Policy(ctx, &w)
	if err != nil {
		return worker.Worker{}, err
	}
	switch {
	case worker.SourcesGiven(&p):
	case n.Observable != nil:
		w.SetSources(n.Observable.Choose())
	default:
		w.SetSources(nil, "not detected yet: the machine is probed once it is seen running")
	}
	return w, nil
}

// newWorker returns the record of a new worker.
func (f *Fleet) newWorker(account, region, name string, p worker.Profile) (worker.Worker, error) {
	if region == "" {
		region = f.Settings().AWSDefaultRegion
	}
	if !settings.IsRegion(region) {
		return worker.Worker{}, failure.Invalidf("aws_region", "%.40q is not the name of a region", region)
	}
	if account != "" && !slices.Contains(f.opts.Accounts, account) {
		return worker.Worker{}, failure.Invalidf("account", "%.40q is not one of aws_accounts", account)
	}
	if err := failure.CheckName("name", name); err != nil {
		return worker.Worker{}, err
	}
	now := time.Now().UTC().Round(0)
	w := worker.Worker{
		ID: "w-" + strings.ToLower(rand.Text()[:14]), Name: name, AWSRegion: region, Account: account, CreatedAt: now, StatusSince: now,
		IsIdleDetectionEnabled: true, License: worker.License{Status: worker.LicenseUnregistered}, RecentActivityEvents: []worker.Event{},
	}
	return w, p.Set(f.Rules(), f.opts.Seal, &w)
}

// insert writes a new record and, if it has an instance, claims the instance.
func (f *Fleet) insert(ctx context.Context, w worker.Worker, e audit.Entry) (worker.Worker, error) {
	key := worker.Key(w.ID)
	keys := []string{key}
	if w.EC2InstanceID != "" {
		keys = append(keys, worker.InstanceKey(w.AWSRegion, w.EC2InstanceID))
	}
	done, err := store.Transact(ctx, f.store, keys, func(view []store.Value) ([]store.Op, error) {
		if view[0].Exists() {
			return nil, &failure.Conflict{Kind: "worker", Name: w.ID, Detail: "it exists already"}
		}
		data, err := w.Encode()
		if err != nil {
			return nil, err
		}
		ops := []store.Op{store.Put(key, data)}
		if len(view) > 1 {
			if view[1].Exists() {
				return nil, &failure.Conflict{Kind: "instance", Name: w.EC2InstanceID, Detail: "it belongs to a worker already"}
			}
			op, err := worker.InstanceOp(&w)
			if err != nil {
				return nil, err
			}
			ops = append(ops, op)
		}
		e.WorkerID, e.WorkerName, e.Region = w.ID, w.Name, w.AWSRegion
		note, err := audit.Ops(e)
		return append(ops, note...), err
	}, f.guards...)
	if err != nil {
		return worker.Worker{}, err
	}
	return w.At(done.Revision), nil
}

// UpdateWorker changes a worker's user settings. If revision is not 0, the record
// must have that revision. Errors: NotFound, Invalid, ErrStale.
func (f *Fleet) UpdateWorker(ctx context.Context, by audit.Actor, id string, revision int64, p worker.Profile) (worker.Worker, error) {
	return f.updateWorker(ctx, by, id, revision, func(*worker.Worker) (worker.Profile, error) { return p, nil })
}

// updateWorker is UpdateWorker with the profile that of returns for the worker,
// inside the transaction.
func (f *Fleet) updateWorker(ctx context.Context, by audit.Actor, id string, revision int64, of func(*worker.Worker) (worker.Profile, error)) (worker.Worker, error) {
	return f.Change(ctx, id, Changing{By: by, At: revision}, func(w *worker.Worker, tx *worker.Tx) error {
		p, err := of(w)
		if err != nil {
			return err
		}
		was, policyWas, scheduleWas := w.IsIdleDetectionEnabled, w.Policy, w.Schedule
		if d := p.TTLDeadline; d != nil && d.IsZero() && w.TTLFromTag {
			return &failure.Refused{Command: "change", Name: w.Name, Reason: "ttl_from_tag",
				Detail: "its ttl_deadline comes from the tag " + tx.Settings.TagPrefix + "ttl-deadline of its instance: change or remove the tag, or set another ttl_deadline"}
		}
		if err := p.Set(f.Rules(), f.opts.Seal, w); err != nil {
			return err
		}
		rules := rules.Application{Policy: p.Policy, Schedule: p.Schedule}
		e := audit.Entry{Action: "updated", Detail: rules.Describe("", policyWas, w.Policy, scheduleWas, w.Schedule)}
		if was != w.IsIdleDetectionEnabled {
			e.Events = []string{audit.EventDetection}
		}
		tx.Note(e)
		return nil
	})
}

// ForgetWorker removes the record of a TERMINATED worker. With force it also removes
// that of a Forgettable worker, whose instance may still exist; the audit entry says
// what may be left in the cloud. Errors: NotFound, Refused.
func (f *Fleet) ForgetWorker(ctx context.Context, by audit.Actor, id string, force bool) error {
	if err := failure.CheckName("worker_id", id); err != nil {
		return err
	}
	_, err := store.Update(ctx, f.store, worker.Key(id), func(old store.Value) ([]byte, []store.Op, error) {
		if !old.Exists() {
			return nil, nil, &failure.NotFound{Kind: "worker", Name: id}
		}
		w, err := worker.Decode(old)
		if err != nil {
			return nil, nil, err
		}
		switch left := w.LeftBehind(); {
		case w.Status == power.WorkerTerminated || force && w.Forgettable():
		case w.Forgettable():
			return nil, nil, &failure.Refused{Command: "forget", Name: w.Name, Reason: "force", Detail: strings.TrimSuffix(fmt.Sprintf("it is %s and can only be forgotten with force; %s", w.Status, left), "; ")}
		default:
			return nil, nil, &failure.Refused{Command: "forget", Name: w.Name, Reason: "status", Detail: fmt.Sprintf("it is %s, not TERMINATED; terminate it first", w.Status)}
		}
		e := audit.Entry{Action: "forgotten", By: by, WorkerID: id, WorkerName: w.Name, Region: w.AWSRegion, Detail: w.LeftBehind()}
		if w.Status != power.WorkerTerminated {
			e.Reason = "force"
		}
		ops, err := audit.Ops(e)
		if w.EC2InstanceID != "" {
			ops = append(ops, store.Delete(worker.InstanceKey(w.AWSRegion, w.EC2InstanceID)))
		}
		return nil, ops, err
	}, f.guards...)
	return err
}

// scaling is the record that serializes the scale-ups of a region.
type scaling struct {
	// Resumed maps each worker that a scale-up chose to start to the time of the
	// choice.
	Resumed map[string]time.Time `json:"resumed,omitempty"`
}

var scalingCodec = store.Codec[scaling]{Version: 1}

func scalingKey(region string) string { return scalingPrefix + region }

// resumeShows is how long after a scale-up chose a stopped worker the start may take
// to appear in the worker's record.
const resumeShows = time.Minute

// ScaleUp requests one more worker of a template. It starts a stopped one if there is
// any, and otherwise launches one. Check and choice are one transaction, so parallel
// requests never exceed MAX_WORKERS_PER_REGION and never choose the same worker.
// Errors: NotFound, Refused at the limit, and those of CreateWorker.
func (f *Fleet) ScaleUp(ctx context.Context, by audit.Actor, template, region, reason string) (worker.Worker, error) {
	if len(reason) > 512 {
		return worker.Worker{}, failure.Invalidf("reason", "%d bytes exceed the limit of 512", len(reason))
	}
	if region == "" {
		region = f.Settings().AWSDefaultRegion
	}
	w, e, err := f.prepare(ctx, by, NewWorker{Name: "scale-up", AWSRegion: region, TemplateName: template})
	if err != nil {
		return worker.Worker{}, err
	}
	var resume string
	key := worker.Key(w.ID)
	turn := scalingKey(region)
	done, err := store.Transact(ctx, f.store, []string{key, turn}, func(view []store.Value) ([]store.Op, error) {
		resume = ""
		var s scaling
		if view[1].Exists() {
			var err error
			if s, err = scalingCodec.Decode(turn, view[1].Data); err != nil {
				return nil, err
			}
		}
		now := time.Now().UTC()
		maps.DeleteFunc(s.Resumed, func(_ string, at time.Time) bool { return now.Sub(at) > resumeShows || at.Sub(now) > resumeShows })
		names, err := f.scale(ctx, region, template, &s, &resume)
		if err != nil {
			return nil, err
		}
		var ops []store.Op
		if resume != "" {
			if s.Resumed == nil {
				s.Resumed = map[string]time.Time{}
			}
			s.Resumed[resume] = now
		} else {
			w.Name = scaledName(template, now, names)
			data, err := w.Encode()
			if err != nil {
				return nil, err
			}
			e.WorkerID, e.WorkerName, e.Region = w.ID, w.Name, w.AWSRegion
			note, err := audit.Ops(e)
			if err != nil {
				return nil, err
			}
			ops = append(append(ops, store.Put(key, data)), note...)
		}
		data, err := scalingCodec.Encode(turn, s)
		return append(ops, store.Put(turn, data)), err
	}, f.guards...)
	if err != nil {
		return worker.Worker{}, err
	}
	if resume != "" {
		return f.ResumeWorker(ctx, by, resume)
	}
	return w.At(done.Revision), nil
}

// scale counts the live workers of a region, and sets resume to a stopped worker of
// the template if there is one. It returns the worker names in use. Errors: Refused
// at the limit.
func (f *Fleet) scale(ctx context.Context, region, template string, s *scaling, resume *string) (map[string]bool, error) {
	page, err := store.List(ctx, f.store, worker.Keys())
	if err != nil {
		return nil, err
	}
	live, names := 0, map[string]bool{}
	for _, v := range page.Values {
		w, err := worker.Decode(v)
		if err != nil {
			return nil, err
		}
		names[w.Name] = true
		if w.AWSRegion != region {
			continue
		}
		_, taken := s.Resumed[w.ID]
		switch w.Status {
		case power.WorkerStopped:
			switch {
			case taken || w.DesiredStatus == power.WorkerRunning:
				live++
			case w.TemplateName == template && w.DesiredStatus == power.WorkerStopped && f.overdue(time.Now(), &w, "resume") == nil && *resume == "":
				*resume = w.ID
			}
		case power.WorkerTerminating, power.WorkerTerminated, power.WorkerFailed:
		default:
			live++
		}
	}
	if most := f.Settings().MaxWorkersPerRegion; live >= most {
		return nil, &failure.Refused{Command: "scale up", Name: template, Reason: "max_workers_per_region",
			Detail: fmt.Sprintf("region %s has %d live workers, the limit is %d", region, live, most)}
	}
	return names, nil
}

// scaledName returns an unused worker name.
func scaledName(template string, now time.Time, used map[string]bool) string {
	name := fmt.Sprintf("cml-%.80s-%s", template, now.Format("20060102-150405"))
	for n := 1; ; n++ {
		next := name
		if n > 1 {
			next = fmt.Sprintf("%s-%d", name, n)
		}
		if !used[next] {
			return next
		}
	}
}
