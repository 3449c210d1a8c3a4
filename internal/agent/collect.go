package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"
)

// collect reads, outside the loop, everything that is not a signal: the completion
// file, the pending timers, and the state of the server connection. At most one read
// of each is in progress.
func (a *Agent) collect(time.Time) {
	path := a.config.CompletionFile
	a.once("completion file", func(context.Context) func() {
		written, err := a.o.Disk.Completed(path)
		return func() {
			bad := err != nil && !errors.Is(err, fs.ErrNotExist)
			a.alarmIf(bad, "completion_file", fmt.Sprintf("The completion file is ignored: %v.", err))
			if !written.IsZero() && !written.Equal(a.state.Obeyed) && a.state.Completed == nil {
				a.completed(completion{BootID: a.o.BootID, At: a.now(), By: "file " + path, Status: "success", FileAt: written})
				a.save(nil)
			}
			if c := a.state.Completed; c != nil && c.FileAt.IsZero() {
				c.FileAt = written // the same completion was also signaled by the file
			}
		}
	})
	if a.o.Timers != nil && a.machine.stage == 3 {
		a.once("timers", func(ctx context.Context) func() {
			list, err := a.o.Timers(ctx)
			return func() {
				if err == nil {
					a.machine.timers = list
				}
			}
		})
	}
	a.report()
}

// once runs work outside the loop, unless an earlier run under that name has not
// ended.
func (a *Agent) once(name string, work func(ctx context.Context) func()) {
	key := "job " + name
	if a.busy[key] {
		return
	}
	a.busy[key] = true
	a.beside(probeLimit, func(ctx context.Context) func() {
		then := work(ctx)
		return func() {
			delete(a.busy, key)
			if then != nil {
				then()
			}
		}
	})
}
