// Package etcd implements package store on etcd: a server inside this process
// (OpenEmbedded) or an existing cluster (Dial), through the same client.
//
// The embedded server has no listener at all, neither for clients nor for
// peers, so no other process can reach it. Its directory is locked against a
// second process. Run, if used, bounds the history and frees space when the
// store is full, so that it needs no maintenance. Backup and Restore copy a
// store to a file and back.
//
// Creating and changing clusters, users and roles of etcd, and restoring into
// an existing cluster, is left to etcd's own tools.
package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"lull/internal/store"
)

// DefaultCallTimeout bounds each call to etcd.
const DefaultCallTimeout = 5 * time.Second

// Store is a store.Store on etcd.
type Store struct {
	client      *clientv3.Client
	log         *slog.Logger
	callTimeout time.Duration
	keep        int64 // revisions of history to keep
	external    bool
	defragment  func(context.Context) error
	full        chan struct{} // asks Run to free space now
	shut        func() error
	watches     atomic.Uint64 // number of watches started so far

	// life is canceled by Close; running counts the goroutines that end with it.
	life    context.Context
	end     context.CancelFunc
	running sync.WaitGroup

	mu     sync.Mutex
	closed bool
	leases map[store.LeaseID]*store.KeptLease
}

var _ store.Store = (*Store)(nil)

func newStore(client *clientv3.Client, log *slog.Logger) *Store {
	s := &Store{
		client: client, log: log, callTimeout: DefaultCallTimeout,
		full:   make(chan struct{}, 1),
		leases: map[store.LeaseID]*store.KeptLease{},
	}
	s.life, s.end = context.WithCancel(context.Background())
	return s
}

// Close ends the watches, stops renewing leases without revoking them, and then
// closes the client and the embedded server, if any. Later calls return
// ErrUnavailable.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	var leases []*store.KeptLease
	for _, l := range s.leases {
		leases = append(leases, l)
	}
	s.mu.Unlock()
	s.end()
	for _, l := range leases {
		l.Abandon()
	}
	s.running.Wait()
	err := s.client.Close()
	if errors.Is(err, context.Canceled) {
		err = nil // the in-process client returns its own closing as an error
	}
	if s.shut != nil {
		err = errors.Join(err, s.shut())
	}
	return err
}

// begin returns a context for a call to etcd that ends with ctx, after the call
// timeout, or when the store is closed. The caller must call the returned
// function when the call has ended.
func (s *Store) begin(ctx context.Context) (context.Context, func(), error) {
	if ctx.Err() != nil {
		return nil, nil, fmt.Errorf("cannot reach etcd: %w: %w", store.ErrUnavailable, context.Cause(ctx))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, fmt.Errorf("cannot reach etcd: store is closed: %w", store.ErrUnavailable)
	}
	s.running.Add(1)
	call, cancel := context.WithTimeout(ctx, s.callTimeout)
	stop := context.AfterFunc(s.life, cancel)
	return call, func() { stop(); cancel(); s.running.Done() }, nil
}

// Range implements store.Store.
func (s *Store) Range(ctx context.Context, q store.Query) (store.Page, error) {
	if err := q.Validate(); err != nil {
		return store.Page{}, err
	}
	call, done, err := s.begin(ctx)
	if err != nil {
		return store.Page{}, err
	}
	defer done()
	key, opts := rangeOptions(q)
	resp, err := s.client.Get(call, key, opts...)
	if err != nil {
		return store.Page{}, readError(fmt.Sprintf("read %q", q.Keys), err)
	}
	page := store.Page{Revision: resp.Header.Revision, More: resp.More}
	if q.Revision > 0 {
		page.Revision = q.Revision
	}
	for _, kv := range resp.Kvs {
		page.Values = append(page.Values, valueOf(kv))
	}
	return page, nil
}

func rangeOptions(q store.Query) (string, []clientv3.OpOption) {
	key := q.Keys.Name()
	opts := []clientv3.OpOption{clientv3.WithRev(q.Revision), clientv3.WithLimit(int64(q.Limit))}
	if q.KeysOnly {
		opts = append(opts, clientv3.WithKeysOnly())
	}
	if !q.Keys.IsPrefix() {
		if q.After >= key {
			// Nothing follows the only key, so the range is empty.
			return key + "\x00", append(opts, clientv3.WithRange(key+"\x00"))
		}
		return key, opts
	}
	end := clientv3.GetPrefixRangeEnd(key)
	switch {
	case q.After != "" && q.After >= key:
		key = q.After + "\x00"
	case key == "":
		key = "\x00"
	}
	return key, append(opts, clientv3.WithRange(end))
}

// Commit implements store.Store.
func (s *Store) Commit(ctx context.Context, t store.Txn) (store.Result, error) {
	if err := t.Validate(); err != nil {
		return store.Result{}, err
	}
	call, done, err := s.begin(ctx)
	if err != nil {
		return store.Result{}, err
	}
	defer done()
	conds, then, reads := translate(t)
	resp, err := s.client.Txn(call).If(conds...).Then(append(then, reads...)...).Else(reads...).Commit()
	if err != nil {
		if len(then) == 0 {
			return store.Result{}, readError("read keys", err)
		}
		err = writeError("commit", err)
		if errors.Is(err, store.ErrNoSpace) {
			select {
			case s.full <- struct{}{}:
			default:
			}
		}
		return store.Result{}, err
	}
	res := store.Result{Succeeded: resp.Succeeded, Revision: resp.Header.Revision}
	answers := resp.Responses
	if resp.Succeeded {
		answers = answers[len(then):]
	}
	for i, key := range t.Read {
		v := store.Value{Key: key}
		if kvs := answers[i].GetResponseRange().Kvs; len(kvs) > 0 {
			v = valueOf(kvs[0])
		}
		res.Read = append(res.Read, v)
	}
	return res, nil
}

func translate(t store.Txn) (conds []clientv3.Cmp, then, reads []clientv3.Op) {
	for _, c := range t.If {
		var cmp clientv3.Cmp
		switch c.Target {
		case store.TargetModRevision:
			cmp = clientv3.Compare(clientv3.ModRevision(c.Key), "=", c.Value)
		case store.TargetCreateRevision:
			cmp = clientv3.Compare(clientv3.CreateRevision(c.Key), "=", c.Value)
		}
		conds = append(conds, cmp)
	}
	for _, op := range t.Then {
		if op.Delete {
			then = append(then, clientv3.OpDelete(op.Key))
			continue
		}
		then = append(then, clientv3.OpPut(op.Key, string(op.Data), clientv3.WithLease(clientv3.LeaseID(op.Lease))))
	}
	for _, key := range t.Read {
		reads = append(reads, clientv3.OpGet(key))
	}
	return conds, then, reads
}

// Grant implements store.Store. etcd may grant more than ttl: at least one
// and a half election timeouts.
func (s *Store) Grant(ctx context.Context, ttl time.Duration) (store.Lease, error) {
	if ttl < time.Second || ttl%time.Second != 0 {
		return nil, fmt.Errorf("cannot grant a lease of %v: not in whole seconds: %w", ttl, store.ErrInvalid)
	}
	call, done, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	sent := bootTime()
	resp, err := s.client.Grant(call, int64(ttl/time.Second))
	if err != nil {
		return nil, readError("grant a lease", err)
	}
	id := store.LeaseID(resp.ID)
	l := store.Keep(id, time.Duration(resp.TTL)*time.Second, sent, bootTime, renewer{s})
	s.mu.Lock()
	closed := s.closed
	s.leases[id] = l
	s.mu.Unlock()
	if closed {
		l.Abandon()
	}
	return l, nil
}

// bootTime returns the time of a clock that also advances while the machine
// sleeps.
func bootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(bootClock, &ts); err != nil {
		panic("cannot read the clock since boot: " + err.Error()) // every Linux since 2.6.39 has it
	}
	return time.Duration(ts.Nano())
}

// renewer is the Store as seen by its leases.
type renewer struct{ s *Store }

func (r renewer) Renew(ctx context.Context, id store.LeaseID) error {
	call, done, err := r.s.begin(ctx)
	if err != nil {
		return err
	}
	defer done()
	_, err = r.s.client.KeepAliveOnce(call, clientv3.LeaseID(id))
	if err != nil {
		return readError(fmt.Sprintf("renew lease %x", int64(id)), err)
	}
	return nil
}

func (r renewer) Revoke(ctx context.Context, id store.LeaseID) error {
	r.s.mu.Lock()
	delete(r.s.leases, id)
	r.s.mu.Unlock()
	call, done, err := r.s.begin(ctx)
	if err != nil {
		return err
	}
	defer done()
	_, err = r.s.client.Revoke(call, clientv3.LeaseID(id))
	if err = writeError(fmt.Sprintf("revoke lease %x", int64(id)), err); errors.Is(err, store.ErrLeaseLost) {
		return nil
	}
	return err
}
