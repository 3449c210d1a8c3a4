// Package prices holds the price table of a server. It is the built-in table, updated
// with prices that were refreshed from AWS; or the table of a file, instead of both.
// A refreshed price is kept in the store with its date, for all servers.
package prices

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/savings"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/store"
)

// Source reads current prices from the cloud. Prices that the cloud does not list are
// missing from the result.
type Source func(ctx context.Context, keys []savings.Key, now time.Time) (savings.Prices, error)

// maxKept is the maximum number of refreshed prices in the store. Prices in use are
// kept first.
const maxKept = 4000

// within is the time limit of a refresh; AWS answers a few prices per second.
const within = 3 * time.Minute

// key is the store key of the refreshed prices.
const key = "prices"

// kept is the store's record of the refreshed prices.
type kept struct {
	At   time.Time `json:"at"`
	By   string    `json:"by"`
	Rows []row     `json:"rows"`
}

type row struct {
	Kind   string  `json:"kind"`
	Region string  `json:"region"`
	Name   string  `json:"name"`
	USD    float64 `json:"usd"`
	AsOf   string  `json:"as_of"`
}

// UnreadError means that a price could not be read from the cloud.
type UnreadError struct{ Err error }

func (e *UnreadError) Error() string { return e.Err.Error() }
func (e *UnreadError) Unwrap() error { return e.Err }

var codec = store.Codec[kept]{Version: 1}

// Table is a server's price table. It is safe for concurrent use.
type Table struct {
	store  store.Store
	source Source
	file   savings.Prices // nil without a file
	base   savings.Prices // the built-in table
}

// New returns a table over a store. file, if not nil, replaces the built-in and the
// refreshed prices. With a nil source, Refresh is refused. It fails if the built-in
// table cannot be read.
func New(s store.Store, file savings.Prices, source Source) (*Table, error) {
	base, err := savings.Published()
	return &Table{store: s, source: source, file: file, base: base}, err
}

// Prices returns the current price table.
func (t *Table) Prices(ctx context.Context) (savings.Prices, error) {
	if t.file != nil {
		return t.file, nil
	}
	k, err := t.read(ctx)
	if err != nil {
		return nil, err
	}
	return t.base.With(k.prices()), nil
}

func (t *Table) read(ctx context.Context) (kept, error) {
	v, err := store.Get(ctx, t.store, key)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return kept{}, fmt.Errorf("cannot read the prices: %w", err)
	}
	return decode(v)
}

func decode(v store.Value) (kept, error) {
	if !v.Exists() {
		return kept{}, nil
	}
	return codec.Decode(v.Key, v.Data)
}

// prices returns the rows as a table. Rows without a valid date are left out.
func (k kept) prices() savings.Prices {
	out := make(savings.Prices, len(k.Rows))
	for _, r := range k.Rows {
		if at, err := time.Parse(time.DateOnly, r.AsOf); err == nil && r.USD > 0 {
			out[savings.Key{r.Kind, r.Region, r.Name}] = savings.Price{USD: r.USD, AsOf: at}
		}
	}
	return out
}

// List returns the table for users, sorted, with the origin of each price.
func (t *Table) List(ctx context.Context) (control.Prices, error) {
	out := control.Prices{Items: []control.Price{}}
	add := func(p savings.Prices, source string) {
		for k, v := range p {
			out.Items = append(out.Items, control.Price{Kind: k.Kind(), Region: k.Region(), Name: k.Name(), USD: v.USD, AsOf: v.AsOf.Format(time.DateOnly), Source: source})
		}
	}
	if t.file != nil {
		add(t.file, control.PriceOfFile)
	} else {
		k, err := t.read(ctx)
		if err != nil {
			return out, err
		}
		fetched := k.prices()
		base := maps.Clone(t.base)
		maps.DeleteFunc(base, func(k savings.Key, _ savings.Price) bool { _, newer := fetched[k]; return newer })
		add(base, control.PriceBuiltIn)
		add(fetched, control.PriceRefreshed)
		if !k.At.IsZero() {
			out.RefreshedAt, out.RefreshedBy = &k.At, k.By
		}
	}
	slices.SortFunc(out.Items, func(a, b control.Price) int {
		return cmp.Or(cmp.Compare(a.Region, b.Region), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
	})
	return out, nil
}

// Needed returns the instance types and volumes that the workers pay for, sorted. For
// workers whose volumes are unknown, it includes the common volume types.
func Needed(workers []worker.Worker) []savings.Key {
	need := map[savings.Key]bool{}
	for _, w := range workers {
		if w.AWSRegion == "" {
			continue
		}
		if w.InstanceType != "" {
			need[savings.Key{savings.Instance, w.AWSRegion, w.InstanceType}] = true
		}
		for _, v := range w.Volumes {
			if v.Type != "" {
				need[savings.Key{savings.Storage, w.AWSRegion, v.Type}] = true
			}
		}
		if len(w.Volumes) == 0 {
			need[savings.Key{savings.Storage, w.AWSRegion, "gp3"}] = true
		}
	}
	return slices.SortedFunc(maps.Keys(need), func(a, b savings.Key) int { return slices.Compare(a[:], b[:]) })
}

// Refresh reads the prices that the workers need from the cloud and stores them. If
// one cannot be read, nothing is changed. Prices that the cloud does not list are
// named in the result. Errors: Refused if there is a file, no source or no worker,
// *UnreadError, and those of the store.
func (t *Table) Refresh(ctx context.Context, by audit.Actor, workers []worker.Worker) (control.PriceRefresh, error) {
	switch need := Needed(workers); {
	case t.file != nil:
		return control.PriceRefresh{}, &failure.Refused{Command: "refresh", Name: "prices", Reason: "prices_from_file", Detail: "the server uses the price table of --prices; start it without to refresh prices from AWS"}
	case t.source == nil:
		return control.PriceRefresh{}, &failure.Refused{Command: "refresh", Name: "prices", Reason: "no_cloud", Detail: "this server process does not call the cloud; ask one that runs the controller"}
	case len(need) == 0:
		return control.PriceRefresh{}, &failure.Refused{Command: "refresh", Name: "prices", Reason: "no_workers", Detail: "no worker has a known region and type yet"}
	case len(need) > maxKept:
		return control.PriceRefresh{}, &failure.Refused{Command: "refresh", Name: "prices", Reason: "too_many_prices", Detail: fmt.Sprintf("the workers need %d prices; the limit is %d", len(need), maxKept)}
	default:
		return t.refresh(ctx, by, need)
	}
}

func (t *Table) refresh(ctx context.Context, by audit.Actor, need []savings.Key) (control.PriceRefresh, error) {
	call, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	now := time.Now().UTC().Round(0)
	found, err := t.source(call, need, now)
	if err != nil {
		return control.PriceRefresh{}, &UnreadError{err}
	}
	out := control.PriceRefresh{At: now, Refreshed: len(found), Missing: []savings.MissingPrice{}}
	for _, k := range need {
		if _, ok := found[k]; !ok {
			out.Missing = append(out.Missing, savings.MissingPrice{Kind: k.Kind(), Region: k.Region(), Name: k.Name()})
		}
	}
	_, err = store.Update(ctx, t.store, key, func(was store.Value) ([]byte, []store.Op, error) {
		old, err := decode(was)
		if err != nil {
			old = kept{} // an unreadable record is replaced
		}
		merged := old.prices().With(found)
		keys := slices.SortedFunc(maps.Keys(merged), func(a, b savings.Key) int { return slices.Compare(a[:], b[:]) })
		rows := make([]row, 0, len(keys))
		for _, k := range keys {
			if _, fresh := found[k]; fresh || len(keys) <= maxKept {
				p := merged[k]
				rows = append(rows, row{k.Kind(), k.Region(), k.Name(), p.USD, p.AsOf.Format(time.DateOnly)})
			}
		}
		data, err := codec.Encode(key, kept{At: now, By: by.Name, Rows: rows})
		if err != nil {
			return nil, nil, err
		}
		ops, err := audit.Ops(audit.Entry{Action: "prices_refreshed", By: by, Detail: fmt.Sprintf("%d prices; %d are not listed by AWS", len(found), len(out.Missing))})
		return data, ops, err
	})
	return out, err
}
