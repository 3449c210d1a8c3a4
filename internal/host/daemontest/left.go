package daemontest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"lull/internal/protocol/hostctl"
)

// LeavesCommand starts a command that ignores SIGTERM inside an instance, and then
// closes the request. It checks that the command is listed and prevents automatic
// pauses while it runs, and that it is killed afterwards. The processes of the
// instance must be visible on this machine.
func (h *Host) LeavesCommand(name string) {
	h.T.Helper()
	const mark = "left-behind"
	ctx, leave := context.WithCancel(h.T.Context())
	defer leave()
	gone := make(chan error, 1)
	go func() {
		_, err := h.Exec(ctx, name, hostctl.ExecRequest{Command: []string{"sh", "-c", "trap '' TERM; while :; do sleep 0.2; done", mark}})
		gone <- err
	}()
	Wait(h.T, "the command runs", func() (bool, string) { return running(mark) > 0, fmt.Sprint(running(mark)) })
	y, err := h.Why(h.T.Context(), name, time.Time{})
	if err != nil || !strings.Contains(y.Answer, "A command runs beside it: sh -c trap '' TERM") {
		h.T.Errorf("why says %q, %v", y.Answer, err)
	}
	if _, err := h.Do(h.T.Context(), name, "pause", nil); err == nil || !strings.Contains(err.Error(), "A command runs beside it") {
		h.T.Errorf("paused under a command: %v", err)
	}
	leave()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		h.T.Errorf("who left was told %v", err)
	}
	Wait(h.T, "the command is ended", func() (bool, string) { return running(mark) == 0, fmt.Sprint(running(mark)) })
	Wait(h.T, "nothing holds it", func() (bool, string) {
		y, err := h.Why(h.T.Context(), name, time.Time{})
		return err == nil && !strings.Contains(y.Answer, "A command runs"), fmt.Sprint(y.Answer, err)
	})
}

// running returns the PID of a process whose last argument is last, or 0.
func running(last string) int {
	ents, _ := os.ReadDir("/proc")
	for _, e := range ents {
		b, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err == nil && bytes.HasSuffix(b, []byte("\x00"+last+"\x00")) {
			var pid int
			if _, err := fmt.Sscan(e.Name(), &pid); err == nil {
				return pid
			}
		}
	}
	return 0
}
