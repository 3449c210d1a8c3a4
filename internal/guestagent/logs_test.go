package guestagent

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/lib/scaletest"
)

// TestAge checks that output that waits for a host keeps the time at which it was
// printed, even if older output was dropped.
func TestAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRing(8)
		r.timed.Store(true)
		print := func(s string, then time.Duration) {
			_, _ = r.Write([]byte(s)) // never fails
			time.Sleep(then)
		}
		print("lost", time.Minute)
		print("ab", agePrecision/2)
		print("cd", time.Second-agePrecision/2)
		print("efgh", 2*time.Second)
		print("", 0)
		for _, want := range []struct {
			data string
			age  time.Duration
		}{{"abcd", 3 * time.Second}, {"efgh", 2 * time.Second}} {
			n, ok := r.take()
			if !ok || string(n.Data) != want.data || n.Age != want.age.Milliseconds() {
				t.Errorf("%q of age %d ms, %v, want %q of %s", n.Data, n.Age, ok, want.data, want.age)
			}
			r.sent(n, true)
		}
		print("now", 0)
		if n, ok := r.take(); !ok || n.Age != 0 || n.Dropped != 0 {
			t.Errorf("fresh output: %+v, %v", n, ok)
		}
	})
}

// TestUnsentOutputIsKept sends random output over a channel that fails repeatedly.
// It checks that everything arrives once, in order and with its time, and that
// bytes beyond the capacity are counted as dropped.
func TestUnsentOutputIsKept(t *testing.T) {
	random := scaletest.Random(t)
	synctest.Test(t, func(t *testing.T) {
		r := newRing(1000)
		r.timed.Store(true)
		var printed, arrived []byte
		var times []time.Time // when each byte was printed
		dropped := 0
		send := func(fails bool) bool {
			n, some := r.take()
			if !some {
				return false
			}
			if len(n.Data) == 0 {
				t.Fatal("an empty chunk")
			}
			if !fails {
				dropped += int(n.Dropped)
				at := len(arrived) + dropped
				if want := times[at].UnixMilli(); n.At != want {
					t.Errorf("byte %d was printed at %d and is sent as of %d", at, want, n.At)
				}
				arrived = append(arrived, n.Data...)
			}
			if random.IntN(3) == 0 { // more output while the chunk is being sent
				_, _ = r.Write([]byte("x"))
				printed, times = append(printed, 'x'), append(times, time.Now())
			}
			r.sent(n, !fails)
			return true
		}
		for range 2000 {
			if b := make([]byte, 1+random.IntN(60)); random.IntN(2) == 0 {
				for i := range b {
					b[i] = byte('a' + random.IntN(26))
					times = append(times, time.Now())
				}
				_, _ = r.Write(b)
				printed = append(printed, b...)
			}
			send(random.IntN(4) > 0)
			time.Sleep(agePrecision)
		}
		for send(false) {
		}
		if len(arrived)+dropped != len(printed) || int(r.lost()) != dropped {
			t.Errorf("%d bytes were printed, %d arrived, %d were dropped, %d in all", len(printed), len(arrived), dropped, r.lost())
		}
		if !bytes.HasSuffix(printed, arrived[max(0, len(arrived)-900):]) {
			t.Error("what arrived last was not printed last")
		}
		if dropped == 0 || dropped == len(printed) {
			t.Errorf("%d of %d bytes were dropped: the test shows nothing", dropped, len(printed))
		}
	})
}
