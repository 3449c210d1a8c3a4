package agent

import (
	"context"
	"time"

	"lull/internal/core/idle"
	"lull/internal/platform/gpu"
	"lull/internal/platform/proc"
	"lull/internal/protocol/agentctl"
)

// signal is a Slow implemented by functions.
type signal struct {
	name   string
	wanted func(Config) bool
	read   func(ctx context.Context, now time.Time, c Config) idle.Reading
}

func (s signal) Signal() string       { return s.name }
func (s signal) Wanted(c Config) bool { return s.wanted(c) }
func (s signal) Read(ctx context.Context, now time.Time, c Config) idle.Reading {
	return s.read(ctx, now, c)
}

func always(Config) bool { return true }

// Signals returns the slow signals of a real machine: three about users, the GPU, and
// the additional ones that a policy can enable.
func Signals(logins *proc.LoginReader, bus *proc.Logind, work *proc.Work, cards *gpu.Reader) []Slow {
	return []Slow{
		signal{proc.SignalUsers, always, func(ctx context.Context, now time.Time, c Config) idle.Reading {
			return logins.Users(ctx, now, contains(c.Presence, proc.SignalUsers))
		}},
		signal{proc.SignalRecent, always, func(_ context.Context, now time.Time, _ Config) idle.Reading {
			return logins.Recent(now)
		}},
		signal{proc.SignalGPU, always, func(ctx context.Context, now time.Time, c Config) idle.Reading {
			return cards.Read(ctx, now, c.GPU)
		}},
		signal{proc.SignalProcesses, func(c Config) bool { return len(c.Processes)+len(c.Profiles) > 0 },
			func(_ context.Context, now time.Time, c Config) idle.Reading {
				return work.Processes(now, c.Processes, c.Profiles)
			}},
		signal{proc.SignalPorts, func(c Config) bool { return len(c.Ports) > 0 },
			func(_ context.Context, now time.Time, c Config) idle.Reading { return work.Ports(now, c.Ports) }},
		signal{proc.SignalSessions, func(c Config) bool { return c.Sessions },
			func(_ context.Context, now time.Time, _ Config) idle.Reading { return work.Servers(now) }},
		signal{proc.SignalInhibitors, func(c Config) bool { return c.Inhibitors },
			func(ctx context.Context, now time.Time, _ Config) idle.Reading { return bus.Inhibiting(ctx, now) }},
	}
}

// Pending returns a function that lists systemd's timers, for the status.
func Pending(bus *proc.Logind) func(ctx context.Context) ([]agentctl.Timer, error) {
	return func(ctx context.Context) ([]agentctl.Timer, error) {
		list, err := bus.Timers(ctx)
		out := []agentctl.Timer{}
		for _, t := range list {
			out = append(out, agentctl.Timer{Unit: t.Unit, Next: t.Next})
		}
		return out, err
	}
}
