package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"
)

//go:embed tiny/tiny.c
var tinySource []byte

// firstPort is the first port of the tiny programs; the last is below the
// kernel's ephemeral ports.
const firstPort = 10_000

// tiny builds the smallest program that listens.
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

// asleepPart fills a host with paused instances and measures it while it does
// nothing.
func asleepPart(ctx context.Context, s settings) (err error) {
	d, err := startDaemon(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	bin, err := tiny(d.dir)
	if err != nil {
		return err
	}
	n, err := fitting(ctx, d, s.instances)
	if err != nil {
		return err
	}
	empty, err := observe(ctx, d)
	if err != nil {
		return err
	}
	began := time.Now()
	err = each(16, n, func(k int) error {
		port := fmt.Sprint(firstPort + k)
		return d.run(ctx, "t"+port, "127.0.0.1:"+port, 2*time.Second, bin, port)
	})
	if err != nil {
		return err
	}
	started := time.Since(began)
	err = wait(ctx, 3*time.Minute, func() error {
		st, err := d.Status(ctx)
		if err == nil && st.Instances["paused"] < n {
			err = fmt.Errorf("%d of %d are paused", st.Instances["paused"], n)
			<-time.After(200 * time.Millisecond)
		}
		return err
	})
	if err != nil {
		return err
	}
	asleep := time.Since(began)
	<-time.After(3 * time.Second) // until records are written and garbage is collected
	full, err := observe(ctx, d)
	if err != nil {
		return err
	}
	<-time.After(s.quiet)
	later := observed{at: time.Now()}
	if later.daemon, later.shim, err = usages(d); err != nil {
		return err
	}
	end, err := observe(ctx, d)
	if err != nil {
		return err
	}
	later.goroutines, later.files = end.goroutines, end.files
	printAsleep(n, s, started, asleep, empty, full, later)
	return wakeSome(s, n)
}

// wakeSome checks that the instances are merely asleep, by waking n of them.
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

// fitting returns how many instances the limit on open files allows: one
// descriptor per listener in the daemon, one per log pipe in the shim.
func fitting(ctx context.Context, d *daemon, want int) (int, error) {
	st, err := d.Status(ctx)
	if err != nil {
		return 0, err
	}
	room := int(st.FileLimit) - 500
	shim, err := fileLimit(d.shim)
	if err != nil {
		return 0, err
	}
	room = min(room, shim-500, 32_000-firstPort)
	if room < want {
		fmt.Printf("note: open files are limited to %d (daemon) and %d (shim): %d instances instead of %d, which would need %d\n",
			st.FileLimit, shim, room, want, want+500)
		return room, nil
	}
	return want, nil
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
// costs the daemon something too, so the measurement that ends an interval
// reads the usage first.
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
	fmt.Fprintf(w, "daemon CPU over %s\t\t%.4f %% of a core\t\tbelow 0.1 %%\t\n", span.Round(time.Second), share(full.daemon, later.daemon))
	fmt.Fprintf(w, "shim CPU over it\t\t%.4f %% of a core\t\t\t\n", share(full.shim, later.shim))
	fmt.Fprintf(w, "daemon memory, resident\t%d KiB\t%d KiB\t%.2f KiB\tat most 10 KiB\t\n", empty.daemon.rss>>10, later.daemon.rss>>10, each(empty.daemon.rss, later.daemon.rss))
	fmt.Fprintf(w, "shim memory, resident\t%d KiB\t%d KiB\t%.2f KiB\t\t\n", empty.shim.rss>>10, later.shim.rss>>10, each(empty.shim.rss, later.shim.rss))
	fmt.Fprintf(w, "daemon goroutines\t%d\t%d\t\tnone per instance\t\n", empty.goroutines, later.goroutines)
	fmt.Fprintf(w, "daemon threads\t%d\t%d\t\tnone per instance\t\n", empty.daemon.threads, later.daemon.threads)
	fmt.Fprintf(w, "shim threads\t%d\t%d\t\tnone per instance\t\n", empty.shim.threads, later.shim.threads)
	fmt.Fprintf(w, "daemon kernel timers\t%d\t%d\t\tnone per instance\t\n", empty.daemon.timers, later.daemon.timers)
	fmt.Fprintf(w, "daemon open files\t%d\t%d\t%.2f\tone per socket\t\n", empty.files, later.files, float64(later.files-empty.files)/float64(n))
	w.Flush()
}
