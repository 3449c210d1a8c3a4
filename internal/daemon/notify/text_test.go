package notify_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"lull/internal/fleet"
	"lull/internal/store"
)

// said delivers an entry to a chat and returns what it says there.
func said(ctx context.Context, e fleet.Entry) (string, error) {
	w := newTown(`{"ops":{"type":"slack","url":"env:ADDRESS"}}`, 1, "NOTIFY_PUBLIC_URL=https://lull.example", "NOTIFY_TIME_ZONE=UTC")
	got := make(chan string, 10)
	w.peer.answer = func(_ int, _ *http.Request, body []byte) int {
		var m struct{ Text string }
		if err := json.Unmarshal(body, &m); err != nil {
			return http.StatusBadRequest
		}
		got <- m.Text
		return http.StatusOK
	}
	end, err := w.serve()
	if err != nil {
		return "", err
	}
	defer func() { end() }()
	p, err := w.notifier(ctx)
	if err != nil {
		return "", err
	}
	defer func() { p.end() }()
	time.Sleep(10 * time.Second) // the channel begins
	ops, err := fleet.EntryOps(e)
	if err != nil {
		return "", err
	}
	if _, err := w.writer.Commit(ctx, store.Txn{Then: ops}); err != nil {
		return "", err
	}
	select {
	case text := <-got:
		return text, nil
	case <-time.After(time.Hour):
		return "", fmt.Errorf("nothing was said of %s", e.Action)
	}
}

// TestWarningText: what people are told of a warning is that warning: its time,
// its cause, and the links that can change something.
func TestWarningText(t *testing.T) {
	at := time.Date(2026, 11, 22, 16, 54, 43, 0, time.UTC)
	for name, c := range map[string]struct {
		warning fleet.Warning
		want    string
		links   int
	}{
		"idle": {fleet.Warning{PauseAt: at, Action: "stop", Reason: fleet.ReasonIdleTimeout}, "r1 will be paused at 16:54 UTC, since nobody uses it.", 3},
		"ttl": {fleet.Warning{PauseAt: at, Action: "terminate", Reason: fleet.ReasonTTL, Cause: "ttl_deadline 2026-11-22T16:54:43Z", Forced: true, Use: "Active: cml."},
			"r1 will be terminated at 16:54 UTC by its ttl_deadline 2026-11-22T16:54:43Z, used or not: Active: cml.", 1},
		"forced": {fleet.Warning{PauseAt: at, Action: "stop", Reason: fleet.ReasonSchedule, Cause: "schedule office", Forced: true, Use: "Active: cml."},
			"r1 will be paused at 16:54 UTC by its schedule office, used or not: Active: cml.", 3},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(ctx context.Context) error {
				text, err := said(ctx, fleet.Entry{Action: "pause_warning", Events: []string{fleet.EventPauseWarning}, WorkerID: "w1", WorkerName: "r1",
					Reason: string(c.warning.Reason), Detail: "of the log", Warning: &c.warning})
				if err != nil {
					return err
				}
				first, _, _ := strings.Cut(text, "\n")
				if first != c.want || strings.Count(text, "https://lull.example/answer/") != c.links || !strings.Contains(text, "|Stop now>") {
					return fmt.Errorf("it says %q, want %q and %d links", text, c.want, c.links)
				}
				return nil
			})
		})
	}
}
