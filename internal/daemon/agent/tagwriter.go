package agent

import (
	"context"
	"fmt"
	"time"

	"lull/internal/link/tags"
)

// tagWriter knows what the state tags say and what they should say. It belongs
// to the loop.
type tagWriter struct {
	have    tags.State
	known   bool // have has been read or written
	writing bool
	tryAt   time.Time // not before, after a failure
	ended   string    // the final form of an action that an earlier agent left unwritten
}

// seen notes what was read from the instance. What is being written is newer.
func (w *tagWriter) seen(s tags.State) {
	if w.writing {
		return
	}
	w.have, w.known = s, true
}

// final has the outcome of an action written before anything else.
func (w *tagWriter) final(action string) {
	switch action {
	case actionHibernate:
		w.ended = tags.ActionHibernated
	case actionStop:
		w.ended = tags.ActionStopped
	}
}

// writeTags brings the state tags to want, beside the loop, if they say
// something else. The action is only ever replaced, never taken away.
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

// merged notes that want has been written.
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
