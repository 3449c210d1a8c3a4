package host

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/listeners"
	"lull/internal/relay"
)

// RelayTarget describes an instance to the relay.
type RelayTarget struct {
	ID        string
	Name      string
	Endpoints []instance.Endpoint // the ports on which the relay listens; an index identifies a port
	Noise     *instance.Noise
	Waker     relay.Waker
}

// relays reports whether the relay listens on an endpoint.
func (i *inst) relays(e instance.Endpoint) bool {
	return e.Listen != e.Target || i.rt.Capabilities().Network
}

// relayed returns the endpoints on which the relay listens.
func (i *inst) relayed() (out []instance.Endpoint) {
	for _, e := range i.spec().Expose {
		if i.relays(e) {
			e.Path = instance.PathRelay
			out = append(out, e)
		}
	}
	return out
}

// Ready implements relay.Waker for the port with this index. It takes no lock.
func (i *inst) Ready(port int) (relay.Backend, bool) {
	if !i.ports.up.Load() {
		return relay.Backend{}, false
	}
	b := i.ports.backends.Load()
	if b == nil || port >= len(*b) {
		return relay.Backend{}, false
	}
	return (*b)[port], true
}

// taken explains which process has the addresses on which a program could not
// listen. It returns the text to append to the error, or "".
func (i *inst) taken(want []instance.Endpoint, w Workload) string {
	if i.rt.Capabilities().Network || i.spec().ListenFDs {
		return ""
	}
	own, err := w.Listeners()
	if err != nil {
		own = nil // the process has ended
	}
	if i.ports.kept.Load() { // lull itself listens on the other addresses
		want = slices.DeleteFunc(slices.Clone(want), func(e instance.Endpoint) bool { return !i.relays(e) })
	}
	if addr := listeners.Taken(want, own); addr != "" {
		return "; something else listens on " + addr
	}
	return ""
}

// decidePaths decides between the paths for endpoints set to "auto", once the
// program listens. A listener that cannot be watched while frozen makes the direct
// path unsafe. The instance is then never paused, and its status says so.
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
		for _, l := range listeners.On(*e, ls) {
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
	tcp := slices.IndexFunc(want, func(e instance.Endpoint) bool { return e.Proto == "" })
	if len(backends) == 0 && tcp >= 0 { // the shared HTTP port needs a backend too
		if b, err := i.backend(want[tcp].Target, run); err == nil {
			backends = append(backends, b)
		}
	}
	i.ports.backends.Store(&backends)
	i.mu.Lock()
	i.rec.Endpoints, i.seen.block = want, block
	i.mu.Unlock()
	return nil
}

// backend returns the backend with which the relay reaches a target of this run.
func (i *inst) backend(target string, run uint64) (relay.Backend, error) {
	addr, err := netip.ParseAddrPort(listeners.Loopback(target))
	b := relay.Backend{Addr: addr, Generation: run}
	if d, ok := i.workload().(instance.Dialer); ok {
		b.Dial = func(ctx context.Context) (net.Conn, error) { return d.Dial(ctx, target) }
	}
	return b, err
}
