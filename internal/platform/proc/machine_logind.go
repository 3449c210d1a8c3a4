package proc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/godbus/dbus/v5"
)

// ErrNoLogind means that this machine has no systemd-logind.
var ErrNoLogind = fmt.Errorf("no systemd-logind: %w", fs.ErrNotExist)

// Session is one login of a user.
type Session struct {
	ID, User, TTY string
	Kind          string // tty, x11, wayland, mir, web, unspecified; empty if the source does not report it
	Remote        string
	Leader        int32
	Since         time.Time

	// Input is the time of its last keyboard input. It is zero if no keyboard can
	// be observed, as with sftp or a command over ssh.
	Input time.Time
}

// Logind is a client of systemd-logind on the system bus. It keeps its connection
// open. It is safe for concurrent use; requests are sent one at a time.
type Logind struct {
	Root string // prefix of the socket's path; empty for the live machine

	mu   sync.Mutex
	conn *dbus.Conn
}

const (
	logindName = "org.freedesktop.login1"
	logindPath = "/org/freedesktop/login1"
	managerIfc = "org.freedesktop.login1.Manager"
	sessionIfc = "org.freedesktop.login1.Session"
)

func (l *Logind) connect(ctx context.Context) error {
	if l.conn != nil && l.conn.Connected() {
		return nil
	}
	root := l.Root
	if root == "" {
		root = "/"
	}
	// sd_booted and sd_session check for this directory. Without it, the bus
	// would wait for a logind that cannot start.
	if _, err := l.kept(); err != nil {
		return err
	}
	socket := filepath.Join(root, "run/dbus/system_bus_socket")
	if _, err := os.Stat(socket); err != nil {
		return l.gone(err)
	}
	// The connection outlives this call; ctx bounds only the time to connect.
	conn, err := dbus.Dial("unix:path=" + socket)
	if err != nil {
		return fmt.Errorf("cannot reach the system bus: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	err = conn.Auth(nil)
	if err == nil {
		err = conn.Hello()
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return fmt.Errorf("cannot log in to the system bus: %w", err)
	}
	l.conn = conn
	return nil
}

// kept returns how many session files logind keeps, or ErrNoLogind if logind
// never ran.
func (l *Logind) kept() (int, error) {
	root := l.Root
	if root == "" {
		root = "/"
	}
	files, err := os.ReadDir(filepath.Join(root, "run/systemd/sessions"))
	if missing(err) {
		return 0, ErrNoLogind
	}
	if err != nil {
		return 0, fmt.Errorf("cannot determine whether systemd-logind runs: %w", err)
	}
	return len(files), nil
}

// gone returns the error for a logind that does not answer. It is ErrNoLogind
// only if logind is missing and left no session file, so that no user can be
// logged in.
func (l *Logind) gone(err error) error {
	if n, kerr := l.kept(); kerr != nil || n > 0 {
		// Not wrapped, because err would make this look like a machine without
		// logind.
		return fmt.Errorf("cannot query systemd-logind, although it has %d session files: %v", n, errors.Join(err, kerr))
	}
	if err == nil || missing(err) {
		return ErrNoLogind
	}
	return err
}

// Close ends the connection.
func (l *Logind) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop()
}

func (l *Logind) drop() {
	if l.conn != nil {
		l.conn.Close()
		l.conn = nil
	}
}

// call calls one method and decodes its answer into ret. It returns ErrNoLogind
// if the machine does not have the service.
func (l *Logind) call(ctx context.Context, dest, path, method string, ret any, args ...any) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.connect(ctx); err != nil {
		return err
	}
	c := l.conn.Object(dest, dbus.ObjectPath(path)).CallWithContext(ctx, method, 0, args...)
	if c.Err != nil {
		var e dbus.Error
		if errors.As(c.Err, &e) && e.Name == "org.freedesktop.DBus.Error.ServiceUnknown" {
			return l.gone(nil)
		}
		if ctx.Err() != nil {
			l.drop()
		}
		return fmt.Errorf("cannot ask %s: %w", method, c.Err)
	}
	if err := c.Store(ret); err != nil {
		return fmt.Errorf("cannot read the answer of %s: %w", method, err)
	}
	return nil
}

// Sessions lists the sessions of users, except closing ones.
func (l *Logind) Sessions(ctx context.Context) ([]Session, error) {
	var list []struct {
		ID   string
		UID  uint32
		User string
		Seat string
		Path dbus.ObjectPath
	}
	if err := l.call(ctx, logindName, logindPath, managerIfc+".ListSessions", &list); err != nil {
		return nil, err
	}
	const most = 4096
	if len(list) > most {
		return nil, fmt.Errorf("cannot list sessions: logind lists too many (%d)", len(list))
	}
	var out []Session
	for _, e := range list {
		var props map[string]dbus.Variant
		err := l.call(ctx, logindName, string(e.Path), "org.freedesktop.DBus.Properties.GetAll", &props, sessionIfc)
		if err != nil {
			var gone dbus.Error
			if errors.As(err, &gone) && gone.Name == "org.freedesktop.DBus.Error.UnknownObject" {
				continue // the session ended after it was listed
			}
			return nil, err
		}
		if s, ok := sessionOf(props); ok {
			out = append(out, s)
		}
	}
	return out, nil
}

// sessionOf reads the properties of a session. It returns false for a session
// that is not a user's (greeter, lock screen, manager, background) or is closing.
func sessionOf(props map[string]dbus.Variant) (Session, bool) {
	s := Session{}
	text := func(name string) string { v, _ := props[name].Value().(string); return v }
	micros := func(name string) time.Time {
		v, _ := props[name].Value().(uint64)
		return microTime(int64(min(v, 1<<62)))
	}
	if c := text("Class"); c != "user" && c != "user-early" && c != "user-light" && c != "user-early-light" {
		return s, false
	}
	if text("State") == "closing" {
		return s, false
	}
	s.ID, s.User, s.TTY, s.Kind, s.Remote = text("Id"), text("Name"), text("TTY"), text("Type"), text("RemoteHost")
	s.Since = micros("Timestamp")
	if v, ok := props["Leader"].Value().(uint32); ok {
		s.Leader = int32(v)
	}
	hint, _ := props["IdleHint"].Value().(bool)
	switch s.Kind {
	case "x11", "wayland", "mir", "web":
		// The desktop environment sets IdleHint. While it reports use, the last
		// input is now.
		s.Input = micros("IdleSinceHint")
		if !hint {
			s.Input = time.Now()
		}
	}
	return s, true
}

// Inhibitor is a lock that inhibits shutdown or sleep.
type Inhibitor struct {
	What, Who, Why, Mode string
	UID, PID             uint32
}

// Inhibitors returns the logind locks that indicate that the machine is in use:
// those in block mode on shutdown, sleep or idle.
func (l *Logind) Inhibitors(ctx context.Context) ([]Inhibitor, error) {
	var list []Inhibitor
	if err := l.call(ctx, logindName, logindPath, managerIfc+".ListInhibitors", &list); err != nil {
		return nil, err
	}
	out := list[:0]
	for _, i := range list {
		if i.Mode == "block" && anyOf(i.What, "shutdown", "sleep", "idle") {
			out = append(out, i)
		}
	}
	return out, nil
}

// anyOf reports whether the colon-separated list contains one of the words.
func anyOf(list string, words ...string) bool {
	for len(list) > 0 {
		var w string
		w = list
		for i := range list {
			if list[i] == ':' {
				w = list[:i]
				break
			}
		}
		for _, want := range words {
			if w == want {
				return true
			}
		}
		list = list[min(len(w)+1, len(list)):]
	}
	return false
}

// Timer is a systemd timer and when it fires next.
type Timer struct {
	Unit string
	Next time.Time
}

// Timers returns systemd's active timers that have a calendar time.
func (l *Logind) Timers(ctx context.Context) ([]Timer, error) {
	const systemd, path = "org.freedesktop.systemd1", "/org/freedesktop/systemd1"
	var units []struct {
		Name, Description, Load, Active, Sub, Following string
		Path                                            dbus.ObjectPath
		Job                                             uint32
		JobType                                         string
		JobPath                                         dbus.ObjectPath
	}
	err := l.call(ctx, systemd, path, systemd+".Manager.ListUnitsByPatterns", &units, []string{"active"}, []string{"*.timer"})
	if err != nil {
		return nil, err
	}
	var out []Timer
	for _, u := range units {
		var v dbus.Variant
		err := l.call(ctx, systemd, string(u.Path), "org.freedesktop.DBus.Properties.Get", &v, systemd+".Timer", "NextElapseUSecRealtime")
		if err != nil {
			return nil, err
		}
		if us, ok := v.Value().(uint64); ok && us > 0 && us < maxUnix*1e6 {
			out = append(out, Timer{Unit: u.Name, Next: time.UnixMicro(int64(us))})
		}
	}
	return out, nil
}
