package main

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"lull/internal/platform/proc"
)

// row is one second of a recording.
type row struct {
	cpu    int64 // microseconds
	disk   int64 // bytes read and written
	rx, tx int64 // bytes from and to the client
	conns  int   // open connections of the client, at the end of the second
	in     bool  // its terminal was read
	out    bool  // its terminal was written
}

// meter measures the processes of one accounting group.
type meter struct {
	group string
	fs    *proc.FS
	io    proc.Tally
	cpu   int64
	disk  int64
	ttys  map[string][2]int64
	use   *usage
	rx    int64
	tx    int64
}

const groups = "/sys/fs/cgroup/cpuacct"

// record starts the program of r and records its usage for span.
func record(ctx context.Context, r recipe, span time.Duration) ([]row, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m := &meter{group: filepath.Join(groups, "record-"+r.name), fs: proc.Live(), use: &usage{}, ttys: map[string][2]int64{}}
	if err := os.Mkdir(m.group, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "lull-record-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	x := &run{dir: dir, use: m.use}
	if err := x.start(r, m.group); err != nil {
		return nil, err
	}
	defer m.end()
	time.Sleep(r.warm)
	if r.client != nil {
		go r.client(ctx, x)
		time.Sleep(2 * time.Second)
	}
	return m.rows(ctx, span)
}

// start runs the program in a shell that first joins the group.
func (x *run) start(r recipe, group string) error {
	for name, text := range r.files {
		if err := os.WriteFile(filepath.Join(x.dir, name), []byte(strings.ReplaceAll(text, "$DIR", x.dir)), 0o755); err != nil {
			return err
		}
	}
	script := "echo $$ >" + group + "/cgroup.procs; cd " + x.dir + "; export HOME=" + x.dir + "\n" + strings.ReplaceAll(r.run, "$DIR", x.dir)
	cmd := exec.Command("sh", "-c", script)
	here, err := os.Getwd()
	if err != nil {
		return err
	}
	cmd.Env = append(os.Environ(), "REPO="+here)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	x.stdin = stdin
	log, err := os.Create("/tmp/lull-record-" + r.name + ".log")
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	go cmd.Wait()
	return nil
}

// end kills the remaining processes of the group.
func (m *meter) end() {
	for range 50 {
		pids := m.pids()
		for _, pid := range pids {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(100 * time.Millisecond)
		if len(pids) == 0 && os.Remove(m.group) == nil {
			return
		}
	}
}

func (m *meter) pids() (out []int) {
	b, _ := os.ReadFile(m.group + "/cgroup.procs")
	for _, f := range strings.Fields(string(b)) {
		if pid, err := strconv.Atoi(f); err == nil {
			out = append(out, pid)
		}
	}
	return out
}

// look returns the disk bytes of the processes so far, and whether a terminal had
// input or output.
func (m *meter) look() (disk int64, in, out bool) {
	now := map[int]uint64{}
	for _, pid := range m.pids() {
		if io, err := m.fs.IO(pid); err == nil {
			now[pid] = io.Read + io.Written
		}
		tty, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/0", pid))
		if err != nil || !strings.HasPrefix(tty, "/dev/pts/") {
			continue
		}
		var st syscall.Stat_t
		if syscall.Stat(tty, &st) != nil {
			continue
		}
		was, known := m.ttys[tty]
		is := [2]int64{st.Atim.Sec, st.Mtim.Sec}
		in, out = in || known && was[0] != is[0], out || known && was[1] != is[1]
		m.ttys[tty] = is
	}
	return int64(m.io.Add(now)), in, out
}

func (m *meter) used() int64 {
	b, _ := os.ReadFile(m.group + "/cpuacct.usage")
	n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n / 1000
}

// rows samples disks and terminals ten times a second, so that short-lived
// programs are seen, and returns the sums for each second.
func (m *meter) rows(ctx context.Context, span time.Duration) (out []row, err error) {
	m.cpu = m.used()
	m.disk, _, _ = m.look()
	m.rx, m.tx = m.use.rx.Load(), m.use.tx.Load()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	var x row
	for n := 1; len(out) < int(span.Seconds()); n++ {
		select {
		case <-ctx.Done():
			return out, ctx.Err()
		case <-tick.C:
		}
		disk, typed, printed := m.look()
		x.in, x.out = x.in || typed, x.out || printed
		if n%10 != 0 {
			continue
		}
		cpu, rx, tx := m.used(), m.use.rx.Load(), m.use.tx.Load()
		x.cpu, x.disk, x.rx, x.tx, x.conns = cpu-m.cpu, disk-m.disk, rx-m.rx, tx-m.tx, int(m.use.open.Load())
		m.cpu, m.disk, m.rx, m.tx = cpu, disk, rx, tx
		out, x = append(out, x), row{}
	}
	if len(m.pids()) == 0 {
		return out, errors.New("the program has ended")
	}
	return out, nil
}

func flag01(b bool) int {
	if b {
		return 1
	}
	return 0
}

// write stores the rows as gzipped columns.
func write(path string, rows []row) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	z, _ := gzip.NewWriterLevel(f, gzip.BestCompression)
	fmt.Fprintln(z, "cpu_us,disk,rx,tx,conns,in,out")
	for _, x := range rows {
		fmt.Fprintf(z, "%d,%d,%d,%d,%d,%d,%d\n", x.cpu, x.disk, x.rx, x.tx, x.conns, flag01(x.in), flag01(x.out))
	}
	return errors.Join(z.Close(), f.Close())
}

// summary describes a recording, for the user who makes it.
func summary(rows []row) string {
	var cpu, disk, rx, tx int64
	in, out := 0, 0
	for _, x := range rows {
		cpu, disk, rx, tx, in, out = cpu+x.cpu, disk+x.disk, rx+x.rx, tx+x.tx, in+flag01(x.in), out+flag01(x.out)
	}
	n := int64(max(len(rows), 1))
	return fmt.Sprintf("cpu %.2f%% disk %d B/s rx %d tx %d B/s typed %d printed %d", float64(cpu)/float64(n)/1e4, disk/n, rx/n, tx/n, in, out)
}
