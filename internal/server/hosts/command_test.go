package hosts

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/protocol/control"
)

// inBubble runs f in a bubble with a host, desk, that accepts commands and has one
// instance, a.
func inBubble(t *testing.T, f func(t *testing.T, h *Hosts)) {
	synctest.Test(t, func(t *testing.T) {
		h := New("v1", "")
		r := report(1, 0, "a")
		r.Commands = true
		h.take(t, "a report", r, false)
		f(t, h)
	})
}

// gives gives a command to desk until ctx ends. The channel receives the reply.
func (h *Hosts) gives(ctx context.Context, c control.HostCommand) <-chan control.HostReply {
	out := make(chan control.HostReply, 1)
	go func() { out <- h.Command(ctx, "desk", c) }()
	synctest.Wait()
	return out
}

// polls polls for a command as desk does, and delivers answers.
func (h *Hosts) polls(ctx context.Context, answers ...control.HostReply) <-chan control.HostQuestions {
	out := make(chan control.HostQuestions, 1)
	go func() { out <- h.Turn(ctx, "desk", answers, 25*time.Second) }()
	synctest.Wait()
	return out
}

var pauseA = control.HostCommand{ID: "c1", Verb: control.HostPause, Instance: "a"}

// TestCommandIsHandedOverOnce checks that exactly one poll gets a command, that it
// names the instance by ID, and that the reply reaches the caller.
func TestCommandIsHandedOverOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, h *Hosts) {
		reply := h.gives(t.Context(), pauseA)
		if q := h.Turn(t.Context(), "desk", nil, 0); len(q.Commands) != 0 {
			t.Errorf("a turn that does not wait got %+v", q.Commands)
		}
		time.Sleep(time.Second)
		q := <-h.polls(t.Context())
		if len(q.Commands) != 1 || q.Commands[0].Instance != "id-a" || time.Duration(q.Commands[0].Valid) != control.HostCommandFetch || q.Waited != 0 {
			t.Fatalf("handed over: %+v", q)
		}
		second := h.polls(t.Context())
		time.Sleep(5 * time.Second)
		h.Turn(t.Context(), "desk", []control.HostReply{{ID: "c1", Done: &control.HostDone{}}}, 0)
		if a := <-reply; a.Done == nil {
			t.Errorf("the reply is %+v", a)
		}
		if q := <-second; len(q.Commands) != 0 || time.Duration(q.Waited) != 25*time.Second {
			t.Errorf("handed over again: %+v", q)
		}
	})
}

// TestCommandIsWithdrawn checks that a command that the host did not fetch in time,
// or before its caller gave up, is never handed over.
func TestCommandIsWithdrawn(t *testing.T) {
	inBubble(t, func(t *testing.T, h *Hosts) {
		began := time.Now()
		if a := <-h.gives(t.Context(), pauseA); a.Code != control.HostNotCarriedOut || time.Since(began) != control.HostCommandFetch {
			t.Errorf("not fetched, after %s: %+v", time.Since(began), a)
		}
		ctx, gone := context.WithCancel(t.Context())
		reply := h.gives(ctx, pauseA)
		gone()
		if a := <-reply; a.Code != control.HostNotCarriedOut {
			t.Errorf("the caller is gone: %+v", a)
		}
		if q := <-h.polls(t.Context()); len(q.Commands) != 0 {
			t.Errorf("fetched later: %+v", q.Commands)
		}
	})
}

// TestCommandWithoutAnswer checks that the outcome of a fetched command is unknown if
// no reply arrives in time, and that a late reply changes nothing.
func TestCommandWithoutAnswer(t *testing.T) {
	inBubble(t, func(t *testing.T, h *Hosts) {
		began := time.Now()
		poll := h.polls(t.Context())
		reply := h.gives(t.Context(), pauseA)
		if q := <-poll; len(q.Commands) != 1 {
			t.Fatalf("handed over: %+v", q)
		}
		if a := <-reply; a.Code != control.HostOutcomeUnknown || time.Since(began) != control.HostCommandWait {
			t.Errorf("not answered, after %s: %+v", time.Since(began), a)
		}
		h.Turn(t.Context(), "desk", []control.HostReply{{ID: "c1", Done: &control.HostDone{}}}, 0)
		if len(h.byID["desk"].asked) != 0 {
			t.Error("a command that no caller waits for is kept")
		}
	})
}

// TestDeadPollGetsNoCommand checks that a poll gets no command if its connection has
// ended or a newer poll of the host has replaced it.
func TestDeadPollGetsNoCommand(t *testing.T) {
	inBubble(t, func(t *testing.T, h *Hosts) {
		ctx, gone := context.WithCancel(t.Context())
		dead := h.polls(ctx)
		old := h.polls(t.Context())
		if q := <-dead; len(q.Commands) != 0 {
			t.Errorf("the replaced poll got %+v", q.Commands)
		}
		gone()
		dead = h.polls(ctx)
		if q := <-dead; len(q.Commands) != 0 {
			t.Errorf("the dead poll got %+v", q.Commands)
		}
		<-old
		newest := h.polls(t.Context())
		h.gives(t.Context(), pauseA)
		if q := <-newest; len(q.Commands) != 1 {
			t.Errorf("the newest poll got %+v", q)
		}
		time.Sleep(time.Minute) // until the caller has given up
	})
}

// TestCommandIsRefused checks which commands are refused without reaching the host.
func TestCommandIsRefused(t *testing.T) {
	inBubble(t, func(t *testing.T, h *Hosts) {
		if a := h.Command(t.Context(), "none", pauseA); a.Code != control.HostNotCarriedOut {
			t.Errorf("an unknown host: %+v", a)
		}
		poll := h.polls(t.Context())
		first := h.gives(t.Context(), pauseA)
		<-poll
		if a := h.Command(t.Context(), "desk", pauseA); a.Code != control.HostNotCarriedOut {
			t.Errorf("an ID in use: %+v", a)
		}
		if a := <-first; a.Code != control.HostOutcomeUnknown {
			t.Errorf("the first: %+v", a)
		}
		h.take(t, "it accepts none now", report(2, 1), false)
		if a := h.Command(t.Context(), "desk", pauseA); a.Code != control.HostCommandsOff {
			t.Errorf("off: %+v", a)
		}
		time.Sleep(time.Minute)
		r := report(3, 2)
		r.Commands = true
		h.take(t, "it accepts them again", r, false)
		time.Sleep(time.Minute)
		if a := h.Command(t.Context(), "desk", pauseA); a.Code != control.HostNotCarriedOut {
			t.Errorf("silent: %+v", a)
		}
	})
}
