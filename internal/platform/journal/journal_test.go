package journal_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/platform/journal"
)

var (
	t0     = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	policy = idle.Policy{Name: "global", Timeout: idle.Duration(time.Hour), CheckInterval: idle.Duration(5 * time.Minute), Detection: true, AutoPause: true}
)

func check(object string, at, active time.Time) evidence.Record {
	d := evidence.Decide(at, policy, idle.Evidence{Status: "RUNNING", Running: true, LastActivityAt: active, CreatedAt: t0,
		Readings: []idle.Reading{{Signal: "cml", State: idle.Quiet, At: at}}})
	return evidence.Record{At: d.Verdict.At, Object: object, Next: at.Add(5 * time.Minute), Decision: d}
}

func open(t *testing.T, dir string, o journal.Options) *journal.Journal {
	t.Helper()
	j, _, err := journal.Open(dir, o)
	errtest.None(t, err)
	return j
}

func read(t *testing.T, j *journal.Journal, q evidence.Query) (out []evidence.Record, missing []evidence.Missing) {
	t.Helper()
	missing, err := j.Read(t.Context(), q, func(r evidence.Record) error { out = append(out, r); return nil })
	if err != nil {
		t.Fatal(err)
	}
	return out, missing
}

// copyOf returns a copy of the journal in dir, as a process that is killed now
// would leave it.
func copyOf(t *testing.T, dir string) string {
	t.Helper()
	to := t.TempDir()
	errtest.None(t, os.CopyFS(to, os.DirFS(dir)))
	return to
}

func TestJournalKeepsAndFinds(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, journal.Options{})
	for m := 0; m < 600; m += 5 {
		at := t0.Add(time.Duration(m) * time.Minute)
		j.Take(check("w-1", at, t0))
		j.Take(check("w-2", at, at))
	}
	j.Take(evidence.Record{At: t0.Add(11 * time.Hour), Object: "w-2", Change: &evidence.Change{From: "running", To: "paused", By: "x"}})
	all, missing := read(t, j, evidence.Query{})
	if len(missing) != 0 {
		t.Errorf("missing: %v", missing)
	}
	checks := map[string]int{}
	for _, r := range all {
		checks[r.Object] += r.Checks
		if r.Change == nil && (r.Differs || r.Replay() != nil) {
			t.Errorf("%s at %s does not replay", r.Object, r.At)
		}
	}
	if checks["w-1"] != 120 || checks["w-2"] != 120 {
		t.Errorf("checks: %v", checks)
	}
	one, _ := read(t, j, evidence.Query{Object: "w-1", From: t0.Add(5 * time.Hour), To: t0.Add(5 * time.Hour)})
	if len(one) == 0 || one[0].At.After(t0.Add(5*time.Hour)) {
		t.Errorf("the check that held is not there: %d", len(one))
	}
	errtest.None(t, j.Close())
	j = open(t, dir, journal.Options{})
	defer j.Close()
	again, _ := read(t, j, evidence.Query{})
	sum := map[string]int{}
	for _, r := range again {
		sum[r.Object] += r.Checks
	}
	if fmt.Sprint(sum) != fmt.Sprint(checks) {
		t.Errorf("after a restart %v, before %v", sum, checks)
	}
}

// TestKilled kills a writer. It checks that everything that Run has synced (if
// lazy, flushed) is there, that at most one beat of repeats is missing, and that
// an incomplete record at the end is cut off.
func TestKilled(t *testing.T) {
	for _, lazy := range []bool{false, true} {
		t.Run(fmt.Sprintf("lazy=%t", lazy), func(t *testing.T) { killedIn(t, lazy) })
	}
}

func killedIn(t *testing.T, lazy bool) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		j := open(t, dir, journal.Options{Lazy: lazy})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- j.Run(ctx) }()
		begun := time.Now()
		for range 24 {
			j.Take(check("w-1", time.Now(), begun))
			time.Sleep(5 * time.Minute)
		}
		killed := copyOf(t, dir)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := j.Close(); err != nil {
			t.Error(err)
		}
		files, err := filepath.Glob(filepath.Join(killed, "*.seg"))
		if err != nil || len(files) == 0 {
			t.Fatalf("files: %v, %v", files, err)
		}
		last := files[len(files)-1]
		b, err := os.ReadFile(last)
		errtest.None(t, err)
		errtest.None(t, os.WriteFile(last, append(b, 1, 2, 3), 0o600))
		k, damage, err := journal.Open(killed, journal.Options{})
		if err != nil || len(damage) != 1 || !damage[0].Torn {
			t.Fatalf("damage: %v, %v", damage, err)
		}
		defer k.Close()
		checks := 0
		errtest.Get(k.Read(t.Context(), evidence.Query{}, func(r evidence.Record) error { checks += r.Checks; return nil }))(t)
		if checks < 24-7 {
			t.Errorf("%d of 24 checks are left", checks)
		}
	})
}

// TestDamagedFile checks that the period of an unreadable file is reported as
// missing, and that the other files are read.
func TestDamagedFile(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, journal.Options{MaxBytes: 1 << 20})
	for n := range 5_000 {
		j.Take(check(fmt.Sprintf("w-%d", n), t0.Add(time.Duration(n)*time.Second), t0))
	}
	errtest.None(t, j.Close())
	files, err := filepath.Glob(filepath.Join(dir, "*.seg"))
	if err != nil || len(files) < 3 {
		t.Fatalf("files: %v, %v", files, err)
	}
	b, err := os.ReadFile(files[1])
	errtest.None(t, err)
	for i := 2000; i < len(b); i += 100 {
		b[i] ^= 0x55
	}
	errtest.None(t, os.WriteFile(files[1], b, 0o600))
	j = open(t, dir, journal.Options{MaxBytes: 1 << 20})
	defer j.Close()
	out, missing := read(t, j, evidence.Query{})
	if len(missing) == 0 || !strings.Contains(missing[0].Why, files[1]) || !missing[0].To.After(missing[0].From) {
		t.Errorf("missing: %+v", missing)
	}
	if len(out) < 1_000 || len(out) > 4_900 {
		t.Errorf("%d records of the others", len(out))
	}
}

func TestBounds(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, journal.Options{MaxBytes: 512 << 10})
	for n := range 6_000 {
		j.Take(check(fmt.Sprintf("w-%d", n), t0.Add(time.Duration(n)*time.Minute), t0))
	}
	defer j.Close()
	_, missing := read(t, j, evidence.Query{From: t0, To: t0.Add(time.Hour)})
	if s := j.Stats(); s.Bytes > 512<<10 || s.Records != 6_000 || s.Lost != 0 {
		t.Errorf("stats: %+v", s)
	}
	if len(missing) != 1 || !strings.Contains(missing[0].Why, "older") {
		t.Errorf("missing: %+v", missing)
	}
}

// TestAfterSilence checks that what was taken is on disk after SyncEvery, also when
// nothing was taken for hours before and no run is open.
func TestAfterSilence(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		j := open(t, dir, journal.Options{Lazy: true})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- j.Run(ctx) }()
		change := func() {
			j.Take(evidence.Record{At: time.Now(), Object: "w-1", Change: &evidence.Change{From: "running", To: "paused"}})
		}
		for n := 1; n <= 2; n++ {
			j.Take(check("w-1", time.Now(), t0))
			change()
			time.Sleep(6 * time.Second)
			k, _, err := journal.Open(copyOf(t, dir), journal.Options{})
			errtest.None(t, err)
			if all, _ := read(t, k, evidence.Query{}); len(all) != 2*n {
				t.Errorf("%d records are on disk, want %d", len(all), 2*n)
			}
			errtest.None(t, k.Close())
			time.Sleep(2 * time.Hour)
		}
		cancel()
		errtest.None(t, <-done)
		errtest.None(t, j.Close())
	})
}
