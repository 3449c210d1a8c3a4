package server

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"lull/internal/lib/scaletest"
)

// stormSize is how many workers are launched while servers are killed.
const stormSize = 150

// TestServerSurvivesKills kills the server with SIGKILL at random instants
// (LULL_SERVER_KILLS times, default 6) and restarts it, while 150 workers are
// created and operated. In the end, nothing may have been launched twice, no
// instance may be without a worker, no worker may be stuck, no counter may have
// decreased, and every call with an idempotency key must have had its effect
// exactly once.
func TestServerSurvivesKills(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 3))
	n := scaletest.Count(t, "LULL_SERVER_KILLS", 6)
	r := newRegion(t, "idle_detection_interval: 10\ndrain_timeout_seconds: 5\n")
	p := r.add("server", r.sim, "--data", filepath.Join(r.dir, "data"))
	made, begun := 0, time.Now()
	for round := range n {
		p.start()
		r.template()
		// All workers are requested within the first third of the rounds;
		// operations on them continue.
		until := min(stormSize, stormSize*3*(round+1)/n)
		var names []string
		for ; made < until; made++ {
			names = append(names, fmt.Sprintf("w-%d", made))
		}
		// Half of the rounds last at most 3 s: the server is killed before it may
		// act, or soon after.
		live := time.Duration(rng.Int64N(int64(3 * time.Second)))
		if rng.IntN(2) == 0 {
			live = time.Duration(rng.Int64N(int64(8 * time.Second)))
		}
		r.storm(rng, names, live)
		p.kill()
	}
	p.start()
	r.finish()
	l := r.settle()
	r.verify(l)
	t.Logf("%d kills, %d workers, %s", n, len(l), time.Since(begun).Round(time.Second))
}
