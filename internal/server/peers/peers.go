// Package peers asks the other servers of a fleet for what only they have: the live
// readings of their workers, the evidence they stored, and the hosts that report to
// them. It also forwards agents' reports to the servers that own the workers.
//
// Each server with an address registers it in the store under a lease. Requests carry
// a secret that all servers share through the store; anyone who can read the store
// could read everything anyway. A peer that does not answer within Within is skipped;
// its data is then unknown. Commands for workers go through the store instead; those
// for instances of a host go to the server that the host reports to.
package peers

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"lull/internal/fleet/worker"
	"lull/internal/lib/delay"
	"lull/internal/lib/task"
	"lull/internal/protocol/control"
	"lull/internal/store"
)

// Within is the time limit for a peer's answer.
const Within = 2 * time.Second

const (
	prefix    = "peers/"
	secretKey = "access/peers"
	leaseTTL  = 15 * time.Second
	maxAnswer = 64 << 20
	maxReport = 256 << 10
)

// Live reads the in-memory state of the workers that a server owns.
type Live interface {
	Observation(ctx context.Context, id string) (control.Observation, bool)
	// Report returns false if this server does not own the worker.
	Report(ctx context.Context, id string, r control.AgentReport) bool
	// Verdicts returns the idle status of every worker that it owns, by ID.
	Verdicts(ctx context.Context) map[string]worker.IdleStatus
}

// Config configures Peers.
type Config struct {
	Store store.Store
	// Server is this server's ID. Address is the URL where others reach it;
	// empty if they cannot.
	Server, Address string
	// Local reads this server's own state; nil if it has none.
	Local Live
	// Journal reads this server's own evidence; nil if it stores none.
	Journal Journal
	// Hosts are those that report to this server; nil for none.
	Hosts Hosts
	// HTTP is the client for requests to others; nil is the default client.
	HTTP *http.Client
	// Log gets one message when a server becomes unreachable, and one when it
	// is reachable again; nil disables it.
	Log *slog.Logger
}

// Peers is the link to the other servers of a fleet. It is safe for concurrent use.
// Run must be running.
type Peers struct {
	cfg Config

	mu     sync.Mutex
	secret string
	others map[string]string // address by server
	silent map[string]bool   // addresses that could not be reached
}

var _ Live = (*Peers)(nil)

type address struct {
	URL string `json:"url"`
}

type shared struct {
	Secret string `json:"secret"`
}

var (
	addresses = store.Codec[address]{Version: 1}
	secrets   = store.Codec[shared]{Version: 1}
)

// Client returns an HTTP client that trusts the CAs in roots; nil means the system's.
// It follows no redirects, because its requests carry a secret.
func Client(roots *x509.CertPool) *http.Client {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// New returns Peers. It does no I/O.
func New(cfg Config) *Peers {
	if cfg.HTTP == nil {
		cfg.HTTP = Client(nil)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Peers{cfg: cfg, others: map[string]string{}, silent: map[string]bool{}}
}

// String returns the name of p as a task.
func (p *Peers) String() string { return "the link to other servers" }

// Run registers this server and tracks the others until ctx ends.
func (p *Peers) Run(ctx context.Context) error {
	if err := p.share(ctx); err != nil {
		return err
	}
	return task.Run(ctx, task.Loop("the list of servers", p.follow), task.Loop("the registration", p.register))
}

// share reads the secret, or creates it.
func (p *Peers) share(ctx context.Context) error {
	v, err := store.Update(ctx, p.cfg.Store, secretKey, func(old store.Value) ([]byte, []store.Op, error) {
		if old.Exists() {
			return old.Data, nil, nil
		}
		data, err := secrets.Encode(secretKey, shared{Secret: rand.Text() + rand.Text()})
		return data, nil, err
	})
	if err != nil {
		return fmt.Errorf("cannot join the other servers: %w", err)
	}
	s, err := secrets.Decode(secretKey, v.Data)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.secret = s.Secret
	return nil
}

// register keeps this server's address in the store, under a lease. If the lease is
// lost, it registers again.
func (p *Peers) register(ctx context.Context) error {
	for p.cfg.Address != "" && ctx.Err() == nil {
		lease, err := p.cfg.Store.Grant(ctx, leaseTTL)
		if err == nil {
			err = p.put(ctx, lease)
		}
		if err == nil {
			select {
			case <-lease.Lost():
				continue
			case <-ctx.Done():
				last, cancel := context.WithTimeout(context.WithoutCancel(ctx), Within)
				defer cancel()
				_ = lease.Revoke(last) // if this fails, the lease expires
				return nil
			}
		}
		if delay.For(ctx, time.Second) != nil {
			return nil
		}
	}
	<-ctx.Done()
	return nil
}

func (p *Peers) put(ctx context.Context, lease store.Lease) error {
	key := prefix + p.cfg.Server
	data, err := addresses.Encode(key, address{URL: p.cfg.Address})
	if err != nil {
		return err
	}
	_, err = p.cfg.Store.Commit(ctx, store.Txn{Then: []store.Op{store.PutLeased(key, data, lease.ID())}})
	return err
}

func (p *Peers) follow(ctx context.Context) error {
	return store.Follow(ctx, p.cfg.Store, store.Prefix(prefix), store.Follower{
		Reset: func(page store.Page) error {
			p.mu.Lock()
			clear(p.others)
			p.mu.Unlock()
			for _, v := range page.Values {
				p.take(v, false)
			}
			return nil
		},
		Apply: func(b store.Batch) error {
			for _, e := range b.Events {
				p.take(e.Value, e.Deleted)
			}
			return nil
		},
	})
}

// take processes that a server appeared or, if gone, disappeared. An unreadable
// address is ignored.
func (p *Peers) take(v store.Value, gone bool) {
	id := strings.TrimPrefix(v.Key, prefix)
	a, err := addresses.Decode(v.Key, v.Data)
	p.mu.Lock()
	defer p.mu.Unlock()
	if delete(p.others, id); !gone && err == nil && id != p.cfg.Server {
		p.others[id] = a.URL
	}
}

// Observation asks this server and then all others concurrently. Only the worker's
// owner answers.
func (p *Peers) Observation(ctx context.Context, id string) (o control.Observation, ok bool) {
	if p.cfg.Local != nil {
		if o, ok := p.cfg.Local.Observation(ctx, id); ok {
			return o, true
		}
	}
	body, ok := p.any(ctx, http.MethodGet, observations+url.PathEscape(id), nil)
	if !ok || json.Unmarshal(body, &o) != nil {
		return control.Observation{}, false
	}
	return o, true
}

// Report forwards a report to the worker's owner: this server, or the other
// server that accepts it.
func (p *Peers) Report(ctx context.Context, id string, r control.AgentReport) bool {
	if p.cfg.Local != nil && p.cfg.Local.Report(ctx, id, r) {
		return true
	}
	body, err := json.Marshal(r)
	if err != nil {
		return false
	}
	_, ok := p.any(ctx, http.MethodPost, reports+url.PathEscape(id), body)
	return ok
}

// Verdicts returns the idle status of all workers observed by this server and by
// others that answer in time.
func (p *Peers) Verdicts(ctx context.Context) map[string]worker.IdleStatus {
	out := map[string]worker.IdleStatus{}
	if p.cfg.Local != nil {
		maps.Copy(out, p.cfg.Local.Verdicts(ctx))
	}
	answers(ctx, p, verdicts+"all", func(theirs map[string]worker.IdleStatus) bool {
		maps.Copy(out, theirs)
		return true
	})
	return out
}

// answers asks all other servers for path, for at most Within. It calls take with
// each answer as it arrives, until take returns false.
func answers[T any](ctx context.Context, p *Peers, path string, take func(T) bool) {
	ctx, cancel := context.WithTimeout(ctx, Within)
	defer cancel()
	replies := p.each(ctx, http.MethodGet, path, nil)
	for range cap(replies) {
		var v T
		if r := <-replies; r.err == nil && json.Unmarshal(r.body, &v) == nil && !take(v) {
			return
		}
	}
}

// any sends a request to all other servers at once and returns the first
// successful answer.
func (p *Peers) any(ctx context.Context, method, path string, body []byte) ([]byte, bool) {
	ctx, cancel := context.WithTimeout(ctx, Within)
	defer cancel()
	replies := p.each(ctx, method, path, body)
	for range cap(replies) {
		if r := <-replies; r.err == nil {
			return r.body, true
		}
	}
	return nil, false
}

// reply is the answer of one other server.
type reply struct {
	body []byte
	err  error
}

// each sends a request to all other servers at once. The channel has room for
// every reply, so no sender blocks.
func (p *Peers) each(ctx context.Context, method, path string, body []byte) <-chan reply {
	p.mu.Lock()
	secret, urls := p.secret, make([]string, 0, len(p.others))
	for _, u := range p.others {
		urls = append(urls, u)
	}
	p.mu.Unlock()
	replies := make(chan reply, len(urls))
	for _, u := range urls {
		go func() {
			b, err := p.ask(ctx, u, method, path, secret, body)
			replies <- reply{b, err}
		}()
	}
	return replies
}

const (
	verdicts     = "/internal/verdicts/"
	observations = "/internal/observations/"
	reports      = "/internal/reports/"
)

// reached records whether a server could be reached, and logs a change. A request
// that was canceled does not count.
func (p *Peers) reached(ctx context.Context, server string, err error) {
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	p.mu.Lock()
	was := p.silent[server]
	p.silent[server] = err != nil
	p.mu.Unlock()
	switch {
	case err != nil && !was:
		p.cfg.Log.Warn("another server of the fleet does not answer: live readings that only it has are missing", "server", server, "err", err)
	case err == nil && was:
		p.cfg.Log.Info("another server of the fleet answers again", "server", server)
	}
}

func (p *Peers) ask(ctx context.Context, server, method, path, secret string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(server, "/")+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("cannot ask a server of the fleet: %w", err)
	}
	req.Header.Set("Authorization", "Bearer "+secret)
	res, err := p.cfg.HTTP.Do(req)
	p.reached(ctx, server, err)
	if err != nil {
		return nil, fmt.Errorf("cannot ask a server of the fleet: %w", err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, &statusError{res.Status}
	}
	b, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("cannot read the answer of a server of the fleet: %w", err)
	}
	return b, nil
}

// statusError is an HTTP error status of another server.
type statusError struct{ status string }

func (e *statusError) Error() string {
	return "cannot use the answer of a server of the fleet: " + e.status
}

// known reports whether a request carries the shared secret.
func (p *Peers) known(r *http.Request) bool {
	p.mu.Lock()
	secret := p.secret
	p.mu.Unlock()
	given := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	return secret != "" && subtle.ConstantTimeCompare([]byte(given), []byte(secret)) == 1
}

// serve answers another server's request; with a 404 if answer returns false.
func (p *Peers) serve(w http.ResponseWriter, r *http.Request, answer func() (any, bool)) {
	if !p.known(r) {
		http.Error(w, "cannot accept the secret", http.StatusUnauthorized)
		return
	}
	v, ok := answer()
	if !ok {
		http.NotFound(w, r)
		return
	}
	body, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) // if this fails, the peer times out
}

// Handler returns the handler for requests of other servers.
func (p *Peers) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+evidencePath, p.serveEvidence)
	p.hostRoutes(mux)
	route := func(pattern string, answer func(w http.ResponseWriter, r *http.Request, id string) (any, bool)) {
		mux.HandleFunc(pattern+"{id}", func(w http.ResponseWriter, r *http.Request) {
			p.serve(w, r, func() (any, bool) {
				if p.cfg.Local == nil {
					return nil, false
				}
				return answer(w, r, r.PathValue("id"))
			})
		})
	}
	route("GET "+observations, func(_ http.ResponseWriter, r *http.Request, id string) (any, bool) {
		return p.cfg.Local.Observation(r.Context(), id)
	})
	route("POST "+reports, func(w http.ResponseWriter, r *http.Request, id string) (any, bool) {
		var report control.AgentReport
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxReport)).Decode(&report); err != nil || report.Check() != nil {
			return nil, false
		}
		return struct{}{}, p.cfg.Local.Report(r.Context(), id, report)
	})
	route("GET "+verdicts, func(_ http.ResponseWriter, r *http.Request, _ string) (any, bool) {
		return p.cfg.Local.Verdicts(r.Context()), true
	})
	return mux
}
