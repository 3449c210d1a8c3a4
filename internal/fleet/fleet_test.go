package fleet_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/store"
	"lull/internal/store/mem"
)

var (
	ada = audit.Actor{Name: "ada", Kind: audit.KindUser}
	cal = audit.Actor{Name: "calendar", Kind: audit.KindSchedule}
)

// bubble runs f with a fleet on an in-memory store.
func bubble(t *testing.T, values map[string]any, f func(t *testing.T, fl *fleet.Fleet)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := mem.New(mem.Options{}).Client()
		defer c.Close()
		seal, err := sealed.NewSealer([]byte(strings.Repeat("k", 32)))
		errtest.None(t, err)
		fl, err := fleet.New(fleet.Options{Store: c, ID: "f1", Seal: seal, File: settings.Layer{Values: values}})
		if err != nil {
			t.Fatal(err)
		}
		errtest.Get(fl.PutTemplate(t.Context(), ada, launch.Template{Name: "small", InstanceType: "t3.small", AMINameFilter: "cml*", Enabled: true}, 0))(t)
		f(t, fl)
	})
}

// passMinute waits a minute of the bubble's time.
func passMinute() { time.Sleep(time.Minute) }

func create(t *testing.T, fl *fleet.Fleet) worker.Worker {
	t.Helper()
	w, err := fl.CreateWorker(t.Context(), ada, fleet.NewWorker{Name: "one", TemplateName: "small"})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// put moves a worker to a status by legal transitions, as the controller would.
func put(t *testing.T, fl *fleet.Fleet, id string, s power.Worker) worker.Worker {
	t.Helper()
	paths := map[power.Worker][]power.Worker{
		power.WorkerPending: {}, power.WorkerProvisioning: {power.WorkerProvisioning}, power.WorkerFailed: {power.WorkerProvisioning, power.WorkerFailed},
		power.WorkerStarting: {power.WorkerProvisioning, power.WorkerStarting},
		power.WorkerRunning:  {power.WorkerProvisioning, power.WorkerStarting, power.WorkerRunning},
		power.WorkerUnknown:  {power.WorkerProvisioning, power.WorkerUnknown},
		power.WorkerStopping: {power.WorkerProvisioning, power.WorkerStarting, power.WorkerRunning, power.WorkerStopping},
		power.WorkerStopped:  {power.WorkerProvisioning, power.WorkerStarting, power.WorkerRunning, power.WorkerStopped},
		power.WorkerDraining: {power.WorkerProvisioning, power.WorkerStarting, power.WorkerRunning, power.WorkerDraining},
	}
	paths[power.WorkerTerminating] = []power.Worker{power.WorkerTerminating}
	paths[power.WorkerTerminated] = []power.Worker{power.WorkerTerminating, power.WorkerTerminated}
	var w worker.Worker
	var err error
	for _, to := range paths[s] {
		w, err = fl.Change(t.Context(), id, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, tx *worker.Tx) error {
			w.Status, w.EC2InstanceID = to, "i-00000000000000001"
			switch to {
			case power.WorkerStopping, power.WorkerStopped:
				w.DesiredStatus = power.WorkerStopped
			case power.WorkerRunning:
				w.Resumed(tx)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return w
}

// TestCommandsByStatus checks the effect of every command in every status against the
// table of package power.
func TestCommandsByStatus(t *testing.T) {
	const refused = "refused"
	type command struct {
		name string
		run  func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error)
		// want is the resulting status and desired status, "refused", or empty
		// for no change.
		want map[power.Worker]string
	}
	all := power.WorkerTable.All()
	except := func(want map[power.Worker]string) map[power.Worker]string {
		for _, s := range all {
			if _, ok := want[s]; !ok {
				want[s] = refused
			}
		}
		return want
	}
	commands := []command{
		{"stop", func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.StopWorker(ctx, ada, id)
		},
			except(map[power.Worker]string{
				power.WorkerRunning: "RUNNING/STOPPED", power.WorkerStarting: "STARTING/STOPPED", power.WorkerDraining: "DRAINING/STOPPED",
				power.WorkerStopping: "STOPPING/STOPPED", power.WorkerStopped: "STOPPED/STOPPED", power.WorkerFailed: "STOPPING/STOPPED",
			})},
		{"drain", func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.DrainWorker(ctx, ada, id)
		}, except(map[power.Worker]string{power.WorkerRunning: "DRAINING/STOPPED", power.WorkerStopped: "STOPPED/STOPPED"})},
		{"cancel-drain", func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.CancelDrain(ctx, ada, id)
		}, except(map[power.Worker]string{power.WorkerDraining: "RUNNING/RUNNING"})},
		{"resume", func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.ResumeWorker(ctx, ada, id)
		}, except(map[power.Worker]string{
			power.WorkerPending: "PENDING/RUNNING", power.WorkerProvisioning: "PROVISIONING/RUNNING", power.WorkerStarting: "STARTING/RUNNING",
			power.WorkerRunning: "RUNNING/RUNNING", power.WorkerDraining: "RUNNING/RUNNING", power.WorkerStopping: "STOPPING/RUNNING",
			power.WorkerStopped: "STOPPED/RUNNING", power.WorkerFailed: "STARTING/RUNNING", power.WorkerUnknown: "UNKNOWN/RUNNING",
		})},
		{"terminate", func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.TerminateWorker(ctx, ada, id)
		}, map[power.Worker]string{power.WorkerTerminated: "TERMINATED/RUNNING"}},
		{"retry", func(ctx context.Context, fl *fleet.Fleet, id string) (worker.Worker, error) {
			return fl.RetryWorker(ctx, ada, id)
		},
			except(map[power.Worker]string{power.WorkerFailed: "STARTING/RUNNING"})},
	}
	for _, s := range all {
		if s != power.WorkerTerminated && s != power.WorkerTerminating {
			commands[4].want[s] = "TERMINATING/TERMINATED"
		}
	}
	commands[4].want[power.WorkerTerminating] = "TERMINATING/RUNNING"
	for _, c := range commands {
		for _, s := range all {
			t.Run(c.name+"/"+string(s), func(t *testing.T) {
				bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
					id := create(t, fl).ID
					put(t, fl, id, s)
					before, err := fl.Worker(t.Context(), id)
					errtest.None(t, err)
					after, err := c.run(t.Context(), fl, id)
					if c.want[s] == refused {
						if _, ok := errors.AsType[*failure.Refused](err); !ok {
							t.Fatalf("got %v, want it refused", err)
						}
						if now, _ := fl.Worker(t.Context(), id); now.Revision() != before.Revision() {
							t.Error("a refused command wrote")
						}
						return
					}
					if got := string(after.Status) + "/" + string(after.DesiredStatus); err != nil || got != c.want[s] {
						t.Errorf("got %s and %v, want %s", got, err, c.want[s])
					}
				})
			})
		}
	}
}

// TestCounters checks that each pause is counted once, when its intent is durable,
// and each resume once, when RUNNING is confirmed.
func TestCounters(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		ctx := t.Context()
		id := create(t, fl).ID
		put(t, fl, id, power.WorkerRunning)
		check := func(when string, want ...int64) {
			t.Helper()
			w, err := fl.Worker(ctx, id)
			errtest.None(t, err)
			got := []int64{w.AutoPauseCount, w.ManualPauseCount, w.ExternalPauseCount, w.AutoResumeCount, w.ManualResumeCount, w.ExternalResumeCount}
			for i := range want {
				if got[i] != want[i] {
					t.Errorf("%s: counters %v, want %v", when, got, want)
					return
				}
			}
		}
		stopped := func() {
			t.Helper()
			for _, to := range []power.Worker{power.WorkerStopping, power.WorkerStopped} {
				if _, err := fl.Change(ctx, id, fleet.Changing{}, func(w *worker.Worker, _ *worker.Tx) error {
					if w.Status = to; to == power.WorkerStopped {
						w.Intent = nil
					}
					return nil
				}); err != nil {
					t.Fatal(err)
				}
			}
		}
		up := func() {
			t.Helper()
			for range 2 {
				if _, err := fl.Change(ctx, id, fleet.Changing{}, func(w *worker.Worker, tx *worker.Tx) error {
					if w.Status == power.WorkerStopped {
						w.Status = power.WorkerStarting
						return nil
					}
					w.Resumed(tx)
					return nil
				}); err != nil {
					t.Fatal(err)
				}
			}
		}
		must := func(_ worker.Worker, err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		check("a first launch is no resume", 0, 0, 0, 0, 0, 0)
		must(fl.PauseWorker(ctx, audit.ByController, id, worker.Pause{Reason: power.ReasonIdleTimeout}))
		check("an intent counts at once", 1, 0, 0, 0, 0, 0)
		if _, err := fl.PauseWorker(ctx, audit.ByController, id, worker.Pause{Reason: power.ReasonSchedule}); err == nil {
			t.Error("a second automatic intent was taken")
		}
		check("and once", 1, 0, 0, 0, 0, 0)
		stopped()
		must(fl.ResumeWorker(ctx, ada, id))
		must(fl.ResumeWorker(ctx, ada, id))
		check("a resume does not count before it is confirmed", 1, 0, 0, 0, 0, 0)
		up()
		check("a manual resume", 1, 0, 0, 0, 1, 0)
		must(fl.StopWorker(ctx, ada, id))
		must(fl.StopWorker(ctx, ada, id))
		check("a manual pause, asked for twice", 1, 1, 0, 0, 1, 0)
		stopped()
		must(fl.ResumeWorker(ctx, cal, id))
		up()
		check("an automatic resume", 1, 1, 0, 1, 1, 0)
		for i, r := range []power.Reason{power.ReasonSchedule, power.ReasonTTL, power.ReasonScaleDown} {
			must(fl.PauseWorker(ctx, audit.ByController, id, worker.Pause{Reason: r}))
			check(string(r), int64(i+2), 1, 0, int64(i+1), 1, 0)
			stopped()
			must(fl.ResumeWorker(ctx, cal, id))
			up()
		}
		must(fl.PauseWorker(ctx, audit.ByController, id, worker.Pause{Reason: power.ReasonIdleTimeout}))
		must(fl.ResumeWorker(ctx, ada, id))
		check("a pause that was called off was intended, and nothing was resumed", 5, 1, 0, 4, 1, 0)
	})
}

// TestArbiter checks every row of the arbiter: the five guards in their order, with
// and without scale-down.
func TestArbiter(t *testing.T) {
	now := time.Date(2026, 2, 1, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) *time.Time { t := now.Add(-d); return &t }
	idleV, notIdle, blocked := idle.Verdict{IsIdle: true, Eligible: true}, idle.Verdict{}, idle.Verdict{IsIdle: true}
	for _, c := range []struct {
		name   string
		v      idle.Verdict
		l      worker.Limits
		action worker.Action
		guard  string
	}{
		{"intended first", notIdle, worker.Limits{ScaleDown: true, Intended: true}, worker.ActNothing, audit.SkippedAutoPause},
		{"not idle", notIdle, worker.Limits{ScaleDown: true, Up: 0, MinWorkers: 9}, worker.ActNothing, audit.SkippedNotIdle},
		{"not eligible", blocked, worker.Limits{ScaleDown: true, Up: 0, MinWorkers: 9}, worker.ActNothing, audit.SkippedNotEligible},
		{"at the floor", idleV, worker.Limits{ScaleDown: true, Up: 2, MinWorkers: 2, LastScaleDownAt: ago(time.Second), Cooldown: time.Minute}, worker.ActNothing, audit.SkippedMinWorkers},
		{"cooling: paused instead", idleV, worker.Limits{ScaleDown: true, Up: 3, MinWorkers: 2, LastScaleDownAt: ago(59 * time.Second), Cooldown: time.Minute}, worker.ActPause, audit.SkippedCooldown},
		{"cooling: it waits", idleV, worker.Limits{ScaleDown: true, Up: 3, MinWorkers: 2, LastScaleDownAt: ago(59 * time.Second), Cooldown: time.Minute, Defers: true}, worker.ActNothing, audit.SkippedCooldown},
		{"off: it does not wait", idleV, worker.Limits{Up: 3, LastScaleDownAt: ago(59 * time.Second), Cooldown: time.Minute, Defers: true}, worker.ActPause, ""},
		{"cooled", idleV, worker.Limits{ScaleDown: true, Up: 3, MinWorkers: 2, LastScaleDownAt: ago(time.Minute), Cooldown: time.Minute}, worker.ActDrain, ""},
		{"all pass", idleV, worker.Limits{ScaleDown: true, Up: 1}, worker.ActDrain, ""},
		{"off: pause", idleV, worker.Limits{Up: 1}, worker.ActPause, ""},
		{"off: cooldown is nothing", idleV, worker.Limits{Up: 1, LastScaleDownAt: ago(0), Cooldown: time.Hour}, worker.ActPause, ""},
		{"off: floor", idleV, worker.Limits{Up: 1, MinWorkers: 1}, worker.ActNothing, audit.SkippedMinWorkers},
		{"off: not idle", notIdle, worker.Limits{Up: 1}, worker.ActNothing, ""},
		{"off: not eligible", blocked, worker.Limits{Up: 1}, worker.ActNothing, ""},
		{"off: intended", idleV, worker.Limits{Up: 1, Intended: true}, worker.ActNothing, ""},
	} {
		if a, g := worker.Arbitrate(now, c.v, c.l); a != c.action || g != c.guard {
			t.Errorf("%s: %s and %q, want %s and %q", c.name, a, g, c.action, c.guard)
		}
	}
}

// TestFloor checks that the floor holds if every worker is idle at once, and that it
// does not limit users.
func TestFloor(t *testing.T) {
	bubble(t, map[string]any{"min_workers": 3, "worker_warn_before_minutes": 0}, func(t *testing.T, fl *fleet.Fleet) {
		ctx := t.Context()
		var ids []string
		for range 8 {
			w := create(t, fl)
			for _, to := range []power.Worker{power.WorkerProvisioning, power.WorkerStarting, power.WorkerRunning} {
				errtest.Get(fl.Change(ctx, w.ID, fleet.Changing{}, func(w *worker.Worker, _ *worker.Tx) error { w.Status = to; return nil }))(t)
			}
			ids = append(ids, w.ID)
		}
		time.Sleep(2 * time.Hour)
		done := make(chan worker.Outcome, len(ids))
		for _, id := range ids {
			go func() {
				out, err := fl.Decide(ctx, id, worker.Judgement{Now: time.Now(), Rules: func(w *worker.Worker) policy.Resolved { return fl.PolicyWith(time.Now(), w, nil) },
					Readings: []idle.Reading{{Signal: worker.SourceCML, State: idle.Quiet, At: time.Now()}}})
				if err != nil {
					t.Error(err)
				}
				done <- out
			}()
		}
		paused := 0
		for range ids {
			out := <-done
			if err := out.Decision.Replay(); err != nil {
				t.Error(err)
			}
			switch out.Action {
			case worker.ActPause:
				paused++
			case worker.ActNothing:
				if out.Guard != audit.SkippedMinWorkers || !out.Decision.Verdict.Has(idle.MinWorkers) {
					t.Errorf("kept up by %q and %v", out.Guard, out.Decision.Verdict.Blocks)
				}
			}
		}
		if pool, err := fl.Pool(ctx); err != nil || paused != 5 || pool.Up != 3 {
			t.Errorf("paused %d, %d up: %v", paused, pool.Up, err)
		}
		for _, id := range ids {
			if _, err := fl.StopWorker(ctx, ada, id); err != nil {
				t.Error(err)
			}
		}
		if pool, _ := fl.Pool(ctx); pool.Up != 0 {
			t.Errorf("users left %d up", pool.Up)
		}
	})
}

func TestHaltRefusesAutomaticActions(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		ctx := t.Context()
		id := create(t, fl).ID
		put(t, fl, id, power.WorkerRunning)
		errtest.Get(fl.SetHalt(ctx, ada, halt.Request{On: true}))(t)
		for _, err := range []error{
			second(fl.PauseWorker(ctx, audit.ByController, id, worker.Pause{Reason: power.ReasonIdleTimeout})),
			second(fl.ResumeWorker(ctx, cal, id)),
		} {
			if r, ok := errors.AsType[*failure.Refused](err); !ok || r.Reason != "halted" {
				t.Errorf("got %v while halted", err)
			}
		}
		if _, err := fl.StopWorker(ctx, ada, id); err != nil {
			t.Errorf("a user was refused: %v", err)
		}
		if _, err := fl.SetHalt(ctx, ada, halt.Request{}); err != nil || fl.Halted().On {
			t.Errorf("the halt does not end: %v", err)
		}
	})
}

func TestHaltHasAnEnd(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		ctx := t.Context()
		id := create(t, fl).ID
		put(t, fl, id, power.WorkerRunning)
		past, end := time.Now(), time.Now().Add(2*time.Hour)
		for field, r := range map[string]halt.Request{"until": {On: true, Until: &past}, "reason": {On: true, Reason: strings.Repeat("x", 513)}} {
			_, err := fl.SetHalt(ctx, ada, r)
			if bad, ok := errors.AsType[*failure.Invalid](err); !ok || bad.Field != field || fl.Halted().On {
				t.Errorf("%s: %v", field, err)
			}
		}
		errtest.Get(fl.SetHalt(ctx, ada, halt.Request{On: true, Reason: "drill", Until: &end}))(t)
		if s := fl.Halted().Sentence(); !strings.Contains(s, "by "+ada.Name+" since ") || !strings.Contains(s, " until "+end.UTC().Format(time.RFC3339)+": drill.") {
			t.Error(s)
		}
		pause := func() error { return second(fl.ResumeWorker(ctx, cal, id)) }
		time.Sleep(2*time.Hour - time.Nanosecond)
		if r, ok := errors.AsType[*failure.Refused](pause()); !ok || r.Reason != "halted" {
			t.Error("it is not halted before its end")
		}
		if err := fl.EndHalt(ctx); err != nil || !fl.Halted().On {
			t.Errorf("ended too early: %v", err)
		}
		time.Sleep(time.Nanosecond)
		if r, ok := errors.AsType[*failure.Refused](pause()); fl.Halted().On || ok && r.Reason == "halted" {
			t.Error("it is halted after its end")
		}
		for range 2 {
			if err := fl.EndHalt(ctx); err != nil {
				t.Error(err)
			}
		}
		page, err := fl.Audit(ctx, audit.Query{Action: "halt_ended"})
		if err != nil || len(page.Entries) != 1 || page.Entries[0].By != audit.ByController {
			t.Errorf("the log says %+v, %v", page.Entries, err)
		}
	})
}

func second[A any](_ A, err error) error { return err }

func TestWakeTokens(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		ctx := t.Context()
		id := create(t, fl).ID
		put(t, fl, id, power.WorkerStopped)
		token, err := fl.NewWakeToken(ctx, ada, id)
		errtest.None(t, err)
		v, err := store.Get(ctx, fl.Store(), "workers/"+id)
		if err != nil || strings.Contains(string(v.Data), token) {
			t.Errorf("the token is stored in the clear, or: %v", err)
		}
		for _, wrong := range []string{"", "wake_", token + "x", token[:len(token)-1]} {
			if _, ok := errors.AsType[*failure.NotFound](second(fl.WakeWorker(ctx, id, wrong))); !ok {
				t.Errorf("token %q was taken", wrong)
			}
		}
		w, err := fl.WakeWorker(ctx, id, token)
		if err != nil || w.DesiredStatus != power.WorkerRunning || w.StartOrigin != worker.OriginAuto {
			t.Errorf("woken to %s by %s: %v", w.DesiredStatus, w.StartOrigin, err)
		}
		if r, ok := errors.AsType[*failure.Refused](second(fl.WakeWorker(ctx, id, token))); !ok || r.Reason != "rate_limited" {
			t.Error("a second wake at once was taken")
		}
		at := time.Now().Add(24 * time.Hour) // sent by a server whose clock is wrong
		change(t, fl, id, func(w *worker.Worker) { w.LastWakeAt = &at })
		if _, err := fl.WakeWorker(ctx, id, token); err != nil {
			t.Errorf("a wake after one in the future: %v", err)
		}
		change(t, fl, id, func(w *worker.Worker) { w.Status, w.LastWakeAt = power.WorkerStarting, nil })
		change(t, fl, id, func(w *worker.Worker) { w.Status, w.StatusReason = power.WorkerFailed, "no capacity" })
		if r, ok := errors.AsType[*failure.Refused](second(fl.WakeWorker(ctx, id, token))); !ok || r.Reason != "status" {
			t.Error("a failed worker was woken")
		}
	})
}

func TestSecretsAreSealed(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		ctx := t.Context()
		id := create(t, fl).ID
		pass := "hunter2-very-secret"
		errtest.Get(fl.UpdateWorker(ctx, ada, id, 0, worker.Profile{CMLPassword: &pass}))(t)
		errtest.Get(fl.RegisterLicense(ctx, ada, id, "TOKEN1234567890==", false))(t)
		page, err := store.List(ctx, fl.Store(), store.Prefix(""))
		errtest.None(t, err)
		for _, v := range page.Values {
			if strings.Contains(string(v.Data), pass) || strings.Contains(string(v.Data), "TOKEN1234567890") {
				t.Errorf("%s holds a secret in the clear", v.Key)
			}
		}
		w, _ := fl.Worker(ctx, id)
		seal, _ := sealed.NewSealer([]byte(strings.Repeat("k", 32)))
		none := func(string) (sealed.Plain, error) { return "", errors.New("not asked for") }
		if got, err := seal.Open(w.CMLPassword, none, none); err != nil || got != sealed.Plain(pass) {
			t.Errorf("opened to %q: %v", string(got), err)
		}
		other, _ := sealed.NewSealer([]byte(strings.Repeat("x", 32)))
		if _, err := other.Open(w.CMLPassword, none, none); err == nil {
			t.Error("another key opened it")
		}
		if p := w.Public(); p.CMLPassword != "" || p.License.Token != "" {
			t.Error("Public shows secrets")
		}
	})
}

func TestAuditIsBoundedAndExported(t *testing.T) {
	bubble(t, map[string]any{"audit_retention_days": 1}, func(t *testing.T, fl *fleet.Fleet) {
		ctx := t.Context()
		id := create(t, fl).ID
		for range 5 {
			errtest.Get(fl.SetIdleDetection(ctx, ada, id, false))(t)
			errtest.Get(fl.SetIdleDetection(ctx, ada, id, true))(t)
			time.Sleep(6 * time.Hour)
		}
		page, err := fl.Audit(ctx, audit.Query{WorkerID: id, Action: "idle_detection_toggled", Limit: 4})
		if err != nil || len(page.Entries) != 4 || page.Next == "" {
			t.Fatalf("first page has %d entries, next %q: %v", len(page.Entries), page.Next, err)
		}
		if e := page.Entries[0]; e.ID == 0 || e.By != ada || e.Events[0] != audit.EventDetection {
			t.Errorf("entry %+v", e)
		}
		var out strings.Builder
		if err := fl.ExportAudit(ctx, &out, audit.Query{WorkerID: id}); err != nil || strings.Count(out.String(), "\n") != 11 {
			t.Errorf("exported %d lines: %v", strings.Count(out.String(), "\n"), err)
		}
		var gone []audit.Entry
		n, err := fl.TrimAudit(ctx, time.Now(), func(e []audit.Entry) error { gone = append(gone, e...); return nil })
		// At 30 h, the entries written at 0 h are older than a day: the template, the
		// creation and two toggles.
		if err != nil || n != 4 || len(gone) != 4 {
			t.Errorf("removed %d, archived %d: %v", n, len(gone), err)
		}
	})
}

func TestIllegalTransitionWritesNothing(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		w := create(t, fl)
		_, err := fl.Change(t.Context(), w.ID, fleet.Changing{}, func(w *worker.Worker, _ *worker.Tx) error { w.Status = power.WorkerStopped; return nil })
		if _, ok := errors.AsType[*power.IllegalError](err); !ok {
			t.Errorf("PENDING to STOPPED: %v", err)
		}
		if now, _ := fl.Worker(t.Context(), w.ID); now.Revision() != w.Revision() {
			t.Error("it wrote")
		}
	})
}

// TestScaleUpTogether checks that concurrent requests keep within the limit, start
// each stopped worker once, and give new workers different names.
func TestScaleUpTogether(t *testing.T) {
	bubble(t, map[string]any{"max_workers_per_region": 8}, func(t *testing.T, fl *fleet.Fleet) {
		ctx := t.Context()
		for range 3 {
			put(t, fl, create(t, fl).ID, power.WorkerStopped)
		}
		var mu sync.Mutex
		var all sync.WaitGroup
		ids, names, refused := map[string]int{}, map[string]int{}, 0
		for range 16 {
			all.Go(func() {
				w, err := fl.ScaleUp(ctx, ada, "small", "", "more")
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					ids[w.ID]++
					if w.Status == power.WorkerPending {
						names[w.Name]++
					}
				} else if _, limit := errors.AsType[*failure.Refused](err); limit {
					refused++
				} else {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if len(ids) != 8 || len(names) != 5 || refused != 8 {
			t.Errorf("%d workers, %d of them new, %d refused: %v %v", len(ids), len(names), refused, ids, names)
		}
		for id, n := range ids {
			if n > 1 {
				t.Errorf("worker %s was the answer to %d requests", id, n)
			}
		}
	})
}

func TestScaleUp(t *testing.T) {
	bubble(t, map[string]any{"max_workers_per_region": 3}, func(t *testing.T, fl *fleet.Fleet) {
		ctx := t.Context()
		old := create(t, fl).ID
		put(t, fl, old, power.WorkerStopped)
		w, err := fl.ScaleUp(ctx, ada, "small", "", "more")
		if err != nil || w.ID != old || w.DesiredStatus != power.WorkerRunning {
			t.Errorf("the stopped worker was not started first: %+v %v", w.ID, err)
		}
		if w, err = fl.ScaleUp(ctx, ada, "small", "", "more"); err != nil || w.Status != power.WorkerPending {
			t.Errorf("nothing was created: %v", err)
		}
		if w, err = fl.ScaleUp(ctx, ada, "small", "", "more"); err != nil {
			t.Errorf("below the limit: %v", err)
		}
		if _, ok := errors.AsType[*failure.Refused](second(fl.ScaleUp(ctx, ada, "small", "", "more"))); !ok {
			t.Error("over the limit")
		}
	})
}

// TestWorkersInheritLaunchOptions checks that a scaled-up worker has its template's
// options unless it sets its own, and that the password cannot be read back.
func TestWorkersInheritLaunchOptions(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		ctx := t.Context()
		secret := "env:CML"
		tmpl := launch.Template{Name: "full", InstanceType: "m5.large", AMINameFilter: "cml*", Enabled: true, TLSInsecure: true, CMLUsername: "lull",
			ActivitySources: []string{worker.SourceAgent}, AcceptedRisks: []string{worker.RiskNoElasticIP}, RootVolume: &launch.RootVolume{GB: 80}}
		errtest.Get(fl.PutTemplateWith(ctx, ada, tmpl, &secret, 0))(t)
		if kept, err := fl.PutTemplate(ctx, ada, tmpl, 0); err != nil || kept.CMLPassword == "" || kept.Public().CMLPassword != "" {
			t.Errorf("a change without a password: %+v %v", kept, err)
		}
		w, err := fl.ScaleUp(ctx, ada, "full", "", "more")
		if err != nil || !w.TLSInsecure || w.CMLUsername != "lull" || w.CMLPassword == "" || !slices.Equal(w.ActivitySources, tmpl.ActivitySources) || !slices.Equal(w.AcceptedRisks, tmpl.AcceptedRisks) {
			t.Errorf("scaled up: %+v %v", w, err)
		}
		pin, user := "sha256:x", "other"
		own, err := fl.CreateWorker(ctx, ada, fleet.NewWorker{Name: "own", TemplateName: "full", Profile: worker.Profile{TLSPin: &pin, CMLUsername: &user}})
		if err != nil || own.TLSInsecure || own.TLSPin != pin || own.CMLUsername != user || own.CMLPassword == "" {
			t.Errorf("with its own: %+v %v", own, err)
		}
		for field, bad := range map[string]func(*launch.Template){
			"root_volume.gb":   func(x *launch.Template) { x.RootVolume = &launch.RootVolume{GB: -1} },
			"root_volume.type": func(x *launch.Template) { x.RootVolume = &launch.RootVolume{Type: "ssd"} },
			"hibernation":      func(x *launch.Template) { x.Hibernation = "maybe" },
			"activity_sources": func(x *launch.Template) { x.ActivitySources = []string{"stars"} },
			"accepted_risks":   func(x *launch.Template) { x.AcceptedRisks = []string{"all"} },
		} {
			x := tmpl
			bad(&x)
			_, err := fl.PutTemplate(ctx, ada, x, 0)
			if e, ok := errors.AsType[*failure.Invalid](err); !ok || e.Field != field {
				t.Errorf("%s: %v", field, err)
			}
		}
	})
}
