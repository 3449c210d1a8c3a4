package agent

import (
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
)

// shell is an open login shell with its keyboard.
type shell struct {
	keys io.WriteCloser
	tty  *log // the terminal's output
	end  func()
}

func (m *machine) open(cmd *exec.Cmd) *shell {
	m.t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		m.t.Fatal(err)
	}
	s := &shell{keys: in, tty: &log{}}
	cmd.Stdout, cmd.Stderr = s.tty, s.tty
	s.end = m.start(cmd)
	return s
}

func (s *shell) press(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(s.keys, text); err != nil {
		t.Fatal(err)
	}
}

// types presses keys until the agent sees one, and returns when that was. The
// kernel updates a terminal's times in steps of 8 s, so a key press soon after
// another is invisible.
func (m *machine) types(s *shell) (last time.Time) {
	m.t.Helper()
	m.await("keys are seen", 2*time.Minute, func() bool {
		last = time.Now()
		s.press(m.t, "true\n")
		<-time.After(time.Second)
		return m.reading("terminals").State == idle.Active
	})
	return last
}

// restful waits until the terminals have been quiet for 3 s.
func (m *machine) restful() {
	m.t.Helper()
	since := time.Now()
	m.await("quiet terminals", 2*time.Minute, func() bool {
		if m.reading("terminals").State != idle.Quiet {
			since = time.Now()
		}
		return time.Since(since) > 3*time.Second
	})
}

// login starts a real sshd inside the machine and logs in with a terminal.
func (m *machine) login() *shell {
	m.t.Helper()
	need(m.t, "/usr/sbin/sshd", "ssh", "ssh-keygen")
	conf := fmt.Sprintf("Port 2222\nListenAddress 127.0.0.1\nHostKey %[1]s/host\nAuthorizedKeysFile %[1]s/allowed\nPermitRootLogin yes\nStrictModes no\nUsePAM no\nPrintMotd no\nPrintLastLog no\nPidFile none\n", m.dir)
	m.sh(fmt.Sprintf("mkdir -p /run/sshd; cd %s && ssh-keygen -q -t ed25519 -N '' -f host && ssh-keygen -q -t ed25519 -N '' -f key && cp key.pub allowed && cat > sshd.conf <<'EOT'\n%sEOT", m.dir, conf))
	m.start(m.command("/usr/sbin/sshd", "-D", "-e", "-f", filepath.Join(m.dir, "sshd.conf")))
	m.await("sshd listens", 2*time.Minute, func() bool { return m.command("bash", "-c", "true < /dev/tcp/127.0.0.1/2222").Run() == nil })
	s := m.open(m.command("ssh", "-tt", "-p", "2222", "-i", filepath.Join(m.dir, "key"), "-o", "StrictHostKeyChecking=no",
		"-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "root@127.0.0.1", "PS1='$ ' exec bash --norc --noprofile -i"))
	m.await("the login", 2*time.Minute, func() bool { return strings.Contains(s.tty.String(), "$") })
	return s
}

// TestLoginShell logs in over ssh. Typing must count as use as long as it
// continues. An open shell must not: the machine goes down after its timeout, and
// not earlier.
func TestLoginShell(t *testing.T) {
	t.Parallel()
	login := func(t *testing.T) (*machine, *shell, time.Time) {
		t.Parallel()
		m := newMachine(t)
		m.agent(quick("signals: [network, terminals, users, recent]")...)
		s := m.login()
		return m, s, m.types(s)
	}
	t.Run("typing", func(t *testing.T) {
		m, s, began := login(t)
		m.becomes("recent", idle.Active)
		if r := m.reading("recent"); !strings.Contains(r.Detail, "wtmp") {
			t.Logf("the login was not seen in wtmp: %+v", r)
		}
		if s := m.status(); s.Stage != 1 {
			t.Errorf("stage %d answered, want 1: %+v", s.Stage, s.Stages)
		}
		m.restful()
		// Press a key from time to time, for longer than the idle timeout.
		for time.Since(began) < 75*time.Second {
			m.types(s)
			for end := time.Now().Add(20 * time.Second); time.Now().Before(end); pause() {
				m.isOn("while a user types now and then")
			}
		}
	})
	t.Run("left open", func(t *testing.T) {
		m, s, last := login(t)
		// The sessions are read again once the terminals are quiet.
		m.await("users have the time of the keys", 2*time.Minute, func() bool { return m.reading("users").LastEvent.After(last.Add(-10 * time.Second)) })
		off := m.offAt(3 * time.Minute)
		if quiet := off.Sub(last); quiet < 52*time.Second { // a terminal's times move in steps of 8 s
			t.Errorf("powered off %s after the last key, the idle-timeout is 1m", quiet)
		}
		text := s.tty.String()
		if n := strings.Count(text, "*** lull on"); n != 1 {
			t.Errorf("the open shell was warned %d times in its last idle stretch:\n%s", n, text)
		}
		if n := m.warnings(); n != 1 {
			t.Errorf("%d warnings in the history", n)
		}
		t.Logf("powered off %s after the last key", off.Sub(last).Round(time.Second))
	})
}

// TestWarningAnswered responds to the warning from the open shell. After lull
// agent snooze the machine must stay up. After a key press its whole timeout must
// begin again, with another warning.
func TestWarningAnswered(t *testing.T) {
	t.Parallel()
	need(t, "script")
	warned := func(t *testing.T) (*machine, *shell) {
		t.Parallel()
		m := newMachine(t)
		// The warning comes early, so that the response is in time even on a busy
		// machine.
		m.agent("idle-timeout: 1m", "check-interval: 1s", "warn-before: 25s", "boot-grace: 0s", "signals: [terminals, users, recent]")
		s := m.open(m.command("script", "-qec", "bash --norc --noprofile -i", "/dev/null"))
		m.await("a warning on the terminal", 2*time.Minute, func() bool { return strings.Contains(s.tty.String(), "agent snooze") })
		return m, s
	}
	t.Run("snooze", func(t *testing.T) {
		m, _ := warned(t)
		if out, code := m.lull("agent", "snooze", "2h"); code != 0 {
			t.Fatalf("snooze ended with %d: %s", code, out)
		}
		for end := time.Now().Add(20 * time.Second); time.Now().Before(end); pause() {
			m.isOn("after the warning was answered")
		}
		st := m.status()
		if !st.Verdict.InSnoozePeriod || st.Verdict.Eligible {
			t.Errorf("after the snooze: %+v", st.Verdict)
		}
		if out, code := m.lull("agent", "why"); code != 0 || !strings.Contains(out, "nooze") {
			t.Errorf("why does not tell of the snooze (%d):\n%s", code, out)
		}
		if out, code := m.lull("agent", "history", "--json"); code != 0 || !strings.Contains(out, `"by": "root"`) {
			t.Errorf("the history does not tell who snoozed (%d):\n%s", code, out)
		}
	})
	t.Run("key", func(t *testing.T) {
		m, s := warned(t)
		pressed := time.Now()
		s.press(t, "true\n")
		off := m.offAt(3 * time.Minute)
		if after := off.Sub(pressed); after < 50*time.Second { // a terminal's times move in steps of 8 s
			t.Errorf("powered off %s after the key that answered the warning", after)
		}
		if n := m.warnings(); n != 2 {
			t.Errorf("%d warnings, want one for each idle stretch", n)
		}
	})
}

// TestTmux checks that a detached tmux counts as use while its program prints,
// and otherwise does not, however long it exists.
func TestTmux(t *testing.T) {
	t.Parallel()
	need(t, "tmux")
	detached := func(t *testing.T) (m *machine, print func(lines int)) {
		t.Parallel()
		m = newMachine(t)
		m.agent(quick("signals: [terminals, users, recent]")...)
		tmux := func(args string) { m.sh("tmux -S " + m.dir + "/tmux -f /dev/null " + args) }
		tmux("new-session -d 'while read -r n; do for i in $(seq $n); do echo $i; sleep 1; done; done'")
		t.Cleanup(func() { m.command("tmux", "-S", m.dir+"/tmux", "kill-server").Run() })
		m.restful()
		return m, func(lines int) {
			tmux(fmt.Sprintf("send-keys %d Enter", lines))
			m.becomes("terminals", idle.Active)
		}
	}
	t.Run("prints", func(t *testing.T) {
		m, print := detached(t)
		print(600)
		for began := time.Now(); time.Since(began) < 68*time.Second; pause() { // longer than the idle-timeout
			m.isOn("while a detached tmux prints")
		}
		if v := m.status().Verdict; v.IdleMinutes > 0.5 {
			t.Errorf("idle for %.2f minutes while something is printed", v.IdleMinutes)
		}
	})
	t.Run("silent", func(t *testing.T) {
		m, print := detached(t)
		began := time.Now()
		print(5)
		if quiet := m.offAt(3 * time.Minute).Sub(began); quiet < 50*time.Second { // a terminal's times move in steps of 8 s
			t.Errorf("powered off %s after the output", quiet)
		}
	})
}

// TestPrivilege checks which users may use the agent's socket, and which files
// the agent trusts.
func TestPrivilege(t *testing.T) {
	t.Parallel()
	need(t, "setpriv")
	m := newMachine(t)
	m.agent(quick()...)
	as := func(group string) (string, error) {
		b, err := m.command("setpriv", "--reuid", "65534", "--regid", group, "--clear-groups", program, "agent", "status", "--json").CombinedOutput()
		return string(b), err
	}
	if out, err := as("65534"); err == nil || !strings.Contains(out, "permission denied") {
		t.Errorf("another user was answered (%v): %.200s", err, out)
	}
	if out, err := as("4242"); err != nil || !strings.HasPrefix(out, "{") {
		t.Errorf("a member of group lull was refused (%v): %.200s", err, out)
	}
	if out, code := m.lull("agent", "halt", "--reason", "test"); code != 0 {
		t.Errorf("halt ended with %d: %s", code, out)
	}
	if m.status().Halted == nil {
		t.Error("it is not halted")
	}

	// A policy file that other users could have written must be ignored, and the
	// last good one must apply.
	m.policy(quick("hibernate-on-idle: true", "allow-tag-hooks: true")...)
	m.sh("chmod 0666 " + m.dir + "/agent.yaml")
	out, code := m.lull("agent", "reload")
	if code != 1 || !strings.Contains(out, "writable by") {
		t.Errorf("reload of a file open to all ended with %d: %s", code, out)
	}
	for _, v := range m.status().Settings {
		if v.Name == "hibernate-on-idle" && v.Value == "true" {
			t.Error("a setting of a file open to all holds")
		}
	}
	m.sh("chmod 0644 " + m.dir + "/agent.yaml")
	if out, code = m.lull("agent", "reload"); code != 0 || !strings.Contains(out, "hibernate-on-idle") {
		t.Errorf("reload of the closed file ended with %d: %s", code, out)
	}
	if out, code = m.lull("agent", "run", "--cloud", "none", "--config", m.dir+"/agent.yaml", "--state", m.dir+"/state"); code != 1 || !strings.Contains(out, "another lull") {
		t.Errorf("a second agent ended with %d: %s", code, out)
	}
	for _, c := range [][]string{{"agent", "snooze", "-5m"}, {"agent", "snooze", "never"}, {"agent", "lease", "hold", "--for", "25h"}, {"agent", "history", "--since", "soon"}} {
		if out, code := m.lull(c...); code != 2 {
			t.Errorf("%v ended with %d, want 2: %s", c, code, out)
		}
	}
	if out, code := m.lull("agent", "lease", "release", "--holder", "missing"); code != 3 {
		t.Errorf("releasing no lease ended with %d, want 3: %s", code, out)
	}
}
