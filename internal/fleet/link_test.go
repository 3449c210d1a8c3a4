package fleet_test

import (
	"context"
	"encoding/base64"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/warning"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/store/mem"
)

func linked(t *testing.T) *fleet.Fleet {
	t.Helper()
	seal, err := sealed.NewSealer([]byte(strings.Repeat("k", 32)))
	errtest.None(t, err)
	f, err := fleet.New(fleet.Options{Store: mem.New(mem.Options{}).Client(), ID: "test", Seal: seal,
		Env: settings.Layer{Source: settings.FromEnv, Values: map[string]any{"notify_public_url": "https://lull.example", "notify_time_zone": "Europe/Berlin"}}})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// warned returns a running worker with a pending warning.
func warned(t *testing.T, f *fleet.Fleet) (id string, at time.Time) {
	t.Helper()
	errtest.Get(f.PutTemplate(t.Context(), ada, launch.Template{Name: "small", InstanceType: "m5.large", AMINameFilter: "x", Enabled: true}, 0))(t)
	w, err := f.CreateWorker(t.Context(), ada, fleet.NewWorker{Name: "w", TemplateName: "small"})
	if err != nil {
		t.Fatal(err)
	}
	put(t, f, w.ID, power.WorkerRunning)
	return w.ID, warn(t, f, w.ID)
}

func warn(t *testing.T, f *fleet.Fleet, id string) time.Time {
	t.Helper()
	var at time.Time
	if _, err := f.Change(t.Context(), id, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, tx *worker.Tx) error {
		at = tx.Now
		w.WarningSentAt = &at
		tx.Note(audit.Entry{Action: "pause_warning", Events: []string{audit.EventPauseWarning}})
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return at
}

// TestWarningSentence checks that a warning says what will happen, when and why, and
// mentions idleness only if that is the reason.
func TestWarningSentence(t *testing.T) {
	at := time.Date(2026, 11, 22, 16, 54, 43, 0, time.UTC)
	for want, x := range map[string]warning.Warning{
		"w will be paused at 16:54 UTC because it is not in use":                                                                      {Action: worker.ActionHibernate, Reason: power.ReasonIdleTimeout},
		"w will be drained and stopped at 16:54 UTC because it is not in use":                                                         {Action: "drain", Reason: power.ReasonScaleDown},
		"w will be paused at 16:54 UTC by its schedule office because it is not in use":                                               {Action: worker.ActionStop, Reason: power.ReasonSchedule, Cause: "schedule office"},
		"w will be paused at 16:54 UTC by its schedule office, even if it is in use: Active: cml, last event 20s ago":                 {Action: worker.ActionStop, Reason: power.ReasonSchedule, Cause: "schedule office", Forced: true, Use: "Active: cml, last event 20s ago."},
		"w will be stopped at 16:54 UTC by its ttl_deadline 2026-11-22T16:54:43Z, even if it is in use: Idle for 2m of 1h":            {Action: worker.ActionStop, Reason: power.ReasonTTL, Cause: "ttl_deadline 2026-11-22T16:54:43Z", Forced: true, Use: "Idle for 2m of 1h."},
		"w will be terminated at 16:54 UTC by its ttl_deadline 2026-11-22T16:54:43Z, even if it is in use: Nothing is known to be in": {Action: "terminate", Reason: power.ReasonTTL, Cause: "ttl_deadline 2026-11-22T16:54:43Z", Forced: true, Use: "Nothing is known to be in."},
	} {
		x.PauseAt = at
		if got := x.Sentence("w", time.UTC); got != want {
			t.Errorf("it says %q, want %q", got, want)
		}
	}
}

// TestAnswers checks that each link has its effect, once, and invalidates the others.
func TestAnswers(t *testing.T) {
	for verb, want := range map[string]func(w worker.Worker, pause time.Time) bool{
		warning.Extend: func(w worker.Worker, pause time.Time) bool {
			return w.SnoozedUntil.Equal(pause.Add(time.Hour)) && w.DesiredStatus == power.WorkerRunning
		},
		warning.NotToday: func(w worker.Worker, _ time.Time) bool {
			z, err := time.LoadLocation("Europe/Berlin")
			return err == nil && w.SnoozedUntil.In(z).Format("15:04:05") == "00:00:00" && time.Until(*w.SnoozedUntil) <= 24*time.Hour
		},
		warning.Stop: func(w worker.Worker, _ time.Time) bool {
			return w.DesiredStatus == power.WorkerStopped && w.Intent.Reason == power.ReasonManual && w.ManualPauseCount == 1 && w.LastPausedBy == "link in a warning to ops"
		},
	} {
		t.Run(verb, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := linked(t)
				id, at := warned(t, f)
				pause := at.Add(5 * time.Minute)
				links := f.Links(id, "ops", at, &warning.Warning{PauseAt: pause, Reason: power.ReasonIdleTimeout})
				if len(links) != 3 {
					t.Fatalf("the links are %v", links)
				}
				time.Sleep(time.Minute)
				a := read(t, f, links[verb])
				w, err := f.AnswerWarning(t.Context(), a)
				if err != nil || !want(w, pause) {
					t.Fatalf("it did %+v, %v", w, err)
				}
				for other, link := range links {
					if _, err := f.AnswerWarning(t.Context(), read(t, f, link)); !isRefused(err) {
						t.Errorf("%s after %s: %v", other, verb, err)
					}
				}
				if verb == warning.Stop {
					return
				}
				warn(t, f, id) // links of the previous warning do not answer this one
				if _, err := f.AnswerWarning(t.Context(), a); !isRefused(err) {
					t.Errorf("an old link answers a new warning: %v", err)
				}
			})
		})
	}
}

// TestExtendLife checks that the answer to the warning of a ttl_deadline moves the
// deadline, even that of a stopped worker, and that a warning offers no answer
// without effect.
func TestExtendLife(t *testing.T) {
	for _, status := range []power.Worker{power.WorkerRunning, power.WorkerStopped} {
		t.Run(string(status), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := linked(t)
				id, _ := warned(t, f)
				time.Sleep(time.Second)
				end := time.Now().Add(5 * time.Minute).UTC().Round(0)
				if status == power.WorkerStopped {
					for _, to := range []power.Worker{power.WorkerStopping, power.WorkerStopped} {
						if _, err := f.Change(t.Context(), id, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, _ *worker.Tx) error {
							w.Status, w.DesiredStatus = to, power.WorkerStopped
							return nil
						}); err != nil {
							t.Fatal(err)
						}
					}
				}
				w, err := f.Change(t.Context(), id, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, tx *worker.Tx) error {
					w.TTLDeadline, w.TTLFromTag, w.Intent = &end, true, nil
					w.WarnOfTTL(tx, end, "it is stopped")
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				page, err := f.NewestAudit(t.Context(), audit.Query{WorkerID: id, Action: "pause_warning", Limit: 1})
				if err != nil {
					t.Fatal(err)
				}
				x := page.Entries[0].Warning
				links := f.Links(id, "ops", *w.WarningSentAt, x)
				if want := map[power.Worker]int{power.WorkerRunning: 2, power.WorkerStopped: 1}[status]; len(links) != want || links[warning.NotToday] != "" {
					t.Fatalf("the links are %v", links)
				}
				time.Sleep(time.Minute)
				if w, err = f.AnswerWarning(t.Context(), read(t, f, links[warning.Extend])); err != nil {
					t.Fatal(err)
				}
				if !w.TTLDeadline.Equal(end.Add(time.Hour)) || w.TTLFromTag || w.WarningSentAt != nil || w.SnoozedUntil != nil {
					t.Errorf("it did %+v", w)
				}
				if _, err := f.AnswerWarning(t.Context(), read(t, f, links[warning.Extend])); !isRefused(err) {
					t.Errorf("it is extended twice: %v", err)
				}
			})
		})
	}
}

func read(t *testing.T, f *fleet.Fleet, link string) warning.Answer {
	t.Helper()
	a, err := f.ReadAnswer(time.Now(), strings.TrimPrefix(link, "https://lull.example/answer/"))
	errtest.None(t, err)
	return a
}

// TestLinkEnds checks that a link becomes invalid with time, through activity, and
// through any modification.
func TestLinkEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := linked(t)
		id, at := warned(t, f)
		token := strings.TrimPrefix(f.Links(id, "ops", at, &warning.Warning{PauseAt: at.Add(5 * time.Minute)})[warning.Stop], "https://lull.example/answer/")
		a, err := f.ReadAnswer(time.Now(), token)
		errtest.None(t, err)
		body, sig, _ := strings.Cut(token, ".")
		raw, err := base64.RawURLEncoding.DecodeString(body)
		errtest.None(t, err)
		other := base64.RawURLEncoding.EncodeToString([]byte(strings.Replace(string(raw), `"stop"`, `"extend"`, 1)))
		for _, bad := range []string{"", ".", body, body + ".", "." + sig, other + "." + sig, token + "A", strings.Repeat("A", 5000)} {
			if _, err := f.ReadAnswer(time.Now(), bad); err == nil {
				t.Errorf("%.40q is a link", bad)
			}
		}
		if _, err := f.ReadAnswer(at.Add(20*time.Minute+time.Second), token); err == nil {
			t.Error("a link does not expire")
		}
		errtest.Get(f.UpdateWorkerActivity(t.Context(), id, 0, worker.ActivityUpdate{Telemetry: worker.Telemetry{Newest: time.Now().Add(time.Second), CheckedAt: time.Now()}}, 0))(t)
		if _, err := f.AnswerWarning(context.Background(), a); !isRefused(err) {
			t.Errorf("a worker that is used again is stopped by a link: %v", err)
		}
	})
}

func isRefused(err error) bool {
	r, ok := err.(*failure.Refused)
	return ok && r.Reason == "answered"
}

// FuzzReadAnswer checks that only tokens that lull signed are accepted.
func FuzzReadAnswer(f *testing.F) {
	seal, err := sealed.NewSealer([]byte(strings.Repeat("k", 32)))
	if err != nil {
		f.Fatal(err)
	}
	fl, err := fleet.New(fleet.Options{ID: "test", Seal: seal})
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{"", "a.b", "eyJ3IjoiYSJ9.AAAA", "...", "eyJ3IjoiYSJ9." + strings.Repeat("A", 43)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, token string) {
		if a, err := fl.ReadAnswer(time.Unix(0, 0), token); err == nil {
			t.Errorf("%q is %+v", token, a)
		}
	})
}
