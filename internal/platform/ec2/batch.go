package ec2

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"lull/internal/lib/delay"
)

// Limits of a joined call.
const (
	joined = 100 // most instances in one call
	// leastLeft is how much time a caller must have left to join a call. A joined
	// call ends at the earliest deadline of its callers.
	leastLeft = time.Second
)

// joiner combines calls for one instance each: the calls of a kind that wait for
// the rate limit at the same time are sent as one. If EC2 refuses one of the
// instances, it refuses the call as a whole. The call is then halved until only
// the refused instance gets the error.
type joiner[T any] struct {
	limit  *rate.Limiter
	gather time.Duration
	// call makes one call of a kind for ids, which it must not retain.
	call func(ctx context.Context, kind string, ids []string) (map[string]T, error)

	mu      sync.Mutex
	waiting map[string]*queue[T] // by kind of call
}

// queue holds the callers that wait for the next call.
type queue[T any] struct {
	callers []*caller[T]
	cancel  context.CancelFunc // cancels the call when no caller is left
}

type caller[T any] struct {
	ctx   context.Context
	id    string
	done  chan struct{}
	value T
	err   error
}

// do makes a call of the given kind for id, joined with others of the same kind.
// It returns when the call has ended, or when ctx ends. If ctx ends while the
// call waits for its turn, the call is not made.
func (j *joiner[T]) do(ctx context.Context, kind, id string) (T, error) {
	c := &caller[T]{ctx: ctx, id: id, done: make(chan struct{})}
	j.mu.Lock()
	if j.waiting == nil {
		j.waiting = map[string]*queue[T]{}
	}
	q := j.waiting[kind]
	if q == nil {
		turn, cancel := context.WithCancel(context.WithoutCancel(ctx))
		q = &queue[T]{cancel: cancel}
		j.waiting[kind] = q
		go j.turn(turn, kind, q)
	}
	q.callers = append(q.callers, c)
	j.mu.Unlock()
	select {
	case <-c.done:
		return c.value, c.err
	case <-ctx.Done():
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	var none T
	if i := slices.Index(q.callers, c); i >= 0 { // the call has not begun yet
		q.callers = slices.Delete(q.callers, i, i+1)
		if len(q.callers) == 0 {
			q.cancel()
			delete(j.waiting, kind)
		}
		return none, &limitError{context.Cause(ctx)}
	}
	return none, context.Cause(ctx)
}

// turn waits for the rate limit and makes one call for all callers that are
// waiting then.
func (j *joiner[T]) turn(ctx context.Context, kind string, q *queue[T]) {
	err := delay.For(ctx, j.gather)
	if err == nil {
		err = j.limit.Wait(ctx)
	}
	j.mu.Lock()
	if ctx.Err() != nil { // no caller is left
		j.mu.Unlock()
		return
	}
	part := q.callers
	q.callers = slices.Clone(part[min(joined, len(part)):])
	part = part[:len(part)-len(q.callers)]
	if len(q.callers) > 0 {
		go j.turn(ctx, kind, q)
	} else {
		delete(j.waiting, kind)
		defer q.cancel()
	}
	j.mu.Unlock()
	var sent []*caller[T]
	for _, c := range part {
		end, bounded := c.ctx.Deadline()
		switch {
		case c.ctx.Err() != nil:
			c.err = context.Cause(c.ctx)
		case err != nil:
			c.err = &limitError{err}
		case bounded && time.Until(end) < leastLeft:
			c.err = &limitError{errors.New("too little time is left for the call")}
		default:
			sent = append(sent, c)
			continue
		}
		close(c.done)
	}
	if len(sent) > 0 {
		j.send(context.WithValue(context.WithoutCancel(ctx), paid{}, new(atomic.Bool)), kind, sent)
	}
}

// send makes a call for several instances. If EC2 refuses it because of one of
// them, send repeats it for each half. It ends at the earliest deadline of the
// callers, or when no caller is left.
func (j *joiner[T]) send(ctx context.Context, kind string, part []*caller[T]) {
	call, cancel := context.WithCancel(ctx)
	defer cancel()
	left := atomic.Int64{}
	left.Store(int64(len(part)))
	ids := make([]string, len(part))
	for i, c := range part {
		ids[i] = c.id
		if end, ok := c.ctx.Deadline(); ok {
			var stop context.CancelFunc
			call, stop = context.WithDeadline(call, end)
			defer stop()
		}
		defer context.AfterFunc(c.ctx, func() {
			if left.Add(-1) == 0 {
				cancel()
			}
		})()
	}
	values, err := j.call(call, kind, ids)
	if len(part) > 1 && refusesOne(err) {
		j.send(ctx, kind, part[:len(part)/2])
		j.send(ctx, kind, part[len(part)/2:])
		return
	}
	for _, c := range part {
		c.value, c.err = values[c.id], err
		close(c.done)
	}
}

// refusesOne reports whether EC2 may have refused a call because of one of its
// instances. In that case EC2 did nothing for the others either.
func refusesOne(err error) bool {
	switch KindOf(err) {
	case NotFound, IncorrectState, Protected, Invalid, HibernateUnsupported, Unauthorized:
		return true
	}
	return false
}

// paid is the context key of a call whose first attempt has already waited for
// the rate limit. Its value, a flag, is set when that attempt is made.
type paid struct{}

func hasPaid(ctx context.Context) bool {
	first, ok := ctx.Value(paid{}).(*atomic.Bool)
	return ok && first.CompareAndSwap(false, true)
}
