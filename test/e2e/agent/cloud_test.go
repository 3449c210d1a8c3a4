package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/agentctl"
	"lull/internal/sim"
	"lull/internal/sim/fault"
	"lull/internal/sim/world"
)

// instance is a simulated EC2 instance that runs the real program. The program
// uses the SDK's own credential chain, metadata client and EC2 client.
type instance struct {
	t   *testing.T
	sim *sim.Server
	url string
	id  string
	dir string
	log *log
	cmd *exec.Cmd
}

// launch starts a simulated cloud with one instance, which w configures.
func launch(t *testing.T, w world.WorkerConfig, tags map[string]string) *instance {
	t.Helper()
	return launchAway(t, 1, w, tags)
}

// launchAway is launch for an agent that is the given number of network hops away
// from the metadata service.
func launchAway(t *testing.T, hops int, w world.WorkerConfig, tags map[string]string) *instance {
	t.Helper()
	dir, err := os.MkdirTemp("/run", "lull-cloud-")
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	w.Name, w.Region, w.Image, w.InstanceProfile = "m", "us-east-1", "ami-0000000000000d012", "lull-agent"
	// Only the signal gpu counts, which is absent here. The instance is therefore
	// always quiet, whatever this machine does.
	w.Tags = map[string]string{"lull:signals": "gpu", "lull:idle-timeout": "1m", "lull:check-interval": "1s",
		"lull:warn-before": "2s", "lull:boot-grace": "0s"}
	maps.Copy(w.Tags, tags)
	s, err := sim.New(sim.Options{Metadata: "m", Hops: hops, Scenario: world.Config{Speed: 30,
		Accounts: []world.AccountConfig{{ID: "111122223333", Roles: []world.Role{{Name: "lull-agent", SelfOnly: true}}}},
		Regions:  []world.RegionConfig{{Name: "us-east-1"}}, Workers: []world.WorkerConfig{w}}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, sim.Listeners{API: l}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the simulator failed: %v", err)
		}
	})
	i := &instance{t: t, sim: s, url: "http://" + l.Addr().String(), dir: dir}
	s.World.Find("m", func(x *world.Instance, _ world.Moment) { i.id = x.ID })
	if i.id == "" {
		t.Fatal("the simulator has no instance m")
	}
	return i
}

func (i *instance) environ() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "HOME=" + i.dir, "AWS_EC2_METADATA_SERVICE_ENDPOINT=" + i.url, "AWS_ENDPOINT_URL_EC2=" + i.url,
		"LULL_AGENT_SOCKET=" + filepath.Join(i.dir, "run", "agent.sock"), "LULL_AGENT_STATE=" + filepath.Join(i.dir, "state"),
		"LULL_AGENT_CONFIG=" + filepath.Join(i.dir, "agent.yaml"), "LULL_AGENT_CLOUD=ec2", "LULL_AGENT_SHORTEST_WINDOW=1s"}
}

// boot starts the agent with additional environment variables, and waits until it
// answers.
func (i *instance) boot(env ...string) {
	i.t.Helper()
	i.cmd = exec.Command(program, "agent", "run")
	i.cmd.Env = append(i.environ(), env...)
	i.log = &log{}
	i.cmd.Stdout, i.cmd.Stderr = i.log, i.log
	if err := i.cmd.Start(); err != nil {
		i.t.Fatal(err)
	}
	cmd, l := i.cmd, i.log
	i.t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if i.t.Failed() || os.Getenv("LULL_SHOW") != "" {
			i.t.Logf("the agent said:\n%s", l)
		}
	})
	i.await("the agent", func() bool { _, err := i.dial().Status(i.t.Context()); return err == nil })
}

func (i *instance) dial() *agentctl.Client {
	return agentctl.Dial(filepath.Join(i.dir, "run", "agent.sock"))
}

func (i *instance) status() agentctl.Status {
	i.t.Helper()
	s, err := i.dial().Status(i.t.Context())
	if err != nil {
		i.t.Fatal(err)
	}
	return s
}

func (i *instance) lull(args ...string) (string, int) { i.t.Helper(); return i.exec(program, args...) }

func (i *instance) exec(program string, args ...string) (string, int) {
	i.t.Helper()
	cmd := exec.Command(program, args...)
	cmd.Env = i.environ()
	b, err := cmd.CombinedOutput()
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		return string(b), e.ExitCode()
	} else if err != nil {
		i.t.Fatal(err)
	}
	return string(b), 0
}

func (i *instance) await(what string, ok func() bool) {
	i.t.Helper()
	if !waittest.Within(5*time.Minute, ok) {
		i.t.Fatalf("did not happen in five minutes: %s", what)
	}
}

func (i *instance) state() (state string, hibernated bool, tags map[string]string) {
	tags = map[string]string{}
	i.sim.World.Find(i.id, func(x *world.Instance, _ world.Moment) {
		state, hibernated = string(x.State), x.Hibernated
		for _, t := range x.Tags {
			tags[t.Key] = t.Value
		}
	})
	return state, hibernated, tags
}

func (i *instance) gone(want string) {
	i.t.Helper()
	i.await("the instance is "+want, func() bool { s, _, _ := i.state(); return s == want })
}

func (i *instance) faulty(r fault.Rule) {
	i.t.Helper()
	if _, err := i.sim.World.Faults.Add(r); err != nil {
		i.t.Fatal(err)
	}
}

func (i *instance) setTag(key, value string) {
	i.t.Helper()
	if err := i.sim.World.Set(i.id, world.Attributes{Tags: map[string]*string{key: &value}}); err != nil {
		i.t.Fatal(err)
	}
}

func (i *instance) alarmed(code string) bool {
	return slices.ContainsFunc(i.status().Alarms, func(a agentctl.Alarm) bool { return a.Code == code })
}

func (i *instance) source(name string) (c agentctl.Config) {
	for _, s := range i.status().Config {
		if s.Source == name {
			c = s
		}
	}
	return c
}

// TestStopsItself checks that an idle instance stops or hibernates itself, with
// tags from either source, and that the state tags are right.
func TestStopsItself(t *testing.T) {
	t.Parallel()
	refuses := fault.Rule{Service: "ec2", Action: "StopInstances", Kind: fault.Error, Code: "UnsupportedHibernationConfiguration",
		Message: "The instance is not ready to hibernate.", Status: 400, Count: 1}
	for _, c := range []struct {
		name       string
		worker     world.WorkerConfig
		tags       map[string]string
		fault      *fault.Rule
		hibernated bool
		action     string // the action that was really carried out, in the state tag
		detail     string
	}{
		{"hibernates", world.WorkerConfig{Hibernation: true, TagsInMetadata: true}, map[string]string{"lull:hibernate-on-idle": "true"}, nil, true, "hibernating", ""},
		{"tags by DescribeTags", world.WorkerConfig{}, nil, nil, false, "stopping", ""},
		{"not launched for hibernation", world.WorkerConfig{TagsInMetadata: true}, map[string]string{"lull:hibernate-on-idle": "true"}, nil, false, "stopping", "not launched for hibernation"},
		{"EC2 refuses hibernation", world.WorkerConfig{Hibernation: true, TagsInMetadata: true}, map[string]string{"lull:hibernate-on-idle": "true"}, &refuses, false, "stopping", "stopped instead"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			i := launch(t, c.worker, c.tags)
			if c.fault != nil {
				i.faulty(*c.fault)
			}
			i.boot()
			if s := i.status(); s.InstanceID != i.id || s.Region != "us-east-1" || s.Version != programtest.Version || s.BuildDate != programtest.BuildDate {
				t.Errorf("status says instance %q in %q, version %q built %q", s.InstanceID, s.Region, s.Version, s.BuildDate)
			}
			i.gone("stopped")
			i.await("the state tag is "+c.action, func() bool { _, _, tags := i.state(); return tags["lull:idle-action"] == c.action })
			_, hibernated, tags := i.state()
			if hibernated != c.hibernated {
				t.Errorf("hibernated: %t, want %t", hibernated, c.hibernated)
			}
			if tags["lull:idle-status"] != "idle" {
				t.Errorf("state tags: %v, want idle", tags)
			}
			if _, err := time.Parse(time.RFC3339, tags["lull:idle-since"]); err != nil {
				t.Errorf("idle-since: %v", err)
			}
			i.await("the answer is taken in", func() bool { l := i.status().Last; return l != nil && l.Phase == "accepted" })
			if l := i.status().Last; l.Reason != "idle_timeout" || !strings.Contains(l.Detail, c.detail) {
				t.Errorf("last action %+v, want %q", l, c.detail)
			}
		})
	}
}

// TestTagsUnreadable checks that an agent that starts while no source of tags
// works takes no action and shows why. It then makes the sources work, and fail
// again while the agent runs and restarts: the last good policy must apply.
func TestTagsUnreadable(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		rule fault.Rule
	}{
		{"401", fault.Rule{Service: "imds", Kind: fault.Error, Status: 401}},
		{"403", fault.Rule{Service: "imds", Kind: fault.Error, Status: 403}},
		{"503", fault.Rule{Service: "imds", Kind: fault.Error, Status: 503}},
		{"hang", fault.Rule{Service: "imds", Kind: fault.Hang}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			i := launch(t, world.WorkerConfig{TagsInMetadata: true}, map[string]string{"lull:idle-timeout": "30m"})
			i.faulty(c.rule)
			i.boot()
			i.await("the alarm", func() bool { return i.alarmed("config_unreadable") })
			s := i.status()
			if s.Verdict.Eligible || !s.Verdict.Has("config_unreadable") {
				t.Errorf("without a policy: %+v", s.Verdict.Blocks)
			}
			if out, code := i.lull("agent", "doctor"); code != 1 || !strings.Contains(out, "MISSING") {
				t.Errorf("doctor ended with %d:\n%s", code, out)
			}
			i.sim.World.Faults.Clear()
			if out, code := i.lull("agent", "reload"); code != 0 || !strings.Contains(out, "idle-timeout") {
				t.Errorf("reload after the fault ended with %d:\n%s", code, out)
			}
			if i.alarmed("config_unreadable") {
				t.Error("the alarm outlives its cause")
			}

			// Both sources fail again. The last values must apply, also for a new
			// agent.
			i.faulty(c.rule)
			i.faulty(fault.Rule{Service: "ec2", Action: "DescribeTags", Kind: fault.Error, Code: "RequestLimitExceeded", Status: 503})
			i.setTag("lull:idle-timeout", "2h")
			if out, code := i.lull("agent", "reload"); code != 1 || !strings.Contains(out, "cached") {
				t.Errorf("reload without tags ended with %d:\n%s", code, out)
			}
			i.await("the policy is on disk", func() bool {
				b, err := os.ReadFile(filepath.Join(i.dir, "state", "config.json"))
				return err == nil && strings.Contains(string(b), "30m")
			})
			i.cmd.Process.Kill()
			i.cmd.Wait()
			i.boot()
			i.await("the cached policy", func() bool { return i.source("tags").State == "cached" })
			for _, v := range i.status().Settings {
				if v.Name == "idle-timeout" && (v.Value != "30m0s" || v.Source != "cache") {
					t.Errorf("idle-timeout is %s from %s, want 30m from the cache", v.Value, v.Source)
				}
			}
			if !i.alarmed("config_stale") {
				t.Error("nothing tells that the policy is old")
			}
		})
	}
}

// TestDescribeTagsThrottled checks that the SDK's retries succeed when EC2
// throttles the only source of tags for a while.
func TestDescribeTagsThrottled(t *testing.T) {
	t.Parallel()
	i := launch(t, world.WorkerConfig{}, map[string]string{"lull:idle-timeout": "30m"})
	i.faulty(fault.Rule{Service: "ec2", Action: "DescribeTags", Kind: fault.Error, Code: "RequestLimitExceeded", Status: 503, Count: 2})
	i.boot()
	i.await("the tags", func() bool { return i.source("tags").State == "read" })
	if n := i.sim.World.Calls.All()["ec2 DescribeTags"]; n != 0 && n < 3 {
		t.Errorf("DescribeTags was called %d times, two of them throttled", n)
	}
}

// TestDeadlineAndCompletion checks that a deadline and a completion end an
// instance that is in use, after a warning.
func TestDeadlineAndCompletion(t *testing.T) {
	t.Parallel()
	soon := time.Now().Add(25 * time.Second).UTC().Format(time.RFC3339)
	for _, c := range []struct {
		name   string
		tags   map[string]string
		do     func(i *instance)
		end    string
		reason string
	}{
		{"ttl stops", map[string]string{"lull:ttl-deadline": soon, "lull:idle-timeout": "4h"}, nil, "stopped", "ttl"},
		{"ttl terminates", map[string]string{"lull:ttl-deadline": soon, "lull:ttl-action": "terminate", "lull:idle-timeout": "4h"}, nil, "terminated", "ttl"},
		{"complete", map[string]string{"lull:on-complete": "stop", "lull:idle-timeout": "4h"}, func(i *instance) {
			if out, code := i.lull("agent", "complete", "--status", "failed", "--message", "no data"); code != 0 {
				t.Errorf("complete ended with %d: %s", code, out)
			}
		}, "stopped", "completion"},
		{"completion file", map[string]string{"lull:on-complete": "terminate", "lull:idle-timeout": "4h", "lull:completion-file": "FILE"}, func(i *instance) {
			if err := os.WriteFile(filepath.Join(i.dir, "done"), nil, 0o644); err != nil {
				t.Error(err)
			}
		}, "terminated", "completion"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			i := launch(t, world.WorkerConfig{TagsInMetadata: true}, c.tags)
			if c.tags["lull:completion-file"] == "FILE" {
				i.setTag("lull:completion-file", filepath.Join(i.dir, "done"))
			}
			i.boot()
			if c.do != nil {
				if s, _, _ := i.state(); s != "running" {
					t.Fatalf("%s before anything happened", s)
				}
				c.do(i)
			}
			i.gone(c.end)
			if l := i.status().Last; l == nil || l.Reason != c.reason {
				t.Errorf("last action %+v, want reason %s", l, c.reason)
			}
			if i.status().Counters.Warnings == 0 {
				t.Error("no warning was sent")
			}
		})
	}
	t.Run("an old completion file is not obeyed", func(t *testing.T) {
		t.Parallel()
		i := launch(t, world.WorkerConfig{TagsInMetadata: true}, map[string]string{"lull:on-complete": "terminate", "lull:idle-timeout": "4h"})
		file := filepath.Join(i.dir, "done")
		i.setTag("lull:completion-file", file)
		errtest.None(t, os.WriteFile(file, nil, 0o644))
		errtest.None(t, os.Chtimes(file, time.Time{}, time.Now().AddDate(0, -1, 0)))
		i.boot()
		i.await("the alarm", func() bool { return i.alarmed("completion_file") })
		if s := i.status(); s.Completion != "" {
			t.Errorf("it counts as completed: %s", s.Completion)
		}
	})
}

// TestTagHooks checks that a hook from a tag runs only if the machine's own
// file allows it.
func TestTagHooks(t *testing.T) {
	t.Parallel()
	for _, allowed := range []bool{false, true} {
		t.Run(fmt.Sprintf("allowed %t", allowed), func(t *testing.T) {
			t.Parallel()
			i := launch(t, world.WorkerConfig{TagsInMetadata: true}, nil)
			ran := filepath.Join(i.dir, "hook-ran")
			i.setTag("lull:pre-stop", "id -un > "+ran)
			if allowed {
				errtest.None(t, os.WriteFile(filepath.Join(i.dir, "agent.yaml"), []byte("allow-tag-hooks: true\n"), 0o644))
			}
			i.boot()
			i.gone("stopped")
			_, err := os.Stat(ran)
			if (err == nil) != allowed {
				t.Errorf("the hook ran: %t, allowed: %t", err == nil, allowed)
			}
			if !allowed && !i.alarmed("tag_hook_refused") {
				t.Error("nothing tells that the hook was refused")
			}
		})
	}
}

// TestDoctorOnInstance runs doctor on an instance with a sufficient role, and on
// one whose role does not allow a stop.
func TestDoctorOnInstance(t *testing.T) {
	t.Parallel()
	i := launch(t, world.WorkerConfig{TagsInMetadata: true, Hibernation: true}, map[string]string{"lull:idle-timeout": "4h", "lull:idle-timeut": "3h"})
	i.boot()
	out, _ := i.lull("agent", "doctor")
	for _, want := range []string{"EC2 would stop " + i.id, "tags in metadata", "configured at launch", "lull:idle-timeut"} {
		if !strings.Contains(out, want) {
			t.Errorf("doctor does not say %q:\n%s", want, out)
		}
	}
	i.faulty(fault.Rule{Service: "ec2", Action: "StopInstances", Kind: fault.Error, Code: "UnauthorizedOperation", Status: 403})
	if out, code := i.lull("agent", "doctor"); code != 1 || !strings.Contains(out, "agent iam") {
		t.Errorf("doctor ended with %d:\n%s", code, out)
	}
	if s, _, _ := i.state(); s != "running" {
		t.Errorf("the doctor left the instance %s", s)
	}
}

// TestHopLimit runs the agent one hop farther from the metadata service than the
// instance allows, as in a container. It must take no action, and its status must
// say what to change. With a higher limit it must work.
func TestHopLimit(t *testing.T) {
	t.Parallel()
	i := launchAway(t, 2, world.WorkerConfig{TagsInMetadata: true}, nil)
	i.boot()
	i.await("the alarm", func() bool { return i.alarmed("config_unreadable") })
	if d := i.source("tags").Detail; !strings.Contains(d, "hop limit") {
		t.Errorf("the reason given is %q", d)
	}
	if s := i.status(); s.Verdict.Eligible || !s.Verdict.Has("config_unreadable") {
		t.Errorf("without a policy: %+v", s.Verdict.Blocks)
	}
	j := launchAway(t, 2, world.WorkerConfig{TagsInMetadata: true, HopLimit: 2}, map[string]string{"lull:idle-timeout": "30m"})
	j.boot()
	j.await("the tags", func() bool { return j.source("tags").State == "read" })
}

// TestHangup checks that SIGHUP makes the agent read the tags again, and that the
// history has a chart.
func TestHangup(t *testing.T) {
	t.Parallel()
	i := launch(t, world.WorkerConfig{TagsInMetadata: true}, map[string]string{"lull:idle-timeout": "30m"})
	i.boot()
	i.await("the tags", func() bool { return i.source("tags").State == "read" })
	i.setTag("lull:idle-timeout", "2h")
	errtest.None(t, i.cmd.Process.Signal(syscall.SIGHUP))
	i.await("the new timeout", func() bool { return time.Duration(i.status().Policy.Timeout) == 2*time.Hour })
	i.await("a line in the log", func() bool {
		return strings.Contains(i.log.String(), "changed=[idle-timeout]")
	})
	i.await("the picture", func() bool {
		out, code := i.lull("agent", "history")
		return code == 0 && strings.Contains(out, "\ngpu ") && strings.Contains(out, "\nevents ") &&
			strings.Contains(out, "Changed: idle-timeout.")
	})
}

// TestNothingSecretIsSaid configures a hook and a webhook that contain a password
// and fail, and checks that no output contains the password.
func TestNothingSecretIsSaid(t *testing.T) {
	t.Parallel()
	i := launch(t, world.WorkerConfig{TagsInMetadata: true}, map[string]string{"lull:pre-stop": "/bin/false --key hunter2",
		"lull:notify-url": "http://ada:hunter2@127.0.0.1:1/hunter2", "lull:notify-urls": "http://hooks.example/hunter2"})
	errtest.None(t, os.WriteFile(filepath.Join(i.dir, "agent.yaml"), []byte("allow-tag-hooks: true\npassword: hunter2\n"), 0o600))
	i.boot()
	i.gone("stopped")
	i.await("what went wrong", func() bool {
		return i.alarmed("hook_failed") && i.alarmed("warning_undelivered") && i.alarmed("config_faults")
	})
	said := map[string]string{"log": i.log.String()}
	for _, args := range [][]string{{"status"}, {"status", "--json"}, {"why"}, {"why", "--json"}, {"history"}, {"history", "--json", "--limit", "0"}, {"doctor"}, {"reload"}} {
		out, _ := i.lull(append([]string{"agent"}, args...)...)
		said[strings.Join(args, " ")] = out
	}
	for what, out := range said {
		if at := strings.Index(out, "hunter2"); at >= 0 {
			t.Errorf("%s tells it: %s", what, out[max(0, at-300):min(len(out), at+100)])
		}
		if len(out) < 20 {
			t.Errorf("%s says nothing: %q", what, out)
		}
	}
}
