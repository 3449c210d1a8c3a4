package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
	"sync"
	"time"

	"lull/internal/fleet"
	"lull/internal/lib/delay"
	"lull/internal/store"
)

// Shards is the number of parts into which the workers are divided. It is the
// same for all servers of a store and must never change.
const Shards = 32

// claimsAtOnce is the maximum number of concurrent claims.
const claimsAtOnce = 16

const (
	memberPrefix = "servers/"
	shardPrefix  = "shards/"
)

// Member is a live server, as in its lease record.
type Member struct {
	Server  string    `json:"server"`
	Address string    `json:"address,omitempty"`
	Since   time.Time `json:"since"`
}

// shard is a shard that this server holds.
type shard struct {
	n      int
	own    *store.Ownership
	fleet  *fleet.Fleet // its writes succeed only while the shard is held
	ctx    context.Context
	cancel context.CancelFunc
	jobs   sync.WaitGroup
	// since is when all calls of an earlier owner must have ended. Only observations
	// made after it are acted on.
	since time.Time
}

func shardOf(id string) int {
	h := fnv.New32a()
	h.Write([]byte(id))
	return int(h.Sum32() % Shards)
}

// assigned returns the name of the member that shard n belongs to, by rendezvous
// hashing: when a server joins or leaves, only that server's shards move.
func assigned(n int, members map[string]Member) string {
	best, most := "", uint64(0)
	for id := range members {
		h := fnv.New64a()
		h.Write([]byte(id + "/" + strconv.Itoa(n)))
		// FNV's high bits hardly depend on the last byte; mix them.
		x := h.Sum64()
		x ^= x >> 33
		x *= 0xff51afd7ed558ccd
		x ^= x >> 33
		if best == "" || x > most || x == most && id < best {
			best, most = id, x
		}
	}
	return best
}

// own keeps a lease, registers the server and holds its shards until ctx ends. If the
// lease is lost, it drops everything at once and starts again.
func (c *Controller) own(ctx context.Context) error {
	for try := 0; ctx.Err() == nil; try++ {
		lease, err := c.fleet.Store().Grant(ctx, LeaseTTL)
		if err != nil {
			if err := delay.For(ctx, jitter(backoff(try))); err != nil {
				return err
			}
			continue
		}
		try = 0
		err = c.hold(ctx, lease)
		c.release(lease)
		if err != nil && ctx.Err() == nil && !errors.Is(err, store.ErrLeaseLost) {
			c.log.Warn("cannot hold the shards", "err", err)
			if err := delay.For(ctx, jitter(backoff(try+1))); err != nil {
				return err
			}
		}
	}
	return context.Cause(ctx)
}

// release ends everything that depends on a lease, and revokes it.
func (c *Controller) release(lease store.Lease) {
	c.mu.Lock()
	var held []*shard
	for n, sh := range c.shards {
		if sh != nil {
			sh.cancel()
			held = append(held, sh)
			c.shards[n] = nil
		}
	}
	c.lease, c.leaving = nil, nil
	c.mu.Unlock()
	for _, sh := range held {
		sh.jobs.Wait()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := lease.Revoke(ctx); err != nil {
		c.log.Warn("cannot revoke the lease; it will expire", "err", err)
	}
}

// hold registers the server under a lease and keeps its shards.
func (c *Controller) hold(ctx context.Context, lease store.Lease) error {
	me := Member{Server: c.cfg.Server, Address: c.cfg.Address, Since: time.Now().UTC().Round(0)}
	data, err := json.Marshal(me)
	if err != nil {
		return fmt.Errorf("cannot register the server: %w", err)
	}
	key := memberPrefix + c.cfg.Server
	if _, err := store.Claim(ctx, c.fleet.Store(), lease, key, data); err != nil {
		if held, ok := errors.AsType[*store.HeldError](err); ok {
			_ = held
			return delay.For(ctx, LeaseTTL/3) // the earlier process of this server, or another server of the same name
		}
		return err
	}
	c.mu.Lock()
	c.lease = lease
	c.mu.Unlock()
	changed := make(chan struct{}, 1)
	watch, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() { c.followMembers(watch, changed) })
	wg.Go(func() { c.followShards(watch, changed) })
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-lease.Lost():
			c.log.Warn("the lease is lost; all workers are released")
			return store.ErrLeaseLost
		case <-c.resign:
			return nil
		case <-changed:
		case <-tick.C:
		}
		c.balance(ctx, lease)
	}
}

// followMembers keeps c.members in line with the store, and signals changed.
func (c *Controller) followMembers(ctx context.Context, changed chan<- struct{}) {
	_ = store.Follow(ctx, c.fleet.Store(), store.Prefix(memberPrefix), store.Follower{
		Reset: func(p store.Page) error {
			c.mu.Lock()
			defer c.mu.Unlock()
			clear(c.members)
			for _, v := range p.Values {
				c.member(v)
			}
			signal(changed)
			return nil
		},
		Apply: func(b store.Batch) error {
			c.mu.Lock()
			defer c.mu.Unlock()
			for _, e := range b.Events {
				if e.Deleted {
					delete(c.members, strings.TrimPrefix(e.Value.Key, memberPrefix))
				} else {
					c.member(e.Value)
				}
			}
			signal(changed)
			return nil
		},
	})
}

func (c *Controller) member(v store.Value) {
	id := strings.TrimPrefix(v.Key, memberPrefix)
	m := Member{Server: id}
	if err := json.Unmarshal(store.StripWriteID(v.Data), &m); err != nil {
		c.log.Warn("cannot read a server's record", "key", v.Key, "err", err)
	}
	c.members[id] = m
}

// followShards signals changed when a shard becomes free.
func (c *Controller) followShards(ctx context.Context, changed chan<- struct{}) {
	_ = store.Follow(ctx, c.fleet.Store(), store.Prefix(shardPrefix), store.Follower{
		Reset: func(store.Page) error { signal(changed); return nil },
		Apply: func(b store.Batch) error {
			for _, e := range b.Events {
				if e.Deleted {
					signal(changed)
				}
			}
			return nil
		},
	})
}

// forget drops a shard whose key is missing in the store although our lease lasts, so
// that it is claimed again.
func (c *Controller) forget(sh *shard) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shards[sh.n] == sh {
		sh.cancel()
		c.shards[sh.n] = nil
	}
}

func signal(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// balance releases shards that belong to others and claims free ones that
// belong to this server.
func (c *Controller) balance(ctx context.Context, lease store.Lease) {
	c.mu.Lock()
	if !c.loaded || len(c.members) == 0 {
		c.mu.Unlock()
		return
	}
	var give []*shard
	for _, sh := range c.leaving {
		if assigned(sh.n, c.members) != c.cfg.Server {
			give = append(give, sh) // one that is ours again is claimed below instead
		}
	}
	c.leaving = nil
	var take []int
	for n := range c.shards {
		mine := assigned(n, c.members) == c.cfg.Server
		switch sh := c.shards[n]; {
		case sh != nil && !mine:
			c.shards[n] = nil
			sh.cancel()
			give = append(give, sh)
		case sh == nil && mine:
			take = append(take, n)
		}
	}
	c.mu.Unlock()
	for _, sh := range give {
		sh.jobs.Wait()
		if err := sh.own.Resign(ctx); err != nil {
			c.log.Warn("cannot give up a shard yet", "shard", sh.n, "err", err)
			c.mu.Lock()
			c.leaving = append(c.leaving, sh) // retry; otherwise no server could claim it
			c.mu.Unlock()
		}
	}
	// Claims run concurrently, because a takeover from a dead server is
	// complete only after the last of them.
	var claims sync.WaitGroup
	turn := make(chan struct{}, claimsAtOnce)
	for _, n := range take {
		turn <- struct{}{}
		claims.Go(func() {
			defer func() { <-turn }()
			c.claim(ctx, lease, n)
		})
	}
	claims.Wait()
}

func (c *Controller) claim(ctx context.Context, lease store.Lease, n int) {
	data, err := json.Marshal(Member{Server: c.cfg.Server})
	if err != nil {
		return
	}
	own, err := store.Claim(ctx, c.fleet.Store(), lease, shardPrefix+strconv.Itoa(n), data)
	if err != nil {
		return // its earlier owner still holds it, or the store does not answer; balance will run again
	}
	sh := &shard{n: n, own: own, fleet: c.fleet.Guarded(own.Guard()), since: time.Now().Add(Margin)}
	sh.ctx, sh.cancel = context.WithCancel(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shards[n] = sh
	for _, e := range c.entries {
		if e.shard == n {
			e.reconciled = false
			c.untag(e)
			c.kick(e, sh.since.Add(time.Millisecond))
		}
	}
	for _, r := range c.regions {
		r.soon()
	}
}

// call bounds an acting call: it must have ended Margin before the lease. It
// fails if no time is left.
func (sh *shard) call(ctx context.Context) (context.Context, context.CancelFunc, error) {
	left := sh.own.Lease.Remaining() - Margin
	if left <= 0 {
		return nil, nil, fmt.Errorf("cannot call the cloud: the lease ends: %w", store.ErrLeaseLost)
	}
	ctx, cancel := context.WithTimeout(ctx, left)
	return ctx, cancel, nil
}

// Owner returns the live server that owns a worker, and whether it is this server and
// holds the worker's shard.
func (c *Controller) Owner(worker string) (m Member, mine bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := shardOf(worker)
	if c.shards[n] != nil {
		return c.members[c.cfg.Server], true
	}
	return c.members[assigned(n, c.members)], false
}

// Leadership is the response of /admin/leader-status.
type Leadership struct {
	Server  string            `json:"server"`
	Members map[string]Member `json:"members"`
	Shards  []int             `json:"shards"` // held by this server
	Total   int               `json:"total_shards"`
	Lease   float64           `json:"lease_remaining_seconds"`
}

// Leadership returns this server's lease and shards.
func (c *Controller) Leadership() Leadership {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := Leadership{Server: c.cfg.Server, Members: map[string]Member{}, Total: Shards, Shards: []int{}}
	for id, m := range c.members {
		l.Members[id] = m
	}
	for n, sh := range c.shards {
		if sh != nil {
			l.Shards = append(l.Shards, n)
		}
	}
	if c.lease != nil {
		l.Lease = c.lease.Remaining().Seconds()
	}
	return l
}

// Resign makes the server release all its shards and then register anew.
func (c *Controller) Resign() { signal(c.resign) }
