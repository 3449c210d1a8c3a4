package main

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/fleet"
	"lull/internal/link/hostctl"
	"lull/internal/power"
)

// TestReachSaysWhyNot: who waits for a stop that was called off is told why.
func TestReachSaysWhyNot(t *testing.T) {
	w := fleet.Worker{Name: "cml-3", Status: power.WorkerRunning, DesiredStatus: power.WorkerRunning,
		StopCalledOff: &fleet.CalledOff{Why: "EC2 refused the stop: UnauthorizedOperation"}}
	_, err := reach(power.WorkerStopped).met(w)
	if err == nil || !strings.Contains(err.Error(), "the stop was called off: EC2 refused the stop: UnauthorizedOperation") {
		t.Error(err)
	}
}

// TestNarrateTellsOfTheQueue: who starts an instance that waits for memory is told
// why, at which place, and when it continues; not of each change of what is free.
func TestNarrateTellsOfTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		c := &cli{err: &out}
		until := time.Now().Add(45 * time.Second)
		waits := func(place int, why string) *hostctl.Waiting {
			return &hostctl.Waiting{Place: place, Reason: why, Until: until}
		}
		looks := []hostctl.Instance{
			{Name: "b", State: "stopped", StatusReason: "created", Waiting: waits(2, "others wait for memory before it")},
			{Name: "b", State: "stopped", StatusReason: "created", Waiting: waits(1, "it may take 700.0 MiB more, and 20.0 MiB of 1.0 GiB are free")},
			{Name: "b", State: "stopped", StatusReason: "created", Waiting: waits(1, "it may take 700.0 MiB more, and 21.0 MiB of 1.0 GiB are free")},
			{}, // no answer
			{Name: "b", State: "starting", StatusReason: "started by a person"},
			{Name: "b", State: "starting", StatusReason: "started by a person"},
		}
		ctx, stop := context.WithCancel(t.Context())
		c.narrate(ctx, func() (hostctl.Instance, error) {
			o := looks[0]
			if looks = looks[1:]; len(looks) == 0 {
				stop()
			}
			if o.Name == "" {
				return o, errors.New("no answer")
			}
			return o, nil
		})
		at := until.Local().Format(time.TimeOnly)
		want := "TIME  b stopped, waits at place 2 until " + at + ": others wait for memory before it\n" +
			"TIME  b stopped, waits at place 1 until " + at + ": it may take 700.0 MiB more, and 20.0 MiB of 1.0 GiB are free\n" +
			"TIME  b goes on: starting started by a person\n"
		if got := regexp.MustCompile(`(?m)^\d\d:\d\d:\d\d`).ReplaceAllString(out.String(), "TIME"); got != want {
			t.Errorf("told:\n%swant:\n%s", got, want)
		}
	})
}
