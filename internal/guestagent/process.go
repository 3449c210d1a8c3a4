package guestagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/guest"
)

// process is a program started by the guest agent.
type process struct {
	pid    int
	over   chan struct{} // closed when it has been reaped
	status syscall.WaitStatus
}

// note returns how the process ended. It must be called only after over is closed.
func (p *process) note() guest.ExitNote {
	n := guest.ExitNote{Code: p.status.ExitStatus(), At: time.Now().UnixMilli()}
	if p.status.Signaled() {
		n.Signal = int(p.status.Signal())
		n.Code = 128 + n.Signal
	}
	return n
}

// children reaps processes. As process 1 it also reaps orphans, so nothing else may
// call wait.
type children struct {
	init bool
	mu   sync.Mutex // held from before a fork until the PID is known
	all  map[int]*process
}

func newChildren(init bool) *children { return &children{init: init, all: map[int]*process{}} }

// start starts a program. It closes over once the program has ended.
func (c *children) start(path string, argv []string, attr *os.ProcAttr) (*process, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	osp, err := os.StartProcess(path, argv, attr)
	if err != nil {
		return nil, err
	}
	p := &process{pid: osp.Pid, over: make(chan struct{})}
	if c.init {
		c.all[p.pid] = p
		return p, osp.Release()
	}
	go func() { // ends with the program
		if st, err := osp.Wait(); err == nil {
			p.status, _ = st.Sys().(syscall.WaitStatus)
		}
		close(p.over)
	}()
	return p, nil
}

// collect reaps processes until ctx ends.
func (c *children) collect(ctx context.Context) {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	defer signal.Stop(ended)
	for {
		for c.collectOne() {
		}
		select {
		case <-ended:
		case <-time.After(time.Second): // poll as well, because signals can be merged and orphans must be reaped
		case <-ctx.Done():
			return
		}
	}
}

func (c *children) collectOne() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	var ws syscall.WaitStatus
	pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
	if err == syscall.EINTR {
		return true
	}
	if err != nil || pid <= 0 {
		return false
	}
	if p := c.all[pid]; p != nil {
		delete(c.all, pid)
		p.status = ws
		close(p.over)
	}
	return true
}

// run starts the workload. It fails if this guest has already started one.
func (h *Harness) run(c guest.RunCall) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.main != nil {
		return errors.New("cannot run: this guest has already started its workload; boot another guest")
	}
	if len(c.Command) == 0 {
		return errors.New("cannot run: command is empty")
	}
	env := c.Env
	if h.cfg.Socket != "" {
		// If a variable occurs twice, programs use the first, so the host's must be
		// removed.
		env = slices.DeleteFunc(slices.Clone(env), func(e string) bool { return strings.HasPrefix(e, "LULL_SOCKET=") })
		env = append(env, "LULL_SOCKET="+h.cfg.SockEnv)
	}
	cred, err := lookUser(h.cfg.Root, c.User)
	if err != nil {
		return err
	}
	if cred != nil {
		for _, g := range c.Groups {
			cred.Groups = append(cred.Groups, uint32(g))
		}
	}
	if err := makeDir(h.cfg.Root, c.Dir); err != nil {
		return fmt.Errorf("cannot use dir: %w", err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("cannot make a pipe: %w", err)
	}
	if err := give(cred, w); err != nil {
		return errors.Join(err, r.Close(), w.Close())
	}
	killed := h.oomKills()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return errors.Join(err, r.Close(), w.Close())
	}
	p, err := h.spawn(c.Command, env, c.Dir, cred, [3]*os.File{null, w, w}, false)
	err = errors.Join(err, w.Close(), null.Close())
	if err != nil {
		return errors.Join(fmt.Errorf("cannot run %s: %w", c.Command[0], err), r.Close())
	}
	h.main, h.env, h.dir, h.cred = p, env, c.Dir, cred
	read := make(chan struct{})
	go func() { // ends when the last process with the pipe open has closed it
		defer close(read)
		defer r.Close()
		h.logs.readFrom(r)
	}()
	go h.await(p, read, killed)
	return nil
}

// give makes a user the owner of a program's pipes, so that the program can open
// them by name. Images link their logs to /dev/stdout, for example.
func give(to *syscall.Credential, pipes ...*os.File) error {
	if to == nil {
		return nil
	}
	for _, p := range pipes {
		if err := p.Chown(int(to.Uid), int(to.Gid)); err != nil {
			return fmt.Errorf("cannot make the program's user the owner of its pipes: %w", err)
		}
	}
	return nil
}

// makeDir creates the workload's directory if the image does not have it, as
// container runtimes do.
func makeDir(root, dir string) error {
	r, err := os.OpenRoot(root)
	if err != nil {
		return err
	}
	defer r.Close()
	at := strings.TrimPrefix(filepath.Clean("/"+dir), "/")
	if at == "" {
		return nil
	}
	if _, err := r.Stat(at); !errors.Is(err, os.ErrNotExist) {
		return nil // the directory exists, or entering it will fail with the reason
	}
	return r.MkdirAll(at, 0o755)
}

// lastWords is how long to wait for the end of a workload's output, because a child
// that outlives the workload may keep the pipe open.
const lastWords = 500 * time.Millisecond

// await waits until the workload has ended, and reports how to the host after it
// has sent the output. killed is the value of oomKills before the start.
func (h *Harness) await(p *process, read <-chan struct{}, killed uint64) {
	<-p.over
	select {
	case <-read:
	case <-time.After(lastWords):
	}
	h.logs.drained(2 * time.Second)
	n := p.note()
	n.Starved = n.Code == 128+int(syscall.SIGKILL) && h.oomKills() > killed
	h.mu.Lock()
	h.exit = &n
	h.mu.Unlock()
	if err := h.host().Notify(guest.Exited, n); err != nil {
		h.log.Warn("cannot report the end of the workload; the next hello will", "err", err)
	}
}

// spawn starts a program in the workload's root and control group.
func (h *Harness) spawn(argv, env []string, dir string, cred *syscall.Credential, stdio [3]*os.File, tty bool) (*process, error) {
	root, err := os.OpenFile(h.cfg.Root, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("cannot open the root: %w", err)
	}
	defer root.Close()
	path, err := lookPath(root, argv[0], env, dir)
	if err != nil {
		return nil, err
	}
	sys := &syscall.SysProcAttr{Setsid: true, Setctty: tty, Credential: cred}
	if h.cfg.Root != "/" {
		sys.Chroot = h.cfg.Root
	}
	if h.cfg.Group != "" {
		g, err := os.Open(h.cfg.Group)
		if err != nil {
			return nil, fmt.Errorf("cannot open the control group: %w", err)
		}
		defer g.Close()
		sys.UseCgroupFD, sys.CgroupFD = true, int(g.Fd())
	}
	if dir == "" {
		dir = "/"
	}
	return h.kids.start(path, argv, &os.ProcAttr{Dir: dir, Env: env, Files: stdio[:], Sys: sys})
}

var errNotThere = errors.New("does not exist in the guest")

// lookPath finds a program in the workload's root. It resolves links inside the
// root.
func lookPath(root *os.File, name string, env []string, dir string) (string, error) {
	look := func(p string) error {
		fd, err := unix.Openat2(int(root.Fd()), p, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
		if err != nil {
			return errNotThere
		}
		defer unix.Close(fd)
		var st unix.Stat_t
		if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Mode&0o111 != 0 {
			return nil
		}
		return errors.New("is not a program")
	}
	if strings.Contains(name, "/") {
		p := name
		if !filepath.IsAbs(p) {
			p = filepath.Join("/", dir, p)
		}
		if err := look(p); err != nil {
			return "", fmt.Errorf("%s %w", p, err)
		}
		return p, nil
	}
	search := "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	for _, e := range env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			search = v
		}
	}
	for _, d := range filepath.SplitList(search) {
		if p := filepath.Join("/", d, name); look(p) == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s %w: it is not in PATH, which is %s", name, errNotThere, search)
}

// maxFile limits the size of the guest's user database files, in bytes.
const maxFile = 1 << 20

// lookUser returns the credentials of a user, given as a name or UID[:GID]. They
// are nil for "", which means the current user.
func lookUser(root, user string) (*syscall.Credential, error) {
	if user == "" {
		return nil, nil
	}
	u, g, both := strings.Cut(user, ":")
	if uid, err := strconv.ParseUint(u, 10, 32); err == nil {
		gid := uid
		if both {
			if gid, err = strconv.ParseUint(g, 10, 32); err != nil {
				return nil, fmt.Errorf("user %q: the group is not a number", user)
			}
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	r, err := os.OpenRoot(root)
	if err != nil {
		return nil, fmt.Errorf("cannot look up user %q: %w", user, err)
	}
	defer r.Close()
	f, err := r.Open("etc/passwd")
	if err != nil {
		return nil, fmt.Errorf("cannot look up user %q: %w", user, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return nil, fmt.Errorf("cannot look up user %q: %w", user, err)
	}
	for line := range strings.Lines(string(b)) {
		p := strings.Split(strings.TrimSpace(line), ":")
		if len(p) < 4 || p[0] != user {
			continue
		}
		uid, uerr := strconv.ParseUint(p[2], 10, 32)
		gid, gerr := strconv.ParseUint(p[3], 10, 32)
		if uerr != nil || gerr != nil {
			break
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, fmt.Errorf("cannot use user %q: the guest does not know it", user)
}

// signal sends sig to the workload's main process.
func (h *Harness) signal(sig syscall.Signal) error {
	if sig < 1 || sig > 64 {
		return fmt.Errorf("cannot use signal %d: want 1 to 64", sig)
	}
	h.mu.Lock()
	m := h.main
	h.mu.Unlock()
	if m == nil {
		return errors.New("cannot signal the workload: it has not started")
	}
	h.kids.mu.Lock() // the process is not reaped while mu is held, so its PID cannot be reused
	defer h.kids.mu.Unlock()
	select {
	case <-m.over:
		return errors.New("cannot signal the workload: it has ended")
	default:
	}
	if err := syscall.Kill(m.pid, sig); err != nil {
		return fmt.Errorf("cannot signal the workload: %w", err)
	}
	return nil
}

// signalGroup sends a signal to the process group that p leads.
func (c *children) signalGroup(p *process, sig syscall.Signal) error {
	c.mu.Lock() // the process is not reaped while mu is held, so its PID cannot be reused
	defer c.mu.Unlock()
	select {
	case <-p.over:
		return syscall.ESRCH
	default:
	}
	return syscall.Kill(-p.pid, sig)
}

// killAll kills the workload and every process it has started.
func (h *Harness) killAll() {
	if h.cfg.Group != "" {
		if err := os.WriteFile(filepath.Join(h.cfg.Group, "cgroup.kill"), []byte("1"), 0); err == nil {
			return
		}
	}
	h.mu.Lock()
	m := h.main
	h.mu.Unlock()
	if m == nil {
		return
	}
	select {
	case <-m.over:
	default:
		_ = syscall.Kill(-m.pid, syscall.SIGKILL) // the workload's process group; ESRCH means that it has ended
	}
}
