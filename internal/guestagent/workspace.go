package guestagent

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"lull/internal/guestagent/fuse"
	"lull/internal/protocol/guest"
	"lull/internal/protocol/guest/files"
)

// FilesPort is the virtio-serial port of the workspace.
const FilesPort = "lull.1"

// fuseModule is the kernel module that a guest with a workspace needs.
const fuseModule = ModuleDir + "/fuse.ko"

// mounted is the process that serves the workspace to the kernel. It runs this same
// binary. It is separate because a process that starts programs in a directory must
// not also serve that directory.
type mounted struct {
	mu    sync.Mutex
	tell  *os.File
	hears *bufio.Reader
}

// Commands to the mounted process. Each is followed by a 16-byte key.
const (
	serveKey  = 'k'
	refuseKey = 'r'
)

// workspace mounts the workspace at the first call, and starts a new connection on
// its port at every call.
func (h *Harness) workspace(c guest.WorkspaceCall) error {
	if len(c.Key) != len(files.Key{}) || !c.Refuse && !filepath.IsAbs(c.Path) {
		return errors.New("cannot use the workspace: key or path are out of range")
	}
	m := &h.mounted
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.tell == nil && c.Refuse:
		return nil // a refusal has no mount that could fail
	case m.tell == nil:
		if err := h.mount(c); err != nil {
			return fmt.Errorf("cannot mount the workspace: %w", err)
		}
	}
	kind := byte(serveKey)
	if c.Refuse {
		kind = refuseKey
	}
	if _, err := m.tell.Write(append([]byte{kind}, c.Key...)); err != nil {
		return fmt.Errorf("cannot reach the workspace server: %w", err)
	}
	if said, err := m.hears.ReadString('\n'); err != nil || said != "ok\n" {
		return fmt.Errorf("cannot reach the workspace server: %q, %w", said, err)
	}
	return nil
}

// mount starts the mounted process and waits until the workspace is mounted.
func (h *Harness) mount(c guest.WorkspaceCall) error {
	cred, err := lookUser(h.cfg.Root, c.User)
	if err != nil {
		return err
	}
	uid, gid := uint32(0), uint32(0)
	if cred != nil {
		uid, gid = cred.Uid, cred.Gid
	}
	if err := makeDir(h.cfg.Root, c.Path); err != nil {
		return err
	}
	in, tell, err := os.Pipe()
	if err != nil {
		return err
	}
	defer in.Close()
	hears, out, err := os.Pipe()
	if err != nil {
		return errors.Join(err, tell.Close())
	}
	defer out.Close()
	argv := []string{"lull-harness", "workspace", h.cfg.Root, c.Path, strconv.FormatUint(uint64(uid), 10), strconv.FormatUint(uint64(gid), 10),
		strconv.FormatBool(c.ReadOnly)}
	p, err := h.kids.start("/proc/self/exe", argv, &os.ProcAttr{Dir: "/", Files: []*os.File{in, out, os.Stderr}})
	if err != nil {
		return errors.Join(err, tell.Close(), hears.Close())
	}
	// If memory runs out, the kernel must kill another process.
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.pid), []byte("-1000"), 0); err != nil {
		h.log.Warn("cannot protect the workspace's process from being killed when memory runs out", "err", err)
	}
	r := bufio.NewReader(hears)
	said, err := r.ReadString('\n')
	if err == nil && said != "ok\n" {
		err = errors.New(strings.TrimSpace(said))
	}
	if err != nil {
		return errors.Join(err, tell.Close(), hears.Close())
	}
	h.mounted.tell, h.mounted.hears = tell, r
	return nil
}

// ServeWorkspace is the main function of the mounted process. args are the
// arguments from mount.
func ServeWorkspace(args []string, in io.Reader, out io.Writer) error {
	say := func(err error) error {
		text := "ok"
		if err != nil {
			text = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		_, werr := fmt.Fprintln(out, text)
		return errors.Join(err, werr)
	}
	s, h, err := mountWorkspace(args)
	if err := say(err); err != nil {
		return err
	}
	ended := make(chan error, 2)
	go func() { ended <- s.Run() }()
	go h.Run()
	go func() { ended <- acceptKeys(in, h, say) }()
	return <-ended
}

// acceptKeys reads commands from in and starts the connections that they announce.
func acceptKeys(in io.Reader, h *fuse.Host, say func(error) error) error {
	var b [1 + len(files.Key{})]byte
	for {
		if _, err := io.ReadFull(in, b[:]); err != nil {
			return fmt.Errorf("cannot read from the harness: %w", err)
		}
		if b[0] == refuseKey {
			h.Refuse()
		} else {
			h.Connect(files.Key(b[1:]))
		}
		if err := say(nil); err != nil {
			return err
		}
	}
}

func mountWorkspace(args []string) (*fuse.Server, *fuse.Host, error) {
	if len(args) != 5 {
		return nil, nil, errors.New("cannot use these arguments: want root, path, uid, gid and whether it is read-only")
	}
	uid, uerr := strconv.ParseUint(args[2], 10, 32)
	gid, gerr := strconv.ParseUint(args[3], 10, 32)
	readOnly, rerr := strconv.ParseBool(args[4])
	if err := errors.Join(uerr, gerr, rerr); err != nil {
		return nil, nil, err
	}
	if err := loadModule(fuseModule); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	port, err := openPort(FilesPort)
	if err != nil {
		return nil, nil, err
	}
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("the guest's kernel has no FUSE: %w", err)
	}
	root, err := unix.Open(args[0], unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	at, err := unix.Openat2(root, args[1], &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	if err != nil {
		return nil, nil, fmt.Errorf("cannot find %s: %w", args[1], err)
	}
	flags := uintptr(safe)
	if readOnly {
		flags |= unix.MS_RDONLY
	}
	data := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,max_read=%d", dev, files.MaxData)
	if err := unix.Mount("workspace", "/proc/self/fd/"+strconv.Itoa(at), "fuse", flags, data); err != nil {
		return nil, nil, fmt.Errorf("cannot mount %s: %w", args[1], err)
	}
	h := fuse.NewHost(port)
	return fuse.New(dev, h, uint32(uid), uint32(gid)), h, nil
}
