package probe

import (
	"errors"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/relay"
)

// TestThresholds checks that the configured thresholds decide what counts as
// activity, with a minimum of a few scheduler ticks for CPU time.
func TestThresholds(t *testing.T) {
	active := func(c Thresholds, window, cpu time.Duration, net uint64) (out [2]bool) {
		t.Helper()
		at := time.Unix(1000, 0)
		for n, r := range c.Readings(instance.Sample{At: at}, instance.Sample{At: at.Add(window), CPU: cpu, NetBytes: net}, 0, at.Add(window))[:2] {
			out[n] = r.State == idle.Active
		}
		return out
	}
	for _, c := range []struct {
		cfg    Thresholds
		window time.Duration
		cpu    time.Duration
		net    uint64
		want   [2]bool
	}{
		{Thresholds{}, 5 * time.Second, 100 * time.Millisecond, 600, [2]bool{true, true}},
		{Thresholds{}, 5 * time.Second, 40 * time.Millisecond, 500, [2]bool{}},
		{Thresholds{}, 10 * time.Second, 110 * time.Millisecond, 1000, [2]bool{true, false}},
		{Thresholds{CPUPercent: 5, NetBytes: 1000}, 5 * time.Second, 100 * time.Millisecond, 600, [2]bool{}},
		{Thresholds{CPUPercent: 5, NetBytes: 1000}, 5 * time.Second, 300 * time.Millisecond, 1100, [2]bool{true, true}},
		{Thresholds{CPUPercent: 0.1}, 100 * time.Millisecond, 15 * time.Millisecond, 0, [2]bool{}},
	} {
		if got := active(c.cfg, c.window, c.cpu, c.net); got != c.want {
			t.Errorf("%+v in %s: cpu and net are active: %v, want %v", c, c.window, got, c.want)
		}
	}
}

// TestDiskReading checks that disk traffic that cannot be read is unknown and keeps
// the instance awake, and that traffic that the kernel does not count is absent and
// does not.
func TestDiskReading(t *testing.T) {
	at := time.Now()
	errUnreadable := errors.New("permission denied")
	sample := func(after time.Duration, bytes uint64, err error) instance.Sample {
		return instance.Sample{At: at.Add(after), DiskBytes: bytes, DiskErr: err}
	}
	for name, row := range map[string]struct {
		base, s instance.Sample
		want    idle.State
	}{
		"first":         {sample(0, 0, nil), sample(0, 0, nil), idle.Unknown},
		"nothing":       {sample(0, 9, nil), sample(5*time.Second, 9, nil), idle.Quiet},
		"one page":      {sample(0, 0, nil), sample(5*time.Second, 4096, nil), idle.Quiet},
		"two pages":     {sample(0, 0, nil), sample(5*time.Second, 8192, nil), idle.Active},
		"short window":  {sample(0, 0, nil), sample(time.Second, 4096, nil), idle.Active},
		"long window":   {sample(0, 0, nil), sample(time.Minute, 8192, nil), idle.Quiet},
		"falling":       {sample(0, 4096, nil), sample(5*time.Second, 0, nil), idle.Quiet},
		"unreadable":    {sample(0, 0, nil), sample(5*time.Second, 0, errUnreadable), idle.Unknown},
		"was not read":  {sample(0, 0, errUnreadable), sample(5*time.Second, 0, nil), idle.Unknown},
		"never counted": {sample(0, 0, instance.ErrAbsent), sample(5*time.Second, 0, instance.ErrAbsent), idle.Absent},
	} {
		if got := (Thresholds{}).diskReading(row.base, row.s, row.s.At); got.State != row.want || got.Signal != "disk" {
			t.Errorf("%s: %s %s, want %s", name, got.Signal, got.State, row.want)
		}
	}
}

// TestCount checks which connections keep the instance awake, and when the last
// activity was, in seconds before the sample.
func TestCount(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	accepted := func(quiet time.Duration, turn instance.Turn) instance.Conn {
		return instance.Conn{Accepted: true, QuietFor: quiet, Turn: turn}
	}
	const old, minute = time.Hour, time.Minute
	for name, row := range map[string]struct {
		c       Connections
		s       instance.Sample
		holding int
		idle    time.Duration
	}{
		"none":                         {Connections{}, instance.Sample{}, 0, old},
		"one, however quiet":           {Connections{}, instance.Sample{Inbound: []instance.Conn{accepted(old, instance.TurnLocal)}}, 1, 0},
		"a quiet one":                  {Connections{Quiet: minute}, instance.Sample{Inbound: []instance.Conn{accepted(2*minute, instance.TurnLocal)}}, 0, 2 * minute},
		"one that moves":               {Connections{Quiet: minute}, instance.Sample{Inbound: []instance.Conn{accepted(time.Second, instance.TurnLocal)}}, 1, time.Second},
		"a quiet one that waits":       {Connections{Quiet: minute}, instance.Sample{Inbound: []instance.Conn{accepted(2*minute, instance.TurnRemote)}}, 1, 0},
		"one in the backlog":           {Connections{Quiet: minute}, instance.Sample{Inbound: []instance.Conn{{QuietFor: 2 * minute}}}, 1, 0},
		"one that closed":              {Connections{}, instance.Sample{LastClosed: now.Add(-3 * time.Second)}, 0, 3 * time.Second},
		"relayed":                      {Connections{Relay: &relay.Activity{Open: 2}}, instance.Sample{Inbound: []instance.Conn{accepted(0, instance.TurnLocal)}}, 2, 0},
		"relayed and waiting":          {Connections{Relay: &relay.Activity{Open: 1, Waiting: 2}}, instance.Sample{}, 3, 0},
		"relayed and quiet":            {Connections{Quiet: minute, Relay: &relay.Activity{Open: 2, LastByte: now.Add(-2 * minute)}}, instance.Sample{}, 0, 2 * minute},
		"relayed, quiet and in debt":   {Connections{Quiet: minute, Relay: &relay.Activity{Open: 2}, RelayOwes: 1}, instance.Sample{}, 1, 0},
		"a last byte after the sample": {Connections{Quiet: minute, Relay: &relay.Activity{LastByte: now.Add(time.Second)}}, instance.Sample{}, 0, 0},
	} {
		holding, last := row.c.Count(row.s, now, now.Add(-old))
		if holding != row.holding || now.Sub(last) != row.idle {
			t.Errorf("%s: %d hold, idle for %s; want %d, %s", name, holding, now.Sub(last), row.holding, row.idle)
		}
	}
}
