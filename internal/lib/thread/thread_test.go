package thread

import (
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// TestOwn checks that concurrent calls run on different threads, none of which is
// the main thread.
func TestOwn(t *testing.T) {
	var mu sync.Mutex
	var all, seen sync.WaitGroup
	on := map[int]int{}
	const n = 50
	seen.Add(n)
	for range n {
		all.Go(func() {
			Own(func() {
				mu.Lock()
				on[unix.Gettid()]++
				mu.Unlock()
				seen.Done()
				seen.Wait()
			})
		})
	}
	all.Wait()
	if len(on) != n || on[os.Getpid()] != 0 {
		t.Errorf("%d functions ran on %d threads, %d of them on the first", n, len(on), on[os.Getpid()])
	}
}
