package agent

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/waittest"
)

// quick returns the common lines of every policy here: the shortest windows
// possible.
func quick(lines ...string) []string {
	return append([]string{"idle-timeout: 1m", "check-interval: 1s", "warn-before: 10s", "boot-grace: 0s"}, lines...)
}

// TestSilentComputation runs a computation without output for longer than the
// idle timeout, as a grandchild in its own process namespace, as in a container.
// The agent must never consider the machine idle.
func TestSilentComputation(t *testing.T) {
	t.Parallel()
	need(t, "unshare")
	m := newMachine(t)
	stop := m.start(m.command("unshare", "-p", "-f", "--mount-proc", "bash", "-c", "bash -c 'while :; do :; done'"))
	m.agent(quick("signals: [cpu, terminals, users, recent]")...)
	m.becomes("cpu", idle.Active)
	worst := 0.0
	for end := time.Now().Add(75 * time.Second); time.Now().Before(end); pause() {
		s := m.status()
		worst = max(worst, s.Verdict.IdleMinutes)
		if s.Verdict.Eligible || s.WarnedAt != nil && s.Stage == 3 {
			t.Fatalf("it may be paused in the middle of the work: %+v", s.Verdict)
		}
		if s.Stage != 2 && m.reading("cpu").State == idle.Active {
			t.Fatalf("stage %d answered, want 2: %+v", s.Stage, s.Stages)
		}
	}
	m.isOn("during the computation")
	t.Logf("75 s of silent work: idle for at most %.2f minutes", worst)
	stop()
}

// busyCPU returns the machine's CPU usage over d, measured without the agent's
// reader.
func busyCPU(t *testing.T, d time.Duration) float64 {
	t.Helper()
	read := func() (idle, all float64) {
		b, err := os.ReadFile("/proc/stat")
		if err != nil {
			t.Fatal(err)
		}
		line, _, _ := strings.Cut(string(b), "\n")
		for i, f := range strings.Fields(line)[1:9] {
			var v float64
			fmt.Sscan(f, &v)
			if all += v; i == 3 || i == 4 {
				idle += v
			}
		}
		return idle, all
	}
	i0, a0 := read()
	<-time.After(d)
	i1, a1 := read()
	return 100 - 100*(i1-i0)/max(a1-a0, 1)
}

// TestCPU checks, with a threshold above the load of the rest of the machine,
// that busy CPUs make the signal active, and that it becomes quiet when they
// stop.
func TestCPU(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.agent(quick("signals: cpu", "idle-cpu: 97")...)
	var stops []func()
	for range runtime.NumCPU() {
		stops = append(stops, m.start(m.command("bash", "-c", "while :; do :; done")))
	}
	m.becomes("cpu", idle.Active)
	for _, stop := range stops {
		stop()
	}
	if !waittest.Within(waittest.Timeout, func() bool { return m.reading("cpu").State == idle.Quiet }) {
		if other := busyCPU(t, 3*time.Second); other > 90 {
			t.Skipf("SKIP the quiet side of cpu: others use %.0f %% of this machine", other)
		}
		t.Fatalf("the load has ended and is still seen: %+v", m.reading("cpu"))
	}
}

// TestDisk does the same for disk writes.
func TestDisk(t *testing.T) {
	t.Parallel()
	dir := realDisk(t)
	m := newMachine(t)
	m.agent(quick("signals: disk", "idle-disk: 3GB")...)
	m.becomes("disk", idle.Quiet)
	file := filepath.Join(dir, "written")
	stop := m.start(m.command("bash", "-c", "while :; do dd if=/dev/zero of="+file+" bs=1M count=256 conv=fsync status=none; done"))
	m.awaitf(2*time.Minute, func() bool { return m.reading("disk").State == idle.Active }, func() string {
		return fmt.Sprintf("256 MB again and again are seen: %+v", m.reading("disk"))
	})
	stop()
	m.becomes("disk", idle.Quiet)
}

// realDisk returns a directory on a disk rather than in memory.
func realDisk(t *testing.T) string {
	t.Helper()
	const tmpfs = 0x01021994
	for _, base := range []string{os.TempDir(), "/var/tmp", "/root"} {
		var st syscall.Statfs_t
		if syscall.Statfs(base, &st) != nil || int64(st.Type) == tmpfs || st.Bavail*uint64(st.Bsize) < 1<<30 {
			continue
		}
		dir, err := os.MkdirTemp(base, "lull-disk-")
		if err != nil {
			continue
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		return dir
	}
	t.Skip("SKIP disk: no directory here lies on a disk with room")
	return ""
}

// TestNetwork checks that traffic over a veth pair to another network namespace
// counts, and that loopback traffic does not.
func TestNetwork(t *testing.T) {
	t.Parallel()
	m, peer := newMachine(t), newMachine(t)
	m.agent(quick("signals: network")...)
	if r := m.reading("network"); r.State == idle.Active {
		t.Errorf("a machine with loopback alone: %+v", r)
	}
	for _, x := range []*machine{m, peer} {
		// Without IPv6, because its neighbor discovery would add traffic.
		x.sh("for f in all default; do [ ! -e /proc/sys/net/ipv6 ] || echo 1 > /proc/sys/net/ipv6/conf/$f/disable_ipv6; done")
	}
	link := exec.Command("nsenter", "-t", fmt.Sprint(m.pid), "-n", "ip", "link", "add", "uplink", "type", "veth", "peer", "name", "far", "netns", fmt.Sprint(peer.pid))
	if out, err := link.CombinedOutput(); err != nil {
		t.Fatalf("cannot connect two machines: %v: %s", err, out)
	}
	m.sh("ip addr add 10.99.0.1/30 dev uplink && ip link set uplink up")
	peer.sh("ip addr add 10.99.0.2/30 dev far && ip link set far up")
	m.becomes("network", idle.Quiet)
	m.sh("for i in $(seq 50); do head -c 60000 /dev/zero > /dev/udp/127.0.0.1/9 || true; done 2>/dev/null")
	m.stays("network", idle.Quiet, 4*time.Second)

	stop := m.start(m.command("bash", "-c", "while :; do head -c 1400 /dev/zero > /dev/udp/10.99.0.2/9; sleep 0.1; done 2>/dev/null"))
	m.becomes("network", idle.Active)
	m.stays("network", idle.Active, 5*time.Second)
	m.isOn("during traffic")
	stop()
	m.becomes("network", idle.Quiet)
}
