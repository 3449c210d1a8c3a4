package world

import (
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"sync"
	"time"

	"lull/internal/sim/fault"
)

// World is the simulated outside world. Make it with New.
type World struct {
	Clock  *Clock
	Faults *fault.Set
	Calls  *Calls

	mu        sync.Mutex
	cfg       Config
	regions   map[regionKey]*Region
	byID      map[string]*Instance
	byPublic  map[netip.Addr]*Instance
	byPrivate map[netip.Addr]*Instance
	byName    map[string]*Instance
	tokens    map[tokenKey]*launched
	seq       uint64
	publicN   uint32
	privateN  uint32
	throttles map[string]*bucket
	stored    map[string][]Datum // metrics stored by clients
}

type regionKey struct{ account, region string }

type tokenKey struct{ account, region, token string }

// launched is a launch that a ClientToken identifies.
type launched struct {
	print       string // fingerprint of the launch's parameters
	reservation string
	ids         []string
	until       time.Time // client's time at which the token expires; zero while an instance lives
}

// Region is one region of one account.
type Region struct {
	Account, Name string
	Zones         []string
	Subnets       []Subnet
	Groups        []string
	Images        []Image
	Capacity      map[string]int // maximum number of running instances, by type; absent means no limit

	list []*Instance // by Seq
	dead int         // purged entries still in list
}

// New returns the world that a configuration describes.
func New(cfg Config) (*World, error) {
	cfg.fill()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	w := &World{
		Clock:     NewClock(cfg.Start, cfg.Speed),
		Faults:    fault.NewSet(cfg.Seed),
		Calls:     newCalls(),
		cfg:       cfg,
		regions:   map[regionKey]*Region{},
		byID:      map[string]*Instance{},
		byPublic:  map[netip.Addr]*Instance{},
		byPrivate: map[netip.Addr]*Instance{},
		byName:    map[string]*Instance{},
		tokens:    map[tokenKey]*launched{},
		throttles: map[string]*bucket{},
		stored:    map[string][]Datum{},
	}
	for _, a := range cfg.Accounts {
		for _, rc := range cfg.Regions {
			w.regions[regionKey{a.ID, rc.Name}] = rc.build(a.ID)
		}
	}
	for _, r := range cfg.Faults {
		if _, err := w.Faults.Add(r); err != nil {
			return nil, err
		}
	}
	now := w.Clock.Now()
	for _, spec := range cfg.Workers {
		if err := w.populate(now, spec); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// Config returns the world's configuration, with defaults filled in.
func (w *World) Config() Config { return w.cfg }

// Region calls visit with a region of an account.
func (w *World) Region(account, name string, visit func(*Region)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	r, ok := w.regions[regionKey{account, name}]
	if !ok {
		return refuse(401, "AuthFailure", "account %s has no region %q", account, name)
	}
	visit(r)
	return nil
}

// Query selects instances of one region.
type Query struct {
	Account, Region string
	IDs             []string                        // empty means all
	After           uint64                          // continue after this Seq
	Limit           int                             // maximum number of instances to visit; 0 means all
	Match           func(*Instance, time.Time) bool // nil matches all; the time is the client's
	Enough          func() bool                     // called before each instance; returning true ends the visit, as Limit does
}

// Instances visits the instances that a query selects, in order of launch. It
// returns the Seq to continue after if Limit was reached and more may follow.
// If an id is not found in this region, it returns an error and visits nothing.
func (w *World) Instances(q Query, visit func(*Instance, Moment)) (more uint64, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.Clock.Now()
	r, ok := w.regions[regionKey{q.Account, q.Region}]
	if !ok {
		return 0, refuse(401, "AuthFailure", "account %s has no region %q", q.Account, q.Region)
	}
	list := r.list
	if len(q.IDs) > 0 {
		if list, err = w.pick(now, q.Account, q.Region, q.IDs); err != nil {
			return 0, err
		}
	} else if q.After > 0 {
		list = list[sort.Search(len(list), func(i int) bool { return list[i].Seq > q.After }):]
	}
	n := 0
	for _, i := range list {
		w.advance(now, i)
		if !i.found(now.Wire) {
			w.purge(now, r, i)
			continue
		}
		if q.Match != nil && !q.Match(i, now.Wire) {
			continue
		}
		if q.Limit > 0 && n == q.Limit || n > 0 && q.Enough != nil && q.Enough() {
			return more, nil
		}
		visit(i, now)
		n++
		more = i.Seq
	}
	r.compact()
	return 0, nil
}

// pick returns the instances with ids in one region, advanced to now, without
// duplicates.
func (w *World) pick(now Moment, account, region string, ids []string) ([]*Instance, error) {
	out := make([]*Instance, 0, len(ids))
	seen := make(map[string]bool, len(ids))
	var missing []string
	for _, id := range ids {
		if !validID(id) {
			return nil, Refuse("InvalidInstanceID.Malformed", "Invalid id: %q", id)
		}
		if seen[id] {
			continue
		}
		seen[id] = true
		i, ok := w.byID[id]
		if ok {
			w.advance(now, i)
		}
		if !ok || i.Account != account || i.Region != region || !i.found(now.Wire) {
			missing = append(missing, id)
			continue
		}
		out = append(out, i)
	}
	switch len(missing) {
	case 0:
		return out, nil
	case 1:
		return nil, Refuse("InvalidInstanceID.NotFound", "The instance ID '%s' does not exist", missing[0])
	}
	return nil, Refuse("InvalidInstanceID.NotFound", "The instance IDs '%s' do not exist", joinMax(missing, 20))
}

func joinMax(s []string, n int) string {
	out := ""
	for k, v := range s {
		if k == n {
			return out + ", ..."
		}
		if k > 0 {
			out += ", "
		}
		out += v
	}
	return out
}

func validID(id string) bool {
	if len(id) < 10 || len(id) > 19 || id[:2] != "i-" {
		return false
	}
	for _, c := range id[2:] {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// Find visits the instance with the EC2 ID or scenario name ref, in any region. It
// reports whether there is one.
func (w *World) Find(ref string, visit func(*Instance, Moment)) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := w.lookup(ref)
	if i == nil {
		return false
	}
	now := w.Clock.Now()
	w.advance(now, i)
	visit(i, now)
	return true
}

func (w *World) lookup(ref string) *Instance {
	if i, ok := w.byID[ref]; ok {
		return i
	}
	return w.byName[ref]
}

// All visits every instance that reads can find.
func (w *World) All(visit func(*Instance, Moment)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.Clock.Now()
	for _, r := range w.sortedRegions() {
		for _, i := range r.list {
			w.advance(now, i)
			if i.found(now.Wire) {
				visit(i, now)
			}
		}
	}
}

func (w *World) sortedRegions() []*Region {
	out := make([]*Region, 0, len(w.regions))
	for _, r := range w.regions {
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b *Region) int {
		if a.Account != b.Account {
			return compare(a.Account, b.Account)
		}
		return compare(a.Name, b.Name)
	})
	return out
}

func compare(a, b string) int {
	if a < b {
		return -1
	}
	if a > b {
		return 1
	}
	return 0
}

// SetSpeed changes the speed of the world. It first advances everything to now.
func (w *World) SetSpeed(speed float64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.Clock.Now()
	for _, i := range w.byID {
		w.advance(now, i)
	}
	return w.Clock.setSpeed(speed)
}

// purge removes an instance that reads no longer find.
func (w *World) purge(now Moment, r *Region, i *Instance) {
	if i.Gone.IsZero() || now.Wire.Before(i.Gone) || w.byID[i.ID] != i {
		return
	}
	delete(w.byID, i.ID)
	if w.byName[i.Name] == i {
		delete(w.byName, i.Name)
	}
	if i.ClientToken != "" {
		w.forgetToken(now, i)
	}
	i.purged = true
	r.dead++
}

// forgetToken makes a ClientToken expire 24 h after its last instance is gone, as in
// EC2.
func (w *World) forgetToken(now Moment, i *Instance) {
	key := tokenKey{i.Account, i.Region, i.ClientToken}
	l, ok := w.tokens[key]
	if ok && !slices.ContainsFunc(l.ids, func(id string) bool { return w.byID[id] != nil }) {
		l.until = now.Wire.Add(24 * time.Hour)
	}
	for k, l := range w.tokens {
		if !l.until.IsZero() && now.Wire.After(l.until) {
			delete(w.tokens, k)
		}
	}
}

// compact removes purged entries from the list once they make up half of it.
func (r *Region) compact() {
	if r.dead*2 <= len(r.list) || r.dead == 0 {
		return
	}
	kept := r.list[:0:0]
	for _, i := range r.list {
		if !i.purged {
			kept = append(kept, i)
		}
	}
	r.dead = 0
	r.list = kept
}

func (w *World) newID(prefix string) string {
	w.seq++
	return fmt.Sprintf("%s-0%016x", prefix, mix(w.cfg.Seed*0x9e37+w.seq))
}
