package instance

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
	"lull/internal/protocol/hostctl"
)

// TestNarrateTellsOfTheQueue checks what a user sees who starts an instance that must
// wait for memory: why, its place in the queue, and when it continues, but not every
// change of the free memory.
func TestNarrateTellsOfTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		c := verbs{&client.Session{Term: term.Term{Err: &out, Getenv: func(string) string { return "" }}}}
		until := time.Now().Add(45 * time.Second)
		waits := func(place int, why string) *hostctl.Waiting {
			return &hostctl.Waiting{Place: place, Reason: why, Until: until}
		}
		looks := []hostctl.Instance{
			{Name: "b", State: "stopped", StatusReason: "created", Waiting: waits(2, "others are first in the queue for memory")},
			{Name: "b", State: "stopped", StatusReason: "created", Waiting: waits(1, "it may take 700.0 MiB more, and 20.0 MiB of 1.0 GiB are free")},
			{Name: "b", State: "stopped", StatusReason: "created", Waiting: waits(1, "it may take 700.0 MiB more, and 21.0 MiB of 1.0 GiB are free")},
			{}, // no answer
			{Name: "b", State: "starting", StatusReason: "started by a user"},
			{Name: "b", State: "starting", StatusReason: "started by a user"},
		}
		ctx, stop := context.WithCancel(t.Context())
		c.narrate(ctx, c.Progress(), func() (hostctl.Instance, error) {
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
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		want := [][]string{{"b stopped", " 2 ", at, "first in the queue"}, {"b stopped", " 1 ", at, "700.0 MiB", "20.0 MiB of 1.0 GiB"}, {"b ", "starting"}}
		if len(lines) != len(want) {
			t.Fatalf("%d lines, want %d:\n%s", len(lines), len(want), out.String())
		}
		for i, words := range want {
			for _, w := range words {
				if !strings.Contains(lines[i], w) {
					t.Errorf("%q does not contain %q", lines[i], w)
				}
			}
		}
	})
}
