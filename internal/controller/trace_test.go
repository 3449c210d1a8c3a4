package controller

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdk "go.opentelemetry.io/otel/sdk/trace"

	"lull/internal/core/power"
	"lull/internal/lib/tracing/tracetest"
)

// TestTracesAndLines checks that a check, the pause that it decided and the
// following resume are connected traces, and that each decision that says
// something new is one log line.
func TestTracesAndLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seen := tracetest.New()
		r := newRig(t, options{settings: map[string]any{"worker_warn_before_minutes": 0}, log: seen.Logger(), tracer: seen.Tracer()})
		defer func() { r.stop() }()
		id := r.create().ID
		r.await(id, power.WorkerRunning, 5*time.Minute)
		for end := time.Now().Add(20 * time.Minute); time.Now().Before(end) && len(seen.Lines("msg=decision", "worker="+id)) == 0; {
			time.Sleep(time.Second)
		}
		l, known := r.c.Live(id)
		if !known || l.NextCheckAt == nil {
			t.Fatalf("when it is checked next is not known: %+v", l)
		}
		if at := "next_check_at=" + l.NextCheckAt.UTC().Format("2006-01-02T15:04:05"); len(seen.Lines("msg=decision", at)) != 1 {
			t.Errorf("the line has another next check than %s: %q", at, seen.Lines("msg=decision"))
		}
		time.Sleep(30 * time.Minute)
		if l := seen.Lines("msg=decision", "worker="+id); len(l) != 1 || !strings.Contains(l[0], "outcome=hold code=not_idle_yet") || !strings.Contains(l[0], "target_pause_at=") || !strings.Contains(l[0], "name=") {
			t.Errorf("half an hour of the same: %q", l)
		}
		r.await(id, power.WorkerStopped, 2*time.Hour)
		if _, err := r.fleet.StartWorker(t.Context(), operator, id); err != nil {
			t.Fatal(err)
		}
		r.await(id, power.WorkerRunning, 5*time.Minute)
		time.Sleep(2 * time.Minute)
		if l := seen.Lines("msg=decision", "outcome=pause code=idle_timeout_exceeded"); len(l) != 1 {
			t.Errorf("the pause: %q", l)
		}
		if l := seen.Lines(`msg="final check"`, "outcome=pause"); len(l) != 1 {
			t.Errorf("the final check: %q", l)
		}

		pause := seen.Last(t, "worker.pause")
		check := seen.Parent(pause, "worker.detect")
		if check == nil || check.Parent().IsValid() {
			t.Fatal("the pause is not under a check")
		}
		tracetest.Has(t, check, attribute.String("lull.worker.id", id), attribute.Bool("lull.eligible", true), attribute.String("lull.action", "pause"))
		tracetest.Has(t, pause, attribute.String("lull.reason", "idle_timeout"), attribute.String("lull.outcome", "stopped"))
		seen.Under(t, "final_look", "worker.pause")
		seen.Under(t, "ec2.stop", "worker.pause")
		if seen.Parent(seen.Last(t, "settle"), "worker.detect") != check {
			t.Error("what is settled after the pause is not under the check")
		}
		if d := pause.EndTime().Sub(pause.StartTime()); d < 30*time.Second {
			t.Errorf("the pause took %s, and the cloud takes 30 s for it", d)
		}
		fetched := slices.ContainsFunc(seen.Named("telemetry.fetch"), func(s sdk.ReadOnlySpan) bool { return seen.Parent(s, "final_look") != nil })
		if !fetched {
			t.Error("the final check fetched nothing")
		}
		resume := seen.Last(t, "worker.resume")
		if resume.Parent().IsValid() {
			t.Error("the resume is under something")
		}
		tracetest.Has(t, resume, attribute.String("lull.worker.id", id), attribute.String("lull.by", operator.Name))
		seen.Under(t, "ec2.start", "worker.resume")
		seen.Under(t, "cml.ready", "worker.resume")
	})
}
