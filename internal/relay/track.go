package relay

import "sync/atomic"

// track is an open connection as OpenSince, Cut and Close see it: a link in the
// ring of its instance, from accept to close.
type track struct {
	prev, next *track
	noise      bool
	last       atomic.Int64 // time of the last byte, or of the accept, in unix nanoseconds
	pending    atomic.Int32 // bytes read from one side and not yet written to the other
	owed       atomic.Bool  // the backend has sent nothing since it got the last bytes
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
