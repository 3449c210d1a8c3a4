package prices

import (
	"context"
	"errors"
	"testing"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/savings"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/store"
	"lull/internal/store/mem"
)

func TestTable(t *testing.T) {
	db := mem.New(mem.Options{}).Client()
	ada := audit.Actor{Name: "ada", Kind: audit.KindUser}
	large, store3 := savings.Key{savings.Instance, "eu-north-1", "m5.large"}, savings.Key{savings.Storage, "eu-north-1", "gp3"}
	workers := []worker.Worker{{AWSRegion: "eu-north-1", InstanceType: "m5.large"}, {AWSRegion: "eu-north-1", InstanceType: "m5.large"}, {InstanceType: "t3.micro"}}
	answer, fault := savings.Prices{}, error(nil)
	var asked []savings.Key
	source := func(_ context.Context, keys []savings.Key, now time.Time) (savings.Prices, error) {
		asked = keys
		return answer, fault
	}
	day := time.Date(2026, 11, 26, 0, 0, 0, 0, time.UTC)
	table := func(file savings.Prices, s Source) *Table {
		x, err := New(db, file, s)
		errtest.None(t, err)
		return x
	}
	one := table(nil, source)
	usd := func(x *Table, k savings.Key) float64 {
		t.Helper()
		p, err := x.Prices(t.Context())
		errtest.None(t, err)
		return p[k].USD
	}
	refused := func(name, reason string, x *Table, of []worker.Worker) {
		t.Helper()
		_, err := x.Refresh(t.Context(), ada, of)
		if no, ok := errors.AsType[*failure.Refused](err); !ok || no.Reason != reason {
			t.Errorf("%s: %v", name, err)
		}
	}
	refused("no workers", "no_workers", one, nil)
	refused("a file", "prices_from_file", table(savings.Prices{large: {USD: 1}}, source), workers)
	refused("no cloud", "no_cloud", table(nil, nil), workers)

	fault = errors.New("AccessDenied")
	if _, err := one.Refresh(t.Context(), ada, workers); !errors.As(err, new(*UnreadError)) || usd(one, large) != 0 {
		t.Errorf("a cloud that refuses: %v, price %g", err, usd(one, large))
	}
	answer, fault = savings.Prices{large: {USD: 0.102, AsOf: day}}, nil
	r, err := one.Refresh(t.Context(), ada, workers)
	if err != nil || r.Refreshed != 1 || len(r.Missing) != 1 || r.Missing[0].Name != "gp3" || len(asked) != 2 {
		t.Errorf("%+v, asked for %v, %v", r, asked, err)
	}
	if two := table(nil, nil); usd(two, large) != 0.102 || usd(two, store3) != 0 {
		t.Errorf("another server has %g and %g", usd(two, large), usd(two, store3))
	}
	if got := usd(table(savings.Prices{large: {USD: 1}}, nil), large); got != 1 {
		t.Errorf("with a file the price is %g", got)
	}
	// A price that the cloud no longer lists keeps its last value and date.
	answer = savings.Prices{store3: {USD: 0.09, AsOf: day.AddDate(1, 0, 0)}}
	if _, err := one.Refresh(t.Context(), ada, workers); err != nil || usd(one, large) != 0.102 || usd(one, store3) != 0.09 {
		t.Errorf("prices are %g and %g, %v", usd(one, large), usd(one, store3), err)
	}
	l, err := one.List(t.Context())
	if err != nil || l.RefreshedAt == nil || l.RefreshedBy != "ada" {
		t.Fatalf("%+v, %v", l, err)
	}
	for _, p := range l.Items {
		if p.Region == "eu-north-1" && p.Name == "m5.large" && (p.Source != "refreshed" || p.AsOf != "2026-11-26") {
			t.Errorf("listed as %+v", p)
		}
	}
	// An unreadable record is an error, and the next refresh replaces it.
	errtest.Get(db.Commit(t.Context(), store.Txn{Then: []store.Op{{Key: key, Data: []byte("{")}}}))(t)
	if _, err := one.Prices(t.Context()); err == nil {
		t.Error("a corrupt record was read")
	}
	if _, err := one.Refresh(t.Context(), ada, workers); err != nil || usd(one, store3) != 0.09 {
		t.Errorf("after a corrupt record: %v", err)
	}
}
