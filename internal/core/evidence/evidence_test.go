package evidence_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
)

var t0 = time.Date(2026, 2, 1, 12, 0, 0, 0, time.UTC)

// drawn draws any input of the engine, including times with zones and monotonic
// readings.
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
		r := evidence.Record{At: d.Verdict.At, Object: "w-1", Region: "eu-west-1", Next: d.Verdict.NextIdleCheckAt, Checks: 3, Since: t0.Add(-time.Hour).UTC(), Decision: d}
		b, err := r.Pack()
		errtest.None(t, err)
		back, err := evidence.Unpack(b)
		errtest.None(t, err)
		if err := back.Replay(); err != nil || back.Differs {
			t.Fatalf("it differs: %t, %v", back.Differs, err)
		}
		if diff := cmp.Diff(d.Verdict, back.Verdict); diff != "" {
			t.Fatal(diff)
		}
		again, err := back.Pack()
		if err != nil || !bytes.Equal(b, again) {
			t.Fatalf("packed again it is something else: %v", err)
		}
	})
}

func TestReplayCatchesAForgedVerdict(t *testing.T) {
	p := idle.Policy{Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true}
	d := evidence.Decide(t0, p, idle.Evidence{Status: "RUNNING", Running: true, LastActivityAt: t0.Add(-30 * time.Minute)})
	errtest.None(t, d.Replay())
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

func TestUnpackRefuses(t *testing.T) {
	good := pack(t, evidence.Record{At: t0, Object: "w", Decision: evidence.Decide(t0, idle.Policy{Timeout: 1}, idle.Evidence{})})
	for name, bad := range map[string][]byte{"nothing": nil, "another version": append([]byte{9}, good[1:]...), "no name": {1, 0}, "cut name": {1, 200},
		"no body": good[:3], "cut body": good[:len(good)-5], "rubbish": append(bytes.Clone(good[:3]), 7, 7, 7)} {
		if _, err := evidence.Unpack(bad); err == nil {
			t.Errorf("took %s", name)
		}
	}
	if _, err := (evidence.Record{At: t0}).Pack(); err == nil {
		t.Error("packed a record of nothing")
	}
}

// TestAnotherEngine checks that a record is marked if today's engine would give
// another verdict than the recorded one, and that the recorded outcome is
// preserved.
func TestAnotherEngine(t *testing.T) {
	d := evidence.Decide(t0, idle.Policy{Timeout: idle.Duration(time.Hour), Detection: true, AutoPause: true}, idle.Evidence{Running: true, CreatedAt: t0.Add(-time.Minute)})
	d.Verdict.Eligible, d.Verdict.Blocks = true, nil
	r, err := evidence.Unpack(pack(t, evidence.Record{At: t0, Object: "w", Decision: d}))
	if err != nil {
		t.Fatal(err)
	}
	if !r.Differs || r.Verdict.Eligible || !r.Was.Eligible {
		t.Errorf("differs %t, now %t, was %t", r.Differs, r.Verdict.Eligible, r.Was.Eligible)
	}
	again, err := evidence.Unpack(pack(t, r))
	if err != nil || !again.Was.Eligible || !again.Differs {
		t.Errorf("passed on it is %+v, %v", again.Was, err)
	}
}

func pack(t testing.TB, r evidence.Record) []byte {
	t.Helper()
	b, err := r.Pack()
	errtest.None(t, err)
	return b
}

func FuzzUnpack(f *testing.F) {
	d := evidence.Decide(t0, idle.Policy{Timeout: idle.Duration(time.Hour)}, idle.Evidence{CreatedAt: t0, Readings: []idle.Reading{{Signal: "cml", State: idle.Quiet, At: t0}}})
	f.Add(pack(f, evidence.Record{At: t0, Object: "w", Decision: d}))
	f.Add(pack(f, evidence.Record{At: t0, Object: "w", Change: &evidence.Change{To: "paused"}}))
	f.Add([]byte{1, 1, 'w'})
	f.Fuzz(func(t *testing.T, in []byte) {
		r, err := evidence.Unpack(in)
		if err != nil {
			return
		}
		b, err := r.Pack()
		if err != nil {
			return // it became too long, or contains a time that cannot be encoded
		}
		if _, err := evidence.Unpack(b); err != nil {
			t.Errorf("cannot unpack what was packed: %v", err)
		}
	})
}
