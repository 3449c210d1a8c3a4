package microvm

import (
	"math/rand/v2"
	"sync"

	"lull/internal/instance"
	"lull/internal/link/guest"
)

// printed collects what a command in a guest prints.
type printed struct {
	mu      sync.Mutex
	streams [2][]byte
	cut     bool
}

// prints gives the number under which out collects.
func (w *Work) prints(out *printed) uint64 {
	n := rand.Uint64N(1<<53) + 1 // no other daemon's, of which some may run yet
	w.printed.Store(n, out)
	return n
}

// output takes a part in. One that nobody waits for, or not any more, is
// dropped.
func (w *Work) output(n guest.OutputNote) {
	if out, ok := w.printed.Load(n.Number); ok {
		out.(*printed).add(n.Stream, n.Data)
	}
}

// add appends to a stream, 1 or 2, as far as it is kept.
func (o *printed) add(stream int, b []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if stream != 1 && stream != 2 {
		return
	}
	s := &o.streams[stream-1]
	if room := instance.MaxOutput - len(*s); len(b) > room {
		b, o.cut = b[:room], true
	}
	*s = append(*s, b...)
}

func (o *printed) outcome(code int, cut bool) instance.Outcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	return instance.Outcome{ExitCode: code, Stdout: string(o.streams[0]), Stderr: string(o.streams[1]), Truncated: cut || o.cut}
}
