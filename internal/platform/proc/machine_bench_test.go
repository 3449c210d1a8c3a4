package proc

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"lull/internal/core/idle"
)

// BenchmarkMachineRead measures the file reads of one probe on this machine.
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
		if r.State == idle.Unknown && r.Signal != SignalCPU { // the CPU counters need not advance within a microsecond
			b.Fatalf("%s is unknown: %s", r.Signal, r.Detail)
		}
	}
}

// TestMachineReadDoesNotAllocate checks that Read allocates nothing, whatever the
// machine's load.
func TestMachineReadDoesNotAllocate(t *testing.T) {
	other := copied(t, "debian13")
	if err := os.MkdirAll(filepath.Join(other, "dev/pts"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, root := range []string{"", other} {
		m := NewMachine(MachineConfig{Root: root, Own: &OwnWrites{}})
		defer m.Close()
		into := make([]idle.Reading, 0, 8)
		now := time.Now()
		// The first read of a terminal or disk that has just appeared allocates,
		// so the round with the fewest allocations counts.
		least := 1.0
		for range 5 {
			least = min(least, testing.AllocsPerRun(100, func() {
				now = now.Add(time.Minute)
				into = m.Read(now, Limits{CPU: 5, Cores: 0.5, Network: 10e3, Disk: 100e3}, into[:0])
			}))
		}
		if least >= 1 {
			t.Errorf("%q: a tick's readings allocate %v times", root, least)
		}
	}
}
