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

// comeAndGo lets the program fall asleep by itself and a client wake it,
// repeatedly. visit is a complete client: it connects, works, checks every
// answer and disconnects.
func (w *workload) comeAndGo(n int, visit func(cycle int)) {
	w.T.Helper()
	before := w.get()
	for c := range n {
		w.awaitState("paused")
		visit(c)
	}
	w.awaitState("paused")
	after := w.get()
	paused, woken := after.PauseCount-before.PauseCount, after.WakeCount-before.WakeCount
	w.T.Logf("%s: %d visits, paused %d times, woken %d times", w.name, n, paused, woken)
	if int(paused) < n || int(woken) < n {
		w.T.Errorf("%s went through %d pauses and %d wakes, want at least %d of each", w.name, paused, woken, n)
	}
	if after.RestartCount != 0 || after.LastPausedBy != "idle_timeout" {
		w.T.Errorf("%s: %d restarts, paused by %s; want none, and by its idleness", w.name, after.RestartCount, after.LastPausedBy)
	}
}

// hammer pauses the program by force, again and again, while work runs: with
// open connections and requests in progress. A forced pause can stop an answer
// that no further traffic would release, so hammer also resumes shortly
// afterwards. It returns when work does.
func (w *workload) hammer(work func()) {
	w.T.Helper()
	ctx, cancel := context.WithCancel(w.T.Context())
	var frozen, gaveWay int
	before := w.get()
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			_, err := w.Do(ctx, w.name, "pause", url.Values{"force": {"true"}})
			var refused *httpx.Problem
			switch {
			case err == nil:
				frozen++
			case errors.As(err, &refused) && refused.Status == http.StatusConflict:
				gaveWay++ // a client came between the freeze and the commit
				err = nil
			}
			select {
			case <-time.After(5 * time.Millisecond):
			case <-ctx.Done():
			}
			if err == nil {
				_, err = w.Do(ctx, w.name, "resume", nil)
			}
			if err != nil && ctx.Err() == nil {
				w.T.Errorf("cannot pause and resume %s by force: %v", w.name, err)
			}
		}
	})
	work()
	cancel()
	wg.Wait()
	w.T.Logf("%s under load: %d forced pauses took, %d gave way to a client after the freeze, %d wakes",
		w.name, frozen, gaveWay, w.get().WakeCount-before.WakeCount)
	if frozen+gaveWay == 0 {
		w.T.Errorf("%s was never frozen under load", w.name)
	}
}

// client runs a program that must succeed, and returns its output.
func client(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), daemontest.WaitLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// installed finds a program of a Debian package or skips the test.
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

// holdsWhileOpen expects the program to stay awake without traffic because a
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
