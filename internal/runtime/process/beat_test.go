package process

import (
	"fmt"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/protocol/shimctl"
)

// TestEndDuringFreeze has programs end while others are about to be frozen. Both need
// the locks of the runtime and of the heartbeat, and must take them in one order.
func TestEndDuringFreeze(t *testing.T) {
	const runs = 20_000
	r := &Runtime{running: true, works: map[string]*Work{}, cfg: Config{OnExit: func(string, uint64, instance.Exit) {}}}
	r.heart.r = r
	for n := range runs {
		id := fmt.Sprint(n)
		r.works[id] = &Work{r: r, id: id, ident: instance.Identity{Run: 1}}
	}
	done := make(chan bool)
	go func() {
		for n := range runs {
			r.ended(shimctl.Ended{ID: fmt.Sprint(n), Run: 1})
		}
		done <- true
	}()
	go func() {
		for n := range runs {
			r.heart.hold(fmt.Sprint("other ", n))
		}
		done <- true
	}()
	for range 2 {
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Fatal("each waits for the lock of the other")
		}
	}
}
