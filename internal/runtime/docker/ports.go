package docker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/core/instance"
	"lull/internal/platform/portgate"
)

// When a container stops, Docker closes its published ports. Before lull stops one,
// package portgate makes new clients wait in the kernel, in front of Docker's
// address translation and docker-proxy. The gate opens when a run of the container
// listens again, whoever started it.

// ports holds the clients of the published ports of containers that lull stopped.
type ports struct {
	mu     sync.Mutex
	gate   *portgate.Gate                      // nil before the first use
	loaded bool                                // whether this daemon has loaded every instance for which an earlier one held ports
	given  bool                                // whether the shim keeps this gate's rules, or none, in place of an earlier daemon's
	opened map[string]map[portgate.Port]uint16 // by instance: each published port and the container's own port
	heard  map[string][]uint16                 // by instance: TCP ports at which its last run could be reached
}

// Limits on how long the clients of a started container are held until it listens.
const (
	readyLimit = 60 * time.Second
	heardLimit = 10 * time.Second // for ports of the last run for which no client waits
)

// gateID names the rules of the gate in the shim.
const gateID = "docker-ports"

// published returns the ports of this machine that a container publishes, each with
// the container's own port. It returns instance.ErrNoPorts if there are none, and
// another error if a port cannot be held or is not fixed.
func (d *details) published() (map[portgate.Port]uint16, error) {
	out := map[portgate.Port]uint16{}
	for inside, bindings := range d.HostConfig.PortBindings {
		number, proto, _ := strings.Cut(inside, "/")
		target, err := strconv.ParseUint(number, 10, 16)
		if err != nil || proto != "tcp" && proto != "udp" {
			return nil, fmt.Errorf("lull cannot hold the clients of its port %s", inside)
		}
		for _, b := range bindings {
			port, err := strconv.ParseUint(b.HostPort, 10, 16)
			if err != nil || port == 0 {
				return nil, fmt.Errorf("its port %s is published on a different port at each start: publish it on a fixed port", inside)
			}
			addrs := []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
			if b.HostIp != "" {
				addr, err := netip.ParseAddr(b.HostIp)
				if err != nil {
					return nil, fmt.Errorf("its port %s is published on %q, which is not an IP address", inside, b.HostIp)
				}
				addrs = []netip.Addr{addr.Unmap()}
			}
			for _, a := range addrs {
				out[portgate.Port{UDP: proto == "udp", Addr: a, Port: uint16(port)}] = uint16(target)
			}
		}
	}
	if len(out) == 0 {
		return nil, instance.ErrNoPorts
	}
	return out, nil
}

// sameNetwork returns an error unless Docker publishes ports in this process's
// network namespace.
func (r *Runtime) sameNetwork(ctx context.Context) error {
	c, err := r.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil || cerr != nil {
		return errors.Join(err, cerr)
	}
	own, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		return err
	}
	its, err := os.Stat(fmt.Sprintf("/proc/%d/ns/net", cred.Pid))
	if err != nil {
		return fmt.Errorf("cannot determine the network namespace in which Docker publishes its ports: %w", err)
	}
	if !os.SameFile(own, its) {
		return errors.New("Docker publishes its ports in another network namespace than lull's")
	}
	return nil
}

// HoldPorts implements instance.PortHolder.
func (r *Runtime) HoldPorts(ctx context.Context, id, image string, wake func(string)) error {
	d, err := r.find(ctx, image)
	if isStatus(err, 404) {
		return instance.ErrNoPorts
	}
	if err != nil {
		return err
	}
	if w := r.workOf(d.ID); w != nil {
		r.hear(w)
	}
	opened, err := d.published()
	if err == nil {
		err = r.sameNetwork(ctx)
	}
	if err != nil {
		return err
	}
	r.ports.mu.Lock()
	defer r.ports.mu.Unlock()
	if r.ports.gate == nil {
		g, err := portgate.New(r.log)
		if err != nil {
			return fmt.Errorf("its clients cannot be held: %w", err)
		}
		r.ports.gate = g
	}
	var came func(netip.AddrPort)
	if wake != nil {
		came = func(from netip.AddrPort) {
			r.wakes.Go(func() { wake(fmt.Sprintf("a client came from %s", from)) })
		}
	}
	var all []portgate.Port
	for p := range opened {
		all = append(all, p)
	}
	if err := r.ports.gate.Shut(id, all, came); err != nil {
		return err
	}
	if r.ports.opened == nil {
		r.ports.opened = map[string]map[portgate.Port]uint16{}
	}
	r.ports.opened[id] = opened
	return r.giveGateLocked(ctx)
}

// giveGateLocked makes the shim keep this gate's rules, so that clients still wait
// while the daemon restarts. They replace the rules of an earlier daemon. It does
// nothing until loaded is set, because until then the earlier rules hold clients of
// containers that this daemon has not loaded yet. r.ports.mu must be held.
func (r *Runtime) giveGateLocked(ctx context.Context) error {
	if !r.ports.loaded || r.ports.given || r.cfg.Process == nil {
		return nil
	}
	fd := -1
	if r.ports.gate != nil {
		fd = r.ports.gate.Owner()
	}
	if err := r.cfg.Process.KeepOpen(ctx, gateID, fd); err != nil {
		return err
	}
	r.ports.given = fd >= 0
	return nil
}

// dropEarlierGate makes the shim remove the rules of an earlier daemon. It must be
// called once every instance of that daemon has been loaded.
func (r *Runtime) dropEarlierGate(ctx context.Context) error {
	r.ports.mu.Lock()
	defer r.ports.mu.Unlock()
	r.ports.loaded = true
	return r.giveGateLocked(ctx)
}

// ReleasePorts implements instance.PortHolder.
func (r *Runtime) ReleasePorts(id string) {
	r.ports.mu.Lock()
	defer r.ports.mu.Unlock()
	delete(r.ports.opened, id)
	if r.ports.gate != nil {
		r.ports.gate.Open(id)
	}
}

// hear stores the TCP ports on which a run listens. The next run counts as ready
// only once it listens on them too.
func (r *Runtime) hear(w *Work) {
	ports := listening(w)
	r.ports.mu.Lock()
	defer r.ports.mu.Unlock()
	if r.ports.heard == nil {
		r.ports.heard = map[string][]uint16{}
	}
	r.ports.heard[w.id] = ports
}

// listening returns the TCP ports at which a container can be reached, as far as
// they can be read.
func listening(w *Work) (ports []uint16) {
	ls, _ := w.Listeners()
	for _, l := range ls {
		if at, err := netip.ParseAddrPort(l.Addr); err == nil && l.Network == "tcp" && !at.Addr().IsLoopback() {
			ports = append(ports, at.Port())
		}
	}
	return ports
}

// letIn waits until a run listens on the ports for which clients wait and on those
// of the last run, until it ends, or until a limit. Then it lets the clients in.
func (r *Runtime) letIn(ctx context.Context, w *Work) {
	r.ports.mu.Lock()
	gate, opened, heard := r.ports.gate, r.ports.opened[w.id], r.ports.heard[w.id]
	delete(r.ports.heard, w.id)
	r.ports.mu.Unlock()
	defer r.ReleasePorts(w.id)
	began := time.Now()
	for wait := 2 * time.Millisecond; ; wait = min(wait*3/2, 50*time.Millisecond) {
		have, missing := listening(w), false
		if len(opened) > 0 {
			for p, waits := range gate.Waiting(w.id) {
				missing = missing || waits && !p.UDP && !slices.Contains(have, opened[p])
			}
		}
		for _, p := range heard {
			missing = missing || !slices.Contains(have, p) && time.Since(began) < heardLimit
		}
		if alive, err := w.Alive(); !missing || err == nil && !alive || time.Since(began) > readyLimit {
			return
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
	}
}
