package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
)

// ear is a server and an evidence journal that keep everything they receive.
type ear struct {
	mu    sync.Mutex
	heard []any
	order *control.AgentOrder
	halts bool

	answer control.AgentAnswer // the answer for the worker w-1
}

func (e *ear) Report(_ context.Context, r control.AgentReport) (control.AgentAnswer, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.heard = append(e.heard, r)
	if e.answer.WorkerID != "" {
		return e.answer, nil
	}
	return control.AgentAnswer{WorkerID: "w-1", Holder: holderAgent, Order: e.order, Halted: e.halts}, nil
}

func (e *ear) Take(r evidence.Record) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.heard = append(e.heard, r.Policy, r.Evidence, r.Verdict)
}

func (e *ear) Read(context.Context, evidence.Query, func(evidence.Record) error) ([]evidence.Missing, error) {
	return nil, nil
}

// deaf is a network in which no webhook answers.
type deaf struct{}

func (deaf) RoundTrip(*http.Request) (*http.Response, error) {
	return nil, errors.New("no route to host")
}

// TestNothingSecretIsTold sets a password in every setting that can contain one, and
// makes everything that these settings do fail. It checks that no status, history,
// evidence, log, trace, report or tag contains the password.
func TestNothingSecretIsTold(t *testing.T) {
	const mark = "hunter2"
	for name, file := range map[string]string{
		"used":         "notify-url: https://ada:hunter2@hooks.example/T0/hunter2?key=hunter2\npre-stop: curl -u ada:hunter2 https://hunter2.example/hunter2\n",
		"assigned":     "notify-url: https://hooks.example/hunter2\npre-stop: TOKEN=hunter2 /opt/save\n",
		"quoted":       "pre-stop: \"'/opt/hunter2 save' now\"\n",
		"wrong":        "notify-url: hunter2://x/y\npre-stop: \"a\\u0001hunter2\"\n",
		"misspelt":     "notify-ulr: https://hooks.example/hunter2\npre-stpo: /opt/save hunter2\nidle-timeout: 30m\n",
		"of others":    "password: hunter2\nusers: {root: hunter2}\nkeys: [hunter2]\n",
		"not yaml":     "password: *hunter2\n",
		"not yaml too": "password: hunter2: hunter2\n",
		"tag":          "",
		"wrong tag":    "",
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			recorder, log := w.traced()
			trace, to := w.tune, &ear{}
			w.tune = func(o *Options) {
				trace(o)
				o.Reporter, o.Evidence = to, to
				o.Warner = UserWarner{Own: w.own, HTTP: &http.Client{Transport: deaf{}}, Host: "h"}
			}
			w.tags["lull:idle-timeout"] = "30m"
			switch w.config = []byte(file); name {
			case "tag":
				w.tags["lull:pre-stop"], w.tags["lull:notify-url"] = "/opt/save hunter2", "https://hooks.example/hunter2"
			case "wrong tag":
				w.tags["lull:pre-stop"], w.tags["lull:notify-url"] = "\x01hunter2", "hooks.example/hunter2"
				w.tags["lull:notify-urls"], w.tags["lull:pre-stpo"] = "https://hooks.example/hunter2", "save hunter2"
			}
			w.hook = func(h HookSpec) agentctl.Hook {
				return agentctl.Hook{Command: h.Command, ExitCode: 3, Error: "it went wrong"}
			}
			w.stopErr = []error{errBoom}
			bubble(t, w, func(t *testing.T, a *Agent) {
				time.Sleep(time.Minute)
				w.with(func() { w.busy["cpu"] = true })
				reload, err := a.Reload(t.Context())
				errtest.None(t, err)
				time.Sleep(3 * time.Minute)
				w.with(func() { w.busy["cpu"] = false })
				time.Sleep(40 * time.Minute)
				synctest.Wait()
				status := mustStatus(t, a)
				if !strings.HasPrefix(name, "not yaml") && status.Counters.Failed == 0 {
					t.Errorf("nothing went wrong: %+v", status.Counters)
				}
				why, err := a.Why(t.Context(), time.Time{})
				errtest.None(t, err)
				history, err := a.History(t.Context(), agentctl.HistoryQuery{})
				errtest.None(t, err)
				told := map[string]any{"status": status, "why": why, "reload": reload, "history": history, "log": log.String(), "tags": w.writes}
				for i, x := range to.heard {
					told[fmt.Sprintf("%T %d", x, i)] = x
				}
				for i, s := range recorder.Ended() {
					told[fmt.Sprintf("span %s %d", s.Name(), i)] = fmt.Sprint(s.Attributes(), s.Status(), s.Events())
				}
				for where, x := range told {
					b, err := json.Marshal(x)
					errtest.None(t, err)
					if i := strings.Index(string(b), mark); i >= 0 {
						t.Fatalf("%s tells it: %s", where, b[max(0, i-200):min(len(b), i+60)])
					}
				}
				if len(to.heard) < 20 || len(log.String()) == 0 {
					t.Errorf("little was said: %d, log %q", len(to.heard), log)
				}
			})
		})
	}
}

// TestStatusTellsEnough checks that the part of a command or an address that is shown
// still identifies it.
func TestStatusTellsEnough(t *testing.T) {
	w := newWorld()
	w.config = []byte("idle-timeout: 30m\nnotify-url: https://hooks.example/T0/key\npre-stop: /opt/save --to s3://x\n")
	bubble(t, w, func(t *testing.T, a *Agent) {
		got := map[string]string{}
		for _, s := range mustStatus(t, a).Settings {
			got[s.Name] = s.Value
		}
		if got["notify-url"] != "https://hooks.example/…" || got["pre-stop"] != "/opt/save …" || got["idle-timeout"] != "30m0s" {
			t.Errorf("%v", got)
		}
	})
}
