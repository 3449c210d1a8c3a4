package shim

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/fdstore"
	"lull/internal/protocol/shimctl"
)

// The watchdog holds duplicates of the descriptors that would be lost if the shim
// and the daemon were killed together: the held sockets, and the descriptors on
// which binds are reported. It never uses them. The next shim gets them through
// keepSocket, so clients stay in their queues and binds wait.

const (
	keepSocket = "keep.sock"     // in the shim's directory; the watchdog listens there
	keepAck    = 5 * time.Second // a watchdog that does not answer within this time is replaced
	maxKept    = 64 << 10        // maximum size of a message, in bytes
)

// keptFD describes one descriptor that the watchdog holds.
type keptFD struct {
	Addr   string `json:"addr,omitempty"` // requested address of a held socket; empty for a filter's descriptor
	Run    uint64 `json:"run,omitempty"`  // for a filter's descriptor
	Inode  uint64 `json:"inode,omitempty"`
	Handed bool   `json:"handed,omitempty"` // the socket was handed to the running program
}

// keptMessage replaces what the watchdog holds under an ID. The descriptors are
// sent along, in the order of FDs. An empty ID ends the messages: to a shim that
// takes over it marks the last one, and from a shim it means that the shim ends on
// purpose.
type keptMessage struct {
	ID  string   `json:"id,omitempty"`
	FDs []keptFD `json:"fds,omitempty"`
}

// keptLocked returns what must survive this shim under an ID. s.mu must be held.
func (s *Shim) keptLocked(id string) (m keptMessage, fds []int) {
	m.ID = id
	var filters []*filter
	for _, f := range s.filters {
		if f.id == id {
			filters = append(filters, f)
		}
	}
	slices.SortFunc(filters, func(a, b *filter) int { return cmp.Compare(b.run, a.run) })
	handed := map[uint64]bool{}
	for _, f := range filters[:min(len(filters), 2)] { // of the newest run, and of one that is still ending
		m.FDs, fds = append(m.FDs, keptFD{Run: f.run}), append(fds, f.fd)
		maps.Copy(handed, f.handed)
	}
	for _, h := range s.held[id] {
		if len(fds) == shimctl.MaxFDs {
			break // the next shim will bind the rest anew
		}
		inode := inodeOf(h.fd)
		m.FDs = append(m.FDs, keptFD{Addr: h.addr, Inode: inode, Handed: handed[inode]})
		fds = append(fds, h.fd)
	}
	return m, fds
}

// mirrorLocked makes the watchdog hold exactly what is held under an ID. It returns
// once the watchdog has closed everything else. s.mu must be held.
func (s *Shim) mirrorLocked(id string) {
	if id == tryID {
		return
	}
	m, fds := s.keptLocked(id)
	if slices.Equal(m.FDs, s.dogHas[id]) {
		return
	}
	if s.dog == 0 && len(fds) > 0 {
		if err := s.watchedLocked(); err != nil { // a new watchdog gets everything when it starts, so nothing else is to be done
			s.log.Error("cannot start the watchdog; if the daemon and the shim are killed together, clients are disconnected and binds fail", "err", err)
		}
		return
	}
	s.giveDogLocked(m, fds)
}

// giveDogLocked sends one message to the watchdog and waits for the answer. It ends
// a watchdog that does not answer. s.mu must be held.
func (s *Shim) giveDogLocked(m keptMessage, fds []int) {
	if s.dog == 0 || s.dogFD < 0 {
		return
	}
	err := sendKept(s.dogFD, m, fds)
	if err == nil {
		err = readAck(s.dogFD)
	}
	if err != nil {
		s.log.Warn("the watchdog is replaced", "err", err)
		_ = unix.Kill(s.dog, unix.SIGKILL)
		unix.Close(s.dogFD)
		s.dogFD, s.dogHas = -1, nil // a new watchdog starts once this one has ended
		return
	}
	if len(m.FDs) == 0 {
		delete(s.dogHas, m.ID)
	} else {
		s.dogHas[m.ID] = m.FDs
	}
}

// mirrorAllLocked sends everything to a new watchdog. s.mu must be held.
func (s *Shim) mirrorAllLocked() {
	s.dogHas = map[string][]keptFD{}
	ids := map[string]bool{}
	for id := range s.held {
		ids[id] = true
	}
	for _, f := range s.filters {
		ids[f.id] = true
	}
	delete(ids, tryID)
	for id := range ids {
		m, fds := s.keptLocked(id)
		s.giveDogLocked(m, fds)
	}
}

// takeOver takes over what the watchdog of a killed shim holds. The caller must
// call done, which lets that watchdog end.
func (s *Shim) takeOver() (done func(), err error) {
	done = func() {}
	dir, err := unix.Open(s.dir.path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return done, err
	}
	defer unix.Close(dir)
	c, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return done, err
	}
	// The path may be too long for a socket address, hence the detour.
	err = unix.Connect(c, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir, keepSocket)})
	if err != nil {
		unix.Close(c)
		if err == unix.ENOENT || err == unix.ECONNREFUSED {
			err = nil // no watchdog runs
		}
		return done, err
	}
	limitIO(c)
	for {
		m, fds, err := receiveKept(c)
		if err != nil {
			unix.Close(c)
			return done, fmt.Errorf("take over the sockets of an earlier shim: %w", err)
		}
		if m.ID == "" {
			return func() {
				_, _ = unix.Write(c, []byte{0})
				_ = readAck(c) // the answer means that it has closed its duplicates
				unix.Close(c)
			}, nil
		}
		s.takeKept(m, fds)
	}
}

// takeKept takes over what the watchdog holds under one ID, and takes ownership of
// fds.
func (s *Shim) takeKept(m keptMessage, fds []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	handed := map[uint64]bool{}
	for n, k := range m.FDs {
		fd := fds[n]
		if k.Addr == "" {
			f := &filter{key: key{m.ID, k.Run}, fd: fd, handed: handed, removed: map[string]bool{}}
			s.filters[fd] = f
			if err := s.notes.watch(fd); err != nil {
				s.log.Error("cannot watch the binds of an instance", "instance", m.ID, "err", err)
			}
			continue
		}
		as, err := formOf(fd)
		if err != nil {
			unix.Close(fd)
			continue
		}
		if k.Handed {
			handed[inodeOf(fd)] = true
		}
		h := held{addr: k.Addr, as: as, fd: fd}
		h.identify()
		s.held[m.ID] = append(s.held[m.ID], h)
	}
	s.sortSparesLocked(m.ID)
}

// limitIO bounds how long a message on fd may take.
func limitIO(fd int) {
	limit := unix.NsecToTimeval(keepAck.Nanoseconds())
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit) // without the limit it works too
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit)
}

func sendKept(fd int, m keptMessage, fds []int) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(b) > maxKept {
		return fmt.Errorf("%d bytes for %s, at most %d", len(b), m.ID, maxKept)
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	for {
		err = unix.Sendmsg(fd, b, rights, nil, unix.MSG_NOSIGNAL)
		if err != unix.EINTR {
			return err
		}
	}
}

// errKeeperEnded means that the other end of the connection is closed.
var errKeeperEnded = errors.New("the other end is closed")

func receiveKept(fd int) (m keptMessage, fds []int, err error) {
	b, oob := make([]byte, maxKept), make([]byte, unix.CmsgSpace(4*(shimctl.MaxFDs+1)))
	n, oobn, flags := 0, 0, 0
	for {
		n, oobn, flags, _, err = unix.Recvmsg(fd, b, oob, unix.MSG_CMSG_CLOEXEC)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return m, nil, err
	}
	if n == 0 {
		return m, nil, errKeeperEnded
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	for _, c := range msgs {
		got, perr := unix.ParseUnixRights(&c)
		fds, err = append(fds, got...), errors.Join(err, perr)
	}
	if err == nil {
		err = json.Unmarshal(b[:n], &m)
	}
	if err == nil && (len(fds) != len(m.FDs) || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0) {
		err = fmt.Errorf("received %d descriptors with a message about %d", len(fds), len(m.FDs))
	}
	if err != nil {
		shimctl.CloseAll(fds)
		return m, nil, err
	}
	return m, fds, nil
}

func readAck(fd int) error {
	var b [1]byte
	for {
		n, err := unix.Read(fd, b[:])
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return err
		case n == 0:
			return errKeeperEnded
		}
		return nil
	}
}

// keeper is the watchdog's state.
type keeper struct {
	store fdstore.Store
	mu    sync.Mutex // held while a shim takes over
	has   map[string]kept
}

type kept struct {
	m     keptMessage
	files []*fdstore.File
}

func (k kept) close() {
	for _, f := range k.files {
		f.Close()
	}
}

// follow stores what the shim sends on fd, until the shim ends. killed is false if
// the shim has ended on purpose.
func (k *keeper) follow(fd int) (killed bool, err error) {
	for {
		m, fds, err := receiveKept(fd)
		if err == errKeeperEnded || err == unix.ECONNRESET {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		if m.ID == "" {
			return false, nil
		}
		k.mu.Lock()
		old := k.has[m.ID]
		if len(fds) == 0 {
			delete(k.has, m.ID)
		} else {
			now := kept{m: m}
			for _, fd := range fds {
				now.files = append(now.files, k.store.Put(fd))
			}
			k.has[m.ID] = now
		}
		k.mu.Unlock()
		old.close()
		if _, err := unix.Write(fd, []byte{0}); err != nil && err != unix.EPIPE {
			return false, err
		}
	}
}

// listenKept returns the listener to which the next shim connects. The working
// directory must be the shim's.
func listenKept() (int, error) {
	l, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := remove(keepSocket); err != nil {
		unix.Close(l)
		return -1, err
	}
	if err = unix.Bind(l, &unix.SockaddrUnix{Name: keepSocket}); err == nil {
		err = unix.Listen(l, 4)
	}
	if err != nil {
		unix.Close(l)
		return -1, fmt.Errorf("listen on %s: %w", keepSocket, err)
	}
	return l, nil
}

// serve passes everything to shims that connect to l, until one has confirmed that
// it has taken over. Then it closes the duplicates and returns nil.
func (k *keeper) serve(l int) error {
	for {
		c, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
		if err == unix.EINTR || err == unix.ECONNABORTED {
			continue
		}
		if err != nil {
			return err
		}
		limitIO(c)
		if k.giveAll(c) == nil {
			// The shim confirms only after it has started its own watchdog, which
			// may take long.
			none := unix.Timeval{}
			_ = unix.SetsockoptTimeval(c, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &none)
			if readAck(c) == nil {
				k.drop()
				_, _ = unix.Write(c, []byte{0})
				return nil
			}
		}
		unix.Close(c)
	}
}

func (k *keeper) giveAll(c int) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, h := range k.has {
		if err := h.give(c); err != nil {
			return err
		}
	}
	return sendKept(c, keptMessage{}, nil)
}

func (k kept) give(c int) error {
	var fds []int
	defer func() { shimctl.CloseAll(fds) }()
	for _, f := range k.files {
		fd, err := f.Open()
		if err != nil {
			return err
		}
		fds = append(fds, fd)
	}
	return sendKept(c, k.m, fds)
}

func (k *keeper) drop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, h := range k.has {
		h.close()
	}
	k.has = map[string]kept{}
}

func (k *keeper) empty() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.has) == 0
}

// startShim starts a shim on dir. The shim outlives the watchdog.
func startShim(dir string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	_ = os.Unsetenv("GOMAXPROCS") // set for the watchdog only
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(null)
	_, err = syscall.ForkExec(exe, []string{Name, "--dir", dir}, &syscall.ProcAttr{Dir: "/", Env: os.Environ(),
		Files: []uintptr{uintptr(null), uintptr(null), 2}, Sys: &syscall.SysProcAttr{Setsid: true}})
	return err
}
