package worker

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
)

// Profile contains the settings of a worker that users may change. Nil fields stay
// unchanged.
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
	TTLDeadline            *time.Time        `json:"ttl_deadline,omitempty"` // the zero time removes it; in the API, null does
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

// Clear removes the value of a field, so that the field is inherited or unset. In the
// API, null does that. Errors: Invalid for a field that a worker needs.
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
		return failure.Invalidf(field, "this field cannot be cleared")
	}
	return nil
}

// Endpoint returns the URL at which the CML of a machine with these addresses would
// answer; empty if it has no address.
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

var Risks = []string{RiskInstanceStore, RiskNoElasticIP, RiskASGMember, RiskSpot, RiskStopProtected}

// Set applies p to w. rules must contain the policy and schedule that p names. It
// returns every fault.
func (p Profile) Set(rules *policy.Set, seal *sealed.Sealer, w *Worker) error {
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
		w.unwarnTTL() // a warning of a stop does not announce a termination
	}
	ruled := [2]string{w.Policy, w.Schedule}
	text("schedule", &w.Schedule, p.Schedule, 64)
	text("policy", &w.Policy, p.Policy, 64)
	if ruled != [2]string{w.Policy, w.Schedule} {
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
	list("accepted_risks", &w.AcceptedRisks, p.AcceptedRisks, Risks)
	errs = append(errs, p.setNumbers(w), p.setTags(w))
	if p.CMLPassword != nil {
		s, err := seal.Seal("cml_password", *p.CMLPassword)
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
		errs = append(errs, failure.Invalidf("tags", "%d tags are too many: EC2 takes 50, and lull adds its own", len(p.Tags)))
	}
	for _, k := range slices.Sorted(maps.Keys(p.Tags)) {
		if k == "" || len(k) > 127 || strings.HasPrefix(k, "aws:") || len(p.Tags[k]) > 255 {
			errs = append(errs, failure.Invalidf("tags", "%.40q is empty, too long or reserved by AWS", k))
		}
	}
	w.Tags = maps.Clone(p.Tags)
	return errors.Join(errs...)
}

// maxTags is the maximum number of user tags. EC2 allows 50 tags; the rest is for
// lull's own.
const maxTags = 40

// TakeTags copies the tags of an imported instance to the worker, so that policies
// and savings by tag apply. It skips tags that the worker already has, AWS's own,
// those with prefix, and Name.
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
