package server

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"
)

// Regions returns the regions that an account may use. An empty account is the
// credentials' own.
type Regions func(ctx context.Context, account string) ([]string, error)

// regionsWithin is how long a new worker waits for the check of its region.
const regionsWithin = 5 * time.Second

// hasRegion rejects a region that an account does not have. If the cloud cannot
// be asked, nothing is rejected: the worker will show what is wrong.
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
