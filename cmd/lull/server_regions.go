package main

import (
	"context"
	"sync"
	"time"

	"lull/internal/core/savings"
	"lull/internal/fleet"
	"lull/internal/platform/ec2"
	"lull/internal/platform/pricelist"
	"lull/internal/server"
	"lull/internal/server/prices"
)

// regionsFresh is how long the list of an account's regions is cached. A failure is
// cached too, so that a hundred imports do not each wait for it.
const regionsFresh = time.Minute

// regionsOf returns a function that asks EC2 which regions are enabled for an
// account, and caches the answer. known returns a region in which to ask.
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

// instancesOf returns a function that looks up one instance in EC2.
func instancesOf(set *ec2.Set) server.Instances {
	return func(ctx context.Context, account, region, id string) (*fleet.SeenInstance, error) {
		client, err := set.Client(ctx, account, region)
		if err != nil {
			return nil, err
		}
		found, _, err := client.Instances(ctx, []string{id})
		if err != nil {
			return nil, err
		}
		in, ok := found[id]
		if !ok {
			return nil, nil
		}
		return &fleet.SeenInstance{State: string(in.State), Type: in.Type, PublicIP: in.PublicIP, PrivateIP: in.PrivateIP, LaunchTime: in.LaunchTime, Tags: in.Tags}, nil
	}
}

// pricesOf reads the Price List API with the server's own credentials.
func pricesOf(set *ec2.Set) prices.Source {
	return func(ctx context.Context, keys []savings.Key, now time.Time) (savings.Prices, error) {
		cfg, err := set.Accounts[""].Load(ctx, pricelist.Region)
		if err != nil {
			return nil, err
		}
		return pricelist.New(cfg).Read(ctx, keys, now)
	}
}
