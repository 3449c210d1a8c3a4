package hosts

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/why"
	"lull/internal/protocol/control"
)

var began = time.Now()

// report returns a report of the host desk that is based on report after.
func report(seq, after uint64, names ...string) control.HostReport {
	r := control.HostReport{Host: "desk", At: time.Now(), Sequence: seq, After: after, StartedAt: began, Version: "v1", Interval: idle.Duration(10 * time.Second), Counts: map[string]int{}}
	for _, n := range names {
		r.Instances = append(r.Instances, control.HostInstance{ID: "id-" + n, Name: n, State: "running", Runtime: "process"})
	}
	return r
}

// has checks the instances that h knows of desk.
func (h *Hosts) has(t *testing.T, when string, want ...string) {
	t.Helper()
	v, _ := h.View("desk", time.Now())
	got := []string{}
	for _, i := range v.Instances {
		got = append(got, i.Name)
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: %v, want %v", when, got, want)
	}
}

func (h *Hosts) take(t *testing.T, when string, r control.HostReport, resend bool) {
	t.Helper()
	if a, err := h.Take(r, time.Now()); err != nil || a.Resend != resend {
		t.Errorf("%s: %+v, %v, want resend %t", when, a, err, resend)
	}
}

// TestReportsAddUp checks that a report of changes is accepted only if it follows the
// report it is based on, and that a report in parts is accepted when it is complete.
func TestReportsAddUp(t *testing.T) {
	h := New("v1", "")
	h.take(t, "a change of what is not known", report(5, 4, "a"), true)
	h.has(t, "then")
	h.take(t, "the first", report(1, 0, "a", "b"), false)
	h.take(t, "a change", report(2, 1, "c"), false)
	gone := report(3, 2)
	gone.Gone = []string{"id-a", "id-none"}
	h.take(t, "one that went", gone, false)
	h.has(t, "after changes", "b", "c")
	h.take(t, "a gap", report(5, 4, "d"), true)
	other := report(4, 3, "d")
	other.StartedAt = began.Add(time.Second)
	h.take(t, "another run of the host", other, true)
	h.has(t, "after refusals", "b", "c")

	again := report(6, 3, "b")
	again.Instances[0].ID = "id-new"
	var bad *InvalidError
	if _, err := h.Take(again, time.Now()); !errors.As(err, &bad) {
		t.Errorf("two instances of one name: %v", err)
	}
	h.has(t, "after a name that is taken", "b", "c")
	again.Gone = []string{"id-b"}
	h.take(t, "a name that came free", again, false)

	first := report(7, 0, "x")
	first.More = true
	h.take(t, "a first part", first, false)
	h.has(t, "in the middle", "b", "c")
	second := report(8, 7, "y")
	second.More = true
	h.take(t, "a second part", second, false)
	h.take(t, "the last part", report(9, 8, "z"), false)
	h.has(t, "when it is whole", "x", "y", "z")
}

// TestSilence checks that the instances of a silent host are unknown, neither running
// nor stopped.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New("v2", "")
		last := time.Now()
		r := report(1, 0, "a")
		used, at := time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
		r.Instances[0].LastActivityAt, r.Instances[0].IdleFor, r.Instances[0].PauseAt = &used, 60, &at
		h.take(t, "a report", r, false)
		time.Sleep(30 * time.Second)
		v, _ := h.View("desk", time.Now())
		if i := v.Instances[0]; !v.Heard || i.State != "running" || i.IdleFor != 90 || i.PauseAt == nil || v.UnheardSince != nil {
			t.Errorf("after three intervals: %t, %+v", v.Heard, i)
		}
		time.Sleep(time.Second)
		v, _ = h.View("desk", time.Now())
		if i := v.Instances[0]; v.Heard || i.State != "unknown" || i.LastState != "running" || i.PauseAt != nil || v.UnheardSince == nil || !v.UnheardSince.Equal(last) {
			t.Errorf("after that: %+v, %+v", v.HostSummary, i)
		}
		a, ok := h.Why(t.Context(), "desk", "a", time.Time{})
		if !ok || a.Why == nil || a.Why.Readings != "unknown" || a.Why.State != "" || a.Why.Unheard == "" || a.Why.Verdict != nil {
			t.Errorf("why: %+v", a.Why)
		}
		h.take(t, "it speaks again", report(2, 1), false)
		if v, _ := h.View("desk", time.Now()); !v.Heard || v.Instances[0].State != "running" {
			t.Errorf("when it is back: %+v", v)
		}
	})
}

// TestQuestions checks that a host's own answer is returned, and otherwise one from
// its last report, marked as such.
func TestQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New("v1", "")
		h.take(t, "a report", report(1, 0, "a"), false)
		ask := func(ref string, at time.Time) control.HostReply {
			a, ok := h.Why(t.Context(), "desk", ref, at)
			if !ok {
				t.Fatal("nothing is known of desk")
			}
			return a
		}
		if a := ask("a", time.Time{}); a.Why == nil || a.Why.Readings != "unknown" || a.Why.State != "running" || a.Why.Instance == nil {
			t.Errorf("nothing listens: %+v", a.Why)
		}
		if a := ask("none", time.Time{}); a.Status != 404 {
			t.Errorf("no such instance: %+v", a)
		}
		if a := ask("a", time.Now().Add(-time.Hour)); a.Why == nil || a.Why.Readings != "unknown" || a.Why.State != "" {
			t.Errorf("a past time: %+v", a.Why)
		}
		ctx, end := context.WithCancel(t.Context())
		var asked []control.HostQuestion
		done := make(chan struct{})
		go func() { // the host
			defer close(done)
			var answers []control.HostReply
			for ctx.Err() == nil {
				q := h.Turn(ctx, "desk", answers, 20*time.Second).Questions
				answers = nil
				for _, x := range q {
					asked = append(asked, x)
					if x.Instance == "slow" {
						continue
					}
					answers = append(answers, control.HostReply{ID: x.ID, Why: &control.HostWhy{Host: "forged", Account: why.Account{State: "paused", Verdict: &idle.Verdict{}}}})
				}
			}
		}()
		synctest.Wait()
		time.Sleep(3 * time.Second)
		h.take(t, "a report", report(2, 1, "slow"), false)
		if a := ask("a", time.Time{}); a.Why == nil || a.Why.Readings != "live" || a.Why.State != "paused" || a.Why.Host != "desk" {
			t.Errorf("asked: %+v", a.Why)
		}
		if a := ask("a", time.Now().Add(-time.Hour)); a.Why == nil || a.Why.Readings != "recorded" {
			t.Errorf("asked for the past: %+v", a.Why)
		}
		began := time.Now()
		if a := ask("slow", time.Time{}); a.Why == nil || a.Why.Readings != "unknown" || time.Since(began) != Within {
			t.Errorf("not answered, after %s: %+v", time.Since(began), a.Why)
		}
		if len(asked) != 3 {
			t.Errorf("asked %d times: %v", len(asked), asked)
		}
		h.mu.Lock()
		if x := h.byID["desk"]; len(x.asked)+len(x.open) != 0 {
			t.Errorf("questions that no client waits for are kept: %v %v", x.asked, x.open)
		}
		h.mu.Unlock()
		end()
		<-done
	})
}

// TestFull checks that reports beyond a limit are rejected and leave the existing
// data unchanged.
func TestFull(t *testing.T) {
	h := New("v1", "")
	h.take(t, "the first", report(1, 0, "a"), false)
	h.n = maxInstances
	var full *FullError
	if _, err := h.Take(report(2, 1, "b"), time.Now()); !errors.As(err, &full) {
		t.Errorf("too many instances: %v", err)
	}
	h.has(t, "then", "a")
}
