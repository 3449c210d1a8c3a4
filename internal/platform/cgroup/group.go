package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"lull/internal/lib/delay"
)

// Group is the control group of one instance. Its methods are safe for concurrent
// use, with the semantics of the kernel files. It keeps at most one file open:
// while frozen, the file that Thaw writes; otherwise, after a call of CPU, the
// file that CPU reads. Kill and Remove close it.
type Group struct {
	kind Kind
	dir  string
	cpu  string // v1 cpuacct directory, or empty

	once sync.Once
	open *open
}

// open holds the files that a group keeps open. ready and usage are 1 + the
// descriptor, 0 for none.
type open struct {
	ready  atomic.Int64 // for Thaw
	frozen atomic.Bool

	mu    sync.Mutex // held while usage is read
	usage int        // for CPU
}

// files returns the open files of g. They are closed at the latest when g is
// garbage-collected.
func (g *Group) files() *open {
	g.once.Do(func() {
		g.open = new(open)
		runtime.AddCleanup(g, (*open).close, g.open)
	})
	return g.open
}

func (o *open) close() {
	if n := o.ready.Swap(0); n > 0 {
		endReady(int(n - 1))
	}
	o.endUsage()
}

// endUsage closes the file that CPU keeps open.
func (o *open) endUsage() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.usage > 0 {
		endReady(o.usage - 1)
		o.usage = 0
	}
}

// mostReady bounds the files that all groups of this process keep open, to an
// eighth of its descriptors. Freeze opens the file for Thaw ahead of time,
// because a client waits for the thaw and opening a file that has not been used
// for a while takes longer than writing it. CPU keeps its file open because it is
// called at every probe.
var mostReady = sync.OnceValue(func() int64 {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return 0
	}
	return int64(min(l.Cur/8, 4096))
})

// allReady counts the files that all groups keep open.
var allReady atomic.Int64

// keepReady opens the file that Thaw writes to. If that fails or too many files
// are open, Thaw opens it itself.
func (g *Group) keepReady() {
	g.files().frozen.Store(true)
	g.files().endUsage()
	if allReady.Add(1) <= mostReady() {
		name, _ := g.thawing()
		if fd, err := unix.Open(g.dir+name, unix.O_WRONLY|unix.O_CLOEXEC, 0); err == nil {
			if g.files().ready.CompareAndSwap(0, int64(fd)+1) {
				return
			}
			unix.Close(fd)
		}
	}
	allReady.Add(-1)
}

// takeReady passes the file that keepReady opened to the caller, who must call
// endReady. ok is false if there is none.
func (g *Group) takeReady() (fd int, ok bool) {
	n := g.files().ready.Swap(0)
	return int(n - 1), n > 0
}

func endReady(fd int) {
	_, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) // a raw call, as in writeNow; there is nothing to flush
	allReady.Add(-1)
}

// usageSize is more than the part of a file that CPU needs, which is at its start.
const usageSize = 256

// readUsage parses the start of the file dir/name. The file stays open for the next
// call if the limit of open files allows.
func (g *Group) readUsage(dir, name string, parse func([]byte) (time.Duration, error)) (time.Duration, error) {
	var into [usageSize]byte
	o := g.files()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.usage > 0 {
		if n, errno := preadNow(o.usage-1, &into); errno == 0 && n > 0 {
			return parse(into[:n])
		}
		endReady(o.usage - 1) // the group was recreated
		o.usage = 0
	}
	path := dir + name
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	n, errno := preadNow(fd, &into)
	for errno == unix.EINTR {
		n, errno = preadNow(fd, &into)
	}
	if errno != 0 {
		unix.Close(fd)
		return 0, &fs.PathError{Op: "read", Path: path, Err: errno}
	}
	switch {
	case o.frozen.Load():
		unix.Close(fd)
	case allReady.Add(1) <= mostReady():
		o.usage = fd + 1
	default:
		endReady(fd)
	}
	return parse(into[:n])
}

// preadNow reads the start of a file as writeNow writes.
func preadNow(fd int, into *[usageSize]byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_PREAD64, uintptr(fd), uintptr(unsafe.Pointer(into)), usageSize, 0, 0, 0)
	return int(n), errno
}

// thawing returns the name of the file that thaws the group, and the value to
// write to it.
func (g *Group) thawing() (name, value string) {
	if g.kind == V1 {
		return "/freezer.state", "THAWED"
	}
	return "/cgroup.freeze", "0"
}

// Kind returns the freezer that the group uses.
func (g *Group) Kind() Kind { return g.kind }

// Dir returns the group's directory, which also identifies it after a restart.
func (g *Group) Dir() string { return g.dir }

// Dirs returns all directories that a process joins to be in the group: Dir
// first, then that of the v1 cpuacct controller if there is one.
func (g *Group) Dirs() []string {
	if g.cpu == "" {
		return []string{g.dir}
	}
	return []string{g.dir, g.cpu}
}

func (g *Group) fail(what string, err error) error {
	return fmt.Errorf("cannot %s the group %s: %w", what, filepath.Base(g.dir), err)
}

// Freeze stops every task of the group and of its descendants, and returns nil
// once all have stopped. On an error, or when ctx ends first, the group is thawed
// again.
func (g *Group) Freeze(ctx context.Context) error {
	var err error
	if g.kind == V2 {
		err = g.freeze2(ctx)
	} else {
		err = g.freeze1(ctx)
	}
	if err != nil {
		return errors.Join(g.fail("freeze", err), g.Thaw())
	}
	g.keepReady()
	return nil
}

// Thaw lets every task run again. It costs one short write and may be called on a
// group that is not frozen. After the write, the calling thread yields, because
// the kernel may have scheduled the tasks on its CPU.
func (g *Group) Thaw() error { return g.ThawThen(GiveWay) }

// ThawThen is Thaw, but calls then instead of yielding.
func (g *Group) ThawThen(then func()) error {
	defer g.files().frozen.Store(false)
	name, value := g.thawing()
	if fd, ok := g.takeReady(); ok {
		err := writeNow(fd, value)
		if err == nil {
			then()
		}
		endReady(fd)
		if err == nil {
			return nil
		} // otherwise reopen by name: the group may have been recreated
	}
	if err := writeFile(g.dir+name, value); err != nil {
		return g.fail("thaw", err)
	}
	then()
	return nil
}

// writeNow is writeAll as a raw system call. An ordinary one in a process that
// has been silent first wakes the Go runtime's monitor. The kernel answers in
// microseconds.
func writeNow(fd int, value string) error {
	for {
		_, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.StringData(value))), uintptr(len(value)))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}

// GiveWay yields this CPU to other threads.
func GiveWay() { _, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) } // cannot fail

// Frozen reports whether every task has stopped.
func (g *Group) Frozen() (bool, error) {
	if g.kind == V2 {
		_, frozen, err := g.events()
		return frozen, err
	}
	state, err := readFile(g.dir + "/freezer.state")
	if err != nil {
		return false, g.fail("read", err)
	}
	return string(bytes.TrimSpace(state)) == "FROZEN", nil
}

// Held reports whether the group was asked to freeze, whether or not it has
// stopped yet.
func (g *Group) Held() (bool, error) {
	name := "/cgroup.freeze"
	if g.kind == V1 {
		name = "/freezer.self_freezing"
	}
	b, err := readFile(g.dir + name)
	if err != nil {
		return false, g.fail("read", err)
	}
	return string(bytes.TrimSpace(b)) == "1", nil
}

func (g *Group) freeze2(ctx context.Context) error {
	if err := writeFile(g.dir+"/cgroup.freeze", "1"); err != nil {
		return err
	}
	return g.await(ctx, func(_, frozen bool) bool { return frozen })
}

// await reads cgroup.events until done returns true. The kernel delays
// notifications about the file by up to 10 ms, but a freeze takes a tenth of a
// millisecond. The file is therefore read a few times first, and then polled with
// a short timeout.
func (g *Group) await(ctx context.Context, done func(populated, frozen bool) bool) error {
	const (
		eager = 60
		pause = 2 // ms
	)
	fd, err := unix.Open(g.dir+"/cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var buf [256]byte
	for i := 0; ; i++ {
		n, err := unix.Pread(fd, buf[:], 0)
		if err != nil && err != unix.EINTR {
			return err
		}
		if err == nil {
			populated, frozen, err := parseEvents(buf[:n])
			if err != nil {
				return err
			}
			if done(populated, frozen) {
				return nil
			}
		}
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		if i < eager {
			runtime.Gosched()
			continue
		}
		_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}, pause)
		if err != nil && err != unix.EINTR {
			return err
		}
	}
}

func (g *Group) events() (populated, frozen bool, err error) {
	b, err := readFile(g.dir + "/cgroup.events")
	if err == nil {
		populated, frozen, err = parseEvents(b)
	}
	if err != nil {
		return false, false, g.fail("read", err)
	}
	return populated, frozen, nil
}

// parseEvents parses cgroup.events. Unknown lines are ignored; the two required
// ones must be present.
func parseEvents(b []byte) (populated, frozen bool, err error) {
	var seen int
	for line := range bytes.Lines(b) {
		key, value, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		on := string(value) == "1"
		if !on && string(value) != "0" {
			continue
		}
		switch string(key) {
		case "populated":
			populated, seen = on, seen|1
		case "frozen":
			frozen, seen = on, seen|2
		}
	}
	if seen != 3 {
		return false, false, errors.New("cgroup.events has no populated or no frozen line")
	}
	return populated, frozen, nil
}

// freeze1 freezes the group with the v1 freezer. The group can get stuck in
// FREEZING if a task was caught in a fork, or in a vfork whose child is already
// frozen. Writing FROZEN again helps; sometimes only a thaw in between does.
func (g *Group) freeze1(ctx context.Context) error {
	const letGo = 50
	path := g.dir + "/freezer.state"
	for i := 1; ; i++ {
		if err := writeFile(path, "FROZEN"); err != nil {
			return err
		}
		for range 20 {
			if frozen, err := g.Frozen(); err != nil {
				return err
			} else if frozen {
				return nil
			}
			runtime.Gosched()
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if i%letGo == 0 {
			if err := writeFile(path, "THAWED"); err != nil {
				return err
			}
		}
		if err := delay.For(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

// Kill kills every process of the group, frozen or not, and returns nil when none
// is left. Zombies do not count.
func (g *Group) Kill(ctx context.Context) error {
	g.files().close()
	for i := 0; ; i++ {
		if err := g.killOnce(ctx); err != nil && ctx.Err() == nil {
			return g.fail("kill", err)
		}
		populated, err := g.Populated()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if !populated {
			return nil
		}
		if err := delay.For(ctx, time.Duration(min(i+1, 20))*time.Millisecond); err != nil {
			pids, _ := g.PIDs()
			return g.fail("kill", fmt.Errorf("processes %v remain: %w", pids, err))
		}
	}
}

func (g *Group) killOnce(ctx context.Context) error {
	if g.kind == V2 {
		err := writeFile(g.dir+"/cgroup.kill", "1")
		if err == nil {
			short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
			defer cancel()
			_ = g.await(short, func(populated, _ bool) bool { return !populated }) // Kill checks again
			return nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if _, err := os.Stat(g.dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	// Freeze the group while its processes are signaled, so that none forks. If
	// the freeze takes too long they are signaled anyway, and Kill repeats.
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	_ = g.Freeze(short)
	pids, err := g.PIDs()
	for _, pid := range pids {
		if kerr := unix.Kill(pid, unix.SIGKILL); kerr != nil && kerr != unix.ESRCH {
			err = errors.Join(err, fmt.Errorf("process %d: %w", pid, kerr))
		}
	}
	return errors.Join(err, g.Thaw())
}

// Populated reports whether the group or a descendant has a process.
func (g *Group) Populated() (bool, error) {
	if g.kind == V2 {
		populated, _, err := g.events()
		return populated, err
	}
	pids, err := g.PIDs()
	return len(pids) > 0, err
}

// PIDs returns the processes of the group and its descendants. The list is
// complete if the group is frozen, and a snapshot otherwise.
func (g *Group) PIDs() ([]int, error) {
	var pids []int
	err := g.each(func(dir string) error {
		b, err := readFile(dir + "/cgroup.procs")
		if err != nil {
			return err
		}
		for line := range bytes.Lines(b) {
			pid, err := strconv.Atoi(string(bytes.TrimSpace(line)))
			if err != nil {
				return fmt.Errorf("%s/cgroup.procs: %w", dir, err)
			}
			if pid > 0 { // 0 is a process of another pid namespace
				pids = append(pids, pid)
			}
		}
		return nil
	})
	if err != nil {
		return nil, g.fail("list", err)
	}
	return pids, nil
}

// each calls do for the group's directory and its descendants, parents first.
// Descendants may vanish at any time.
func (g *Group) each(do func(dir string) error) error {
	if err := do(g.dir); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Stat(g.dir, &st); err == nil && st.Nlink == 2 {
		return nil // it has no subgroups
	}
	return filepath.WalkDir(g.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && (path == g.dir || !d.IsDir()) {
			return nil
		}
		if err == nil {
			err = do(path)
		}
		if errors.Is(err, fs.ErrNotExist) && path != g.dir {
			return nil
		}
		return err
	})
}

// ErrNoAccount means that the group has no CPU accounting.
var ErrNoAccount = errors.New("no CPU accounting")

// CPU returns the CPU time used by all processes that were ever in the group,
// including exited ones.
func (g *Group) CPU() (time.Duration, error) {
	var used time.Duration
	var err error
	switch {
	case g.kind == V2:
		used, err = g.readUsage(g.dir, "/cpu.stat", parseUsage)
	case g.cpu == "":
		err = ErrNoAccount
	default:
		used, err = g.readUsage(g.cpu, "/cpuacct.usage", func(b []byte) (time.Duration, error) {
			ns, err := strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64)
			return time.Duration(ns), err
		})
	}
	if err != nil {
		return 0, g.fail("measure", err)
	}
	return used, nil
}

func parseUsage(b []byte) (time.Duration, error) {
	for line := range bytes.Lines(b) {
		if rest, ok := bytes.CutPrefix(line, []byte("usage_usec ")); ok {
			us, err := strconv.ParseInt(string(bytes.TrimSpace(rest)), 10, 64)
			if err != nil || us < 0 || us > int64(1<<63-1)/int64(time.Microsecond) {
				return 0, fmt.Errorf("cpu.stat: usage_usec %q is out of range", bytes.TrimSpace(rest))
			}
			return time.Duration(us) * time.Microsecond, nil
		}
	}
	return 0, ErrNoAccount
}

// ErrNoReclaim means that memory cannot be reclaimed through this group.
var ErrNoReclaim = errors.New("the group has no memory.reclaim")

// Reclaim asks the kernel to reclaim up to size bytes of the group's memory.
// Reclaiming less is not an error. It returns ErrNoReclaim if the kernel or the
// hierarchy does not support it.
func (g *Group) Reclaim(size int64) error {
	err := writeFile(g.dir+"/memory.reclaim", strconv.FormatInt(size, 10))
	switch {
	case err == nil, errors.Is(err, unix.EAGAIN):
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return ErrNoReclaim
	}
	return g.fail("reclaim memory of", err)
}

// Remove removes the empty group and its descendants. A missing group is not an
// error; a group with processes is EBUSY.
func (g *Group) Remove() error {
	g.files().close()
	for _, dir := range g.Dirs() {
		below := []string{}
		top := Group{dir: dir}
		err := top.each(func(d string) error { below = append(below, d); return nil })
		for i := len(below) - 1; i >= 0 && err == nil; i-- {
			err = removeDir(below[i])
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return g.fail("remove", err)
		}
	}
	return nil
}

// Renew recreates the group. It returns EBUSY if the group has processes. A
// killed group must be recreated before a process is cloned into it: some kernels
// (such as 6.18) compare its count of kills with that of the cloning process's
// group, and kill the new process if they differ.
func (g *Group) Renew() error {
	if populated, err := g.Populated(); err == nil && populated {
		return g.fail("renew", unix.EBUSY)
	}
	if err := g.Remove(); err != nil {
		return err
	}
	for _, dir := range g.Dirs() {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return g.fail("make", err)
		}
	}
	return nil
}

// removeDir removes a group's directory. It retries for a moment, because an
// exited process counts as a member until the kernel has torn it down.
func removeDir(dir string) error {
	var err error
	for range 50 {
		if err = unix.Rmdir(dir); err == nil || err == unix.ENOENT {
			return nil
		}
		if err != unix.EBUSY {
			break
		}
		time.Sleep(time.Millisecond)
	}
	return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
}

// readFile reads a small kernel file. Its error preserves fs.ErrNotExist.
func readFile(path string) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	buf := make([]byte, 0, 512)
	for {
		if len(buf) == cap(buf) {
			buf = append(buf, 0)[:len(buf)]
		}
		n, err := unix.Read(fd, buf[len(buf):cap(buf)])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, &fs.PathError{Op: "read", Path: path, Err: err}
		}
		if n == 0 {
			return buf, nil
		}
		buf = buf[:len(buf)+n]
	}
}

// writeFile writes value in one write, as kernel files require.
func writeFile(path, value string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	err = writeAll(fd, value)
	unix.Close(fd)
	if err != nil {
		return &fs.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

func writeAll(fd int, value string) error {
	for {
		if _, err := unix.Write(fd, []byte(value)); err != unix.EINTR {
			return err
		}
	}
}
