package etcd

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"lull/internal/store"
	"lull/internal/store/mem"
)

// BenchmarkStore measures the embedded server, with and without fsync, and the
// store in memory. The metric x-mem is the ratio of the two times in the same
// run.
func BenchmarkStore(b *testing.B) {
	c := mem.New(mem.Options{}).Client()
	defer c.Close()
	stores := []struct {
		name string
		s    store.Store
	}{
		{"mem", c},
		{"embedded", openTest(b, EmbeddedConfig{})},
		{"embedded-nosync", openTest(b, EmbeddedConfig{NoSync: true})},
	}
	for _, bench := range []struct {
		name string
		run  func(b *testing.B, s store.Store)
	}{
		{"put", benchPut}, {"put-64", benchPut64}, {"update", benchUpdate}, {"watch", benchWatch},
	} {
		var inMemory float64
		for _, st := range stores {
			b.Run(bench.name+"/"+st.name, func(b *testing.B) {
				bench.run(b, st.s)
				took := float64(b.Elapsed()) / float64(b.N)
				if st.name == "mem" {
					inMemory = took
				} else if inMemory > 0 {
					b.ReportMetric(took/inMemory, "x-mem")
				}
				b.ReportMetric(1e9/took, "ops/s")
			})
		}
	}
}

var kilobyte = append([]byte(`{"x":"`), append(bytes.Repeat([]byte("x"), 1000), `"}`...)...)

func benchPut(b *testing.B, s store.Store) {
	for i := 0; b.Loop(); i++ {
		txn := store.Txn{Then: []store.Op{store.Put(fmt.Sprintf("put/%d", i%1000), kilobyte)}}
		if _, err := s.Commit(b.Context(), txn); err != nil {
			b.Fatal(err)
		}
	}
}

func benchPut64(b *testing.B, s store.Store) {
	var n atomic.Int64
	b.SetParallelism(32) // times GOMAXPROCS, which was 2 for the recorded results
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			txn := store.Txn{Then: []store.Op{store.Put(fmt.Sprintf("put/%d", n.Add(1)%1000), kilobyte)}}
			if _, err := s.Commit(b.Context(), txn); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

func benchUpdate(b *testing.B, s store.Store) {
	for i := 0; b.Loop(); i++ {
		_, err := store.Update(b.Context(), s, fmt.Sprintf("up/%d", i%1000), func(old store.Value) ([]byte, []store.Op, error) {
			return fmt.Appendf(nil, `{"n":%d,%s`, i, kilobyte[1:]), nil, nil
		})
		if err != nil {
			b.Fatal(err)
		}
	}
}

// benchWatch measures the time from the beginning of a put to the arrival of its
// event.
func benchWatch(b *testing.B, s store.Store) {
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	batches := s.Watch(ctx, store.Key("watched"), 0)
	for b.Loop() {
		if _, err := s.Commit(ctx, store.Txn{Then: []store.Op{store.Put("watched", kilobyte)}}); err != nil {
			b.Fatal(err)
		}
		for len((<-batches).Events) == 0 {
		}
	}
}
