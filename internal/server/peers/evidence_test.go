package peers_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
	"lull/internal/lib/waittest"
	"lull/internal/server/peers"
	"lull/internal/store/mem"
)

// kept is the evidence of one server. If broken is set, answers are truncated.
type kept struct {
	records []evidence.Record
	broken  bool
}

func (k kept) Read(_ context.Context, _ evidence.Query, yield func(evidence.Record) error) ([]evidence.Missing, error) {
	for i, r := range k.records {
		if k.broken && i > len(k.records)/2 {
			return nil, errors.New("the disk is gone")
		}
		if err := yield(r); err != nil {
			return nil, err
		}
	}
	return []evidence.Missing{{Why: "older than what is kept"}}, nil
}

func at(minutes ...int) (out []evidence.Record) {
	for _, m := range minutes {
		d := evidence.Decide(time.Date(2026, 1, 1, 0, m, 0, 0, time.UTC), idle.Policy{Timeout: 1}, idle.Evidence{Running: true})
		out = append(out, evidence.Record{At: d.Verdict.At, Object: "w", Decision: d})
	}
	return out
}

// TestEvidenceOfAllServers checks that the records of all servers are read in order
// of time, and that servers that did not answer completely are named.
func TestEvidenceOfAllServers(t *testing.T) {
	for name, broken := range map[string]bool{"whole": false, "cut": true} {
		t.Run(name, func(t *testing.T) {
			db := mem.New(mem.Options{})
			var other *peers.Peers
			web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { other.Handler().ServeHTTP(w, r) }))
			t.Cleanup(web.Close)
			one, two := db.Client(), db.Client()
			t.Cleanup(one.Close)
			t.Cleanup(two.Close)
			other = run(t, peers.Config{Store: one, Server: "one", Address: web.URL, Local: owned{"w": "x"}, Journal: kept{at(1, 3, 5, 7, 9, 11), broken}})
			asker := run(t, peers.Config{Store: two, Server: "two", Local: owned{}, Journal: kept{at(2, 4, 6), false}})
			var got []evidence.Record
			var missing []evidence.Missing
			named := map[string]int{}
			waittest.Until(t, "the other server is found", func() bool {
				got = nil
				var err error
				if missing, err = asker.Read(t.Context(), evidence.Query{}, func(r evidence.Record) error { got = append(got, r); return nil }); err != nil {
					t.Fatal(err)
				}
				clear(named)
				for _, m := range missing {
					named[m.Server]++
				}
				return named["one"] > 0
			})
			for i := 1; i < len(got); i++ {
				if got[i].At.Before(got[i-1].At) {
					t.Errorf("record %d comes out of its order", i)
				}
			}
			if !broken && (len(got) != 9 || len(missing) != 2) || named["one"] != 1 || named["two"] != 1 {
				t.Errorf("%d records, missing %+v", len(got), missing)
			}
		})
	}
}
