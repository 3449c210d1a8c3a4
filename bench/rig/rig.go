// Package rig sets up measurements of a server: lull sim with a region of
// workers, in a separate process that is not counted, and lull server with a
// store that already contains all workers, as if it had run for a day.
package rig

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
	"lull/internal/lib/freeport"
	"lull/internal/platform/etcd"
	"lull/internal/protocol/control"
	"lull/internal/sim"
	"lull/internal/store"
)

// Region is a simulated region. A tenth of its workers run.
type Region struct {
	Workers int
	Events  int    // length of the history of each running worker
	Bin     string // path of the lull to measure

	// Scenario describes the region in lull sim's format. If it is set, Workers
	// is ignored.
	Scenario string
	// Each, unless nil, changes the server's record of an instance before the
	// server starts.
	Each func(in sim.InstanceInfo, w *worker.Worker)
}

// Rig is a region and its server. Create it with New. Close ends the processes
// and removes the files.
type Rig struct {
	Sim    string   // URL of the simulator
	IDs    []string // ids of all workers, running ones first
	Up     int      // number of running workers
	Server *exec.Cmd
	URL    string // of the server
	Token  string // an administrator's
	Client *control.Client

	bin, dir, cmlPort string
	simulator         *exec.Cmd
	each              func(in sim.InstanceInfo, w *worker.Worker)
}

// New starts the simulator and fills the store of a server, which it does not
// start.
func New(ctx context.Context, of Region) (r *Rig, err error) {
	r = &Rig{bin: of.Bin, each: of.Each}
	if r.dir, err = os.MkdirTemp("", "lull-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	scenario := fmt.Sprintf(`regions: [{name: us-east-1}]
timing: {background: -1s}
profiles: {quiet: {history: %d, history_span: 700h}}
workers:
  - {name: up, count: %d, type: t3.small, profile: quiet}
  - {name: down, count: %d, type: t3.small, profile: quiet, state: stopped}
`, of.Events, of.Workers/10, of.Workers-of.Workers/10)
	scenario = cmp.Or(of.Scenario, scenario)
	if err := os.WriteFile(r.File("sim.yaml"), []byte(scenario), 0o600); err != nil {
		return nil, err
	}
	port, err := freeport.Take()
	if err != nil {
		return nil, err
	}
	r.cmlPort = strconv.Itoa(port)
	var text string
	if r.simulator, text, err = r.start(ctx, "on http://", "sim", "--listen", "127.0.0.1:0", "--cml-port", r.cmlPort, "--scenario", r.File("sim.yaml")); err != nil {
		return nil, err
	}
	r.Sim = "http://" + strings.TrimSuffix(text, ",")
	return r, r.fill(ctx)
}

// File returns the path of a file that Close removes.
func (r *Rig) File(name string) string { return filepath.Join(r.dir, name) }

// Close ends both processes and removes their files.
func (r *Rig) Close() error {
	for _, cmd := range []*exec.Cmd{r.Server, r.simulator} {
		if cmd != nil {
			end(cmd)
		}
	}
	return os.RemoveAll(r.dir)
}

// Serve starts the server with further arguments. It returns once the server
// answers and owns the whole fleet.
func (r *Rig) Serve(ctx context.Context, args ...string) (err error) {
	args = append([]string{"server", "--data", r.File("data"), "--listen", "127.0.0.1:0", "--cml-port", r.cmlPort, "--log-level", "error", "--admin-token-file", r.File("token")}, args...)
	if r.Server, r.URL, err = r.start(ctx, "serving on ", args...); err != nil {
		return err
	}
	token, err := os.ReadFile(r.File("token"))
	if err != nil {
		return err
	}
	r.Token = strings.TrimSpace(string(token))
	if r.Client, err = control.NewClient(r.URL, r.Token, nil); err != nil {
		return err
	}
	for {
		var s control.Shards
		if _, err := r.Client.Call(ctx, "GET", "/readyz", nil, nil); err == nil {
			if _, err := r.Client.Call(ctx, "GET", "/admin/shards", nil, &s); err == nil && len(s.Held) == s.Total {
				return nil
			}
		}
		if err := delay.For(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

// start runs lull and returns the word after the text after in its output.
func (r *Rig) start(ctx context.Context, after string, args ...string) (*exec.Cmd, string, error) {
	cmd := exec.CommandContext(ctx, r.bin, args...)
	cmd.Env = append(os.Environ(), "AWS_ENDPOINT_URL="+r.Sim, "AWS_ACCESS_KEY_ID=test", "AWS_SECRET_ACCESS_KEY=test", "CML_DEFAULT_PASSWORD=env:CML_PW", "CML_PW=cml")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if _, rest, ok := strings.Cut(lines.Text(), after); ok {
			go func() { _, _ = io.Copy(io.Discard, out) }() // discard the rest of the output
			return cmd, strings.Fields(rest)[0], nil
		}
	}
	end(cmd)
	return nil, "", fmt.Errorf("cannot start %s: it exited before it printed %q", args[0], after)
}

func end(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // returns an error because it was killed
}

// fill creates the store of a server that has a worker for every simulated
// instance.
func (r *Rig) fill(ctx context.Context) (err error) {
	req, err := http.NewRequestWithContext(ctx, "GET", r.Sim+"/sim/instances", nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	var all []sim.InstanceInfo
	if err := json.NewDecoder(res.Body).Decode(&all); err != nil {
		return err
	}
	db, err := etcd.OpenEmbedded(ctx, etcd.EmbeddedConfig{Dir: r.File("data"), NoSync: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	var ops []store.Op
	var down []string
	for i, in := range all {
		op, id, running := r.record(i, in)
		ops = append(ops, op)
		if running {
			r.IDs = append(r.IDs, id)
		} else {
			down = append(down, id)
		}
		if len(ops) == store.MaxOps || i == len(all)-1 {
			if _, err := db.Commit(ctx, store.Txn{Then: ops}); err != nil {
				return err
			}
			ops = nil
		}
	}
	r.Up = len(r.IDs)
	r.IDs = append(r.IDs, down...)
	pool := fmt.Appendf(nil, `{"v":1,"up":%d}`, r.Up)
	_, err = db.Commit(ctx, store.Txn{Then: []store.Op{store.Put("pool", pool)}})
	return err
}

// record returns the operation that stores the record of an instance's worker, as
// if the worker had existed for a day.
func (r *Rig) record(i int, in sim.InstanceInfo) (op store.Op, id string, running bool) {
	since := time.Now().UTC().Add(-24 * time.Hour)
	timeout := 20 * 24 * 60 // no worker may be paused during the measurement
	w := worker.Worker{
		ID: fmt.Sprintf("w-%016x", i), Name: in.Name, AWSRegion: in.Region, DesiredStatus: power.WorkerStopped, Status: power.WorkerStopped,
		StatusSince: since, CreatedAt: since, IsIdleDetectionEnabled: true, IdleTimeoutMinutes: &timeout, PauseHolder: worker.HolderController,
		Armed: true, TLSInsecure: true, EC2InstanceID: in.ID, EC2State: string(in.State), InstanceType: in.Type,
		License: worker.License{Status: worker.LicenseUnregistered}, RecentActivityEvents: []worker.Event{}, AcceptedRisks: []string{worker.RiskNoElasticIP},
	}
	if running = in.State == "running"; running {
		w.Status, w.DesiredStatus, w.RunningSince = power.WorkerRunning, power.WorkerRunning, &since
		w.PublicIP, w.PrivateIP, w.HTTPSEndpoint, w.CMLVersion, w.CMLReady = in.PublicIP, in.PrivateIP, "https://"+in.PublicIP, in.CMLVersion, true
	}
	if r.each != nil {
		r.each(in, &w)
	}
	body, err := json.Marshal(w)
	if err != nil {
		panic(err) // cannot happen: a record has only plain values
	}
	return store.Put("workers/"+w.ID, append([]byte(`{"v":1,`), body[1:]...)), w.ID, running
}

// CPU returns the CPU time of the server.
func (r *Rig) CPU() (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.Server.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	f := strings.Fields(rest)
	user, err := strconv.Atoi(f[11])
	system, err2 := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err, err2)
}

// Resident returns the server's memory in KiB.
func (r *Rig) Resident() (float64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.Server.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), "VmRSS:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	return float64(kib), err
}
