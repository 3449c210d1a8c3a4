package host

import (
	"context"
	"net/http"
	"path/filepath"

	"lull/internal/core/instance"
	"lull/internal/host/logs"
	"lull/internal/protocol/hostctl"
)

// Logs writes what an instance has printed, oldest first. With follow it
// continues with new output until ctx ends or the instance is gone.
func (h *Host) Logs(ctx context.Context, w http.ResponseWriter, id string, l hostctl.Logs) error {
	i, err := h.find(id)
	if err != nil {
		return err
	}
	keeper, ok := i.rt.(instance.ConsoleKeeper)
	if l.Console && !ok {
		return &RefusedError{Name: i.name(), What: "show the console of", Reason: "runtime " + i.spec().Runtime + " has none: only a microvm has a kernel of its own"}
	}
	if r, ok := i.rt.(instance.LogReader); ok {
		return r.Logs(ctx, id, logs.Flushing(w), l.Tail, l.Follow)
	}
	return logs.Copy(ctx, w, l.Tail, l.Follow, func() (string, error) {
		if _, err := h.find(id); err != nil {
			return "", err
		}
		if l.Console {
			return keeper.Console(ctx, id)
		}
		return i.logPath(), nil
	})
}

// logPath is the file to which the program's output goes.
func (i *inst) logPath() string { return filepath.Join(i.h.cfg.LogDir, i.id+".log") }
