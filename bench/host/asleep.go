package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

//go:embed tiny/tiny.c
var tinySource []byte

// firstPort is the first port of the tiny programs. The last one is below the
// kernel's ephemeral ports.
const firstPort = 10_000

// tiny builds a minimal program that listens, and returns its path.
func tiny(dir string) (string, error) {
	src, bin := filepath.Join(dir, "tiny.c"), filepath.Join(dir, "tiny")
	if err := os.WriteFile(src, tinySource, 0o600); err != nil {
		return "", err
	}
	out, err := exec.Command("gcc", "-O2", "-static", "-nostdlib", "-fno-stack-protector", "-o", bin, src).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("cannot build the tiny program (Debian package gcc, amd64): %w\n%s", err, out)
	}
	return bin, nil
}

// asleepPart fills a host with paused instances and measures the host while they
// sleep. If the limits on open files allow fewer than wanted, it repeats that
// with instances that no connection starts again after a stop, because no sockets
// are kept for those.
func asleepPart(ctx context.Context, s settings) error {
	n, err := asleep(ctx, s, true)
	if err == nil && n < s.instances {
		fmt.Println("Without wake-from-stopped:")
		_, err = asleep(ctx, s, false)
	}
	return err
}

// asleep measures as many instances as the limits allow, up to the wanted number,
// and returns how many. wakes means that a connection starts them again after a
// stop.
func asleep(ctx context.Context, s settings, wakes bool) (n int, err error) {
	d, err := startDaemon(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	bin, err := tiny(d.dir)
	if err != nil {
		return 0, err
	}
	start := func(k int) error {
		port := fmt.Sprint(firstPort + k)
		at, after := "127.0.0.1:"+port, idle.Duration(2*time.Second)
		_, err := d.Create(ctx, hostctl.Create{Start: true, Spec: instance.Spec{Name: "t" + port, Command: []string{bin, port}, PauseAfter: &after,
			WakeFromStopped: &wakes, Expose: []instance.Endpoint{{Listen: at, Target: at, Path: instance.PathDirect}}}})
		return err
	}
	paused := func(n int) error {
		return wait(ctx, 3*time.Minute, func() error {
			st, err := d.Status(ctx)
			if err == nil && st.Instances["paused"] < n {
				err = fmt.Errorf("%d of %d are paused", st.Instances["paused"], n)
				<-time.After(200 * time.Millisecond)
			}
			return err
		})
	}
	// The first few make the daemon create everything that instances share, such
	// as the watchdog.
	begun := 8
	if err := each(4, begun, start); err != nil {
		return 0, err
	}
	if err := paused(begun); err != nil {
		return 0, err
	}
	empty, err := observe(ctx, d)
	if err != nil {
		return 0, err
	}
	if n, err = fitting(d, s.instances, &begun, func(from, to int) error {
		if err := each(4, to-from, func(k int) error { return start(from + k) }); err != nil {
			return err
		}
		return paused(to)
	}); err != nil {
		return 0, err
	}
	began := time.Now()
	first := begun
	if err := each(16, n-first, func(k int) error { return start(first + k) }); err != nil {
		return 0, err
	}
	started := time.Since(began)
	if err := paused(n); err != nil {
		return 0, err
	}
	asleep := time.Since(began)
	<-time.After(3 * time.Second) // let it write records and collect garbage
	full, err := observe(ctx, d)
	if err != nil {
		return 0, err
	}
	<-time.After(s.quiet)
	later := observed{at: time.Now()}
	if later.daemon, later.shim, err = usages(d); err != nil {
		return 0, err
	}
	end, err := observe(ctx, d)
	if err != nil {
		return 0, err
	}
	later.goroutines, later.files = end.goroutines, end.files
	printAsleep(n-8, s, started, asleep, empty, full, later)
	return n, wakeSome(s, n)
}

// wakeSome checks that the instances are only asleep, by waking n of them.
func wakeSome(s settings, n int) error {
	var lat []time.Duration
	for k := 0; k < n; k += max(n/200, 1) {
		t, err := firstByte(fmt.Sprintf("127.0.0.1:%d", firstPort+k))
		if err != nil {
			return err
		}
		lat = append(lat, t)
	}
	fmt.Printf("%d of them woken by a connection: first byte p50 %.0f us, p99 %.0f us\n", len(lat), quantile(lat, 0.5), quantile(lat, 0.99))
	return nil
}

// fitting returns how many instances the limits on open files allow, at most
// want. *begun of them run already. To measure how many files each needs, fitting
// starts some more and updates *begun.
func fitting(d *daemon, want int, begun *int, start func(from, to int) error) (int, error) {
	const more, spare = 64, 200
	before, err := openFiles(d)
	if err != nil {
		return 0, err
	}
	from := *begun
	*begun = min(want, from+more)
	if err := start(from, *begun); err != nil || *begun == want {
		return want, err
	}
	after, err := openFiles(d)
	if err != nil {
		return 0, err
	}
	n := min(want, 32_000-firstPort)
	for _, name := range slices.Sorted(maps.Keys(after)) {
		a := after[name]
		each := float64(a.count-before[name].count) / more
		if room := int(float64(a.limit-a.kept-a.count-spare)/max(each, 0.01)) + *begun; room < n {
			fmt.Printf("note: %s opens %.2f files for each instance and is limited to %d: %d instances instead of %d\n", name, each, a.limit, room, want)
			n = room
		}
	}
	return max(n, *begun), nil
}

// opened is a process's number of open files without those of control groups, its
// limit, and how many files of control groups it may keep open.
type opened struct{ count, limit, kept int }

// openFiles returns the open files of the daemon, its shim and the shim's
// watchdog, by name.
func openFiles(d *daemon) (map[string]opened, error) {
	pids := map[string]int{"the daemon": d.cmd.Process.Pid, "the shim": d.shim}
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", d.shim, d.shim))
	if err != nil {
		return nil, err
	}
	for _, pid := range strings.Fields(string(children)) {
		line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		if n, err := strconv.Atoi(pid); err == nil && strings.Contains(string(line), "\x00watchdog\x00") {
			pids["the watchdog"] = n
		}
	}
	out := map[string]opened{}
	for name, pid := range pids {
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			return nil, err
		}
		limit, err := fileLimit(pid)
		if err != nil {
			return nil, err
		}
		o := opened{limit: limit}
		if pid == d.cmd.Process.Pid {
			o.kept = limit / 8
		}
		for _, fd := range fds {
			if path, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); err != nil || !strings.HasPrefix(path, "/sys/fs/cgroup/") {
				o.count++
			}
		}
		out[name] = o
	}
	return out, nil
}

func fileLimit(pid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		var soft int
		if _, err := fmt.Sscanf(line, "Max open files %d", &soft); err == nil {
			return soft, nil
		}
	}
	return 0, errors.New("cannot find the limit of open files")
}

// observed is one measurement of the daemon and its shim. The status request
// costs the daemon something too, so at the end of an interval the usage is read
// before it.
type observed struct {
	at           time.Time
	daemon, shim used
	goroutines   int
	files        int
}

func observe(ctx context.Context, d *daemon) (o observed, err error) {
	st, err := d.Status(ctx)
	if err != nil {
		return o, err
	}
	o.at, o.goroutines, o.files = time.Now(), st.Goroutines, st.OpenFiles
	o.daemon, o.shim, err = usages(d)
	return o, err
}

func usages(d *daemon) (daemon, shim used, err error) {
	if daemon, err = usage(d.cmd.Process.Pid); err != nil {
		return daemon, shim, err
	}
	shim, err = usage(d.shim)
	return daemon, shim, err
}

func printAsleep(n int, s settings, started, asleep time.Duration, empty, full, later observed) {
	w := tabwriter.NewWriter(os.Stdout, 2, 8, 2, ' ', 0)
	span := later.at.Sub(full.at)
	share := func(a, b used) float64 { return 100 * (b.cpu - a.cpu).Seconds() / span.Seconds() }
	each := func(a, b int64) float64 { return float64(b-a) / float64(n) / 1024 }
	fmt.Fprintf(w, "%d paused instances\tempty host\tall paused\tper instance\twanted\t\n", n)
	fmt.Fprintf(w, "started in / all paused after\t\t%s / %s\t%.1f ms\t\t\n", started.Round(time.Second), asleep.Round(time.Second), started.Seconds()*1000/float64(n))
	fmt.Fprintf(w, "daemon CPU over %s\t\t%.4f %% of a core\t\tat most 0.004 %%\t\n", span.Round(time.Second), share(full.daemon, later.daemon))
	fmt.Fprintf(w, "shim CPU over it\t\t%.4f %% of a core\t\t\t\n", share(full.shim, later.shim))
	fmt.Fprintf(w, "daemon memory, resident\t%d KiB\t%d KiB\t%.2f KiB\tat most 9 KiB\t\n", empty.daemon.rss>>10, later.daemon.rss>>10, each(empty.daemon.rss, later.daemon.rss))
	fmt.Fprintf(w, "shim memory, resident\t%d KiB\t%d KiB\t%.2f KiB\t\t\n", empty.shim.rss>>10, later.shim.rss>>10, each(empty.shim.rss, later.shim.rss))
	fmt.Fprintf(w, "daemon goroutines\t%d\t%d\t\tnone per instance\t\n", empty.goroutines, later.goroutines)
	fmt.Fprintf(w, "daemon threads\t%d\t%d\t\tnone per instance\t\n", empty.daemon.threads, later.daemon.threads)
	fmt.Fprintf(w, "shim threads\t%d\t%d\t\tnone per instance\t\n", empty.shim.threads, later.shim.threads)
	fmt.Fprintf(w, "daemon kernel timers\t%d\t%d\t\tnone per instance\t\n", empty.daemon.timers, later.daemon.timers)
	fmt.Fprintf(w, "daemon open files\t%d\t%d\t%.2f\tone per socket, and at most an eighth of the limit\t\n", empty.files, later.files, float64(later.files-empty.files)/float64(n))
	w.Flush()
}
