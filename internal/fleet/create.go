package fleet

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/settings"
	"lull/internal/store"
)

// Profile contains what users may set on a worker, at its creation or later. A
// nil field is unchanged.
type Profile struct {
	Name                   *string           `json:"name,omitempty"`
	Tags                   map[string]string `json:"tags,omitempty"`
	Owner                  *string           `json:"owner,omitempty"`
	Contacts               []string          `json:"contacts,omitempty"`
	IsIdleDetectionEnabled *bool             `json:"is_idle_detection_enabled,omitempty"`
	IdleTimeoutMinutes     *int              `json:"idle_timeout_minutes,omitempty"` // 0 inherits from the policy
	SnoozeMinutes          *int              `json:"snooze_minutes,omitempty"`       // -1 inherits from the policy
	PauseAction            *string           `json:"pause_action,omitempty"`
	PauseHolder            *string           `json:"pause_holder,omitempty"`
	TTLDeadline            *time.Time        `json:"ttl_deadline,omitempty"` // the zero time removes it, as null does in the API
	TTLAction              *string           `json:"ttl_action,omitempty"`
	Schedule               *string           `json:"schedule,omitempty"`
	Policy                 *string           `json:"policy,omitempty"`
	ActivitySources        []string          `json:"activity_sources,omitempty"`
	AcceptedRisks          []string          `json:"accepted_risks,omitempty"`
	CMLUsername            *string           `json:"cml_username,omitempty"`
	CMLPassword            *string           `json:"cml_password,omitempty"`
	TLSCA                  *string           `json:"tls_ca,omitempty"`
	TLSPin                 *string           `json:"tls_pin,omitempty"`
	TLSInsecure            *bool             `json:"tls_insecure,omitempty"`
}

// Clear removes a field's value, so that it is inherited or unset: null in the
// API. Errors: Invalid for a field that a worker needs.
func (p *Profile) Clear(field string) error {
	none := ""
	texts := map[string]**string{"owner": &p.Owner, "pause_action": &p.PauseAction, "ttl_action": &p.TTLAction, "schedule": &p.Schedule,
		"policy": &p.Policy, "cml_username": &p.CMLUsername, "cml_password": &p.CMLPassword, "tls_ca": &p.TLSCA, "tls_pin": &p.TLSPin}
	lists := map[string]*[]string{"contacts": &p.Contacts, "activity_sources": &p.ActivitySources, "accepted_risks": &p.AcceptedRisks}
	switch to, list := texts[field], lists[field]; {
	case to != nil:
		*to = &none
	case list != nil:
		*list = []string{}
	case field == "ttl_deadline":
		p.TTLDeadline = &time.Time{}
	case field == "idle_timeout_minutes":
		p.IdleTimeoutMinutes = new(0)
	case field == "snooze_minutes":
		p.SnoozeMinutes = new(-1)
	case field == "tags":
		p.Tags = map[string]string{}
	default:
		return failure.Invalidf(field, "it cannot be taken away")
	}
	return nil
}

// NewWorker describes a worker to create.
type NewWorker struct {
	Name         string `json:"name"`
	AWSRegion    string `json:"aws_region,omitempty"` // empty is aws_default_region
	Account      string `json:"account,omitempty"`    // one of aws_accounts; empty is the credentials' own
	TemplateName string `json:"template_name"`
	InstanceType string `json:"instance_type,omitempty"` // overrides the template's
	AMIID        string `json:"ami_id,omitempty"`        // overrides the newest that matches
	// WorkerID is the ID to use, for a call that may be repeated; empty
	// generates one.
	WorkerID string `json:"-"`
	Profile
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
	// Observable is the result of probing it; nil leaves that to the
	// controller.
	Observable *Observable `json:"-"`
	Profile
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

// Endpoint returns where the CML of a machine with these addresses would
// answer; empty without an address.
func Endpoint(publicIP, privateIP string) string {
	if ip := cmp.Or(publicIP, privateIP); ip != "" {
		return "https://" + ip
	}
	return ""
}

// Preflight codes.
const (
	RiskInstanceStore = "instance_store"
	RiskNoElasticIP   = "no_elastic_ip"
	RiskASGMember     = "asg_member"
	RiskSpot          = "spot"
	RiskStopProtected = "stop_protected"
)

var risks = []string{RiskInstanceStore, RiskNoElasticIP, RiskASGMember, RiskSpot, RiskStopProtected}

// set applies p to w. It returns every fault.
func (p Profile) set(f *Fleet, w *Worker) error {
	var errs []error
	fail := func(field, format string, args ...any) { errs = append(errs, failure.Invalidf(field, format, args...)) }
	text := func(field string, to *string, v *string, most int, oneOf ...string) {
		switch {
		case v == nil:
			return
		case len(*v) > most:
			fail(field, "it has %d bytes, the limit is %d", len(*v), most)
		case len(oneOf) > 0 && *v != "" && !slices.Contains(oneOf, *v):
			fail(field, "%.40q is not one of %s", *v, strings.Join(oneOf, ", "))
		}
		*to = *v
	}
	list := func(field string, to *[]string, v []string, oneOf []string) {
		if v == nil {
			return
		}
		for _, s := range v {
			if len(s) == 0 || len(s) > 200 || oneOf != nil && !slices.Contains(oneOf, s) {
				fail(field, "%.40q is not allowed", s)
			}
		}
		if len(v) > 50 {
			fail(field, "there are %d, the limit is 50", len(v))
		}
		*to = slices.Clone(v)
	}
	text("name", &w.Name, p.Name, 128)
	text("owner", &w.Owner, p.Owner, 256)
	text("pause_action", &w.PauseAction, p.PauseAction, 16, ActionStop, ActionHibernate, ActionAuto)
	text("pause_holder", &w.PauseHolder, p.PauseHolder, 16, HolderController, HolderAgent)
	end := cmp.Or(w.TTLAction, ActionStop)
	if text("ttl_action", &w.TTLAction, p.TTLAction, 16, ActionStop, "terminate"); cmp.Or(w.TTLAction, ActionStop) != end {
		w.unwarnTTL() // a warning of a stop is no warning of a termination
	}
	ruled := [2]string{w.Policy, w.Schedule}
	text("schedule", &w.Schedule, p.Schedule, 64)
	text("policy", &w.Policy, p.Policy, 64)
	if rules := f.Rules(); ruled != [2]string{w.Policy, w.Schedule} {
		if _, ok := rules.Policies[w.Policy]; !ok && w.Policy != "" {
			fail("policy", "there is no policy %.40q", w.Policy)
		}
		if rules.Schedules[w.Schedule] == nil && w.Schedule != "" {
			fail("schedule", "there is no schedule %.40q", w.Schedule)
		}
		now := time.Now().UTC().Round(0)
		w.PolicySince = &now
	}
	text("cml_username", &w.CMLUsername, p.CMLUsername, 256)
	text("tls_ca", &w.TLSCA, p.TLSCA, 64<<10)
	text("tls_pin", &w.TLSPin, p.TLSPin, 256)
	list("contacts", &w.Contacts, p.Contacts, nil)
	if p.ActivitySources != nil {
		w.ActivitySourcesReason, w.DetectSources = "", false
	}
	list("activity_sources", &w.ActivitySources, p.ActivitySources, []string{SourceCML, SourceAgent, SourceCloudWatch})
	list("accepted_risks", &w.AcceptedRisks, p.AcceptedRisks, risks)
	errs = append(errs, p.setNumbers(w), p.setTags(w))
	if p.CMLPassword != nil {
		s, err := f.opts.Seal.Seal("cml_password", *p.CMLPassword)
		errs = append(errs, err)
		w.CMLPassword = s
	}
	if p.TLSInsecure != nil {
		w.TLSInsecure = *p.TLSInsecure
	}
	if p.IsIdleDetectionEnabled != nil {
		w.IsIdleDetectionEnabled = *p.IsIdleDetectionEnabled
	}
	if w.PauseHolder == "" {
		w.PauseHolder = HolderController
	}
	return errors.Join(errs...)
}

func (p Profile) setNumbers(w *Worker) error {
	var errs []error
	minutes := func(field string, to **int, v *int, none int) {
		switch {
		case v == nil:
		case *v == none:
			*to = nil
		case *v < 0 || *v > settings.MaxMinutes:
			errs = append(errs, failure.Invalidf(field, "%d is not between 0 and %d", *v, settings.MaxMinutes))
		default:
			n := *v
			*to = &n
		}
	}
	minutes("idle_timeout_minutes", &w.IdleTimeoutMinutes, p.IdleTimeoutMinutes, 0)
	minutes("snooze_minutes", &w.SnoozeMinutes, p.SnoozeMinutes, -1)
	if p.TTLDeadline != nil {
		was := w.TTLDeadline
		w.TTLDeadline, w.TTLFromTag = nil, false
		if !p.TTLDeadline.IsZero() {
			t := p.TTLDeadline.UTC().Round(0)
			w.TTLDeadline = &t
		}
		if was == nil || w.TTLDeadline == nil || !was.Equal(*w.TTLDeadline) {
			w.unwarnTTL()
		}
	}
	return errors.Join(errs...)
}

func (p Profile) setTags(w *Worker) error {
	if p.Tags == nil {
		return nil
	}
	var errs []error
	if len(p.Tags) > maxTags {
		errs = append(errs, failure.Invalidf("tags", "there are %d, EC2 takes 50 with ours", len(p.Tags)))
	}
	for _, k := range slices.Sorted(maps.Keys(p.Tags)) {
		if k == "" || len(k) > 127 || strings.HasPrefix(k, "aws:") || len(p.Tags[k]) > 255 {
			errs = append(errs, failure.Invalidf("tags", "%.40q is too long, empty or AWS's own", k))
		}
	}
	w.Tags = maps.Clone(p.Tags)
	return errors.Join(errs...)
}

// maxTags leaves room for ours among EC2's 50.
const maxTags = 40

// TakeTags copies an instance's tags to an imported worker, except names that
// the worker already has, so that policies and savings by tag find it. Names of
// AWS, those with prefix, and the instance's Name are left out.
func (w *Worker) TakeTags(tags map[string]string, prefix string) {
	if !w.Imported {
		return
	}
	for _, k := range slices.Sorted(maps.Keys(tags)) {
		_, has := w.Tags[k]
		if has || k == "" || k == "Name" || len(k) > 127 || len(tags[k]) > 255 || strings.HasPrefix(k, "aws:") || strings.HasPrefix(k, prefix) || len(w.Tags) >= maxTags {
			continue
		}
		if w.Tags == nil {
			w.Tags = map[string]string{}
		}
		w.Tags[k] = tags[k]
	}
}

// CreateWorker records a worker that the controller will launch. It is armed.
// Errors: Invalid, NotFound (template).
func (f *Fleet) CreateWorker(ctx context.Context, by audit.Actor, n NewWorker) (Worker, error) {
	w, e, err := f.prepare(ctx, by, n)
	if err != nil {
		return Worker{}, err
	}
	return f.insert(ctx, w, e)
}

// prepare returns the record of a worker to launch, and the audit entry of its
// creation, without writing either.
func (f *Fleet) prepare(ctx context.Context, by audit.Actor, n NewWorker) (Worker, audit.Entry, error) {
	tmpl, err := f.Template(ctx, n.TemplateName)
	if err != nil {
		return Worker{}, audit.Entry{}, err
	}
	if !tmpl.Enabled {
		return Worker{}, audit.Entry{}, &failure.Refused{Command: "create from", Name: tmpl.Name, Reason: "template_disabled", Detail: "the template is disabled"}
	}
	w, err := f.newWorker(n.Account, n.AWSRegion, n.Name, n.Profile)
	if err != nil {
		return Worker{}, audit.Entry{}, err
	}
	if n.InstanceType != "" && !instanceType.MatchString(n.InstanceType) {
		return Worker{}, audit.Entry{}, failure.Invalidf("instance_type", "%.40q is not an EC2 instance type", n.InstanceType)
	}
	if n.AMIID != "" && !strings.HasPrefix(n.AMIID, "ami-") {
		return Worker{}, audit.Entry{}, failure.Invalidf("ami_id", "%.40q is not the id of an image", n.AMIID)
	}
	if n.WorkerID != "" {
		if err := failure.CheckName("worker_id", n.WorkerID); err != nil {
			return Worker{}, audit.Entry{}, err
		}
		w.ID = n.WorkerID
	}
	tmpl.inherit(&w, n.Profile)
	w.TemplateName, w.InstanceType, w.AMIID = n.TemplateName, n.InstanceType, n.AMIID
	w.Status, w.DesiredStatus, w.Armed, w.LaunchGeneration = power.WorkerPending, power.WorkerRunning, true, 1
	return w, audit.Entry{Action: "created", Events: []string{audit.EventCreated}, By: by, To: w.Status}, nil
}

var instanceID = regexp.MustCompile(`^i-(?:[0-9a-f]{8}|[0-9a-f]{17})$`)

// ImportWorker records an existing instance. It starts in dry run, and its
// first observation determines the desired status. Errors: Invalid, Conflict.
func (f *Fleet) ImportWorker(ctx context.Context, by audit.Actor, n ImportedWorker) (Worker, error) {
	w, err := f.Candidate(ctx, n)
	if err != nil {
		return Worker{}, err
	}
	e := audit.Entry{Action: "imported", Events: []string{audit.EventImported}, By: by, To: w.Status, Detail: n.EC2InstanceID}
	if w.ActivitySourcesReason != "" {
		e.Detail += "; activity sources: " + w.ActivitySourcesReason
	}
	return f.insert(ctx, w, e)
}

// Candidate returns the record that ImportWorker would write, without writing
// it. Errors: Invalid.
func (f *Fleet) Candidate(ctx context.Context, n ImportedWorker) (Worker, error) {
	if !instanceID.MatchString(n.EC2InstanceID) {
		return Worker{}, failure.Invalidf("ec2_instance_id", "%.40q is not the id of an instance", n.EC2InstanceID)
	}
	if n.Name == "" {
		n.Name = n.EC2InstanceID
	}
	w, err := f.newWorker(n.Account, n.AWSRegion, n.Name, n.Profile)
	if err != nil {
		return Worker{}, err
	}
	if n.WorkerID != "" {
		if err := failure.CheckName("worker_id", n.WorkerID); err != nil {
			return Worker{}, err
		}
		w.ID = n.WorkerID
	}
	w.TemplateName, w.EC2InstanceID, w.Imported = n.TemplateName, n.EC2InstanceID, true
	w.License.Status = LicenseUnknown
	w.Status, w.DesiredStatus = power.WorkerUnknown, power.WorkerRunning
	w.StatusReason = "imported, not observed yet"
	if in := n.Seen; in != nil {
		w.InstanceType, w.PublicIP, w.PrivateIP, w.HTTPSEndpoint = in.Type, in.PublicIP, in.PrivateIP, Endpoint(in.PublicIP, in.PrivateIP)
		w.TakeTags(in.Tags, f.Settings().TagPrefix)
	}
	if len(w.ActivitySources) > 0 {
		return w, nil
	}
	p, err := f.Policy(ctx, &w)
	if err != nil {
		return Worker{}, err
	}
	switch {
	case SourcesGiven(&p):
	case n.Observable != nil:
		w.SetSources(n.Observable.Choose())
	default:
		w.SetSources(nil, "not detected yet: the machine is probed once it is seen running")
	}
	return w, nil
}

// newWorker returns the record of a new worker.
func (f *Fleet) newWorker(account, region, name string, p Profile) (Worker, error) {
	if region == "" {
		region = f.Settings().AWSDefaultRegion
	}
	if !settings.IsRegion(region) {
		return Worker{}, failure.Invalidf("aws_region", "%.40q is not the name of a region", region)
	}
	if account != "" && !slices.Contains(f.opts.Accounts, account) {
		return Worker{}, failure.Invalidf("account", "%.40q is not one of aws_accounts", account)
	}
	if err := failure.CheckName("name", name); err != nil {
		return Worker{}, err
	}
	now := time.Now().UTC().Round(0)
	w := Worker{
		ID: "w-" + strings.ToLower(rand.Text()[:14]), Name: name, AWSRegion: region, Account: account, CreatedAt: now, StatusSince: now,
		IsIdleDetectionEnabled: true, License: License{Status: LicenseUnregistered}, RecentActivityEvents: []Event{},
	}
	return w, p.set(f, &w)
}

// insert writes a new record and, if it has an instance, claims the instance.
func (f *Fleet) insert(ctx context.Context, w Worker, e audit.Entry) (Worker, error) {
	key := workerKey(w.ID)
	keys := []string{key}
	if w.EC2InstanceID != "" {
		keys = append(keys, instanceKey(w.AWSRegion, w.EC2InstanceID))
	}
	done, err := store.Transact(ctx, f.store, keys, func(view []store.Value) ([]store.Op, error) {
		if view[0].Exists() {
			return nil, &failure.Conflict{Kind: "worker", Name: w.ID, Detail: "it exists already"}
		}
		data, err := workerCodec.Encode(key, w)
		if err != nil {
			return nil, err
		}
		ops := []store.Op{store.Put(key, data)}
		if len(view) > 1 {
			if view[1].Exists() {
				return nil, &failure.Conflict{Kind: "instance", Name: w.EC2InstanceID, Detail: "it belongs to a worker already"}
			}
			op, err := indexOp(&w)
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
		return Worker{}, err
	}
	w.revision = done.Revision
	return w, nil
}

// UpdateWorker changes a worker's user settings. If revision is not 0 the
// worker must have it. Errors: NotFound, Invalid, ErrStale.
func (f *Fleet) UpdateWorker(ctx context.Context, by audit.Actor, id string, revision int64, p Profile) (Worker, error) {
	return f.updateWorker(ctx, by, id, revision, func(*Worker) (Profile, error) { return p, nil })
}

// updateWorker is UpdateWorker with a profile computed from the worker inside
// its transaction.
func (f *Fleet) updateWorker(ctx context.Context, by audit.Actor, id string, revision int64, of func(*Worker) (Profile, error)) (Worker, error) {
	return f.Change(ctx, id, Changing{By: by, At: revision}, func(w *Worker, tx *Tx) error {
		p, err := of(w)
		if err != nil {
			return err
		}
		was, policyWas, scheduleWas := w.IsIdleDetectionEnabled, w.Policy, w.Schedule
		if d := p.TTLDeadline; d != nil && d.IsZero() && w.TTLFromTag {
			return &failure.Refused{Command: "change", Name: w.Name, Reason: "ttl_from_tag",
				Detail: "its ttl_deadline is that of the tag " + tx.Settings.TagPrefix + "ttl-deadline of its instance: change or remove the tag, or give another ttl_deadline"}
		}
		if err := p.set(f, w); err != nil {
			return err
		}
		rules := Application{Policy: p.Policy, Schedule: p.Schedule}
		e := audit.Entry{Action: "updated", Detail: rules.said("", policyWas, w.Policy, scheduleWas, w.Schedule)}
		if was != w.IsIdleDetectionEnabled {
			e.Events = []string{audit.EventDetection}
		}
		tx.Note(e)
		return nil
	})
}

// ForgetWorker removes the record of a TERMINATED worker. With force it also
// removes that of a Forgettable one, of which it is unknown what remains; the
// audit entry says what that may be. Errors: NotFound, Refused.
func (f *Fleet) ForgetWorker(ctx context.Context, by audit.Actor, id string, force bool) error {
	if err := failure.CheckName("worker_id", id); err != nil {
		return err
	}
	_, err := store.Update(ctx, f.store, workerKey(id), func(old store.Value) ([]byte, []store.Op, error) {
		if !old.Exists() {
			return nil, nil, &failure.NotFound{Kind: "worker", Name: id}
		}
		w, err := DecodeWorker(old)
		if err != nil {
			return nil, nil, err
		}
		switch left := w.LeftBehind(); {
		case w.Status == power.WorkerTerminated || force && w.Forgettable():
		case w.Forgettable():
			return nil, nil, &failure.Refused{Command: "forget", Name: w.Name, Reason: "force", Detail: strings.TrimSuffix(fmt.Sprintf("it is %s, and only force forgets it; %s", w.Status, left), "; ")}
		default:
			return nil, nil, &failure.Refused{Command: "forget", Name: w.Name, Reason: "status", Detail: fmt.Sprintf("it is %s, not TERMINATED; terminate it first", w.Status)}
		}
		e := audit.Entry{Action: "forgotten", By: by, WorkerID: id, WorkerName: w.Name, Region: w.AWSRegion, Detail: w.LeftBehind()}
		if w.Status != power.WorkerTerminated {
			e.Reason = "force"
		}
		ops, err := audit.Ops(e)
		if w.EC2InstanceID != "" {
			ops = append(ops, store.Delete(instanceKey(w.AWSRegion, w.EC2InstanceID)))
		}
		return nil, ops, err
	}, f.guards...)
	return err
}

// scaling is the record that serializes the scale-ups of a region.
type scaling struct {
	// Resumed are workers that a scale-up chose to start, and when.
	Resumed map[string]time.Time `json:"resumed,omitempty"`
}

var scalingCodec = store.Codec[scaling]{Version: 1}

func scalingKey(region string) string { return scalingPrefix + region }

// resumeShows is how long a scale-up that chose a stopped worker may take to
// record the start.
const resumeShows = time.Minute

// ScaleUp requests one more worker of a template: it starts a stopped one if
// there is any, otherwise it launches one. Check and choice are one
// transaction, so that parallel requests never exceed MAX_WORKERS_PER_REGION
// and never choose the same worker. Errors: NotFound, Refused at the limit, and
// those of CreateWorker.
func (f *Fleet) ScaleUp(ctx context.Context, by audit.Actor, template, region, reason string) (Worker, error) {
	if len(reason) > 512 {
		return Worker{}, failure.Invalidf("reason", "it has %d bytes, the limit is 512", len(reason))
	}
	if region == "" {
		region = f.Settings().AWSDefaultRegion
	}
	w, e, err := f.prepare(ctx, by, NewWorker{Name: "scale-up", AWSRegion: region, TemplateName: template})
	if err != nil {
		return Worker{}, err
	}
	var resume string
	key := workerKey(w.ID)
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
			data, err := workerCodec.Encode(key, w)
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
		return Worker{}, err
	}
	if resume != "" {
		return f.ResumeWorker(ctx, by, resume)
	}
	w.revision = done.Revision
	return w, nil
}

// scale counts the live workers of a region, and chooses a stopped one of a
// template. It returns the names in use. Errors: Refused at the limit.
func (f *Fleet) scale(ctx context.Context, region, template string, s *scaling, resume *string) (map[string]bool, error) {
	page, err := store.List(ctx, f.store, WorkerKeys())
	if err != nil {
		return nil, err
	}
	live, names := 0, map[string]bool{}
	for _, v := range page.Values {
		w, err := DecodeWorker(v)
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
