package shimctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"

	"lull/internal/core/instance"
)

// Events are called for the messages that the shim sends on its own. The calls
// come one at a time from one goroutine, and may use the client.
type Events struct {
	Ended     func(Ended)
	ExecEnded func(ExecEnded)
	Held      func(HeldChanged)
}

// Client is the daemon's end of one connection. It is safe for concurrent use.
type Client struct {
	Welcome Welcome

	w      *wire
	events Events
	done   chan struct{}
	both   sync.WaitGroup

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan answer
	err     error // why the connection ended
	queue   []envelope
	more    *sync.Cond
}

type answer struct {
	e   envelope
	fds []int
}

// Dial connects to the shim whose socket is at path and sends hello. The error
// for a shim of another version is a *VersionError.
func Dial(ctx context.Context, path string, ev Events) (*Client, error) {
	short, release, err := shorten(path)
	if err != nil {
		return nil, err
	}
	defer release()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", short)
	if err != nil {
		return nil, fmt.Errorf("cannot reach the shim at %s: %w", path, err)
	}
	uc := conn.(*net.UnixConn)
	if err := trusted(uc); err != nil {
		uc.Close()
		return nil, err
	}
	c := &Client{w: newWire(uc), events: ev, done: make(chan struct{}), waiting: map[uint64]chan answer{}}
	c.more = sync.NewCond(&c.mu)
	c.both.Go(c.read)
	c.both.Go(c.deliver)
	if err := c.hello(ctx); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Client) hello(ctx context.Context) error {
	err := c.call(ctx, VerbHello, Hello{Version: Version}, &c.Welcome)
	if err == nil && c.Welcome.Version != Version {
		return &VersionError{Ours: Version, Theirs: c.Welcome.Version, PID: c.Welcome.PID}
	}
	return err
}

// Done returns a channel that is closed when the connection has ended.
func (c *Client) Done() <-chan struct{} { return c.done }

// Close ends the connection and waits for the client's goroutines. It must not be
// called from an event handler.
func (c *Client) Close() {
	c.w.c.Close()
	c.both.Wait()
}

func (c *Client) read() {
	var err error
	for {
		var e envelope
		var fds []int
		if e, fds, err = c.w.read(); err != nil {
			break
		}
		c.mu.Lock()
		if e.ID == 0 {
			CloseAll(fds)
			c.queue = append(c.queue, e)
			c.more.Signal()
			c.mu.Unlock()
			continue
		}
		ch := c.waiting[e.ID]
		delete(c.waiting, e.ID)
		c.mu.Unlock()
		if ch == nil {
			CloseAll(fds)
			continue
		}
		ch <- answer{e, fds}
	}
	c.w.close()
	c.mu.Lock()
	c.err = fmt.Errorf("the connection to the shim failed: %w", err)
	for id, ch := range c.waiting {
		close(ch)
		delete(c.waiting, id)
	}
	c.mu.Unlock()
	close(c.done)
	c.more.Signal()
}

// deliver calls the event handlers in a separate goroutine, so that a handler may
// send requests while the client continues to read answers.
func (c *Client) deliver() {
	for {
		c.mu.Lock()
		for len(c.queue) == 0 && c.err == nil {
			c.more.Wait()
		}
		if len(c.queue) == 0 {
			c.mu.Unlock()
			return
		}
		e := c.queue[0]
		c.queue = c.queue[1:]
		c.mu.Unlock()
		switch e.Verb {
		case VerbExited:
			var m Ended
			if json.Unmarshal(e.Body, &m) == nil && c.events.Ended != nil {
				c.events.Ended(m)
			}
		case VerbExecExited:
			var m ExecEnded
			if json.Unmarshal(e.Body, &m) == nil && c.events.ExecEnded != nil {
				c.events.ExecEnded(m)
			}
		case VerbHeld:
			var m HeldChanged
			if json.Unmarshal(e.Body, &m) == nil && c.events.Held != nil {
				c.events.Held(m)
			}
		}
	}
}

// ErrLost means that the connection ended before the answer to a request arrived.
// Whether the request was executed is unknown.
var ErrLost = errors.New("the connection to the shim ended before its answer")

func (c *Client) call(ctx context.Context, verb string, body, into any) error {
	fds, err := c.exchange(ctx, verb, body, nil, into)
	CloseAll(fds)
	return err
}

// exchange sends a request and waits for the answer. The caller owns the
// descriptors of the answer, even if exchange returns an error.
func (c *Client) exchange(ctx context.Context, verb string, body any, give []int, into any) ([]int, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	ch := make(chan answer, 1)
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return nil, c.err
	}
	c.last++
	id := c.last
	c.waiting[id] = ch
	c.mu.Unlock()
	if err := c.w.write(envelope{ID: id, Verb: verb, Body: b}, give); err != nil {
		c.abandon(id, ch)
		return nil, fmt.Errorf("cannot ask the shim to %s: %w", verb, err)
	}
	var a answer
	var ok bool
	select {
	case a, ok = <-ch:
	case <-ctx.Done():
		c.abandon(id, ch)
		return nil, fmt.Errorf("cannot wait for the shim to %s: %w", verb, context.Cause(ctx))
	}
	if !ok {
		return nil, fmt.Errorf("cannot determine whether the shim did %s: %w", verb, ErrLost)
	}
	if a.e.Error != nil {
		return a.fds, a.e.Error
	}
	if into == nil {
		return a.fds, nil
	}
	if err := json.Unmarshal(a.e.Body, into); err != nil {
		return a.fds, fmt.Errorf("cannot read the shim's answer to %s: %w", verb, err)
	}
	return a.fds, nil
}

// abandon stops waiting for an answer. If it has just arrived, its descriptors
// are closed.
func (c *Client) abandon(id uint64, ch chan answer) {
	c.mu.Lock()
	_, still := c.waiting[id]
	delete(c.waiting, id)
	c.mu.Unlock()
	if !still {
		if a, ok := <-ch; ok {
			CloseAll(a.fds)
		}
	}
}

// Start starts a run. An *Error with CodeStage names the step that failed before
// the program ran.
func (c *Client) Start(ctx context.Context, s Start) (Started, error) {
	var out Started
	return out, c.call(ctx, VerbStart, s, &out)
}

// StartHandoff starts a run whose binds are reported, and returns the descriptor
// that reports them. The caller owns the descriptor. It is -1 if there is an
// error.
func (c *Client) StartHandoff(ctx context.Context, s Start) (Started, int, error) {
	var out Started
	fds, err := c.exchange(ctx, VerbStart, s, nil, &out)
	return out, oneOf(fds, err), err
}

// TakeFilter returns the descriptor that reports the binds of a run. The caller
// owns it. If the shim has none, the error is an *Error with CodeNotFound.
func (c *Client) TakeFilter(ctx context.Context, id string, run uint64) (int, error) {
	fds, err := c.exchange(ctx, VerbFilter, Filter{ID: id, Run: run}, nil, nil)
	fd := oneOf(fds, err)
	if err == nil && fd < 0 {
		err = Errorf(CodeNotFound, "cannot take the descriptor that reports the binds of %s: got %d descriptors", id, len(fds))
	}
	return fd, err
}

// GiveFilter passes the descriptor that reports a run's binds to a new shim. The
// caller still owns it.
func (c *Client) GiveFilter(ctx context.Context, id string, run uint64, fd int) error {
	fds, err := c.exchange(ctx, VerbFilter, Filter{ID: id, Run: run}, []int{fd}, nil)
	CloseAll(fds)
	return err
}

// KeepOpen makes the shim keep a duplicate of fd open under id, replacing the one
// that it kept; -1 only closes that. The shim closes it once no daemon has been
// connected for a while. The caller still owns fd.
func (c *Client) KeepOpen(ctx context.Context, id string, fd int) error {
	var give []int
	if fd >= 0 {
		give = []int{fd}
	}
	fds, err := c.exchange(ctx, VerbKeep, Name{ID: id}, give, nil)
	CloseAll(fds)
	return err
}

// CheckHandoff reports whether bind handoff works for programs of this shim. The
// shim tries it once and remembers the result.
func (c *Client) CheckHandoff(ctx context.Context) (HandoffCheck, error) {
	var out HandoffCheck
	return out, c.call(ctx, VerbHandoff, struct{}{}, &out)
}

// oneOf returns the descriptor of an answer with exactly one. Otherwise it closes
// them all and returns -1.
func oneOf(fds []int, err error) int {
	if err != nil || len(fds) != 1 {
		CloseAll(fds)
		return -1
	}
	return fds[0]
}

// List lists the running runs and the unacknowledged ended ones, of one ID or
// of all if id is empty. It waits for starts in progress.
func (c *Client) List(ctx context.Context, id string) ([]Run, error) {
	var all []Run
	for q := (Listing{ID: id}); ; {
		var out List
		if err := c.call(ctx, VerbList, q, &out); err != nil {
			return nil, err
		}
		all = append(all, out.Runs...)
		if !out.More || len(out.Runs) == 0 {
			return all, nil
		}
		q.After = out.Runs[len(out.Runs)-1].ID
	}
}

// AckExit acknowledges the exit of a run, so that the shim can delete it.
func (c *Client) AckExit(ctx context.Context, id string, run uint64) error {
	return c.call(ctx, VerbAckExit, Ended{ID: id, Run: run}, nil)
}

// AckThawed acknowledges Welcome.Thawed, so that the shim can delete it.
func (c *Client) AckThawed(ctx context.Context) error {
	return c.call(ctx, VerbAckThawed, nil, nil)
}

// Hold makes the shim bind listening sockets and keep them under id, whatever the
// state of the instance. It closes sockets of id whose address is not in addrs.
func (c *Client) Hold(ctx context.Context, id string, addrs []string) error {
	return c.call(ctx, VerbHold, Hold{ID: id, Addrs: addrs}, nil)
}

// Keep passes sockets that an earlier shim held to a new one. fds are in the
// order of addrs; the caller still owns them.
func (c *Client) Keep(ctx context.Context, id string, addrs []string, fds []int) error {
	got, err := c.exchange(ctx, VerbHold, Hold{ID: id, Addrs: addrs}, fds, nil)
	CloseAll(got)
	return err
}

// Unhold closes the sockets held under id.
func (c *Client) Unhold(ctx context.Context, id string) error {
	return c.call(ctx, VerbUnhold, Unhold{ID: id}, nil)
}

// LetGo does what Unhold does, for a unit whose program now listens on the sockets
// itself.
func (c *Client) LetGo(ctx context.Context, id string) error {
	return c.call(ctx, VerbUnhold, Unhold{ID: id, Leave: true}, nil)
}

// Unit registers a unit, forgets it, or asks for its state.
func (c *Client) Unit(ctx context.Context, u Unit) (s UnitState, err error) {
	return s, c.call(ctx, VerbUnit, u, &s)
}

// Release makes the shim stop listening on those sockets held under id that were
// handed to the program and that the program has closed while it continues to
// run. It returns their addresses.
func (c *Client) Release(ctx context.Context, id string, addrs []string) ([]string, error) {
	var out Hold
	err := c.call(ctx, VerbRelease, Hold{ID: id, Addrs: addrs}, &out)
	return out.Addrs, err
}

// Door with shut set replaces each unix socket held under id by a new one, so
// that new clients wait there and the program accepts none of them. Without shut
// it undoes that. The former sockets are kept until the next Hold.
func (c *Client) Door(ctx context.Context, id string, shut bool) error {
	return c.call(ctx, VerbDoor, Door{ID: id, Shut: shut}, nil)
}

// Holds lists the ids under which listening sockets are held, sorted.
func (c *Client) Holds(ctx context.Context) ([]string, error) {
	var all []string
	for q := (Listing{}); ; {
		var out Holds
		if err := c.call(ctx, VerbHolds, q, &out); err != nil {
			return nil, err
		}
		all = append(all, out.IDs...)
		if !out.More || len(out.IDs) == 0 {
			return all, nil
		}
		q.After = out.IDs[len(out.IDs)-1]
	}
}

// Listeners returns duplicates of the sockets held under id, in the order of
// their addresses. The caller closes them.
func (c *Client) Listeners(ctx context.Context, id string) (addrs []string, fds []int, err error) {
	var out Hold
	fds, err = c.exchange(ctx, VerbListeners, Name{ID: id}, nil, &out)
	if err == nil && len(fds) != len(out.Addrs) {
		err = fmt.Errorf("cannot take the sockets held for %s: %d addresses, %d descriptors", id, len(out.Addrs), len(fds))
	}
	if err != nil {
		CloseAll(fds)
		return nil, nil, err
	}
	return out.Addrs, fds, nil
}

// Dup returns duplicates of descriptors of a process below the shim, in order.
// The caller closes them.
func (c *Client) Dup(ctx context.Context, pid int, fds []int) ([]int, error) {
	var all []int
	for len(fds) > 0 {
		n := min(len(fds), MaxFDs)
		got, err := c.exchange(ctx, VerbDup, Dup{PID: pid, FDs: fds[:n]}, nil, nil)
		all = append(all, got...)
		if err == nil && len(got) != n {
			err = fmt.Errorf("cannot duplicate descriptors of process %d: asked for %d, got %d", pid, n, len(got))
		}
		if err != nil {
			CloseAll(all)
			return nil, err
		}
		fds = fds[n:]
	}
	return all, nil
}

// Exec runs a command inside an instance. The caller still owns stdio.
func (c *Client) Exec(ctx context.Context, e Exec, stdio [3]int) (Started, error) {
	var out Started
	fds, err := c.exchange(ctx, VerbExec, e, stdio[:], &out)
	CloseAll(fds)
	return out, err
}

// Forget deletes everything that the shim keeps for an instance without a run:
// its record, log pipe and sockets.
func (c *Client) Forget(ctx context.Context, id string) error {
	return c.call(ctx, VerbForget, Name{ID: id}, nil)
}

// Adopt passes a run that an earlier shim started to a new one.
func (c *Client) Adopt(ctx context.Context, r Run) error {
	return c.call(ctx, VerbAdopt, r, nil)
}

// Outside stores how the shim can thaw something after this daemon is gone. When
// Outside returns, the entry is written to disk, though not yet synced.
func (c *Client) Outside(ctx context.Context, o Outside) error {
	return c.call(ctx, VerbOutside, o, nil)
}

// Identity returns the run's identity in the kernel.
func (r Run) Identity() instance.Identity {
	ident := instance.Identity{BootID: r.BootID, PID: r.PID, Start: r.Start, Run: r.Run}
	if len(r.Cgroups) > 0 {
		ident.Cgroup = r.Cgroups[0]
	}
	return ident
}
