// Package guestagent is the guest agent, the first process in a microVM's guest. It
// initializes the guest (modules, mounts, network), starts the one workload when
// the host asks, forwards its output and measures its activity. It answers the host
// over a virtio-serial port (messages in package protocol/guest) and, if the host
// asks for it, over vsock. It then sends its own messages over vsock, and still
// answers on the port.
//
// The workload never waits for the host: output that is not read is dropped and
// counted. The guest agent's own activity does not count as use, because readings
// are of the workload's control group, and of the network card, which the guest
// agent does not use. It restarts nothing and decides nothing; the host does both.
//
// A host that reconnects finds the guest agent unchanged: the first call of
// every connection is hello, whose answer says what runs or how it ended.
package guestagent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/guest"
	"lull/internal/protocol/guest/vsock"
)

// Config configures a Harness. Tests replace the guest's paths.
type Config struct {
	Channel io.ReadWriter // connection to the host; a read returns io.EOF while the host is disconnected
	Proc    string        // default /proc
	Sys     string        // default /sys
	Root    string        // the workload's root directory; default /
	Group   string        // existing control group (v2) of the workload; if empty, its CPU usage is unknown
	Card    string        // the workload's network card; default eth0
	Socket  string        // path of LULL_SOCKET; empty for none
	SockEnv string        // path of the socket inside Root; default Socket
	Init    bool          // runs as process 1, which must reap orphans
	Log     *slog.Logger

	SetClock func(time.Time) error            // default: the kernel's clock
	Rename   func(name, machine string) error // default: the kernel's host name and files of Root
	Seed     func([]byte) error               // default: the kernel's random pool
	PowerOff func() error                     // default: the kernel's; if it returns nil, Run returns

	// DialHost connects to a vsock port of the host. By default it loads the
	// modules in ModuleDir.
	DialHost func(ctx context.Context, port uint32, k vsock.Key) (io.ReadWriteCloser, error)

	Beat time.Duration // heartbeat interval, default 5 s; it varies by 10 %
}

// retryRead is the delay between reads of a disconnected channel.
const retryRead = 100 * time.Millisecond

// Harness serves one guest. Create it with New.
type Harness struct {
	cfg  Config
	log  *slog.Logger
	boot string
	kids *children

	mounted mounted

	logs *ring

	work sync.WaitGroup // goroutines for which Run waits

	commands commands

	mu   sync.Mutex
	peer *guest.Peer // current connection of the port
	fast *overVsock  // preferred over peer; nil for none
	main *process    // the workload; nil before it is started
	env  []string
	dir  string
	cred *syscall.Credential
	exit *guest.ExitNote
	busy int // number of programs whose last message was busy

	reserve reserve

	off     context.CancelFunc
	offOnce sync.Once
}

// New validates the configuration. It starts nothing.
func New(cfg Config) (*Harness, error) {
	if cfg.Channel == nil {
		return nil, errors.New("cannot create a harness: no channel to the host")
	}
	def := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	def(&cfg.Proc, "/proc")
	def(&cfg.Sys, "/sys")
	def(&cfg.Root, "/")
	def(&cfg.Card, "eth0")
	def(&cfg.SockEnv, cfg.Socket)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.SetClock == nil {
		cfg.SetClock = setClock
	}
	if cfg.Rename == nil {
		cfg.Rename = func(name, machine string) error { return rename(cfg.Root, name, machine) }
	}
	if cfg.Seed == nil {
		cfg.Seed = seed
	}
	if cfg.PowerOff == nil {
		cfg.PowerOff = powerOff
	}
	if cfg.DialHost == nil {
		cfg.DialHost = dialHost
	}
	if cfg.Beat == 0 {
		cfg.Beat = 5 * time.Second
	}
	var id [8]byte
	if _, err := rand.Read(id[:]); err != nil {
		return nil, fmt.Errorf("cannot make a boot id: %w", err)
	}
	return &Harness{cfg: cfg, log: cfg.Log, boot: hex.EncodeToString(id[:]), kids: newChildren(cfg.Init), logs: newRing(ringSize)}, nil
}

// Run serves the host until ctx ends or the guest is powered off.
func (h *Harness) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	h.off = cancel
	defer h.work.Wait()
	defer cancel()
	if c, ok := h.cfg.Channel.(io.Closer); ok {
		defer context.AfterFunc(ctx, func() { c.Close() })()
	}
	p := h.newPeer() // must exist before anything is sent
	if h.cfg.Init {
		h.work.Go(func() { h.kids.collect(ctx) })
	}
	if h.cfg.Socket != "" {
		ln, err := net.Listen("unix", h.cfg.Socket)
		if err != nil {
			return fmt.Errorf("cannot listen for the workload: %w", err)
		}
		h.work.Go(func() { h.serveWorkload(ctx, ln) })
	}
	h.work.Go(func() { h.beat(ctx) })
	h.work.Go(func() { h.sendLogs(ctx) })
	for ; ctx.Err() == nil; p = h.newPeer() {
		if err := h.serve(ctx, p); err != nil && ctx.Err() == nil {
			h.log.Warn("the control channel failed", "err", err)
		}
		select {
		case <-time.After(retryRead):
		case <-ctx.Done():
		}
	}
	h.killAll()
	return nil
}

// newPeer starts a connection on the port.
func (h *Harness) newPeer() *guest.Peer {
	p := guest.NewPeer(h.cfg.Channel)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.peer = p
	return p
}

// host returns the connection over which messages to the host are sent.
func (h *Harness) host() *guest.Peer {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.fast != nil {
		return h.fast.Peer
	}
	return h.peer
}

// serve answers the host on one connection until it ends.
func (h *Harness) serve(ctx context.Context, p *guest.Peer) error {
	p.Quick = func(line []byte) ([]byte, bool) {
		b, ok := h.quick(line)
		if ok {
			h.prefers(p)
		}
		return b, ok
	}
	return p.Run(nil, func(q guest.Request) (any, error) { return h.handle(ctx, p, q) })
}

// handle answers a request that arrived on p.
func (h *Harness) handle(ctx context.Context, p *guest.Peer, q guest.Request) (any, error) {
	switch q.Method {
	case guest.Hello:
		// A hello is the first call of a new host. Commands that still run on this
		// connection are its predecessor's.
		h.commands.cancel(func(x *command) bool { return x.host == p })
		var c guest.HelloCall
		if err := q.Bind(&c); err != nil {
			return nil, err
		}
		h.logs.timed.Store(c.LogTimes)
		return h.hello(), nil
	case guest.Run:
		var c guest.RunCall
		if err := q.Bind(&c); err != nil {
			return nil, err
		}
		return nil, h.run(c)
	case guest.Exec:
		var c guest.ExecCall
		if err := q.Bind(&c); err != nil {
			return nil, err
		}
		return h.exec(ctx, p, c)
	case guest.Cancel:
		var c guest.CancelCall
		if err := q.Bind(&c); err != nil {
			return nil, err
		}
		h.commands.cancel(func(x *command) bool { return x.number == c.Number })
		return nil, nil
	case guest.Input:
		var n guest.InputNote
		if err := q.Bind(&n); err != nil {
			return nil, err
		}
		h.commands.with(n.Number, func(x *command) { x.feed(n) })
		return nil, nil
	case guest.Control:
		var n guest.ControlNote
		if err := q.Bind(&n); err != nil {
			return nil, err
		}
		h.commands.with(n.Number, func(x *command) { x.control(n) })
		return nil, nil
	case guest.Taken:
		var n guest.TakenNote
		if err := q.Bind(&n); err != nil {
			return nil, err
		}
		h.commands.with(n.Number, func(x *command) { x.credit.give(n.Bytes) })
		return nil, nil
	case guest.Health:
		return h.health(), nil
	case guest.Signal:
		var c guest.SignalCall
		if err := q.Bind(&c); err != nil {
			return nil, err
		}
		return nil, h.signal(syscall.Signal(c.Signal))
	case guest.SetClock:
		var c guest.ClockCall
		if err := q.Bind(&c); err != nil {
			return nil, err
		}
		h.prefers(p)
		return h.setClock(c)
	case guest.Workspace:
		var c guest.WorkspaceCall
		if err := q.Bind(&c); err != nil {
			return nil, err
		}
		return nil, h.workspace(c)
	case guest.Vsock:
		var c guest.VsockCall
		if err := q.Bind(&c); err != nil {
			return nil, err
		}
		return nil, h.moveToVsock(ctx, c)
	case guest.Sync:
		unix.Sync()
		return nil, nil
	case guest.Room:
		var c guest.RoomCall
		if err := q.Bind(&c); err != nil {
			return nil, err
		}
		return nil, h.applySpace(c)
	case guest.Shutdown:
		var c guest.ShutdownCall
		if err := q.Bind(&c); err != nil {
			return nil, err
		}
		h.offOnce.Do(func() { go h.shutdown(time.Duration(c.Grace) * time.Millisecond) })
		return nil, nil
	}
	return nil, &guest.Error{Code: guest.MethodNotFound, Message: fmt.Sprintf("cannot call %.64q: there is no such method", q.Method)}
}

func (h *Harness) hello() guest.HelloAnswer {
	h.mu.Lock()
	defer h.mu.Unlock()
	return guest.HelloAnswer{Version: guest.Version, Boot: h.boot, Running: h.main != nil && h.exit == nil, Exit: h.exit, Busy: h.busy > 0}
}

// setClock sets the guest's clock to the host's time. It also reseeds the random
// number generator, so that guests restored from one image differ.
func (h *Harness) setClock(c guest.ClockCall) (guest.ClockAnswer, error) {
	if len(c.Seed) < 16 || len(c.Seed) > 512 {
		return guest.ClockAnswer{}, fmt.Errorf("cannot use seed: %d bytes, want 16 to 512", len(c.Seed))
	}
	to := time.Unix(0, c.UnixNano)
	behind := time.Until(to.Round(0))
	err := errors.Join(h.cfg.SetClock(to), h.cfg.Seed(c.Seed))
	if c.Name != "" {
		err = errors.Join(err, h.cfg.Rename(c.Name, c.Machine))
	}
	if err != nil {
		return guest.ClockAnswer{}, err
	}
	hello := h.hello()
	return guest.ClockAnswer{Behind: int64(behind), Hello: &hello}, nil
}

// shutdown ends the workload, with SIGTERM first, and powers off. It continues even
// if the host disconnects.
func (h *Harness) shutdown(grace time.Duration) {
	if err := h.signal(syscall.SIGTERM); err == nil {
		h.mu.Lock()
		m := h.main
		h.mu.Unlock()
		select {
		case <-m.over:
		case <-time.After(min(max(grace, 0), time.Hour)):
		}
	}
	h.killAll()
	h.logs.drained(time.Second)
	if err := h.cfg.PowerOff(); err != nil {
		h.log.Error("cannot power off", "err", err)
	}
	h.off()
}
