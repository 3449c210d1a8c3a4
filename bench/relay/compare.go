package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// proxy is one process under measurement.
type proxy struct {
	name, addr string
	cmd        *exec.Cmd
}

func (p *proxy) stop() {
	if p.cmd == nil || p.cmd.Process == nil {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	late := time.AfterFunc(3*time.Second, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	_ = p.cmd.Wait()
}

func own(name, role, to, profile string) (*proxy, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "-role", role, "-to", to, "-cpuprofile", profile, "-loops", fmt.Sprint(loopsFlag))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("cannot start %s: %w", name, err)
	}
	return &proxy{name, strings.TrimSpace(line), cmd}, nil
}

// freeAddr returns an unused address, for a proxy that cannot choose one itself.
func freeAddr() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}

func systemd(to string) (*proxy, error) {
	const path = "/lib/systemd/systemd-socket-proxyd"
	if _, err := os.Stat(path); err != nil {
		return nil, err
	}
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	return started("systemd-socket-proxyd", addr, exec.Command("systemd-socket-activate", "-l", addr, path, to))
}

func haproxy(dir, to string) (*proxy, error) {
	path, err := exec.LookPath("haproxy")
	if err != nil {
		if path, err = exec.LookPath("/usr/sbin/haproxy"); err != nil {
			return nil, err
		}
	}
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	conf := fmt.Sprintf("global\n maxconn 2000\ndefaults\n mode tcp\n timeout connect 10s\n timeout client 60s\n timeout server 60s\n"+
		" option splice-auto\nlisten l\n bind %s\n server b %s\n", addr, to)
	file := filepath.Join(dir, "haproxy.cfg")
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		return nil, err
	}
	return started("haproxy", addr, exec.Command(path, "-db", "-q", "-f", file))
}

// started waits until a proxy forwards connections.
func started(name, addr string, cmd *exec.Cmd) (*proxy, error) {
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &proxy{name, addr, cmd}
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		if _, err := oneConnection(addr, make([]byte, 1)); err == nil {
			return p, nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	p.stop()
	return nil, fmt.Errorf("cannot start %s: it does not relay", name)
}

func compare(ctx context.Context, s settings) error {
	dir, err := os.MkdirTemp("", "bench-relay")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	backend, err := own("backend", "backend", "", "")
	if err != nil {
		return err
	}
	defer backend.stop()
	to := backend.addr
	all := []*proxy{{name: "direct", addr: to}}
	for _, start := range []func() (*proxy, error){
		func() (*proxy, error) { return own("lull", "router", to, s.profile) },
		func() (*proxy, error) { return systemd(to) },
		func() (*proxy, error) { return own("plain io.Copy", "plain", to, "") },
		func() (*proxy, error) { return haproxy(dir, to) },
	} {
		p, err := start()
		if err != nil {
			fmt.Printf("left out: %v\n", err)
			continue
		}
		defer p.stop()
		all = append(all, p)
	}
	for _, m := range measurements {
		if s.only != "" && s.only != m.name {
			continue
		}
		if err := m.rounds(ctx, s, all); err != nil {
			return err
		}
	}
	return nil
}

// rounds measures every proxy in each round and prints the table.
func (m measurement) rounds(ctx context.Context, s settings, all []*proxy) error {
	got := make([][]sample, len(all))
	order := make([]int, len(all))
	for i := range order {
		order[i] = i
	}
	for range s.rounds {
		for _, i := range order {
			if err := ctx.Err(); err != nil {
				return err
			}
			before := all[i].cpu()
			one, err := m.run(all[i].addr, s)
			one.cpu = all[i].cpu() - before
			if err != nil {
				return fmt.Errorf("cannot measure %s of %s: %w", m.name, all[i].name, err)
			}
			got[i] = append(got[i], one)
		}
		slices.Reverse(order)
	}
	w := tabwriter.NewWriter(os.Stdout, 2, 8, 2, ' ', 0)
	fmt.Fprintf(w, "%s\t%s\tp50\tp99\tCPU of the proxy each\tlull / it (rate)\tspread of the ratio\n", m.name, m.unit)
	for i, p := range all {
		rate := median(pick(got[i], func(s sample) float64 { return s.rate }))
		fmt.Fprintf(w, "%s\t%.0f\t%.0f us\t%.0f us\t%.1f us\t", p.name, rate,
			median(pick(got[i], func(s sample) float64 { return s.p50 })), median(pick(got[i], func(s sample) float64 { return s.p99 })), cpuEach(got[i]))
		var ratios []float64
		if lull := slices.IndexFunc(all, func(p *proxy) bool { return p.name == "lull" }); lull >= 0 && lull != i {
			for r := range got[i] {
				ratios = append(ratios, got[lull][r].rate/got[i][r].rate)
			}
			fmt.Fprintf(w, "%.2f\t%.2f to %.2f\n", median(ratios), slices.Min(ratios), slices.Max(ratios))
		} else {
			fmt.Fprint(w, "\t\n")
		}
	}
	fmt.Fprintln(w)
	return w.Flush()
}

// cpu returns the CPU time of the process. Debian's kernels count it in
// hundredths of a second, so it is meaningful only over many rounds.
func (p *proxy) cpu() time.Duration {
	if p.cmd == nil {
		return 0
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	// Fields 14 and 15; counting begins after the name, which may contain spaces.
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(f) < 13 {
		return 0
	}
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond
}

// cpuEach returns the CPU time per unit of work, in microseconds.
func cpuEach(s []sample) float64 {
	cpu, units := 0.0, 0.0
	for _, one := range s {
		cpu += one.cpu.Seconds() * 1e6
		units += one.units
	}
	return cpu / max(units, 1)
}

func pick(s []sample, f func(sample) float64) []float64 {
	out := make([]float64, len(s))
	for i := range s {
		out[i] = f(s[i])
	}
	return out
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}
