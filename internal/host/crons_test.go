package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/scaletest"
)

// crontab holds the jobs of a simulated cron.
type crontab struct {
	lines   []string
	working string
}

func (c *crontab) Next(t time.Time) (at time.Time, by string) {
	for n, text := range c.lines {
		s, err := instance.ParseCron(text)
		if err != nil {
			panic(err)
		}
		if next := s.Next(t); at.IsZero() || next.Before(at) {
			at, by = next, fmt.Sprintf("cron (f:%d)", n+1)
		}
	}
	return at, by
}

func (c *crontab) Working() string { return c.working }

// modelCron models the main loop of Debian's cron: for which minutes it checks jobs
// as it wakes up, oversleeps, or finds its clock set. Wild jobs are those with a *
// as their minute or hour.
type modelCron struct {
	wall   func() time.Time
	frozen func() bool // nil if it is never frozen
	due    func(minute int64, wild bool) bool
	mu     sync.Mutex
	ran    map[string]int // number of runs by kind of job ("wild" or "fixed") and minute
}

func (c *modelCron) check(minute int64, wild, fixed bool) {
	at := time.Unix(minute*60, 0).UTC().Format("15:04")
	c.mu.Lock()
	defer c.mu.Unlock()
	if wild && c.due(minute, true) {
		c.ran["wild "+at]++
	}
	if fixed && c.due(minute, false) {
		c.ran["fixed "+at]++
	}
}

func (c *modelCron) run(ctx context.Context) {
	sleep := func(d time.Duration) {
		select {
		case <-time.After(d):
		case <-ctx.Done():
		}
	}
	minute := func() int64 { return c.wall().Unix() / 60 }
	running := minute()
	virtual := running
	for ctx.Err() == nil {
		for minute() == running && ctx.Err() == nil {
			sleep(time.Unix((running+1)*60, 0).Sub(c.wall().Truncate(time.Second)))
			for c.frozen != nil && c.frozen() && ctx.Err() == nil {
				sleep(100 * time.Millisecond)
			}
		}
		running = minute()
		switch late := running - virtual; {
		case late == 1:
			virtual = running
			c.check(virtual, true, true)
		case late > 180 || late <= -180: // the clock was set
			virtual = running
			c.check(running, true, true)
		case late > 5: // fixed jobs are caught up on
			c.check(running, true, false)
			for virtual < running {
				virtual++
				c.check(virtual, false, true)
			}
		case late > 0: // the cron overslept
			for virtual < running {
				virtual++
				c.check(virtual, true, true)
			}
		default: // a clock that was set back
			c.check(running, true, false)
		}
	}
}

// TestCronIsOnTime freezes a cron between its jobs, while the daemon is killed and
// the clock is set at random moments. It checks that the cron runs the same jobs as
// one that is never frozen: none is lost, none runs twice. Wild jobs that a clock
// step skipped are not compared, because a cron may catch up on them more or less
// late.
func TestCronIsOnTime(t *testing.T) {
	rounds := scaletest.N(t, 100)
	random := scaletest.Random(t)
	offset := atomic.Int64{}
	wall := func() time.Time { return time.Now().Add(time.Duration(offset.Load())).Round(0) }
	inTuned(t, func(c *Config) { c.Wall = wall }, func(r *rig) {
		lines := &crontab{lines: []string{"CRON_TZ=UTC */10 * * * *", "CRON_TZ=UTC 5,15,25,35,45,55 0-23 * * *"}}
		r.k.SetTimers(func() (instance.Timers, error) { return lines, nil })
		id := r.run("cron", nil)
		due := func(minute int64, wild bool) bool { return wild && minute%10 == 0 || !wild && minute%10 == 5 }
		ctx, end := context.WithCancel(context.Background()) // created inside the bubble
		defer func() { end(); synctest.Wait() }()
		real := &modelCron{wall: wall, due: due, ran: map[string]int{}}
		asleep := &modelCron{wall: wall, due: due, ran: map[string]int{}, frozen: func() bool { return r.k.Proc(id).Frozen() }}
		go real.run(ctx)
		go asleep.run(ctx)
		slept, jobs := 0, 0
		for range rounds {
			next := wall().Truncate(5 * time.Minute).Add(5 * time.Minute)
			time.Sleep(time.Duration(random.Int64N(int64(next.Sub(wall())))))
			if r.k.Proc(id).Frozen() {
				slept++
			}
			skipped := map[string]bool{}
			event := random.IntN(5)
			t.Logf("at %v: event %d", wall().Format("15:04:05.000"), event)
			switch before := wall(); event {
			case 0:
				r.crash()
				time.Sleep(time.Duration(random.Int64N(int64(5 * time.Second))))
				r.boot()
			case 1:
				offset.Add(random.Int64N(int64(15 * time.Minute)))
				r.ClockStepped()
				for m := before.Truncate(time.Minute); !m.After(wall()); m = m.Add(time.Minute) {
					skipped["wild "+m.UTC().Format("15:04")] = true
				}
			case 2:
				offset.Add(-random.Int64N(int64(5 * time.Minute)))
				r.ClockStepped()
				// A cron that is awake runs these jobs again, even in the middle of
				// their minute.
				skipped["wild "+wall().UTC().Format("15:04")] = true
			case 3: // a client
				if err := r.Resume(r.ctx, "cron", ByManual); err != nil {
					t.Fatal(err)
				}
			}
			// After a clock step, a sleeping cron is late by at most a minute.
			left := wall().Truncate(5 * time.Minute).Add(5*time.Minute + 130*time.Second).Sub(wall())
			time.Sleep(left)
			synctest.Wait()
			real.mu.Lock()
			asleep.mu.Lock()
			for what, n := range real.ran {
				if jobs += n; asleep.ran[what] != n && !skipped[what] {
					t.Errorf("%s ran %d times, and %d times in a cron that is never frozen", what, asleep.ran[what], n)
				}
			}
			for what, n := range asleep.ran {
				if real.ran[what] == 0 && !skipped[what] {
					t.Errorf("%s ran %d times, and never in a cron that is never frozen", what, n)
				}
			}
			clear(real.ran)
			clear(asleep.ran)
			real.mu.Unlock()
			asleep.mu.Unlock()
		}
		if slept < rounds/5 || jobs < rounds {
			t.Errorf("it slept at %d of %d moments, and %d jobs ran", slept, rounds, jobs)
		}
		t.Logf("%d jobs in %d rounds; frozen at %d of the moments between", jobs, rounds, slept)
	})
}

// TestCrontabChanges edits the crontab while the cron sleeps, makes it unreadable,
// and makes a reading hang. It checks that unknown timers wake the cron and keep it
// awake.
func TestCrontabChanges(t *testing.T) {
	inBubble(t, func(r *rig) {
		readings := atomic.Int64{}
		report := func(c *crontab, err error) {
			r.k.SetTimers(func() (instance.Timers, error) { readings.Add(1); return c, err })
		}
		report(&crontab{}, nil)
		never := idle.Duration(0)
		r.run("cron", func(s *instance.Spec) { s.StopAfter = &never })
		time.Sleep(10 * time.Minute)
		r.is("cron", power.Paused)
		at := time.Now().UTC().Truncate(time.Minute).Add(7 * time.Minute)
		lines := []string{fmt.Sprintf("CRON_TZ=UTC %d %d * * *", at.Minute(), at.Hour())}
		report(&crontab{lines: lines}, nil)
		time.Sleep(time.Until(at) - Lead - time.Millisecond)
		if o := r.is("cron", power.Paused); o.WakeAt == nil || !o.WakeAt.Equal(at) || o.WakeAtBy != "cron (f:1)" {
			t.Errorf("due at %v by %q, want %v", o.WakeAt, o.WakeAtBy, at)
		}
		time.Sleep(2 * time.Millisecond)
		r.is("cron", power.Running)
		time.Sleep(10 * time.Minute)
		r.is("cron", power.Paused)

		broken := errors.New("/etc/cron.d/x:3: no time")
		report(nil, broken)
		time.Sleep(time.Minute)
		o := r.is("cron", power.Running)
		if o.LastResumedBy != byTimer || !strings.Contains(o.StatusReason, broken.Error()) {
			t.Errorf("resumed by %s: %s", o.LastResumedBy, o.StatusReason)
		}
		time.Sleep(time.Hour)
		if o := r.is("cron", power.Running); !holds(o.Blocks, idle.SignalUnknown) {
			t.Errorf("held by %v", o.Blocks)
		}
		report(&crontab{lines: lines}, nil)
		time.Sleep(10 * time.Minute)
		r.is("cron", power.Paused)

		report(&crontab{lines: lines, working: "cron (process 1) runs a job (process 2)"}, nil)
		if err := r.Resume(r.ctx, "cron", ByManual); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		if o := r.is("cron", power.Running); !holds(o.Blocks, idle.RecentActivity) {
			t.Errorf("held by %v", o.Blocks)
		}
		hang := make(chan struct{})
		r.k.SetTimers(func() (instance.Timers, error) { readings.Add(1); <-hang; return &crontab{}, nil })
		before := readings.Load()
		time.Sleep(time.Hour)
		if o := r.is("cron", power.Running); !holds(o.Blocks, idle.SignalUnknown) || readings.Load() > before+1 {
			t.Errorf("%d readings, held by %v", readings.Load()-before, o.Blocks)
		}
		report(&crontab{}, nil)
		close(hang)
		time.Sleep(10 * time.Minute)
		r.is("cron", power.Paused)
	})
}

func holds(blocks []idle.Block, code idle.Code) bool {
	for _, b := range blocks {
		if b.Signal == cronSignal && b.Code == code {
			return true
		}
	}
	return false
}
