package relay

import "sync/atomic"

// track is an open connection as seen by OpenSince, Cut and Close: a link in
// its instance's ring. It exists from accept to close.
type track struct {
	prev, next *track
	noise      bool
	last       atomic.Int64 // unix nanoseconds of the last byte or of the accept
	pending    atomic.Int32 // bytes read from one side and not yet written to the other
	owed       atomic.Bool  // the backend got bytes and has sent none since
	owner      interface{ askCut() }
}

func (in *Instance) link(k *track) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.open.next == nil {
		in.open.prev, in.open.next = &in.open, &in.open
	}
	k.prev, k.next = in.open.prev, &in.open
	k.prev.next, k.next.prev = k, k
}

func (in *Instance) unlink(k *track) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if k.next == nil {
		return
	}
	k.prev.next, k.next.prev = k.next, k.prev
	k.prev, k.next = nil, nil
}
