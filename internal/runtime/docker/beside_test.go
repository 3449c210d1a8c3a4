package docker

import (
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"lull/internal/runtime/process"
)

// TestPauseByOthers checks that a container that is paused when lull adopts it
// counts as paused by a user, unless an earlier daemon of the host paused it.
func TestPauseByOthers(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "d.sock")
	ln, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, `{"message":"Container is already paused"}`, http.StatusConflict)
	})}
	go func() { _ = srv.Serve(ln) }() // until it is closed
	t.Cleanup(func() { srv.Close() })
	w := &Work{Work: &process.Work{}, r: &Runtime{api: newClient(socket)}, container: id64, still: func() (bool, error) { return true, nil }}
	if err := w.pause(t.Context()); !isStatus(err, http.StatusConflict) {
		t.Errorf("a user's pause is taken for the host's: %v", err)
	}
	w.paused.Store(true)
	if err := w.pause(t.Context()); err != nil {
		t.Errorf("the pause of an earlier daemon: %v", err)
	}
	if err := w.pause(t.Context()); !isStatus(err, http.StatusConflict) {
		t.Errorf("a user's pause after it: %v", err)
	}
}

// TestChecks checks that, while a health check runs, the CPU time of the group
// beyond the program's own tree counts as the check's, and no other time does.
func TestChecks(t *testing.T) {
	var group, main time.Duration
	var fault error
	c := &checks{group: func() (time.Duration, error) { return group, fault }, main: func() (time.Duration, error) { return main, nil }}
	want := func(what string, d time.Duration) {
		t.Helper()
		if got := c.used(); got != d {
			t.Errorf("%s: %s, want %s", what, got, d)
		}
	}
	group, main = 5*time.Second, 4*time.Second
	want("before any", 0)
	c.begin("a")
	group += 3 * time.Second
	main += time.Second
	want("while one runs", 2*time.Second)
	c.begin("b")
	if !c.end("a") || c.end("x") {
		t.Error("which is a check is not known")
	}
	group += time.Second
	if !c.end("b") {
		t.Error("the second is not known")
	}
	want("after both", 3*time.Second)
	group += time.Hour
	want("between checks", 3*time.Second)
	c.begin("c")
	main -= 4 * time.Second // a child of the program exited, so its CPU time no longer counts
	group += time.Second
	c.endAll()
	want("after the last", 4*time.Second)
	if c.end("c") {
		t.Error("it has ended twice")
	}
	fault = errors.New("unreadable")
	c.begin("d")
	fault = nil
	group += time.Second
	want("a check whose beginning could not be read", 4*time.Second)
	c.end("d")
	want("after it", 4*time.Second)
}

func TestHealthCommand(t *testing.T) {
	for _, c := range []struct {
		test, shell []string
		want        string
	}{
		{nil, nil, ""},
		{[]string{"NONE"}, nil, ""},
		{[]string{"CMD"}, nil, ""},
		{[]string{"CMD", "/check"}, nil, "/check"},
		{[]string{"CMD", "/check", "-q", "a b"}, []string{"bash"}, "/check -q a b"},
		{[]string{"CMD-SHELL", "nc -z :: 80 || exit 1"}, nil, "/bin/sh -c nc -z :: 80 || exit 1"},
		{[]string{"CMD-SHELL", "true"}, []string{"/bin/bash", "-ec"}, "/bin/bash -ec true"},
	} {
		var d details
		d.Config.Shell = c.shell
		if c.test != nil {
			d.Config.Healthcheck = &struct{ Test []string }{c.test}
		}
		if got := d.healthCommand(); got != c.want {
			t.Errorf("%v: %q, want %q", c.test, got, c.want)
		}
	}
}
