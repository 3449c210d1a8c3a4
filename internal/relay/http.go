package relay

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// InstanceHeader names the instance for which an HTTP request on the shared port is
// meant. It takes precedence over Host.
const InstanceHeader = "X-Lull-Instance"

// FrontConfig configures the shared HTTP port. The zero value works.
type FrontConfig struct {
	Domains    []string      // NAME.DOMAIN reaches instance NAME; default "localhost"
	WaitPage   time.Duration // how long a browser waits before it gets the waiting page; default 1.5 s
	RetryAfter time.Duration // when a client whose wake has failed should retry, in whole seconds; default 5 s
	Log        *slog.Logger  // default: no log
}

// Front routes the HTTP requests of one shared port to instances by name. It is an
// http.Handler; the caller runs the server.
type Front struct {
	cfg FrontConfig
	log *slog.Logger

	mu     sync.RWMutex
	names  map[string]*route
	hosts  map[string]*route
	routes map[*Instance]*route
}

var _ http.Handler = (*Front)(nil)

// route leads to one instance. The idle connections of its Transport belong to one
// generation of the backend.
type route struct {
	in    *Instance
	port  int
	hosts []string
	tr    *http.Transport
	proxy *httputil.ReverseProxy

	mu  sync.Mutex
	gen uint64
}

// NewFront returns a Front without routes.
func NewFront(cfg FrontConfig) (*Front, error) {
	if len(cfg.Domains) == 0 {
		cfg.Domains = []string{"localhost"}
	}
	cfg.Domains = append([]string(nil), cfg.Domains...)
	for i, d := range cfg.Domains {
		name, ok := hostName(d)
		if !ok {
			return nil, fmt.Errorf("cannot use domain %.80q: not a host name", d)
		}
		cfg.Domains[i] = name
	}
	cfg.WaitPage = cmp.Or(cfg.WaitPage, 1500*time.Millisecond)
	cfg.RetryAfter = cmp.Or(cfg.RetryAfter, 5*time.Second)
	log := cfg.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Front{cfg: cfg, log: log, names: map[string]*route{}, hosts: map[string]*route{}, routes: map[*Instance]*route{}}, nil
}

// Route makes in reachable by its name and by hosts. port is passed to Ready and
// Wake.
func (f *Front) Route(in *Instance, port int, hosts ...string) error {
	rt := &route{in: in, port: port}
	for _, h := range hosts {
		name, ok := hostName(h)
		if !ok {
			return fmt.Errorf("cannot route %s: host %.80q is not a host name", in.name, h)
		}
		rt.hosts = append(rt.hosts, name)
	}
	rt.build(f)
	f.mu.Lock()
	defer f.mu.Unlock()
	name := strings.ToLower(in.name)
	if f.names[name] != nil {
		return fmt.Errorf("cannot route %s: the name is routed already", in.name)
	}
	for _, h := range rt.hosts {
		if f.hosts[h] != nil {
			return fmt.Errorf("cannot route %s: host %s belongs to %s", in.name, h, f.hosts[h].in.name)
		}
	}
	f.names[name], f.routes[in] = rt, rt
	for _, h := range rt.hosts {
		f.hosts[h] = rt
	}
	return nil
}

// Unroute removes the routes to in and closes their idle connections.
func (f *Front) Unroute(in *Instance) {
	f.mu.Lock()
	rt := f.routes[in]
	if rt != nil {
		delete(f.routes, in)
		delete(f.names, strings.ToLower(in.name))
		for _, h := range rt.hosts {
			delete(f.hosts, h)
		}
	}
	f.mu.Unlock()
	if rt != nil {
		rt.tr.CloseIdleConnections()
	}
}

// find returns the route for a request, or nil, and the name that was requested.
func (f *Front) find(r *http.Request) (*route, string) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if want := r.Header.Get(InstanceHeader); want != "" {
		return f.names[strings.ToLower(want)], want
	}
	host, ok := hostName(r.Host)
	if !ok {
		return nil, r.Host
	}
	if rt := f.hosts[host]; rt != nil {
		return rt, host
	}
	for _, d := range f.cfg.Domains {
		if name, ok := strings.CutSuffix(host, "."+d); ok && f.names[name] != nil {
			return f.names[name], host
		}
	}
	return nil, host
}

// hostName returns the name in a Host header in lower case, without port, brackets
// and final dot. It returns false if that is neither a host name nor an address.
func hostName(host string) (string, bool) {
	if len(host) == 0 || len(host) > 261 {
		return "", false
	}
	if strings.HasPrefix(host, "[") {
		inside, rest, ok := strings.Cut(host[1:], "]")
		if !ok || rest != "" && !validPort(rest) {
			return "", false
		}
		a, err := netip.ParseAddr(inside)
		if err != nil || !a.Is6() {
			return "", false
		}
		return a.String(), true
	}
	name, _, hasPort := strings.Cut(host, ":")
	if hasPort && !validPort(host[len(name):]) {
		return "", false
	}
	name = strings.TrimSuffix(strings.ToLower(name), ".")
	if name == "" || len(name) > 253 {
		return "", false
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 {
			return "", false
		}
		for _, c := range []byte(label) {
			if c != '-' && c != '_' && (c < 'a' || c > 'z') && (c < '0' || c > '9') {
				return "", false
			}
		}
	}
	return name, true
}

func validPort(s string) bool {
	if len(s) < 2 || s[0] != ':' {
		return false
	}
	_, err := strconv.ParseUint(s[1:], 10, 16)
	return err == nil
}

type backendKey struct{}

func (rt *route) build(f *Front) {
	rt.tr = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			b, ok := ctx.Value(backendKey{}).(Backend)
			if !ok {
				return nil, errors.New("cannot connect: the request passed no gate")
			}
			c, err := rt.in.dialBackend(ctx, b, rt.port)
			if err != nil {
				return nil, err
			}
			return &pooled{gated: gated{Conn: c, in: rt.in, port: rt.port}}, nil
		},
		MaxIdleConnsPerHost: 64,
		// An idle connection to the application would hold its instance awake.
		IdleConnTimeout:    time.Second,
		DisableCompression: true,
	}
	rt.proxy = &httputil.ReverseProxy{
		Transport:     rt.tr,
		FlushInterval: -1,
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetURL(&url.URL{Scheme: "http", Host: "instance"})
			p.Out.Host = p.In.Host
			p.Out.Header["X-Forwarded-For"] = p.In.Header["X-Forwarded-For"]
			p.SetXForwarded()
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() != nil {
				rt.in.stats.gone.Add(1)
				panic(http.ErrAbortHandler)
			}
			rt.in.stats.unreachable.Add(1)
			rt.in.stats.note(err)
			f.refuse(w, r, http.StatusBadGateway, rt.in.name, err)
		},
		ErrorLog: slog.NewLogLogger(f.log.Handler(), slog.LevelDebug),
	}
}

// fresh closes the idle connections if they belong to an earlier generation of the
// backend.
func (rt *route) fresh(b Backend) {
	rt.mu.Lock()
	changed := rt.gen != b.Generation
	rt.gen = b.Generation
	rt.mu.Unlock()
	if changed {
		rt.tr.CloseIdleConnections()
	}
}

// request is an HTTP request as OpenSince and Cut see it.
type request struct {
	track
	cancel context.CancelFunc
}

func (q *request) askCut() { q.cancel() }

// pooled is a backend connection of a Transport. Its bytes count for the request
// that is using it.
type pooled struct{ gated }

func (f *Front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rt, name := f.find(r)
	if rt == nil {
		f.refuse(w, r, http.StatusNotFound, name, fmt.Errorf("cannot route %.80q: no instance with a port has this name", name))
		return
	}
	in := rt.in
	in.stats.accepted.Add(1)
	rule := in.opt.Noise.request(r)
	remote, _ := netip.ParseAddrPort(r.RemoteAddr)
	if rule == "" && len(in.opt.Noise.Sources) > 0 {
		rule = in.opt.Noise.source(remote.Addr())
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	q := &request{cancel: cancel}
	q.owner, q.noise = q, rule != ""
	q.last.Store(time.Now().UnixNano())
	q.owed.Store(true)
	in.link(&q.track)
	defer in.unlink(&q.track)

	var b Backend
	if q.noise {
		in.stats.ignore(rule, remote)
		in.gate.ignored.Add(1)
		defer in.gate.ignored.Add(-1)
		var ready bool
		if b, ready = in.waker.Ready(rt.port); !ready || in.gate.shut() {
			f.answerHealth(w, in)
			return
		}
	} else {
		var err error
		b, err = f.admit(ctx, w, r, rt, remote)
		if err != nil {
			f.turnAway(w, r, in, err)
			return
		}
		defer in.gate.leaveInside()
		in.stats.relayed.Add(1)
	}
	f.forward(ctx, w, r, rt, b, q)
}

func (f *Front) forward(ctx context.Context, w http.ResponseWriter, r *http.Request, rt *route, b Backend, q *request) {
	rt.fresh(b)
	ctx = context.WithValue(ctx, backendKey{}, b)
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) {
			if p, ok := info.Conn.(*pooled); ok {
				p.track.Store(&q.track)
			}
		},
	})
	r = r.WithContext(ctx)
	r.Header.Del(InstanceHeader)
	rt.proxy.ServeHTTP(w, r)
}

var errShowPage = errors.New("the wake takes long")

// admit is Instance.admit, except that a browser gets the waiting page if the wake
// takes longer than WaitPage. The browser's place in the queue is kept for
// pageLinger, so that the wake continues until the page asks again.
func (f *Front) admit(ctx context.Context, w http.ResponseWriter, r *http.Request, rt *route, remote netip.AddrPort) (Backend, error) {
	in := rt.in
	a := Arrival{Instance: in.name, Port: rt.port, Remote: remote, Cause: CauseRequest, At: time.Now()}
	if !wantsPage(r) {
		return in.admit(ctx, a)
	}
	short, cancel := context.WithTimeoutCause(ctx, f.cfg.WaitPage, errShowPage)
	defer cancel()
	return in.admit(short, a)
}

// pageLinger is how long a wake continues for a browser that got the waiting page.
// The page reloads every two seconds.
const pageLinger = 10 * time.Second

// linger keeps w in the queue, and counted as waiting, for pageLinger or until the
// wake has ended.
func (in *Instance) linger(w *waiter) {
	in.streams.Go(func() {
		defer in.gate.leaveWaiting()
		t := time.NewTimer(pageLinger)
		defer t.Stop()
		select {
		case <-w.ch:
		case <-t.C:
			in.dequeue(w)
		case <-in.ctx.Done():
			in.dequeue(w)
		}
	})
}

func (f *Front) turnAway(w http.ResponseWriter, r *http.Request, in *Instance, err error) {
	switch {
	case errors.Is(err, errShowPage):
		f.waitingPage(w, in.name)
	case errors.Is(err, errClientGone):
		panic(http.ErrAbortHandler)
	default:
		f.refuse(w, r, http.StatusServiceUnavailable, in.name, err)
	}
}

// answerHealth answers a health check of an instance that is not running, so
// that the check neither wakes the instance nor removes it from a load
// balancer.
func (f *Front) answerHealth(w http.ResponseWriter, in *Instance) {
	w.Header().Set("X-Lull-State", "asleep")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(cmp.Or(in.opt.Noise.HealthStatus, http.StatusOK))
	fmt.Fprintln(w, "asleep; a request that is not a health check wakes it")
}

// refuse answers a request with an error and its reason, as a page or as problem
// JSON (RFC 9457).
func (f *Front) refuse(w http.ResponseWriter, r *http.Request, status int, name string, err error) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	if status == http.StatusServiceUnavailable {
		h.Set("Retry-After", strconv.Itoa(max(1, int(f.cfg.RetryAfter.Seconds()))))
	}
	if wantsPage(r) {
		h.Set("Content-Type", "text/html; charset=utf-8")
		w.WriteHeader(status)
		writePage(w, page{Title: http.StatusText(status), Name: name, Text: err.Error()})
		return
	}
	h.Set("Content-Type", "application/problem+json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{
		"type": "about:blank", "title": http.StatusText(status), "status": status, "detail": err.Error(), "instance_name": name,
	})
}

// wantsPage reports whether a request comes from a browser that will show the
// answer.
func wantsPage(r *http.Request) bool {
	return r.Method == http.MethodGet && r.Header.Get("Upgrade") == "" && strings.Contains(r.Header.Get("Accept"), "text/html")
}
