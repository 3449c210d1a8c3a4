package proc

import (
	"compress/gzip"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
)

// withJournal puts a journal below root in which ada logged in at 1700000100 and
// bob at 1700000200. The file was written by systemd-journal-remote.
func withJournal(t *testing.T, root string) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	if _, err := exec.LookPath("journalctl"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skipf("SKIP journal: %v", err)
	}
	f, err := os.Open("testdata/journal/two-sessions.journal.gz")
	errtest.None(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	errtest.None(t, err)
	b, err := io.ReadAll(z)
	errtest.None(t, err)
	file(t, root, "var/log/journal/"+strings.Repeat("2", 32)+"/system.journal", string(b))
}

// file writes a file below root, creating its directories.
func file(t *testing.T, root, name, text string) {
	t.Helper()
	errtest.None(t, os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755))
	put(t, root, name, text)
}

// TestJournal checks that logins are read from the journal if no other record is
// maintained, even if an earlier release left a wtmp (Debian 13 without wtmpdb),
// and not if utmp and wtmp are.
func TestJournal(t *testing.T) {
	at := time.Unix(1700000230, 0)
	root := t.TempDir()
	withJournal(t, root)
	p := &LoginReader{Root: root}
	if r := p.Recent(at); r.State != idle.Active || !r.LastEvent.Equal(time.Unix(1700000200, 0)) || r.Detail != "bob (from the journal)" {
		t.Errorf("within a minute: %+v", r)
	}
	if r := p.Recent(at.Add(time.Hour)); r.State != idle.Quiet || !r.LastEvent.Equal(time.Unix(1700000200, 0)) {
		t.Errorf("an hour later: %+v", r)
	}
	file(t, root, "var/log/wtmp", "")
	if r := p.Recent(at); r.State != idle.Active || r.Detail != "bob (from the journal)" {
		t.Errorf("with a wtmp that no program writes: %+v", r)
	}
	file(t, root, "run/utmp", "")
	if r := p.Recent(at); r.State != idle.Quiet || !r.LastEvent.IsZero() {
		t.Errorf("with utmp and wtmp: %+v", r)
	}
}

// TestJournalThatCannotBeReadIsUnknown checks that a missing journal is skipped,
// and that a journal that cannot be read makes the signal unknown.
func TestJournalThatCannotBeReadIsUnknown(t *testing.T) {
	root, bin := t.TempDir(), t.TempDir()
	file(t, root, "var/log/journal/x/system.journal", "")
	program := filepath.Join(bin, "journalctl")
	t.Setenv("PATH", bin)
	for _, c := range []struct {
		script string
		state  idle.State
	}{
		{"#!/bin/sh\necho broken >&2; exit 1\n", idle.Unknown},
		{"#!/bin/sh\necho '{\"USER_ID\":\"ada\"}'\n", idle.Unknown},
		{"#!/bin/sh\nexit 0\n", idle.Absent},
	} {
		errtest.None(t, os.WriteFile(program, []byte(c.script), 0o755))
		if r := (&LoginReader{Root: root}).Recent(time.Now()); r.State != c.state {
			t.Errorf("%q: %+v, want %s", c.script, r, c.state)
		}
	}
	errtest.None(t, os.Remove(program))
	if r := (&LoginReader{Root: root}).Recent(time.Now()); r.State != idle.Absent {
		t.Errorf("without journalctl: %+v", r)
	}
}

func FuzzJournalLine(f *testing.F) {
	f.Add([]byte(`{"__REALTIME_TIMESTAMP":"1700000200000000","USER_ID":"bob"}`))
	f.Add([]byte(`{"__REALTIME_TIMESTAMP":"-1","USER_ID":[98,255]}`))
	f.Add([]byte("\n"))
	f.Fuzz(func(t *testing.T, line []byte) {
		if l, err := parseJournal(line); err == nil && !l.newest.IsZero() && l.who == "" {
			t.Errorf("%q gave a login without a user", line)
		}
	})
}
