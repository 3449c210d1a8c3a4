package roster_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/server/roster"
	"lull/internal/store/mem"
)

var by = audit.Actor{Name: "test", Kind: audit.KindUser}

// TestListsWhatTheStoreHas creates, changes and removes workers, and checks that each
// listing, page by page, equals one computed from all records at the same moment.
func TestListsWhatTheStoreHas(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	synctest.Test(t, func(t *testing.T) {
		db := mem.New(mem.Options{}).Client()
		f, err := fleet.New(fleet.Options{Store: db, ID: "test"})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		r := roster.New(db, slog.New(slog.DiscardHandler))
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		defer func() {
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("the roster ended with %v", err)
			}
		}()
		for range 100 {
			churn(t, rng, f)
			q := draw(rng)
			if got, want := pages(t, r, q), naive(t, f, q); !slices.Equal(got, want) {
				t.Fatalf("%+v lists\n%q, want\n%q", q, got, want)
			}
		}
	})
}

// churn makes one random change.
func churn(t *testing.T, rng *rand.Rand, f *fleet.Fleet) {
	ctx := t.Context()
	l, err := f.Workers(ctx, worker.Filter{WithTerminated: true}, "", 1000)
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("Lab-%d", rng.IntN(20))
	n := rng.IntN(4)
	if len(l.Workers) < 5 || n == 0 {
		tags := map[string]string{"team": fmt.Sprintf("t%d", rng.IntN(3))}
		owner := fmt.Sprintf("o%d", rng.IntN(3))
		_, err = f.ImportWorker(ctx, by, fleet.ImportedWorker{Name: name, AWSRegion: fmt.Sprintf("eu-west-%d", rng.IntN(2)+1),
			EC2InstanceID: fmt.Sprintf("i-%017x", rng.Uint64()>>4), Profile: worker.Profile{Tags: tags, Owner: &owner}})
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	w := l.Workers[rng.IntN(len(l.Workers))]
	switch {
	case n == 1 && w.Status == power.WorkerTerminated:
		err = f.ForgetWorker(ctx, by, w.ID, false)
	case n == 1 && w.Status != power.WorkerTerminated:
		_, err = f.Change(ctx, w.ID, fleet.Changing{By: by}, func(w *worker.Worker, _ *worker.Tx) error {
			w.Status, w.DesiredStatus = power.WorkerTerminated, power.WorkerTerminated
			return nil
		})
	default:
		_, err = f.UpdateWorker(ctx, by, w.ID, 0, worker.Profile{Name: &name})
	}
	if _, illegal := errors.AsType[*power.IllegalError](err); err != nil && !illegal {
		t.Fatal(err)
	}
}

func draw(rng *rand.Rand) roster.Query {
	q := roster.Query{Limit: 1 + rng.IntN(7), ByName: rng.IntN(2) == 0}
	q.WithTerminated = rng.IntN(2) == 0
	pick := func(to *string, of ...string) {
		if rng.IntN(3) == 0 {
			*to = of[rng.IntN(len(of))]
		}
	}
	pick(&q.Region, "eu-west-1", "eu-west-2", "nowhere")
	pick(&q.Owner, "o0", "o1")
	pick(&q.Text, "lab-1", "LAB", "team=t1", "o2", "i-0", "nothing")
	pick(&q.Name, "Lab-1", "Lab-2", "lab-1")
	if rng.IntN(4) == 0 {
		q.Tags = map[string]string{"team": []string{"", "t0", "t2"}[rng.IntN(3)]}
	}
	if rng.IntN(4) == 0 {
		q.Statuses = []power.Worker{power.WorkerTerminated, power.WorkerUnknown}[:1+rng.IntN(2)]
	}
	q.Unarmed = rng.IntN(4) == 0
	return q
}

// pages reads all pages, checks the total and returns the IDs.
func pages(t *testing.T, r *roster.Roster, q roster.Query) []string {
	var out []string
	for {
		p, err := r.Select(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, p.IDs...)
		if q.After = p.Next; p.Next != "" {
			continue
		}
		if p.Total != len(out) {
			t.Errorf("%d listed, total %d", len(out), p.Total)
		}
		return out
	}
}

// naive selects from all records, without the roster.
func naive(t *testing.T, f *fleet.Fleet, q roster.Query) []string {
	all, err := f.Workers(t.Context(), worker.Filter{WithTerminated: true}, "", 1000)
	if err != nil || all.Next != "" {
		t.Fatal(err, all.Next)
	}
	l := slices.DeleteFunc(all.Workers, func(w worker.Worker) bool {
		tag, tagged := w.Tags["team"]
		want, asked := q.Tags["team"]
		gone := w.Status == power.WorkerTerminated
		hay := strings.ToLower(strings.Join([]string{w.Name, w.ID, w.EC2InstanceID, w.Owner, "team=" + tag}, " "))
		return q.Region != "" && w.AWSRegion != q.Region || q.Owner != "" && w.Owner != q.Owner || q.Name != "" && w.Name != q.Name ||
			q.Unarmed && w.Armed || asked && (!tagged || want != "" && tag != want) ||
			len(q.Statuses) > 0 && !slices.Contains(q.Statuses, w.Status) || len(q.Statuses) == 0 && gone && !q.WithTerminated ||
			!strings.Contains(hay, strings.ToLower(q.Text))
	})
	if q.ByName || q.Name != "" {
		slices.SortFunc(l, func(a, b worker.Worker) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	}
	var ids []string
	for _, w := range l {
		ids = append(ids, w.ID)
	}
	return ids
}
