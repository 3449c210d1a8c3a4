// Package tags is the language of EC2 instance tags between the agent and the
// source of its policy: which tags exist, how their values are written, and
// what is wrong with them. It does no I/O.
//
// Settings are read from tags or from YAML. An absent setting is nil, so that
// sources can be layered. Every fault names its tag and value, and only that
// tag is ignored. The agent's state goes the other way as State.
//
// Defaults and the effects of settings are the agent's.
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

// The prefixes with a meaning of their own: lull's, and the seed's.
const (
	DefaultPrefix = "lull:"
	PrismPrefix   = "prism:"
)

// Limits of EC2 on a tag, in UTF-8 characters.
const (
	MaxKey   = 128
	MaxValue = 256
)

// Settings are the agent's settings in one source. Nil fields are not set.
type Settings struct {
	Enabled *bool // the switch of idle detection; a TTL and completion hold all the same

	IdleTimeout   *time.Duration
	CheckInterval *time.Duration
	WarnBefore    *time.Duration
	BootGrace     *time.Duration
	Snooze        *time.Duration // after a resume

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
	IdleNetwork  *float64 // bytes a minute
	IdleDisk     *float64 // bytes a minute
	IdleGPU      *float64 // percent

	Signals         *[]string // which count, apart from those below
	Presence        *[]string // terminals, users: count by being there
	ActiveProcesses *[]string
	ProcessProfiles *[]string
	ActivePorts     *[]string
	Sessions        *bool // Jupyter, RStudio and VS Code servers
	Inhibitors      *bool
	NotifyURL       *string
	PauseHolder     *string // agent, controller
}

// Fault is one tag, or one line of a file, that cannot be used.
type Fault struct {
	Tag     string `json:"tag"`   // of a tag its name with its prefix, of a line the setting
	Value   string `json:"value"` // what Show leaves of it
	Problem string `json:"problem"`
	Where   string `json:"where,omitempty"` // path and line; empty is a tag
}

// Error says what is wrong, with place, name and value.
func (f Fault) Error() string {
	if f.Where != "" {
		return fmt.Sprintf("cannot use %s: %q in %s: %s", f.Tag, f.Value, f.Where, f.Problem)
	}
	return fmt.Sprintf("cannot use tag %s=%q: %s", f.Tag, f.Value, f.Problem)
}

// Parse reads the settings among an instance's tags. Tags of other prefixes
// are none of lull's; an unknown one under the prefix is a fault only where it
// looks like a misspelt one, because other programs share the prefix.
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

// Encode writes the settings that s says, as tags.
func (s Settings) Encode(prefix string) map[string]string {
	out := map[string]string{}
	for i := range fields {
		if v, ok := fields[i].get(&s); ok {
			out[prefix+fields[i].Name] = v
		}
	}
	return out
}

// Over returns s with what base says where s says nothing.
func (s Settings) Over(base Settings) Settings {
	stack := []Settings{s, base}
	for i := range fields {
		if v, from := layers.Strongest(stack, fields[i].get); from == &stack[1] {
			// What get wrote, set reads: the laws of this package's test.
			_ = fields[i].set(&s, v)
		}
	}
	return s
}

// Changes lists the names of what differs between s and t, sorted.
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

// Set reads one setting by its name without a prefix. Its error says only what
// is wrong, for a Fault that has name, value and place.
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

// Get writes one setting; ok is false where s does not say it.
func (s Settings) Get(name string) (value string, ok bool) {
	if f := find(name); f != nil {
		return f.get(&s)
	}
	return "", false
}

// Clear takes one setting back.
func (s *Settings) Clear(name string) {
	if f := find(name); f != nil {
		f.clear(s)
	}
}
