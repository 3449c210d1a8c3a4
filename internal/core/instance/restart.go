package instance

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"lull/internal/core/idle"
)

// Limits of restarts.
const (
	crashUptime = 10 * time.Second // a run that fails within this time is a crash
	crashWindow = 2 * time.Minute
	crashLimit  = 5                // this many crashes within the window are a crash loop
	RestartMax  = 30 * time.Second // the longest delay before a restart
)

// ApplyRestartRule decides whether and when the program is restarted after the
// exit e at now, and counts crashes. The caller must store the result together
// with the exit, so that neither is recorded without the other. The uptime of the
// run counts, not the time since its last activity. Leases belong to the instance
// and not to the run, so a restart keeps them.
func (r *Record) ApplyRestartRule(e Exit, now time.Time) {
	failed := e.Code != 0 && !e.Lost
	if failed && e.At.Sub(r.StartedAt) < crashUptime {
		r.Crashes = append(slices.Clip(r.Crashes), now)
	}
	for len(r.Crashes) > 0 && now.Sub(r.Crashes[0]) > crashWindow {
		r.Crashes = r.Crashes[1:]
	}
	rule := cmp.Or(r.Spec.Restart, RestartOnFailure)
	again := r.Enabled && (rule == RestartAlways || rule == RestartOnFailure && (failed || e.Lost))
	if len(r.Crashes) >= crashLimit {
		r.CrashLooping, again = true, false
		r.StatusReason += fmt.Sprintf("; it failed %d times within %s, so it is not restarted automatically", len(r.Crashes), idle.Human(crashWindow))
	}
	r.RestartAt = time.Time{}
	if !again {
		r.Leases = nil
	} else {
		r.RestartAt = now.Add(min(time.Second<<min(len(r.Crashes), 5), RestartMax))
		if len(r.Crashes) == 0 {
			r.RestartAt = now.Add(100 * time.Millisecond)
		}
		r.RestartCount++
	}
}
