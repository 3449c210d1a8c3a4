// Package crontab determines when the cron daemons among some processes run their
// next jobs. It supports Debian's cron, cronie and the crond of BusyBox. It reads
// the files that the daemon reads, below the daemon's own root directory.
//
// It decides nothing. A file or line that cannot be read is an error that names
// it.
package crontab

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/platform/proc"
)

// Limits on what is read.
const (
	maxTable  = 256 << 10 // bytes of a crontab
	maxTables = 1000      // files of a directory
	maxJobs   = 10_000    // of all crons
)

// Tables are the crontabs of one or more cron daemons. They are safe for concurrent
// use.
type Tables struct {
	jobs    []job
	working string

	mu   sync.Mutex
	last struct { // result of the last search
		from, at time.Time
		by       string
	}
}

// Working describes a job that a cron daemon is running; "" if there is none.
func (t *Tables) Working() string { return t.working }

// Next returns when the first job after a time is due, and its file and line. The
// zero time means that none is ever due. A change of the time zone's offset, such
// as to daylight saving time, counts as a job, because it shifts when jobs are
// due and each cron has its own rule for that.
func (t *Tables) Next(after time.Time) (at time.Time, by string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	until := t.last.at
	if until.IsZero() {
		until = t.last.from.Add(neverFor)
	}
	if t.last.from.IsZero() || after.Before(t.last.from) || !after.Before(until) {
		t.last.from = after
		t.last.at, t.last.by = t.search(after)
	}
	return t.last.at, t.last.by
}

// neverFor is how long a search that found nothing holds: it looks years ahead.
const neverFor = 24 * time.Hour

func (t *Tables) search(after time.Time) (at time.Time, by string) {
	take := func(next time.Time, what string) {
		if !next.IsZero() && (at.IsZero() || next.Before(at)) {
			at, by = next, what
		}
	}
	for _, j := range t.jobs {
		here := after.In(j.zone)
		take(j.schedule.Next(here), "cron ("+j.where+")")
		_, end := here.ZoneBounds()
		take(end, "cron (the clock changes in "+j.zone.String()+")")
	}
	return at, by
}

// daemon is one cron daemon.
type daemon struct {
	pid  int
	kind string // cron, crond, or busybox
	argv []string
	root *os.File
}

// Read finds the cron daemons among the processes pids and reads their crontabs.
// It returns nil if there is none.
func Read(pids []int) (*Tables, error) {
	crons, parents := map[int]*daemon{}, map[int]int{}
	var errs []error
	for _, pid := range pids {
		d, err := identify(pid)
		if err != nil {
			errs = append(errs, err)
		}
		if d != nil {
			crons[pid] = d
		}
	}
	if len(crons) == 0 {
		return nil, errors.Join(errs...)
	}
	for _, pid := range pids {
		s, err := proc.Live().Stat(pid)
		switch {
		case err == nil && !s.Ended():
			parents[pid] = s.PPID
		case err != nil && !errors.Is(err, proc.ErrGone):
			errs = append(errs, err)
		}
	}
	t := &Tables{}
	for pid, parent := range parents {
		if crons[parent] != nil {
			t.working = fmt.Sprintf("cron (process %d) runs a job (process %d)", parent, pid)
		}
	}
	for pid, d := range crons {
		if crons[parents[pid]] != nil { // a child of cron that is about to run a job
			continue
		}
		jobs, err := d.read()
		if t.jobs = append(t.jobs, jobs...); err == nil && len(t.jobs) > maxJobs {
			err = fmt.Errorf("cron (process %d) has more than %d jobs", pid, maxJobs)
		}
		if err != nil && !goneNow(pid) {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return t, nil
}

func goneNow(pid int) bool {
	s, err := proc.Live().Stat(pid)
	return errors.Is(err, proc.ErrGone) || err == nil && s.Ended()
}

// identify returns the cron daemon that a process is, or nil if it is another
// program.
func identify(pid int) (*daemon, error) {
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return nil, nil // the process has ended
	}
	d := &daemon{pid: pid, kind: strings.TrimSpace(string(comm))}
	if !slices.Contains([]string{"cron", "crond", "busybox"}, d.kind) {
		return nil, nil
	}
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return nil, nil
	}
	d.argv = strings.Split(strings.TrimRight(string(line), "\x00"), "\x00")
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil && !goneNow(pid) {
		return nil, fmt.Errorf("cannot identify the cron daemon in process %d: %w", pid, err)
	}
	if filepath.Base(exe) == "busybox" {
		if d.kind == "busybox" && (len(d.argv) < 2 || d.argv[1] != "crond") {
			return nil, nil
		}
		d.kind = "busybox"
	}
	if d.kind == "busybox" && filepath.Base(exe) != "busybox" {
		return nil, nil
	}
	return d, nil
}

// usersFolders are the folders of users' crontabs, by the kind of daemon: Debian's and
// BusyBox', and for cron and crond those for which distributions build cronie. A wake
// for a file that the daemon ignores does no harm.
var usersFolders = map[string][]string{
	"cron":    {"/var/spool/cron/crontabs", "/var/spool/cron/tabs"},
	"crond":   {"/var/spool/cron/crontabs", "/var/spool/cron"},
	"busybox": {"/var/spool/cron/crontabs"},
}

// option returns the last value of an option of one letter, "" if it has none, and
// whether it is given. valued are the letters of options with values.
func (d *daemon) option(letter byte, valued string) (value string, given bool) {
	for n := 1; n < len(d.argv); n++ {
		arg := d.argv[n]
		if arg == "--" {
			break
		}
		for k := 1; k < len(arg) && arg[0] == '-'; k++ {
			has := strings.IndexByte(valued, arg[k]) >= 0
			rest := arg[k+1:]
			if has && rest == "" && n+1 < len(d.argv) {
				n++
				rest = d.argv[n]
			}
			if arg[k] == letter {
				if given = true; has {
					value = rest
				}
			}
			if has {
				break
			}
		}
	}
	return value, given
}

// debianNames are the files in /etc/cron.d that Debian's cron reads.
var debianNames = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// read reads all crontabs of a daemon.
func (d *daemon) read() (jobs []job, err error) {
	if d.root, err = os.OpenFile(fmt.Sprintf("/proc/%d/root", d.pid), unix.O_PATH|unix.O_DIRECTORY, 0); err != nil {
		return nil, fmt.Errorf("cannot open the root directory of cron (process %d): %w", d.pid, err)
	}
	defer d.root.Close()
	return d.tables()
}

// tables reads the crontabs below the daemon's root directory.
func (d *daemon) tables() (jobs []job, err error) {
	s := style{cronie: d.kind == "crond", find: d.zone}
	if s.zone, err = d.localZone(); err != nil {
		return nil, err
	}
	folders, system := usersFolders[d.kind], d.kind != "busybox"
	if !system {
		if dir, ok := d.option('c', "lLdc"); ok {
			folders = []string{dir}
		}
	}
	var paths []string
	for _, dir := range folders {
		if !filepath.IsAbs(dir) {
			return nil, fmt.Errorf("cannot use %q as the crontab directory of cron (process %d): want an absolute path", dir, d.pid)
		}
		more, err := d.list(dir, func(name string) bool { return name != "cron.update" })
		if err != nil {
			return nil, err
		}
		paths = append(paths, more...)
	}
	mine := len(paths)
	if system {
		_, wide := d.option('l', "xL") // of Debian's
		more, err := d.list("/etc/cron.d", func(name string) bool {
			if d.kind == "cron" && !wide {
				return debianNames.MatchString(name)
			}
			return name[0] != '#' && !strings.HasSuffix(name, "~") && !strings.Contains(name, ".rpm") && !strings.Contains(name, ".dpkg-")
		})
		if err != nil {
			return nil, err
		}
		paths = append(append(paths, "/etc/crontab"), more...)
	}
	for n, path := range paths {
		text, err := d.file(path, maxTable)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		s.userColumn = n >= mine
		var more []job
		if err == nil {
			more, err = parse(path, text, s)
		}
		if err != nil {
			return nil, err
		}
		jobs = append(jobs, more...)
	}
	return jobs, nil
}

// list returns the paths of the crontabs in a directory, which may be missing.
func (d *daemon) list(dir string, take func(name string) bool) (paths []string, err error) {
	f, err := d.open(dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	found, err := f.Readdirnames(maxTables + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("cannot list %s: %w", dir, err)
	}
	if len(found) > maxTables {
		return nil, fmt.Errorf("%s has more than %d files", dir, maxTables)
	}
	for _, name := range found {
		if name[0] != '.' && take(name) {
			paths = append(paths, filepath.Join(dir, name))
		}
	}
	slices.Sort(paths)
	return paths, nil
}

// open opens a path below the daemon's root directory. Symbolic links are
// resolved below it, too.
func (d *daemon) open(path string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(int(d.root.Fd()), path, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// file reads a regular file. For a file of another kind it returns
// fs.ErrNotExist, because cron ignores those. The kind is known before the file is
// opened: opening a device can have effects, and a container may contain one.
func (d *daemon) file(path string, limit int64) ([]byte, error) {
	at, err := d.open(path, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer at.Close()
	if st, err := at.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, errors.Join(err, &fs.PathError{Op: "read", Path: path, Err: fs.ErrNotExist})
	}
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", at.Fd()))
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s has more than %d bytes", path, limit)
	}
	return b, err
}

// localZone returns the time zone in which a daemon interprets its crontabs.
func (d *daemon) localZone() (*time.Location, error) {
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", d.pid))
	if err != nil {
		return nil, fmt.Errorf("cannot determine the time zone of cron (process %d): %w", d.pid, err)
	}
	for v := range strings.SplitSeq(string(env), "\x00") {
		if name, ok := strings.CutPrefix(v, "TZ="); ok {
			return d.zone(name)
		}
	}
	return d.zone("/etc/localtime")
}

// zone returns the time zone with that name, or in the file at that path, as the C
// library in the daemon's root does.
func (d *daemon) zone(name string) (*time.Location, error) {
	name = strings.TrimPrefix(name, ":")
	path := name
	switch {
	case name == "" || name == "UTC":
		return time.UTC, nil
	case !filepath.IsAbs(name):
		path = filepath.Join("/usr/share/zoneinfo", name)
	}
	b, err := d.file(path, maxTable)
	if errors.Is(err, fs.ErrNotExist) {
		return fileless(name), nil
	}
	if err != nil {
		return nil, err
	}
	z, err := time.LoadLocationFromTZData(name, b)
	if err != nil {
		return nil, fmt.Errorf("%s is not a time zone file", path)
	}
	return z, nil
}

// fileless returns the time zone of a name for which there is no file: the one that
// the name describes, as in CET-1CEST,M3.5.0,M10.5.0/3 (POSIX), otherwise UTC. Package
// time reads such rules only at the end of a file, so it gets a file with nothing else.
func fileless(name string) *time.Location {
	const (
		header = "TZif2\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
		counts = "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x04" // one zone, of four letters
		utc    = "\x00\x00\x00\x00\x00\x00UTC\x00"
	)
	z, err := time.LoadLocationFromTZData(name, []byte(header+counts+utc+header+counts+utc+"\n"+name+"\n"))
	if err != nil {
		return time.UTC
	}
	return z
}
