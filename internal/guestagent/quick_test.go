package guestagent

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/protocol/guest"
)

// FuzzQuick checks that quick has the same effect and answer as the usual path, and
// accepts no other requests.
func FuzzQuick(f *testing.F) {
	f.Add(uint64(7), int64(1_700_000_000_000_000_000), []byte("0123456789abcdef"), []byte(`{"jsonrpc":"2.0","id":1,"method":"health"}`))
	f.Add(uint64(0), int64(-1), []byte("short"), []byte(`{"jsonrpc":"2.0","id":1,"method":"set_clock","params":{"unix_ns":1,"seed":"!"}}`))
	f.Add(uint64(1)<<63, int64(0), make([]byte, 512), []byte(`{"jsonrpc":"2.0","id":"x","method":"set_clock","params":{"unix_ns":1,"seed":"AAAAAAAAAAAAAAAAAAAAAA=="}}`))
	f.Fuzz(func(t *testing.T, id uint64, at int64, seed, other []byte) {
		var set time.Time
		var stirred []byte
		h := &Harness{boot: "b0", busy: int(id % 2), cfg: Config{
			SetClock: func(to time.Time) error { set = to; return nil },
			Seed:     func(b []byte) error { stirred = b; return nil },
		}}
		type call struct {
			Version string          `json:"jsonrpc"`
			ID      uint64          `json:"id"`
			Method  string          `json:"method"`
			Params  guest.ClockCall `json:"params"`
		}
		line, err := json.Marshal(call{"2.0", id, guest.SetClock, guest.ClockCall{UnixNano: at, Seed: seed}})
		if err != nil {
			t.Fatal(err)
		}
		b, ok := h.quick(line)
		if want := len(seed) >= 16 && len(seed) <= 512; ok != want {
			t.Fatalf("%s: taken %v, want %v", line, ok, want)
		}
		if ok {
			var got struct {
				Version string            `json:"jsonrpc"`
				ID      uint64            `json:"id"`
				Result  guest.ClockAnswer `json:"result"`
			}
			if err := json.Unmarshal(b, &got); err != nil {
				t.Fatalf("%s: %v", b, err)
			}
			hello := h.hello()
			if d := cmp.Diff(&hello, got.Result.Hello); d != "" || got.ID != id || got.Version != "2.0" {
				t.Errorf("%s: %s", b, d)
			}
			if !set.Equal(time.Unix(0, at)) || string(stirred) != string(seed) {
				t.Errorf("set to %s with %x, want %s with %x", set, stirred, time.Unix(0, at), seed)
			}
		}
		if _, ok := h.quick(other); ok {
			var c call
			if err := json.Unmarshal(other, &c); err != nil || c.Method != guest.SetClock {
				t.Errorf("%q was taken: %v", other, err)
			}
		}
		// If the workload has ended or the clock cannot be set, quick leaves the
		// request to the usual path.
		h.cfg.SetClock = func(time.Time) error { return errors.New("no") }
		if _, ok := h.quick(line); ok {
			t.Error("a clock that could not be set was answered as set")
		}
		h.exit = &guest.ExitNote{}
		if _, ok := h.quick(line); ok {
			t.Error("the end of the workload was left out")
		}
	})
}
