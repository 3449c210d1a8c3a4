package microvm

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"lull/internal/edge/runtime/microvm/vnet"
	"lull/internal/instance"
	"lull/internal/link/guest"
	"lull/internal/link/guest/vsock"
)

// A guest with a vsock device is called over it, and over its serial port until
// it has connected and whenever that connection is cut: the first word of a
// guest that boots or wakes, and how to connect, go over the port. So neither a
// daemon that is started again nor a guest that is restored, whose connections
// are gone then, loses its way, and nobody listens but while one guest connects.

// Channel is over what this host calls the harness of its guests.
type Channel string

// Channels.
const (
	ChannelAuto   Channel = "auto"   // vsock where there is all that it needs, for guests that may reach anything
	ChannelSerial Channel = "serial" // the serial port alone
	ChannelVsock  Channel = "vsock"  // vsock for every guest, or none starts
)

// check says why a channel cannot be used; no says why vsock cannot.
func (c Channel) check(no func() error) error {
	switch c {
	case ChannelAuto, ChannelSerial:
		return nil
	case ChannelVsock:
		return no()
	}
	return fmt.Errorf("cannot use channel: %q is none of auto, serial, vsock", c)
}

// noVsock says why guests cannot have vsock; nil when they can.
func (r *Runtime) noVsock() error {
	if r.kernel.Version != "" && !r.kernel.VSOCK {
		return fmt.Errorf("cannot use vsock: the guests' kernel %s has not all of the modules %v", r.kernel.Version, vsock.Modules)
	}
	return r.files.noVsock(r.listens)
}

// noVsock says why this machine has no vsock for guests.
func (m machineFiles) noVsock(listens func() error) error {
	f, err := os.OpenFile(m.vhost(), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("cannot use vsock: %w", err)
	}
	return errors.Join(f.Close(), listens())
}

func (m machineFiles) vhost() string { return filepath.Join(m.dev, "vhost-vsock") }

// listens says why this process cannot listen for guests.
func listens() error {
	l, err := vsock.Listen(vsock.Host)
	if err != nil {
		return err
	}
	return l.Close()
}

// FindChannel is over what guests with this kernel are called on this machine,
// and why. An error says that what was asked for is not there.
func FindChannel(want Channel, k Kernel) (what string, err error) {
	r := &Runtime{kernel: k, files: liveFiles, listens: listens}
	no := r.noVsock()
	switch err := want.check(func() error { return no }); {
	case err != nil:
		return "", err
	case want == ChannelSerial:
		return "virtio-serial: configured", nil
	case no != nil:
		return "virtio-serial: " + no.Error(), nil
	}
	return "vsock, and virtio-serial where a guest does not answer over it", nil
}

// giveCID is the context id of a guest's vsock device; 0 for none.
func (r *Runtime) giveCID(m Machine) (uint32, error) {
	if r.cfg.Channel == ChannelSerial || r.cfg.Channel == ChannelAuto && m.Net == vnet.None {
		return 0, nil
	}
	if r.cfg.Channel == ChannelAuto && r.without.Load() != nil {
		return 0, nil
	}
	switch err := r.noVsock(); {
	case err == nil:
		return newCID(), nil
	case r.cfg.Channel == ChannelVsock:
		return 0, err
	}
	return 0, nil
}

// vsockFailed says whether a start failed because of QEMU's vsock device.
func vsockFailed(err error) bool {
	return errors.Is(err, errVsock) || errors.Is(err, errNoBoot) && strings.Contains(err.Error(), "vhost-vsock")
}

// doWithoutVsock says whether a start that failed shall be made again without a
// vsock device, like all that follow: what is only better to have shall keep no
// guest from starting.
func (r *Runtime) doWithoutVsock(err error) bool {
	if r.cfg.Channel != ChannelAuto || !vsockFailed(err) {
		return false
	}
	why := err.Error()
	if !r.without.CompareAndSwap(nil, &why) {
		return false
	}
	r.log.Warn("guests start without vsock from now on", "error", err)
	return true
}

// newCID is a context id that hardly anybody has: other programs count from 3.
func newCID() uint32 {
	const first, last = 1 << 16, 1<<32 - 2
	var b [8]byte
	rand.Read(b[:])
	return uint32(first + binary.NativeEndian.Uint64(b[:])%(last-first+1))
}

// checkVsock says why a saved guest cannot have the vsock device that it had.
func (w *Work) checkVsock(man *manifest) error {
	if !man.Vsock {
		return nil
	}
	err := w.r.noVsock()
	if w.r.cfg.Channel == ChannelSerial {
		err = errors.New("this host is told to use virtio-serial alone")
	}
	if err != nil {
		return &instance.SnapshotError{Reason: "it was saved with a vsock device, which it cannot have now: " + err.Error()}
	}
	return nil
}

// errVsock marks a vsock device that could not be made.
var errVsock = errors.New("cannot make a vsock device")

// openVsock makes what QEMU's vsock device is made of, nil for a guest without
// one. Where its context id is taken it gets another, which the guest learns
// when it boots or is restored.
func (w *Work) openVsock(rec *runRecord) (*os.File, error) {
	if rec.CID == 0 {
		return nil, nil
	}
	f, cid, err := w.r.files.openVsock(rec.CID, w.r.setCID)
	if err != nil || cid == rec.CID {
		return f, err
	}
	rec.CID, w.rec.CID = cid, cid
	if err := writeRecord(w.r.dir(w.id), w.rec); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// openVsock opens a vsock device and makes it known by cid or, where that is
// taken, by another. It is so as long as anybody has it open.
func (m machineFiles) openVsock(cid uint32, set func(fd int, cid uint32) error) (*os.File, uint32, error) {
	fd, err := unix.Open(m.vhost(), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: cannot open %s: %w", errVsock, m.vhost(), err)
	}
	for range 16 {
		if err = set(fd, cid); err != unix.EADDRINUSE {
			break
		}
		cid = newCID()
	}
	f := os.NewFile(uintptr(fd), m.vhost())
	if err != nil {
		return nil, 0, errors.Join(fmt.Errorf("%w: %w", errVsock, err), f.Close())
	}
	return f, cid, nil
}

// setGuestCID is VHOST_VSOCK_SET_GUEST_CID (linux/vhost.h).
const setGuestCID = 0x4008af60

func setCID(fd int, cid uint32) error {
	id := uint64(cid)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), setGuestCID, uintptr(unsafe.Pointer(&id))); errno != 0 {
		return errno
	}
	return nil
}

// vsockPeer is the harness over vsock.
type vsockPeer struct {
	*guest.Peer
	c       *os.File
	doubted chan struct{} // it gave no answer in time
	ended   bool          // under the lock of Work
}

// trust makes v what the guest is called on.
func (w *Work) trust(v *vsockPeer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !v.ended {
		w.fast = v
	}
}

// doubt has the guest called over its serial port, until v answers.
func (w *Work) doubt(v *vsockPeer) {
	w.mu.Lock()
	if w.fast == v {
		w.fast = nil
	}
	w.mu.Unlock()
	select {
	case v.doubted <- struct{}{}:
	default: // it is asked already
	}
}

// clear asks v when it is doubted. One that is only slow is called again, and
// what waits for its answer gets it; one that stays silent is given up.
func (w *Work) clear(ctx context.Context, v *vsockPeer) {
	for {
		select {
		case <-v.doubted:
		case <-ctx.Done():
			return
		}
		if callOn(ctx, v.Peer, w.r.cfg.CallLimit, guest.Hello, nil, nil) == nil {
			w.trust(v)
			continue
		}
		_ = v.c.SetDeadline(time.Unix(1, 0)) // who reads it closes it
		return
	}
}

// speakVsock sees one connection to its end.
func (w *Work) speakVsock(c *os.File) error {
	v := &vsockPeer{Peer: guest.NewPeer(c), c: c, doubted: make(chan struct{}, 1)}
	w.trust(v)
	ctx, cancel := context.WithCancel(w.qctx)
	var watch sync.WaitGroup
	watch.Go(func() { w.clear(ctx, v) })
	err := w.converse(c, v.Peer, false)
	w.mu.Lock()
	v.ended = true
	if w.fast == v {
		w.fast = nil
	}
	w.mu.Unlock()
	cancel()
	watch.Wait()
	return err
}

// Times of a move to vsock.
const (
	moveFirst = time.Second // after a guest was woken or taken over: its clients come first
	moveAgain = time.Minute // at most between two attempts, and what lasted as long was none in vain
)

// moveToVsock has a guest that has a vsock device called over it, later.
func (w *Work) moveToVsock() {
	if w.rec.CID != 0 {
		w.loops.Go(w.carryVsock)
	}
}

// carryVsock moves the control channel to vsock whenever it is not there.
func (w *Work) carryVsock() {
	select { // a guest that wakes has to say something else first
	case <-w.born:
	case <-w.gone:
		return
	case <-w.qctx.Done():
		return
	}
	if !w.pauseFor(moveFirst) {
		return
	}
	said := ""
	for wait := again; ; wait = min(2*wait, moveAgain) {
		c, err := w.meetVsock()
		if err == nil {
			w.r.log.Info("a guest is called over vsock", "instance", w.id, "cid", w.rec.CID)
			began := time.Now()
			if err = w.speakVsock(c); err == nil {
				err = errors.New("the guest ended the connection")
			}
			if time.Since(began) > moveAgain {
				wait = again
			}
		}
		if !w.pauseFor(wait) {
			return
		}
		if err.Error() != said {
			said = err.Error()
			w.r.log.Info("a guest is called over its serial port", "instance", w.id, "error", err)
		}
	}
}

// meetVsock has the guest connect. A frozen one does when it is thawed, so this
// waits as long as the serial port lives.
func (w *Work) meetVsock() (*os.File, error) {
	w.mu.Lock()
	p := w.peer
	w.mu.Unlock()
	if p == nil {
		return nil, guest.ErrChannelEnded
	}
	ln, err := vsock.Listen(vsock.Host)
	if err != nil {
		return nil, err
	}
	defer ln.Close()
	return ln.Meet(w.qctx, p, w.rec.CID)
}
