package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/core/failure"
	"lull/internal/fleet"
	"lull/internal/fleet/worker"
)

// Instances looks up one EC2 instance of a region and account; an empty account is
// the credentials' own. It returns nil only if EC2 answered that there is no such
// instance. After an error that is unknown.
type Instances func(ctx context.Context, account, region, id string) (*fleet.SeenInstance, error)

// instanceWithin is the time limit for looking an instance up in all regions.
const instanceWithin = 20 * time.Second

// importWorker records an instance as a worker. It writes nothing unless EC2 knows
// the instance.
func (s *Server) importWorker(ctx context.Context, n fleet.ImportedWorker) (worker.Worker, error) {
	if err := intoRegionOf(ctx, &n.AWSRegion); err != nil {
		return worker.Worker{}, err
	}
	if n.AWSRegion != "" {
		if err := s.hasRegion(ctx, n.Account, n.AWSRegion); err != nil {
			return worker.Worker{}, err
		}
	}
	if _, err := s.fleet.Candidate(ctx, n); err != nil { // report what is wrong with the request itself first
		return worker.Worker{}, err
	}
	if s.instances != nil {
		if err := s.find(ctx, &n); err != nil {
			return worker.Worker{}, err
		}
		w, err := s.fleet.Candidate(ctx, n)
		if err != nil {
			return worker.Worker{}, err
		}
		if err := s.observable(ctx, &n, w); err != nil {
			return worker.Worker{}, err
		}
	}
	return s.fleet.ImportWorker(ctx, actor(ctx), n)
}

// find looks up the instance of n in EC2 and fills in its region and
// attributes.
func (s *Server) find(ctx context.Context, n *fleet.ImportedWorker) error {
	ctx, cancel := context.WithTimeout(ctx, instanceWithin)
	defer cancel()
	regions := []string{n.AWSRegion}
	if n.AWSRegion == "" {
		var err error
		if regions, err = s.discoveryRegions(ctx); err != nil {
			return err
		}
	}
	found, unread := s.ask(ctx, n.Account, regions, n.EC2InstanceID)
	if len(found) == 0 && unread != nil {
		return fault(http.StatusServiceUnavailable, "ec2_unavailable",
			fmt.Sprintf("cannot import %s: it is unknown whether it exists, and nothing was changed: %v", n.EC2InstanceID, unread))
	}
	if len(found) == 0 {
		return s.noInstance(ctx, n, regions)
	}
	n.AWSRegion = slices.Min(slices.Collect(maps.Keys(found)))
	n.Seen = found[n.AWSRegion]
	if st := n.Seen.State; st == "terminated" || st == "shutting-down" {
		return invalid("ec2_instance_id", fmt.Sprintf("instance %s is %s", n.EC2InstanceID, st))
	}
	return nil
}

// noInstance returns the error for an instance that EC2 does not know in regions. If
// another region has it, the error says which.
func (s *Server) noInstance(ctx context.Context, n *fleet.ImportedWorker, regions []string) error {
	detail := fmt.Sprintf("cannot import %s: EC2 has no such instance in %s", n.EC2InstanceID, strings.Join(regions, ", "))
	if n.Account != "" {
		detail += " of account " + n.Account
	}
	others, err := s.discoveryRegions(ctx)
	if err != nil {
		return err
	}
	others = slices.DeleteFunc(others, func(r string) bool { return slices.Contains(regions, r) })
	found, _ := s.ask(ctx, n.Account, others, n.EC2InstanceID) // if a region does not answer, only the hint is missing
	for region := range found {
		detail += "; found in " + region + ": name that region"
	}
	return fault(http.StatusNotFound, "not_found", detail, &huma.ErrorDetail{Message: "EC2 has no such instance there", Location: "body.ec2_instance_id", Value: n.EC2InstanceID})
}

// ask looks an instance up in several regions concurrently. unread names those that
// did not answer.
func (s *Server) ask(ctx context.Context, account string, regions []string, id string) (found map[string]*fleet.SeenInstance, unread error) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	found = map[string]*fleet.SeenInstance{}
	for _, region := range regions {
		wg.Go(func() {
			in, err := s.instances(ctx, account, region, id)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				unread = errors.Join(unread, fmt.Errorf("region %s: %w", region, err))
			} else if in != nil {
				found[region] = in
			}
		})
	}
	wg.Wait()
	return found, unread
}

// discoveryRegions returns the regions that discovery scans, sorted.
func (s *Server) discoveryRegions(ctx context.Context) ([]string, error) {
	lines, _, err := s.roster.All(ctx)
	if err != nil {
		return nil, err
	}
	return s.fleet.Settings().ScannedRegions(func(yield func(string) bool) {
		for _, l := range lines {
			if !yield(l.Worker.AWSRegion) {
				return
			}
		}
	}), nil
}

// observable finds out what can be observed of the machine of n, which is to become
// w. It does nothing if the sources were chosen already or the server cannot probe.
func (s *Server) observable(ctx context.Context, n *fleet.ImportedWorker, w worker.Worker) error {
	if !w.DetectSources || s.cml == nil {
		return nil
	}
	o := worker.Observable{Up: -1, Patience: s.fleet.Settings().ProvisioningTimeout}
	if n.Seen.State == "running" {
		o.Up = max(0, time.Since(cmp.Or(n.Seen.LaunchTime, time.Now())))
		var err error
		if o.Agent, err = s.reporting(ctx, n.EC2InstanceID); err != nil {
			return err
		}
		o.CML, o.CMLDetail = s.cml(ctx, w)
	}
	n.Observable = &o
	return nil
}

// reporting reports whether the agent of an instance reports to the fleet.
func (s *Server) reporting(ctx context.Context, instance string) (bool, error) {
	m, err := s.machine(ctx, "agent", instance)
	if _, none := errors.AsType[*failure.NotFound](err); none {
		return false, nil
	}
	return err == nil && !m.Stale, err
}
