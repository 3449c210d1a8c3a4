package main

import (
	"context"
	"sync"
	"time"

	"lull/internal/daemon/server"
	"lull/internal/edge/ec2"
)

// regionsFresh is for how long an answer about an account's regions holds; a
// failure too, so that a hundred imports do not wait for each.
const regionsFresh = time.Minute

// regionsOf asks EC2 in a region that is known which regions an account has, and
// keeps the answer for a while.
func regionsOf(set *ec2.Set, known func() string) server.Regions {
	type answer struct {
		names []string
		err   error
		until time.Time
	}
	var mu sync.Mutex
	kept := map[string]answer{}
	ask := func(ctx context.Context, account string) ([]string, error) {
		client, err := set.Client(ctx, account, known())
		if err != nil {
			return nil, err
		}
		return client.Regions(ctx)
	}
	return func(ctx context.Context, account string) ([]string, error) {
		mu.Lock()
		a, ok := kept[account]
		mu.Unlock()
		if ok && time.Now().Before(a.until) {
			return a.names, a.err
		}
		a.names, a.err = ask(ctx, account)
		a.until = time.Now().Add(regionsFresh)
		mu.Lock()
		kept[account] = a
		mu.Unlock()
		return a.names, a.err
	}
}
