package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"

	"lull/internal/core/idle"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

// machineBus starts a private system bus below a temporary root.
func machineBus(t *testing.T) (root string) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	daemon, err := exec.LookPath("dbus-daemon")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skipf("SKIP logind: %v", err)
	}
	root, err = os.MkdirTemp("", "lull-bus-") // a short path: a socket's has 107 bytes
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(root) })
	for _, dir := range []string{"run/dbus", "run/systemd/sessions"} {
		errtest.None(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	conf := filepath.Join(root, "bus.conf")
	text := fmt.Sprintf(`<busconfig><listen>unix:path=%s/run/dbus/system_bus_socket</listen>
<policy context="default"><allow user="*"/><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/></policy></busconfig>`, root)
	errtest.None(t, os.WriteFile(conf, []byte(text), 0o644))
	cmd := exec.Command(daemon, "--config-file="+conf, "--nofork", "--nosyslog", "--print-address=1")
	out, err := cmd.StdoutPipe()
	errtest.None(t, err)
	errtest.None(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	if _, err := out.Read(make([]byte, 512)); err != nil {
		t.Fatalf("dbus-daemon does not start: %v", err)
	}
	return root
}

// fakeLogind plays systemd-logind and systemd on that bus.
type fakeLogind struct {
	conn *dbus.Conn

	mu         sync.Mutex
	sessions   map[string]map[string]dbus.Variant // by id
	inhibitors []Inhibitor
	hang       chan struct{} // if not nil, requests block until it is closed
}

type listedSession struct {
	ID   string
	UID  uint32
	User string
	Seat string
	Path dbus.ObjectPath
}

// ListSessions is a method of logind's manager.
func (f *fakeLogind) ListSessions() ([]listedSession, *dbus.Error) {
	f.mu.Lock()
	hang := f.hang
	out := []listedSession{{"gone", 1000, "gone", "", logindPath + "/session/gone"}} // a session that has ended since
	for id := range f.sessions {
		out = append(out, listedSession{id, 1000, "anna", "", dbus.ObjectPath(logindPath + "/session/" + id)})
	}
	f.mu.Unlock()
	if hang != nil {
		<-hang
	}
	return out, nil
}

// ListInhibitors is a method of logind's manager.
func (f *fakeLogind) ListInhibitors() ([]Inhibitor, *dbus.Error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.inhibitors, nil
}

// properties serves the properties of a session.
type properties struct {
	f  *fakeLogind
	id string
}

// GetAll is org.freedesktop.DBus.Properties.GetAll.
func (p properties) GetAll(string) (map[string]dbus.Variant, *dbus.Error) {
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	if p.f.sessions[p.id] == nil {
		return nil, dbus.NewError("org.freedesktop.DBus.Error.UnknownObject", nil) // the error that sd-bus returns
	}
	return p.f.sessions[p.id], nil
}

func (f *fakeLogind) set(id string, props map[string]any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := map[string]any{"Id": id, "Name": "anna", "Class": "user", "State": "active", "Type": "tty", "TTY": "", "RemoteHost": "",
		"Timestamp": uint64(time.Now().Add(-time.Hour).UnixMicro()), "Leader": uint32(1), "IdleHint": false, "IdleSinceHint": uint64(0)}
	for k, v := range props {
		all[k] = v
	}
	f.sessions = map[string]map[string]dbus.Variant{id: {}}
	for k, v := range all {
		f.sessions[id][k] = dbus.MakeVariant(v)
	}
}

func serveLogind(t *testing.T, root string) *fakeLogind {
	t.Helper()
	conn, err := dbus.Connect("unix:path=" + filepath.Join(root, "run/dbus/system_bus_socket"))
	errtest.None(t, err)
	t.Cleanup(func() { conn.Close() })
	f := &fakeLogind{conn: conn, sessions: map[string]map[string]dbus.Variant{}}
	err = conn.Export(f, logindPath, managerIfc)
	for _, id := range []string{"c1", "gone"} {
		err = errors.Join(err, conn.Export(properties{f, id}, dbus.ObjectPath(logindPath+"/session/"+id), "org.freedesktop.DBus.Properties"))
	}
	if err != nil {
		t.Fatal(err)
	}
	if r, err := conn.RequestName(logindName, dbus.NameFlagDoNotQueue); err != nil || r != dbus.RequestNameReplyPrimaryOwner {
		t.Fatalf("%v, %v", r, err)
	}
	return f
}

// TestLogind reads sessions and inhibitors from a fake logind on a real bus, and
// checks the readings derived from them.
func TestLogind(t *testing.T) {
	root := machineBus(t)
	l := &Logind{Root: root}
	t.Cleanup(l.Close)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if _, err := l.Sessions(ctx); !errors.Is(err, ErrNoLogind) {
		t.Errorf("a bus without logind: %v", err)
	}
	left := filepath.Join(root, "run/systemd/sessions/c9")
	put(t, root, "run/systemd/sessions/c9", "")
	if _, err := l.Sessions(ctx); err == nil || missing(err) {
		t.Errorf("a logind that has gone while a user is logged in: %v", err)
	}
	errtest.None(t, os.Remove(left))
	f := serveLogind(t, root)
	logins := func() *LoginReader { return &LoginReader{Root: root, Logins: l} }
	since := time.Now().Add(-40 * time.Minute).Truncate(time.Second)
	for name, c := range map[string]struct {
		props map[string]any
		want  idle.State
		last  time.Time // time of the last event; zero if it is not checked
	}{
		"a desktop in use": {map[string]any{"Type": "wayland"}, idle.Active, time.Time{}},
		"an idle desktop":  {map[string]any{"Type": "x11", "IdleHint": true, "IdleSinceHint": uint64(since.UnixMicro())}, idle.Quiet, since},
		"a greeter":        {map[string]any{"Type": "wayland", "Class": "greeter"}, idle.Quiet, time.Time{}},
		"a lock screen":    {map[string]any{"Type": "wayland", "Class": "lock-screen"}, idle.Quiet, time.Time{}},
		"a manager":        {map[string]any{"Class": "manager"}, idle.Quiet, time.Time{}},
		"one that closes":  {map[string]any{"Type": "wayland", "State": "closing"}, idle.Quiet, time.Time{}},
	} {
		t.Run(name, func(t *testing.T) {
			f.set("c1", c.props)
			r := logins().Users(ctx, time.Now(), false)
			if r.State != c.want || !c.last.IsZero() && !r.LastEvent.Equal(c.last) {
				t.Errorf("%+v, want %s at %s", r, c.want, c.last)
			}
		})
	}
	for name, c := range map[string]struct {
		locks []Inhibitor
		want  idle.State
	}{
		"none":           {nil, idle.Quiet},
		"blocks sleep":   {[]Inhibitor{{What: "sleep:idle", Who: "dnf", Why: "upgrade", Mode: "block"}}, idle.Active},
		"delays sleep":   {[]Inhibitor{{What: "sleep", Who: "NetworkManager", Mode: "delay"}}, idle.Quiet},
		"blocks the lid": {[]Inhibitor{{What: "handle-lid-switch", Who: "x", Mode: "block"}}, idle.Quiet},
		"one of several": {[]Inhibitor{{What: "sleep", Who: "a", Mode: "delay"}, {What: "handle-power-key:shutdown", Who: "b", Why: "backup", Mode: "block"}}, idle.Active},
	} {
		t.Run("inhibitors "+name, func(t *testing.T) {
			f.mu.Lock()
			f.inhibitors = c.locks
			f.mu.Unlock()
			if r := l.Inhibiting(ctx, time.Now()); r.State != c.want {
				t.Errorf("%+v, want %s", r, c.want)
			}
		})
	}
	t.Run("hangs", func(t *testing.T) {
		f.set("c1", nil)
		hang := make(chan struct{})
		f.mu.Lock()
		f.hang = hang
		f.mu.Unlock()
		short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		if r := logins().Users(short, time.Now(), false); r.State != idle.Unknown {
			t.Errorf("%+v", r)
		}
		close(hang)
		f.mu.Lock()
		f.hang = nil
		f.mu.Unlock()
		if _, err := l.Sessions(ctx); err != nil {
			t.Errorf("afterwards: %v", err)
		}
	})
	t.Run("goes away", func(t *testing.T) {
		f.conn.Close()
		waittest.Until(t, "logind is known to be gone", func() bool { _, err := l.Sessions(ctx); return errors.Is(err, ErrNoLogind) })
	})
}

// TestNoBusIsNoLogind checks that only a machine without systemd yields
// ErrNoLogind, and that a failing bus is another error.
func TestNoBusIsNoLogind(t *testing.T) {
	root := t.TempDir()
	l := &Logind{Root: root}
	if _, err := l.Sessions(t.Context()); !errors.Is(err, ErrNoLogind) {
		t.Errorf("nothing there: %v", err)
	}
	sessions := filepath.Join(root, "run/systemd/sessions")
	errtest.None(t, os.MkdirAll(filepath.Dir(sessions), 0o755))
	put(t, root, "run/systemd/sessions", "") // a file, so that listing it fails
	if _, err := l.Sessions(t.Context()); err == nil || missing(err) {
		t.Errorf("sessions that cannot be listed: %v", err)
	}
	errtest.None(t, os.Remove(sessions))
	for _, dir := range []string{"run/dbus", "run/systemd/sessions"} {
		errtest.None(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	if _, err := l.Sessions(t.Context()); !errors.Is(err, ErrNoLogind) {
		t.Errorf("no bus and no session: %v", err)
	}
	put(t, root, "run/systemd/sessions/c1", "")
	if _, err := l.Sessions(t.Context()); err == nil || missing(err) {
		t.Errorf("no bus while a user is logged in: %v", err)
	}
	errtest.None(t, os.WriteFile(filepath.Join(root, "run/dbus/system_bus_socket"), nil, 0o644))
	if _, err := l.Sessions(t.Context()); err == nil || errors.Is(err, ErrNoLogind) || !strings.HasPrefix(err.Error(), "cannot ") {
		t.Errorf("a bus that fails: %v", err)
	}
}
