package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Kind is the kernel freezer that a group uses.
type Kind string

// The kinds of groups, in order of preference.
const (
	V2 Kind = "cgroup2" // the unified hierarchy: cgroup.freeze, cgroup.kill
	V1 Kind = "freezer" // the v1 freezer controller
)

// ErrNone means that no group can be created here; the wrapping error has a line
// for each place that was tried.
var ErrNone = errors.New("no control group can be made here")

// Place is where a host's groups are created. The zero value is no place.
type Place struct {
	Kind Kind
	Dir  string // absolute directory with one group per instance
	CPU  string // the same for the v1 cpuacct controller; empty for V2 or if there is none
}

// layout describes the hierarchies and this process's groups in them.
type layout struct {
	mounts []mount
	own    map[string]string // controller ("" is the unified hierarchy) -> our own path
	uid    int
}

type mount struct {
	root, dir   string
	v2          bool
	controllers []string
}

// Find chooses the directory for the groups of host and creates it. kinds limits
// and orders the search; the default is V2, then V1. Within a kind it tries this
// process's group if it was delegated, then the root of the hierarchy, then this
// process's group even if it was not delegated. The root comes before a
// group that was not delegated, because systemd may remove such a group when its
// session ends. The error wraps ErrNone.
func Find(host string, kinds ...Kind) (Place, error) {
	if err := validID(host); err != nil {
		return Place{}, err
	}
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return Place{}, fmt.Errorf("cannot read the mounts: %w", err)
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return Place{}, fmt.Errorf("cannot read our own groups: %w", err)
	}
	l := layout{mounts: parseMounts(mountinfo), own: parseOwn(own), uid: os.Geteuid()}
	if len(kinds) == 0 {
		kinds = []Kind{V2, V1}
	}
	errs := []error{ErrNone}
	for _, kind := range kinds {
		p, err := l.find(host, kind)
		if err == nil {
			return p, nil
		}
		errs = append(errs, err)
	}
	return Place{}, errors.Join(errs...)
}

func (l *layout) find(host string, kind Kind) (Place, error) {
	controller := ""
	if kind == V1 {
		controller = "freezer"
	}
	bases := l.bases(controller)
	if len(bases) == 0 {
		return Place{}, fmt.Errorf("cannot use %s: it is not mounted", kind)
	}
	var errs []error
	for _, base := range bases {
		dir := filepath.Join(base, "lull", host)
		if err := prepare(base, dir, kind); err != nil {
			errs = append(errs, err)
			continue
		}
		p := Place{Kind: kind, Dir: dir}
		if kind == V1 {
			for _, b := range l.bases("cpuacct") {
				cpu := filepath.Join(b, "lull", host)
				if os.MkdirAll(cpu, 0o755) == nil {
					p.CPU = cpu
					break
				}
			}
		}
		return p, nil
	}
	return Place{}, errors.Join(errs...)
}

// bases returns the directories to try for a controller, best first.
func (l *layout) bases(controller string) []string {
	var out []string
	for _, m := range l.mounts {
		if controller == "" && !m.v2 || controller != "" && !slices.Contains(m.controllers, controller) {
			continue
		}
		own := m.dir
		if rel, ok := strings.CutPrefix(l.own[controller], strings.TrimSuffix(m.root, "/")); ok {
			own = filepath.Join(m.dir, rel)
		}
		if own != m.dir && l.delegated(own) {
			out = append(out, own)
		}
		out = append(out, m.dir)
		if !slices.Contains(out, own) {
			out = append(out, own)
		}
	}
	return out
}

// delegated reports whether a group was delegated to this process: systemd has
// marked its directory as delegated, or the directory belongs to the unprivileged
// user that this process runs as.
func (l *layout) delegated(dir string) bool {
	var st unix.Stat_t
	if l.uid != 0 && unix.Stat(dir, &st) == nil && int(st.Uid) == l.uid {
		return true
	}
	var mark [8]byte
	for _, name := range []string{"user.delegate", "trusted.delegate"} {
		if n, err := unix.Getxattr(dir, name, mark[:]); err == nil && n == 1 && mark[0] == '1' {
			return true
		}
	}
	return false
}

// prepare creates dir below base and verifies with a test group that it can hold
// instances.
func prepare(base, dir string, kind Kind) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("cannot make groups below %s: %w", base, err)
	}
	// Moving a process requires write access to the procs file of the nearest
	// common ancestor, which is base for everything started from it.
	if err := unix.Access(filepath.Join(base, "cgroup.procs"), unix.W_OK); err != nil {
		return fmt.Errorf("cannot move processes below %s: %w", base, err)
	}
	probe, err := os.MkdirTemp(dir, "probe-")
	if err != nil {
		return fmt.Errorf("cannot make groups in %s: %w", dir, err)
	}
	defer unix.Rmdir(probe)
	want := "cgroup.freeze"
	if kind == V1 {
		want = "freezer.state"
	}
	if err := unix.Access(filepath.Join(probe, want), unix.W_OK); err != nil {
		return fmt.Errorf("cannot freeze groups in %s: %s: %w", dir, want, err)
	}
	if kind == V2 {
		if b, err := os.ReadFile(filepath.Join(probe, "cgroup.type")); err == nil && string(bytes.TrimSpace(b)) != "domain" {
			return fmt.Errorf("cannot use groups in %s: they are of type %q, not domain", dir, bytes.TrimSpace(b))
		}
		// Enable per-group memory reclaim if the controller is available here. The
		// groups work without it, so errors are ignored.
		for _, d := range []string{filepath.Dir(dir), dir} {
			_ = writeFile(filepath.Join(d, "cgroup.subtree_control"), "+memory")
		}
	}
	return nil
}

// parseMounts parses /proc/self/mountinfo. Other file systems and malformed
// lines are skipped.
func parseMounts(b []byte) []mount {
	var out []mount
	for line := range strings.Lines(string(b)) {
		before, after, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 5 || len(g) < 1 {
			continue
		}
		m := mount{root: unescape(f[3]), dir: unescape(f[4])}
		switch {
		case g[0] == "cgroup2":
			m.v2 = true
		case g[0] == "cgroup" && len(g) >= 3:
			m.controllers = strings.Split(g[2], ",")
		default:
			continue
		}
		out = append(out, m)
	}
	return out
}

// unescape undoes the octal escapes of mountinfo (\040 is a space).
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) && octal(s[i+1]) && octal(s[i+2]) && octal(s[i+3]) {
			b.WriteByte((s[i+1]-'0')<<6 | (s[i+2]-'0')<<3 | (s[i+3] - '0'))
			i += 3
			continue
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func octal(c byte) bool { return '0' <= c && c <= '7' }

// parseOwn parses /proc/PID/cgroup into a map from controller to path.
func parseOwn(b []byte) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 || !strings.HasPrefix(f[2], "/") {
			continue
		}
		for c := range strings.SplitSeq(f[1], ",") {
			out[c] = f[2]
		}
	}
	return out
}

// IDs returns the groups that exist in p.
func (p Place) IDs() ([]string, error) {
	entries, err := os.ReadDir(p.Dir)
	if err != nil {
		return nil, fmt.Errorf("cannot list the groups: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if e.IsDir() && validID(e.Name()) == nil {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// Create creates the group of an instance. It recreates an existing empty group,
// so that accounting starts at zero (and for the reason given at Renew). A group
// that still has processes of an earlier run is returned unchanged.
func (p Place) Create(id string) (*Group, error) {
	g, err := p.group(id)
	if err != nil {
		return nil, err
	}
	if err := g.Renew(); err != nil && !errors.Is(err, unix.EBUSY) {
		return nil, err
	}
	return g, nil
}

// Remove removes an instance's empty group. A missing one is not an error.
func (p Place) Remove(id string) error {
	g, err := p.group(id)
	if err != nil {
		return err
	}
	return g.Remove()
}

// Release removes the place if it has no groups, and the empty groups with the
// same path that container runtimes left in other hierarchies. Create recreates
// the place.
func (p Place) Release() {
	if p.Dir != "" {
		_, others, _ := (&Group{dir: p.Dir}).namesakes() // groups that cannot be found remain
		for _, dir := range others {
			_ = unix.Rmdir(dir)
		}
	}
	for _, dir := range []string{p.Dir, p.CPU} {
		if dir != "" {
			_ = unix.Rmdir(dir) // EBUSY and ENOTEMPTY mean that it is in use
		}
	}
}

// Reclaims reports whether the groups of p support memory.reclaim.
func (p Place) Reclaims() bool {
	return unix.Access(filepath.Join(p.Dir, "memory.reclaim"), unix.W_OK) == nil
}

// group returns the group of id, which need not exist.
func (p Place) group(id string) (*Group, error) {
	if p.Dir == "" {
		return nil, fmt.Errorf("cannot make the group of %s: %w", id, ErrNone)
	}
	if err := validID(id); err != nil {
		return nil, err
	}
	g := &Group{kind: p.Kind, dir: filepath.Join(p.Dir, id)}
	if p.CPU != "" {
		g.cpu = filepath.Join(p.CPU, id)
	}
	return g, nil
}

// Open returns the group at dir, as recorded by an earlier process. Its kind is
// determined from its files; fs.ErrNotExist means that it is gone.
func (p Place) Open(dir string) (*Group, error) {
	if !filepath.IsAbs(dir) || validID(filepath.Base(filepath.Clean(dir))) != nil {
		return nil, fmt.Errorf("cannot open the group %q: it is not the absolute directory of an instance", dir)
	}
	g, err := At(dir)
	if err == nil && p.CPU != "" && filepath.Dir(g.dir) == p.Dir {
		g.cpu = filepath.Join(p.CPU, filepath.Base(g.dir))
	}
	return g, err
}

// At returns the group at dir, which may have been created by another program. A
// group of kind V1 then has no CPU accounting; Of finds that.
func At(dir string) (*Group, error) {
	g := &Group{kind: V2, dir: filepath.Clean(dir)}
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("cannot open the group %q: it is not an absolute directory", dir)
	}
	var st unix.Stat_t
	if unix.Stat(filepath.Join(g.dir, "cgroup.freeze"), &st) == nil {
		return g, nil
	}
	g.kind = V1
	if err := unix.Stat(filepath.Join(g.dir, "freezer.state"), &st); err != nil {
		return nil, fmt.Errorf("cannot open the group %s: %w", dir, err)
	}
	return g, nil
}

// validID checks that a group's name is a single plain path element.
func validID(id string) error {
	if id == "" || len(id) > 128 || id[0] == '.' || strings.HasPrefix(id, "cgroup.") {
		return fmt.Errorf("cannot use %q as the name of a group", id)
	}
	for i := range len(id) {
		c := id[i]
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.') {
			return fmt.Errorf("cannot use %q as the name of a group", id)
		}
	}
	return nil
}
