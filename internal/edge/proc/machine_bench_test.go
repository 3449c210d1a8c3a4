package proc

import (
	"testing"
	"time"

	"lull/internal/idle"
)

// BenchmarkMachineRead is one tick's file readings on this machine.
func BenchmarkMachineRead(b *testing.B) {
	m := NewMachine(MachineConfig{Own: &OwnWrites{}})
	defer m.Close()
	into := make([]idle.Reading, 0, 8)
	now := time.Now()
	m.Read(now, Limits{CPU: 5}, into)
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(time.Minute)
		into = m.Read(now, Limits{CPU: 5, Cores: 0.5, Network: 10e3, Disk: 100e3}, into[:0])
	}
	for _, r := range into {
		if r.State == idle.Unknown && r.Signal != SignalCPU { // no tick passes in a microsecond
			b.Fatalf("%s is unknown: %s", r.Signal, r.Detail)
		}
	}
}
