package server_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"lull/internal/fleet/audit"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// cutter is a proxy to the server that cuts connections at random.
type cutter struct {
	mu   sync.Mutex
	rng  *rand.Rand
	open []net.Conn
	cuts int
}

func (c *cutter) dial(ctx context.Context, network, address string) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open = append(c.open, conn)
	return &cutAfter{Conn: conn, left: 400 + c.rng.IntN(12000), c: c}, nil
}

// cutAfter cuts a connection after left bytes, also within a message.
type cutAfter struct {
	net.Conn
	left int
	c    *cutter
}

func (c *cutAfter) Read(b []byte) (int, error) {
	if c.left <= 0 {
		c.c.mu.Lock()
		c.c.cuts++
		c.c.mu.Unlock()
		return 0, errors.Join(io.ErrUnexpectedEOF, c.Conn.Close())
	}
	n, err := c.Conn.Read(b[:min(len(b), c.left)])
	c.left -= n
	return n, err
}

// TestStreamMissesNothing writes events, some of them several in one change, while a
// reader's connections are cut at random places. It checks that the reader gets every
// event once and in order.
func TestStreamMissesNothing(t *testing.T) {
	for round := range 4 {
		seed := rand.Uint64()
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			t.Logf("seed %d", seed)
			missesNothing(t, rand.New(rand.NewPCG(seed, 2)))
		})
	}
}

func missesNothing(t *testing.T, rng *rand.Rand) {
	b := newBench(t, memory(t))
	road := &cutter{rng: rand.New(rand.NewPCG(rng.Uint64(), 4))}
	client, err := control.NewClient(b.url, b.token(access.Viewer, ""), &http.Client{Transport: &http.Transport{DialContext: road.dial}})
	if err != nil {
		t.Fatal(err)
	}
	const total = 300
	ctx, cancel := context.WithTimeout(t.Context(), 120*time.Second)
	defer cancel()
	started, once := make(chan struct{}), sync.Once{}
	var got []string
	ended := make(chan error, 1)
	go func() {
		ended <- client.Follow(ctx, control.Events{
			After:   b.revision(),
			Started: func() { once.Do(func() { close(started) }) },
			Reset:   func(why string) error { return fmt.Errorf("reset: %s", why) },
			Each: func(e audit.Entry) error {
				got = append(got, e.Detail)
				if len(got) == total {
					cancel()
				}
				return nil
			},
		})
	}()
	<-started
	for i := 0; i < total; {
		var ops []store.Op
		for range min(1+rng.IntN(3), total-i) {
			// Events of one change arrive in the order of their keys.
			entry, err := audit.Ops(audit.Entry{Action: "test", At: time.Unix(int64(1_700_000_000+i), 0), Detail: fmt.Sprint(i)})
			if err != nil {
				t.Fatal(err)
			}
			ops = append(ops, entry...)
			i++
		}
		errtest.Get(b.db.Commit(t.Context(), store.Txn{Then: ops}))(t)
	}
	errtest.None(t, <-ended)
	if len(got) != total {
		t.Fatalf("got %d events of %d", len(got), total)
	}
	for i, d := range got {
		if d != fmt.Sprint(i) {
			t.Fatalf("event %d is %s", i, d)
		}
	}
	if road.cuts == 0 {
		t.Fatal("no connection was cut: the test shows nothing")
	}
	t.Logf("%d events over %d cuts", total, road.cuts)
}

// TestStreamResets checks that a reader is told if its position in the stream is gone
// or is from another store.
func TestStreamResets(t *testing.T) {
	db := mem.New(mem.Options{KeepRevisions: 20})
	c := db.Client()
	t.Cleanup(c.Close)
	b := newBench(t, c)
	for range 100 {
		b.worker()
	}
	for name, after := range map[string]int64{"compacted": 1, "of another store": 1 << 40} {
		t.Run(name, func(t *testing.T) {
			client, err := control.NewClient(b.url, b.admin, nil)
			errtest.None(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
			defer cancel()
			why := ""
			made := ""
			err = client.Follow(ctx, control.Events{After: after,
				Reset: func(reason string) error {
					why = reason
					made = b.worker() // what comes after the reset is received again
					return nil
				},
				Each: func(e audit.Entry) error {
					if e.WorkerID == made {
						cancel()
					}
					return nil
				}})
			if err != nil || why == "" || made == "" {
				t.Fatalf("ended with %v, reset %q", err, why)
			}
		})
	}
	res, data := b.ask("GET", "/api/v1/events", b.admin, nil, "Last-Event-ID", "yesterday")
	b.problem("a bad id", res, data, 422)
}

// TestOneKeyOneEffect sends one creation many times at once, with one idempotency
// key, to two servers on one store. It checks that there is one worker, and that all
// answers other than "not answered yet" are equal.
func TestOneKeyOneEffect(t *testing.T) {
	db := mem.New(mem.Options{})
	var benches []*bench
	for range 2 {
		c := db.Client()
		t.Cleanup(c.Close)
		benches = append(benches, newBench(t, c))
	}
	admin := benches[0].admin
	var wg sync.WaitGroup
	var mu sync.Mutex
	answers := map[string]int{}
	for i := range 40 {
		b := benches[i%2]
		wg.Go(func() {
			for range 200 {
				res, data := b.ask("POST", "/api/v1/workers", admin, []byte(`{"name":"only","template_name":"small"}`), "Idempotency-Key", "k")
				if res.StatusCode == http.StatusConflict || res.StatusCode == http.StatusUnauthorized {
					continue // running, or the other server does not know the token yet
				}
				mu.Lock()
				answers[fmt.Sprint(res.StatusCode, string(data))]++
				mu.Unlock()
				return
			}
			t.Error("no answer in 200 tries")
		})
	}
	wg.Wait()
	if len(answers) != 1 {
		t.Errorf("%d different answers: %v", len(answers), answers)
	}
	client, err := control.NewClient(benches[1].url, admin, nil)
	errtest.None(t, err)
	l, err := client.Workers(t.Context(), map[string][]string{"name": {"only"}})
	if err != nil || len(l) != 1 {
		t.Errorf("%d workers, %v", len(l), err)
	}
}
