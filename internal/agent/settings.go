package agent

import (
	"time"

	"lull/internal/core/idle"
	"lull/internal/platform/proc"
	"lull/internal/protocol/tags"
)

// Config is the effective policy: the defaults, overridden by tags and the local
// file.
type Config struct {
	Enabled       bool
	IdleTimeout   time.Duration // 0 means not set; then idleness has no effect
	CheckInterval time.Duration
	WarnBefore    time.Duration
	BootGrace     time.Duration
	Snooze        time.Duration

	Hibernate      bool
	OnComplete     string
	CompletionFile string
	TTLDeadline    time.Time
	TTLAction      string

	PreStop        string
	PostCancel     string // run if a stop is canceled after pre-stop has run
	PreStopTimeout time.Duration
	PreStopUser    string

	Limits   proc.Limits
	GPU      float64
	Signals  []string // nil means every available one
	Presence []string

	Processes, Profiles, Ports []string
	Sessions, Inhibitors       bool
	NotifyURL                  string
	PauseHolder                string
}

// DefaultCompletionFile is in the agent's runtime directory, which a reboot empties.
const DefaultCompletionFile = "/run/lull/complete"

// Defaults returns the default settings. CPU load counts as use from 5 percent of all
// CPUs or half a CPU, whichever is less: on a machine with 128 CPUs, one busy CPU is
// only 0.8 percent but still use.
func Defaults() tags.Settings {
	return tags.Settings{
		Enabled: new(true), CheckInterval: new(time.Minute), WarnBefore: new(5 * time.Minute),
		BootGrace: new(2 * time.Minute), Snooze: new(10 * time.Minute),
		HibernateOnIdle: new(false), OnComplete: new("none"), CompletionFile: new(DefaultCompletionFile),
		TTLAction: new("stop"), PreStopTimeout: new(5 * time.Minute),
		IdleCPU: new(5.0), IdleCPUCores: new(0.5), IdleNetwork: new(10e3), IdleDisk: new(100e3), IdleGPU: new(5.0),
		Sessions: new(false), Inhibitors: new(false), PauseHolder: new("agent"),
	}
}

// Resolve returns the defaults overridden by said. If a user has set a CPU
// percentage, it applies without the limit of half a CPU.
func Resolve(said tags.Settings) Config {
	base := Defaults()
	if said.IdleCPU != nil && said.IdleCPUCores == nil {
		base.IdleCPUCores = new(0.0)
	}
	s := said.Over(base)
	c := Config{
		Enabled: *s.Enabled, CheckInterval: *s.CheckInterval, WarnBefore: *s.WarnBefore,
		BootGrace: *s.BootGrace, Snooze: *s.Snooze, Hibernate: *s.HibernateOnIdle,
		OnComplete: *s.OnComplete, CompletionFile: *s.CompletionFile, TTLAction: *s.TTLAction,
		PreStopTimeout: *s.PreStopTimeout, GPU: *s.IdleGPU,
		Limits:   proc.Limits{CPU: *s.IdleCPU, Cores: *s.IdleCPUCores, Network: *s.IdleNetwork, Disk: *s.IdleDisk},
		Sessions: *s.Sessions, Inhibitors: *s.Inhibitors, PauseHolder: *s.PauseHolder,
		IdleTimeout: deref(s.IdleTimeout), TTLDeadline: deref(s.TTLDeadline),
		PreStop: deref(s.PreStop), PostCancel: deref(s.PostCancel), PreStopUser: deref(s.PreStopUser), NotifyURL: deref(s.NotifyURL),
		Signals: deref(s.Signals), Presence: deref(s.Presence),
		Processes: deref(s.ActiveProcesses), Profiles: deref(s.ProcessProfiles), Ports: deref(s.ActivePorts),
	}
	c.Limits.PresentTerminals = contains(c.Presence, proc.SignalTerminals)
	return c
}

func deref[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func contains(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}

// counts reports whether a signal is read. The seven default signals are, unless
// Signals omits them; the others are if they are enabled.
func (c Config) counts(signal string) bool {
	switch signal {
	case proc.SignalCPU, proc.SignalNetwork, proc.SignalDisk, proc.SignalGPU,
		proc.SignalTerminals, proc.SignalUsers, proc.SignalRecent:
		return c.Signals == nil || contains(c.Signals, signal)
	}
	return true
}

// policy returns the policy for internal/core/idle. It requires every signal in the
// evidence, because the evidence omits signals that do not count.
func (c Config) policy() idle.Policy {
	p := idle.Policy{
		Name: "agent", Timeout: idle.Duration(c.IdleTimeout), Snooze: idle.Duration(c.Snooze),
		WarnBefore: idle.Duration(c.WarnBefore), CheckInterval: idle.Duration(c.CheckInterval),
		Detection: c.Enabled, AutoPause: true, Action: "stop",
	}
	if c.Hibernate {
		p.Action = "hibernate"
	}
	return p
}
