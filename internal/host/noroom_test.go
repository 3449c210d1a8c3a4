package host

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
)

// cramped is a machine on which no program can start for lack of disk space while
// full is set.
type cramped struct {
	*hosttest.Kernel
	full *atomic.Bool
}

func (s cramped) Start(ctx context.Context, l instance.Launch) (instance.Workload, error) {
	if s.full.Load() {
		return nil, &instance.NoRoomError{What: "its memory", Path: "/data", Needs: 2 << 20, Free: 1 << 20}
	}
	return s.Kernel.Start(ctx, l)
}

// TestRestartWithoutRoom checks that a restart that fails for lack of disk space is
// reported and retried until there is space, and that a user's start fails.
func TestRestartWithoutRoom(t *testing.T) {
	inBubble(t, func(r *rig) {
		var full atomic.Bool
		r.Host.cfg.Runtimes["process"] = cramped{r.k, &full}
		id := r.run("a", func(s *instance.Spec) { s.Restart = instance.RestartOnFailure })
		time.Sleep(30 * time.Second)
		full.Store(true)
		r.k.Proc(id).Exit(1)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		const want = "there is no room for its memory on the file system of /data: it may take 2097152 bytes (2.0 MiB), and 1048576 (1.0 MiB) are free"
		if o := r.is("a", power.Stopped); !strings.Contains(o.StatusReason, want) || o.CrashLooping {
			t.Errorf("crash looping %v: %s", o.CrashLooping, o.StatusReason)
		}
		var no *instance.NoRoomError
		if err := r.Start(r.ctx, id, ByManual); !errors.As(err, &no) {
			t.Errorf("started by a user: %v", err)
		}
		full.Store(false)
		time.Sleep(instance.RestartMax + time.Second)
		r.is("a", power.Running)
	})
}
