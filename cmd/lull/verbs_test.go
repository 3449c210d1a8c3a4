package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/cli/term"
	"lull/internal/core/policy/when"
	"lull/internal/lib/errtest"
	"lull/internal/lib/httpx"
	"lull/internal/lib/scaletest"
	"lull/internal/protocol/control"
)

// asking lists all verbs that query a daemon, each with valid arguments.
var asking = map[string][]string{
	"adopt cgroup": {"/g"}, "adopt container": {"web"}, "adopt unit": {"web.service"}, "adopt ls": nil, "adopt pid": {"2"}, "adopt release": {"web"},
	"agent complete": nil, "agent halt": nil, "agent history": nil, "agent ls": nil, "agent reload": nil, "agent status": nil, "agent why": nil,
	"agent ttl extend": {"1h"}, "agent lease hold": nil, "agent lease ls": nil, "agent lease release": nil, "agent snooze": {"2h"},
	"audit": nil, "audit export": nil,
	"budget ls": nil, "budget rm": {"b"}, "budget set": {"b", "--max", "1", "--per", "1h"},
	"cp": {"web:a", "/nonexistent/b"}, "events": nil, "halt": nil, "ps": nil, "top": nil, "why": {"web"}, "snooze": {"web", "--for", "1h"},
	"host get": {"h"}, "host logs": {"h", "web"}, "host ls": nil, "host pause": {"h", "web"}, "host resume": {"h", "web"}, "host snooze": {"h", "web", "--for", "1h"},
	"host start": {"h", "web"}, "host stop": {"h", "web"}, "host why": {"h", "web"}, "open": nil,
	"image ls": nil, "image prune": nil,
	"instance clone": {"a", "b"}, "instance exec": {"web", "--", "true"}, "instance inspect": {"web"}, "inspect": {"web"}, "exec": {"web", "--", "true"}, "logs": {"web"}, "pause": {"web"}, "resume": {"web"}, "start": {"web"}, "stop": {"web"}, "instance logs": {"web"}, "instance pause": {"web"},
	"instance resume": {"web"}, "instance rm": {"web"}, "rm": {"web"}, "instance set": {"web", "--pause-after", "5m"}, "instance start": {"web"}, "instance stop": {"web"}, "instance restart": {"web"}, "restart": {"web"},
	"lease hold": {"web"}, "lease ls": {"web"}, "lease release": {"web"},
	"login":       nil,
	"notify dead": nil, "notify drop": {"a/1"}, "notify ls": nil, "notify retry": {"a/1"}, "notify test": {"a"},
	"override end": {"o"}, "override ls": nil, "override freeze": {"--all", "--for", "1h"}, "override keep": {"--all", "--for", "1h"},
	"override skip": {"--all"}, "override policy": {"p", "--all", "--for", "1h"},
	"policy apply": {"p", "--all"}, "policy create": {"p"}, "policy edit": {"p"}, "policy get": {"p"}, "policy groups": nil, "policy ls": nil,
	"policy resolve": {"w"}, "policy rm": {"p"},
	"run":                    {"--", "true"},
	"savings prices refresh": nil, "simulate": {"--policy", "balanced"},
	"schedule apply": {"s", "--all"}, "schedule create": {"s", "--zone", "UTC", "--open", "mon-fri 08:00-18:00"}, "schedule edit": {"s"}, "schedule get": {"s"},
	"schedule ls": nil, "schedule next": {"s"}, "schedule rm": {"s"},
	"settings ls": nil, "settings set": {"worker_idle_timeout_minutes=30"}, "settings unset": {"worker_idle_timeout_minutes"},
	"template apply": {"-f", "TEMPLATE"}, "template get": {"t"}, "template ls": nil, "template rm": {"t"},
	"token create": {"ci"}, "token ls": nil, "token revoke": {"t"},
	"wake-at":         {"web", "+2h"},
	"worker activity": {"w"}, "worker arm": {"w"}, "worker cancel-drain": {"w"}, "worker create": {"w", "--template", "t"}, "worker detect-idle": {"w"},
	"worker discovered": nil, "worker drain": {"w"}, "worker forget": {"w"}, "worker get": {"w"}, "worker idle-status": {"w"}, "worker import": {"i-0123456789abcdef0"},
	"worker license": {"w"}, "worker license deregister": {"w"}, "worker license register": {"w"}, "worker ls": nil, "worker pause": {"w"},
	"worker resume": {"w"}, "worker retry": {"w"}, "worker snooze": {"w", "--for", "1h"}, "worker start": {"w"}, "worker stop": {"w"},
	"agent get": {"m"}, "agent timeline": {"m"}, "server profile": {"--file", "/dev/null"}, "server reconcile": nil, "server resign": nil, "server shards": nil, "server stats": nil,
	"worker agent": {"w"}, "worker disarm": {"w"}, "worker ec2-state": {"w"}, "worker idle-detection": {"w", "off"}, "worker metrics": {"w"}, "worker scale-up": {"t"},
	"worker set": {"w", "--owner", "ada"}, "worker telemetry": {"w"}, "worker timeline": {"w"}, "worker wake": {"w"}, "worker wake-token": {"w"},
	"worker terminate": {"w", "--yes"}, "worker ttl": {"w", "--for", "1h"}, "worker why": {"w"},
}

// alone lists the verbs that need no daemon, are one, or read a file first.
var alone = []string{"agent doctor", "agent enroll", "agent iam", "agent install", "agent run", "agent uninstall", "config agent", "config host", "config server",
	"demo", "doctor", "down", "guest-kernel", "host", "logout", "server", "server backup", "server doctor", "server restore", "sim", "status", "up", "version"}

// listings lists the verbs whose JSON is an array.
var listings = []string{"adopt ls", "agent history", "agent lease ls", "agent ls", "audit", "budget ls", "events", "host ls", "image ls", "image prune", "lease ls", "notify dead", "notify ls",
	"override ls", "policy groups", "policy ls", "ps", "schedule ls", "settings ls", "template ls", "token ls", "worker discovered", "worker ls", "worker telemetry"}

// silentUnderHalt lists the listings that do not mention a halt: they are not about
// automatic actions, or they are about a host or an agent, whose halt is shown
// differently.
var silentUnderHalt = []string{"adopt ls", "agent history", "agent lease ls", "events", "image ls", "image prune", "lease ls", "ps", "settings ls", "token ls", "worker telemetry"}

func TestListingsTellOfAHalt(t *testing.T) {
	for _, name := range listings {
		if slices.Contains(toldUnderHalt, name) == slices.Contains(silentUnderHalt, name) {
			t.Errorf("%s: does it say that the fleet is halted?", name)
		}
	}
}

// leaves returns all verbs that do something, by name.
func leaves() map[string]*cobra.Command {
	root := newCLI(nil, &bytes.Buffer{}, &bytes.Buffer{}, func(string) string { return "" }).root()
	out := map[string]*cobra.Command{}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		name := strings.TrimPrefix(cmd.CommandPath(), "lull ")
		_, asks := asking[name]
		if !cmd.Hidden && (!cmd.HasSubCommands() || asks || slices.Contains(alone, name)) {
			out[name] = cmd
		}
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	walk(root)
	return out
}

// fake runs h as server, host and agent. env has its addresses.
func fake(t *testing.T, h http.HandlerFunc) (env map[string]string) {
	t.Helper()
	web := httptest.NewServer(h)
	t.Cleanup(web.Close)
	dir, err := os.MkdirTemp("", "lull-verbs-")
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	errtest.None(t, err)
	local := httptest.NewUnstartedServer(h)
	local.Listener.Close()
	local.Listener = l
	local.Start()
	t.Cleanup(local.Close)
	return map[string]string{"LULL_SERVER": web.URL, "LULL_TOKEN": "t", "LULL_HOST": "unix://" + l.Addr().String(), "LULL_AGENT_SOCKET": l.Addr().String(), "XDG_CONFIG_HOME": dir}
}

// words returns the command line for a verb in the tables, with more arguments.
func words(t *testing.T, verb string, more ...string) []string {
	out := strings.Fields(verb)
	for _, a := range asking[verb] {
		if a == "TEMPLATE" {
			a = filepath.Join(t.TempDir(), "t.yaml")
			errtest.None(t, os.WriteFile(a, []byte("name: t\n"), 0o600))
		}
		if a == "--" {
			out, more = append(out, more...), nil
		}
		out = append(out, a)
	}
	return append(out, more...)
}

// TestVerbsAreTold checks that the tables here contain every verb, and that every
// verb has a description.
func TestVerbsAreTold(t *testing.T) {
	all := leaves()
	for name, cmd := range all {
		if _, asks := asking[name]; !asks && !slices.Contains(alone, name) {
			t.Errorf("%s is in no table of this test", name)
		}
		if !regexp.MustCompile(`^[A-Z].*[^.]$`).MatchString(cmd.Short) {
			t.Errorf("%s: %q is no sentence without its end", name, cmd.Short)
		}
	}
	for name := range asking {
		if all[name] == nil {
			t.Errorf("there is no verb %s", name)
		}
	}
	for _, name := range append(slices.Clone(alone), listings...) {
		if all[name] == nil {
			t.Errorf("there is no verb %s", name)
		}
	}
}

// TestExamplesAreTaken checks that every example in a help text parses.
func TestExamplesAreTaken(t *testing.T) {
	n := 0
	for name, cmd := range leaves() {
		for line := range strings.Lines(cmd.Example) {
			n++
			command, _, _ := strings.Cut(line, " | ")
			if a := shellWords(strings.TrimSpace(command)); len(a) > 1 && a[0] == "lull" {
				root := newCLI(nil, nil, nil, func(string) string { return "" }).root()
				found, rest, err := root.Find(a[1:])
				if err == nil {
					err = found.ParseFlags(rest)
				}
				if err == nil {
					err = found.ValidateArgs(found.Flags().Args())
				}
				if err != nil {
					t.Errorf("%s: %s: %v", name, line, err)
				}
			} else {
				t.Errorf("%s: %q is no command of lull", name, line)
			}
		}
	}
	if n < 20 {
		t.Errorf("%d examples only", n)
	}
}

// momentFlags are the names of flags that take a time.
var momentFlags = []string{"at", "from", "since", "to", "until"}

// TestTimesHaveOneGrammar checks that every flag for a duration accepts days, that
// every flag for a time accepts the forms in its help, and that other values are
// rejected before any request.
func TestTimesHaveOneGrammar(t *testing.T) {
	asked := false
	env := fake(t, func(w http.ResponseWriter, r *http.Request) {
		asked = true
		httpx.WriteProblem(w, httpx.NewProblem(404, "none", "cannot find it"))
	})
	lengths, moments := 0, 0
	for verb, cmd := range leaves() {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			switch {
			case f.Value.Type() == "duration":
				t.Errorf("%s --%s reads lengths in a grammar of its own", verb, f.Name)
			case f.Value.Type() == "length":
				lengths++
				for _, text := range []string{"1d", "36h", "1h30m", "2w"} {
					if err := f.Value.Set(text); err != nil {
						t.Errorf("%s --%s %s: %v", verb, f.Name, text, err)
					}
				}
				if f.Value.Set("soon") == nil {
					t.Errorf("%s --%s took soon", verb, f.Name)
				}
			case slices.Contains(momentFlags, f.Name):
				moments++
				forms, takes := when.PastForms, []string{"2h", "2h ago", "1d", "00:00", "2026-01-02 15:04 Europe/Berlin", "2026-01-02T15:04:05Z"}
				if f.Name == "until" && !strings.Contains(f.Usage, when.PastForms) && !strings.Contains(f.Usage, "same form") || strings.HasPrefix(verb, "override ") || verb == "schedule next" {
					forms, takes = when.Forms, []string{"+2h", "23:59", "fri 18:00", "tomorrow", "2100-01-02 15:04 Europe/Berlin", "2100-01-02T15:04:05Z"}
				}
				if !strings.Contains(f.Usage, forms) && !strings.Contains(f.Usage, "same form") {
					t.Errorf("%s --%s does not say what it takes: %s", verb, f.Name, f.Usage)
				}
				for _, text := range takes {
					args := words(t, verb)
					if f.Name == "from" && forms == when.Forms {
						text = strings.Replace(text, "2100", "2099", 1)
					}
					if i := slices.Index(args, "--for"); i >= 0 && f.Name == "until" {
						args = slices.Delete(args, i, i+2)
					}
					if verb == "agent snooze" {
						args = strings.Fields(verb)
					}
					if out, errs, code := lullWith(env, append(args, "--"+f.Name, text)...); code == term.ExitUsage {
						t.Errorf("%s --%s %q: %q %q", verb, f.Name, text, out, errs)
					}
				}
				asked = false
				if _, errs, code := lullWith(env, append(words(t, verb), "--"+f.Name, "soonish")...); code != term.ExitUsage || asked {
					t.Errorf("%s --%s soonish ended with %d, asked %t: %q", verb, f.Name, code, asked, errs)
				}
			}
		})
	}
	if lengths < 25 || moments < 15 {
		t.Errorf("%d lengths and %d moments only", lengths, moments)
	}
}

// TestOffHasNoEnd checks that --off cannot be combined with an end.
func TestOffHasNoEnd(t *testing.T) {
	asked := 0
	env := fake(t, func(w http.ResponseWriter, r *http.Request) {
		asked++
		httpx.WriteProblem(w, httpx.NewProblem(404, "none", "cannot find it"))
	})
	n := 0
	for verb, cmd := range leaves() {
		if cmd.Flags().Lookup("off") == nil || cmd.Flags().Lookup("for") == nil {
			continue
		}
		n++
		args := words(t, verb)
		if i := slices.Index(args, "--for"); i >= 0 {
			args = slices.Delete(args, i, i+2)
		}
		if verb == "agent snooze" {
			args = strings.Fields(verb)
		}
		if out, errs, code := lullWith(env, append(args, "--off", "--for", "2h")...); code != term.ExitUsage || asked > 0 {
			t.Errorf("%s --off --for 2h ended with %d, asked %d times: %q %q", verb, code, asked, out, errs)
		}
		if out, errs, code := lullWith(env, append(args, "--off")...); code == term.ExitUsage || asked == 0 {
			t.Errorf("%s --off ended with %d, asked %d times: %q %q", verb, code, asked, out, errs)
		}
		asked = 0
	}
	if n < 6 {
		t.Errorf("%d verbs only", n)
	}
}

// TestSimulateTakesLengths checks that an argument that is not the name of a policy
// is taken as a timeout.
func TestSimulateTakesLengths(t *testing.T) {
	var got control.Simulate
	env := fake(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			if err := json.NewDecoder(r.Body).Decode(&got); err != nil {
				t.Error(err)
			}
		}
		httpx.WriteProblem(w, httpx.NewProblem(404, "none", "cannot find it"))
	})
	lullWith(env, "simulate", "--policy", "1d", "--window", "1h")
	if len(got.Policies) != 1 || got.Policies[0].TimeoutMinutes != 24*60 || got.WindowMinutes != 60 {
		t.Errorf("asked %+v", got)
	}
}

// TestServersAreAskedAlike checks that, if only a server is configured, lull snooze
// acts on a worker and lull events applies its time range.
func TestServersAreAskedAlike(t *testing.T) {
	var asked []string
	env := fake(t, func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Method+" "+r.URL.Path+" "+r.URL.Query().Get("from"))
		fmt.Fprint(w, `{"id":"w-1","name":"campus-1","items":[]}`)
	})
	delete(env, "LULL_HOST")
	if out, errs, code := lullWith(env, "snooze", "campus-1", "--for", "1h"); code != term.ExitDone || !strings.Contains(out, "campus-1") || !strings.HasPrefix(asked[len(asked)-1], "POST /api/v1/workers/w-1/snooze") {
		t.Errorf("snooze ended with %d: %q %q, asked %q", code, out, errs, asked)
	}
	asked = nil
	if out, errs, code := lullWith(env, "events", "--since", "2026-01-02T15:04:05Z"); code != term.ExitDone || len(asked) != 1 || !strings.Contains(asked[0], "2026-01-02T15:04:05Z") {
		t.Errorf("events ended with %d: %q %q, asked %q", code, out, errs, asked)
	}
}

// shellWords splits a line at blanks outside of quotes.
func shellWords(line string) (out []string) {
	for _, w := range regexp.MustCompile(`(?:[^\s"']|"[^"]*"|'[^']*')+`).FindAllString(line, -1) {
		out = append(out, strings.NewReplacer(`"`, "", "'", "").Replace(w))
	}
	return out
}

// TestExitCodes checks that every verb exits with the code for the answer it gets,
// prints the reason on standard error, and prints nothing on standard output. Each
// verb gets three of the answers, drawn at random; make soak tries all of them.
func TestExitCodes(t *testing.T) {
	codes := map[int]int{404: term.ExitNotFound, 409: term.ExitRefused, 403: term.ExitRefused, 412: term.ExitRefused, 400: term.ExitUsage, 422: term.ExitUsage, 413: term.ExitUsage, 401: term.ExitFailed, 500: term.ExitFailed, 503: term.ExitFailed}
	statuses, envs := slices.Sorted(maps.Keys(codes)), map[int]map[string]string{}
	for _, status := range statuses {
		envs[status] = fake(t, func(w http.ResponseWriter, r *http.Request) {
			httpx.WriteProblem(w, httpx.NewProblem(status, "some_code", "cannot do it: a reason"))
		})
	}
	random, draws := scaletest.Random(t), min(scaletest.N(t, 3), len(statuses))
	for _, verb := range slices.Sorted(maps.Keys(asking)) {
		for _, n := range random.Perm(len(statuses))[:draws] {
			status := statuses[n]
			for _, json := range []string{"--json", "--output=text"} {
				if out, errs, code := lullWith(envs[status], words(t, verb, json)...); code != codes[status] || out != "" || !strings.HasPrefix(errs, "lull: cannot do it: a reason") {
					t.Errorf("%s %s at %d ended with %d, want %d: %q %q", verb, json, status, code, codes[status], out, errs)
				}
			}
		}
	}
}

// TestNobodyAnswers checks that every verb says how to start the daemon if none
// answers.
func TestNobodyAnswers(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	env := map[string]string{"LULL_SERVER": "http://127.0.0.1:1", "LULL_TOKEN": "t", "LULL_HOST": "unix://" + none, "LULL_AGENT_SOCKET": none, "XDG_CONFIG_HOME": none}
	for verb := range asking {
		out, errs, code := lullWith(env, words(t, verb, "--json")...)
		if _, next, offered := strings.Cut(errs, ": lull "); code != term.ExitFailed || out != "" || !offered || next == "" {
			t.Errorf("%s ended with %d: %q %q", verb, code, out, errs)
		}
	}
}

// TestUsage checks that invalid arguments give exit code 2, and that no request is
// sent.
func TestUsage(t *testing.T) {
	env := fake(t, func(w http.ResponseWriter, r *http.Request) { t.Errorf("%s %s was asked", r.Method, r.URL) })
	for name, cmd := range leaves() {
		for _, wrong := range [][]string{{"--no-such-flag"}, {"--output=xml"}} {
			out, errs, code := lullWith(env, append(strings.Fields(name), wrong...)...)
			if cmd.DisableFlagParsing {
				continue
			}
			if code != term.ExitUsage || out != "" || !strings.HasPrefix(errs, "lull: ") {
				t.Errorf("%s %v ended with %d: %q %q", name, wrong, code, out, errs)
			}
		}
		if cmd.ValidateArgs(nil) == nil {
			continue
		}
		if out, errs, code := lullWith(env, strings.Fields(name)...); code != term.ExitUsage || out != "" || !strings.Contains(errs, "--help") {
			t.Errorf("%s without arguments ended with %d: %q %q", name, code, out, errs)
		}
	}
}

// TestListingsAreArrays checks that an empty listing is an empty JSON array.
func TestListingsAreArrays(t *testing.T) {
	t.Parallel()
	env := fake(t, func(w http.ResponseWriter, r *http.Request) {
		list := "[]"
		switch {
		case r.URL.Path == "/api/v1/events": // the stream does not end by itself
			w.WriteHeader(http.StatusOK)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		case strings.HasSuffix(r.URL.Path, "/telemetry-events"):
		case r.Header.Get("Authorization") != "":
			list = `{"items":[]}`
		case strings.HasPrefix(r.URL.Path, "/api/v1/instances/"), r.URL.Path == "/api/v1/status":
			list = "{}"
		}
		fmt.Fprintln(w, list)
	})
	for _, verb := range listings {
		for _, flag := range []string{"--json", "-o=json"} {
			out, errs, code := lullWith(env, words(t, verb, flag)...)
			var l []any
			if err := json.Unmarshal([]byte(out), &l); err != nil || l == nil || len(l) > 0 || code != term.ExitDone || errs != "" {
				t.Errorf("%s %s ended with %d: %q %q %v", verb, flag, code, out, errs, err)
			}
		}
	}
}

// TestWaiting checks that a verb that waits reports progress on standard error
// and only the result on standard output.
func TestWaiting(t *testing.T) {
	n := 0
	env := fake(t, func(w http.ResponseWriter, r *http.Request) {
		status, reason := "UNKNOWN", "imported, not observed yet"
		switch {
		case strings.HasSuffix(r.URL.Path, "/events"):
			w.WriteHeader(http.StatusOK)
			fmt.Fprint(w, "id: 1\nevent: event\ndata: {}\n\nid: 2\nevent: event\ndata: {}\n\n")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return
		case r.Method == http.MethodGet:
			if n++; n > 1 {
				status, reason = "RUNNING", ""
			}
		}
		fmt.Fprintf(w, `{"id":"w-1","name":"old","status":%q,"status_reason":%q}`, status, reason)
	})
	out, errs, code := lullWith(env, "worker", "import", "i-0123456789abcdef0", "--name", "old", "--wait", "--json")
	var w struct{ Status string }
	if err := json.Unmarshal([]byte(out), &w); err != nil || w.Status != "RUNNING" || code != term.ExitDone {
		t.Errorf("ended with %d: %q, %v", code, out, err)
	}
	if !strings.Contains(errs, "old UNKNOWN ") || !strings.Contains(errs, "old RUNNING\n") {
		t.Errorf("it told %q", errs)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var o, e bytes.Buffer
	code = run(ctx, []string{"worker", "start", "w", "--wait"}, nil, &o, &e, func(k string) string { return env[k] })
	if code == term.ExitDone && o.Len() > 0 {
		t.Errorf("after Ctrl-C it printed %q %q", o.String(), e.String())
	}
}
