package task

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// journal records what tasks did, in order.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, fmt.Sprintf(format, args...))
}

// plain is a task that needs a second to become ready and a second to end.
func (j *journal) plain(name string) Task {
	return Func(name, func(ctx context.Context, ready func()) error {
		j.add("start %s", name)
		time.Sleep(time.Second)
		j.add("ready %s", name) // recorded before others can act on it
		ready()
		ready()
		<-ctx.Done()
		j.add("stop %s", name)
		time.Sleep(time.Second)
		j.add("end %s", name)
		return ctx.Err()
	})
}

func TestOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j journal
		ctx, cancel := context.WithCancel(t.Context())
		g := NewGroup("host", j.plain("store"), j.plain("api"))
		done := make(chan error)
		go func() { done <- g.Run(ctx) }()
		<-g.Ready()
		j.add("all ready")
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		want := []string{"start store", "ready store", "start api", "ready api", "all ready",
			"stop api", "end api", "stop store", "end store"}
		if d := cmp.Diff(want, j.lines); d != "" {
			t.Error(d)
		}
		if g.String() != "host" {
			t.Error(g)
		}
	})
}

var errBroken = errors.New("disk is full")

func TestFirstErrorStopsAll(t *testing.T) {
	fails := func(after time.Duration) Task {
		return Loop("journal", func(context.Context) error {
			time.Sleep(after)
			return errBroken
		})
	}
	never := func() Task {
		return Func("api", func(ctx context.Context, _ func()) error { <-ctx.Done(); return nil })
	}
	sour := func() Task {
		return Loop("cloud", func(ctx context.Context) error { <-ctx.Done(); return errors.New("no answer") })
	}
	for _, tc := range []struct {
		name  string
		tasks func(*journal) []Task
		want  string
	}{
		{"while running", func(j *journal) []Task { return []Task{j.plain("store"), fails(time.Hour)} },
			"cannot run journal: disk is full"},
		{"while another starts", func(j *journal) []Task { return []Task{fails(time.Minute), never(), j.plain("late")} },
			"cannot run journal: disk is full"},
		{"before it is ready", func(j *journal) []Task {
			return []Task{j.plain("store"), Func("api", func(context.Context, func()) error { return errBroken }), j.plain("late")}
		}, "cannot run api: disk is full"},
		{"and another fails to stop", func(j *journal) []Task { return []Task{sour(), fails(time.Hour)} },
			"cannot run journal: disk is full\ncannot run cloud: no answer"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var j journal
				err := Run(t.Context(), tc.tasks(&j)...)
				if err == nil || err.Error() != tc.want {
					t.Errorf("got %v, want %s", err, tc.want)
				}
				if !errors.Is(err, errBroken) {
					t.Error("the cause is lost")
				}
				if slices.Contains(j.lines, "start late") {
					t.Error("a task was started after the failure")
				}
				if slices.Contains(j.lines, "start store") && !slices.Contains(j.lines, "end store") {
					t.Errorf("store was not stopped: %q", j.lines)
				}
			})
		})
	}
}

func TestNaturalEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		once := func(d time.Duration) Task {
			return Func("once", func(context.Context, func()) error { time.Sleep(d); return nil })
		}
		if err := Run(t.Context(), once(time.Hour), once(time.Second)); err != nil {
			t.Error(err)
		}
		if err := Run(t.Context()); err != nil {
			t.Errorf("an empty group: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := Run(ctx, Loop("l", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })); err != nil {
			t.Errorf("an ended context is not an error: %v", err)
		}
		own := Loop("own", func(context.Context) error { return context.Canceled })
		if err := Run(t.Context(), own); !errors.Is(err, context.Canceled) {
			t.Errorf("a task that was cancelled by another program: %v", err)
		}
	})
}

func TestStartTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j journal
		g := NewGroup("", j.plain("store"), Func("api", func(ctx context.Context, _ func()) error { <-ctx.Done(); return nil }))
		g.StartTimeout = time.Minute
		err := g.Run(t.Context())
		if err == nil || err.Error() != "cannot start api: not ready after 1m0s" {
			t.Error(err)
		}
		if !slices.Contains(j.lines, "end store") {
			t.Error("store was not stopped")
		}
	})
}

func TestOverdue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j journal
		ctx, cancel := context.WithCancel(t.Context())
		release := make(chan struct{})
		g := NewGroup("", j.plain("store"), Loop("deaf", func(context.Context) error { <-release; return nil }))
		g.StopTimeout = 5 * time.Second
		done := make(chan error)
		go func() { done <- g.Run(ctx) }()
		<-g.Ready()
		cancel()
		err := <-done
		overdue, ok := errors.AsType[*OverdueError](err)
		if !ok || overdue.Task != "deaf" || overdue.After != 5*time.Second {
			t.Errorf("got %v", err)
		}
		if !slices.Contains(j.lines, "end store") {
			t.Error("store was not stopped")
		}
		close(release)
	})
}

func TestNested(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var j journal
		inner := NewGroup("inner", j.plain("b"), j.plain("c"))
		ctx, cancel := context.WithCancel(t.Context())
		outer := NewGroup("outer", j.plain("a"), inner)
		done := make(chan error)
		go func() { done <- outer.Run(ctx) }()
		<-outer.Ready()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		got := strings.Join(j.lines, ", ")
		want := "start a, ready a, start b, ready b, start c, ready c, stop c, end c, stop b, end b, stop a, end a"
		if got != want {
			t.Error(got)
		}
	})
}

// TestStoppedInReverse checks that every started task ends after all tasks that
// were started later, whichever task fails and whenever the context ends.
func TestStoppedInReverse(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(r, "tasks")
		failing := rapid.IntRange(-1, n-1).Draw(r, "failing task")
		after := time.Duration(rapid.IntRange(0, 20).Draw(r, "seconds"))*time.Second + time.Millisecond
		var j journal
		var err error
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			tasks := make([]Task, n)
			for i := range tasks {
				tasks[i] = j.plain(fmt.Sprint(i))
				if i == failing {
					tasks[i] = Loop(fmt.Sprint(i), func(ctx context.Context) error {
						j.add("start %d", i)
						select {
						case <-time.After(after):
							j.add("end %d", i)
							return errBroken
						case <-ctx.Done():
							j.add("end %d", i)
							return nil
						}
					})
				}
			}
			if failing < 0 {
				time.AfterFunc(after, cancel)
			}
			err = Run(ctx, tasks...)
		})
		if (failing >= 0) != errors.Is(err, errBroken) {
			r.Fatalf("failing %d gave %v", failing, err)
		}
		var ended []int
		starts := 0
		for _, line := range j.lines {
			var i int
			if _, err := fmt.Sscanf(line, "end %d", &i); err == nil && i != failing {
				ended = append(ended, i)
			}
			if strings.HasPrefix(line, "start") {
				starts++
			}
		}
		if !slices.IsSortedFunc(ended, func(a, b int) int { return b - a }) {
			r.Fatalf("ended in the order %v", ended)
		}
		if failing >= 0 && failing < starts {
			starts--
		}
		if len(ended) != starts {
			r.Fatalf("%d started, %d ended", starts, len(ended))
		}
	})
}
