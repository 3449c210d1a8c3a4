package host

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/link/hostctl"
)

// TestEventNumbers: no number of an event comes again with another daemon, each is
// exact as a number of JSON, and who asks for what is not kept is told so and gets
// all that is.
func TestEventNumbers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fill := func(n int) *Events {
			s := NewEvents(4)
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
			"":                            "4 events, reset true", // two are gone
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
			seq, unknown := s.from(text)
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
		seq, unknown := none.from(fmt.Sprint(last))
		if evs, gone, _ := none.Since(seq); !unknown || gone || len(evs) > 0 {
			t.Errorf("of none that are kept: %v, %t, %t", evs, unknown, gone)
		}
		if seq, unknown := none.from("now"); unknown || seq != none.Last() {
			t.Errorf("from now on, of none: %d, %t", seq, unknown)
		}
	})
}
