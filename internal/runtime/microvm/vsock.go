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

	"lull/internal/core/instance"
	"lull/internal/protocol/guest"
	"lull/internal/protocol/guest/vsock"
	"lull/internal/runtime/microvm/vnet"
)

// A guest with a vsock device is called over vsock, and over its serial port while
// vsock is not connected. A booting or waking guest sends its first message over
// the serial port, and is then told to connect over vsock. A restarted daemon or a
// restored guest can therefore always reconnect, and the host listens only while a
// guest connects.

// Channel is the transport on which the host calls guest agents.
type Channel string

// The channels.
const (
	ChannelAuto   Channel = "auto"   // vsock if available, for guests with unrestricted network
	ChannelSerial Channel = "serial" // serial port only
	ChannelVsock  Channel = "vsock"  // vsock for every guest; without it, guests do not start
)

// check returns why the channel cannot be used, or nil. no must return why vsock
// cannot be used, or nil.
func (c Channel) check(no func() error) error {
	switch c {
	case ChannelAuto, ChannelSerial:
		return nil
	case ChannelVsock:
		return no()
	}
	return fmt.Errorf("cannot use channel: %q is not auto, serial or vsock", c)
}

// noVsock returns why guests cannot use vsock, or nil if they can.
func (r *Runtime) noVsock() error {
	if r.parts().kernel.Version != "" && !r.parts().kernel.VSOCK {
		return fmt.Errorf("cannot use vsock: the guests' kernel %s does not have all of the modules %v", r.parts().kernel.Version, vsock.Modules)
	}
	return r.files.noVsock(r.listens)
}

// noVsock returns why this machine offers guests no vsock, or nil.
func (m machineFiles) noVsock(listens func() error) error {
	f, err := os.OpenFile(m.vhost(), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("cannot use vsock: %w", err)
	}
	return errors.Join(f.Close(), listens())
}

func (m machineFiles) vhost() string { return filepath.Join(m.dev, "vhost-vsock") }

// listens returns why this process cannot listen for guests, or nil.
func listens() error {
	l, err := vsock.Listen(vsock.Host)
	if err != nil {
		return err
	}
	return l.Close()
}

// FindChannel returns the channel used on this machine for guests with this
// kernel, and why. It returns an error if want is not available.
func FindChannel(want Channel, k Kernel) (what string, err error) {
	r := &Runtime{files: liveFiles, listens: listens}
	r.found.Store(&parts{kernel: k})
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

// giveCID returns the context id for a guest's vsock device, 0 for none.
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

// vsockFailed reports whether a start failed because of QEMU's vsock device.
func vsockFailed(err error) bool {
	return errors.Is(err, errVsock) || errors.Is(err, errNoBoot) && strings.Contains(err.Error(), "vhost-vsock")
}

// doWithoutVsock reports whether a failed start should be retried without a vsock
// device. Later starts then go without one too, because an optional feature must
// not keep guests from starting.
func (r *Runtime) doWithoutVsock(err error) bool {
	if r.cfg.Channel != ChannelAuto || !vsockFailed(err) {
		return false
	}
	why := err.Error()
	if !r.without.CompareAndSwap(nil, &why) {
		return false
	}
	r.log.Warn("guests start without vsock from now on", "err", err)
	return true
}

// newCID returns a random context ID. Other programs usually count up from 3.
func newCID() uint32 {
	const first, last = 1 << 16, 1<<32 - 2
	var b [8]byte
	rand.Read(b[:])
	return uint32(first + binary.NativeEndian.Uint64(b[:])%(last-first+1))
}

// checkVsock returns why a saved guest cannot get a vsock device again, or nil.
func (w *Work) checkVsock(man *manifest) error {
	if !man.Vsock {
		return nil
	}
	err := w.r.noVsock()
	if w.r.cfg.Channel == ChannelSerial {
		err = errors.New("this host is configured to use virtio-serial only")
	}
	if err != nil {
		return &instance.SnapshotError{Reason: "it was saved with a vsock device, which is not available now: " + err.Error()}
	}
	return nil
}

// errVsock means that a vsock device could not be created.
var errVsock = errors.New("cannot make a vsock device")

// openVsock opens the vsock device for a guest's QEMU. It returns nil for a guest
// without one. If the context ID in rec is taken, it is changed; the guest sees the
// new one when it boots or is restored.
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

// openVsock opens a vsock device and registers cid, or another context ID if that
// is taken. The registration ends when the device is closed.
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

// vsockPeer is a vsock connection to the guest agent.
type vsockPeer struct {
	*guest.Peer
	c       *os.File
	doubted chan struct{} // closed when it did not answer in time
	ended   bool          // guarded by Work.mu
}

// trust makes v the channel on which the guest is called.
func (w *Work) trust(v *vsockPeer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !v.ended {
		w.fast = v
	}
}

// doubt switches calls to the serial port until v has answered again.
func (w *Work) doubt(v *vsockPeer) {
	w.mu.Lock()
	if w.fast == v {
		w.fast = nil
	}
	w.mu.Unlock()
	select {
	case v.doubted <- struct{}{}:
	default: // already being checked
	}
}

// clear checks a doubted v. If v was only slow, it is used again, and pending calls
// still get their answers. If v stays silent, it is closed.
func (w *Work) clear(ctx context.Context, v *vsockPeer) {
	for {
		select {
		case <-v.doubted:
		case <-ctx.Done():
			return
		}
		if callOn(ctx, v.Peer, w.r.cfg.CallLimit, guest.Hello, guest.HelloCall{LogTimes: true}, nil) == nil {
			w.trust(v)
			continue
		}
		_ = v.c.SetDeadline(time.Unix(1, 0)) // makes the reader fail, which closes v
		return
	}
}

// speakVsock serves one connection until it ends.
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

// Delays before the control channel is moved to vsock.
const (
	moveFirst = time.Second // after a wake or adoption, because clients come first
	moveAgain = time.Minute // maximum between attempts; a connection that lasts this long resets the delay
)

// moveToVsock schedules the move of a guest's control channel to vsock.
func (w *Work) moveToVsock() {
	if w.rec.CID != 0 {
		w.loops.Go(w.carryVsock)
	}
}

// carryVsock moves the control channel to vsock whenever it is not there.
func (w *Work) carryVsock() {
	select { // a waking guest has other messages to send first
	case <-w.firstAnswer:
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
			w.r.log.Info("switching a guest to vsock", "instance", w.id, "cid", w.rec.CID)
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
			w.r.log.Info("switching a guest to its serial port", "instance", w.id, "err", err)
		}
	}
}

// meetVsock waits until the guest connects. A frozen guest connects when it is
// thawed, so this waits as long as the serial port exists.
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
