// Package systemd is a client of systemd managers: the machine's, and those of
// users. It reads units, freezes, thaws, starts and stops them, and notifies when
// something about a unit may have changed. It decides nothing.
//
// It uses D-Bus over the manager's own socket, like systemctl, so it needs no
// message bus.
package systemd

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
)

// SystemSocket is the socket of the machine's manager.
const SystemSocket = "/run/systemd/private"

// UserSocket returns the socket of the manager of the user with that ID.
func UserSocket(uid string) string {
	return filepath.Join("/run/user", uid, "systemd/private")
}

// D-Bus names.
const (
	destination = "org.freedesktop.systemd1" // ignored without a bus
	managerPath = "/org/freedesktop/systemd1"
	unitPath    = managerPath + "/unit/"
	managerFace = destination + ".Manager"
	unitFace    = destination + ".Unit"
	serviceFace = destination + ".Service"
	timerFace   = destination + ".Timer"
	properties  = "org.freedesktop.DBus.Properties"
)

// Unit is the state of a unit.
type Unit struct {
	Name        string // canonical name, not an alias
	Load        string // loaded, not-found, masked, error, ...
	Active      string // active, reloading, inactive, failed, activating, deactivating
	Sub         string
	Freezer     string // running, freezing, frozen or thawing, as last requested from the manager
	Invocation  string // identifies one run, in hexadecimal; empty if it never ran
	Job         uint32 // 0 if no job is queued or in progress
	CanFreeze   bool
	NeedsReload bool // its files have changed since the manager read them
	CanStart    bool
	CanStop     bool
	TriggeredBy []string
	Fragment    string
	DropIns     []string
}

// Running reports whether the unit runs and is not being stopped.
func (u *Unit) Running() bool { return u.Active == "active" || u.Active == "reloading" }

// Over reports whether the unit is not running and is not being started or
// stopped.
func (u *Unit) Over() bool { return u.Active == "inactive" || u.Active == "failed" }

// ServiceState is the additional state of a .service unit.
type ServiceState struct {
	Type     string
	Group    string // path of its control group; empty if it has none
	PID      int    // main process, 0 if there is none
	Result   string // success, or why it failed
	Watchdog time.Duration
	StopsIn  time.Duration // how long a stop may take before the processes are killed; 0 for no limit
}

// ErrNoAnswer means that a manager did not answer, so that the state of its units
// is unknown.
var ErrNoAnswer = errors.New("systemd does not answer")

// Conn is a client of one manager. Its methods are safe for concurrent use. They
// also work after the manager was replaced or restarted.
type Conn struct {
	socket string

	mu      sync.Mutex
	conn    *dbus.Conn // nil if there is none
	watches map[string]map[*Watch]bool
	ending  chan struct{} // closed by Close
	serving sync.WaitGroup
	jobs    map[dbus.ObjectPath]chan string // channels for the results of awaited jobs
	early   map[dbus.ObjectPath]string      // results that arrived before the reply with the job's path
	asking  int                             // pending requests whose reply will contain a job

	reloading atomic.Pointer[func()]
}

// New returns a client of the manager that listens on socket. It connects at
// first use.
func New(socket string) *Conn {
	return &Conn{socket: socket, watches: map[string]map[*Watch]bool{}, ending: make(chan struct{}),
		jobs: map[dbus.ObjectPath]chan string{}, early: map[dbus.ObjectPath]string{}}
}

// Close ends the connection and all watches.
func (m *Conn) Close() {
	m.mu.Lock()
	select {
	case <-m.ending:
	default:
		close(m.ending)
	}
	if m.conn != nil {
		m.conn.Close()
		m.conn = nil
	}
	m.mu.Unlock()
	m.serving.Wait()
}

// connect returns the connection, dialing if there is none.
func (m *Conn) connect(ctx context.Context) (*dbus.Conn, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.conn != nil && m.conn.Connected() {
		return m.conn, nil
	}
	select {
	case <-m.ending:
		return nil, fmt.Errorf("%w: %s is closed", ErrNoAnswer, m.socket)
	default:
	}
	conn, err := dbus.Dial("unix:path=" + m.socket)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoAnswer, err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	err = conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Getuid()))})
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("%w on %s: %w", ErrNoAnswer, m.socket, err)
	}
	signals := make(chan *dbus.Signal, 64)
	conn.Signal(signals)
	m.conn = conn
	m.serving.Go(func() { m.serve(conn, signals) })
	return conn, nil
}

// call calls one method of an object and decodes the reply.
func (m *Conn) call(ctx context.Context, path dbus.ObjectPath, method string, into []any, args ...any) error {
	conn, err := m.connect(ctx)
	if err != nil {
		return err
	}
	c := conn.Object(destination, path).CallWithContext(ctx, method, 0, args...)
	var said dbus.Error
	switch {
	case c.Err == nil:
	case errors.As(c.Err, &said):
		return refusal(said)
	default:
		return fmt.Errorf("%w: %w", ErrNoAnswer, c.Err)
	}
	if err := c.Store(into...); err != nil {
		return fmt.Errorf("%w as expected to %s: %w", ErrNoAnswer, method, err)
	}
	return nil
}

// RefusedError is a manager's refusal of a request.
type RefusedError struct {
	Name string // D-Bus name of the error
	Text string
}

func (e *RefusedError) Error() string { return "systemd answered: " + e.Text }

func refusal(e dbus.Error) error {
	text := e.Name
	if len(e.Body) > 0 {
		if s, ok := e.Body[0].(string); ok {
			text = strings.TrimSuffix(s, ".")
		}
	}
	if strings.HasPrefix(e.Name, "org.freedesktop.DBus.Error.NoReply") || strings.HasPrefix(e.Name, "org.freedesktop.DBus.Error.Disconnected") {
		return fmt.Errorf("%w: %s", ErrNoAnswer, text)
	}
	return &RefusedError{e.Name, text}
}

// pathOf returns the object path of a unit. Using it makes the manager load the
// unit.
func pathOf(name string) dbus.ObjectPath {
	var b strings.Builder
	b.WriteString(unitPath)
	for n := range len(name) {
		c := name[n]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || n > 0 && c >= '0' && c <= '9' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "_%02x", c)
		}
	}
	return dbus.ObjectPath(b.String())
}

// props are the properties of one interface of an object.
type props map[string]dbus.Variant

func (m *Conn) props(ctx context.Context, name, face string) (props, error) {
	p := props{}
	if err := m.call(ctx, pathOf(name), properties+".GetAll", []any{&p}, face); err != nil {
		return nil, fmt.Errorf("cannot read the unit %s: %w", name, err)
	}
	return p, nil
}

// take stores the property name in into. If the property is missing or has
// another type, take appends an error to errs and leaves into unchanged.
func take[T any](p props, name string, into *T, errs *[]error) {
	if v, ok := p[name].Value().(T); ok {
		*into = v
	} else {
		*errs = append(*errs, fmt.Errorf("systemd does not report %s", name))
	}
}

// Unit reads a unit. One that does not exist has Load "not-found".
func (m *Conn) Unit(ctx context.Context, name string) (u Unit, err error) {
	p, err := m.props(ctx, name, unitFace)
	if err != nil {
		return u, err
	}
	var errs []error
	take(p, "Id", &u.Name, &errs)
	take(p, "LoadState", &u.Load, &errs)
	take(p, "ActiveState", &u.Active, &errs)
	take(p, "SubState", &u.Sub, &errs)
	take(p, "CanStart", &u.CanStart, &errs)
	take(p, "CanStop", &u.CanStop, &errs)
	take(p, "TriggeredBy", &u.TriggeredBy, &errs)
	var id []byte
	take(p, "InvocationID", &id, &errs)
	u.Invocation = fmt.Sprintf("%x", id)
	var job []any
	if take(p, "Job", &job, &errs); len(job) > 0 {
		u.Job, _ = job[0].(uint32)
	}
	var since []error // may be missing: systemd can freeze units only since version 246
	take(p, "FreezerState", &u.Freezer, &since)
	take(p, "CanFreeze", &u.CanFreeze, &since)
	take(p, "NeedDaemonReload", &u.NeedsReload, &since)
	take(p, "FragmentPath", &u.Fragment, &since)
	take(p, "DropInPaths", &u.DropIns, &since)
	return u, errors.Join(errs...)
}

// Service reads a .service unit.
func (m *Conn) Service(ctx context.Context, name string) (s ServiceState, err error) {
	p, err := m.props(ctx, name, serviceFace)
	if err != nil {
		return s, err
	}
	var errs []error
	var pid uint32
	var watchdog, stop uint64
	take(p, "Type", &s.Type, &errs)
	take(p, "ControlGroup", &s.Group, &errs)
	take(p, "MainPID", &pid, &errs)
	take(p, "Result", &s.Result, &errs)
	take(p, "WatchdogUSec", &watchdog, &errs)
	take(p, "TimeoutStopUSec", &stop, &errs)
	s.PID, s.Watchdog, s.StopsIn = int(pid), micros(watchdog), micros(stop)
	return s, errors.Join(errs...)
}

// Watchdog returns the interval at which a service must send keep-alives; 0 if it
// need not.
func (m *Conn) Watchdog(ctx context.Context, name string) (time.Duration, error) {
	var v dbus.Variant
	if err := m.call(ctx, pathOf(name), properties+".Get", []any{&v}, serviceFace, "WatchdogUSec"); err != nil {
		return 0, fmt.Errorf("cannot read the watchdog of %s: %w", name, err)
	}
	us, ok := v.Value().(uint64)
	if !ok {
		return 0, fmt.Errorf("cannot read the watchdog of %s: %w", name, ErrNoAnswer)
	}
	return micros(us), nil
}

// micros converts a time span of systemd's. Systemd's infinity becomes 0.
func micros(us uint64) time.Duration {
	if us > math.MaxInt64/1000 {
		return 0
	}
	return time.Duration(us) * time.Microsecond
}

// Next returns when a timer unit elapses next, by the wall clock. The zero time
// means never.
func (m *Conn) Next(ctx context.Context, timer string) (at time.Time, err error) {
	p, err := m.props(ctx, timer, timerFace)
	if err != nil {
		return at, err
	}
	var errs []error
	var wall, mono uint64
	take(p, "NextElapseUSecRealtime", &wall, &errs)
	take(p, "NextElapseUSecMonotonic", &mono, &errs)
	if micros(wall) > 0 {
		at = time.UnixMicro(int64(wall))
	}
	if micros(mono) > 0 {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			return at, err
		}
		if t := time.Now().Add(micros(mono) - time.Duration(now.Nano())).Round(0); at.IsZero() || t.Before(at) {
			at = t
		}
	}
	return at, errors.Join(errs...)
}

// Freeze freezes a unit. It returns nil once the manager has seen every process
// of the unit frozen.
func (m *Conn) Freeze(ctx context.Context, name string) error {
	return m.call(ctx, managerPath, managerFace+".FreezeUnit", nil, name)
}

// Thaw thaws a unit. It returns nil once the manager has seen the unit running.
func (m *Conn) Thaw(ctx context.Context, name string) error {
	return m.call(ctx, managerPath, managerFace+".ThawUnit", nil, name)
}

// Reload makes the manager read its unit files again.
func (m *Conn) Reload(ctx context.Context) error {
	return m.call(ctx, managerPath, managerFace+".Reload", nil)
}

// Names returns the names of the loaded units that end in suffix.
func (m *Conn) Names(ctx context.Context, suffix string) (names []string, err error) {
	var all [][]any
	if err := m.call(ctx, managerPath, managerFace+".ListUnitsByPatterns", []any{&all}, []string{"active"}, []string{"*" + suffix}); err != nil {
		return nil, err
	}
	for _, u := range all {
		if name, ok := u[0].(string); ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// Done is the result of a successful job.
const Done = "done"

// Job is a start or stop job that a manager has queued.
type Job struct {
	m    *Conn
	path dbus.ObjectPath
	ends chan string
}

// Start queues a start of a unit. It does not replace other jobs.
func (m *Conn) Start(ctx context.Context, name string) (*Job, error) {
	return m.queue(ctx, "StartUnit", name, "fail")
}

// Stop queues a stop of a unit. It does not replace other jobs.
func (m *Conn) Stop(ctx context.Context, name string) (*Job, error) {
	return m.queue(ctx, "StopUnit", name, "fail")
}

func (m *Conn) queue(ctx context.Context, method, name, mode string) (*Job, error) {
	m.mu.Lock()
	m.asking++
	m.mu.Unlock()
	var path dbus.ObjectPath
	err := m.call(ctx, managerPath, managerFace+"."+method, []any{&path}, name, mode)
	m.mu.Lock()
	defer m.mu.Unlock()
	j := &Job{m, path, make(chan string, 1)}
	if result, ok := m.early[path]; ok && err == nil {
		j.ends <- result
	} else if err == nil {
		m.jobs[path] = j.ends
	}
	if m.asking--; m.asking == 0 {
		clear(m.early)
	}
	return j, err
}

// Wait waits for the job and returns its result: Done, or canceled, timeout,
// failed, dependency, skipped. It returns an error if the result is unknown.
func (j *Job) Wait(ctx context.Context) (result string, err error) {
	select {
	case r, ok := <-j.ends:
		if !ok {
			return "", fmt.Errorf("%w: it was replaced before the job ended", ErrNoAnswer)
		}
		return r, nil
	case <-ctx.Done():
		j.m.mu.Lock()
		delete(j.m.jobs, j.path)
		j.m.mu.Unlock()
		return "", context.Cause(ctx)
	}
}

// Watch receives notifications about one unit.
type Watch struct {
	m    *Conn
	name string
	// C receives an element when something about the unit may have changed since
	// it was last read: its state, its jobs, its files, or the manager itself.
	C chan struct{}
	// queued, if not nil, is called when a job for the unit is queued, by the
	// goroutine that reads signals. It must not block.
	queued func()
}

// Watch starts a watch of a unit. queued may be nil; see Watch.queued.
func (m *Conn) Watch(name string, queued func()) *Watch {
	w := &Watch{m, name, make(chan struct{}, 1), queued}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.watches[name] == nil {
		m.watches[name] = map[*Watch]bool{}
	}
	m.watches[name][w] = true
	return w
}

// Close ends the watch.
func (w *Watch) Close() {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if delete(w.m.watches[w.name], w); len(w.m.watches[w.name]) == 0 {
		delete(w.m.watches, w.name)
	}
}

func (w *Watch) notify() {
	select {
	case w.C <- struct{}{}:
	default: // an unread element is already there
	}
}

// reconnectAfter is the delay before a lost connection is replaced. All watches
// are notified then, because they may have missed changes.
const reconnectAfter = 100 * time.Millisecond

// serve reads the signals of one connection until it ends, and then reconnects if
// there are watches.
func (m *Conn) serve(conn *dbus.Conn, signals chan *dbus.Signal) {
	m.notifyAll() // earlier signals were missed
	for s := range signals {
		m.heed(s)
	}
	m.mu.Lock()
	if m.conn == conn {
		m.conn = nil
	}
	for path, c := range m.jobs {
		close(c)
		delete(m.jobs, path)
	}
	m.mu.Unlock()
	m.notifyAll()
	for {
		select {
		case <-m.ending:
			return
		case <-time.After(reconnectAfter):
		}
		m.mu.Lock()
		needed := m.conn == nil && len(m.watches) > 0
		m.mu.Unlock()
		if !needed {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err := m.connect(ctx)
		cancel()
		if err == nil {
			return
		}
	}
}

// notifyAll notifies every watch.
func (m *Conn) notifyAll() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, ws := range m.watches {
		for w := range ws {
			w.notify()
		}
	}
}

// heed notifies the watches of the unit that a signal is about.
func (m *Conn) heed(s *dbus.Signal) {
	switch s.Name {
	case managerFace + ".JobNew", managerFace + ".JobRemoved":
		if len(s.Body) < 3 {
			return
		}
		path, _ := s.Body[1].(dbus.ObjectPath)
		name, _ := s.Body[2].(string)
		m.mu.Lock()
		if s.Name == managerFace+".JobRemoved" && len(s.Body) > 3 {
			result, _ := s.Body[3].(string)
			if c := m.jobs[path]; c != nil {
				c <- result
				delete(m.jobs, path)
			} else if m.asking > 0 {
				m.early[path] = result
			}
		}
		ws := m.watching(name)
		m.mu.Unlock()
		for _, w := range ws {
			if s.Name == managerFace+".JobNew" && w.queued != nil {
				w.queued()
			}
			w.notify()
		}
	case properties + ".PropertiesChanged":
		m.mu.Lock()
		defer m.mu.Unlock()
		for name, ws := range m.watches {
			if pathOf(name) == s.Path {
				for w := range ws {
					w.notify()
				}
			}
		}
	case managerFace + ".Reloading":
		if begins, ok := first[bool](s.Body); ok && begins {
			if f := m.reloading.Load(); f != nil {
				(*f)()
			}
		}
		m.notifyAll()
	case managerFace + ".UnitFilesChanged":
		m.notifyAll()
	}
}

// OnReloading sets what is called when the manager begins to read its unit files
// again, before it reads them. It is called by the goroutine that reads signals, and
// must be quick.
func (m *Conn) OnReloading(f func()) { m.reloading.Store(&f) }

// first returns the first argument of a signal.
func first[T any](body []any) (v T, ok bool) {
	if len(body) > 0 {
		v, ok = body[0].(T)
	}
	return v, ok
}

// watching returns the watches of a unit. The caller holds mu.
func (m *Conn) watching(name string) (ws []*Watch) {
	for w := range m.watches[name] {
		ws = append(ws, w)
	}
	return ws
}
