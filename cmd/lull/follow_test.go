package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/cli/term"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
	"lull/internal/sim/world"
)

// TestWaitEndsWithTheWorker runs verbs that wait for a worker, against a server over
// a simulated cloud. It checks that each ends when the worker has reached the
// requested state, exits with 1 if the worker ends up in another state, and with 0
// when detached.
func TestWaitEndsWithTheWorker(t *testing.T) {
	scenario := world.Config{Regions: []world.RegionConfig{{Name: home}}, Timing: world.Timing{CMLBoot: world.Duration(time.Minute), Background: -1},
		Workers: []world.WorkerConfig{{Name: "one", Region: home}}}
	inCloud(t, scenario, map[string]any{"discovery_import": "off"}, func(r *cloudRig) {
		t := r.t
		w, err := control.Write[worker.Worker](t.Context(), r.asks, "POST", "/workers/import", map[string]any{"name": "one", "ec2_instance_id": r.id("one"), "aws_region": home})
		if err != nil {
			t.Fatal(err)
		}
		r.pass(5 * time.Minute)
		if _, _, _, code := r.lull("worker", "arm", "one"); code != term.ExitDone {
			t.Fatal("it cannot be armed")
		}
		ends := func(verb, status string) {
			t.Helper()
			_, out, errs, code := r.lull("worker", verb, "one", "--wait", "--json")
			if code != term.ExitDone || !strings.Contains(out, `"status": "`+status+`"`) {
				t.Errorf("%s ended with %d: %s%s", verb, code, out, errs)
			}
			if got := r.worker(w.ID).Status; string(got) != status {
				t.Errorf("after %s it is %s", verb, got)
			}
		}
		ends("pause", "STOPPED")
		ends("resume", "RUNNING")
		ends("drain", "STOPPED")
		ends("start", "RUNNING")
		ends("stop", "STOPPED")

		// Another user requests the opposite while a verb waits.
		for _, c := range [][2]string{{"start", "stop"}, {"stop", "start"}} {
			ended := make(chan int, 1)
			go func() {
				_, _, _, code := r.lull("worker", c[0], "one", "--wait")
				ended <- code
			}()
			r.pass(time.Second)
			if _, _, err := r.asks.Do(t.Context(), w.ID, c[1], nil); err != nil {
				t.Fatal(err)
			}
			if code := <-ended; code != term.ExitFailed {
				t.Errorf("%s ended with %d although the worker does not get there", c[0], code)
			}
			r.pass(10 * time.Minute)
			_, _, _, _ = r.lull("worker", c[0], "one", "--wait")
		}

		// Ctrl-C detaches, and the operation continues.
		ctx, cancel := context.WithCancel(t.Context())
		stopped := make(chan int, 1)
		var errs string
		go func() {
			var code int
			_, _, errs, code = r.lullUntil(ctx, "worker", "start", "one", "--wait")
			stopped <- code
		}()
		r.pass(time.Second)
		cancel()
		if code := <-stopped; code != term.ExitDone || !strings.Contains(errs, "one") {
			t.Errorf("detached with %d: %s", code, errs)
		}
		r.pass(10 * time.Minute)
		if got := r.worker(w.ID).Status; got != "RUNNING" {
			t.Errorf("after Ctrl-C it is %s", got)
		}
	})
}

// TestFollowOnATerminal checks that a verb for a worker waits by default on a
// terminal, with a spinner that is removed at the end, and that it does not wait with
// --no-wait or without a terminal.
func TestFollowOnATerminal(t *testing.T) {
	reads := 0
	env := fake(t, func(w http.ResponseWriter, r *http.Request) {
		status := "STOPPING"
		switch {
		case strings.HasSuffix(r.URL.Path, "/events"):
			for id := range 3 { // each request makes the server read the worker again
				fmt.Fprintf(w, "id: %d\nevent: event\ndata: {}\n\n", id+1)
				w.(http.Flusher).Flush()
			}
			<-r.Context().Done()
			return
		case r.Method == http.MethodGet:
			if reads++; reads > 2 {
				status = "STOPPED"
			}
		}
		fmt.Fprintf(w, `{"id":"w-1","name":"cml-1","status":%q,"desired_status":"STOPPED"}`, status)
	})
	env["TERM"] = "xterm"
	for _, c := range []struct {
		args     []string
		terminal bool
		waits    bool
	}{
		{[]string{"worker", "stop", "cml-1"}, true, true},
		{[]string{"worker", "pause", "cml-1"}, true, true},
		{[]string{"worker", "drain", "cml-1"}, true, true},
		{[]string{"worker", "stop", "cml-1", "--no-wait"}, true, false},
		{[]string{"worker", "stop", "cml-1", "--json"}, true, false},
		{[]string{"worker", "stop", "cml-1"}, false, false},
		{[]string{"worker", "stop", "cml-1", "--wait"}, false, true},
	} {
		reads = 0
		var out, seen bytes.Buffer
		code := 0
		execute := func(errs io.Writer) {
			code = run(t.Context(), c.args, nil, &out, errs, func(k string) string { return env[k] })
		}
		if c.terminal {
			onTerminal(t, &seen, execute)
		} else {
			execute(&seen)
		}
		if waited := reads > 2; waited != c.waits || code != term.ExitDone {
			t.Errorf("%v, terminal %t, ended with %d after %d reads: %q", c.args, c.terminal, code, reads, seen.String())
		}
		spun := regexp.MustCompile(`\r\x1b\[K[|/\\-] `).MatchString(seen.String())
		if spun != (c.terminal && c.waits) {
			t.Errorf("%v, terminal %t: spinner %t in %q", c.args, c.terminal, spun, seen.String())
		}
		if tail := seen.String(); c.terminal && c.waits && !strings.HasSuffix(tail, "\r\x1b[K") {
			t.Errorf("%v: the spinner stays: %q", c.args, tail)
		}
	}
}

// onTerminal runs f with a new terminal, and stores what f writes to it in seen.
func onTerminal(t *testing.T, seen *bytes.Buffer, f func(terminal io.Writer)) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	errtest.None(t, err)
	defer master.Close()
	errtest.None(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	errtest.None(t, err)
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	errtest.None(t, err)
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(seen, master) // ends with EIO when the other end is closed
	}()
	f(slave)
	slave.Close()
	<-read
}
