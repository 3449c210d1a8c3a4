package containers

import (
	"errors"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/scaletest"
)

// TestWakeFromStopped checks that a connection starts a container that lull
// stopped. On the relay, clients that connect before, during and after the stop
// and the next start must all be answered. On the direct path the container
// itself listens; it must be woken too, or its status must say why it is not.
//
// LULL_CONTAINER_STARTS is the number of starts.
func TestWakeFromStopped(t *testing.T) {
	t.Parallel()
	starts := scaletest.Count(t, "LULL_CONTAINER_STARTS", 5)
	for _, path := range []instance.Path{instance.PathRelay, instance.PathDirect} {
		t.Run(string(path), func(t *testing.T) {
			t.Parallel()
			d := host(t)
			at := daemontest.Addr(t)
			target := at
			if path == instance.PathRelay {
				target = daemontest.Addr(t)
			}
			s := box("web", daemontest.Image(t), "guest", "serve", "-listen", target)
			s.Expose = []instance.Endpoint{{Listen: at, Target: target}}
			s.PauseAfter, s.StopAfter = daemontest.Seconds(200*time.Millisecond), daemontest.Seconds(100*time.Millisecond)
			o := d.Launch(s)
			if len(o.Endpoints) != 1 || o.Endpoints[0].Path != path {
				t.Fatalf("it is reached by %+v, want %s", o.Endpoints, path)
			}
			if o.Deaf != "" {
				if path == instance.PathRelay {
					t.Fatalf("a connection does not wake it: %s", o.Deaf)
				}
				t.Logf("REPORT containers, %s: %s", path, o.Deaf)
				return
			}
			var mu sync.Mutex
			answered, refused, lost := 0, 0, 0
			visit := func() {
				err := say(at, "hello")
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					answered++
				case errors.Is(err, syscall.ECONNREFUSED):
					refused++
					t.Errorf("refused: %v", err)
				default:
					lost++
					t.Errorf("lost: %v", err)
				}
			}
			for range starts {
				d.Await("web", "stopped")
				begun := time.Now()
				visit()
				took := time.Since(begun)
				d.Await("web", "stopped")
				var wg sync.WaitGroup
				for range 6 { // before, during and after the next start
					wg.Go(func() { <-time.After(rand.N(took * 3 / 2)); visit() })
				}
				wg.Wait()
				for range 6 { // around the next pause and stop
					wg.Go(func() { <-time.After(rand.N(time.Second)); visit() })
				}
				wg.Wait()
			}
			t.Logf("REPORT containers, %s: %d rounds, %d answered, %d refused, %d lost", path, starts, answered, refused, lost)
			d.Must("web", "stop")
			if err := say(at, "hello"); err == nil {
				t.Error("what a user stopped answers")
			}
		})
	}
}
