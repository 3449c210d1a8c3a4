package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"runtime"
	"slices"
	"sync"
)

// Config configures a Router. The zero value works.
type Config struct {
	Loops int          // event loops, one thread each; default one per CPU, at most 4
	Log   *slog.Logger // default: no log
}

// Router carries the connections of all instances of a host.
type Router struct {
	log   *slog.Logger
	loops []*loop

	mu        sync.Mutex
	instances map[string]*Instance
	closed    bool
}

// New opens the event loops. Run must be called to carry connections, and to close
// the loops' descriptors.
func New(cfg Config) (*Router, error) {
	n := cfg.Loops
	if n == 0 {
		n = min(runtime.GOMAXPROCS(0), 4)
	}
	if n < 0 || n > 64 {
		return nil, errors.New("cannot start router: loops must be 1 to 64")
	}
	log := cfg.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	r := &Router{log: log, instances: map[string]*Instance{}}
	for range n {
		l, err := newLoop(r)
		if err != nil {
			for _, l := range r.loops {
				l.free()
			}
			return nil, fmt.Errorf("cannot start router: %w", err)
		}
		r.loops = append(r.loops, l)
	}
	return r, nil
}

// Run carries connections until ctx ends. Then it closes every listener, cuts
// open connections and returns nil. To let connections finish, call Close
// first.
func (r *Router) Run(ctx context.Context) error {
	var loops sync.WaitGroup
	errs := make([]error, len(r.loops))
	failed := make(chan struct{}, len(r.loops))
	for i, l := range r.loops {
		loops.Go(func() {
			if errs[i] = l.run(); errs[i] != nil {
				failed <- struct{}{}
			}
		})
	}
	select {
	case <-ctx.Done():
	case <-failed:
	}
	now, cancel := context.WithCancel(context.Background())
	cancel()
	if errors.Join(errs...) == nil {
		if err := r.Close(now); err != nil && !errors.Is(err, context.Canceled) {
			r.log.Warn("router closed", "err", err)
		}
	}
	for _, l := range r.loops {
		l.stop()
	}
	loops.Wait()
	for _, l := range r.loops {
		l.free()
	}
	return errors.Join(errs...)
}

// Add adds an instance. Its name must differ from those of all instances that are
// not closed.
func (r *Router) Add(name string, w Waker, opt Options) (*Instance, error) {
	opt, err := opt.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("cannot add instance %q: %w", name, err)
	}
	in := &Instance{name: name, waker: w, opt: opt, r: r, log: r.log}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, fmt.Errorf("cannot add instance %q: the router was closed", name)
	}
	if _, ok := r.instances[name]; ok {
		return nil, fmt.Errorf("cannot add instance %q: the name is in use", name)
	}
	in.ctx, in.cut = context.WithCancel(context.Background())
	r.instances[name] = in
	return in, nil
}

// Unlisten closes every listener, and leaves open connections and waiting clients
// as they are. New clients wait in the backlog if another process has the socket
// too; otherwise they are refused.
func (r *Router) Unlisten() {
	r.mu.Lock()
	all := slices.Collect(maps.Values(r.instances))
	r.mu.Unlock()
	for _, in := range all {
		in.unlisten()
	}
}

func (r *Router) remove(in *Instance) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.instances[in.name] == in {
		delete(r.instances, in.name)
	}
}

// Close closes every instance (see [Instance.Close]). No instance can be added
// afterwards.
func (r *Router) Close(ctx context.Context) error {
	r.mu.Lock()
	r.closed = true
	var all []*Instance
	for _, in := range r.instances {
		all = append(all, in)
	}
	r.mu.Unlock()
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, in := range all {
		wg.Go(func() { errs[i] = in.Close(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Listener is one exposed port of an instance. It is closed with the instance.
type Listener struct {
	in   *Instance
	port int
	ln   net.Listener

	mu     sync.RWMutex // held for reading while fd is in use
	fd     int          // -1 if not on the event loops
	closed bool
	open   openCount
}

// Addr returns the listening address.
func (l *Listener) Addr() net.Addr { return l.ln.Addr() }

// Listen relays connections accepted on ln to the instance's backend. port is the
// caller's name for the listener, and is passed to Ready and Wake. Listen takes
// ownership of ln. Event loops carry the connections of a *net.TCPListener,
// goroutines those of any other listener.
func (in *Instance) Listen(ln net.Listener, port int) (*Listener, error) {
	l := &Listener{in: in, port: port, ln: ln, fd: -1}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return nil, fmt.Errorf("cannot listen for %s: %w", in.name, ErrClosed)
	}
	if t, ok := ln.(*net.TCPListener); ok {
		if err := l.onLoops(t); err != nil {
			return nil, fmt.Errorf("cannot listen for %s on %v: %w", in.name, ln.Addr(), err)
		}
	} else {
		in.streams.Go(func() { l.acceptStreams() })
	}
	in.listeners = append(in.listeners, l)
	return l, nil
}
