package records

import (
	"bytes"
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/lib/errtest"
)

func sampleRecord() instance.Record {
	at := time.Date(2026, 3, 1, 0, 0, 0, 5, time.UTC)
	return instance.Record{ID: "abc", Spec: instance.Spec{Name: "a", Runtime: "process", Command: []string{"x", "y"}},
		Generation: 7, State: power.Paused, Enabled: true, Identity: &instance.Identity{BootID: "b", PID: 4, Start: 9, Run: 2},
		Leases: []idle.Lease{{Holder: "h", ExpiresAt: at}}, CreatedAt: at, LastPausedAt: at}
}

// TestDamagedRecords truncates a record at every byte, and flips every byte. It
// checks that Load rejects and names the record, returns the intact one, and
// changes no file.
func TestDamagedRecords(t *testing.T) {
	f, err := OpenFiles(t.TempDir())
	errtest.None(t, err)
	defer f.Close()
	good := sampleRecord()
	bad := sampleRecord()
	bad.ID, bad.Spec.Name = "bad", "b"
	for _, r := range []instance.Record{good, bad} {
		errtest.None(t, f.Put(&r))
	}
	recs, err := f.Load()
	if err != nil || len(recs) != 2 {
		t.Fatalf("%d records: %v", len(recs), err)
	}
	if diff := cmp.Diff(good, recs[0]); diff != "" {
		t.Errorf("read back differently:\n%s", diff)
	}
	path := f.path("bad")
	whole, err := os.ReadFile(path)
	errtest.None(t, err)
	try := func(what string, b []byte) {
		errtest.None(t, os.WriteFile(path, b, 0o600))
		recs, err := f.Load()
		if len(recs) != 1 || recs[0].ID != "abc" {
			t.Errorf("%s: %d records were read", what, len(recs))
		}
		if err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %v", what, err)
		}
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, b) {
			t.Errorf("%s: the file was changed", what)
		}
	}
	for n := range whole {
		try("cut", whole[:n])
		flipped := bytes.Clone(whole)
		flipped[n] ^= 1
		try("flipped", flipped)
	}
}

func TestOneDaemonForADirectory(t *testing.T) {
	dir := t.TempDir()
	f, err := OpenFiles(dir)
	errtest.None(t, err)
	if _, err := OpenFiles(dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("a second one: %v", err)
	}
	f.Close()
	f, err = OpenFiles(dir)
	errtest.None(t, err)
	f.Close()
}

func FuzzDecodeRecord(f *testing.F) {
	r := sampleRecord()
	b, err := json.Marshal(r)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"id":"a/b"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRecord(b)
		if err == nil && (r.ID == "" || r.Spec.Validate() != nil) {
			t.Fatalf("accepted %q", b)
		}
	})
}

// TestHaltFile checks the halts read from files of this and of earlier versions.
func TestHaltFile(t *testing.T) {
	f, err := OpenFiles(t.TempDir())
	errtest.None(t, err)
	if h, err := f.Halted(); h != nil || err != nil {
		t.Errorf("without a file: %v, %v", h, err)
	}
	at := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	want := idle.HaltedBy{By: "ada", Since: at, Reason: "a demo", Until: &at}
	errtest.None(t, f.KeepHalt(&want))
	if h, err := f.Halted(); err != nil || !reflect.DeepEqual(*h, want) {
		t.Errorf("kept %+v, read %+v, %v", want, h, err)
	}
	for _, text := range []string{"lull halt\n", "", "{", `{"by":"x"}`, `{"since":"2030-01-02T03:04:05Z","colour":1}`} {
		errtest.None(t, os.WriteFile(f.haltFile(false), []byte(text), 0o600))
		if h, err := f.Halted(); err != nil || h == nil || h.Until != nil || h.Since.IsZero() {
			t.Errorf("%q is read as %+v, %v", text, h, err)
		}
	}
	errtest.None(t, f.KeepHalt(nil))
	if h, err := f.Halted(); h != nil || err != nil {
		t.Errorf("after its end: %v, %v", h, err)
	}
}
