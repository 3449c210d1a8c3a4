package machines

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
)

// TestWorkspaceSurvives lets a guest work on files in its workspace continuously
// while the daemon is killed and the guest is put to sleep at every step of the
// ladder. Every file operation must succeed, and afterwards the files on this
// machine must contain each write exactly once.
func TestWorkspaceSurvives(t *testing.T) {
	d := host(t)
	dir := t.TempDir()
	b := run(d, "a", small(t), []int{80}, func(s *instance.Spec) {
		deep(s)
		s.Workspace = dir + ":/work"
	}, "guest", "serve", ":80")
	if o := b.get(); o.Workspace != dir+":/work" {
		t.Errorf("it is shown with the workspace %q", o.Workspace)
	}
	if got := b.send("churn /work"); got != "churning" {
		t.Fatal(got)
	}
	goesOn := func(after string) {
		t.Helper()
		was := size(t, dir)
		daemontest.Wait(t, "it continues after "+after, func() (bool, string) {
			now := size(t, dir)
			return now > was, fmt.Sprintf("%d bytes, %d before; it is %+v", now, was, b.get())
		})
	}
	for n := range rounds(t) {
		goesOn("its beginning")
		daemontest.Wait(t, "it is in the middle of something", func() (bool, string) {
			found, err := filepath.Glob(filepath.Join(dir, []string{"d*", "d*/f", "d*/s", "d*/l"}[n%4]))
			return err == nil && len(found) > 0, fmt.Sprint(err)
		})
		d.Kill()
		d.Boot()
		began := time.Now()
		goesOn("a kill")
		t.Logf("REPORT workspace: a file request is served %s after the daemon is back", time.Since(began).Round(time.Millisecond))
		b.sinks("hibernated")
		if b.send("count") == "" {
			t.Error("it does not answer")
		}
		goesOn("a hibernation")
	}
	got := b.send("churn off")
	b.pause()
	paused := b.get().LastPausedAt
	d.Kill()
	d.Boot()
	if o := b.is("paused"); !o.LastPausedAt.Equal(*paused) {
		t.Errorf("it was paused at %s, and with another daemon at %s", paused, o.LastPausedAt)
	}
	n, end, _ := strings.Cut(got, " rounds, ")
	want, err := strconv.Atoi(n)
	if err != nil || end != "<nil>" {
		t.Fatalf("it ended with %q", got)
	}
	var text strings.Builder
	for i := range want {
		fmt.Fprintln(&text, i)
		if b, err := os.ReadFile(filepath.Join(dir, fmt.Sprint("f", i))); err != nil || string(b) != strconv.Itoa(i) {
			t.Errorf("file %d has %q, %v", i, b, err)
		}
	}
	if log, err := os.ReadFile(filepath.Join(dir, "log")); err != nil || string(log) != text.String() {
		t.Errorf("the log does not have %d lines in order: %v\n%s", want, err, log)
	}
	if l, err := os.ReadDir(dir); err != nil || len(l) != want+1 {
		t.Errorf("%d files are here after %d rounds, %v", len(l), want, err)
	}
	t.Logf("%d rounds", want)
}

// size returns the size in bytes of the file that the guest writes.
func size(t *testing.T, dir string) int64 {
	t.Helper()
	st, err := os.Stat(filepath.Join(dir, "log"))
	if os.IsNotExist(err) {
		return 0
	}
	if err != nil {
		t.Fatal(err)
	}
	return st.Size()
}
