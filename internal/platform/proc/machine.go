package proc

import (
	"path/filepath"
	"time"

	"lull/internal/core/idle"
)

// Names of the seven signals of every machine.
const (
	SignalCPU       = "cpu"
	SignalNetwork   = "network"
	SignalDisk      = "disk"
	SignalGPU       = "gpu"
	SignalTerminals = "terminals"
	SignalUsers     = "users"
	SignalRecent    = "recent"
)

// Limits are the thresholds at or above which a signal is active.
type Limits struct {
	CPU     float64 // percent of all CPUs
	Cores   float64 // busy CPUs that count as use even below CPU percent; 0 disables it
	Network float64 // bytes per minute
	Disk    float64 // bytes per minute

	// PresentTerminals makes an open terminal count even without input or
	// output.
	PresentTerminals bool
}

// MachineConfig configures where Machine reads. The zero value means the live
// machine.
type MachineConfig struct {
	Root string // prefix of /proc, /sys and /dev; for fixtures

	// LeastWindow is the shortest interval over which a rate is computed. If the
	// last sample is more recent, the one before it is used. 0 means 10 s.
	LeastWindow time.Duration

	// OwnBytes returns the total number of bytes that lull itself has transferred
	// over the network. They are not counted as traffic. nil means none.
	OwnBytes func() uint64

	// Own records when lull itself wrote to terminals, which does not count as
	// output. nil means never.
	Own *OwnWrites
}

// Machine reads the signals that cost only microseconds: cpu, network, disk and
// terminals. Each signal fails on its own. A source that does not exist is
// absent. One that exists and cannot be read is unknown, and so is a rate before
// its second sample. Rates are divided by the measured time between two samples.
// Files are opened once, and reading allocates nothing while the set of devices
// and terminals stays the same. A Machine is not safe for concurrent use.
type Machine struct {
	cpu  cpuProbe
	net  netProbe
	disk diskProbe
	pts  ptsProbe
}

// NewMachine returns a Machine that has read nothing yet.
func NewMachine(c MachineConfig) *Machine {
	root := c.Root
	if root == "" {
		root = "/"
	}
	least := c.LeastWindow
	if least <= 0 {
		least = 10 * time.Second
	}
	m := &Machine{}
	m.cpu = cpuProbe{file: machineFile{path: filepath.Join(root, "proc/stat")}, win: window{least: least}}
	m.net = netProbe{file: machineFile{path: filepath.Join(root, "proc/net/dev")}, sys: filepath.Join(root, "sys"),
		own: c.OwnBytes, win: window{least: least}}
	m.net.each = m.net.note
	m.disk = diskProbe{file: machineFile{path: filepath.Join(root, "proc/diskstats")}, win: window{least: least}, deep: window{least: least}}
	m.disk.each = m.disk.note
	m.pts = ptsProbe{path: filepath.Join(root, "dev/pts"), own: c.Own}
	return m
}

// Read appends the readings of cpu, network, disk and terminals to into. now is
// the wall clock, with its monotonic reading if available.
func (m *Machine) Read(now time.Time, l Limits, into []idle.Reading) []idle.Reading {
	return append(into,
		m.cpu.read(now, l.CPU, l.Cores),
		m.net.read(now, l.Network),
		m.disk.read(now, l.Disk),
		m.pts.read(now, l.PresentTerminals))
}

// Reset drops every sample, so that the next Read is a first one. It is called
// after a resume, a jump of the clock, and work of lull itself (a hook).
func (m *Machine) Reset() {
	m.cpu.reset()
	m.net.reset()
	m.disk.reset()
}

// Terminals appends the terminals seen by the last Read.
func (m *Machine) Terminals(into []Terminal) []Terminal {
	for i := range m.pts.seen {
		t := &m.pts.seen[i]
		into = append(into, Terminal{Name: t.label, UID: t.uid, Input: unixTime(t.atime), Output: unixTime(t.mtime),
			Changed: unixTime(t.ctime), Event: t.event})
	}
	return into
}

// Close releases the open files.
func (m *Machine) Close() {
	m.cpu.file.close()
	m.net.file.close()
	m.disk.file.close()
	m.pts.close()
}
