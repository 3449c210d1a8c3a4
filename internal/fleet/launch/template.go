// Package launch holds the templates from which workers are launched, and the
// user data that installs and enrolls the agent on a launched machine.
package launch

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// templatePrefix begins the keys of templates.
const templatePrefix = "templates/"

// Capacity is the load that a worker of a template can carry.
type Capacity struct {
	CPUCores  int `json:"cpu_cores,omitempty"`
	MemoryGB  int `json:"memory_gb,omitempty"`
	StorageGB int `json:"storage_gb,omitempty"`
	MaxNodes  int `json:"max_nodes,omitempty"`
}

// IdleDetection is a template's block of that name.
type IdleDetection struct {
	Enabled                   bool `json:"enabled"`
	IdleThresholdMinutes      int  `json:"idle_threshold_minutes,omitempty"`      // when the warning starts
	HibernateThresholdMinutes int  `json:"hibernate_threshold_minutes,omitempty"` // the idle timeout
	CheckIntervalMinutes      int  `json:"check_interval_minutes,omitempty"`
}

// RootVolume is a template's root volume. For zero fields the image's value applies,
// or what hibernation needs.
type RootVolume struct {
	GB        int    `json:"gb,omitempty" minimum:"0" maximum:"16384"`
	Encrypted bool   `json:"encrypted,omitempty"`
	Type      string `json:"type,omitempty" maxLength:"16" doc:"As EC2 names it: gp3"`
}

// Values of a template's hibernation setting. Empty means auto.
const (
	HibernationAuto = "auto" // on if the effective policy may hibernate, and type and image allow it
	HibernationOn   = "on"   // a launch that cannot hibernate fails
	HibernationOff  = "off"
)

var volumeTypes = []string{"gp2", "gp3", "io1", "io2", "st1", "sc1", "standard"}

// Template holds the launch parameters of workers. Its workers inherit the launch
// options, the fields after IdleDetection.
type Template struct {
	Name               string         `json:"name"`
	Description        string         `json:"description,omitempty"`
	InstanceType       string         `json:"instance_type"`
	AMINameFilter      string         `json:"ami_name_filter"`
	UserData           string         `json:"user_data,omitempty"`
	IAMInstanceProfile string         `json:"iam_instance_profile,omitempty"`
	Capacity           Capacity       `json:"capacity"`
	Enabled            bool           `json:"enabled"`
	IdleDetection      *IdleDetection `json:"idle_detection,omitempty"`

	RootVolume      *RootVolume   `json:"root_volume,omitempty"`
	Hibernation     string        `json:"hibernation,omitempty"`
	Agent           bool          `json:"agent,omitempty"`
	CMLUsername     string        `json:"cml_username,omitempty"`
	CMLPassword     sealed.Secret `json:"cml_password,omitempty"`
	TLSCA           string        `json:"tls_ca,omitempty"`
	TLSPin          string        `json:"tls_pin,omitempty"`
	TLSInsecure     bool          `json:"tls_insecure,omitempty"`
	ActivitySources []string      `json:"activity_sources,omitempty"`
	AcceptedRisks   []string      `json:"accepted_risks,omitempty"`

	revision int64
}

// Public returns t without its secrets.
func (t Template) Public() Template {
	t.CMLPassword = ""
	return t
}

// Inherit sets those launch options of w that p does not set.
func (t Template) Inherit(w *worker.Worker, p worker.Profile) {
	if p.CMLUsername == nil {
		w.CMLUsername = t.CMLUsername
	}
	if p.CMLPassword == nil {
		w.CMLPassword = t.CMLPassword
	}
	if p.TLSCA == nil && p.TLSPin == nil && p.TLSInsecure == nil { // these belong together: inherit all or none
		w.TLSCA, w.TLSPin, w.TLSInsecure = t.TLSCA, t.TLSPin, t.TLSInsecure
	}
	if p.ActivitySources == nil {
		w.ActivitySources = slices.Clone(t.ActivitySources)
	}
	if p.AcceptedRisks == nil {
		w.AcceptedRisks = slices.Clone(t.AcceptedRisks)
	}
}

// checkLaunch returns every fault of t's launch options.
func (t Template) checkLaunch() (errs []error) {
	bad := func(field, format string, args ...any) { errs = append(errs, failure.Invalidf(field, format, args...)) }
	if v := t.RootVolume; v != nil {
		if v.GB < 0 || v.GB > 16384 {
			bad("root_volume.gb", "%d is not between 0 and 16384", v.GB)
		}
		if v.Type != "" && !slices.Contains(volumeTypes, v.Type) {
			bad("root_volume.type", "%.20q is not one of %s", v.Type, strings.Join(volumeTypes, ", "))
		}
	}
	if !slices.Contains([]string{"", HibernationAuto, HibernationOn, HibernationOff}, t.Hibernation) {
		bad("hibernation", "%.20q is not one of auto, on, off", t.Hibernation)
	}
	for _, s := range t.ActivitySources {
		if !slices.Contains([]string{worker.SourceCML, worker.SourceAgent, worker.SourceCloudWatch}, s) {
			bad("activity_sources", "%.40q is not one of cml, agent, cloudwatch", s)
		}
	}
	for _, r := range t.AcceptedRisks {
		if !slices.Contains(worker.Risks, r) {
			bad("accepted_risks", "%.40q is not one of %s", r, strings.Join(worker.Risks, ", "))
		}
	}
	for field, v := range map[string]struct {
		text string
		most int
	}{"cml_username": {t.CMLUsername, 256}, "tls_ca": {t.TLSCA, 64 << 10}, "tls_pin": {t.TLSPin, 256}} {
		if len(v.text) > v.most {
			bad(field, "it has %d bytes, the limit is %d", len(v.text), v.most)
		}
	}
	return errs
}

// Revision is the store revision of the template as it was read.
func (t Template) Revision() int64 { return t.revision }

var InstanceType = regexp.MustCompile(`^[a-z0-9-]{1,20}\.[a-z0-9-]{1,20}$`)

// Validate returns every fault of t.
func (t Template) Validate() error {
	var errs []error
	if err := failure.CheckName("name", t.Name); err != nil {
		errs = append(errs, err)
	}
	if !InstanceType.MatchString(t.InstanceType) {
		errs = append(errs, failure.Invalidf("instance_type", "%.40q is not an EC2 instance type", t.InstanceType))
	}
	if t.AMINameFilter == "" || len(t.AMINameFilter) > 255 {
		errs = append(errs, failure.Invalidf("ami_name_filter", "it must have 1 to 255 bytes"))
	}
	if len(t.UserData) > maxUserData {
		errs = append(errs, failure.Invalidf("user_data", "it has %d bytes, EC2's limit is 16384", len(t.UserData)))
	}
	if t.Agent && t.UserData != "" && userDataType(t.UserData) == "" {
		errs = append(errs, failure.Invalidf("user_data", "with agent it must begin with #!, #cloud-config, #cloud-boothook or #include"))
	}
	if c := t.Capacity; c.CPUCores < 0 || c.MemoryGB < 0 || c.StorageGB < 0 || c.MaxNodes < 0 {
		errs = append(errs, failure.Invalidf("capacity", "its values must not be negative"))
	}
	if d := t.IdleDetection; d != nil {
		for _, f := range []struct {
			name string
			v    int
		}{{"idle_threshold_minutes", d.IdleThresholdMinutes}, {"hibernate_threshold_minutes", d.HibernateThresholdMinutes}, {"check_interval_minutes", d.CheckIntervalMinutes}} {
			if f.v < 0 || f.v > settings.MaxMinutes {
				errs = append(errs, failure.Invalidf("idle_detection."+f.name, "%d is not between 0 and %d", f.v, settings.MaxMinutes))
			}
		}
		if d.HibernateThresholdMinutes > 0 && d.IdleThresholdMinutes > d.HibernateThresholdMinutes {
			errs = append(errs, failure.Invalidf("idle_detection.idle_threshold_minutes", "must not exceed hibernate_threshold_minutes: the warning cannot start after the timeout"))
		}
	}
	return errors.Join(append(errs, t.checkLaunch()...)...)
}

// Launches holds the templates in a store, and makes the user data with which
// launched machines enroll.
type Launches struct {
	store    store.Store
	seal     *sealed.Sealer
	fleet    string // ID of the fleet
	settings func() settings.Settings
}

// New returns the launches of a fleet.
func New(s store.Store, seal *sealed.Sealer, fleet string, current func() settings.Settings) *Launches {
	return &Launches{s, seal, fleet, current}
}

var templateCodec = store.Codec[Template]{Version: 1}

func decodeTemplate(v store.Value) (Template, error) {
	t, err := templateCodec.Decode(v.Key, v.Data)
	t.revision = v.ModRevision
	return t, err
}

// Template returns the template of that name.
func (l *Launches) Template(ctx context.Context, name string) (Template, error) {
	if err := failure.CheckName("template", name); err != nil {
		return Template{}, err
	}
	v, err := store.Get(ctx, l.store, templatePrefix+name)
	if errors.Is(err, store.ErrNotFound) {
		return Template{}, &failure.NotFound{Kind: "template", Name: name}
	}
	if err != nil {
		return Template{}, fmt.Errorf("cannot read template %q: %w", name, err)
	}
	return decodeTemplate(v)
}

// Templates lists all templates by name.
func (l *Launches) Templates(ctx context.Context) ([]Template, error) {
	page, err := store.List(ctx, l.store, store.Prefix(templatePrefix))
	if err != nil {
		return nil, err
	}
	out := make([]Template, 0, len(page.Values))
	for _, v := range page.Values {
		t, err := decodeTemplate(v)
		if err != nil {
			return nil, err
		}
		out = append(out, t)
	}
	return out, nil
}

// PutTemplate creates or replaces a template. If revision is not 0, the stored
// template must have that revision. Errors: Invalid, Conflict.
func (l *Launches) PutTemplate(ctx context.Context, by audit.Actor, t Template, revision int64) (Template, error) {
	return l.PutTemplateWith(ctx, by, t, nil, revision)
}

// PutTemplateWith is PutTemplate with a CML password; nil keeps the stored one.
func (l *Launches) PutTemplateWith(ctx context.Context, by audit.Actor, t Template, password *string, revision int64) (Template, error) {
	if err := t.Validate(); err != nil {
		return Template{}, err
	}
	if password != nil {
		var err error
		if t.CMLPassword, err = l.seal.Seal("cml_password", *password); err != nil {
			return Template{}, err
		}
	}
	key := templatePrefix + t.Name
	v, err := store.Update(ctx, l.store, key, func(old store.Value) ([]byte, []store.Op, error) {
		if revision != 0 && old.ModRevision != revision {
			return nil, nil, &failure.Conflict{Kind: "template", Name: t.Name, Detail: "it was changed by another user"}
		}
		if password == nil && old.Exists() {
			was, err := templateCodec.Decode(key, old.Data)
			if err != nil {
				return nil, nil, err
			}
			t.CMLPassword = was.CMLPassword
		}
		data, err := templateCodec.Encode(key, t)
		if err != nil {
			return nil, nil, err
		}
		ops, err := audit.Ops(audit.Entry{Action: "template_put", By: by, Detail: "template " + t.Name})
		return data, ops, err
	})
	t.revision = v.ModRevision
	return t, err
}

// DeleteTemplate removes a template. Workers launched from it remain.
func (l *Launches) DeleteTemplate(ctx context.Context, by audit.Actor, name string) error {
	if err := failure.CheckName("template", name); err != nil {
		return err
	}
	_, err := store.Update(ctx, l.store, templatePrefix+name, func(old store.Value) ([]byte, []store.Op, error) {
		if !old.Exists() {
			return nil, nil, &failure.NotFound{Kind: "template", Name: name}
		}
		ops, err := audit.Ops(audit.Entry{Action: "template_deleted", By: by, Detail: "template " + name})
		return nil, ops, err
	})
	return err
}

// TemplateKeys returns the keys of all templates.
func TemplateKeys() store.Keys { return store.Prefix(templatePrefix) }

// TemplateName returns the name in the key of a template.
func TemplateName(key string) string { return strings.TrimPrefix(key, templatePrefix) }

// DecodeTemplate decodes a template from a watch or a listing.
func DecodeTemplate(v store.Value) (Template, error) { return decodeTemplate(v) }

// Values returns t's settings as one layer of a policy.
func (t *Template) Values(s settings.Settings) policy.Values {
	d := t.IdleDetection
	v := policy.Values{Enabled: &d.Enabled}
	timeout := int(s.WorkerIdleTimeout / time.Minute)
	if d.HibernateThresholdMinutes > 0 {
		timeout = d.HibernateThresholdMinutes
		v.IdleTimeoutMinutes = &timeout
	}
	if d.IdleThresholdMinutes > 0 {
		warn := max(0, timeout-d.IdleThresholdMinutes)
		v.WarnBeforeMinutes = &warn
	}
	if d.CheckIntervalMinutes > 0 {
		v.CheckIntervalMinutes = &d.CheckIntervalMinutes
	}
	return v
}
