package fleet_test

import (
	"errors"
	"testing"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
)

// TestEnrolling checks that an enrollment secret is valid for an hour, for one
// launch, and only while its worker exists.
func TestEnrolling(t *testing.T) {
	bubble(t, nil, func(t *testing.T, fl *fleet.Fleet) {
		w := create(t, fl)
		launched := time.Now()
		call := func(generation int64, agent bool) {
			t.Helper()
			if _, err := fl.Change(t.Context(), w.ID, fleet.Changing{By: audit.ByController}, func(w *worker.Worker, _ *worker.Tx) error {
				w.Launch = &worker.Launch{Generation: generation, Agent: agent, ResolvedAt: launched}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		secret, err := fl.EnrollSecret(w.ID, 1)
		if err != nil {
			t.Fatal(err)
		}
		reason := func(at time.Time, secret string) string {
			_, err := fl.Enrolling(t.Context(), at, secret)
			no, refused := errors.AsType[*failure.Refused](err)
			switch {
			case err == nil:
				return "good"
			case errors.Is(err, launch.ErrEnrollment):
				return "bad"
			case refused:
				return no.Reason
			}
			return err.Error()
		}
		check := func(what string, at time.Time, secret, want string) {
			t.Helper()
			if got := reason(at, secret); got != want {
				t.Errorf("%s: %s, want %s", what, got, want)
			}
		}
		check("before the launch", launched, secret, "bad")
		call(1, false)
		check("of a launch without the agent", launched, secret, "bad")
		call(1, true)
		check("at the launch", launched, secret, "good")
		check("after an hour", launched.Add(time.Hour), secret, "good")
		check("after more than an hour", launched.Add(time.Hour+1), secret, "enrollment_expired")
		check("a changed one", launched, secret[:len(secret)-1], "bad")
		call(2, true)
		check("of an earlier launch", launched, secret, "bad")
		call(1, true)
		put(t, fl, w.ID, power.WorkerTerminating)
		check("of a worker that is terminated", launched, secret, "bad")
	})
}
