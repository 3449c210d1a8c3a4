package host

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"

	"lull/internal/core/instance"
	"lull/internal/host/logs"
	"lull/internal/protocol/hostctl"
)

// Logs writes the output of an instance, oldest first. If l.Follow is set, it
// continues with new output until ctx ends or the instance is removed.
func (h *Host) Logs(ctx context.Context, w http.ResponseWriter, id string, l hostctl.Logs) error {
	i, err := h.find(id)
	if err != nil {
		return err
	}
	keeper, ok := i.rt.(instance.ConsoleKeeper)
	if l.Console && !ok {
		return &RefusedError{Name: i.name(), What: "show the console of", Reason: "runtime " + i.spec().Runtime + " has no kernel log: only a microvm has its own kernel"}
	}
	if i.spec().Adopted != nil {
		return &RefusedError{Name: i.name(), What: "show the output of", Reason: "lull did not start it; it writes where it did before"}
	}
	if r, ok := i.rt.(instance.LogReader); ok {
		return r.Logs(ctx, id, logs.Flushing(w), l)
	}
	return logs.Copy(ctx, w, l, func() (string, error) {
		if _, err := h.find(id); err != nil {
			return "", err
		}
		if l.Console {
			return keeper.Console(ctx, id)
		}
		return i.logPath(), nil
	})
}

// logPath returns the path of the file to which the program's output goes.
func (i *inst) logPath() string { return filepath.Join(i.h.cfg.LogDir, i.id+".log") }

// shownLines is how many lines of output the error of a failed start contains.
const shownLines = 10

// Discard removes an instance that did not start because of cause. It returns cause
// with the last lines of the instance's output. If a user has acted on the instance
// meanwhile, it is kept.
func (h *Host) Discard(ctx context.Context, id string, cause error) error {
	if refused, is := errors.AsType[*RefusedError](cause); is && refused.Overtaken {
		return cause
	}
	i, err := h.find(id)
	if err != nil {
		return cause
	}
	printed := i.lastOutput(ctx)
	if err := h.Delete(ctx, id, ByManual); err != nil {
		return errors.Join(cause, fmt.Errorf("it was not removed: %w", err))
	}
	if printed != "" {
		cause = fmt.Errorf("%w\nIts last output:\n%s", cause, printed)
	}
	return cause
}

// lastOutput returns the last lines of an instance's output, or "" if they cannot
// be read.
func (i *inst) lastOutput(ctx context.Context) string {
	if r, ok := i.rt.(instance.LogReader); ok {
		var b strings.Builder
		_ = r.Logs(ctx, i.id, &b, instance.LogQuery{Tail: shownLines}) // after an error, what was read is shown
		return b.String()
	}
	text, err := logs.Tail(i.logPath(), shownLines)
	if err != nil {
		return ""
	}
	return text
}
