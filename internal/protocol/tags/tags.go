// Package tags defines the EC2 instance tags that contain an agent's settings and
// state: which tags exist, the format of their values, and what is wrong with a
// value. It does no I/O.
//
// Settings are read from tags or from YAML. An absent setting is nil, so that
// sources can be layered. Every fault names its tag and value, and only that tag
// is ignored. In the other direction, the agent reports its State.
//
// The agent defines the defaults and effects of settings.
package tags

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"lull/internal/core/layers"
)

// The prefixes that are treated specially: lull's own, and Prism's.
const (
	DefaultPrefix = "lull:"
	PrismPrefix   = "prism:"
)

// EC2's limits for tags, in characters.
const (
	MaxKey   = 128
	MaxValue = 256
)

// Settings are the agent's settings in one source. Nil fields are not set.
type Settings struct {
	Enabled *bool // enables idle detection; TTL and completion do not depend on it

	IdleTimeout   *time.Duration
	CheckInterval *time.Duration
	WarnBefore    *time.Duration
	BootGrace     *time.Duration
	Snooze        *time.Duration // snooze after a resume

	HibernateOnIdle *bool
	OnComplete      *string // stop, hibernate, terminate, none
	CompletionFile  *string
	TTLDeadline     *time.Time
	TTLAction       *string // stop, terminate

	PreStop        *string
	PostCancel     *string
	PreStopTimeout *time.Duration
	PreStopUser    *string

	IdleCPU      *float64 // percent
	IdleCPUCores *float64
	IdleNetwork  *float64 // bytes per minute
	IdleDisk     *float64 // bytes per minute
	IdleGPU      *float64 // percent

	Signals         *[]string // the signals that count, except those of the fields below
	Presence        *[]string // terminals, users: count by presence alone
	ActiveProcesses *[]string
	ProcessProfiles *[]string
	ActivePorts     *[]string
	Sessions        *bool // Jupyter, RStudio and VS Code servers
	Inhibitors      *bool
	NotifyURL       *string
	PauseHolder     *string // agent, controller
}

// Fault is a tag, or a line of a file, that cannot be used.
type Fault struct {
	Tag     string `json:"tag"`   // full name of the tag, or the setting on the line
	Value   string `json:"value"` // the part that Show returns
	Problem string `json:"problem"`
	Where   string `json:"where,omitempty"` // path and line; empty for a tag
}

// Error describes the fault with place, name and value.
func (f Fault) Error() string {
	if f.Where != "" {
		return fmt.Sprintf("cannot use %s: %q in %s: %s", f.Tag, f.Value, f.Where, f.Problem)
	}
	return fmt.Sprintf("cannot use tag %s=%q: %s", f.Tag, f.Value, f.Problem)
}

// Parse reads the settings from an instance's tags. It ignores tags with other
// prefixes. An unknown tag with the prefix is a fault only if it looks like a
// misspelling, because other programs may use the prefix too.
func Parse(prefix string, tags map[string]string) (Settings, []Fault) {
	var s Settings
	var faults []Fault
	for _, key := range slices.Sorted(maps.Keys(tags)) {
		value := tags[key]
		name, ok := strings.CutPrefix(key, prefix)
		if !ok || reserved[name] {
			continue
		}
		f := find(name)
		if f == nil {
			if near := nearest(name); near != "" {
				faults = append(faults, Fault{Tag: key, Value: Show(near, value), Problem: fmt.Sprintf("there is no such tag; is %s%s meant?", prefix, near)})
			}
			continue
		}
		if problem := f.set(&s, value); problem != nil {
			faults = append(faults, Fault{Tag: key, Value: Show(name, value), Problem: problem.Error()})
		}
	}
	return s, faults
}

// Encode returns the settings in s as tags.
func (s Settings) Encode(prefix string) map[string]string {
	out := map[string]string{}
	for i := range fields {
		if v, ok := fields[i].get(&s); ok {
			out[prefix+fields[i].Name] = v
		}
	}
	return out
}

// Over returns s with the settings that are not set taken from base.
func (s Settings) Over(base Settings) Settings {
	stack := []Settings{s, base}
	for i := range fields {
		if v, from := layers.Strongest(stack, fields[i].get); from == &stack[1] {
			// set accepts every value that get returns; a test of this package
			// checks that.
			_ = fields[i].set(&s, v)
		}
	}
	return s
}

// Changes returns the sorted names of the settings that differ between s and t.
func (s Settings) Changes(t Settings) []string {
	var out []string
	for i := range fields {
		a, aok := fields[i].get(&s)
		b, bok := fields[i].get(&t)
		if a != b || aok != bok {
			out = append(out, fields[i].Name)
		}
	}
	return out
}

// Set sets one setting from text, by its name without a prefix. The error
// contains only the cause, because a Fault adds name, value and place.
func (s *Settings) Set(name, value string) error {
	f := find(name)
	if f == nil {
		if near := nearest(name); near != "" {
			return fmt.Errorf("there is no such setting; is %s meant?", near)
		}
		return errors.New("there is no such setting")
	}
	return f.set(s, value)
}

// Get returns one setting as text. ok is false if it is not set.
func (s Settings) Get(name string) (value string, ok bool) {
	if f := find(name); f != nil {
		return f.get(&s)
	}
	return "", false
}

// Clear removes one setting.
func (s *Settings) Clear(name string) {
	if f := find(name); f != nil {
		f.clear(s)
	}
}
