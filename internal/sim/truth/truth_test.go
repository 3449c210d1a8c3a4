package truth

import (
	"math/rand/v2"
	"testing"
	"time"
)

func TestUse(t *testing.T) {
	t0 := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(m int) time.Time { return t0.Add(time.Duration(m) * time.Minute) }
	u := Of(Span{at(30), at(40)}, Span{at(10), at(15)}, Span{at(14), at(20)}, Span{at(50), at(50)})
	if got := len(u.Spans()); got != 2 {
		t.Fatalf("%d spans, want the two that do not touch", got)
	}
	for _, c := range []struct {
		at   int
		in   bool
		last int
	}{{9, false, -1}, {10, true, 10}, {19, true, 19}, {20, false, 20}, {29, false, 20}, {35, true, 35}, {60, false, 40}} {
		if got := u.At(at(c.at)); got != c.in {
			t.Errorf("in use at minute %d: %t", c.at, got)
		}
		last, ok := u.Last(at(c.at))
		if ok != (c.last >= 0) || ok && !last.Equal(at(c.last)) {
			t.Errorf("last use before minute %d: %s, %t", c.at, last, ok)
		}
	}
	if got := u.Share(at(15), at(35)); got != 0.5 {
		t.Errorf("share is %g, want 0.5", got)
	}
	for _, c := range []struct {
		at, timeout, blind int
		bad                bool
	}{{35, 5, 0, true}, {44, 5, 0, true}, {45, 5, 0, false}, {33, 5, 5, false}, {36, 5, 5, true}, {33, 15, 5, true}} {
		err := u.Check(at(c.at), time.Duration(c.timeout)*time.Minute, time.Duration(c.blind)*time.Minute)
		if (err != nil) != c.bad {
			t.Errorf("acted at minute %d with timeout %d, blind %d: %v", c.at, c.timeout, c.blind, err)
		}
	}
}

func TestDrawStaysInside(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	t0 := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for range 1000 {
		end := t0
		for _, s := range Draw(r, t0, time.Hour, 20*time.Minute).Spans() {
			if !s.From.After(end) || !s.From.Before(s.To) || s.To.After(t0.Add(time.Hour)) {
				t.Fatalf("span %v after %s", s, end)
			}
			end = s.To
		}
	}
}
