package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/relay"
)

// RelayTarget is the relay's view of an instance.
type RelayTarget struct {
	ID        string
	Name      string
	Endpoints []instance.Endpoint // those that the relay listens for; the index identifies the port
	Noise     *instance.Noise
	Waker     relay.Waker
}

// relays reports whether the relay listens for an endpoint.
func (i *inst) relays(e instance.Endpoint) bool {
	return e.Listen != e.Target || i.rt.Capabilities().Network
}

// relayed returns the endpoints that the relay listens for.
func (i *inst) relayed() (out []instance.Endpoint) {
	for _, e := range i.spec().Expose {
		if i.relays(e) {
			e.Path = instance.PathRelay
			out = append(out, e)
		}
	}
	return out
}

// Ready returns the backend of a port without taking a lock.
func (i *inst) Ready(port int) (relay.Backend, bool) {
	if !i.up.Load() {
		return relay.Backend{}, false
	}
	b := i.backends.Load()
	if b == nil || port >= len(*b) {
		return relay.Backend{}, false
	}
	return (*b)[port], true
}

// Wake wakes the instance for the relay.
func (i *inst) Wake(ctx context.Context, a relay.Arrival) error {
	why := fmt.Sprintf("a client came from %s", a.Remote)
	if i.rationed() { // a client that wakes nothing takes no room
		if err := i.mayWake(a); err != nil {
			return err
		}
	}
	defer i.ask()()
	leave, err := i.h.enter(ctx, i, call{what: "wake", by: byConnection, client: true, may: func() error { return i.mayWake(a) }})
	if err != nil {
		return err
	}
	defer leave()
	if err := i.settle(); err != nil {
		return err
	}
	if err := i.mayWake(a); err != nil {
		return err
	}
	switch s := i.state(); s {
	case power.Running:
		return nil
	case power.Paused, power.Reclaimed, power.Hibernated:
		return i.wake(byConnection, why)
	case power.Stopped:
		return i.start(ctx, byConnection, i.restarted(why))
	default:
		return fmt.Errorf("%s is %s", i.name(), s)
	}
}

// mayWake returns why a relay client cannot wake i in its present state; nil if
// it can.
func (i *inst) mayWake(a relay.Arrival) error {
	switch i.state() {
	case power.Paused, power.Reclaimed, power.Hibernated:
		if i.pausedByOthers() {
			return fmt.Errorf("%s was paused from outside of lull; resume it there or with: lull instance resume %s", i.name(), i.name())
		}
	case power.Stopped:
		switch {
		case a.Cause == relay.CauseData:
			return fmt.Errorf("%s was stopped, and the connection belonged to its last run", i.name())
		case !i.enabled():
			return fmt.Errorf("%s is disabled", i.name())
		case i.restartsNow(): // the client waits for the restart
		case i.unwakeable() != "":
			return fmt.Errorf("%s is stopped (%s); start it with: lull instance start %s", i.name(), i.unwakeable(), i.name())
		}
	}
	return nil
}

// restartsNow reports whether the instance exited and is about to be restarted.
// That holds for the first restart only: later ones are delayed.
func (i *inst) restartsNow() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.rec.Enabled && len(i.rec.Crashes) == 0 && !i.rec.RestartAt.IsZero()
}

// notListening returns the first endpoint whose target has no listener that
// clients can reach.
func notListening(want []instance.Endpoint, ls []instance.Listener) string {
	for _, e := range want {
		if len(listenersOn(e, ls)) == 0 {
			return e.Target
		}
	}
	return ""
}

// silent describes what exists in place of the missing listener. deep is
// whether the addresses belong to a guest.
func silent(want []instance.Endpoint, ls []instance.Listener, deep bool, limit time.Duration) string {
	target := notListening(want, ls)
	_, port, _ := net.SplitHostPort(target)
	for _, l := range ls {
		if _, lp, err := net.SplitHostPort(l.Addr); err == nil && l.Private && lp == port {
			return fmt.Sprintf("after %s it listens on %s of the guest only, which no client reaches: bind it to 0.0.0.0", idle.Human(limit), l.Addr)
		}
	}
	for _, l := range ls {
		if _, lp, err := net.SplitHostPort(l.Addr); err == nil && lp == port && !deep {
			return fmt.Sprintf("after %s it listens on %s and not on %s, where clients come", idle.Human(limit), l.Addr, target)
		}
	}
	where := ""
	if deep {
		where = " in the guest"
	}
	return fmt.Sprintf("nothing listens on %s%s after %s", target, where, idle.Human(limit))
}

// taken returns which port the program could not listen on because another
// process does; "" for none.
func (i *inst) taken(want []instance.Endpoint, w Workload) string {
	if i.rt.Capabilities().Network || i.spec().ListenFDs {
		return ""
	}
	own, err := w.Listeners()
	if err != nil {
		own = nil // the process has ended
	}
	for _, e := range want {
		if e.Proto != "" || len(listenersOn(e, own)) > 0 {
			continue
		}
		l, err := net.Listen("tcp", e.Target)
		switch {
		case err == nil:
			l.Close()
		case errors.Is(err, syscall.EADDRINUSE):
			return "; something else listens on " + e.Target
		}
	}
	return ""
}

// checkPlaces rejects ports on addresses that this machine does not have: no
// program could listen there.
func checkPlaces(s *instance.Spec, rt Runtime) error {
	if rt.Capabilities().Network {
		return nil
	}
	for n, e := range s.Expose {
		host, _, err := net.SplitHostPort(e.Target)
		if err != nil {
			continue // reported elsewhere
		}
		addr, err := netip.ParseAddr(host)
		if err != nil || addr.IsLoopback() || addr.IsUnspecified() {
			continue
		}
		l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		switch {
		case err == nil:
			l.Close()
		case errors.Is(err, syscall.EADDRNOTAVAIL):
			return &InvalidError{fmt.Errorf("cannot use expose[%d]: %s is no address of this machine, so that the program cannot listen there", n, host)}
		}
	}
	return nil
}

func listenersOn(e instance.Endpoint, ls []instance.Listener) (out []instance.Listener) {
	host, port, err := net.SplitHostPort(e.Target)
	if err != nil {
		return nil
	}
	for _, l := range ls {
		lh, lp, err := net.SplitHostPort(l.Addr)
		if err == nil && !l.Private && lp == port && serves(lh, host) && l.Network == cmp.Or(e.Proto, "tcp") {
			out = append(out, l)
		}
	}
	return out
}

// serves reports whether a listener bound to bound accepts connections to host.
func serves(bound, host string) bool {
	b, err := netip.ParseAddr(bound)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return b.IsLoopback() || b.IsUnspecified()
	}
	h, err := netip.ParseAddr(host)
	if err != nil {
		return host == ""
	}
	if b.IsUnspecified() {
		return b.Is6() || h.Is4() || h.Is4In6()
	}
	return b.Unmap() == h.Unmap()
}

// decidePaths resolves "auto" once the program listens. If a listener cannot be
// watched while frozen, the direct path is unsafe; the instance is then never
// paused, and its status says so.
func (i *inst) decidePaths(want []instance.Endpoint, ls []instance.Listener) error {
	var block *idle.Block
	backends := []relay.Backend{}
	run := uint64(0)
	i.mu.Lock()
	if i.rec.Identity != nil {
		run = i.rec.Identity.Run
	}
	i.mu.Unlock()
	caps := i.rt.Capabilities()
	for n := range want {
		e := &want[n]
		if i.relays(*e) {
			why := "clients use another address than the program"
			switch {
			case e.Path == instance.PathRelay:
				why = "asked for"
			case caps.Network:
				why = "the program has a network of its own"
			}
			e.Path, e.Why = instance.PathRelay, why
			b, err := i.backend(e.Target, run)
			if err != nil {
				return fmt.Errorf("cannot relay to %s: %w", e.Target, err)
			}
			backends = append(backends, b)
			continue
		}
		asked := e.Path == instance.PathDirect
		e.Path, e.Why = instance.PathDirect, "the program itself listens there, and its sockets can be watched"
		if asked {
			e.Why = "asked for"
		}
		var cannot []string
		if !caps.WatchSockets {
			cannot = append(cannot, "this runtime cannot watch sockets")
		}
		for _, l := range listenersOn(*e, ls) {
			if !l.Watchable {
				cannot = append(cannot, l.Addr+": "+l.Why)
			}
		}
		if len(cannot) > 0 {
			e.Status = "unwatchable_socket"
			e.Why = strings.Join(cannot, "; ")
			block = &idle.Block{Code: "unwatchable_socket", Sentence: fmt.Sprintf(
				"%s cannot be watched while frozen (%s); expose another port to use the relay.", e.Listen, e.Why)}
		}
	}
	if len(backends) == 0 && len(want) > 0 { // the shared HTTP port also reaches it
		if b, err := i.backend(want[0].Target, run); err == nil {
			backends = append(backends, b)
		}
	}
	i.backends.Store(&backends)
	i.mu.Lock()
	i.rec.Endpoints, i.block = want, block
	i.mu.Unlock()
	return nil
}

// backend returns how the relay reaches a target of this run.
func (i *inst) backend(target string, run uint64) (relay.Backend, error) {
	addr, err := netip.ParseAddrPort(normalise(target))
	b := relay.Backend{Addr: addr, Generation: run}
	if d, ok := i.workload().(instance.Dialer); ok {
		b.Dial = func(ctx context.Context) (net.Conn, error) { return d.Dial(ctx, target) }
	}
	return b, err
}

func normalise(addr string) string {
	host, port, _ := net.SplitHostPort(addr)
	if host == "" || host == "localhost" || host == "0.0.0.0" {
		host = "127.0.0.1"
	}
	if host == "::" {
		host = "::1"
	}
	return net.JoinHostPort(host, port)
}
