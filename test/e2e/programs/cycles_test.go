package programs

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/host/daemontest"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/hostctl"
)

// comeAndGo repeatedly lets the program fall asleep by its timer and a client
// wake it, n times. visit is a whole client: it connects, works, checks every
// answer and disconnects.
func (w *workload) comeAndGo(n int, visit func(cycle int)) {
	w.T.Helper()
	before := w.get()
	asleep := func(visits int) hostctl.Instance {
		w.T.Helper()
		// A client is answered before its wake is reported.
		return w.Until(w.name, "it is paused again", func(o hostctl.Instance) bool {
			return o.State == "paused" && o.WakeCount >= before.WakeCount+uint64(visits)
		})
	}
	for c := range n {
		asleep(c)
		visit(c)
	}
	after := asleep(n)
	paused, woken := after.PauseCount-before.PauseCount, after.WakeCount-before.WakeCount
	w.T.Logf("%s: %d visits, paused %d times, woken %d times", w.name, n, paused, woken)
	if int(paused) < n || int(woken) < n {
		w.T.Errorf("%s went through %d pauses and %d wakes, want at least %d of each", w.name, paused, woken, n)
	}
	if after.RestartCount != 0 || after.LastPausedBy != "idle_timeout" {
		w.T.Errorf("%s: %d restarts, paused by %s; want none, and by its idleness", w.name, after.RestartCount, after.LastPausedBy)
	}
}

// hammer forces pauses of the program repeatedly while work runs, with open
// connections and requests in progress. It returns when work has returned and the
// program is resumed.
//
// A forced pause can delay an answer for which no further traffic arrives, so
// each is followed by a resume. No request to the daemon is canceled: the daemon
// would still carry it out, and a pause without a resume would freeze the answer
// to the next client.
func (w *workload) hammer(work func()) {
	w.T.Helper()
	var frozen, gaveWay int
	before, worked := w.get(), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for more := true; more; {
			_, err := w.Do(w.T.Context(), w.name, "pause", url.Values{"force": {"true"}})
			var refused *httpx.Problem
			switch {
			case err == nil:
				frozen++
			case errors.As(err, &refused) && refused.Status == http.StatusConflict:
				gaveWay++ // a client came between the freeze and the commit
			default:
				w.T.Errorf("cannot pause %s by force: %v", w.name, err)
				more = false
			}
			select {
			case <-time.After(5 * time.Millisecond):
			case <-worked:
				more = false
			}
			if _, err := w.Do(w.T.Context(), w.name, "resume", nil); err != nil {
				w.T.Errorf("cannot resume %s: %v", w.name, err)
				more = false
			}
		}
	})
	func() {
		defer wg.Wait() // deferred, because work may end the test
		defer close(worked)
		work()
	}()
	w.T.Logf("%s under load: %d forced pauses took, %d gave way to a client after the freeze, %d wakes",
		w.name, frozen, gaveWay, w.get().WakeCount-before.WakeCount)
	if frozen+gaveWay == 0 {
		w.T.Errorf("%s was never frozen under load", w.name)
	}
}

// awaiting records what a client is waiting for, as evidence in case no answer
// arrives. The caller must call answered when the client is done.
func (w *workload) awaiting(what string) (answered func()) {
	return w.Awaiting(w.name, what, w.inside)
}

// client runs a client program, which must succeed, and returns its output.
func (w *workload) client(name string, args ...string) string {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(w.T.Context(), daemontest.WaitLimit)
	defer cancel()
	defer w.awaiting(name)()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		w.T.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// installed returns the path of a program from a Debian package, or skips the
// test if it is not installed.
func installed(t *testing.T, pkg string, paths ...string) string {
	t.Helper()
	var err error
	for _, p := range paths {
		var found string
		if found, err = exec.LookPath(p); err == nil {
			return found
		}
	}
	daemontest.Need(t, err, pkg)
	return ""
}

// holdsWhileOpen checks that the program stays awake without traffic while a
// connection is open (the default policy).
func (w *workload) holdsWhileOpen() {
	w.T.Helper()
	before := w.get().PauseCount
	w.Until(w.name, "the idle connection outlasts the timeout", func(o hostctl.Instance) bool {
		if o.PauseCount != before {
			w.T.Fatalf("%s was paused although a connection is open", w.name)
		}
		for _, b := range o.Blocks {
			if b.Code == "connection_open" && o.LastResumedAt != nil && time.Since(*o.LastResumedAt) > 5*pauseAfter {
				return true
			}
		}
		return false
	})
}
