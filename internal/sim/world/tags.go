package world

import (
	"strings"
	"time"
)

// Limits of EC2 tags.
const (
	tagsPerResource = 50
	tagKeyMax       = 128
	tagValueMax     = 256
)

func checkTags(tags []Tag) error {
	seen := map[string]bool{}
	for _, t := range tags {
		switch {
		case t.Key == "" || len(t.Key) > tagKeyMax || len(t.Value) > tagValueMax:
			return Refuse("InvalidParameterValue", "Tag '%.40s': keys hold 1 to %d characters and values up to %d", t.Key, tagKeyMax, tagValueMax)
		case strings.HasPrefix(t.Key, "aws:"):
			return Refuse("InvalidParameterValue", "Tag keys starting with 'aws:' are reserved for internal use")
		case seen[t.Key]:
			return Refuse("InvalidParameterValue", "Duplicate tag key '%s' specified.", t.Key)
		}
		seen[t.Key] = true
	}
	if len(tags) > tagsPerResource {
		return Refuse("TagLimitExceeded", "More than %d tags specified", tagsPerResource)
	}
	return nil
}

// Tag adds or replaces tags of instances.
func (w *World) Tag(account, region string, ids []string, tags []Tag, check func() error) error {
	if err := checkTags(tags); err != nil {
		return err
	}
	return w.retag(account, region, ids, check, func(t Tags) Tags { return t.with(tags) })
}

// Untag removes tags of instances.
func (w *World) Untag(account, region string, ids []string, tags []TagChoice, check func() error) error {
	return w.retag(account, region, ids, check, func(t Tags) Tags {
		if len(tags) == 0 {
			return nil
		}
		return t.without(tags)
	})
}

func (w *World) retag(account, region string, ids []string, check func() error, change func(Tags) Tags) error {
	_, err := w.command(account, region, ids, check, func(i *Instance, now Moment) error {
		if len(change(i.Tags)) > tagsPerResource {
			return Refuse("TagLimitExceeded", "The maximum number of Tags for a resource has been reached: %s", i.ID)
		}
		return nil
	}, func(i *Instance, now Moment) { w.setTags(now, i, change(i.Tags)) })
	return err
}

func (w *World) setTags(now Moment, i *Instance, t Tags) {
	if d := w.cfg.Consistency.Tags.D(); d > 0 {
		i.shown, i.shownTo = i.TagsAt(now.Wire), now.Wire.Add(d)
	}
	i.Tags = t
}

// Attributes are the attributes that ModifyInstanceAttribute and the control
// API can set.
type Attributes struct {
	NoStop         *bool              `json:"disable_api_stop,omitempty"`
	NoTerminate    *bool              `json:"disable_api_termination,omitempty"`
	Type           *string            `json:"instance_type,omitempty"`
	OnShutdown     *string            `json:"instance_initiated_shutdown_behavior,omitempty"`
	Stuck          *bool              `json:"stuck,omitempty"`
	Impaired       *bool              `json:"impaired,omitempty"`
	HopLimit       *int               `json:"hop_limit,omitempty"`
	TagsInMetadata *bool              `json:"tags_in_metadata,omitempty"`
	Elastic        *bool              `json:"elastic_ip,omitempty"`
	SpotNotice     *Duration          `json:"spot_notice,omitempty"` // announces a Spot interruption after this time
	OptIn          *bool              `json:"opt_in,omitempty"`
	OptInFault     *bool              `json:"opt_in_fault,omitempty"`
	DeregSlow      *bool              `json:"deregistration_slow,omitempty"`
	ClockOffset    *Duration          `json:"clock_offset,omitempty"`
	Spoil          *Spoil             `json:"spoil,omitempty"`
	Users          *[]UserScript      `json:"users,omitempty"`
	Tags           map[string]*string `json:"tags,omitempty"` // null deletes
}

// Set changes attributes of the instance with the ID or scenario name ref.
func (w *World) Set(ref string, a Attributes) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := w.lookup(ref)
	if i == nil {
		return Refuse("InvalidInstanceID.NotFound", "There is no instance %q", ref)
	}
	now := w.Clock.Now()
	w.advance(now, i)
	if err := a.check(i); err != nil {
		return err
	}
	set(&i.NoStop, a.NoStop)
	set(&i.NoTerminate, a.NoTerminate)
	set(&i.Type, a.Type)
	set(&i.OnShutdown, a.OnShutdown)
	set(&i.Impaired, a.Impaired)
	set(&i.HopLimit, a.HopLimit)
	set(&i.TagsInMetadata, a.TagsInMetadata)
	set(&i.Elastic, a.Elastic)
	if a.SpotNotice != nil {
		i.SpotAt = now.Wire.Add(a.SpotNotice.D())
	}
	if a.Stuck != nil && *a.Stuck != i.Stuck {
		i.Stuck = *a.Stuck
		if !i.Stuck && !i.Due.IsZero() && i.Due.Before(now.World) {
			i.Due = now.World.Add(time.Second)
		}
	}
	w.setTagsLoosely(now, i, a.Tags)
	if h := i.Host; h != nil {
		set(&h.OptIn, a.OptIn)
		set(&h.OptInFault, a.OptInFault)
		set(&h.DeregSlow, a.DeregSlow)
		set(&h.Spoil, a.Spoil)
		if a.ClockOffset != nil {
			h.Offset = a.ClockOffset.D()
		}
		if a.Users != nil {
			h.Users = nil
			for _, u := range *a.Users {
				u.fill()
				h.Users = append(h.Users, newUser(now, u, &h.dice))
			}
		}
	}
	return nil
}

func (w *World) setTagsLoosely(now Moment, i *Instance, tags map[string]*string) {
	if len(tags) == 0 {
		return
	}
	var add []Tag
	var gone []TagChoice
	for k, v := range tags {
		if v == nil {
			gone = append(gone, TagChoice{Key: k})
		} else {
			add = append(add, Tag{k, *v})
		}
	}
	w.setTags(now, i, i.Tags.with(add).without(gone))
}

func (a Attributes) check(i *Instance) error {
	if a.Type != nil {
		if _, ok := LookupType(*a.Type); !ok {
			return Refuse("InvalidInstanceAttributeValue", "Invalid type value: %s", *a.Type)
		}
		if i.State != Stopped {
			return incorrect(i, "modified", "stopped")
		}
	}
	if a.OnShutdown != nil && *a.OnShutdown != "stop" && *a.OnShutdown != "terminate" {
		return Refuse("InvalidParameterValue", "Value (%s) for parameter instanceInitiatedShutdownBehavior is invalid", *a.OnShutdown)
	}
	if a.HopLimit != nil && (*a.HopLimit < 1 || *a.HopLimit > 64) {
		return Refuse("InvalidParameterValue", "The hop limit %d is outside 1 to 64", *a.HopLimit)
	}
	if a.Users != nil {
		for _, u := range *a.Users {
			u.fill()
			if err := u.validate(); err != nil {
				return Refuse("InvalidParameterValue", "%s", err)
			}
		}
	}
	return nil
}

func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}
