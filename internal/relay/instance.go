package relay

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

// Options configure an instance. The zero value of each field means its
// default.
type Options struct {
	MaxWaiting  int           // maximum number of waiting arrivals; default 1024, at most 65536
	MaxOpen     int           // maximum number of open connections per listener; default 65536
	WakeTimeout time.Duration // limit for one wake, and for the wait of one arrival; default 60 s
	DialTimeout time.Duration // how long a ready backend may refuse connections or not answer; default 10 s
	Noise       Noise         // traffic that neither keeps the instance awake nor wakes it; default none
}

func (o Options) withDefaults() (Options, error) {
	o.MaxWaiting = cmp.Or(o.MaxWaiting, 1024)
	o.MaxOpen = cmp.Or(o.MaxOpen, 65536)
	o.WakeTimeout = cmp.Or(o.WakeTimeout, time.Minute)
	o.DialTimeout = cmp.Or(o.DialTimeout, 10*time.Second)
	var errs []error
	if o.MaxWaiting < 0 || o.MaxWaiting > 65536 {
		errs = append(errs, errors.New("cannot use max waiting: it must be 1 to 65536"))
	}
	if o.MaxOpen < 0 || o.MaxOpen > 1<<20 {
		errs = append(errs, errors.New("cannot use max open: it must be 1 to 1048576"))
	}
	if o.WakeTimeout < 0 || o.DialTimeout < 0 {
		errs = append(errs, errors.New("cannot use a negative timeout"))
	}
	errs = append(errs, o.Noise.Validate())
	return o, errors.Join(errs...)
}

// Instance is an object that can sleep, with all its listeners. Its methods are
// safe for concurrent use.
type Instance struct {
	name  string
	waker Waker
	opt   Options
	r     *Router
	log   *slog.Logger

	gate    gate
	stats   stats
	flights sync.WaitGroup
	streams sync.WaitGroup
	ctx     context.Context // ends when the instance's connections are cut
	cut     context.CancelFunc

	mu        sync.Mutex
	q         queue
	closed    bool
	listeners []*Listener
	open      track // ring of open connections, for OpenSince and Cut
}

// Name is the name given to Add.
func (in *Instance) Name() string { return in.name }

// Hold closes the gate. After it has returned, nothing that Activity does not show
// can reach the backend. Arrivals wait. Connections that are being dialed continue,
// and are counted in Open.
func (in *Instance) Hold() { in.gate.setHeld() }

// Release opens the gate and marks the backend as awake. A wake is requested if
// connections wait for one.
func (in *Instance) Release() {
	in.gate.setAwake()
	in.afterGate()
}

// Sleep opens the gate after a pause has been committed. From now on arrivals, and
// bytes on open connections, request a wake. Ready must return false before Sleep
// is called.
func (in *Instance) Sleep() {
	in.gate.setAsleep()
	in.afterGate()
}

// afterGate starts a wake if waiters need one. If the backend is awake, it lets
// waiting noise continue, which needs no wake.
func (in *Instance) afterGate() {
	in.mu.Lock()
	var quiet []*waiter
	if !in.gate.shut() {
		for w := in.q.first; w != nil; {
			next := w.next
			if w.noise {
				in.q.remove(w)
				quiet = append(quiet, w)
			}
			w = next
		}
	}
	in.kick()
	in.mu.Unlock()
	for _, w := range quiet {
		w.resume(nil)
	}
}

// Activity returns what is open, waiting and moving, in one atomic step.
func (in *Instance) Activity() Activity { return in.gate.activity() }

// Stats returns the outcomes of the instance's clients.
func (in *Instance) Stats() Stats {
	s := in.stats.snapshot(in.opt.Noise)
	s.Waiting = in.gate.activity().Waiting
	return s
}

// OpenSince counts the open connections that are not quiet: those that carried a
// byte at or after t, or have bytes that the other side has not accepted yet. Its
// cost is proportional to the number of open connections.
func (in *Instance) OpenSince(t time.Time) int {
	ns := t.UnixNano()
	in.mu.Lock()
	defer in.mu.Unlock()
	n := 0
	for k := in.open.next; k != nil && k != &in.open; k = k.next {
		if !k.noise && (k.last.Load() >= ns || k.pending.Load() > 0) {
			n++
		}
	}
	return n
}

// Owed counts the open connections and HTTP requests on which the backend has not
// answered the last bytes sent to it. Its cost is proportional to the number of
// open connections.
func (in *Instance) Owed() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	n := 0
	for k := in.open.next; k != nil && k != &in.open; k = k.next {
		if !k.noise && k.owed.Load() {
			n++
		}
	}
	return n
}

// Cut ends every open connection of the instance immediately. Listeners and
// waiting clients are not affected.
func (in *Instance) Cut() {
	in.mu.Lock()
	var all []*track
	for k := in.open.next; k != nil && k != &in.open; k = k.next {
		all = append(all, k)
	}
	in.mu.Unlock()
	for _, k := range all {
		k.owner.askCut()
	}
}

// Close stops listening and rejects waiting connections. Open connections continue
// until they end or ctx does; then they are cut. Close returns ctx's error if it
// had to cut any.
func (in *Instance) Close(ctx context.Context) error {
	in.mu.Lock()
	first := !in.closed
	in.closed = true
	all := in.q.takeAll()
	if in.q.flying {
		in.q.cancel(ErrClosed)
	}
	in.mu.Unlock()
	in.unlisten()
	for _, w := range all {
		w.resume(ErrClosed)
	}
	if first {
		in.r.remove(in)
	}
	err := in.drain(ctx)
	in.cut()
	in.flights.Wait()
	in.streams.Wait()
	return err
}

func (in *Instance) unlisten() {
	in.mu.Lock()
	ls := in.listeners
	in.listeners = nil
	in.mu.Unlock()
	for _, l := range ls {
		l.close()
	}
}

// drain waits until no connection is left. It polls every few milliseconds, because
// closing is rare and a notification would cost something for every connection.
func (in *Instance) drain(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for in.tracked() > 0 {
		select {
		case <-ctx.Done():
			in.Cut()
			in.cut()
			for in.tracked() > 0 {
				<-tick.C
			}
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}

func (in *Instance) tracked() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	n := 0
	for k := in.open.next; k != nil && k != &in.open; k = k.next {
		n++
	}
	return n
}
