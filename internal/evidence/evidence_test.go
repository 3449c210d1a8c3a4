package evidence_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"lull/internal/evidence"
	"lull/internal/idle"
)

var t0 = time.Date(2026, 2, 1, 12, 0, 0, 0, time.UTC)

// drawn makes any question to the engine, with zones and monotonic parts.
func drawn(t *rapid.T) (time.Time, idle.Policy, idle.Evidence) {
	zone := time.FixedZone("x", rapid.IntRange(-12, 12).Draw(t, "zone")*3600)
	at := func(name string) time.Time {
		if rapid.IntRange(0, 3).Draw(t, name+" never") == 0 {
			return time.Time{}
		}
		return t0.Add(time.Duration(rapid.Int64Range(-int64(5*time.Hour), int64(2*time.Minute)).Draw(t, name))).In(zone)
	}
	p := idle.Policy{
		Timeout: idle.Duration(time.Duration(rapid.IntRange(1, 120).Draw(t, "timeout")) * time.Minute), Snooze: idle.Duration(time.Duration(rapid.IntRange(0, 90).Draw(t, "snooze")) * time.Minute),
		WarnBefore: idle.Duration(time.Duration(rapid.IntRange(0, 9).Draw(t, "warn")) * time.Minute), CheckInterval: idle.Duration(5 * time.Minute),
		Detection: rapid.Bool().Draw(t, "detection"), AutoPause: rapid.Bool().Draw(t, "auto"), Signals: []string{"cml"}, Action: "stop",
	}
	e := idle.Evidence{
		Status: "RUNNING", Running: rapid.Bool().Draw(t, "running"), LastActivityAt: at("activity"), LastResumedAt: at("resumed"), CreatedAt: at("created"),
		SnoozedUntil: at("snoozed"), WarningSentAt: at("warned"),
		Readings: []idle.Reading{{Signal: "cml", State: idle.State(rapid.IntRange(0, 3).Draw(t, "state")), At: at("read"), LastEvent: at("event"), MaxAge: idle.Duration(time.Hour)}},
	}
	if rapid.Bool().Draw(t, "lease") {
		e.Leases = []idle.Lease{{Holder: "h", ExpiresAt: t0.Add(time.Hour).In(zone)}}
	}
	if rapid.Bool().Draw(t, "guard") {
		e.Guards = []idle.Block{{Code: idle.MinWorkers, Sentence: "The floor."}}
	}
	return t0.In(zone), p, e
}

func TestRecordsReplayAfterTheCodec(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now, p, e := drawn(t)
		d := evidence.Decide(now, p, e)
		line, err := evidence.Record{At: now, Object: "w-1", Decision: d}.Encode()
		if err != nil {
			t.Fatal(err)
		}
		back, err := evidence.Decode(line)
		if err != nil {
			t.Fatal(err)
		}
		if err := back.Replay(); err != nil {
			t.Fatal(err)
		}
		if !evidence.Same(d, back.Decision) {
			t.Fatal("the codec made news of it")
		}
		again, err := back.Encode()
		if err != nil || !bytes.Equal(line, again) {
			t.Fatalf("encoded again it is another line: %v\n%s%s", err, line, again)
		}
	})
}

func TestReplayCatchesAForgedVerdict(t *testing.T) {
	p := idle.Policy{Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true}
	d := evidence.Decide(t0, p, idle.Evidence{Status: "RUNNING", Running: true, LastActivityAt: t0.Add(-30 * time.Minute)})
	if err := d.Replay(); err != nil {
		t.Fatal(err)
	}
	d.Verdict.Eligible = true
	if d.Replay() == nil {
		t.Error("a forged verdict replays")
	}
}

func TestSimulateAsksAnotherPolicy(t *testing.T) {
	p := idle.Policy{Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true}
	d := evidence.Decide(t0, p, idle.Evidence{Status: "RUNNING", Running: true, LastActivityAt: t0.Add(-30 * time.Minute)})
	p.Timeout = idle.Duration(30 * time.Minute)
	if d.Verdict.Eligible || !d.Simulate(p).Eligible {
		t.Error("had the timeout been 30 minutes, it would have been paused")
	}
}

func TestDecodeRefuses(t *testing.T) {
	for _, bad := range []string{"", "{", "[]", "null", `{"object":"x"}`, `{"at":"2026-01-01T00:00:00Z"}`, `{"at":"2026-01-01T00:00:00Z","object":"x"} {}`, strings.Repeat(" ", evidence.MaxRecord+1)} {
		if _, err := evidence.Decode([]byte(bad)); err == nil {
			t.Errorf("took %.40q", bad)
		}
	}
}

func FuzzDecode(f *testing.F) {
	d := evidence.Decide(t0, idle.Policy{Timeout: idle.Duration(time.Hour)}, idle.Evidence{CreatedAt: t0, Readings: []idle.Reading{{Signal: "cml", State: idle.Quiet, At: t0}}})
	line, err := evidence.Record{At: t0, Object: "w", Decision: d}.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(line)
	f.Add([]byte(`{"at":"2026-01-01T00:00:00Z","object":"x"}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		r, err := evidence.Decode(in)
		if err != nil {
			return
		}
		if _, err := r.Encode(); err != nil && len(in) < evidence.MaxRecord/8 {
			t.Errorf("cannot encode what was decoded: %v", err)
		}
	})
}
