package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"lull/internal/fleet"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/sim"
)

// fleetScenario is the simulated region. Its users' day takes 24 minutes here,
// and begins with the demo.
const fleetScenario = `speed: 60
start: %s
regions: [{name: us-east-1}]
timing: {background: 30m}
profiles:
  busy: {labs: 3, users: [{name: alice, days: daily, from: "09:00", to: "17:30", every: 4m, starts: true}]}
  morning: {labs: 2, users: [{name: bob, days: daily, from: "09:00", to: "10:30", every: 4m, starts: true}]}
  abandoned: {labs: 2, history: 300, history_age: 720h}
  unknown: {labs: 1, no_opt_in: true}
workers:
  - {name: lab, count: 4, type: m5.xlarge, profile: busy, elastic_ip: true}
  - {name: course, count: 4, type: m5.xlarge, profile: morning, elastic_ip: true}
  - {name: old, count: 3, type: m5.2xlarge, profile: abandoned, elastic_ip: true}
  - {name: dark, type: m5.large, profile: unknown, elastic_ip: true}
`

// fleetSettings set the idle timeout to a minute.
const fleetSettings = `worker_idle_timeout_minutes: 1
idle_detection_interval: 10
reconcile_interval: 2
worker_warn_before_minutes: 0
worker_auto_pause_snooze_minutes: 0
cml_default_password: env:LULL_DEMO_CML
`

// cloud is the server and the simulated region that it watches.
type cloud struct {
	*control.Client
	s      *stage
	ended  []func() error // in the order in which they must end
	before map[string]string
}

// startFleet is the scene of lull server.
func startFleet(ctx context.Context, s *stage) (end func() error, err error) {
	c := &cloud{s: s, before: map[string]string{}}
	now := time.Now().UTC()
	start := time.Date(now.Year(), now.Month(), now.Day(), 8, 59, 0, 0, time.UTC).Format(time.RFC3339)
	for name, text := range map[string]string{"sim.yaml": fmt.Sprintf(fleetScenario, start), "server.yaml": fleetSettings} {
		if err := os.WriteFile(filepath.Join(s.data, name), []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	said, err := c.run("sim", nil, "on port ", "sim", "--listen", "127.0.0.1:0", "--cml-port", "0", "--scenario", filepath.Join(s.data, "sim.yaml"))
	if err != nil {
		return c.end, err
	}
	region := "http://" + word(said, "on http://")
	token := filepath.Join(s.data, "token")
	env := []string{"AWS_ENDPOINT_URL=" + region, "AWS_ACCESS_KEY_ID=demo", "AWS_SECRET_ACCESS_KEY=demo", "LULL_DEMO_CML=cml"}
	said, err = c.run("server", env, "serving on ", "server", "--data", filepath.Join(s.data, "server"), "--listen", "127.0.0.1:0",
		"--cml-port", word(said, "on port "), "--config", filepath.Join(s.data, "server.yaml"), "--admin-token-file", token, "--log-level", "error")
	if err != nil {
		return c.end, err
	}
	url := word(said, "serving on ")
	b, err := os.ReadFile(token)
	if err != nil {
		return c.end, err
	}
	secret := strings.TrimSpace(string(b))
	if c.Client, err = control.NewClient(url, secret, nil); err != nil {
		return c.end, err
	}
	n, err := c.take(ctx, region)
	if err != nil {
		return c.end, err
	}
	lull := filepath.Join(s.bin, "lull")
	fmt.Fprintf(s.out, "lull server keeps %d workers of a simulated cloud. Their users' day takes 24 minutes; a worker that is idle for a minute is stopped.", n)
	fmt.Fprintf(s.out, "\n  %-60s # the dashboard; it asks for the token\n  export LULL_SERVER=%s\n  export LULL_TOKEN=%s\n", url, url, secret)
	fmt.Fprintf(s.out, "  %-60s # all of them\n  %-60s # why one runs, or was stopped\n  %-60s # for what was stopped wrongly\n\n",
		lull+" worker ls", lull+" worker why old-1", lull+" worker resume lab-1")
	s.lines = append(s.lines, c.line)
	return c.end, nil
}

// word returns the text after a prefix, up to a space or a comma.
func word(said, after string) string {
	_, rest, _ := strings.Cut(said, after)
	return strings.TrimRight(strings.Fields(rest + " ")[0], ",")
}

// run starts lull and waits until it has printed something; it returns the
// line.
func (c *cloud) run(name string, env []string, until string, args ...string) (string, error) {
	logs, err := os.Create(filepath.Join(c.s.data, name+".log"))
	if err != nil {
		return "", err
	}
	defer logs.Close()
	cmd := exec.Command(filepath.Join(c.s.bin, "lull"), args...)
	cmd.Env, cmd.Stderr = append(os.Environ(), env...), logs
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C goes to the demo only, which ends everything in order
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	c.ended = append([]func() error{func() error {
		err := cmd.Process.Signal(syscall.SIGTERM)
		return errors.Join(err, cmd.Wait())
	}}, c.ended...)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if line := lines.Text(); strings.Contains(line, until) {
			go func() { _, _ = io.Copy(io.Discard, out) }() // the rest of its output is not needed
			return line, nil
		}
	}
	said, _ := os.ReadFile(logs.Name())
	return "", fmt.Errorf("it ended before it was ready\n%s", said)
}

// take imports and arms every instance of the region.
func (c *cloud) take(ctx context.Context, region string) (int, error) {
	req, err := http.NewRequestWithContext(ctx, "GET", region+"/sim/instances", nil)
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	var all []sim.InstanceInfo
	if err := json.NewDecoder(res.Body).Decode(&all); err != nil {
		return 0, err
	}
	insecure := true
	for _, in := range all {
		w := fleet.ImportedWorker{Name: in.Name, AWSRegion: in.Region, EC2InstanceID: in.ID, Profile: worker.Profile{TLSInsecure: &insecure}}
		if _, err := control.Write[worker.Worker](ctx, c.Client, "POST", "/workers/import", w); err != nil {
			return 0, err
		}
	}
	_, err = control.Write[any](ctx, c.Client, "POST", "/workers/arm", control.Selector{All: true})
	return len(all), err
}

// line returns how many workers are in each state, and what has just changed.
func (c *cloud) line(ctx context.Context) string {
	o, err := control.Read[control.Overview](ctx, c.Client, "/overview?limit=100")
	if err != nil {
		return ""
	}
	var b strings.Builder
	for _, w := range o.Items {
		if was, ok := c.before[w.ID]; ok && was != w.Status && (w.Status == "STOPPED" || w.Status == "RUNNING") {
			fmt.Fprintf(&b, "          %s\n", c.s.paint("1", fmt.Sprintf("> %s is %s: %s", w.Name, w.Status, w.Sentence)))
		}
		c.before[w.ID] = w.Status
	}
	fmt.Fprintf(&b, "%s  fleet", time.Now().Format(time.TimeOnly))
	standings := make([]control.Standing, 0, len(o.Counts))
	for s := range o.Counts {
		standings = append(standings, s)
	}
	slices.Sort(standings)
	for _, s := range standings {
		fmt.Fprintf(&b, "  %d %s", o.Counts[s], strings.ReplaceAll(string(s), "_", " "))
	}
	return b.String()
}

// end stops the server and then the cloud.
func (c *cloud) end() error {
	var errs []error
	for _, end := range c.ended {
		errs = append(errs, end())
	}
	return errors.Join(errs...)
}
