package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
	"lull/internal/protocol/control"
)

// fleetScenario is the simulated region. A day of its users takes 24 minutes; the
// demo begins in their first hour of work.
const fleetScenario = `speed: 60
start: %s
regions: [{name: us-east-1}]
timing: {background: 30m}
profiles:
  busy: {labs: 3, history: 40, history_age: 1s, history_span: 1m, users: [{name: alice, days: daily, from: "09:00", to: "17:30", every: 4m, starts: true}]}
  morning: {labs: 2, history: 40, history_age: 1s, history_span: 1m, users: [{name: bob, days: daily, from: "09:00", to: "10:30", every: 4m, starts: true}]}
  abandoned: {labs: 2, history: 300, history_age: 720h}
workers:
  - {name: lab, count: 4, type: m5.xlarge, profile: busy, elastic_ip: true}
  - {name: course, count: 4, type: m5.xlarge, profile: morning, elastic_ip: true}
  - {name: old, count: 3, type: m5.2xlarge, profile: abandoned, elastic_ip: true}
  - {name: dark, type: m5.large, profile: busy, elastic_ip: true}
`

// fleetSettings set the idle timeout to a minute.
const fleetSettings = `worker_idle_timeout_minutes: 1
idle_detection_interval: 10
reconcile_interval: 1
worker_warn_before_minutes: 0
worker_auto_pause_snooze_minutes: 0
cml_default_password: env:LULL_DEMO_CML
`

// cloud is the server and the simulated region.
type cloud struct {
	*control.Client
	*stage
	started    []*exec.Cmd
	region     string            // the simulated region's APIs
	url, token string            // of the server
	page       string            // the dashboard, with a sign-in link
	before     map[string]string // the last shown status of each worker
	known      map[string]bool   // workers that have been checked since they started
	checked    atomic.Bool       // every worker has been checked
}

// start starts the region and the server.
func (c *cloud) start(ctx context.Context) error {
	now := time.Now().UTC()
	start := time.Date(now.Year(), now.Month(), now.Day(), 9, 30, 0, 0, time.UTC).Format(time.RFC3339)
	for name, text := range map[string]string{"sim.yaml": fmt.Sprintf(fleetScenario, start), "server.yaml": fleetSettings} {
		if err := os.WriteFile(filepath.Join(c.data, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	lines, err := c.run("sim", nil, "on port ", "sim", "--listen", "127.0.0.1:0", "--cml-port", "0", "--scenario", filepath.Join(c.data, "sim.yaml"))
	if err != nil {
		return err
	}
	c.region = "http://" + word(lines, "on http://")
	token := filepath.Join(c.data, "token")
	env := []string{"AWS_ENDPOINT_URL=" + c.region, "AWS_ACCESS_KEY_ID=demo", "AWS_SECRET_ACCESS_KEY=demo",
		"AWS_CONFIG_FILE=/dev/null", "AWS_SHARED_CREDENTIALS_FILE=/dev/null", "LULL_DEMO_CML=cml"}
	port := word(lines, "on port ")
	lines, err = c.run("server", env, "serving on ", "server", "--data", filepath.Join(c.data, "server"), "--listen", "127.0.0.1:0",
		"--cml-port", port, "--config", filepath.Join(c.data, "server.yaml"), "--admin-token-file", token, "--log-level", "error")
	if err != nil {
		return err
	}
	_, link, _ := strings.Cut(lines, "dashboard ")
	c.url, c.page = word(lines, "serving on "), word(link, "): ")
	b, err := os.ReadFile(token)
	if err != nil {
		return err
	}
	c.token = strings.TrimSpace(string(b))
	c.Client, err = control.NewClient(c.url, c.token, nil)
	return err
}

// word returns the first word of said after the text after, without trailing commas,
// or "" if there is none.
func word(said, after string) string {
	_, rest, _ := strings.Cut(said, after)
	for _, first := range strings.Fields(rest) {
		return strings.TrimRight(first, ",")
	}
	return ""
}

// run starts lull in the background and waits until it has printed until. It returns
// the output so far.
func (c *cloud) run(name string, env []string, until string, args ...string) (string, error) {
	logs, err := os.Create(filepath.Join(c.data, name+".log"))
	if err != nil {
		return "", err
	}
	defer logs.Close()
	cmd := c.lull(args...)
	cmd.Env, cmd.Stderr = append(cmd.Env, env...), logs
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	c.started = append(c.started, cmd)
	kill := time.AfterFunc(startLimit, func() { _ = cmd.Process.Kill() }) // give up if it takes too long
	defer kill.Stop()
	var printed strings.Builder
	for lines := bufio.NewScanner(out); lines.Scan(); {
		printed.WriteString(lines.Text() + "\n")
		if strings.Contains(lines.Text(), until) {
			go func() { _, _ = io.Copy(io.Discard, out) }() // the rest of its output is not needed
			return printed.String(), nil
		}
	}
	said, _ := os.ReadFile(logs.Name())
	return "", fmt.Errorf("lull %s ended before it was ready\n%s", args[0], said)
}

// machine is an instance as the region lists it.
type machine struct {
	ID     string `json:"id"`
	Name   string `json:"name"`
	Region string `json:"region"`
}

// take imports and arms every instance of the region, and returns how many.
func take(ctx context.Context, cl *control.Client, region string) (int, error) {
	req, err := http.NewRequestWithContext(ctx, "GET", region+"/sim/instances", nil)
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	var all []machine
	if err := json.NewDecoder(res.Body).Decode(&all); err != nil {
		return 0, err
	}
	insecure := true
	for _, in := range all {
		w := fleet.ImportedWorker{Name: in.Name, AWSRegion: in.Region, EC2InstanceID: in.ID, Profile: worker.Profile{TLSInsecure: &insecure}}
		if _, err := control.Write[worker.Worker](ctx, cl, "POST", "/workers/import", w); err != nil {
			return 0, err
		}
	}
	_, err = control.Write[any](ctx, cl, "POST", "/workers/arm", control.Selector{All: true})
	return len(all), err
}

// live imports the workers and reports when the server has checked all of them.
func (c *cloud) live(ctx context.Context) {
	if c.Client == nil {
		return
	}
	n, err := take(ctx, c.Client, c.region)
	if err == nil {
		err = check(ctx, c.Client)
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		c.happened("fleet", "left out: %v", err)
		return
	}
	c.checked.Store(true)
	c.say("\nThe fleet has %d workers, whose day takes 24 minutes. One is stopped after a\nminute without use. Its dashboard:\n\n  %s\n", n, c.page)
	c.surprise(ctx)
}

// check requests a check of every worker, and waits until the server knows the state
// of all.
func check(ctx context.Context, cl *control.Client) error {
	limit := time.Now().Add(startLimit)
	asked, known := map[string]bool{}, map[string]bool{}
	for {
		o, err := control.Read[control.Overview](ctx, cl, "/overview?limit=100")
		if err != nil {
			return err
		}
		waiting := 0
		var asks errgroup.Group
		for _, w := range o.Items {
			switch {
			case w.Status == string(power.WorkerStopping), w.Status == string(power.WorkerStopped), w.Status == string(power.WorkerRunning) && w.Standing != control.StandingUnknown:
				known[w.ID] = true
			case w.Status == string(power.WorkerRunning) && !asked[w.ID]:
				asked[w.ID] = true
				asks.Go(func() error {
					_, err := control.Write[any](ctx, cl, "POST", "/workers/"+w.ID+"/detect-idle", nil)
					return err
				})
			}
			if !known[w.ID] {
				waiting++
			}
		}
		if err := asks.Wait(); err != nil {
			return err
		}
		if waiting == 0 {
			return nil
		}
		if time.Now().After(limit) {
			return fmt.Errorf("%d workers were not checked within %s", waiting, startLimit)
		}
		if err := delay.For(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

// darkAfter is when the telemetry of one worker is switched off.
const darkAfter = time.Minute

// surprise switches off the telemetry of the worker dark, which is in use, to show
// that it is not paused.
func (c *cloud) surprise(ctx context.Context) {
	if delay.For(ctx, darkAfter) != nil {
		return
	}
	req, err := http.NewRequestWithContext(ctx, "PATCH", c.region+"/sim/instances/dark", bytes.NewReader([]byte(`{"opt_in": false}`)))
	if err == nil {
		var res *http.Response
		if res, err = http.DefaultClient.Do(req); err == nil {
			err = res.Body.Close()
		}
	}
	if err == nil {
		c.happened("dark", "telemetry is switched off: unknown does not count as idle, so it keeps running")
	}
}

// rows returns the number of workers in each state, and prints what has changed.
func (c *cloud) rows(ctx context.Context) []row {
	if c.Client == nil {
		return nil
	}
	if !c.checked.Load() {
		return []row{{name: "fleet", state: "starting"}}
	}
	o, err := control.Read[control.Overview](ctx, c.Client, "/overview?limit=100")
	if err != nil {
		return nil
	}
	counts := map[string]int{}
	for _, w := range o.Items {
		was, seen := c.before[w.ID]
		switch {
		case !seen || was == w.Status:
		case w.Status == string(power.WorkerStopped):
			c.happened(w.Name, "stopped: %s", w.Sentence)
		case w.Status == string(power.WorkerRunning):
			c.happened(w.Name, "running again")
		}
		c.before[w.ID] = w.Status
		standing := w.Standing
		switch {
		case w.Status != string(power.WorkerRunning):
			delete(c.known, w.ID)
		case standing != control.StandingUnknown:
			c.known[w.ID] = true
		case !c.known[w.ID]:
			standing = "checking" // it has just started
		}
		counts[strings.ReplaceAll(string(standing), "_", " ")]++
	}
	var state []string
	for _, s := range slices.Sorted(maps.Keys(counts)) {
		state = append(state, fmt.Sprintf("%d %s", counts[s], s))
	}
	return []row{{name: "fleet", state: strings.Join(state, ", ")}}
}

// end stops the server and then the simulated region.
func (c *cloud) end() error {
	var errs []error
	for _, cmd := range slices.Backward(c.started) {
		errs = append(errs, finish(cmd))
	}
	return errors.Join(errs...)
}
