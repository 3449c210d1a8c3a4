package main

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/cli/term"
	"lull/internal/core/power"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
	"lull/internal/sim/world"
)

// notForUsers are operations that have no verb because programs call them, or
// browsers: reports of machines, links in warnings, health checks and downloads.
var notForUsers = []string{"report-agent", "await-halt-agent", "report-host", "await-halt-host", "ask-host", "enroll-agent", "agent-program",
	"look-at-answer", "give-answer", "metrics", "reference", "openapi", "healthz"}

// sameAs maps an operation to another that the same verb uses for the same purpose.
// For example, get-request is polled if the owner of a worker does not answer
// detect-idle at once.
var sameAs = map[string]string{"get-request": "detect-idle", "delete-policy-group": "apply-policy", "simulate": "simulate-told", "worker-audit": "list-audit"}

// covers is a verb that calls an operation. Code is the exit code that it has in this
// test.
type covers struct {
	op   string
	args []string
	code int
}

func verb(op, line string) covers              { return covers{op, shellWords(line), term.ExitDone} }
func refused(op, line string, code int) covers { return covers{op, shellWords(line), code} }
func (c covers) named() string                 { return strings.Join(c.args, " ") }

// parity has a verb for every operation that users need. The order is such that a
// server with the worker one and the instance two can carry them out.
var parity = []covers{
	verb("readyz", "status"), verb("overview", "status"), verb("whoami", "status"), verb("get-halt", "worker ls"), refused("auth", "login", term.ExitFailed),
	verb("admin-stats", "server stats"), verb("shards", "server shards"), verb("trigger-reconcile", "server reconcile"), verb("profile", "server profile --kind heap --file FILE"),
	refused("backup", "server backup FILE --server http://server:7070", term.ExitRefused),
	verb("list-discovered", "worker discovered"), verb("import-worker", "worker import TWO --name two"),
	verb("put-template", "template apply -f TEMPLATE"), verb("list-templates", "template ls"), verb("get-template", "template get t"),
	verb("scale-up", "worker scale-up t --region REGION --reason test"), verb("create-worker", "worker create made --template t --region REGION"),
	verb("list-workers", "worker ls"), verb("get-worker", "worker get one"), verb("update-worker", "worker set one --owner ada --tag team=network --snooze 0 --tls-insecure"),
	verb("arm-workers", "worker arm --all"), verb("disarm-worker", "worker disarm one"), verb("arm-worker", "worker arm one"),
	verb("worker-activity", "worker activity one"), verb("worker-idle-status", "worker idle-status one"), verb("worker-ec2-state", "worker ec2-state one"),
	verb("worker-telemetry-events", "worker telemetry one"), verb("worker-metrics", "worker metrics one"), verb("worker-license", "worker license one"),
	refused("worker-agent", "worker agent one", term.ExitNotFound), verb("worker-policy", "policy resolve one"), verb("worker-timeline", "worker timeline one"), verb("why-worker", "worker why one"),
	verb("detect-idle", "worker detect-idle one"),
	verb("disable-idle-detection", "worker idle-detection one off"), verb("enable-idle-detection", "worker idle-detection one on"),
	verb("snooze-worker", "worker snooze one --for 1h"), verb("register-license", "worker license register one --smart-token env:SMART"), verb("deregister-license", "worker license deregister one"),
	verb("drain-worker", "worker drain one"), verb("cancel-drain-worker", "worker cancel-drain one"), verb("stop-worker", "worker stop one"), verb("start-worker", "worker start one"),
	verb("pause-worker", "worker pause one"), verb("resume-worker", "worker resume one"), refused("retry-worker", "worker retry one", term.ExitRefused),
	verb("new-wake-token", "worker wake-token one"), refused("wake-worker", "worker wake ONE", term.ExitFailed),
	verb("list-audit", "audit --worker one"), verb("export-audit", "audit export"), verb("events", "events -f"),
	verb("put-policy", "policy create p --idle-timeout 30m"), verb("list-policies", "policy ls"), verb("get-policy", "policy get p"), verb("apply-policy", "policy apply p --tag team=network"),
	verb("list-policy-groups", "policy groups"), verb("apply-policy", "policy apply p --tag team=network --remove"), verb("delete-policy", "policy rm p"),
	verb("put-schedule", "schedule create s --zone UTC --open 'mon-fri 08:00-18:00'"), verb("list-schedules", "schedule ls"), verb("get-schedule", "schedule get s"),
	verb("schedule-boundaries", "schedule next s"), verb("apply-schedule", "schedule apply s one"), verb("apply-schedule", "schedule apply s one --remove"), verb("delete-schedule", "schedule rm s"),
	verb("add-override", "override keep --all --for 1h"), verb("list-overrides", "override ls"), refused("end-override", "override end none", term.ExitNotFound),
	verb("put-budget", "budget set b --max 1 --per 1h"), verb("list-budgets", "budget ls"), verb("delete-budget", "budget rm b"),
	verb("change-settings", "settings set min_workers=0"), verb("list-settings", "settings ls"), verb("list-prices", "savings prices"), verb("refresh-prices", "savings prices refresh"),
	verb("savings", "savings"), verb("simulate-told", "simulate --policy balanced"),
	verb("create-token", "token create ci"), verb("list-tokens", "token ls"), refused("revoke-token", "token revoke none", term.ExitNotFound),
	verb("list-agents", "agent ls"), refused("get-agent", "agent get none", term.ExitNotFound), verb("agent-timeline", "agent timeline none"), refused("why-agent", "agent why none", term.ExitNotFound),
	verb("list-hosts", "host ls"), refused("get-host", "host get none", term.ExitNotFound), refused("why-instance", "host why none web", term.ExitNotFound),
	refused("pause-instance", "host pause none web", term.ExitNotFound), refused("resume-instance", "host resume none web", term.ExitNotFound),
	refused("start-instance", "host start none web", term.ExitNotFound), refused("stop-instance", "host stop none web", term.ExitNotFound),
	refused("snooze-instance", "host snooze none web --for 1h", term.ExitNotFound), refused("instance-logs", "host logs none web", term.ExitNotFound),
	verb("list-channels", "notify ls"), verb("list-dead-letters", "notify dead"), refused("test-channel", "notify test none", term.ExitRefused),
	refused("retry-dead-letter", "notify retry none/1", term.ExitNotFound), refused("drop-dead-letter", "notify drop none/1", term.ExitNotFound),
	verb("halt", "halt --reason test"), verb("halt", "halt --off"), verb("delete-template", "template rm t"),
	verb("terminate-worker", "worker terminate one --yes --leave-license"), verb("forget-worker", "worker forget one"), verb("resign", "server resign"),
}

// operations returns a pattern for the method and path of each operation of the
// server's API, by ID.
func operations(t *testing.T) map[string]*regexp.Regexp {
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "reference", "server-openapi.json"))
	errtest.None(t, err)
	var doc struct {
		Paths map[string]map[string]struct {
			OperationID string `json:"operationId"`
		}
	}
	errtest.None(t, json.Unmarshal(b, &doc))
	out := map[string]*regexp.Regexp{}
	for path, methods := range doc.Paths {
		for method, op := range methods {
			if op.OperationID == "" || strings.Contains(path, "{aws_region}") {
				continue
			}
			out[op.OperationID] = regexp.MustCompile("^" + strings.ToUpper(method) + " " + regexp.MustCompile(`\{\w+\}`).ReplaceAllString(path, "[^/]+") + "$")
		}
	}
	return out
}

// TestEveryOperationHasAVerb checks that every operation of the server's API has a
// verb. It runs each verb once against a server over a simulated cloud, and checks
// that the verb calls its operation.
func TestEveryOperationHasAVerb(t *testing.T) {
	ops := operations(t)
	covered := map[string]bool{}
	for _, c := range parity {
		covered[c.op] = true
	}
	for op := range ops {
		if !covered[op] && !covered[sameAs[op]] && !slices.Contains(notForUsers, op) {
			t.Errorf("no verb calls the operation %s", op)
		}
	}
	for op := range maps.Keys(covered) {
		if ops[op] == nil {
			t.Errorf("there is no operation %s", op)
		}
	}
	scenario := world.Config{Regions: []world.RegionConfig{{Name: home}}, Timing: world.Timing{CMLBoot: world.Duration(time.Minute), Background: -1},
		Workers: []world.WorkerConfig{{Name: "one", Region: home}, {Name: "two", Region: home}}}
	settings := map[string]any{"discovery_import": "off", "aws_region_configs": map[string]any{home: map[string]any{
		"security_group_ids": []any{"sg-0000000a"}, "subnet_id": "subnet-000000a0"}}}
	inCloud(t, scenario, settings, func(r *cloudRig) {
		t := r.t
		w, err := control.Write[worker.Worker](t.Context(), r.asks, "POST", "/workers/import", map[string]any{"name": "one", "ec2_instance_id": r.id("one"), "aws_region": home})
		if err != nil {
			t.Fatal(err)
		}
		r.pass(10 * time.Minute)
		dir := t.TempDir()
		template := filepath.Join(dir, "t.yaml")
		errtest.None(t, os.WriteFile(template, []byte("name: t\ninstance_type: m5.large\nami_name_filter: cisco-cml*\n"), 0o600))
		fill := strings.NewReplacer("TEMPLATE", template, "TWO", r.id("two"), "ONE", w.ID, "REGION", home)
		for n, c := range parity {
			args := slices.Clone(c.args)
			for i := range args {
				if args[i] == "FILE" {
					args[i] = filepath.Join(dir, "file"+string(rune('a'+n%26))+string(rune('a'+n/26)))
				}
				args[i] = fill.Replace(args[i])
			}
			asked, out, errs, code := r.lull(args...)
			if code != c.code {
				t.Errorf("lull %s ended with %d, want %d: %s%s", c.named(), code, c.code, out, errs)
			}
			called := false
			for _, a := range asked {
				called = called || ops[c.op].MatchString(a)
			}
			if !called {
				t.Errorf("lull %s did not call %s, but %q", c.named(), c.op, asked)
			}
			if c.op != "drain-worker" { // draining a quiet worker ends soon
				r.pass(3 * time.Minute)
			}
			if c.op == "terminate-worker" {
				if w := r.worker(w.ID); w.Status != power.WorkerTerminated || w.Owner != "ada" || w.Tags["team"] != "network" {
					t.Errorf("in the end it is %s, of %q, with tags %v", w.Status, w.Owner, w.Tags)
				}
			}
		}
	})
}

// lull runs a verb as an admin of the rig's server. It returns the verb's requests as
// "METHOD /path". The verb is interrupted after an hour.
func (r *cloudRig) lull(args ...string) (asked []string, out, errs string, code int) {
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Hour)
	defer cancel()
	return r.lullUntil(ctx, args...)
}

// lullUntil is like lull, interrupted when ctx ends.
func (r *cloudRig) lullUntil(ctx context.Context, args ...string) (asked []string, out, errs string, code int) {
	var o, e bytes.Buffer
	env := map[string]string{"LULL_SERVER": "http://server:7070", "LULL_TOKEN": r.admin, "XDG_CONFIG_HOME": "/nonexistent", "COLUMNS": "80",
		"LULL_HOST": "unix:///nonexistent/host.sock", "LULL_AGENT_SOCKET": "/nonexistent/agent.sock"}
	if args[0] != "status" {
		delete(env, "LULL_HOST")
	}
	c := newCLI(strings.NewReader(""), &o, &e, func(k string) string { return env[k] })
	c.HTTP = &http.Client{Transport: plainly(func(q *http.Request) (*http.Response, error) {
		r.with(func() { asked = append(asked, q.Method+" "+q.URL.EscapedPath()) })
		return r.web.Transport.RoundTrip(q)
	})}
	code = c.Execute(ctx, c.root(), args)
	return asked, o.String(), e.String(), code
}
