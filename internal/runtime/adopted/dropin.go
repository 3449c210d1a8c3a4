package adopted

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/lib/segment"
	"lull/internal/platform/systemd"
	"lull/internal/protocol/shimctl"
)

// A drop-in makes systemd execute a copy of lull-shim in place of a unit's program. The
// copy has the program's name and is found first by ExecSearchPath=; it puts itself
// under the filter of bind handoff and becomes the program. If the copy is missing or
// not reachable, systemd finds the program itself.
//
// The drop-in is in /run, so nothing outlives a reboot. What was written is noted in
// the data directory before, so that a daemon that was killed leaves nothing behind. A
// drop-in repeats the unit's command. So it is removed when other files of the unit have
// changed, before systemd reads them, and is written anew afterwards. One that others
// have removed is not written again until the machine is restarted.

const (
	dropInName  = "zz-lull.conf"          // after those of users: it repeats the command that results from them
	handoffRoot = "/var/lib/lull-handoff" // of the copies; each user can reach it
	reloadLimit = 30 * time.Second
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
)

// asksSocket are programs that refuse to start if something answers at the unix socket
// of the server that they are to start.
var asksSocket = []string{"pg_ctlcluster"}

// note describes a drop-in that was written, or is about to be.
type note struct {
	ID      string   `json:"id"`
	Unit    string   `json:"unit"`
	Manager string   `json:"manager,omitempty"`
	Path    string   `json:"path"`
	Dir     string   `json:"dir"` // of the copy of lull-shim
	BootID  string   `json:"boot_id"`
	Search  []string `json:"search"`           // where unit files can be
	Sources string   `json:"sources"`          // state of the other files of the unit
	Lapsed  bool     `json:"lapsed,omitempty"` // it has to be written anew
	// NoUnix is set if its program does not start while clients reach its unix socket.
	NoUnix  bool            `json:"no_unix,omitempty"`
	Base    string          `json:"base"` // name of the program
	Handoff shimctl.Handoff `json:"handoff"`
}

// plan is a drop-in before it is written.
type plan struct {
	note
	shown instance.DropIn
}

// dropInPath returns the path of the drop-in of a unit.
func dropInPath(a instance.Adopted) string {
	dir := "/run/systemd/system"
	if a.Manager != "" {
		dir = filepath.Join("/run/user", a.Manager, "systemd/user")
	}
	return filepath.Join(dir, a.Unit+".d", dropInName)
}

// copyDir returns the directory of a unit's copy of lull-shim.
func (r *Runtime) copyDir(a instance.Adopted) string {
	safe := strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("@._-", c) {
			return c
		}
		return '_'
	}, a.Unit)
	if os.Getuid() == 0 {
		return filepath.Join(handoffRoot, safe)
	}
	return filepath.Join(r.cfg.Dir, "handoff", safe)
}

// PlanDropIn implements instance.DropInWriter.
func (r *Runtime) PlanDropIn(ctx context.Context, a instance.Adopted) (instance.DropIn, error) {
	p, err := r.plan(ctx, a)
	if err == nil && r.notes()[p.Path] == nil {
		if _, serr := os.Lstat(p.Path); serr == nil {
			err = fmt.Errorf("%s exists already, and this host did not write it. If no other host uses it, remove it and run: systemctl %sdaemon-reload", p.Path, userFlag(a))
		}
	}
	return p.shown, err
}

func (r *Runtime) plan(ctx context.Context, a instance.Adopted) (p plan, err error) {
	m, err := r.manager(a)
	if err != nil {
		return p, err
	}
	if a.Manager != "" && a.Manager != strconv.Itoa(os.Getuid()) {
		return p, fmt.Errorf("it is a unit of user %s: only that user's own host can write its drop-in", a.Manager)
	}
	search, err := m.UnitPath(ctx)
	if err != nil {
		return p, err
	}
	sources := sourcesOf(note{Unit: a.Unit, Path: dropInPath(a), Search: search}) // before the manager is asked for the command
	s, err := m.Service(ctx, a.Unit)
	if err != nil {
		return p, err
	}
	e, err := m.Exec(ctx, a.Unit)
	if err != nil {
		return p, err
	}
	if err := handoffForbidden(e); err != nil {
		return p, err
	}
	boot, err := r.fs.BootID()
	if err != nil {
		return p, err
	}
	socket, err := r.cfg.Process.UnitSocket()
	if err != nil {
		return p, err
	}
	p.note = note{Unit: a.Unit, Manager: a.Manager, Path: dropInPath(a), Dir: r.copyDir(a), BootID: boot, Search: search, Sources: sources}
	if strings.ContainsFunc(p.Dir, func(c rune) bool { return c <= ' ' || strings.ContainsRune(`:%"'\$`, c) }) {
		return p, fmt.Errorf("its search path cannot contain the data directory %q of this host", r.cfg.Dir)
	}
	p.Base = filepath.Base(e.Program)
	p.NoUnix = slices.Contains(asksSocket, p.Base)
	path := defaultPath
	if len(e.SearchPath) > 0 {
		path = strings.Join(e.SearchPath, ":")
	} else if set := pathOf(s.PID); set != "" && !strings.HasPrefix(set, p.Dir+":") {
		path = set
	}
	p.Handoff = shimctl.Handoff{Program: e.Program, Dir: p.Dir, Path: path, Socket: socket, UID: os.Geteuid()}
	if privileged := e.User == "" && !e.DynamicUser && os.Getuid() == 0 && e.Capabilities&(1<<unix.CAP_SYS_ADMIN) != 0; !privileged && !e.NoNewPrivs {
		p.shown.Notes = append(p.shown.Notes, "It then runs with no_new_privs: setuid programs that it starts get no further rights.")
	}
	p.shown.Path, p.shown.Text = p.Path, p.text(a, e)
	return p, nil
}

// handoffForbidden returns why sockets cannot be handed to the program of a unit; nil
// if they can, as far as its settings tell.
func handoffForbidden(e systemd.Exec) error {
	switch {
	case !filepath.IsAbs(e.Program):
		return fmt.Errorf("its ExecStart= names %q, which is no absolute path", e.Program)
	case e.Root != "":
		return fmt.Errorf("it runs in a root directory of its own (%s), which does not contain lull-shim", e.Root)
	case !e.Families.Permits("AF_UNIX"):
		return errors.New("its RestrictAddressFamilies= forbids AF_UNIX, which it needs to reach lull-shim")
	}
	for _, f := range e.Flags {
		if _, ok := prefixes[f]; !ok {
			return fmt.Errorf("its ExecStart= has the flag %s, which lull does not know", f)
		}
	}
	return nil
}

// prefixes are the prefixes of a command, by the flags that the manager reports.
var prefixes = map[string]string{"ignore-failure": "-", "privileged": "+", "no-setuid": "!", "ambient": "!!", "no-env-expand": ":"}

// text returns the content of the drop-in.
func (p plan) text(a instance.Adopted, e systemd.Exec) string {
	name := strings.TrimSuffix(a.Unit, ".service")
	var b strings.Builder
	fmt.Fprintf(&b, "# Written by lull for: lull adopt unit %s%s --stop --drop-in\n# Removed by: lull adopt release, and by a reboot\n#\n", userFlag(a), name)
	fmt.Fprintf(&b, "# In the first directory, %s is lull-shim, which then executes\n# %s. Without lull, systemd runs that program directly.\n[Service]\n", p.Base, e.Program)
	if len(e.SearchPath) > 0 {
		b.WriteString("ExecSearchPath=\n")
	}
	fmt.Fprintf(&b, "ExecSearchPath=%s:%s:%s\n", p.Dir, escape(filepath.Dir(e.Program)), escape(p.Handoff.Path))
	if len(e.NoExecPaths) > 0 {
		fmt.Fprintf(&b, "# Without this, NoExecPaths= forbids executing lull-shim.\nExecPaths=-%s\n", p.Dir)
	}
	if !e.Calls.Permits("seccomp") {
		b.WriteString("# Without this, SystemCallFilter= forbids seccomp, which can only take rights away.\nSystemCallFilter=seccomp\n")
	}
	if !e.PreservesRuntime && listensBelow(a, e.RuntimeDirectories) {
		b.WriteString("# Keeps the unix socket of the service while the service is stopped.\nRuntimeDirectoryPreserve=yes\n")
	}
	b.WriteString("ExecStart=\nExecStart=")
	for _, f := range e.Flags {
		b.WriteString(prefixes[f])
	}
	b.WriteString("@" + quote(p.Base))
	for _, arg := range e.Args {
		b.WriteString(" " + quote(arg))
	}
	b.WriteString("\n")
	return b.String()
}

func escape(s string) string { return strings.ReplaceAll(s, "%", "%%") }

// quote writes one word of a command for a unit file. Variables are left to the
// manager, as in the word's source.
func quote(word string) string {
	plain := word != "" && word != ";" && !strings.ContainsFunc(word, func(c rune) bool {
		return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("@._-/=:,+${}%*", c))
	})
	if plain {
		return escape(word)
	}
	var b strings.Builder
	b.WriteByte('"')
	for n := range len(word) {
		switch c := word[n]; {
		case c == '"' || c == '\\':
			b.WriteString(`\` + string(c))
		case c < ' ' || c == 0x7f:
			fmt.Fprintf(&b, `\x%02x`, c)
		case c == '%':
			b.WriteString("%%")
		default:
			b.WriteByte(c)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// pathOf returns PATH as a process was started with; "" if it is unknown.
func pathOf(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil || pid == 0 {
		return ""
	}
	for e := range bytes.SplitSeq(b, []byte{0}) {
		if v, ok := bytes.CutPrefix(e, []byte("PATH=")); ok {
			return string(v)
		}
	}
	return ""
}

// listensBelow reports whether a unix socket is bound below one of the runtime
// directories of a unit.
func listensBelow(a instance.Adopted, dirs []string) bool {
	bases := []string{"/run", "/var/run"}
	if a.Manager != "" {
		bases = []string{filepath.Join("/run/user", a.Manager)}
	}
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		return len(dirs) > 0
	}
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		for _, dir := range dirs {
			for _, base := range bases {
				if strings.HasPrefix(fields[len(fields)-1], filepath.Join(base, dir)+"/") {
					return true
				}
			}
		}
	}
	return false
}

// sourcesOf describes the present files of a unit other than the drop-in. A file that
// was changed, added or removed changes the result.
func sourcesOf(n note) string {
	names := []string{n.Unit}
	if base, _, ok := strings.Cut(n.Unit, "@"); ok {
		names = append(names, base+"@.service")
	}
	var out []string
	for _, dir := range n.Search {
		for _, name := range names {
			files := []string{filepath.Join(dir, name)}
			more, _ := filepath.Glob(filepath.Join(dir, name+".d", "*.conf")) // the pattern is valid
			for _, f := range append(files, more...) {
				if st, err := os.Stat(f); err == nil && f != n.Path {
					out = append(out, fmt.Sprintf("%s %d %d", f, st.Size(), st.ModTime().UnixNano()))
				}
			}
		}
	}
	return strings.Join(out, "\n")
}

// notesDir contains a file for each note.
func (r *Runtime) noteFile(id string) string { return filepath.Join(r.cfg.Dir, "dropin-"+id+".json") }

// notes returns the notes of all drop-ins, by path.
func (r *Runtime) notes() map[string]*note {
	out := map[string]*note{}
	files, _ := filepath.Glob(r.noteFile("*")) // the pattern is valid
	for _, f := range files {
		id := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(f), "dropin-"), ".json")
		n, err := r.readNote(id)
		if err != nil {
			r.cfg.Log.Error("cannot use a note of a drop-in", "file", f, "err", err)
			continue
		}
		out[n.Path] = &n
	}
	return out
}

func (r *Runtime) readNote(id string) (n note, err error) {
	b, err := os.ReadFile(r.noteFile(id))
	if err == nil {
		err = json.Unmarshal(b, &n)
	}
	if err == nil && (filepath.Base(n.Path) != dropInName || n.ID != id || !filepath.IsAbs(n.Dir)) {
		err = errors.New("it describes no drop-in of this instance")
	}
	return n, err
}

func (r *Runtime) writeNote(n note) error {
	b, err := json.Marshal(n)
	if err != nil {
		return err
	}
	return segment.WriteFile(r.noteFile(n.ID), b, 0o600)
}

// KeepDropIns implements instance.DropInWriter.
func (r *Runtime) KeepDropIns(ctx context.Context, wanted map[string]instance.Adopted) error {
	r.dropIns.Lock()
	defer r.dropIns.Unlock()
	r.mu.Lock()
	r.wanted = wanted
	r.mu.Unlock()
	return r.keepDropIns(ctx)
}

// keepDropIns makes the drop-ins as they are wanted. The caller holds dropIns.
func (r *Runtime) keepDropIns(ctx context.Context) error {
	r.mu.Lock()
	wanted := r.wanted
	r.mu.Unlock()
	var errs []error
	have := map[string]*note{}
	for _, n := range r.notes() {
		if a, ok := wanted[n.ID]; !ok || dropInPath(a) != n.Path {
			errs = append(errs, r.removeDropIn(ctx, *n))
		} else {
			have[n.ID] = n
		}
	}
	for id, a := range wanted {
		if err := r.keepDropIn(ctx, id, a, have[id]); err != nil {
			errs = append(errs, fmt.Errorf("the drop-in of %s: %w", a.Unit, err))
		}
	}
	return errors.Join(errs...)
}

func (r *Runtime) keepDropIn(ctx context.Context, id string, a instance.Adopted, n *note) error {
	m, err := r.manager(a)
	if err != nil {
		return err
	}
	m.OnReloading(r.lapse)
	boot, err := r.fs.BootID()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, reloadLimit)
	defer cancel()
	u, err := m.Unit(ctx, a.Unit)
	if err != nil {
		return err
	}
	if n != nil && n.BootID == boot && !n.Lapsed {
		if _, err := os.Lstat(n.Path); err != nil {
			return nil // others have removed it
		}
		if sourcesOf(*n) == n.Sources {
			if err := r.writeCopy(*n); err != nil || effective(a, &u) {
				return err
			}
			return m.Reload(ctx) // the daemon ended before that
		}
		if err := r.lapseOne(*n); err != nil {
			return err
		}
		n.Lapsed = true
	}
	switch {
	case n != nil && n.Lapsed && n.BootID == boot && (u.NeedsReload || effective(a, &u)):
		return nil // it is written once whoever changed the files has systemd read them
	case u.NeedsReload:
		return fmt.Errorf("files of the unit have changed, and systemd has not read them yet: systemctl %sdaemon-reload", userFlag(a))
	}
	p, err := r.plan(ctx, a)
	if err != nil {
		return err
	}
	p.ID = id
	p.NoUnix = p.NoUnix || n != nil && n.NoUnix
	if err := r.writeNote(p.note); err != nil {
		return err
	}
	if err := r.writeCopy(p.note); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(p.Path), 0o755); err != nil {
		return err
	}
	if err := segment.WriteFile(p.Path, []byte(p.shown.Text), 0o644); err != nil {
		return err
	}
	return m.Reload(ctx)
}

// writeCopy makes the copy of lull-shim that becomes the unit's program, unless it is
// as it should be.
func (r *Runtime) writeCopy(p note) error {
	file := filepath.Join(p.Dir, p.Base)
	from, err := os.Stat(r.cfg.Process.Supervisor())
	if err != nil {
		return err
	}
	if to, err := os.Stat(file); err == nil && to.Size() == from.Size() && !to.ModTime().Before(from.ModTime()) {
		return nil
	}
	if err := os.MkdirAll(p.Dir, 0o755); err != nil {
		return err
	}
	for _, dir := range []string{filepath.Dir(p.Dir), p.Dir} {
		if err := os.Chmod(dir, 0o755); err != nil { // whatever the umask
			return err
		}
	}
	b, err := json.Marshal(p.Handoff)
	if err == nil {
		err = segment.WriteFile(filepath.Join(p.Dir, shimctl.HandoffFile), b, 0o644)
	}
	if err != nil {
		return err
	}
	in, err := os.Open(r.cfg.Process.Supervisor())
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.CreateTemp(p.Dir, ".lull-tmp-")
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	err = cmp.Or(err, out.Chmod(0o755), out.Close())
	if err == nil {
		err = os.Rename(out.Name(), file)
	}
	if err != nil {
		return errors.Join(err, os.Remove(out.Name()))
	}
	return nil
}

// removeDropIn removes what was written. The note goes last.
func (r *Runtime) removeDropIn(ctx context.Context, n note) error {
	err := os.Remove(n.Path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	_ = os.Remove(filepath.Dir(n.Path)) // unless it contains others
	ctx, cancel := context.WithTimeout(ctx, reloadLimit)
	defer cancel()
	if m, err := r.manager(instance.Adopted{Unit: n.Unit, Manager: n.Manager}); err == nil {
		if u, err := m.Unit(ctx, n.Unit); err == nil && slices.Contains(u.DropIns, n.Path) {
			if err := m.Reload(ctx); err != nil {
				return err
			}
		}
	}
	if err := os.RemoveAll(n.Dir); err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(n.Dir)) // unless it contains others
	_, err = r.cfg.Process.Unit(ctx, shimctl.Unit{ID: n.ID, Forget: true})
	return errors.Join(err, os.Remove(r.noteFile(n.ID)))
}

// lapse removes the drop-ins of units whose other files have changed. systemd is about
// to read them, and must not find the command of before.
func (r *Runtime) lapse() {
	for _, n := range r.notes() {
		if _, err := os.Lstat(n.Path); err == nil && !n.Lapsed && sourcesOf(*n) != n.Sources {
			if err := r.lapseOne(*n); err != nil {
				r.cfg.Log.Error("cannot remove a drop-in whose unit has changed", "unit", n.Unit, "err", err)
			}
		}
	}
}

func (r *Runtime) lapseOne(n note) error {
	if err := os.Remove(n.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	r.cfg.Log.Info("a drop-in is written anew, because files of its unit have changed", "unit", n.Unit)
	n.Lapsed = true
	return r.writeNote(n)
}

// renewDropIn writes the drop-in of a unit anew if other files of it have changed.
func (r *Runtime) renewDropIn(id string, a instance.Adopted) {
	if !a.DropIn || !r.dropIns.TryLock() {
		return
	}
	defer r.dropIns.Unlock()
	for _, n := range r.notes() {
		if n.ID == id && (n.Lapsed || sourcesOf(*n) != n.Sources) {
			if err := r.keepDropIns(context.Background()); err != nil {
				r.cfg.Log.Warn("a drop-in is missing", "unit", a.Unit, "err", err)
			}
		}
	}
}

// effective reports whether the manager has loaded the unit with its drop-in.
func effective(a instance.Adopted, u *systemd.Unit) bool {
	return a.DropIn && slices.Contains(u.DropIns, dropInPath(a))
}
