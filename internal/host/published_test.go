package host

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/instance"
	"lull/internal/core/power"
	"lull/internal/host/hosttest"
)

// portRuntime is a runtime whose ports another program publishes.
type portRuntime struct {
	*hosttest.Kernel

	mu   sync.Mutex
	held map[string]bool
	err  error // what holding reports after it has begun
}

func (p *portRuntime) HoldPorts(_ context.Context, id, _ string, _ func(string)) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held[id] = true
	return p.err
}

func (p *portRuntime) ReleasePorts(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.held, id)
}

func (p *portRuntime) holds(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held[id]
}

func (p *portRuntime) works() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = nil
}

// TestPortsOfThePaused checks that no client of a paused instance is held when it
// turns out that it cannot be stopped: nothing would wake it then.
func TestPortsOfThePaused(t *testing.T) {
	p := &portRuntime{held: map[string]bool{}, err: errors.New("the shim does not answer")}
	inBubble(t, func(r *rig) {
		p.Kernel = r.k
		r.Host.cfg.Runtimes["process"] = p
		id := r.run("web", nil)
		time.Sleep(30 * time.Minute)
		synctest.Wait()
		if r.is("web", power.Paused); p.holds(id) {
			t.Error("its clients are held")
		}
		p.works()
		time.Sleep(2 * time.Minute)
		if o := r.is("web", power.Stopped); !p.holds(id) {
			t.Errorf("its clients are not held: %s", o.StatusReason)
		}
	})
}

var _ instance.PortHolder = (*portRuntime)(nil)
