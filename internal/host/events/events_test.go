package events

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"lull/internal/lib/errtest"
	"lull/internal/protocol/hostctl"
)

// TestEventNumbers checks that event numbers are unique across daemons and exact in
// JSON, and that a reader whose position is no longer kept is told so and gets
// every kept event.
func TestEventNumbers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fill := func(n int) *Feed {
			s := New(4, nil)
			for range n {
				s.Add(hostctl.Event{})
			}
			return s
		}
		before := fill(3)
		time.Sleep(time.Millisecond)
		s := fill(6)
		last := s.Last()
		if last >= 1<<53 || before.Last() >= last-5 {
			t.Errorf("%d, and before it %d", last, before.Last())
		}
		for text, want := range map[string]string{
			"":                            "4 events, reset true", // two are no longer kept
			"0":                           "4 events, reset true",
			"now":                         "0 events, reset false",
			fmt.Sprint(last):              "0 events, reset false",
			fmt.Sprint(last - 1):          "1 events, reset false",
			fmt.Sprint(last - 4):          "4 events, reset false",
			fmt.Sprint(last - 5):          "4 events, reset true",
			fmt.Sprint(last + 1):          "4 events, reset true",
			fmt.Sprint(before.Last()):     "4 events, reset true",
			"1":                           "4 events, reset true",
			fmt.Sprint(uint64(1<<64 - 1)): "4 events, reset true",
		} {
			seq, unknown := s.From(text)
			evs, gone, _ := s.Since(seq)
			if got := fmt.Sprintf("%d events, reset %t", len(evs), gone || unknown); got != want {
				t.Errorf("after %q: %s, want %s", text, got, want)
			}
			for n, e := range evs {
				if e.Seq != last-uint64(len(evs)-1-n) {
					t.Errorf("after %q: number %d at place %d", text, e.Seq, n)
				}
			}
		}
		none := fill(0)
		seq, unknown := none.From(fmt.Sprint(last))
		if evs, gone, _ := none.Since(seq); !unknown || gone || len(evs) > 0 {
			t.Errorf("of none that are kept: %v, %t, %t", evs, unknown, gone)
		}
		if seq, unknown := none.From("now"); unknown || seq != none.Last() {
			t.Errorf("from now on, of none: %d, %t", seq, unknown)
		}
	})
}

// TestEventsOutliveTheDaemon checks that the next daemon has the earlier events
// under the same numbers, as many as it keeps, and that its own numbers are higher
// whatever the clock says. A reader that has seen some events gets exactly the
// others.
func TestEventsOutliveTheDaemon(t *testing.T) {
	dir := t.TempDir()
	var all []hostctl.Event
	daemon := func(keep int, ahead uint64, add ...string) *Feed {
		t.Helper()
		l, err := Open(dir, slog.New(slog.DiscardHandler))
		errtest.None(t, err)
		s := New(keep, l)
		s.next += ahead
		for _, what := range add {
			e := hostctl.Event{Type: what, Time: time.Now().UTC(), Instance: "web", Reason: "a user asked"}
			s.Add(e)
			e.Seq = s.Last()
			all = append(all, e)
		}
		errtest.None(t, l.Close())
		s.Add(hostctl.Event{Type: "while it ends"}) // added during the end, and not kept
		return s
	}
	has := func(s *Feed, since uint64, gone bool, want []hostctl.Event) {
		t.Helper()
		got, g, _ := s.Since(since)
		if got = got[:len(got)-1]; g != gone || !cmp.Equal(got, want, cmpopts.EquateEmpty()) {
			t.Errorf("since %d: gone %t, %s", since, g, cmp.Diff(want, got))
		}
	}
	has(daemon(10, 0, "started", "paused"), 0, false, all)
	s := daemon(10, 1<<50, "resumed") // the clock is ahead, and is set back afterwards
	has(s, 0, false, all)
	for n, e := range all {
		if seq, unknown := s.From(fmt.Sprint(e.Seq)); seq != e.Seq || unknown {
			t.Errorf("from %d: %d, %t", e.Seq, seq, unknown)
		}
		has(s, e.Seq, false, all[n+1:])
	}
	if seq, unknown := s.From(fmt.Sprint(all[2].Seq - 5)); seq != 0 || !unknown {
		t.Errorf("from a number that none has: %d, %t", seq, unknown)
	}
	has(daemon(10, 0, "paused", "resumed"), all[1].Seq, false, all[2:])
	has(daemon(4, 0), 0, true, all[2:]) // including events added while the daemon ended
	has(daemon(10, 0), 0, false, all)
	for n := 1; n < len(all); n++ {
		if all[n].Seq <= all[n-1].Seq {
			t.Errorf("number %d after %d", all[n].Seq, all[n-1].Seq)
		}
	}
	// The clock is behind the third event. The daemon that added it may have used
	// more numbers than it has logged.
	if all[3].Seq-all[2].Seq < 1000 {
		t.Errorf("number %d right after %d of another daemon", all[3].Seq, all[2].Seq)
	}
}

// TestEventsOutliveAKill checks that an event that a client has seen survives if
// the daemon is killed at that moment.
func TestEventsOutliveAKill(t *testing.T) {
	dir := t.TempDir()
	l, err := Open(dir, slog.New(slog.DiscardHandler))
	errtest.None(t, err)
	s := New(100, l)
	for n := range 3 {
		s.Add(hostctl.Event{Type: "paused", Time: time.Now()})
		killed := filepath.Join(t.TempDir(), "events") // a copy of the disk at that moment
		errtest.None(t, os.CopyFS(killed, os.DirFS(dir)))
		after, err := Open(killed, slog.New(slog.DiscardHandler))
		errtest.None(t, err)
		if evs, _, _ := New(100, after).Since(0); len(evs) != n+1 {
			t.Errorf("of %d events that were seen the next daemon has %d", n+1, len(evs))
		}
		errtest.None(t, after.Close())
	}
	errtest.None(t, l.Close())
}

// TestEventLogDamaged checks that a host with a damaged event log starts, and
// reports that events are missing.
func TestEventLogDamaged(t *testing.T) {
	for at := range 30 {
		dir := t.TempDir()
		open := func() (*Log, *Feed) {
			l, err := Open(dir, slog.New(slog.DiscardHandler))
			errtest.None(t, err)
			return l, New(100, l)
		}
		l, s := open()
		for range 10 {
			s.Add(hostctl.Event{Type: "paused", Time: time.Now()})
		}
		errtest.None(t, l.Close())
		files, err := filepath.Glob(dir + "/*.seg")
		if err != nil || len(files) == 0 {
			t.Fatal(files, err)
		}
		b, err := os.ReadFile(files[0])
		errtest.None(t, err)
		b[at*(len(b)-1)/29] ^= 0x55
		errtest.None(t, os.WriteFile(files[0], b, 0o600))
		l, s = open()
		evs, gone, _ := s.Since(0)
		s.Add(hostctl.Event{Type: "resumed"})
		if more, _, _ := s.Since(0); len(evs) < 10 && !gone || len(evs) > 10 || len(more) != len(evs)+1 {
			t.Errorf("byte %d of %d: %d events, gone %t, then %d", at*(len(b)-1)/29, len(b), len(evs), gone, len(more))
		}
		errtest.None(t, l.Close())
	}
}
