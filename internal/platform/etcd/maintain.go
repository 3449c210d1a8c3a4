package etcd

import (
	"context"
	"errors"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"lull/internal/store"
)

// maintainEvery is how often Run checks the history and the alarms.
const maintainEvery = time.Minute

// Run maintains the store until ctx ends, and returns ctx's error. It drops
// history beyond the configured revisions. When the store is full it compacts,
// defragments and clears the alarm. A step that fails is logged and retried. For
// a cluster without ExternalConfig.Maintain it only waits for ctx to end.
func (s *Store) Run(ctx context.Context) error {
	ticker := time.NewTicker(maintainEvery)
	defer ticker.Stop()
	for {
		if s.defragment != nil {
			if err := s.maintain(ctx); err != nil && ctx.Err() == nil {
				s.log.Warn("cannot maintain the store", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		case <-s.full:
		}
	}
}

// maintain compacts the excess history, and frees space if there is an alarm.
func (s *Store) maintain(ctx context.Context) error {
	alarm, err := s.noSpace(ctx)
	if err != nil {
		return err
	}
	if alarm {
		return s.free(ctx)
	}
	revision, err := s.revision(ctx)
	if err != nil {
		return err
	}
	return s.compact(ctx, revision-s.keep)
}

func (s *Store) revision(ctx context.Context) (int64, error) {
	page, err := s.Range(ctx, store.Query{Keys: store.Key("lull"), KeysOnly: true})
	return page.Revision, err
}

// compact drops the history before revision. It is not an error if that has
// already happened.
func (s *Store) compact(ctx context.Context, revision int64, opts ...clientv3.CompactOption) error {
	if revision <= 1 {
		return nil
	}
	call, done, err := s.begin(ctx)
	if err != nil {
		return err
	}
	defer done()
	_, err = s.client.Compact(call, revision, opts...)
	if err = writeError(fmt.Sprintf("compact to revision %d", revision), err); errors.Is(err, store.ErrCompacted) {
		return nil
	}
	return err
}

// noSpace reports whether a member has raised etcd's alarm that the store is
// full.
func (s *Store) noSpace(ctx context.Context) (bool, error) {
	call, done, err := s.begin(ctx)
	if err != nil {
		return false, err
	}
	defer done()
	resp, err := s.client.AlarmList(call)
	if err != nil {
		return false, readError("read the alarms of etcd", err)
	}
	for _, a := range resp.Alarms {
		if a.Alarm == pb.AlarmType_NOSPACE {
			return true, nil
		}
	}
	return false, nil
}

// freeTime bounds compaction and defragmentation, whose duration depends on the
// size of the store.
const freeTime = 2 * time.Minute

// free frees the space of old history and clears the alarm. If that was not
// enough, the next write raises it again.
func (s *Store) free(parent context.Context) error {
	ctx, cancel := context.WithTimeout(parent, freeTime)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	s.log.Warn("store is full, freeing space")
	revision, err := s.revision(ctx)
	if err != nil {
		return err
	}
	if err := s.compact(ctx, revision, clientv3.WithCompactPhysical()); err != nil {
		return err
	}
	if err := s.defragment(ctx); err != nil {
		return fmt.Errorf("cannot defragment the store: %w", err)
	}
	if _, err := s.client.AlarmDisarm(ctx, &clientv3.AlarmMember{}); err != nil {
		return fmt.Errorf("cannot lift the alarm of etcd: %w", err)
	}
	s.log.Info("freed space", "revision", revision)
	return nil
}
