package agent

import (
	"context"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"lull/internal/link/agentctl"
)

// Warning is what people are told before an action.
type Warning struct {
	Reason   string    `json:"reason"` // idle_timeout, ttl, completion
	Action   string    `json:"action"`
	At       time.Time `json:"at"` // the earliest moment of the action
	Sentence string    `json:"sentence"`
	URL      string    `json:"-"` // of the webhook; empty for none
}

// Text is the warning for a terminal.
func (w Warning) Text() string {
	what := map[string]string{"stop": "stopped", "hibernate": "hibernated", "terminate": "terminated (its disks may be deleted)"}[w.Action]
	if what == "" {
		what = "ended"
	}
	s := fmt.Sprintf("%s It will be %s at %s.", w.Sentence, what, w.At.Format("15:04:05 MST"))
	if w.Reason == reasonIdle {
		s += "\nTo keep it: press a key in your session, or run: lull agent snooze 2h"
	}
	return s
}

// warn tells people, beside the loop. The span in ctx is of what decided it.
func (a *Agent) warn(ctx context.Context, w Warning) {
	_, s := a.span(ctx, "agent.warning")
	s.SetAttributes(attribute.String("lull.reason", w.Reason), attribute.String("lull.action", w.Action))
	a.warning = s.SpanContext()
	a.counters.Warnings++
	a.record(agentctl.Entry{Kind: "warning", Sentence: w.Sentence + " " + w.Action + " from " + w.At.Format(time.RFC3339) + "."})
	a.log.Info("warning", "reason", w.Reason, "action", w.Action, "at", w.At)
	if a.o.Warner == nil {
		s.End()
		return
	}
	w.URL = a.config.NotifyURL
	a.beside(warnLimit, func(ctx context.Context) func() {
		err := a.o.Warner.Warn(ctx, w)
		failedWith(s, err)
		s.End()
		return func() {
			a.alarmIf(err != nil, "warning_undelivered", fmt.Sprintf("A warning did not reach everybody: %v.", err))
			a.save(nil) // the time of our write to terminals
		}
	})
}
