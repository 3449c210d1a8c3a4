// Package sim is the outside world imitated on the wire: EC2, STS, CloudWatch,
// IMDSv2 and Cisco Modeling Labs, for demos and tests. Production code never
// imports it, and it imports nothing of lull but its own tree: a client and a
// simulator that share code share bugs.
//
// # One listener
//
// Server.Handler serves everything on one listener, and tells requests apart:
//
//	/sim/...                         the control API (see Control)
//	/latest/...                      IMDS of the instance that was dialled, or of Options.Metadata
//	/cml/{host}/api/v0/...           CML of a host, by scenario name, instance id or address
//	/api/v0/...                      CML of the host that was dialled or named in the Host header
//	/service/GraniteService.../...   CloudWatch by rpc-v2-cbor
//	/                                the query protocol; the service follows from the signature's
//	                                 scope or, without one, from Version
//
// so that AWS_ENDPOINT_URL=http://127.0.0.1:PORT is all that an AWS client needs.
//
// # Addresses
//
// Every running instance has a public address of its own in 127.64.0.0/10 (the
// scenario can choose another pool), which changes at every start unless it is
// elastic, and a metadata address in 127.128.0.0/9 that never changes. Linux
// routes all of 127.0.0.0/8 to loopback, so one listener on the unspecified
// address, wrapped by LoopbackOnly, is at all of them: https://127.64.0.7:8443
// is CML of the instance with that address, http://127.128.0.1:PORT is the
// metadata service of the first instance. In memory, use the handlers over any
// listener and put the address into the request's Host.
//
// # Time
//
// Times on the wire are the client's own; speed changes how fast things happen
// (see world.Clock).
package sim

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"lull/internal/sim/cmlsim"
	"lull/internal/sim/cwsim"
	"lull/internal/sim/ec2sim"
	"lull/internal/sim/imdssim"
	"lull/internal/sim/pricesim"
	"lull/internal/sim/wire"
	"lull/internal/sim/world"
)

// Options configure a Server. The zero value runs the default scenario without
// a state file.
type Options struct {
	Scenario world.Config // without regions and workers, Default replaces all but Seed, Speed and Start
	State    string       // file that the world is loaded from and saved to; empty means none
	Metadata string       // number of network hops from clients to the metadata service; 0 means 1
	Hops     int          // how many hops metadata clients are away; 0 means 1
}

// Server is the simulator. Create it with New.
type Server struct {
	World *world.World
	CML   *cmlsim.CML
	IMDS  *imdssim.IMDS

	ec2   *ec2sim.EC2
	sts   *ec2sim.STS
	cw    *cwsim.CloudWatch
	price *pricesim.PriceList
	mux   *http.ServeMux
	state string
}

// New creates a world and its handlers, and loads the state file if it exists.
func New(o Options) (*Server, error) {
	if len(o.Scenario.Workers) == 0 && len(o.Scenario.Regions) == 0 {
		d, err := Default()
		if err != nil {
			return nil, err
		}
		d.Seed, d.Speed, d.Start = cmp.Or(o.Scenario.Seed, d.Seed), cmp.Or(o.Scenario.Speed, d.Speed), o.Scenario.Start
		o.Scenario = d
	}
	w, err := world.New(o.Scenario)
	if err != nil {
		return nil, err
	}
	s := &Server{
		World: w, CML: cmlsim.New(w), IMDS: imdssim.New(w), state: o.State,
		ec2: ec2sim.New(w), sts: ec2sim.NewSTS(w), cw: cwsim.New(w), price: pricesim.New(w), mux: http.NewServeMux(),
	}
	s.IMDS.Default, s.IMDS.Hops = o.Metadata, o.Hops
	if err := s.load(); err != nil {
		return nil, err
	}
	s.control()
	s.mux.Handle("/latest/", s.IMDS)
	s.mux.Handle("/api/v0/", s.CML)
	s.mux.HandleFunc("/cml/{host}/", func(w http.ResponseWriter, r *http.Request) {
		host := r.PathValue("host")
		http.StripPrefix("/cml/"+host, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.CML.ServeHost(host, w, r) })).ServeHTTP(w, r)
	})
	s.mux.HandleFunc(cwsim.CBORPath, s.cw.ServeCBOR)
	s.mux.HandleFunc("/{$}", s.query)
	return s, nil
}

// Handler returns the handler for all requests.
func (s *Server) Handler() http.Handler { return s.mux }

// query passes a request of the query protocol to its service.
func (s *Server) query(w http.ResponseWriter, r *http.Request) {
	if strings.HasPrefix(r.Header.Get("X-Amz-Target"), pricesim.Target) {
		s.price.ServeHTTP(w, r)
		return
	}
	form, err := wire.ParseForm(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	service := wire.CallerOf(r).Service
	switch {
	case service == "ec2" || service == "" && form.Get("Version") == "2016-11-15":
		s.ec2.Serve(w, r, form)
	case service == "sts" || service == "" && form.Get("Version") == "2011-06-15":
		s.sts.Serve(w, r, form)
	case service == "monitoring" || service == "" && form.Get("Version") == "2010-08-01":
		s.cw.ServeQuery(w, r, form)
	default:
		http.Error(w, "cannot tell which service is meant: no signature and no known Version", http.StatusBadRequest)
	}
}

// Listeners are what a Server listens on. Nil listeners are not served.
type Listeners struct {
	API net.Listener // plain HTTP, everything
	CML net.Listener // TLS, for the CML hosts; wrap a listener on the unspecified address with LoopbackOnly
}

// saveEvery is the interval at which the state file is written.
const saveEvery = 10 * time.Second

// Run serves until ctx ends, then closes the listeners, saves the state and
// returns nil or the first error.
func (s *Server) Run(ctx context.Context, l Listeners) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	servers := []*http.Server{}
	failed := make(chan error, 2) // one slot for each server, so that neither blocks
	var wg sync.WaitGroup
	serve := func(h http.Handler, l net.Listener) {
		// Requests end with the run, so that an injected hang does not delay it.
		srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute, BaseContext: func(net.Listener) context.Context { return ctx }}
		servers = append(servers, srv)
		wg.Go(func() { failed <- srv.Serve(l) })
	}
	if l.API != nil {
		serve(s.mux, l.API)
	}
	if l.CML != nil {
		serve(s.CML, tls.NewListener(l.CML, s.CML.TLSConfig()))
	}
	err := s.keep(ctx, failed)
	cancel()
	for _, srv := range servers {
		_ = srv.Close() // its errors are already in failed
	}
	wg.Wait()
	return errors.Join(err, s.Save())
}

// keep saves the state periodically until ctx ends or a server has failed.
func (s *Server) keep(ctx context.Context, failed <-chan error) error {
	tick := time.NewTicker(saveEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return fmt.Errorf("cannot serve the simulator: %w", err)
		case <-tick.C:
			if err := s.Save(); err != nil {
				return err
			}
		}
	}
}

// Save writes the state file atomically. Without a state file it does nothing.
func (s *Server) Save() error {
	if s.state == "" {
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(s.state), filepath.Base(s.state)+".*")
	if err != nil {
		return fmt.Errorf("cannot save simulator state: %w", err)
	}
	err = errors.Join(s.World.Save(f), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), s.state)
	}
	if err != nil {
		return fmt.Errorf("cannot save simulator state %s: %w", s.state, errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

func (s *Server) load() error {
	if s.state == "" {
		return nil
	}
	f, err := os.Open(s.state)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("cannot load simulator state: %w", err)
	}
	return errors.Join(s.World.Load(f), f.Close())
}

// LoopbackOnly restricts a listener on the unspecified address to this machine:
// a connection to an address other than loopback is closed before a byte is
// read.
func LoopbackOnly(l net.Listener) net.Listener { return loopback{l} }

type loopback struct{ net.Listener }

func (l loopback) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		host, _, _ := net.SplitHostPort(c.LocalAddr().String())
		if ip := net.ParseIP(strings.Split(host, "%")[0]); ip != nil && ip.IsLoopback() {
			return c, nil
		}
		_ = c.Close()
	}
}
