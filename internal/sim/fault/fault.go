// Package fault injects faults into the simulated outside world.
//
// A Set holds rules. A simulator passes each call to the set before it serves the
// call, and the matching rules determine the fault: an error response; a delay; a
// response that is lost after the work was done; a connection that breaks before the
// work; one that hangs; a response that is truncated; or one whose bytes are
// corrupted. Rules can be limited by probability, count and time span.
//
// Equal seeds and equal calls in equal order cause equal faults. The work behind a
// lost response was really done. Each protocol words its own error responses.
package fault

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Kind is the kind of a fault.
type Kind string

// The kinds of fault.
const (
	Error    Kind = "error"    // responds with Code and Status; nothing is done
	Delay    Kind = "delay"    // done, with the response after Delay; combines with other kinds
	Lose     Kind = "lose"     // done, but the connection breaks without a response
	Refuse   Kind = "refuse"   // the connection breaks and nothing is done
	Hang     Kind = "hang"     // nothing is done or sent until the client disconnects
	Truncate Kind = "truncate" // done; the response is truncated after Bytes bytes
	Malform  Kind = "malform"  // done; the response is corrupted from Bytes on
)

// Rule is one fault and the calls that it affects. Empty match fields match
// everything; Service, Action, Region and Target may contain patterns of
// path.Match.
type Rule struct {
	ID      string `json:"id,omitempty" yaml:"id"`
	Service string `json:"service,omitempty" yaml:"service"` // ec2, sts, monitoring, imds, cml
	Action  string `json:"action,omitempty" yaml:"action"`   // e.g. RunInstances, or "GET telemetry/events" for cml
	Region  string `json:"region,omitempty" yaml:"region"`
	Target  string `json:"target,omitempty" yaml:"target"` // any instance id or host name in the call

	Kind    Kind          `json:"kind" yaml:"kind"`
	Code    string        `json:"code,omitempty" yaml:"code"`
	Message string        `json:"message,omitempty" yaml:"message"`
	Status  int           `json:"status,omitempty" yaml:"status"` // HTTP status of an error; 0 lets the protocol choose
	Delay   time.Duration `json:"delay,omitempty" yaml:"delay"`   // in the client's time
	Bytes   int           `json:"bytes,omitempty" yaml:"bytes"`

	Probability float64   `json:"probability,omitempty" yaml:"probability"` // 0 means always
	Count       int       `json:"count,omitempty" yaml:"count"`             // remaining uses; 0 means no limit
	From        time.Time `json:"from,omitzero" yaml:"from"`
	Until       time.Time `json:"until,omitzero" yaml:"until"`
}

// Validate reports every fault of the rule.
func (r Rule) Validate() error {
	var errs []error
	switch r.Kind {
	case Error:
		if r.Code == "" && r.Status == 0 {
			errs = append(errs, errors.New("cannot use fault rule: kind error needs code or status"))
		}
	case Delay:
		if r.Delay <= 0 {
			errs = append(errs, errors.New("cannot use fault rule: kind delay needs delay above 0"))
		}
	case Lose, Refuse, Hang, Truncate, Malform:
	default:
		errs = append(errs, fmt.Errorf("cannot use fault rule: unknown kind %q", r.Kind))
	}
	if r.Probability < 0 || r.Probability > 1 {
		errs = append(errs, fmt.Errorf("cannot use fault rule: probability %v is outside 0 to 1", r.Probability))
	}
	if r.Count < 0 || r.Bytes < 0 {
		errs = append(errs, errors.New("cannot use fault rule: count and bytes must not be negative"))
	}
	if r.Status != 0 && (r.Status < 400 || r.Status > 599) {
		errs = append(errs, fmt.Errorf("cannot use fault rule: status %d is outside 400 to 599", r.Status))
	}
	for _, p := range []string{r.Service, r.Action, r.Region, r.Target} {
		if _, err := path.Match(p, ""); err != nil {
			errs = append(errs, fmt.Errorf("cannot use fault rule: pattern %q: %w", p, err))
		}
	}
	return errors.Join(errs...)
}

// Call is a request that a simulator is about to serve.
type Call struct {
	Service, Action, Region string
	Targets                 []string
}

// Effect is the combined effect of the matching rules on one call. The zero
// value has no effect.
type Effect struct {
	Delay time.Duration // sum of all matching delays
	Rule  Rule          // the first matching fault that is not a delay; Kind is empty if there is none
}

// Set is a set of rules, safe for concurrent use. Create it with NewSet.
type Set struct {
	mu    sync.Mutex
	rng   *rand.Rand
	rules []Rule
	hits  map[string]int
	next  int
}

// NewSet returns an empty set whose probabilities are drawn from seed.
func NewSet(seed uint64) *Set {
	return &Set{rng: rand.New(rand.NewPCG(seed, 0xfa417)), hits: map[string]int{}}
}

// Add adds a rule to the set and returns its id. A rule with a known id
// replaces the earlier one.
func (s *Set) Add(r Rule) (string, error) {
	if err := r.Validate(); err != nil {
		return "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.ID == "" {
		s.next++
		r.ID = "f" + strconv.Itoa(s.next)
	}
	for i := range s.rules {
		if s.rules[i].ID == r.ID {
			s.rules[i] = r
			return r.ID, nil
		}
	}
	s.rules = append(s.rules, r)
	return r.ID, nil
}

// Remove removes a rule and reports whether it existed.
func (s *Set) Remove(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.rules)
	s.rules = slices.DeleteFunc(s.rules, func(r Rule) bool { return r.ID == id })
	return len(s.rules) < n
}

// Clear removes all rules. Hits are kept.
func (s *Set) Clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rules = nil
}

// Rules returns the rules that can still apply.
func (s *Set) Rules() []Rule {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.rules)
}

// Hits returns how often each rule has applied.
func (s *Set) Hits() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[string]int, len(s.hits))
	for k, v := range s.hits {
		out[k] = v
	}
	return out
}

// Pick returns the effect of the matching rules on a call, and counts it as a hit.
// now is in the client's time.
func (s *Set) Pick(now time.Time, c Call) Effect {
	s.mu.Lock()
	defer s.mu.Unlock()
	var e Effect
	spent := false
	for i := range s.rules {
		r := &s.rules[i]
		if r.Kind != Delay && e.Rule.Kind != "" || !r.strikes(now, c) {
			continue
		}
		if r.Probability > 0 && s.rng.Float64() >= r.Probability {
			continue
		}
		s.hits[r.ID]++
		if r.Kind == Delay {
			e.Delay += r.Delay
		} else {
			e.Rule = *r
		}
		if r.Count == 1 {
			r.Count, spent = -1, true
		} else if r.Count > 1 {
			r.Count--
		}
	}
	if spent {
		s.rules = slices.DeleteFunc(s.rules, func(r Rule) bool { return r.Count < 0 })
	}
	return e
}

func (r *Rule) strikes(now time.Time, c Call) bool {
	if !r.From.IsZero() && now.Before(r.From) || !r.Until.IsZero() && !now.Before(r.Until) {
		return false
	}
	if !match(r.Service, c.Service) || !match(r.Action, c.Action) || !match(r.Region, c.Region) {
		return false
	}
	return r.Target == "" || slices.ContainsFunc(c.Targets, func(t string) bool { return match(r.Target, t) })
}

func match(pattern, value string) bool {
	if pattern == "" || pattern == value {
		return true
	}
	ok, err := path.Match(pattern, value)
	return err == nil && ok
}
