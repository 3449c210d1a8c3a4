package gpu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
)

// card returns a Reader of a machine that has a GPU and whose nvidia-smi is the
// shell script.
func card(t *testing.T, script string) *Reader {
	t.Helper()
	dir := t.TempDir()
	for _, n := range []string{"nvidia0", "nvidiactl"} {
		errtest.None(t, os.WriteFile(filepath.Join(dir, n), nil, 0o600))
	}
	cmd := filepath.Join(dir, "smi")
	errtest.None(t, os.WriteFile(cmd, []byte("#!/bin/sh\ncd "+dir+"\n"+script+"\n"), 0o700))
	return &Reader{Dev: dir, Command: cmd, Every: time.Millisecond}
}

func TestRead(t *testing.T) {
	for _, tt := range []struct {
		name, script string
		state        idle.State
		value        float64
	}{
		{"idle", "echo 0; echo 3", idle.Quiet, 3},
		{"one of two is busy", "echo 0; echo 97", idle.Active, 97},
		{"a burst in the second sample", `if [ -e seen ]; then echo 40; else touch seen; echo 0; fi`, idle.Active, 40},
		{"cut into slices", "echo '[N/A]'", idle.Unknown, 0},
		{"no answer", "", idle.Unknown, 0},
		{"driver does not match", "echo 'Failed to initialize NVML' >&2; exit 18", idle.Unknown, 0},
		{"too much", "head -c 1000000 /dev/zero", idle.Unknown, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := card(t, tt.script).Read(t.Context(), time.Now(), 5)
			if r.State != tt.state || r.Value != tt.value {
				t.Errorf("%+v, want %s %g", r, tt.state, tt.value)
			}
		})
	}
}

func TestWithoutDeviceNothingRuns(t *testing.T) {
	r := &Reader{Dev: t.TempDir(), Command: "/nonexistent"}
	if got := r.Read(t.Context(), time.Now(), 5); got.State != idle.Absent {
		t.Errorf("%+v", got)
	}
}

func TestDeviceWithoutProgramIsUnknown(t *testing.T) {
	r := card(t, "")
	r.Command = "/nonexistent"
	if got := r.Read(t.Context(), time.Now(), 5); got.State != idle.Unknown {
		t.Errorf("%+v", got)
	}
}

// TestHangIsBounded checks that Read returns soon after its context ends although
// the program ignores SIGTERM and its child keeps the output open.
func TestHangIsBounded(t *testing.T) {
	r := card(t, `trap '' TERM; sleep 300 & wait`)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	started := time.Now()
	if got := r.Read(ctx, time.Now(), 5); got.State != idle.Unknown {
		t.Errorf("%+v", got)
	}
	if took := time.Since(started); took > 20*time.Second {
		t.Errorf("took %s", took)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"0\n", "0\n97\n", "[N/A]\n", "", "12 %\n", "NaN\n", "1e3\n", "-1\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if v, err := Parse(b); err == nil && !(v >= 0 && v <= 100) {
			t.Fatalf("%q is %s", b, fmt.Sprint(v))
		}
	})
}
