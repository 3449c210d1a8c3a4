package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/lib/httpx"
	"lull/internal/lib/waittest"
	"lull/internal/lib/wall"
	"lull/internal/platform/proc"
	"lull/internal/protocol/agentctl"
)

func TestHooks(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, command string
		user          string
		code          int
		timedOut      bool
		output        string
		fails         bool
	}{
		{name: "succeeds", command: "echo saved; echo $LULL_REASON >&2", output: "saved\nidle_timeout\n"},
		{name: "fails", command: "echo no; exit 7", code: 7, output: "no\n"},
		{name: "vetoes", command: "exit 100", code: HookVeto},
		{name: "hangs", command: "sleep 600", code: -1, timedOut: true},
		{name: "ignores its end", command: "trap '' TERM INT; echo on; while :; do sleep 600; done", code: -1, timedOut: true, output: "on\n"},
		{name: "hangs with a grandchild that holds the output", command: "(trap '' TERM; sleep 600) & sleep 600", code: -1, timedOut: true},
		{name: "ends with a grandchild that holds the output", command: "echo out; sleep 600 &", output: "out\n"},
		{name: "ends with a grandchild that left the group", command: "echo out; setsid sleep 30 &", output: "out\n"},
		{name: "talks without end", command: "yes", code: -1, timedOut: true, output: "y\n"},
		{name: "no such user", command: "true", user: "no-such-user", code: -1, fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			started := time.Now()
			try := func(timeout time.Duration) (h agentctl.Hook, right bool) {
				h = ShellHooks{}.Run(t.Context(), HookSpec{Command: tt.command, User: tt.user, Timeout: timeout, Env: []string{"LULL_REASON=idle_timeout"}})
				return h, h.ExitCode == tt.code && h.TimedOut == tt.timedOut && strings.HasPrefix(h.Output, tt.output) && (h.Error != "") == tt.fails
			}
			h, right := try(500 * time.Millisecond)
			if !right { // on a busy machine, starting a shell may take longer
				h, right = try(15 * time.Second)
			}
			if !right {
				t.Errorf("%+v", h)
			}
			if len(h.Output) > hookOutput {
				t.Errorf("%d bytes of output are kept", len(h.Output))
			}
			if took := time.Since(started); took > 60*time.Second {
				t.Errorf("took %s", took)
			}
		})
	}
}

func TestHookRunsAsItsUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIP hook user: needs root")
	}
	h := ShellHooks{}.Run(t.Context(), HookSpec{Command: "id -un; echo $HOME", User: "nobody", Timeout: 30 * time.Second})
	if h.Output != "nobody\n/nonexistent\n" {
		t.Errorf("%+v", h)
	}
}

func TestHookEndsWithTheAgent(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if h := (ShellHooks{}).Run(ctx, HookSpec{Command: "sleep 600", Timeout: time.Hour}); h.Error == "" || h.ExitCode != -1 {
		t.Errorf("%+v", h)
	}
}

func TestFilesAreDistrusted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIP trust: needs root to give files away")
	}
	// Below /run, because everyone may write to /tmp.
	dir, err := os.MkdirTemp("/run", "lull-test-")
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "complete")
	// The machine booted an hour ago, whatever its clock says.
	set := time.Duration(0)
	f := Files{State: dir, ConfigFile: path, Clock: func() wall.Reading { return wall.Reading{Boot: time.Hour, Wall: time.Now().Add(set)} }}
	if at, err := f.Completed(path); !at.IsZero() || err != nil {
		t.Errorf("no file: %s, %v", at, err)
	}
	if _, err := f.Config(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	for name, spoil := range map[string]func(){
		"":                    func() {},
		"another's":           func() { errtest.None(t, os.Chown(path, 1234, 0)) },
		"writable by others":  func() { errtest.None(t, os.Chmod(path, 0o666)) },
		"in another's folder": func() { errtest.None(t, os.Chown(dir, 1234, 0)) },
		"in an open folder":   func() { errtest.None(t, os.Chmod(dir, 0o777)) },
		"of a group":          func() { errtest.None(t, os.Chown(path, 0, 1234)); errtest.None(t, os.Chmod(path, 0o660)) },
		"a link":              func() { errtest.None(t, os.Rename(path, path+"2")); errtest.None(t, os.Symlink(path+"2", path)) },
		"a pipe":              func() { errtest.None(t, os.Remove(path)); errtest.None(t, syscall.Mkfifo(path, 0o600)) },
		"a folder":            func() { errtest.None(t, os.Remove(path)); errtest.None(t, os.Mkdir(path, 0o700)) },
		"of an earlier boot":  func() { errtest.None(t, os.Chtimes(path, time.Time{}, time.Now().Add(-2*time.Hour))) },
		"of the future":       func() { set = -56 * 365 * 24 * time.Hour },
		"a link to nowhere":   func() { errtest.None(t, os.Remove(path)); errtest.None(t, os.Symlink("nowhere", path)) },
	} {
		errtest.None(t, os.Chown(dir, 0, 0))
		errtest.None(t, os.Chmod(dir, 0o755))
		os.RemoveAll(path)
		os.RemoveAll(path + "2")
		set = 0
		errtest.None(t, os.WriteFile(path, []byte("idle-timeout: 1h\n"), 0o644))
		spoil()
		if at, err := f.Completed(path); at.IsZero() != (name != "") || (err != nil) != (name != "") {
			t.Errorf("completion file %s: %s, %v", name, at, err)
		}
		if name == "of an earlier boot" || name == "of the future" || name == "a link" { // these are allowed for the local file
			continue
		}
		if _, err := f.Config(); (err != nil) != (name != "") || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("local file %s: %v", name, err)
		}
	}
}

// TestLinksAreFollowedWithDistrust checks that every directory and link on the path
// to a file is checked like the file itself.
func TestLinksAreFollowedWithDistrust(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIP trust: needs root for a directory that others cannot write to")
	}
	dir, err := os.MkdirTemp("/run", "lull-test-")
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	at := func(names ...string) string { return filepath.Join(append([]string{dir}, names...)...) }
	for _, d := range []string{"good", "good/deep", "open", "open/closed"} {
		errtest.None(t, os.Mkdir(at(d), 0o755))
	}
	errtest.None(t, os.Chmod(at("open"), 0o777))
	for _, f := range []string{"good/a", "open/a", "open/closed/a"} {
		errtest.None(t, os.WriteFile(at(f), []byte("idle-timeout: 1h\n"), 0o644))
	}
	for name, target := range map[string]string{
		"good/to-a": "a", "good/deep/up": "../a", "to-open": "open", "good/far": at("open/closed/a"), "open/back": at("good/a"),
		"good/over": at("open/back"), "good/loop": "loop", "good/away": "nowhere",
	} {
		errtest.None(t, os.Symlink(target, at(name)))
	}
	for path, good := range map[string]bool{
		"good/a": true, "good/to-a": true, "good/deep/up": true, "good/deep/../a": true,
		"open/a": false, "open/closed/a": false, "to-open/a": false, "to-open/closed/a": false,
		"good/far": false, "good/over": false, "good/loop": false, "good/away": false,
	} {
		if b, err := ReadTrusted(dir+"/"+path, 100); (err == nil) != good || good && len(b) == 0 {
			t.Errorf("%s: %q, %v", path, b, err)
		}
	}
}

func TestLocalFile(t *testing.T) {
	l, faults, err := ParseLocal("/etc/x.yaml", []byte("idle-timeout: 45m\nsignals: [cpu, disk]\nallow-tag-hooks: true\nidle-cpu: lots\nidle-tiemout: 1h\n"))
	if err != nil || *l.Settings.IdleTimeout != 45*time.Minute || !l.AllowTagHooks || len(faults) != 2 {
		t.Fatalf("%+v, %v, %v", l, faults, err)
	}
	if d := cmp.Diff([]string{"cpu", "disk"}, *l.Settings.Signals); d != "" {
		t.Error(d)
	}
	for i, want := range [][2]string{{"idle-cpu", "/etc/x.yaml, line 4"}, {"idle-tiemout", "/etc/x.yaml, line 5"}} {
		if faults[i].Tag != want[0] || faults[i].Where != want[1] || strings.Contains(faults[i].Error(), "tag ") {
			t.Errorf("fault %+v, want %s", faults[i], want)
		}
	}
	l, faults, err = ParseLocal("x.yaml", []byte("idle-timeout: 45m\nidle-cpu: 7\nidle-timeout: 5h\nallow-tag-hooks: true\nallow-tag-hooks: true\n"))
	if err != nil || len(faults) != 2 || faults[0].Tag != "idle-timeout" || faults[0].Where != "x.yaml, line 3" || l.Settings.IdleTimeout != nil || l.AllowTagHooks || *l.Settings.IdleCPU != 7 {
		t.Errorf("a setting that is there twice: %+v, %v, %v", l, faults, err)
	}
	for _, bad := range []string{"a: [", "- 1\n", "idle-timeout: 1h\n---\nidle-timeout: 2h\n", strings.Repeat("#", maxConfig+1)} {
		if _, _, err := ParseLocal("/etc/x.yaml", []byte(bad)); err == nil || !strings.Contains(err.Error(), "/etc/x.yaml") {
			t.Errorf("%.20q: %v, want the path", bad, err)
		}
	}
	if _, faults, err := ParseLocal("x", []byte(Example())); err != nil || len(faults) > 0 {
		t.Errorf("the example: %v, %v", faults, err)
	}
	whole := strings.NewReplacer("\n# idle", "\nidle", "\n# check", "\ncheck", "\n# warn", "\nwarn", "\n# boot", "\nboot").Replace(Example())
	if _, faults, err := ParseLocal("x", []byte(whole)); err != nil || len(faults) != 1 { // idle-timeout has no default
		t.Errorf("the example without comment signs: %v, %v", faults, err)
	}
}

func FuzzLocalFile(f *testing.F) {
	f.Add([]byte("idle-timeout: 45m\nsignals: [cpu, disk]\n"))
	f.Add([]byte("a: &a [*a]\n"))
	f.Add([]byte("- 1\n"))
	f.Add([]byte(Example()))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, _, err := ParseLocal("x", b)
		if err == nil {
			Resolve(l.Settings)
		}
	})
}

func TestJournal(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "history")
	j, damage, err := OpenJournal(dir)
	if err != nil || len(damage) > 0 {
		t.Fatal(err, damage)
	}
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for i := range 100 {
		e := agentctl.Entry{At: start.Add(time.Duration(i) * time.Minute), Kind: "verdict", Sentence: "line",
			Readings: []idle.Reading{idle.Judge("cpu", float64(i), 5, "%", time.Minute, start)}}
		errtest.None(t, j.Append(e))
	}
	errtest.None(t, j.Close())
	j, _, err = OpenJournal(dir)
	errtest.None(t, err)
	defer j.Close()
	got, err := j.Entries(agentctl.HistoryQuery{Since: start.Add(10 * time.Minute), Until: start.Add(50 * time.Minute), Limit: 5})
	if err != nil || len(got) != 5 || got[4].Readings[0].Value != 49 || !got[0].At.Equal(start.Add(45*time.Minute)) {
		t.Errorf("%d entries, %v: %+v", len(got), err, got)
	}
}

func TestControlSocket(t *testing.T) {
	w := newWorld()
	w.config = []byte("idle-timeout: 1h\n")
	a, err := New(Options{Version: "1.2.3", BootID: "b", Cheap: w, Disk: w, Journal: &MemoryJournal{}, Clocks: w.clocks, Own: w.own})
	errtest.None(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := Listen(path)
	errtest.None(t, err)
	if st, err := os.Stat(path); err != nil || st.Mode().Perm()&0o007 != 0 {
		t.Errorf("socket mode %v, %v", st.Mode(), err)
	}
	ended := make(chan error, 2)
	go func() { ended <- a.Run(ctx) }()
	go func() { ended <- Control(a, l, slog.New(slog.DiscardHandler)).Run(ctx) }()
	defer func() { cancel(); <-ended; <-ended }()
	<-a.Ready()

	c := agentctl.Dial(path)
	s, err := c.Status(t.Context())
	if err != nil || s.Version != "1.2.3" || len(s.Stages) == 0 && s.Counters.Ticks > 1 {
		t.Fatalf("%+v, %v", s, err)
	}
	if _, err := c.HoldLease(t.Context(), agentctl.LeaseRequest{Holder: "job 1/2", TTL: idle.Duration(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	if w, err := c.Why(t.Context(), time.Time{}); err != nil || !strings.Contains(w.Sentence, "job 1/2") {
		t.Errorf("%+v, %v", w, err)
	}
	errtest.None(t, c.ReleaseLease(t.Context(), "job 1/2"))
	err = c.ReleaseLease(t.Context(), "job 1/2")
	if e, ok := errors.AsType[*httpx.Problem](err); !ok || e.Code() != agentctl.CodeNotFound {
		t.Errorf("%v", err)
	}
	w.with(func() { w.config = []byte("idle-timeout: 2h\nidle-cpu: x\n") })
	r, err := c.Reload(t.Context())
	if err != nil || !cmp.Equal(r.Changed, []string{"idle-timeout"}) || len(r.Faults) != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	if s, err = c.Snooze(t.Context(), agentctl.SnoozeRequest{For: idle.Duration(time.Hour)}); err != nil || !s.Verdict.InSnoozePeriod {
		t.Errorf("%+v, %v", s.Verdict, err)
	}
	if s, err = c.Halt(t.Context(), agentctl.HaltRequest{On: true}); err != nil || s.Halted == nil || s.Halted.By == "an unknown user" {
		t.Errorf("%+v, %v", s.Halted, err)
	}
	if s, err = c.Complete(t.Context(), agentctl.CompleteRequest{}); err != nil || s.Completion != "success" {
		t.Errorf("%s, %v", s.Completion, err)
	}
	waittest.Until(t, "the history", func() bool {
		h, err := c.History(t.Context(), agentctl.HistoryQuery{})
		return err == nil && len(h) >= 6
	})
	if _, err := c.HoldLease(t.Context(), agentctl.LeaseRequest{}); err == nil {
		t.Error("a lease without a time was taken")
	}
	if l, err := c.Leases(t.Context()); err != nil || len(l) != 0 {
		t.Errorf("%v, %v", l, err)
	}
}

func TestWebhook(t *testing.T) {
	got := make(chan string, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var v struct{ Event, Host, Action string }
		json.NewDecoder(r.Body).Decode(&v)
		got <- v.Event + " " + v.Host + " " + v.Action
	}))
	defer srv.Close()
	p := UserWarner{Own: &proc.OwnWrites{}, HTTP: srv.Client(), Host: "h", File: filepath.Join(t.TempDir(), "warning")}
	errtest.None(t, p.Warn(t.Context(), Warning{Reason: reasonIdle, Action: "stop", At: time.Now(), URL: srv.URL}))
	if v := <-got; v != "idle_warning h stop" {
		t.Error(v)
	}
	if b, err := os.ReadFile(p.File); err != nil || !strings.Contains(string(b), `"action":"stop"`) {
		t.Errorf("%s, %v", b, err)
	}
	srv.Close()
	if err := p.Warn(t.Context(), Warning{URL: srv.URL}); err == nil {
		t.Error("a webhook that nothing answers is silent")
	}
}

func TestMeterCounts(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write(make([]byte, 10000)) }))
	defer srv.Close()
	m := &Meter{}
	loopback := m.Transport(nil)
	defer loopback.CloseIdleConnections()
	get := func(rt http.RoundTripper) {
		resp, err := (&http.Client{Transport: rt}).Get(srv.URL)
		errtest.None(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		errtest.None(t, errors.Join(err, resp.Body.Close()))
	}
	if get(loopback); m.Bytes() != 0 {
		t.Errorf("loopback counts: %d bytes", m.Bytes())
	}
	counted := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, n, a string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, n, a)
		return metered{c, m}, err
	}}
	if get(counted); m.Bytes() < 10000 || m.Bytes() > 12000 {
		t.Errorf("10000 bytes and their headers count %d", m.Bytes())
	}
}

// TestUnreadRateIsNotQuiet checks that idle time restarts when the samples of a rate
// had to restart, here after a jump of the clock, because no later sample shows
// whether the machine was in use in between. After a hook, the samples restart on
// purpose and idle time does not.
func TestUnreadRateIsNotQuiet(t *testing.T) {
	w := newWorld()
	w.tags["lull:idle-timeout"], w.tags["lull:warn-before"] = "20m", "1m"
	w.config = []byte("pre-stop: /bin/prepare\n")
	bubble(t, w, func(t *testing.T, a *Agent) {
		time.Sleep(10 * time.Minute)
		for n := range 30 {
			w.with(func() { w.skew += time.Duration(n%2*2-1) * 5 * time.Second })
			time.Sleep(30 * time.Second)
		}
		time.Sleep(18 * time.Minute)
		synctest.Wait()
		if n := w.sent(); len(n) > 0 {
			t.Fatalf("%v within the timeout of an unread rate", n)
		}
		if s := mustStatus(t, a); s.Verdict.TargetPauseAt == nil {
			t.Errorf("no pause is announced: %v", s.Verdict.Blocks)
		}
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if n := w.sent(); len(n) != 1 || w.hooks != 1 {
			t.Errorf("%v, %d hooks, want one stop after one hook", n, w.hooks)
		}
	})
}

// TestWarnedAgainAfterASleep checks that users are warned of a deadline again if the
// machine has slept since the first warning, even if it slept while its hook ran.
func TestWarnedAgainAfterASleep(t *testing.T) {
	for name, hook := range map[string]time.Duration{"warned": 0, "in the hook": 3 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.tags["lull:ttl-deadline"], w.tags["lull:warn-before"] = "2000-01-01T02:00:00Z", "10m"
			w.busy["cpu"] = true
			w.config = []byte("pre-stop: /bin/prepare\n")
			w.hook = func(h HookSpec) agentctl.Hook {
				time.Sleep(hook)
				return agentctl.Hook{Command: h.Command}
			}
			bubble(t, w, func(t *testing.T, _ *Agent) {
				time.Sleep(2*time.Hour - time.Minute)
				if hook > 0 {
					time.Sleep(2 * time.Minute)
				}
				if n := len(w.warned()); n != 1 {
					t.Fatalf("%d warnings, want 1", n)
				}
				w.with(func() { w.slept += 3 * time.Hour })
				time.Sleep(9 * time.Minute)
				synctest.Wait()
				if n := w.sent(); len(n) > 0 || len(w.warned()) != 2 {
					t.Errorf("%v and %d warnings, want a second one first", n, len(w.warned()))
				}
				time.Sleep(20 * time.Minute)
				synctest.Wait()
				if n := w.sent(); len(n) == 0 {
					t.Error("the deadline did not stop it")
				}
			})
		})
	}
}

// TestHoldsOutliveAClockThatIsSet checks that a snooze and a lease last exactly as
// long as promised, although the clock is set and the agent is restarted.
func TestHoldsOutliveAClockThatIsSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		ctx, cancel := context.WithCancel(t.Context())
		a := w.start(t, ctx)
		_, err := a.Snooze(t.Context(), agentctl.SnoozeRequest{For: idle.Duration(time.Hour)})
		errtest.None(t, err)
		_, err = a.HoldLease(t.Context(), agentctl.LeaseRequest{Holder: "job", TTL: idle.Duration(time.Hour)})
		errtest.None(t, err)
		w.with(func() { w.skew += 50 * time.Second })
		time.Sleep(2 * time.Minute)
		cancel()
		synctest.Wait()
		ctx, cancel = context.WithCancel(t.Context())
		defer cancel()
		a = w.start(t, ctx)
		time.Sleep(time.Second)
		s := mustStatus(t, a)
		left := func(until time.Time) time.Duration { return until.Sub(w.clocks().Wall) }
		if v := s.Verdict; v.SnoozeUntil == nil || left(*v.SnoozeUntil) < 58*time.Minute-2*time.Second {
			t.Errorf("verdict %+v, at %s", v, w.clocks().Wall)
		}
		if len(s.Leases) != 1 || left(s.Leases[0].ExpiresAt) < 58*time.Minute-2*time.Second {
			t.Errorf("leases %v, at %s", s.Leases, w.clocks().Wall)
		}
	})
}
