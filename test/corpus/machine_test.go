package corpus

import (
	"context"
	"encoding/binary"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/agent"
	"lull/internal/core/idle"
	"lull/internal/core/why"
	"lull/internal/lib/errtest"
	"lull/internal/lib/wall"
	"lull/internal/platform/gpu"
	"lull/internal/platform/proc"
	"lull/internal/sim/truth"
)

const machineCPUs = 4

// machine simulates a machine: the files that the agent's readers read, a cloud
// that can stop it, and a user who starts it again before work.
type machine struct {
	t      *trace
	blocks map[string]*block
	root   string
	real   *proc.Machine
	own    *proc.OwnWrites

	mu      sync.Mutex
	booted  time.Duration
	counted time.Duration
	sum     second
	written time.Duration // when lull last wrote to the terminals
	files   map[string][]byte
	off     chan struct{} // closed when the machine is stopped
}

func (m *machine) put(name, text string) {
	if err := os.WriteFile(filepath.Join(m.root, name), []byte(text), 0o644); err != nil {
		panic(err)
	}
}

// prepare creates the machine's simulated tree.
func (m *machine) prepare() error {
	for _, d := range []string{"proc/net", "proc/1", "dev/pts", "run", "var/log", "sys/class/net/ens5"} {
		if err := os.MkdirAll(filepath.Join(m.root, d), 0o755); err != nil {
			return err
		}
	}
	m.put("sys/class/net/ens5/uevent", "INTERFACE=ens5\n")
	m.put("var/log/wtmp", "")
	if len(m.t.gpu) > 0 {
		m.put("dev/nvidia0", "")
		script := "#!/bin/sh\nread x <" + m.root + "/gpu; echo $x\n"
		return os.WriteFile(filepath.Join(m.root, "nvidia-smi"), []byte(script), 0o755)
	}
	return nil
}

// boot resets everything that a boot resets.
func (m *machine) boot(at time.Duration) {
	m.booted, m.counted, m.sum, m.written = at, at, second{}, 0
	m.off = make(chan struct{})
	m.own = &proc.OwnWrites{}
	m.real = proc.NewMachine(proc.MachineConfig{Root: m.root, Own: m.own})
	m.write(at)
}

// write updates the files to the present time. The caller holds m.mu.
func (m *machine) write(now time.Duration) {
	x := m.t.played(m.blocks, m.counted, now, m.booted)
	m.sum = second{m.sum.cpu + x.cpu, m.sum.disk + x.disk, m.sum.net + x.net}
	m.counted = now
	up := int64((now - m.booted + 30*time.Second).Seconds() * 100)
	busy := min(int64(m.sum.cpu/1e4), up*machineCPUs)
	stat := fmt.Sprintf("cpu  %d 0 0 %d 0 0 0 0 0 0\n", busy, up*machineCPUs-busy)
	for n := range machineCPUs {
		stat += fmt.Sprintf("cpu%d %d 0 0 %d 0 0 0 0 0 0\n", n, busy/machineCPUs, up-busy/machineCPUs)
	}
	m.put("proc/stat", stat+"intr 1\nctxt 1\n")
	m.put("proc/net/dev", fmt.Sprintf("Inter-|   Receive                                                |  Transmit\n"+
		" face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n"+
		"    lo: 9000 10 0 0 0 0 0 0 9000 10 0 0 0 0 0 0\n  ens5: %d 1 0 0 0 0 0 0 %d 1 0 0 0 0 0 0\n", 1000+int64(m.sum.net)/2, 1000+int64(m.sum.net)/2))
	m.put("proc/diskstats", fmt.Sprintf(" 259       0 nvme0n1 100 0 2000 0 50 0 %d 0 0 0 0 0 0 0 0 0 0\n", 4000+int64(m.sum.disk)/512))
	m.terminals(now)
	m.graphics(now)
}

// step is the resolution of a terminal's times: the kernel updates them at the
// first input or output in every eight seconds.
const step = 8 * time.Second

// shows returns the time that the kernel would record for the use of the terminal
// until now.
func (k *keys) shows(now time.Duration) time.Duration {
	last := min(k.to, now)
	if k.every > 0 {
		last = k.from + (last-k.from)/k.every*k.every
	}
	begun := last.Truncate(step)
	if k.every == 0 || begun <= k.from {
		return max(k.from, begun)
	}
	return k.from + (begun-k.from+k.every-1)/k.every*k.every
}

// terminals updates the terminals and the sessions that use them.
func (m *machine) terminals(now time.Duration) {
	var sessions, logins []byte
	for n, l := range m.t.logins {
		if l.from > now || l.to < m.booted {
			continue
		}
		record := utmp(int32(500+n), l.terminal, l.from)
		logins = append(logins, record...)
		tty, leader := filepath.Join(m.root, "dev/pts", strconv.Itoa(l.terminal)), filepath.Join(m.root, "proc", strconv.Itoa(500+n))
		if now >= l.to {
			os.Remove(tty)
			os.Remove(leader)
			continue
		}
		sessions = append(sessions, record...)
		if _, err := os.Stat(tty); err != nil {
			m.put(filepath.Join("dev/pts", strconv.Itoa(l.terminal)), "")
		}
		os.Mkdir(leader, 0o755)
		in, out := max(l.from, m.booted), max(l.from, m.booted, m.written)
		for _, k := range m.t.keys {
			if k.terminal != l.terminal || k.from > now {
				continue
			}
			last := k.shows(now)
			if k.every > 0 {
				in = max(in, last)
			}
			out = max(out, last)
		}
		if err := os.Chtimes(tty, at0.Add(in), at0.Add(out)); err != nil {
			panic(err)
		}
	}
	m.put("run/utmp", string(sessions))
	m.put("var/log/wtmp", string(logins))
}

// utmp returns the utmp record of a login.
func utmp(pid int32, terminal int, at time.Duration) []byte {
	b := make([]byte, 384)
	binary.LittleEndian.PutUint16(b, 7)
	binary.LittleEndian.PutUint32(b[4:], uint32(pid))
	copy(b[8:40], fmt.Sprintf("pts/%d", terminal))
	copy(b[44:76], "ada")
	copy(b[76:332], "198.51.100.4")
	binary.LittleEndian.PutUint32(b[340:], uint32(at0.Add(at).Unix()))
	return b
}

// graphics updates the output of the simulated nvidia-smi.
func (m *machine) graphics(now time.Duration) {
	if len(m.t.gpu) == 0 {
		return
	}
	used := 0.0
	for _, l := range m.t.gpu {
		if l.from <= now && now < l.to {
			used = l.scale * 100
		}
	}
	m.put("gpu", fmt.Sprintf("%.0f\n", used))
}

// Read implements agent.Cheap.
func (m *machine) Read(now time.Time, l proc.Limits, into []idle.Reading) []idle.Reading {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.write(time.Since(at0))
	return m.real.Read(now, l, into)
}

// Reset implements agent.Cheap.
func (m *machine) Reset() { m.real.Reset() }

// Tags implements agent.TagSource. It returns the policy "development" in the
// form in which the server writes it.
func (m *machine) Tags(context.Context) (map[string]string, error) {
	return map[string]string{"lull:idle-timeout": machineTimeout.String(), "lull:hibernate-on-idle": "false"}, nil
}

// machineTimeout is the idle timeout of the built-in policy "development".
const machineTimeout = 30 * time.Minute

// Describe, WriteTags, Stop and Terminate implement agent.Cloud.
func (m *machine) Describe(context.Context) (agent.Instance, error) {
	return agent.Instance{State: "running"}, nil
}
func (m *machine) WriteTags(context.Context, map[string]string) error { return nil }
func (m *machine) Terminate(context.Context) error                    { return fmt.Errorf("nothing terminates") }
func (m *machine) Stop(context.Context, bool) (string, error) {
	close(m.off)
	return "", nil
}

// Warn and Withdraw implement agent.Warner. Like wall(1), they write to the
// terminals.
func (m *machine) Warn(context.Context, agent.Warning) error { return m.wall() }
func (m *machine) Withdraw(_ context.Context, x agent.Withdrawal) error {
	if x.Warning.Action == "" {
		return nil
	}
	return m.wall()
}

func (m *machine) wall() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.own.Note(time.Now())
	m.written = time.Since(at0)
	return nil
}

// Load, Save, Config and Completed implement agent.Disk.
func (m *machine) Load(name string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b, ok := m.files[name]; ok {
		return b, nil
	}
	return nil, fs.ErrNotExist
}

func (m *machine) Save(name string, b []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.files[name] = append([]byte(nil), b...)
	return nil
}
func (m *machine) Config() ([]byte, error)             { return nil, fs.ErrNotExist }
func (m *machine) Completed(string) (time.Time, error) { return time.Time{}, nil }

// runsUntil runs the agent for one boot. It returns when the agent has stopped
// the machine, or at midnight.
func (m *machine) runsUntil(t *testing.T, kept *notes, boot int) {
	m.mu.Lock()
	m.boot(time.Since(at0))
	m.mu.Unlock()
	logins := &proc.LoginReader{Root: m.root, Layout: proc.UtmpNarrow, Own: m.own}
	cards := &gpu.Reader{Dev: filepath.Join(m.root, "dev"), Command: filepath.Join(m.root, "nvidia-smi")}
	began := time.Now()
	a, err := agent.New(agent.Options{InstanceID: "i-1", BootID: fmt.Sprint("boot-", boot), Cheap: m,
		Slow: agent.Signals(logins, nil, &proc.Work{Root: m.root}, cards), Tags: []agent.TagSource{m}, Cloud: m, Warner: m,
		Disk: m, Journal: &agent.MemoryJournal{}, Evidence: kept, Own: m.own,
		Clocks: func() wall.Reading {
			up := time.Since(began) + 30*time.Second
			return wall.Reading{Boot: up, Mono: up, Wall: time.Now().Round(0)}
		}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	select {
	case <-m.off:
	case <-time.After(time.Until(at0.Add(day))):
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	m.real.Close()
}

// starts returns when the machine, which is down since a time, is started again:
// shortly before a user next uses it.
func (t *trace) starts(down time.Duration) time.Duration {
	for _, a := range t.acts {
		if a.label == use && !a.timer && a.to > down+ahead {
			return max(down+ahead, a.from-ahead)
		}
	}
	return day
}

// ahead is how long before work a user starts the machine.
const ahead = 90 * time.Second

// onMachine replays a day of a machine with the agent.
func onMachine(t *testing.T, d *trace) (out replayed) {
	all, err := blocks()
	errtest.None(t, err)
	m := &machine{t: d, blocks: all, root: fastDir(t), files: map[string][]byte{}}
	errtest.None(t, m.prepare())
	kept := &notes{}
	var slept []truth.Span
	var boots []time.Duration
	synctest.Test(t, func(t *testing.T) {
		for boot := 0; time.Since(at0) < day; boot++ {
			boots = append(boots, time.Since(at0))
			m.runsUntil(t, kept, boot)
			down := time.Now()
			time.Sleep(time.Until(at0.Add(d.starts(time.Since(at0)))))
			if time.Now().After(down) {
				slept = append(slept, truth.Span{From: down, To: time.Now()})
			}
		}
	})
	out = replayed{slept: truth.Of(slept...), verdicts: kept.all, kind: why.KindAgent, timeout: machineTimeout, window: 2*time.Minute + step}
	out.guarded = func(b idle.Block, at time.Duration) bool {
		for _, up := range boots {
			if since := at - up; since >= 0 && (b.Code == "boot_grace" && since <= 3*time.Minute || b.Code == "config_unreadable" && since < time.Second) {
				return true
			}
		}
		// The warning is sent when most of the timeout has passed.
		return b.Code == idle.WarningPending && len(d.uses(at-machineTimeout+18*time.Minute, at)) == 0
	}
	return out
}

// uses returns the acts of use that overlap a period.
func (t *trace) uses(from, to time.Duration) (out []act) {
	for _, a := range t.acts {
		if a.label == use && a.from < to && from < a.to {
			out = append(out, a)
		}
	}
	return out
}

var _ agent.Evidence = (*notes)(nil)
