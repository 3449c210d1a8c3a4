package agent

import (
	"context"
	"fmt"
	"time"

	"lull/internal/protocol/tags"
)

// tagWriter keeps the current and the wanted state tags. It is owned by the loop.
type tagWriter struct {
	have    tags.State
	known   bool // have is known, from reading or writing the tags
	writing bool
	tryAt   time.Time // earliest time of the next attempt after a failure
	ended   string    // final value for the action tag, if an action's outcome has not been written yet
}

// seen records the state tags that were read from the instance, unless a write is in
// progress, whose values are newer.
func (w *tagWriter) seen(s tags.State) {
	if w.writing {
		return
	}
	w.have, w.known = s, true
}

// final sets the outcome of an action as the next value of the action tag.
func (w *tagWriter) final(action string) {
	switch action {
	case actionHibernate:
		w.ended = tags.ActionHibernated
	case actionStop:
		w.ended = tags.ActionStopped
	}
}

// writeTags changes the state tags to want, outside the loop, if they differ. The
// action tag is replaced but never removed.
func (a *Agent) writeTags(want tags.State) {
	w := &a.tagged
	now := a.now()
	if w.writing || now.Before(w.tryAt) {
		return
	}
	if w.ended != "" {
		want = tags.State{Action: w.ended}
	} else if w.known && w.have.Status == want.Status && (want.Since.IsZero() || sameSecond(w.have.Since, want.Since)) &&
		(want.Action == "" || w.have.Action == want.Action) {
		return
	}
	w.writing = true
	ended := w.ended != ""
	a.beside(tagLimit, func(ctx context.Context) func() {
		err := a.o.Cloud.WriteTags(ctx, want.Encode(a.o.Prefix))
		return func() {
			w.writing = false
			a.alarmIf(err != nil, "tags_unwritten", fmt.Sprintf("The state tags cannot be written: %v.", err))
			if err != nil {
				w.tryAt = a.now().Add(retryAfter)
				return
			}
			if ended {
				w.ended = ""
				if w.have.Action = want.Action; want.Action == tags.ActionNone {
					w.have.Action = ""
				}
				return
			}
			a.merged(want)
		}
	})
}

// merged records that want was written.
func (a *Agent) merged(want tags.State) {
	w := &a.tagged
	w.known = true
	if want.Status != "" {
		w.have.Status = want.Status
	}
	if !want.Since.IsZero() {
		w.have.Since = want.Since
	}
	if want.Action != "" {
		w.have.Action = want.Action
	}
}

func sameSecond(a, b time.Time) bool { return a.Unix() == b.Unix() }
