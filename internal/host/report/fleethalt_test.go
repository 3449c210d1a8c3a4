package report

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/host"
	"lull/internal/host/records"
	"lull/internal/lib/errtest"
	"lull/internal/lib/memnet"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/store/mem"
)

// fleetServer is a real server with an in-memory store, to which a host reports. It
// can be cut off, and restarted with its store.
type fleetServer struct {
	t     *testing.T
	db    *mem.Client
	token string
	fleet *fleet.Fleet
	away  atomic.Bool
	cl    atomic.Pointer[control.Client]
	cut   atomic.Pointer[context.CancelFunc] // cancels the calls in progress
	stop  func()
}

func newFleetServer(t *testing.T) *fleetServer {
	s := &fleetServer{t: t, db: mem.New(mem.Options{}).Client()}
	var err error
	if _, s.token, err = access.New(s.db).Create(t.Context(), access.Wanted{Name: "h", Role: access.Host, Machine: "desk"}); err != nil {
		t.Fatal(err)
	}
	s.start()
	return s
}

func (s *fleetServer) start() {
	s.t.Helper()
	f, err := fleet.New(fleet.Options{Store: s.db, ID: "fleet-1"})
	if err == nil {
		err = f.Refresh(s.t.Context())
	}
	if err != nil {
		s.t.Fatal(err)
	}
	api, err := server.New(server.Options{Fleet: f, Version: "v1"})
	if err != nil {
		s.t.Fatal(err)
	}
	network := &memnet.Network{}
	l, err := network.Listen(":7070")
	if err != nil {
		s.t.Fatal(err)
	}
	srv := &http.Server{Handler: api.Handler()}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{}, 2)
	go func() { srv.Serve(l); ended <- struct{}{} }()
	go func() {
		if err := api.Run(ctx); err != nil {
			s.t.Errorf("the server ended: %v", err)
		}
		ended <- struct{}{}
	}()
	<-api.Ready()
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return network.DialContext(ctx, "tcp", "127.0.0.1:7070")
	}}
	cl, err := control.NewClient("http://server:7070", s.token, &http.Client{Transport: tr})
	if err != nil {
		s.t.Fatal(err)
	}
	s.fleet = f
	s.cl.Store(cl)
	s.reach(true)
	s.stop = func() {
		s.reach(false)
		srv.Close()
		tr.CloseIdleConnections()
		cancel()
		<-ended
		<-ended
	}
}

// reach cuts the connection to the server, with the calls in progress, or restores
// it.
func (s *fleetServer) reach(on bool) {
	s.away.Store(!on)
	if end := s.cut.Swap(nil); end != nil {
		(*end)()
	}
}

// fleetCall makes a call that fails when the server is cut off.
func fleetCall[T any](s *fleetServer, ctx context.Context, do func(context.Context, *control.Client) (T, error)) (out T, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Several calls may be in progress, so each one's cancel function also cancels
	// the earlier ones.
	var old *context.CancelFunc
	end := context.CancelFunc(func() {
		cancel()
		if old != nil {
			(*old)()
		}
	})
	old = s.cut.Swap(&end)
	if s.away.Load() {
		return out, errors.New("the server is out of reach")
	}
	return do(ctx, s.cl.Load())
}

func (s *fleetServer) ReportHost(ctx context.Context, r control.HostReport) (control.HostAnswer, error) {
	return fleetCall(s, ctx, func(ctx context.Context, c *control.Client) (control.HostAnswer, error) { return c.ReportHost(ctx, r) })
}

func (s *fleetServer) HostTurn(ctx context.Context, host string, t control.HostTurn) (control.HostQuestions, error) {
	return fleetCall(s, ctx, func(ctx context.Context, c *control.Client) (control.HostQuestions, error) {
		return c.HostTurn(ctx, host, t)
	})
}

func (s *fleetServer) AwaitHalt(ctx context.Context, host string, t control.HaltTurn) (control.HaltAnswer, error) {
	return fleetCall(s, ctx, func(ctx context.Context, c *control.Client) (control.HaltAnswer, error) {
		return c.AwaitHostHalt(ctx, host, t)
	})
}

func (s *fleetServer) halt(r halt.Request) {
	s.t.Helper()
	if _, err := s.fleet.SetHalt(s.t.Context(), audit.Actor{Name: "ada", Kind: audit.KindUser}, r); err != nil {
		s.t.Fatal(err)
	}
}

// haltWithin is how soon a fleet halt must be in effect on every host.
const haltWithin = 5 * time.Second

// TestFleetHaltReachesTheHost checks that a halt and its end reach the host within
// 5 s, despite restarts of the server, and restarts of the host while the server is
// unreachable.
func TestFleetHaltReachesTheHost(t *testing.T) {
	files, err := records.OpenFiles(t.TempDir())
	errtest.None(t, err)
	defer files.Close()
	keep := func(c *host.Config) {
		if c.FleetHalted, err = files.FleetHalt(); err != nil {
			t.Error(err)
		}
		c.KeepFleetHalt = files.KeepFleetHalt
	}
	inBubble(t, keep, func(r *rig) {
		t := r.t
		s := newFleetServer(t)
		defer func() { s.stop(); s.db.Close() }()
		report := func() (end func()) {
			_, end = r.report(s, io.Discard)
			return end
		}
		halted := func(on bool, by string) {
			t.Helper()
			x := r.Halted()
			if on != (x != nil) || on && (!x.Fleet || x.By != by) {
				t.Errorf("halted: %+v, want %t by %q", x, on, by)
			}
		}
		end := report()
		pass(2 * time.Second)
		r.run("a", nil)
		halted(false, "")

		s.halt(halt.Request{On: true, Reason: "network"})
		pass(haltWithin)
		halted(true, "ada")
		pass(10 * time.Minute)
		if o := r.is("a", power.Running); o.PauseAt != nil || len(o.Blocks) == 0 || o.Blocks[0].Code != idle.Halted {
			t.Errorf("a is paused at %v, blocks %+v", o.PauseAt, o.Blocks)
		}
		summary := func() control.HostSummary {
			l, err := control.Read[control.HostView](t.Context(), adminOf(t, s), "/hosts/desk")
			errtest.None(t, err)
			return l.HostSummary
		}
		if v := summary(); !v.Halted || v.Halt == nil || !v.Halt.Fleet {
			t.Errorf("the server shows %+v", v)
		}

		// The server is unreachable and the host is killed: the last known halt
		// stays in effect.
		s.reach(false)
		end()
		r.crash()
		r.boot()
		halted(true, "ada")
		end = report()
		pass(time.Hour)
		halted(true, "ada")
		r.is("a", power.Running)

		// The halt ends meanwhile. The host is told once the server is reachable
		// again.
		s.halt(halt.Request{})
		pass(time.Minute)
		halted(true, "ada")
		s.reach(true)
		pass(haltWithin)
		halted(false, "")
		pass(2 * time.Minute)
		r.is("a", power.Paused)

		// The server is stopped during a halt with an end. The host leaves sleeping
		// instances alone, and resumes automatic actions at that end although the
		// server does not run.
		until := time.Now().Add(time.Hour)
		s.halt(halt.Request{On: true, Until: &until})
		s.stop()
		s.start()
		pass(haltWithin)
		halted(true, "ada")
		pass(30 * time.Minute)
		r.is("a", power.Paused)
		s.reach(false)
		pass(35*time.Minute + haltWithin)
		halted(false, "")
		pass(6 * time.Minute)
		r.is("a", power.Stopped)
		end()
		r.run("b", nil)

		// The host's own halt does not end with the fleet's.
		s.reach(true)
		end = report()
		s.halt(halt.Request{On: true})
		errtest.None(t, r.Halt(&idle.HaltedBy{By: "bob", Since: time.Now()}, "bob"))
		pass(haltWithin)
		s.halt(halt.Request{})
		pass(haltWithin)
		if x := r.Halted(); x == nil || x.Fleet || x.By != "bob" {
			t.Errorf("the host's own halt is %+v", x)
		}
		r.is("b", power.Running)
		end()
	})
}

func adminOf(t *testing.T, s *fleetServer) *control.Client {
	t.Helper()
	return s.cl.Load() // a host's token may only read that host
}
