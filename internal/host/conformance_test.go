package host

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/hosttest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
	"lull/internal/protocol/hostctl/execstream"
)

// TestConformance checks that the simulated runtime behaves like the real ones.
// Otherwise the tests that use it would prove nothing.
func TestConformance(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for _, row := range hosttest.Suite(max(1, count(t, "LULL_SIM_CRASHES", 60)/10), rand.New(rand.NewPCG(seed, 0))) {
		t.Run(row.Name, func(t *testing.T) {
			if why := hosttest.Simulated().Lacks(row.Needs); why != "" {
				t.Skip(why)
			}
			inBubble(t, func(r *rig) {
				r.k.Deep = row.Needs == hosttest.Hibernate
				row.Do(r.t, simMachine{hosttest.Simulated(), r})
			})
		})
	}
}

// simMachine implements hosttest.Machine.
type simMachine struct {
	hosttest.Subject
	r *rig
}

func (m simMachine) Run(t *testing.T, name string, p hosttest.Program, change func(*instance.Spec)) {
	t.Helper()
	id := m.r.run(name, change)
	proc := m.r.k.Proc(id)
	switch p {
	case hosttest.Burn:
		proc.SetBusy(true)
	case hosttest.Ends:
		proc.Exit(7)
	case hosttest.Fails:
		time.Sleep(time.Second)
		proc.Exit(9)
	}
}

func (m simMachine) id(name string) string {
	o, err := m.r.Get(name)
	if err != nil {
		return ""
	}
	return o.ID
}

func (m simMachine) Dial(_ *testing.T, name string) hosttest.Conn {
	return &simConn{k: m.r.k, id: m.id(name)}
}

// simConn connects only when it sends its first line, as the simulated clients do.
type simConn struct {
	k  *hosttest.Kernel
	id string
	c  *hosttest.Client
}

func (c *simConn) Ask(string) error {
	if c.c == nil {
		c.c = c.k.Connect(c.id)
	} else {
		c.c.Send()
	}
	synctest.Wait()
	if o := c.c.Outcome(); o != "answered" || len(c.k.Broken()) > 0 {
		return errors.New(o)
	}
	return nil
}

func (c *simConn) HalfClose(string) error { return errors.New("not simulated") }

func (c *simConn) Close() {
	c.c.Close()
	synctest.Wait()
}

func (m simMachine) Crash(_ *testing.T, down func()) { m.r.crash(); down(); m.r.boot() }

func (m simMachine) Until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	if !waittest.Within(10*time.Minute, ok) {
		t.Fatalf("not within ten minutes: %s", what)
	}
}

func (m simMachine) Left(string) []string { return nil }
func (m simMachine) Pause(name string, force bool) error {
	return m.r.Pause(m.r.ctx, name, ByManual, force)
}
func (m simMachine) Resume(name string) error { return m.r.Resume(m.r.ctx, name, ByManual) }
func (m simMachine) Start(name string) error  { return m.r.Host.Start(m.r.ctx, name, ByManual) }
func (m simMachine) Stop(name string) error   { return m.r.Stop(m.r.ctx, name, ByManual, false) }
func (m simMachine) Remove(name string) error { return m.r.Delete(m.r.ctx, name, ByManual) }
func (m simMachine) Release(name, holder string) error {
	return m.r.ReleaseLease(m.r.ctx, name, holder)
}
func (m simMachine) Get(name string) (hostctl.Instance, error) {
	synctest.Wait()
	return m.r.Get(name)
}

func (m simMachine) Hold(name, holder string, ttl time.Duration) error {
	return m.r.Host.Hold(m.r.ctx, name, idle.Lease{Holder: holder}, ttl)
}

func (m simMachine) Exec(string, ...string) (instance.Outcome, error) {
	return instance.Outcome{}, context.Canceled
}

func (m simMachine) Attach(*testing.T, string, execstream.Request) io.ReadWriteCloser { return nil }

func (m simMachine) Logs(string, hostctl.Logs) (string, error) { return "", context.Canceled }
