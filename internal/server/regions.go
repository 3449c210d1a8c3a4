package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"
)

// Regions returns the regions that are enabled for an account; an empty account is
// the credentials' own.
type Regions func(ctx context.Context, account string) ([]string, error)

// regionsWithin limits how long the creation of a worker waits for the check of its
// region.
const regionsWithin = 5 * time.Second

// hasRegion rejects a region that the account does not have. If the cloud cannot be
// asked, it rejects nothing; the worker itself will show the error.
func (s *Server) hasRegion(ctx context.Context, account, region string) error {
	region = cmp.Or(region, s.fleet.Settings().AWSDefaultRegion)
	if s.regions == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, regionsWithin)
	defer cancel()
	have, err := s.regions(ctx, account)
	if err != nil || len(have) == 0 || slices.Contains(have, region) {
		return nil
	}
	whose := "the account of the server's credentials"
	if account != "" {
		whose = "account " + account
	}
	return invalid("aws_region", fmt.Sprintf("%s has no region %q, or has not enabled it", whose, region))
}
