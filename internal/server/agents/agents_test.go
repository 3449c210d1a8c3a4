package agents

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unicode"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/protocol/control"
)

// disk is a journal that counts the bytes that it stores.
type disk struct {
	t       testing.TB
	rec     evidence.Recorder
	records []evidence.Record
	bytes   int
}

func newDisk(t testing.TB) *disk { return &disk{t: t, rec: evidence.Recorder{Beat: 30 * time.Minute}} }

func (d *disk) keep(r evidence.Record) { d.write(d.rec.Take(r)) }

func (d *disk) write(list []evidence.Record) {
	for _, r := range list {
		b, err := r.Pack()
		if err != nil {
			d.t.Fatal(err)
		}
		again, err := evidence.Unpack(b)
		if err != nil || again.Differs {
			d.t.Fatalf("a record does not replay: differs %t, %v", again.Differs, err)
		}
		d.bytes += len(b)
		d.records = append(d.records, again)
	}
}

var begun = time.Date(2026, 1, 5, 0, 0, 0, 0, time.UTC)

// report returns a report with seven signals. at and used are times of the agent's
// clock.
func report(at time.Time, sequence uint64, cpu float64, used time.Time) control.AgentReport {
	r := control.AgentReport{At: at, Sequence: sequence, StartedAt: begun, BootID: "b", Version: "v1", Interval: idle.Duration(time.Minute), LastUse: used,
		Judged: &control.AgentJudged{Policy: idle.Policy{Name: "agent", Timeout: idle.Duration(time.Hour), WarnBefore: idle.Duration(5 * time.Minute), CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true, Action: "stop"}}}
	r.Readings = append(r.Readings, idle.Judge("cpu", cpu, 5, "%", time.Minute, at), idle.Judge("disk", 40*rand.Float64(), 100, "KB/min", time.Minute, at),
		idle.Judge("network", 3*rand.Float64(), 10, "KB/min", time.Minute, at))
	for _, name := range []string{"users", "terminals", "recent"} {
		r.Readings = append(r.Readings, idle.Reading{Signal: name, State: idle.Quiet, At: at, LastEvent: begun})
	}
	r.Readings = append(r.Readings, idle.Reading{Signal: "gpu", State: idle.Absent, At: at})
	return r
}

// TestDayOfAnAgent checks that a day of reports every 45 s, eight hours of it in use,
// takes no more space than a worker's day, and that the maximum values between two
// records are known.
func TestDayOfAnAgent(t *testing.T) {
	d := newDisk(t)
	a := New(d.keep)
	used, n, most := begun, uint64(0), 0.0
	for at := begun; at.Before(begun.Add(24 * time.Hour)); at = at.Add(45 * time.Second) {
		n++
		cpu := rand.Float64() * 3
		if h := at.Hour(); h >= 9 && h < 17 {
			cpu = 20 + 60*rand.Float64()
			used = at
		} else if at.Sub(begun) < 4*time.Hour {
			most = max(most, cpu)
		}
		a.Take("m", report(at, n, cpu, used), at)
	}
	d.write(d.rec.Flush())
	if len(d.records) > 80 || d.bytes > 40<<10 {
		t.Errorf("a day took %d records of %d bytes", len(d.records), d.bytes)
	}
	t.Logf("%d reports, %d records, %d bytes", n, len(d.records), d.bytes)
	high, slots := 0.0, 0
	for _, r := range d.records {
		if r.Levels == nil {
			t.Fatalf("a record without levels at %s", r.At)
		}
		for i, at := range r.Levels.At {
			if at.Before(begun.Add(4 * time.Hour)) {
				slots++
				high = max(high, r.Levels.High["cpu"][i])
			}
		}
	}
	if diff := high - most; slots < 48 || diff > 0.001 || diff < -0.001 {
		t.Errorf("the highest of four quiet hours was %g, recorded is %g in %d slots", most, high, slots)
	}
}

// TestHostileAgent has an agent report new content of maximum size every second for
// an hour. It checks that little of it is written, and that an honest agent's records
// are complete.
func TestHostileAgent(t *testing.T) {
	bad, good := newDisk(t), newDisk(t)
	a := New(func(r evidence.Record) {
		if r.Object == Object("bad") {
			bad.keep(r)
		} else {
			good.keep(r)
		}
	})
	n := uint64(0)
	for at := begun; at.Before(begun.Add(time.Hour)); at = at.Add(time.Second) {
		n++
		r := report(at.Add(time.Duration(rand.Int64N(int64(time.Hour)))-30*time.Minute), n, 90*rand.Float64(), at)
		for range 50 {
			r.Readings = append(r.Readings, idle.Reading{Signal: fmt.Sprint(rand.Uint64()), Unit: noise(60), Detail: noise(500), At: at, State: idle.State(rand.IntN(4))})
			r.Judged.Guards = append(r.Judged.Guards, idle.Block{Code: idle.Code(noise(60)), Sentence: noise(500), Holder: noise(100)})
			r.Judged.Leases = append(r.Judged.Leases, idle.Lease{Holder: noise(500), Reason: noise(500), ExpiresAt: at.Add(time.Duration(rand.Int64()))})
		}
		r.Judged.Policy.Timeout = idle.Duration(rand.Int64N(int64(time.Hour)))
		if err := r.Check(); err != nil {
			t.Fatal(err)
		}
		a.Take("bad", r, at)
		if n%45 == 0 {
			a.Take("good", report(at, n, 1, begun), at)
		}
	}
	bad.write(bad.rec.Flush())
	good.write(good.rec.Flush())
	if bad.bytes > 256<<10 || len(bad.records) > int(burst)+130 {
		t.Errorf("an hour of a hostile agent took %d records of %d bytes", len(bad.records), bad.bytes)
	}
	checks := 0
	for _, r := range good.records {
		checks += r.Checks
	}
	if checks != 80 {
		t.Errorf("%d of 80 checks of the honest one are recorded", checks)
	}
	t.Logf("%d reports, %d records, %d bytes", n, len(bad.records), bad.bytes)
}

// noise returns n bytes of incompressible text, a slice of a text that is generated
// once.
func noise(n int) string {
	from := rand.IntN(len(texts) - n)
	return texts[from : from+n]
}

var texts = func() string {
	var b strings.Builder
	for b.Len() < 64<<10 {
		fmt.Fprintf(&b, "%x", rand.Uint64())
	}
	return b.String()
}()

// TestReportsOutOfOrder checks that a duplicate or late report changes nothing,
// and that the first report after a restart counts.
func TestReportsOutOfOrder(t *testing.T) {
	var got []evidence.Record
	a := New(func(r evidence.Record) { got = append(got, r) })
	say := func(at time.Duration, sequence uint64, started time.Time, cpu float64) {
		r := report(begun.Add(at), sequence, cpu, begun)
		r.StartedAt = started
		a.Take("m", r, begun.Add(at))
	}
	say(time.Minute, 5, begun, 1)
	say(2*time.Minute, 5, begun, 90)
	say(2*time.Minute, 4, begun, 90)
	if len(got) != 1 {
		t.Fatalf("%d records of one report", len(got))
	}
	say(3*time.Minute, 1, begun.Add(150*time.Second), 90)
	if seen, ok := a.Seen("m"); len(got) != 2 || !ok || !seen.At.Equal(begun.Add(3*time.Minute)) {
		t.Errorf("after a new start: %d records, the last seen at %s", len(got), seen.At)
	}
	if _, ok := a.Seen("other"); ok {
		t.Error("a machine that never reported was seen")
	}
}

// TestUntold checks that an agent that does not report its policy is shown with its
// readings and leases, but is never eligible for a pause.
func TestUntold(t *testing.T) {
	a := New(nil)
	r := report(begun.Add(2*time.Hour), 1, 1, begun)
	r.Judged, r.Holds = nil, []idle.Block{{Code: idle.LeaseHeld, Holder: "ci", Sentence: "ci holds the machine"}}
	a.Take("m", r, begun.Add(2*time.Hour))
	seen, _ := a.Seen("m")
	if v := seen.Verdict; v.Eligible || !v.Has(CodePolicyUntold) || !v.Has(idle.LeaseHeld) || len(seen.Evidence.Readings) != 7 {
		t.Errorf("got %+v", seen.Verdict)
	}
}

// BenchmarkTake measures one report to a server with 20,000 agents.
func BenchmarkTake(b *testing.B) {
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	written := 0
	a := New(func(r evidence.Record) { written += len(rec.Take(r)) })
	names := make([]string, 20_000)
	for i := range names {
		names[i] = fmt.Sprintf("i-%017x", i)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		at := begun.Add(time.Duration(i/len(names)) * 45 * time.Second)
		a.Take(names[i%len(names)], report(at, uint64(i/len(names))+1, 1, begun), at)
	}
	b.ReportMetric(float64(written)/float64(b.N), "records/op")
}

// FuzzReport takes valid reports with random content. It checks that the record of
// each can be written, is small, and can be replayed.
func FuzzReport(f *testing.F) {
	for _, r := range []control.AgentReport{report(begun, 1, 7, begun), {At: begun, Interval: idle.Duration(time.Second)}} {
		b, err := json.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"at":"9999-12-31T23:59:59Z","interval_seconds":900,"last_use":"0001-01-01T00:00:01Z","readings":[{"signal":"cpu","state":"active","value":1e308,"unit":"%","at":"0001-01-01T00:00:01Z"}],"judged":{"policy":{"timeout_seconds":1,"signals":[]},"snoozed_until":"9999-12-31T23:59:59Z","peaks":{"cpu":-1e308}}}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		var r control.AgentReport
		if len(in) > 128<<10 || json.Unmarshal(in, &r) != nil || r.Check() != nil {
			return
		}
		d := newDisk(t)
		a := New(d.keep)
		a.Take("m", r, begun)
		r.Sequence++
		a.Take("m", r, begun.Add(time.Minute))
		d.write(d.rec.Flush())
		seen, _ := a.Seen("m")
		for _, x := range seen.Evidence.Readings {
			if strings.ContainsFunc(x.Signal+x.Detail+x.Unit, unicode.IsControl) || len(x.Detail) > maxText+4 {
				t.Errorf("not fit for a terminal: %+q", x.Signal+x.Detail+x.Unit)
			}
		}
		if d.bytes > 80<<10 {
			t.Errorf("two reports took %d bytes", d.bytes)
		}
	})
}
