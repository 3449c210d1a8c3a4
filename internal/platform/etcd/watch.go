package etcd

import (
	"context"
	"fmt"
	"strconv"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"lull/internal/store"
)

func valueOf(kv *mvccpb.KeyValue) store.Value {
	return store.Value{
		Key: string(kv.Key), Data: kv.Value, ModRevision: kv.ModRevision,
		CreateRevision: kv.CreateRevision, Version: kv.Version, Lease: store.LeaseID(kv.Lease),
	}
}

// Watch implements store.Store. If from is 0, Watch first requests the present
// revision, so that it misses no later change.
func (s *Store) Watch(ctx context.Context, keys store.Keys, from int64) <-chan store.Batch {
	out := make(chan store.Batch, 1)
	if from == 0 {
		page, err := s.Range(ctx, store.Query{Keys: keys, Limit: 1, KeysOnly: true})
		if err != nil {
			out <- store.Batch{Err: err}
			close(out)
			return out
		}
		from = page.Revision + 1
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		out <- store.Batch{Err: fmt.Errorf("cannot watch %q: store is closed: %w", keys, store.ErrUnavailable)}
		close(out)
		return out
	}
	s.running.Go(func() {
		defer close(out)
		s.watch(ctx, keys, from, out)
	})
	return out
}

func (s *Store) watch(parent context.Context, keys store.Keys, from int64, out chan<- store.Batch) {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	send := func(b store.Batch) bool {
		select {
		case out <- b:
			return true
		case <-ctx.Done():
			return false
		}
	}
	opts := []clientv3.OpOption{clientv3.WithRev(from), clientv3.WithProgressNotify()}
	if keys.IsPrefix() {
		opts = append(opts, clientv3.WithPrefix())
	}
	var call context.Context
	if !s.external {
		// The client shares one stream among watches with equal metadata. The
		// in-process stream has no buffers, so an event for one watch and the
		// cancellation of another can wait for each other, which silently ends
		// every watch. Each watch therefore gets its own stream.
		call = metadata.AppendToOutgoingContext(ctx, "watch", strconv.FormatUint(s.watches.Add(1), 10))
	} else {
		// A member that is cut off from its cluster then ends the watch instead
		// of going silent.
		call = clientv3.WithRequireLeader(ctx)
	}
	for resp := range s.client.Watch(call, keys.Name(), opts...) {
		if resp.CompactRevision > 0 {
			send(store.Batch{Err: &store.CompactedError{Revision: resp.CompactRevision}})
			return
		}
		if err := resp.Err(); err != nil {
			send(store.Batch{Err: readError(fmt.Sprintf("continue watching %q", keys), err)})
			return
		}
		if resp.IsProgressNotify() {
			if resp.Header.Revision >= from && !send(store.Batch{Revision: resp.Header.Revision}) {
				return
			}
			continue
		}
		for _, b := range split(resp.Events) {
			if !send(b) {
				return
			}
		}
	}
	if parent.Err() == nil {
		// The store was closed, or the client gave up without an error.
		select {
		case out <- store.Batch{Err: fmt.Errorf("cannot continue watching %q: %w", keys, store.ErrUnavailable)}:
		case <-parent.Done():
		case <-s.life.Done():
		}
	}
}

// split returns one batch for each revision. etcd sends revisions whole and in
// order, but several may be in one answer.
func split(events []*clientv3.Event) []store.Batch {
	var batches []store.Batch
	for _, e := range events {
		if n := len(batches); n == 0 || batches[n-1].Revision != e.Kv.ModRevision {
			batches = append(batches, store.Batch{Revision: e.Kv.ModRevision})
		}
		last := &batches[len(batches)-1]
		event := store.Event{Value: valueOf(e.Kv)}
		if e.Type == clientv3.EventTypeDelete {
			event = store.Event{Deleted: true, Value: store.Value{Key: string(e.Kv.Key), ModRevision: e.Kv.ModRevision}}
		}
		last.Events = append(last.Events, event)
	}
	return batches
}
