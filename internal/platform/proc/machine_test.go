package proc

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
)

// copied returns a writable copy of a fixture tree.
func copied(t *testing.T, name string) string {
	t.Helper()
	dir := t.TempDir()
	errtest.None(t, os.CopyFS(dir, os.DirFS(filepath.Join("testdata/machine", name))))
	return dir
}

func put(t *testing.T, root, name, content string) {
	t.Helper()
	errtest.None(t, os.WriteFile(filepath.Join(root, name), []byte(content), 0o644))
}

func change(t *testing.T, root, name string, pairs ...string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, name))
	errtest.None(t, err)
	after := strings.NewReplacer(pairs...).Replace(string(b))
	if after == string(b) {
		t.Fatalf("%s has none of %v", name, pairs)
	}
	put(t, root, name, after)
}

func states(rs []idle.Reading) map[string]string {
	out := map[string]string{}
	for _, r := range rs {
		out[r.Signal] = r.State.String()
	}
	return out
}

func signalOf(rs []idle.Reading, name string) idle.Reading {
	for _, r := range rs {
		if r.Signal == name {
			return r
		}
	}
	return idle.Reading{}
}

var limits = Limits{CPU: 5, Cores: 0.5, Network: 10e3, Disk: 100e3}

// TestMachines checks, for machines of many kinds, that exactly the devices with
// traffic of their own are counted.
func TestMachines(t *testing.T) {
	for _, tt := range []struct {
		name    string
		cpus    int
		nics    []string
		disks   []string
		counted string // which readings are not absent
	}{
		{"nitro-arm64", 4, []string{"ens5"}, []string{"nvme0n1", "nvme1n1"}, ""},
		{"xen-al2023", 2, []string{"enX0"}, []string{"xvda1", "xvdb"}, ""},
		{"many-disks", 16, []string{"eth0"}, strings.Fields("sda sdb sdc sdd sde sdf sdg sdh sdi sdj sdk sdl sdm sdn sdo sdp sdq sdr sds sdt sdu sdv sdw sdx sdy sdz sdaa"), ""},
		{"metal-128", 128, []string{"enp125s0f0", "enp125s0f1", "veth1a2b3c4", "veth99"},
			strings.Fields("nvme0n1 nvme1n1 nvme2n1 nvme3n1 nvme4n1 nvme5n1 nvme6n1 nvme7n1 nvme8n1 nvme10n1"), ""},
		{"debian13", 2, []string{"enp1s0", "wlp2s0"}, []string{"vda", "vdb"}, ""},
		{"lvm-only", 2, []string{"eth0"}, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := NewMachine(MachineConfig{Root: filepath.Join("testdata/machine", tt.name)})
			defer m.Close()
			first := m.Read(time.Unix(1e9, 0), limits, nil)
			for _, s := range []string{SignalCPU, SignalNetwork, SignalDisk} {
				if r := signalOf(first, s); r.State != idle.Unknown {
					t.Errorf("first sample of %s is %s", s, r.State)
				}
			}
			if m.cpu.old.cpus != tt.cpus {
				t.Errorf("%d CPUs, want %d", m.cpu.old.cpus, tt.cpus)
			}
			if d := cmp.Diff(tt.nics, countedOf(&m.net.tally)); d != "" {
				t.Error("NICs", d)
			}
			if d := cmp.Diff(tt.disks, countedOf(&m.disk.tally)); d != "" {
				t.Error("disks", d)
			}
		})
	}
}

func countedOf(t *tally) (names []string) {
	for i := range t.devices {
		if d := &t.devices[i]; d.counted {
			names = append(names, string(d.name[:d.n]))
		}
	}
	return names
}

func TestMachineWithoutDevices(t *testing.T) {
	m := NewMachine(MachineConfig{Root: "testdata/machine/diskless"})
	defer m.Close()
	m.Read(time.Unix(1e9, 0), limits, nil)
	got := states(m.Read(time.Unix(1e9+60, 0), limits, nil))
	want := map[string]string{"cpu": "unknown", "network": "absent", "disk": "absent", "terminals": "absent"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestLVMAlone(t *testing.T) {
	m := NewMachine(MachineConfig{Root: "testdata/machine/lvm-only"})
	defer m.Close()
	m.Read(time.Unix(1e9, 0), limits, nil)
	if r := signalOf(m.Read(time.Unix(1e9+60, 0), limits, nil), SignalDisk); r.State != idle.Quiet {
		t.Errorf("a machine that shows only its volumes: %+v", r)
	}
}

// TestRates checks that rates are computed over the measured time, and the state
// at and just below each threshold.
func TestRates(t *testing.T) {
	for _, tt := range []struct {
		name, signal, file, old, new string
		after                        time.Duration
		want                         idle.State
		value                        float64
	}{
		{"network at its threshold", SignalNetwork, "proc/net/dev", "1000000 1 0 0 0 0 0 0 2000000", "1005000 1 0 0 0 0 0 0 2005000", time.Minute, idle.Active, 20000},
		{"network below", SignalNetwork, "proc/net/dev", "1000000 1 0 0 0 0 0 0 2000000", "1002000 1 0 0 0 0 0 0 2002999", time.Minute, idle.Quiet, 9998},
		{"the same bytes over ten minutes", SignalNetwork, "proc/net/dev", "1000000 1 0 0 0 0 0 0 2000000", "1005000 1 0 0 0 0 0 0 2005000", 10 * time.Minute, idle.Quiet, 2000},
		{"the same bytes over ten seconds", SignalNetwork, "proc/net/dev", "1000000 1 0 0 0 0 0 0 2000000", "1000000 1 0 0 0 0 0 0 2001000", 10 * time.Second, idle.Active, 12000},
		{"a counter of 32 bits wraps", SignalNetwork, "proc/net/dev", "ens", "ens", time.Minute, idle.Active, 0},
		{"disk", SignalDisk, "proc/diskstats", "vda 100 0 2000 0 50 0 4000", "vda 100 0 2100 0 50 0 4100", time.Minute, idle.Active, 102400},
		{"a partition alone", SignalDisk, "proc/diskstats", "vda1 100 0 2000 0 50 0 4000", "vda1 100 0 9999 0 50 0 9999", time.Minute, idle.Quiet, 0},
		{"disk goes backwards", SignalDisk, "proc/diskstats", "vda 100 0 2000", "vda 100 0 1", time.Minute, idle.Unknown, 0},
		{"cpu", SignalCPU, "proc/stat", "cpu  10000 0 0 2000000", "cpu  10300 0 0 2005700", time.Minute, idle.Active, 5},
		{"cpu below", SignalCPU, "proc/stat", "cpu  10000 0 0 2000000", "cpu  10299 0 0 2005701", time.Minute, idle.Quiet, 4.983333333333333},
		{"cpu goes backwards", SignalCPU, "proc/stat", "cpu  10000 0 0 2000000", "cpu  9000 0 0 2005701", time.Minute, idle.Unknown, 0},
		{"idle time steps back", SignalCPU, "proc/stat", "cpu  10000 0 0 2000000 0", "cpu  10000 0 0 1999990 100", time.Minute, idle.Quiet, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := copied(t, "debian13")
			if strings.Contains(tt.name, "wraps") {
				change(t, root, "proc/net/dev", "1000000 1", "4294960000 1")
				tt.old, tt.new, tt.value = "4294960000 1", "7000 1", 2*(7000+1<<32-4294960000)
			}
			m := NewMachine(MachineConfig{Root: root})
			defer m.Close()
			start := time.Unix(1e9, 0)
			m.Read(start, limits, nil)
			change(t, root, tt.file, tt.old, tt.new)
			r := signalOf(m.Read(start.Add(tt.after), limits, nil), tt.signal)
			if r.State != tt.want || r.Value != tt.value {
				t.Errorf("%+v, want %s %g", r, tt.want, tt.value)
			}
			if r.State != idle.Unknown && time.Duration(r.Window) != tt.after {
				t.Errorf("window %s, want %s", time.Duration(r.Window), tt.after)
			}
		})
	}
}

// TestManyCPUs checks that one busy core of 128 counts as use.
func TestManyCPUs(t *testing.T) {
	root := copied(t, "metal-128")
	m := NewMachine(MachineConfig{Root: root})
	defer m.Close()
	start := time.Unix(1e9, 0)
	m.Read(start, limits, nil)
	change(t, root, "proc/stat", "cpu  640000 0 0 128000000", "cpu  646000 0 0 128762000") // one minute of 100 ticks per second
	r := signalOf(m.Read(start.Add(time.Minute), limits, nil), SignalCPU)
	if r.State != idle.Active || r.Value > 1 || r.Threshold != 0.390625 {
		t.Errorf("%+v", r)
	}
}

// TestSecondReadingSoon checks that a reading soon after another covers a whole
// window, not only the time in between, and includes new traffic.
func TestSecondReadingSoon(t *testing.T) {
	root := copied(t, "debian13")
	m := NewMachine(MachineConfig{Root: root})
	defer m.Close()
	start := time.Unix(1e9, 0)
	m.Read(start, limits, nil)
	m.Read(start.Add(time.Minute), limits, nil)
	r := signalOf(m.Read(start.Add(time.Minute+time.Second), limits, nil), SignalNetwork)
	if r.State != idle.Quiet || time.Duration(r.Window) != 61*time.Second {
		t.Errorf("%+v", r)
	}
	change(t, root, "proc/net/dev", "2000000", "3000000")
	if r = signalOf(m.Read(start.Add(time.Minute+2*time.Second), limits, nil), SignalNetwork); r.State != idle.Active {
		t.Errorf("%+v", r)
	}
}

// TestDevicesComeAndGo checks that the traffic of a network interface that
// appears between two readings counts, and that its end does not invalidate the
// counter.
func TestDevicesComeAndGo(t *testing.T) {
	root := copied(t, "debian13")
	b, err := os.ReadFile(filepath.Join(root, "proc/net/dev"))
	errtest.None(t, err)
	m := NewMachine(MachineConfig{Root: root})
	defer m.Close()
	now := time.Unix(1e9, 0)
	look := func() idle.Reading {
		now = now.Add(time.Minute)
		return signalOf(m.Read(now, limits, nil), SignalNetwork)
	}
	look()
	put(t, root, "proc/net/dev", string(b)+"veth0: 90000 1 0 0 0 0 0 0 90000 1 0 0 0 0 0 0\n")
	if r := look(); r.State != idle.Active || r.Value != 180000 {
		t.Errorf("a new interface: %+v", r)
	}
	put(t, root, "proc/net/dev", string(b))
	if r := look(); r.State != idle.Quiet {
		t.Errorf("an interface less: %+v", r)
	}
}

func TestFailuresStandAlone(t *testing.T) {
	for _, file := range []string{"proc/stat", "proc/net/dev", "proc/diskstats"} {
		signal := map[string]string{"proc/stat": SignalCPU, "proc/net/dev": SignalNetwork, "proc/diskstats": SignalDisk}[file]
		for _, how := range []string{"garbage", "empty", "missing", "directory"} {
			t.Run(file+" "+how, func(t *testing.T) {
				root := copied(t, "debian13")
				m := NewMachine(MachineConfig{Root: root})
				defer m.Close()
				now := time.Unix(1e9, 0)
				m.Read(now, limits, nil)
				path := filepath.Join(root, file)
				want := idle.Unknown
				switch how {
				case "garbage":
					put(t, root, file, "cpu x y z\n\x00\xff: 1 2\n")
				case "empty":
					put(t, root, file, "")
				default:
					errtest.None(t, os.Remove(path))
					if how == "directory" {
						errtest.None(t, os.Mkdir(path, 0o700))
					} else if signal != SignalCPU { // every machine has CPUs
						want = idle.Absent
					}
					m.Close() // as after a failed read: the next one opens the file again
				}
				rs := m.Read(now.Add(time.Minute), limits, nil)
				if r := signalOf(rs, signal); r.State != want && !(how == "empty" && signal == SignalDisk && r.State == idle.Absent) {
					t.Errorf("%+v, want %s", r, want)
				}
				for _, other := range []string{SignalCPU, SignalNetwork, SignalDisk} {
					if r := signalOf(rs, other); other != signal && r.State == idle.Absent {
						t.Errorf("%s fails with it: %+v", other, r)
					}
				}
			})
		}
	}
}

func TestOwnTrafficIsNotUse(t *testing.T) {
	root := copied(t, "debian13")
	var own uint64
	m := NewMachine(MachineConfig{Root: root, OwnBytes: func() uint64 { return own }})
	defer m.Close()
	now := time.Unix(1e9, 0)
	m.Read(now, limits, nil)
	change(t, root, "proc/net/dev", "2000000", "2025000") // the text occurs for two interfaces
	own += 45000
	if r := signalOf(m.Read(now.Add(time.Minute), limits, nil), SignalNetwork); r.State != idle.Quiet || r.Value != 5000 {
		t.Errorf("%+v", r)
	}
}

func TestUtmp(t *testing.T) {
	for name, layout := range map[string]UtmpLayout{"nitro-arm64": UtmpWide, "xen-al2023": UtmpNarrow} {
		t.Run(name, func(t *testing.T) {
			p := &LoginReader{Root: filepath.Join("testdata/machine", name), Layout: layout}
			list, source, err := p.Sessions(t.Context())
			if err != nil || source != "utmp" {
				t.Fatal(source, err)
			}
			want := []Session{{User: "ada", TTY: "pts/0", Remote: "192.0.2.7", Leader: 1001, Since: time.Unix(1700000100, 0)}}
			if d := cmp.Diff(want, list); d != "" {
				t.Error("bob's process is gone:", d)
			}
			now := time.Unix(1700000500, 0)
			if r := p.Users(t.Context(), now, false); r.State != idle.Quiet || !r.LastEvent.Equal(time.Unix(1700000100, 0)) {
				t.Errorf("%+v", r)
			}
			if r := p.Users(t.Context(), now, true); r.State != idle.Active {
				t.Errorf("with presence: %+v", r)
			}
			r := p.Recent(now)
			if r.State != idle.Quiet || !r.LastEvent.Equal(time.Unix(1700000200, 0)) || !strings.Contains(r.Detail, "bob") {
				t.Errorf("%+v", r)
			}
			if r := p.Recent(time.Unix(1700000230, 0)); r.State != idle.Active {
				t.Errorf("within the window: %+v", r)
			}
		})
	}
}

func TestDebian13(t *testing.T) {
	p := &LoginReader{Root: "testdata/machine/debian13"}
	r := p.Recent(time.Unix(1700001000, 0))
	if r.State != idle.Quiet || !r.LastEvent.Equal(time.Unix(1700000599, 0)) || !strings.Contains(r.Detail, "user599") || !strings.Contains(r.Detail, "wtmpdb") {
		t.Errorf("%+v", r)
	}
}

// TestNoRecordsAreNotNobody checks that on a machine without login records and
// utmp the terminals decide. Without terminals too, the signal is absent and
// names the reason.
func TestNoRecordsAreNotNobody(t *testing.T) {
	root := t.TempDir()
	errtest.None(t, os.MkdirAll(filepath.Join(root, "dev/pts"), 0o755))
	put(t, root, "dev/pts/3", "")
	p := &LoginReader{Root: root, Logins: noLogind{}}
	now := time.Now()
	for _, r := range []idle.Reading{p.Users(t.Context(), now, false), p.Recent(now)} {
		if r.State != idle.Active || !strings.Contains(r.Detail, "pts/3") {
			t.Errorf("%+v", r)
		}
	}
	p = &LoginReader{Root: t.TempDir()}
	for _, r := range []idle.Reading{p.Users(t.Context(), now, false), p.Recent(now)} {
		if r.State != idle.Absent || r.Detail == "" {
			t.Errorf("%+v", r)
		}
	}
}

func TestLogindThatFailsIsUnknown(t *testing.T) {
	p := &LoginReader{Root: "testdata/machine/debian13", Logins: brokenLogind{}}
	if r := p.Users(t.Context(), time.Now(), false); r.State != idle.Unknown {
		t.Errorf("%+v", r)
	}
	p.Root = "testdata/machine/xen-al2023"
	p.Layout = UtmpNarrow
	if r := p.Users(t.Context(), time.Now(), false); r.State != idle.Quiet || !strings.Contains(r.Detail, "utmp") {
		t.Errorf("%+v", r)
	}
}

type noLogind struct{}

func (noLogind) Sessions(context.Context) ([]Session, error) { return nil, ErrNoLogind }

type brokenLogind struct{}

func (brokenLogind) Sessions(context.Context) ([]Session, error) {
	return nil, fmt.Errorf("no answer")
}

func TestLoginDatabaseIsDistrusted(t *testing.T) {
	good, err := os.ReadFile("testdata/machine/debian13/var/lib/wtmpdb/wtmp.db")
	errtest.None(t, err)
	for name, spoil := range map[string]func(root string, b []byte) []byte{
		"being written": func(root string, b []byte) []byte {
			put(t, root, "var/lib/wtmpdb/wtmp.db-journal", "hot")
			return b
		},
		"write-ahead log": func(_ string, b []byte) []byte { b[18], b[19] = 2, 2; return b },
		"cut off":         func(_ string, b []byte) []byte { return b[:9000] },
		"no database":     func(string, []byte) []byte { return []byte("hello") },
		"empty":           func(string, []byte) []byte { return nil },
		"page type":       func(_ string, b []byte) []byte { b[100] = 99; return b },
	} {
		t.Run(name, func(t *testing.T) {
			root := copied(t, "debian13")
			put(t, root, "var/lib/wtmpdb/wtmp.db", string(spoil(root, bytes.Clone(good))))
			r := (&LoginReader{Root: root}).Recent(time.Unix(1700001000, 0))
			if r.State != idle.Unknown || r.LastEvent.IsZero() {
				t.Errorf("%+v: want unknown, with lastlog2's newest event", r)
			}
		})
	}
}

func TestOwnWritesAreNotUse(t *testing.T) {
	root := t.TempDir()
	errtest.None(t, os.MkdirAll(filepath.Join(root, "dev/pts"), 0o755))
	put(t, root, "dev/pts/0", "")
	path := filepath.Join(root, "dev/pts/0")
	own := &OwnWrites{}
	m := NewMachine(MachineConfig{Root: root, Own: own})
	defer m.Close()
	base := time.Now().Add(-time.Hour).Truncate(time.Second)
	touch := func(atime, mtime time.Time) {
		errtest.None(t, os.Chtimes(path, atime, mtime))
	}
	look := func(now time.Time) idle.Reading { return m.pts.read(now, false) }
	touch(base, base)
	now := time.Now().Add(time.Second) // later than the file's change time, which counts as an event at first
	look(now)
	for _, tt := range []struct {
		name  string
		mtime time.Duration // relative to lull's write
		used  bool
	}{{"ours", 0, false}, {"ours, rounded by the kernel", 7 * time.Second, false}, {"at the bound", 8 * time.Second, false}, {"another's", 9 * time.Second, true}, {"before ours", -2 * time.Second, true}} {
		now = now.Add(10 * time.Minute)
		own.Note(now)
		m.pts.seen[0].ctime = 0
		touch(base, now.Add(tt.mtime))
		r := look(now.Add(20 * time.Second))
		if got := r.State == idle.Active; got != tt.used {
			t.Errorf("%s: %+v", tt.name, r)
		}
	}
	// A key press within OwnWriteSpan is still a user's.
	now = now.Add(10 * time.Minute)
	own.Note(now)
	m.pts.seen[0].ctime = 0
	touch(now.Add(3*time.Second), now)
	if r := look(now.Add(20 * time.Second)); r.State != idle.Active {
		t.Errorf("a key after the warning: %+v", r)
	}
}
