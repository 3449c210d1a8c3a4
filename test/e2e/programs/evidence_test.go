package programs

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
)

// TestEvidence checks that the record about a client without an answer shows why
// a paused program does not answer, and that recording it does not wake the
// program.
func TestEvidence(t *testing.T) {
	t.Parallel()
	w := place(start(t, nil), "serve", instance.PathDirect)
	w.inside = func(context.Context) string { return "inside information" }
	never := idle.Duration(0)
	w.Launch(instance.Spec{Name: w.name, Command: []string{daemontest.Program("serve"), w.target}, PauseAfter: &never,
		Expose: []instance.Endpoint{{Listen: w.listen, Target: w.target, Path: instance.PathDirect}}})
	if got := w.Evidence(w.name, w.inside); !strings.Contains(got, "inside information") {
		t.Errorf("a program that runs was not asked:\n%s", got)
	}
	if err := w.Force(w.name); err != nil {
		t.Fatal(err)
	}
	got := w.Evidence(w.name, w.inside)
	o := w.get()
	if o.State != "paused" {
		t.Errorf("the question woke it: it is %s", o.State)
	}
	for what, want := range map[string]string{
		"state":   `"state":"paused"`,
		"reason":  `"code":"paused"`,
		"process": fmt.Sprintf("%d ", o.PID),
		"daemon":  fmt.Sprintf("%d ", w.PID()),
		"socket":  w.target + " ",
		"event":   "serve paused by manual",
		"log":     "host is ready",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s in it, want %q:\n%s", what, want, got)
		}
	}
	if s, err := w.Status(t.Context()); err != nil || strings.HasPrefix(s.Freezer, "cgroup2") && !strings.Contains(got, "frozen 1") {
		t.Errorf("no frozen group in it (%v):\n%s", err, got)
	}
	if strings.Contains(got, "inside information") {
		t.Error("a frozen program was asked")
	}
}
