package board_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/core/savings"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/board"
	"lull/internal/server/roster"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// shelf is a board over a store of worker records.
type shelf struct {
	t        *testing.T
	db       store.Store
	board    *board.Board
	verdicts map[string]worker.IdleStatus
	asked    int
}

// on runs f with a shelf in a bubble.
func on(t *testing.T, f func(s *shelf)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		db := mem.New(mem.Options{}).Client()
		defer db.Close()
		s := &shelf{t: t, db: db, verdicts: map[string]worker.IdleStatus{}}
		list := roster.New(db, slog.New(slog.DiscardHandler))
		s.board = board.New(list, func(context.Context) map[string]worker.IdleStatus {
			s.asked++
			out := map[string]worker.IdleStatus{}
			for k, v := range s.verdicts {
				out[k] = v
			}
			return out
		}, func(context.Context) (savings.Prices, error) {
			return savings.Read(strings.NewReader("kind,region,name,usd,as_of\ninstance,us-east-1,m5.large,0.1,2026-01-01\n"))
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- list.Run(ctx) }()
		f(s)
		cancel()
		<-ended
	})
}

var codec = store.Codec[worker.Worker]{Version: 1}

func (s *shelf) put(w worker.Worker) {
	s.t.Helper()
	if w.Name == "" {
		w.Name = w.ID
	}
	key := "workers/" + w.ID
	data, err := codec.Encode(key, w)
	if err == nil {
		_, err = s.db.Commit(s.t.Context(), store.Txn{Then: []store.Op{store.Put(key, data)}})
	}
	if err != nil {
		s.t.Fatal(err)
	}
	synctest.Wait()
}

func (s *shelf) look(q board.Query) control.Overview {
	s.t.Helper()
	if q.Limit == 0 {
		q.Limit = 100
	}
	o, err := s.board.Overview(s.t.Context(), q, time.Now())
	if err != nil {
		s.t.Fatal(err)
	}
	return o
}

func in(d time.Duration) *time.Time {
	t := time.Now().Add(d)
	return &t
}

// TestStandings checks the standing and cause of one worker for each case.
func TestStandings(t *testing.T) {
	running := worker.Worker{ID: "w", Status: power.WorkerRunning, DesiredStatus: power.WorkerRunning, Armed: true}
	verdict := func(minutes float64, target *time.Time, codes ...idle.Code) *worker.IdleStatus {
		st := &worker.IdleStatus{TimeoutMinutes: 60, Verdict: idle.Verdict{IsIdle: minutes >= 60, IdleMinutes: minutes, TargetPauseAt: target}}
		for _, c := range codes {
			st.Blocks = append(st.Blocks, idle.Block{Code: c, Sentence: "because of " + string(c)})
		}
		return st
	}
	with := func(f func(*worker.Worker)) worker.Worker {
		w := running
		f(&w)
		return w
	}
	begun := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC) // when every bubble begins
	status := func(s power.Worker) worker.Worker {
		return with(func(w *worker.Worker) { w.Status = s; w.DesiredStatus = s })
	}
	for name, c := range map[string]struct {
		w    worker.Worker
		st   func() *worker.IdleStatus
		want control.Standing
		urge bool
	}{
		"used lately":          {running, func() *worker.IdleStatus { return verdict(3, in(57*time.Minute), idle.RecentActivity) }, control.StandingActive, false},
		"used a while ago":     {running, func() *worker.IdleStatus { return verdict(30, in(30*time.Minute), idle.RecentActivity) }, control.StandingIdle, false},
		"about to be paused":   {running, func() *worker.IdleStatus { return verdict(50, in(10*time.Minute), idle.NotIdleYet) }, control.StandingPausingSoon, false},
		"eligible":             {running, func() *worker.IdleStatus { return verdict(70, in(0)) }, control.StandingPausingSoon, false},
		"warned":               {running, func() *worker.IdleStatus { return verdict(61, in(4*time.Minute), idle.WarningPending) }, control.StandingPausingSoon, false},
		"protected while idle": {running, func() *worker.IdleStatus { return verdict(90, in(time.Hour), idle.InSnoozePeriod) }, control.StandingBlocked, false},
		"halted while idle":    {running, func() *worker.IdleStatus { return verdict(90, nil, idle.Halted) }, control.StandingBlocked, false},
		"halted in use":        {running, func() *worker.IdleStatus { return verdict(3, nil, idle.RecentActivity, idle.Halted) }, control.StandingActive, false},
		"halted before":        {running, func() *worker.IdleStatus { return verdict(50, nil, idle.NotIdleYet, idle.Halted) }, control.StandingIdle, false},
		"stop protection":      {running, func() *worker.IdleStatus { return verdict(90, nil, "stop_protected") }, control.StandingBlocked, true},
		"signal unknown":       {running, func() *worker.IdleStatus { return verdict(90, nil, idle.NotIdleYet, idle.SignalUnknown) }, control.StandingUnknown, true},
		"first check":          {running, func() *worker.IdleStatus { st := verdict(90, nil, idle.SignalUnknown); st.Checking = true; return st }, control.StandingChecking, false},
		"wrong clock":          {running, func() *worker.IdleStatus { return verdict(0, nil, idle.ClockInFuture) }, control.StandingUnknown, true},
		"not observed":         {running, nil, control.StandingUnknown, true},
		"just imported":        {with(func(w *worker.Worker) { w.CreatedAt = begun.Add(-time.Minute) }), nil, control.StandingChecking, false},
		"just found":           {with(func(w *worker.Worker) { w.Status, w.StatusSince = power.WorkerUnknown, begun.Add(-time.Minute) }), nil, control.StandingChecking, false},
		"intended":             {with(func(w *worker.Worker) { w.Intent = &worker.Intent{By: "ada"} }), func() *worker.IdleStatus { return verdict(1, nil) }, control.StandingPausingSoon, false},
		"stopping":             {status(power.WorkerStopping), nil, control.StandingPausingSoon, false},
		"stopped":              {status(power.WorkerStopped), nil, control.StandingPaused, false},
		"to be started":        {with(func(w *worker.Worker) { w.Status = power.WorkerStopped }), nil, control.StandingStarting, false},
		"starting":             {status(power.WorkerStarting), nil, control.StandingStarting, false},
		"failed":               {status(power.WorkerFailed), nil, control.StandingFailed, true},
		"drifted":              {status(power.WorkerUnknown), nil, control.StandingUnknown, true},
	} {
		t.Run(name, func(t *testing.T) {
			on(t, func(s *shelf) {
				if c.st != nil {
					s.verdicts["w"] = *c.st()
				}
				s.put(c.w)
				o := s.look(board.Query{})
				if len(o.Items) != 1 || o.Items[0].Standing != c.want || o.Items[0].Attention != c.urge || o.Items[0].Sentence == "" {
					t.Errorf("stands as %+v, want %s, attention %v", o.Items, c.want, c.urge)
				}
				if o.Counts[c.want] != 1 || (o.Urgent == 1) != c.urge {
					t.Errorf("counts %v, urgent %d", o.Counts, o.Urgent)
				}
			})
		})
	}
}

// TestWindows checks that the overview selects, sorts and pages, and that it contains
// every change at once.
func TestWindows(t *testing.T) {
	on(t, func(s *shelf) {
		for i := range 30 {
			w := worker.Worker{ID: fmt.Sprintf("w-%02d", i), Name: fmt.Sprintf("name-%02d", 29-i), Status: power.WorkerRunning, DesiredStatus: power.WorkerRunning,
				AWSRegion: []string{"eu-west-1", "us-east-1"}[i%2], Tags: map[string]string{"team": fmt.Sprint("T", i%3)}, Armed: true}
			if i == 7 {
				w.Status = power.WorkerFailed
			}
			s.verdicts[w.ID] = worker.IdleStatus{TimeoutMinutes: 60, Verdict: idle.Verdict{IdleMinutes: float64(i) / 10, TargetPauseAt: in(time.Duration(100-i) * time.Minute), Blocks: []idle.Block{{Code: idle.RecentActivity}}}}
			s.put(w)
		}
		s.put(worker.Worker{ID: "gone", Status: power.WorkerTerminated})
		names := func(o control.Overview) (out []string) {
			for _, r := range o.Items {
				out = append(out, r.Name)
			}
			return out
		}
		all := s.look(board.Query{Limit: 3, Offset: 28})
		if all.Total != 30 || all.Matched != 30 || fmt.Sprint(names(all)) != "[name-28 name-29]" || fmt.Sprint(all.Regions) != "[eu-west-1 us-east-1]" {
			t.Errorf("the end of all is %v of %d in %v", names(all), all.Total, all.Regions)
		}
		if o := s.look(board.Query{Limit: 2, Offset: 99}); len(o.Items) != 0 || o.Offset != 30 {
			t.Errorf("beyond the end: %v at %d", names(o), o.Offset)
		}
		if o := s.look(board.Query{Search: "TEAM=t1 name-0"}); fmt.Sprint(names(o)) != "[name-01 name-04 name-07]" || o.Total != 30 {
			t.Errorf("search finds %v", names(o))
		}
		if o := s.look(board.Query{Region: "eu-west-1", Standing: control.StandingFailed}); o.Matched != 0 || o.Counts[control.StandingActive] != 15 || o.Urgent != 1 {
			t.Errorf("region: %d, %v, %d urgent", o.Matched, o.Counts, o.Urgent)
		}
		if o := s.look(board.Query{Sort: "attention", Limit: 1}); fmt.Sprint(names(o)) != "[name-22]" || o.Attention[0].ID != "w-07" {
			t.Errorf("the most urgent is %v, %v", names(o), o.Attention)
		}
		if o := s.look(board.Query{Sort: "pause", Limit: 2}); fmt.Sprint(names(o)) != "[name-00 name-01]" {
			t.Errorf("the next to pause are %v", names(o))
		}
		if o := s.look(board.Query{Sort: "idle", Limit: 2}); fmt.Sprint(names(o)) != "[name-00 name-01]" {
			t.Errorf("the longest idle are %v", names(o))
		}
		priced := func(id, owner string, cpu *float64, kind string) {
			s.verdicts[id] = worker.IdleStatus{CPU: cpu}
			s.put(worker.Worker{ID: id, Name: "sorted-" + id, Owner: owner, AWSRegion: "us-east-1", InstanceType: kind, Status: power.WorkerRunning})
		}
		priced("a", "", nil, "m5.large")
		priced("b", "zoe", new(3.0), "unpriced")
		priced("c", "Ann", new(40.0), "m5.large")
		time.Sleep(board.Fresh)
		for sort, want := range map[string]string{"owner": "[sorted-c sorted-b sorted-a]", "cpu": "[sorted-c sorted-b sorted-a]", "cost": "[sorted-a sorted-c sorted-b]", "name": "[sorted-a sorted-b sorted-c]"} {
			if o := s.look(board.Query{Search: "sorted-", Sort: sort}); fmt.Sprint(names(o)) != want {
				t.Errorf("by %s: %v, want %s", sort, names(o), want)
			}
		}
		if o := s.look(board.Query{Search: "sorted-", Sort: "cpu", Reverse: true}); fmt.Sprint(names(o)) != "[sorted-b sorted-c sorted-a]" {
			t.Errorf("by cpu, reversed: %v; what has no value stays last", names(o))
		}
		before := all.Revision
		s.put(worker.Worker{ID: "w-01", Name: "renamed", Status: power.WorkerStopped})
		o := s.look(board.Query{Search: "renamed"})
		if o.Matched != 1 || o.Revision <= before || o.Items[0].Revision <= before {
			t.Errorf("after a change: %+v", o)
		}
		asked := s.asked
		for range 50 {
			s.look(board.Query{})
		}
		if s.asked != asked {
			t.Errorf("verdicts were asked for %d times at one moment", s.asked-asked)
		}
		time.Sleep(board.Fresh)
		if s.look(board.Query{}); s.asked != asked+1 {
			t.Errorf("verdicts were asked for %d times after %v", s.asked-asked, board.Fresh)
		}
	})
}
