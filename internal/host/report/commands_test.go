package report

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/host"
	"lull/internal/host/records"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
	"lull/internal/protocol/hostctl"
	"lull/internal/server/hosts"
)

// commanded is a host that accepts commands, with its server. The server's
// responses take lag to arrive. While lose is set, replies to commands are lost.
type commanded struct {
	*rig
	*listener
	files *records.Files
	logs  string
	lag   time.Duration
	lose  atomic.Bool
}

func (c *commanded) HostTurn(ctx context.Context, name string, t control.HostTurn) (control.HostQuestions, error) {
	if t.Wait == 0 && c.lose.Load() {
		return control.HostQuestions{}, errors.New("the connection broke")
	}
	q, err := c.listener.HostTurn(ctx, name, t)
	if len(q.Commands) > 0 {
		time.Sleep(c.lag)
	}
	return q, err
}

// accepting runs a reporter that accepts commands until end is called.
func (c *commanded) accepting() (end func()) {
	c.t.Helper()
	kept, err := NewCommands(c.files)
	if err != nil {
		c.t.Fatal(err)
	}
	rep := &Reporter{Host: c.Host, Server: c, Name: "desk", Version: "v1", Every: 15 * time.Second, Log: slog.New(slog.DiscardHandler), Commands: kept, Via: "server"}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = rep.Run(ctx) }()
	synctest.Wait()
	return func() { cancel(); <-done }
}

func withCommands(t *testing.T, f func(c *commanded)) {
	logs := t.TempDir()
	files, err := records.OpenFiles(t.TempDir())
	errtest.None(t, err)
	defer files.Close()
	inBubble(t, func(c *host.Config) { c.LogDir = logs }, func(r *rig) {
		c := &commanded{rig: r, listener: &listener{Hosts: hosts.New("v1", "")}, files: files, logs: logs}
		end := c.accepting()
		f(c)
		end()
	})
}

// give sends a command through the server and checks the code of the reply, which
// is "" if the command was carried out.
func (c *commanded) give(cmd control.HostCommand, code string) control.HostReply {
	c.t.Helper()
	cmd.By = "ada"
	a := c.Command(c.t.Context(), "desk", cmd)
	if a.Code != code || (a.Done != nil) != (code == "") {
		c.t.Errorf("%s %s: %+v, want code %q", cmd.Verb, cmd.Instance, a, code)
	}
	return a
}

// events returns the events of a type about an instance.
func (c *commanded) events(id, kind string) (out []hostctl.Event) {
	all, _, _ := c.Events().Since(0)
	for _, e := range all {
		if e.ID == id && e.Type == kind {
			out = append(out, e)
		}
	}
	return out
}

// TestServerCommands checks for each command that the server can send that it has
// the same effect as a local user's request, is refused in the same cases, and is
// attributed to who sent it.
func TestServerCommands(t *testing.T) {
	withCommands(t, func(c *commanded) {
		t := c.t
		id := c.run("a", nil)
		pass(time.Second)
		n := 0
		cmd := func(verb string) control.HostCommand {
			n++
			return control.HostCommand{ID: fmt.Sprintf("c%d", n), Verb: verb, Instance: "a"}
		}
		if a := c.give(cmd("pause"), ""); a.Done != nil && a.Done.Instance.State != "paused" {
			t.Errorf("paused: %+v", a.Done.Instance)
		}
		o := c.is("a", power.Paused)
		if e := c.events(id, "paused"); len(e) != 1 || e[0].By != host.ByManual || e[0].Reason != "paused by ada via server" || o.StatusReason != e[0].Reason {
			t.Errorf("the pause is recorded as %+v, status %q", e, o.StatusReason)
		}
		c.give(cmd("resume"), "")
		c.is("a", power.Running)
		errtest.None(t, c.Hold(t.Context(), "a", idle.Lease{Holder: "build"}, time.Hour))
		c.give(cmd("pause"), control.HostRefused)
		c.is("a", power.Running)
		forced := cmd("pause")
		forced.Force = true
		c.give(forced, "")
		c.is("a", power.Paused)
		c.give(cmd("stop"), "")
		c.is("a", power.Stopped)
		c.give(cmd("resume"), control.HostRefused)
		c.is("a", power.Stopped)
		errtest.None(t, c.Halt(&idle.HaltedBy{By: "bob", Since: time.Now()}, "bob"))
		c.give(cmd("start"), "") // a halt stops only automatic actions
		c.is("a", power.Running)
		errtest.None(t, c.Halt(nil, "bob"))
		snooze := cmd("snooze")
		snooze.Snooze = idle.Duration(2 * time.Hour)
		if a := c.give(snooze, ""); a.Done != nil && (a.Done.Instance.SnoozeUntil == nil || time.Until(*a.Done.Instance.SnoozeUntil).Round(time.Minute) != 2*time.Hour) {
			t.Errorf("snoozed until %v", a.Done.Instance.SnoozeUntil)
		}
		if a := c.give(cmd("snooze"), ""); a.Done != nil && a.Done.Instance.SnoozeUntil != nil {
			t.Errorf("after its end it is snoozed until %v", a.Done.Instance.SnoozeUntil)
		}
		if e := append(c.events(id, "snoozed"), c.events(id, "snooze_ended")...); len(e) != 2 || !strings.HasSuffix(e[0].Reason, "by ada via server") || e[1].Reason != "by ada via server" {
			t.Errorf("the snooze is recorded as %+v", e)
		}
		none := cmd("stop")
		none.Instance = "none"
		c.give(none, control.HostNotFound)
		for what, bad := range map[string]control.HostCommand{"verb": {Verb: "rm", Instance: "a"}, "instance": {Verb: "stop", Instance: "../a"}, "lines": {Verb: "logs", Instance: "a", Lines: -1}, "snooze": {Verb: "snooze", Instance: "a", Snooze: -1}} {
			bad.ID = "bad-" + what
			c.give(bad, control.HostInvalid)
		}
	})
}

// TestLogsOfAnInstance checks that the server gets the last lines, limited in size
// and without control sequences.
func TestLogsOfAnInstance(t *testing.T) {
	withCommands(t, func(c *commanded) {
		t := c.t
		id := c.run("a", nil)
		pass(time.Second)
		write := func(text string) {
			t.Helper()
			errtest.None(t, os.WriteFile(filepath.Join(c.logs, id+".log"), []byte(text), 0o600))
		}
		n := 0
		read := func(lines int) *control.HostDone {
			t.Helper()
			n++
			a := c.give(control.HostCommand{ID: fmt.Sprintf("l%d", n), Verb: "logs", Instance: "a", Lines: lines}, "")
			if a.Done == nil {
				t.FailNow()
			}
			return a.Done
		}
		write("one\ntwo\n\x1b[31mthr\x07ee\x1b[0m\xff\r\n\tfour\n")
		if d := read(2); string(d.Log) != "three?\n\tfour\n" || d.Cut {
			t.Errorf("two lines: %q, cut %t", d.Log, d.Cut)
		}
		line := strings.Repeat("x", 99) + "\n"
		write("first\n" + strings.Repeat(line, 2000) + "last\n")
		if d := read(control.MaxHostLogLines); !d.Cut || len(d.Log) > control.MaxHostLog || len(d.Log) < control.MaxHostLog-200 || !bytes.HasPrefix(d.Log, []byte(line)) || !bytes.HasSuffix(d.Log, []byte("\nlast\n")) {
			t.Errorf("too much: %d bytes, cut %t, from %.10q", len(d.Log), d.Cut, d.Log)
		}
		write(strings.Repeat("\xff\x00y", control.MaxHostLog) + "\n")
		if d := read(1); !d.Cut || len(d.Log) == 0 || len(d.Log) > control.MaxHostLog {
			t.Errorf("one long line: %d bytes, cut %t", len(d.Log), d.Cut)
		}
	})
}

// TestCommandOnce repeats commands within one run of the host, after its restart,
// and if their IDs cannot be stored. It checks that none is carried out twice, and
// none without its ID being stored.
func TestCommandOnce(t *testing.T) {
	withCommands(t, func(c *commanded) {
		t := c.t
		id := c.run("a", nil)
		pass(time.Second)
		stop := control.HostCommand{ID: "same", Verb: "stop", Instance: "a"}
		c.give(stop, "")
		c.is("a", power.Stopped)
		c.restart("a")
		c.give(stop, "") // returns the recorded reply
		c.is("a", power.Running)
		if e := c.events(id, "stopped"); len(e) != 1 {
			t.Errorf("stopped %d times by one command", len(e))
		}
	})
	files, err := records.OpenFiles(t.TempDir())
	errtest.None(t, err)
	defer files.Close()
	inBubble(t, nil, func(r *rig) {
		t := r.t
		r.run("a", nil)
		c := &commanded{rig: r, listener: &listener{Hosts: hosts.New("v1", "")}, files: files}
		end := c.accepting()
		c.give(control.HostCommand{ID: "same", Verb: "pause", Instance: "a"}, "")
		c.give(control.HostCommand{ID: "other", Verb: "resume", Instance: "a"}, "")
		end()
		end = c.accepting() // as after a restart of the host
		c.give(control.HostCommand{ID: "same", Verb: "pause", Instance: "a"}, control.HostOutcomeUnknown)
		c.is("a", power.Running)
		end()
		c.files = nil
		rep := &Reporter{Host: c.Host, Server: c, Name: "desk", Every: 15 * time.Second, Log: slog.New(slog.DiscardHandler), Commands: &Commands{store: full{}, runs: map[string]*commandRun{}}}
		a := rep.carryOut(t.Context(), control.HostCommand{ID: "new", Verb: "pause", Instance: "a", Valid: idle.Duration(time.Second)}, 0)
		if a.Code != control.HostNotCarriedOut {
			t.Errorf("not recorded: %+v", a)
		}
		c.is("a", power.Running)
	})
}

// restart starts an instance again.
func (c *commanded) restart(name string) {
	c.t.Helper()
	if err := c.Start(context.Background(), name, host.ByManual); err != nil {
		c.t.Fatal(err)
	}
	c.is(name, power.Running)
}

// full is a store whose disk is full.
type full struct{}

func (full) Commands() ([]string, error) { return nil, nil }

func (full) KeepCommands([]string) error { return errors.New("no space left") }

// TestCommandsAreForgottenInOrder checks that the oldest IDs are dropped first.
func TestCommandsAreForgottenInOrder(t *testing.T) {
	files, err := records.OpenFiles(t.TempDir())
	errtest.None(t, err)
	defer files.Close()
	c, err := NewCommands(files)
	errtest.None(t, err)
	c.ids = make([]string, maxCommands-1)
	for n := range c.ids {
		c.ids[n] = fmt.Sprintf("old%d", n)
	}
	for _, id := range []string{"x", "y"} {
		if _, mine, err := c.begin(id); !mine || err != nil {
			t.Fatalf("%s: %t, %v", id, mine, err)
		}
	}
	again, err := NewCommands(files)
	if err != nil || len(again.ids) != maxCommands || again.ids[0] != "old1" {
		t.Fatalf("%d are kept, %v", len(again.ids), err)
	}
	for _, id := range []string{"old1", "x", "y"} {
		if _, mine, err := again.begin(id); mine || err != nil {
			t.Errorf("%s after a restart: %t, %v", id, mine, err)
		}
	}
}

// TestLateCommand checks that a command whose response arrives after its validity
// is not carried out, and that the server reports that.
func TestLateCommand(t *testing.T) {
	withCommands(t, func(c *commanded) {
		c.run("a", nil)
		pass(time.Second)
		c.lag = control.HostCommandFetch + time.Second
		c.give(control.HostCommand{ID: "late", Verb: "pause", Instance: "a"}, control.HostNotCarriedOut)
		c.is("a", power.Running)
		pass(20 * time.Second) // the host has been waiting in its poll for most of its time
		c.lag = control.HostCommandFetch - time.Second
		c.give(control.HostCommand{ID: "slow", Verb: "pause", Instance: "a"}, "")
		c.is("a", power.Paused)
	})
}

// TestLostAnswer checks that, if the replies to a command are lost, the server
// never reports the command as done, and the host carries it out once.
func TestLostAnswer(t *testing.T) {
	withCommands(t, func(c *commanded) {
		t := c.t
		id := c.run("a", nil)
		pass(time.Second)
		c.lose.Store(true)
		began := time.Now()
		c.give(control.HostCommand{ID: "lost", Verb: "pause", Instance: "a"}, control.HostOutcomeUnknown)
		if d := time.Since(began); d != control.HostCommandWait {
			t.Errorf("answered after %s", d)
		}
		c.is("a", power.Paused)
		c.lose.Store(false)
		pass(time.Minute)
		if e := c.events(id, "paused"); len(e) != 1 {
			t.Errorf("paused %d times", len(e))
		}
	})
}

// TestCommandsOff checks that a host that is not configured to accept commands
// carries out none.
func TestCommandsOff(t *testing.T) {
	inBubble(t, nil, func(r *rig) {
		t := r.t
		r.run("a", nil)
		r.reporting(func(l *listener, rep *Reporter, _ *bytes.Buffer) {
			c := &commanded{rig: r, listener: l}
			c.give(control.HostCommand{ID: "x", Verb: "stop", Instance: "a"}, control.HostCommandsOff)
			if a := rep.carryOut(t.Context(), control.HostCommand{ID: "x", Verb: "stop", Instance: "a", Valid: idle.Duration(time.Second)}, 0); a.Code != control.HostCommandsOff {
				t.Errorf("sent nevertheless: %+v", a)
			}
			r.is("a", power.Running)
			if v, _ := l.View("desk", time.Now()); v.Commands {
				t.Error("it is reported to accept commands")
			}
		})
	})
}
