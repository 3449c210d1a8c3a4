package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/idle"
)

// LoginReader reads which users are logged in and who logged in recently.
// Sessions come from logind, from utmp, or else from the terminals alone. Logins
// come from every record that exists of wtmp, wtmpdb, lastlog and lastlog2; if
// none is maintained, from the journal; or else from the times at which terminals
// were opened. The reading names its source, and a missing source never means
// that no user is logged in. A LoginReader is not safe for concurrent use.
//
// Logins that are recorded nowhere and have no terminal (a command over ssh on a
// machine without logind) appear only as cpu, network and disk.
type LoginReader struct {
	Root   string // prefix of every path; empty for the live machine
	Layout UtmpLayout
	Own    *OwnWrites

	// Logins lists sessions; nil means that there is no logind.
	Logins interface {
		Sessions(ctx context.Context) ([]Session, error)
	}

	since time.Time // when users were last checked
}

func (p *LoginReader) path(name string) string {
	root := p.Root
	if root == "" {
		root = "/"
	}
	return filepath.Join(root, name)
}

func (p *LoginReader) layout() UtmpLayout {
	if p.Layout.size == 0 {
		return NativeUtmp()
	}
	return p.Layout
}

// Users returns the reading of the sessions' keyboards: the last input on their
// terminal, or what the desktop reports. A session without a keyboard counts at
// its login. If presence is set, every session counts as active.
func (p *LoginReader) Users(ctx context.Context, now time.Time, presence bool) idle.Reading {
	sessions, source, err := p.Sessions(ctx)
	if err != nil {
		return failed(SignalUsers, now, err)
	}
	r := idle.Reading{Signal: SignalUsers, State: idle.Quiet, Threshold: 1, Unit: "sessions with input", At: now, Detail: source}
	since := p.since
	if since.IsZero() {
		since = now.Add(-time.Minute)
	} else {
		r.Window = idle.Duration(now.Sub(since))
	}
	p.since = now
	for _, s := range sessions {
		at := s.Since
		if s.Input.After(at) {
			at = s.Input
		}
		if at.After(now) {
			at = now.Round(0)
		}
		if at.After(r.LastEvent) {
			r.LastEvent, r.Detail = at, fmt.Sprintf("%s %s, from %s", s.User, s.TTY, source)
		}
		if presence || !at.Before(since) {
			r.Value++
		}
	}
	if r.Value > 0 {
		r.State = idle.Active
	}
	if presence && r.Value > 0 {
		r.LastEvent = time.Time{}
	}
	return r
}

// Sessions lists the sessions, and returns the name of the source they are from.
func (p *LoginReader) Sessions(ctx context.Context) ([]Session, string, error) {
	if p.Logins != nil {
		list, err := p.Logins.Sessions(ctx)
		if err == nil {
			for i := range list {
				p.keyboard(&list[i])
			}
			return list, "logind", nil
		}
		if !errors.Is(err, ErrNoLogind) {
			// If utmp exists, it lists the same users as logind; the terminals
			// alone do not.
			if list, uerr := p.utmp(); uerr == nil {
				return list, "utmp, because logind does not answer", nil
			}
			return nil, "", err
		}
	}
	list, err := p.utmp()
	if err == nil {
		return list, "utmp", nil
	}
	if !missing(err) {
		return nil, "", err
	}
	list, err = p.terminals()
	return list, "terminals, without logind and utmp", err
}

// keyboard sets the session's Input to the time when its terminal was last read.
func (p *LoginReader) keyboard(s *Session) {
	name := strings.TrimPrefix(s.TTY, "/dev/")
	if name == "" || strings.Contains(name, "..") {
		return
	}
	var st unix.Stat_t
	if err := unix.Stat(p.path("dev/"+name), &st); err == nil {
		if t := time.Unix(st.Atim.Unix()); t.After(s.Input) {
			s.Input = t
		}
	}
}

// utmp lists the sessions of utmp whose process still exists: a crash leaves
// records behind.
func (p *LoginReader) utmp() ([]Session, error) {
	b, err := readTail(p.path("run/utmp"), p.layout().size)
	if missing(err) {
		b, err = readTail(p.path("var/run/utmp"), p.layout().size)
	}
	if err != nil {
		return nil, err
	}
	var out []Session
	for _, r := range parseUtmp(b, p.layout()) {
		if r.kind != utmpUser || r.user == "" {
			continue
		}
		if _, err := os.Stat(p.path("proc/" + strconv.Itoa(int(r.pid)))); missing(err) {
			continue
		}
		s := Session{User: r.user, TTY: r.line, Remote: r.host, Leader: r.pid, Since: r.at}
		p.keyboard(&s)
		out = append(out, s)
	}
	return out, nil
}

// terminals returns a session for every pseudo terminal in use.
func (p *LoginReader) terminals() ([]Session, error) {
	names, err := os.ReadDir(p.path("dev/pts"))
	if err != nil {
		return nil, err
	}
	var out []Session
	for _, e := range names {
		if _, err := strconv.ParseUint(e.Name(), 10, 31); err != nil {
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat(p.path("dev/pts/"+e.Name()), &st); err == unix.ENOENT {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("cannot inspect terminal %s: %w", e.Name(), err)
		}
		out = append(out, Session{User: "uid " + strconv.Itoa(int(st.Uid)), TTY: "pts/" + e.Name(),
			Since: time.Unix(st.Ctim.Unix()), Input: time.Unix(st.Atim.Unix())})
	}
	return out, nil
}

// Recent returns the reading of the newest login in any record on the machine. If
// a record exists and cannot be read, the reading is unknown, with the newest
// login of the other records.
func (p *LoginReader) Recent(now time.Time) idle.Reading {
	r := idle.Reading{Signal: SignalRecent, State: idle.Quiet, At: now}
	sources := []struct {
		name string
		read func() (logins, error)
	}{
		{"wtmp", func() (l logins, err error) {
			b, err := readTail(p.path("var/log/wtmp"), p.layout().size)
			l.newest, l.who = newestLogin(parseUtmp(b, p.layout()))
			return l, err
		}},
		{"wtmpdb", func() (logins, error) { return readLoginDB(p.path("var/lib/wtmpdb/wtmp.db"), parseWtmpdb) }},
		{"lastlog2", func() (logins, error) {
			return readLoginDB(p.path("var/lib/lastlog/lastlog2.db"), parseLastlog2)
		}},
		{"lastlog", func() (l logins, err error) {
			l.newest, err = readLastlog(p.path("var/log/lastlog"), p.layout())
			return l, err
		}},
	}
	found, kept, faults := 0, 0, []error(nil)
	for _, s := range sources {
		l, err := s.read()
		switch {
		case missing(err):
			continue
		case err != nil:
			faults = append(faults, err)
			continue
		}
		found++
		if s.name == "wtmpdb" || s.name == "lastlog2" || p.writesUtmp() {
			kept++
		}
		noteEvent(&r, l.newest, l.who+" (from "+s.name+")", now)
	}
	if kept == 0 {
		l, err := p.journal()
		switch {
		case err == nil && !l.newest.IsZero():
			found++
			noteEvent(&r, l.newest, l.who+" (from the journal)", now)
		case err != nil && !missing(err):
			faults = append(faults, err)
		}
	}
	if found == 0 && len(faults) == 0 {
		list, err := p.terminals()
		if err != nil {
			return failed(SignalRecent, now, err)
		}
		for _, s := range list {
			noteEvent(&r, s.Since, s.TTY+" was opened (no login records on this machine)", now)
		}
		if r.LastEvent.IsZero() {
			r.Detail = "no login records on this machine, read from terminals"
		}
	}
	if len(faults) > 0 {
		r.State, r.Detail = idle.Unknown, "cannot read it: "+errors.Join(faults...).Error()
	}
	return r
}

// writesUtmp reports whether this system maintains utmp, and therefore wtmp and
// lastlog. Debian 13 does not, although files of an earlier release may still
// exist.
func (p *LoginReader) writesUtmp() bool {
	for _, name := range []string{"run/utmp", "var/run/utmp"} {
		if _, err := os.Stat(p.path(name)); err == nil {
			return true
		}
	}
	return false
}

// noteEvent records an event in r if it is the newest so far. An event in the
// future counts as now. An event within the last minute makes r active.
func noteEvent(r *idle.Reading, at time.Time, what string, now time.Time) {
	if at.After(now) {
		at = now.Round(0)
	}
	if !at.After(r.LastEvent) {
		return
	}
	r.LastEvent, r.Detail = at, what
	if now.Sub(at) <= time.Minute {
		r.State, r.Value = idle.Active, 1
	}
}
