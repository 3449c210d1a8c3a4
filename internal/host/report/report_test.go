package report

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host"
	"lull/internal/lib/delay"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
	"lull/internal/server/hosts"
)

// listener is a server with the real encoding. It records the reports of a host.
type listener struct {
	*hosts.Hosts
	mu   sync.Mutex
	gone bool
	sent []control.HostReport
}

// there returns what the server knows, or nil while it is unreachable.
func (l *listener) there() *hosts.Hosts {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return nil
	}
	return l.Hosts
}

func (l *listener) ReportHost(_ context.Context, r control.HostReport) (control.HostAnswer, error) {
	there := l.there()
	if there == nil {
		return control.HostAnswer{}, errors.New("nothing answers")
	}
	body, err := json.Marshal(r)
	if err == nil {
		r, err = control.ReadHostReport("desk", body)
	}
	if err != nil {
		return control.HostAnswer{}, err
	}
	l.mu.Lock()
	l.sent = append(l.sent, r)
	l.mu.Unlock()
	return there.Take(r, time.Now())
}

func (l *listener) HostTurn(ctx context.Context, host string, t control.HostTurn) (q control.HostQuestions, err error) {
	there := l.there()
	if there == nil {
		return q, errors.New("nothing answers")
	}
	body, err := json.Marshal(t)
	if err == nil {
		t, err = control.ReadHostTurn(body)
	}
	if err != nil {
		return q, err
	}
	return there.Turn(ctx, host, t.Answers, time.Duration(t.Wait*float64(time.Second))), nil
}

// AwaitHalt implements Server. This fleet is never halted.
func (l *listener) AwaitHalt(ctx context.Context, _ string, t control.HaltTurn) (control.HaltAnswer, error) {
	if l.there() == nil {
		return control.HaltAnswer{}, errors.New("nothing answers")
	}
	if t.Known != "" {
		_ = delay.For(ctx, time.Duration(t.Wait*float64(time.Second)))
	}
	return control.HaltAnswer{Mark: "off"}, ctx.Err()
}

// take returns the reports since the last call.
func (l *listener) take() []control.HostReport {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := l.sent
	l.sent = nil
	return out
}

// set makes the server unreachable, or reachable again.
func (l *listener) set(gone bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gone = gone
}

// forget makes the server forget everything, as a restart does.
func (l *listener) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.Hosts = hosts.New("v1", "")
}

// shows returns the server's view of an instance.
func (l *listener) shows(t *testing.T, name string) control.HostInstance {
	t.Helper()
	v, _ := l.View("desk", time.Now())
	for _, i := range v.Instances {
		if i.Name == name {
			return i
		}
	}
	t.Errorf("the server does not know %s: %+v", name, v)
	return control.HostInstance{}
}

// reporting runs f while the rig's host reports to a listener.
func (r *rig) reporting(f func(l *listener, rep *Reporter, log *bytes.Buffer)) {
	l, log := &listener{Hosts: hosts.New("v1", "")}, &bytes.Buffer{}
	rep, end := r.report(l, log)
	f(l, rep, log)
	end()
}

// TestReport checks that changes and removals are reported at once, and nothing
// else.
func TestReport(t *testing.T) {
	inBubble(t, nil, func(r *rig) {
		r.run("a", nil)
		r.run("b", func(s *instance.Spec) { s.PauseAfter = new(idle.Duration) })
		r.reporting(func(l *listener, rep *Reporter, _ *bytes.Buffer) {
			pass(2 * time.Second)
			if i := l.shows(t, "a"); i.State != "running" || i.PauseAt == nil || len(i.Endpoints) != 2 {
				t.Errorf("a is %+v", i)
			}
			if i := l.shows(t, "b"); i.PauseAt != nil || len(i.Blocks) == 0 {
				t.Errorf("b is %+v", i)
			}
			pass(time.Minute)
			r.is("a", power.Paused)
			pass(2 * time.Second)
			if i := l.shows(t, "a"); i.State != "paused" || i.NextStep != "stopped" || i.LastPausedBy != "idle_timeout" {
				t.Errorf("a is %+v", i)
			}
			l.take()
			pass(time.Minute)
			n := 0
			for _, x := range l.take() {
				for _, i := range x.Instances {
					if n++; i.Name == "a" {
						t.Errorf("a changed in nothing and was reported: %+v", i)
					}
				}
				if x.After == 0 {
					t.Error("a report begins anew")
				}
			}
			if n == 0 || n > 8 {
				t.Errorf("b was reported %d times in a minute", n)
			}
			errtest.None(t, r.Hold(context.Background(), "a", idle.Lease{Holder: "ci"}, time.Hour))
			pass(2 * time.Second)
			if i := l.shows(t, "a"); len(i.Leases) != 1 || i.Leases[0].Holder != "ci" {
				t.Errorf("a has the leases %v", i.Leases)
			}
			errtest.None(t, r.Halt(&idle.HaltedBy{By: "ada", Since: time.Now()}, "ada"))
			errtest.None(t, r.Delete(context.Background(), "b", host.ByManual))
			pass(2 * time.Second)
			v, _ := l.View("desk", time.Now())
			if !v.Heard || !v.Halted || v.Halt == nil || v.Halt.By != "ada" || len(v.Instances) != 1 || v.Counts["paused"] != 1 || len(v.Counts) != 1 {
				t.Errorf("at the end: %+v", v)
			}
			if s := rep.Link(); s.Error != "" || s.ReportedAt == nil || s.Host != "desk" {
				t.Errorf("the link is %+v", s)
			}
		})
	})
}

// TestServerIsGone checks that an unreachable server changes nothing on the host
// and is logged once, and that its view is correct again once it is reachable, even
// if it has forgotten everything.
func TestServerIsGone(t *testing.T) {
	inBubble(t, nil, func(r *rig) {
		id := r.run("a", nil)
		r.reporting(func(l *listener, rep *Reporter, log *bytes.Buffer) {
			pass(2 * time.Second)
			l.set(true)
			pass(time.Minute)
			r.is("a", power.Paused)
			errtest.None(t, r.Resume(context.Background(), id, host.ByManual))
			pass(time.Hour)
			r.is("a", power.Stopped)
			if s := rep.Link(); s.Error != "nothing answers" || s.FailingSince == nil || time.Since(*s.FailingSince) < time.Hour-time.Minute {
				t.Errorf("the link is %+v", s)
			}
			if n := strings.Count(log.String(), "reports do not reach the server"); n != 1 {
				t.Errorf("it was logged %d times:\n%s", n, log)
			}
			l.forget()
			l.set(false)
			pass(reportMost + 2*time.Second)
			if i := l.shows(t, "a"); i.State != "stopped" || i.LastState != "" {
				t.Errorf("a is %+v", i)
			}
			if rep.Link().Error != "" || strings.Count(log.String(), "reports reach the server again") != 1 {
				t.Errorf("the link is %+v:\n%s", rep.Link(), log)
			}
			l.forget() // as if it were restarted between two reports
			pass(20 * time.Second)
			l.shows(t, "a")
		})
	})
}

// TestManyInstances checks that many instances are reported in parts, each within
// the limits.
func TestManyInstances(t *testing.T) {
	inBubble(t, nil, func(r *rig) {
		const many = 400
		for n := range many {
			if _, err := r.Create(context.Background(), instance.Spec{Name: fmt.Sprint("i", n), Command: []string{"x"}, Env: []string{"SECRET=hush"},
				Expose: []instance.Endpoint{{Listen: "127.0.0.1:80", Target: "127.0.0.1:80"}}}); err != nil {
				t.Fatal(err)
			}
		}
		r.reporting(func(l *listener, _ *Reporter, _ *bytes.Buffer) {
			pass(2 * time.Second)
			sent := l.take()
			if len(sent) < 3 || !sent[0].More || sent[len(sent)-1].More {
				t.Errorf("it took %d reports", len(sent))
			}
			for _, x := range sent {
				if b, err := json.Marshal(x); err != nil || len(b) > control.MaxHostReport || bytes.Contains(b, []byte("hush")) {
					t.Errorf("a report of %d bytes: %v", len(b), err)
				}
			}
			if v, _ := l.View("desk", time.Now()); len(v.Instances) != many || v.Counts["stopped"] != many || v.LeftOut != 0 {
				t.Errorf("the server has %d: %v", len(v.Instances), v.Counts)
			}
		})
	})
}

// TestQuestionsAreAnswered checks that the server gets answers from the host, about
// the present and about a past time.
func TestQuestionsAreAnswered(t *testing.T) {
	inBubble(t, nil, func(r *rig) {
		r.run("a", nil)
		r.reporting(func(l *listener, _ *Reporter, _ *bytes.Buffer) {
			pass(3 * time.Second)
			for ref, status := range map[string]int{"a": 0, "none": 404} {
				a, ok := l.Why(context.Background(), "desk", ref, time.Time{})
				if !ok || a.Status != status || status == 0 && (a.Why == nil || a.Why.Readings != "live" || a.Why.Verdict == nil || a.Why.Instance.Name != "a") {
					t.Errorf("why %s: %t %+v %+v", ref, ok, a, a.Why)
				}
			}
			a, _ := l.Why(context.Background(), "desk", "a", time.Now().Add(-time.Second))
			if a.Status != 422 || a.Detail == "" {
				t.Errorf("a past time of a host without evidence: %+v", a)
			}
			l.set(true)
			pass(30 * time.Second) // until the pending poll ends
			if a, _ := l.Why(context.Background(), "desk", "a", time.Time{}); a.Why == nil || a.Why.Readings != "unknown" || a.Why.Unheard == "" {
				t.Errorf("a host that does not listen: %+v", a.Why)
			}
		})
	})
}
