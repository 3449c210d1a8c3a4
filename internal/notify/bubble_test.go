package notify_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/warning"
	"lull/internal/fleet/worker"
	"lull/internal/lib/memnet"
	"lull/internal/lib/scaletest"
	"lull/internal/notify"
	"lull/internal/store"
	"lull/internal/store/mem"
)

// peer is a receiver on an in-memory network. The function answer decides how it
// responds to each request.
type peer struct {
	mu     sync.Mutex
	answer func(n int, r *http.Request, body []byte) int // returns the status for the n-th request; 0 hangs until the client gives up, 299 accepts the message and loses the answer
	got    []seen
	tries  int
	bodies map[string]string // by webhook-id
	fault  error
}

// seen is one event in a message that the receiver accepted, even if the answer was
// lost.
type seen struct {
	id, worker, event string
	rev               int64
	at                time.Time
}

func (p *peer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the sender has disconnected
	}
	p.mu.Lock()
	p.tries++
	p.hold(r.Header.Get("Webhook-Id"), string(body))
	status := http.StatusOK
	if p.answer != nil {
		status = p.answer(p.tries, r, body)
	}
	if status == http.StatusOK || status == http.StatusNoContent || status == 299 {
		p.take(body)
	}
	p.mu.Unlock()
	switch status {
	case 0:
		<-r.Context().Done()
	case 299: // accepted, but the answer is lost
		panic(http.ErrAbortHandler)
	default:
		w.WriteHeader(status)
	}
}

// hold checks that a message ID always has the same body, and records a fault
// otherwise.
func (p *peer) hold(id, body string) {
	if id == "" {
		return
	}
	if p.bodies == nil {
		p.bodies = map[string]string{}
	}
	if old, again := p.bodies[id]; again && old != body && p.fault == nil {
		p.fault = fmt.Errorf("id %s is of two messages:\n%.300s\n%.300s", id, old, body)
	}
	p.bodies[id] = body
}

func (p *peer) take(body []byte) {
	if body[0] != '[' {
		body = slices.Concat([]byte("["), body, []byte("]"))
	}
	var events []struct {
		ID, Type, Subject string
		Data              audit.Entry
	}
	if err := json.Unmarshal(body, &events); err != nil {
		panic(err)
	}
	for _, e := range events {
		p.got = append(p.got, seen{e.ID, strings.TrimPrefix(e.Subject, "workers/"), e.Type, e.Data.ID, time.Now()})
	}
}

func (p *peer) taken() []seen {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.got)
}

// town is a store, a network with one receiver, and the events that were written.
type town struct {
	db       *mem.DB
	net      *memnet.Network
	peer     *peer
	channels string
	env      []string
	rng      *rand.Rand
	writer   store.Store
	want     []seen // every event, in the order of the log
	n        int
}

const hookSet = `{"ops":{"type":"webhook","url":"http://receiver/","key":"env:KEY"}}`

func newTown(channels string, seed uint64, env ...string) *town {
	db := mem.New(mem.Options{})
	return &town{db: db, net: &memnet.Network{}, peer: &peer{}, channels: channels, env: env, rng: rand.New(rand.NewPCG(seed, 2)), writer: db.Client()}
}

// serve runs the receiver until end is called.
func (w *town) serve() (end func(), err error) {
	l, err := w.net.Listen("receiver:80")
	if err != nil {
		return nil, err
	}
	srv := &http.Server{Handler: w.peer, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(l) }()
	return func() { srv.Close(); <-ended }, nil
}

// process is one process with a running Notifier.
type process struct {
	*notify.Notifier
	fleet  *fleet.Fleet
	client *mem.Client
	cancel context.CancelFunc
	ended  chan struct{}
}

func (w *town) notifier(ctx context.Context) (*process, error) {
	p := &process{client: w.db.Client(), ended: make(chan struct{})}
	key, err := sealed.NewSealer([]byte(strings.Repeat("k", 32)))
	if err != nil {
		return nil, err
	}
	env := settings.Layer{Source: settings.FromEnv, Values: map[string]any{"notify_channels": w.channels}}
	for _, kv := range w.env {
		name, value, _ := strings.Cut(kv, "=")
		env.Values[strings.ToLower(name)] = value
	}
	p.fleet, err = fleet.New(fleet.Options{Store: p.client, ID: "test", Seal: key, Env: env})
	if err != nil {
		return nil, err
	}
	p.Notifier, err = notify.New(notify.Config{Fleet: p.fleet, Server: "one", Secret: func(s sealed.Secret) (sealed.Plain, error) {
		return map[sealed.Secret]sealed.Plain{"env:ADDRESS": "http://receiver/", "env:KEY": sealed.Plain(strings.Repeat("k", 32))}[s], nil
	}, Dial: w.net.DialContext})
	if err != nil {
		return nil, err
	}
	ctx, p.cancel = context.WithCancel(ctx)
	go func() { defer close(p.ended); _ = p.Run(ctx) }()
	return p, nil
}

// kill ends the process like kill -9: none of its later writes reach the store.
func (p *process) kill() {
	p.client.Close()
	p.cancel()
	<-p.ended
}

// end ends the process gracefully.
func (p *process) end() {
	p.cancel()
	<-p.ended
	p.client.Close()
}

// happen writes a change of a worker and its event in one transaction.
func (w *town) happen(ctx context.Context, worker, event string) error {
	w.n++
	ops, err := audit.Ops(audit.Entry{Action: "test", Events: []string{event}, WorkerID: worker, WorkerName: worker, Detail: fmt.Sprint(w.n)})
	if err != nil {
		return err
	}
	res, err := w.writer.Commit(ctx, store.Txn{Then: append([]store.Op{store.Put("change", []byte(fmt.Sprint(w.n)))}, ops...)})
	if err == nil {
		w.want = append(w.want, seen{id: audit.EventID(ops[0].Key, 0), worker: worker, event: event, rev: res.Revision})
	}
	return err
}

// happenings writes n events of some workers, spread over a period.
func (w *town) happenings(ctx context.Context, n int, over time.Duration) error {
	for range n {
		if err := w.happen(ctx, fmt.Sprintf("w%d", w.rng.IntN(5)), audit.EventPaused); err != nil {
			return err
		}
		time.Sleep(rand.N(2 * over / time.Duration(n)))
	}
	return nil
}

// check checks that every event except the lost ones arrived, in order for each
// worker by first arrival, and that nothing else arrived.
func (w *town) check(lost ...string) error {
	if w.peer.fault != nil {
		return w.peer.fault
	}
	byID := map[string]seen{}
	next := map[string][]string{} // IDs that have not arrived yet, by worker
	for _, e := range w.want {
		byID[e.id] = e
		if !slices.Contains(lost, e.id) {
			next[e.worker] = append(next[e.worker], e.id)
		}
	}
	first := map[string]bool{}
	for i, g := range w.peer.taken() {
		e, ok := byID[g.id]
		if !ok || e.worker != g.worker || e.event != g.event || e.rev != g.rev {
			return fmt.Errorf("arrival %d is %+v, which did not happen (%+v)", i, g, e)
		}
		if first[g.id] {
			continue
		}
		first[g.id] = true
		if len(next[e.worker]) == 0 || next[e.worker][0] != g.id {
			return fmt.Errorf("arrival %d, %s of %s, is out of order: %v had to come", i, g.id, g.worker, next[e.worker])
		}
		next[e.worker] = next[e.worker][1:]
	}
	for worker, ids := range next {
		if len(ids) > 0 {
			return fmt.Errorf("%d of %d events of %s never arrived: %v", len(ids), len(w.want), worker, ids)
		}
	}
	return nil
}

// bubble runs body in a bubble, and fails the test with its error.
func bubble(t *testing.T, body func(ctx context.Context) error) {
	t.Helper()
	var err error
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		err = body(ctx)
		cancel()
	})
	if err != nil {
		t.Error(err)
	}
}

// pass lets d pass in a bubble.
func pass(d time.Duration) { time.Sleep(d) }

// said delivers an entry to a Slack channel and returns the message's text.
func said(ctx context.Context, e audit.Entry) (string, error) {
	w := newTown(`{"ops":{"type":"slack","url":"env:ADDRESS"}}`, 1, "NOTIFY_PUBLIC_URL=https://lull.example", "NOTIFY_TIME_ZONE=UTC")
	got := make(chan string, 10)
	w.peer.answer = func(_ int, _ *http.Request, body []byte) int {
		var m struct{ Text string }
		if err := json.Unmarshal(body, &m); err != nil {
			return http.StatusBadRequest
		}
		got <- m.Text
		return http.StatusOK
	}
	end, err := w.serve()
	if err != nil {
		return "", err
	}
	defer func() { end() }()
	p, err := w.notifier(ctx)
	if err != nil {
		return "", err
	}
	defer func() { p.end() }()
	time.Sleep(10 * time.Second) // until the channel has begun
	ops, err := audit.Ops(e)
	if err != nil {
		return "", err
	}
	if _, err := w.writer.Commit(ctx, store.Txn{Then: ops}); err != nil {
		return "", err
	}
	select {
	case text := <-got:
		return text, nil
	case <-time.After(time.Hour):
		return "", fmt.Errorf("nothing was said of %s", e.Action)
	}
}

// TestReceivers checks that every event is delivered, whatever the receiver does for
// an hour.
func TestReceivers(t *testing.T) {
	down := func(d time.Duration) func(w *town, n int, r *http.Request) int {
		begin := time.Time{}
		return func(w *town, n int, r *http.Request) int {
			if begin.IsZero() {
				begin = time.Now()
			}
			if time.Since(begin) < d {
				return http.StatusInternalServerError
			}
			return http.StatusOK
		}
	}
	for name, answer := range map[string]func() func(w *town, n int, r *http.Request) int{
		"well":            func() func(*town, int, *http.Request) int { return func(*town, int, *http.Request) int { return 200 } },
		"500 for an hour": func() func(*town, int, *http.Request) int { return down(time.Hour) },
		"500 each second one": func() func(*town, int, *http.Request) int {
			return func(_ *town, n int, _ *http.Request) int { return 200 + 300*(n%2) }
		},
		"hangs at times": func() func(*town, int, *http.Request) int {
			return func(_ *town, n int, _ *http.Request) int { return 200 * min(n%5, 1) }
		},
		"loses answers": func() func(*town, int, *http.Request) int {
			return func(_ *town, n int, _ *http.Request) int { return 200 + 99*(n%3/2) }
		},
		"redirects at times": func() func(*town, int, *http.Request) int {
			return func(_ *town, n int, _ *http.Request) int { return 200 + 107*(n%4/3) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			seed := rand.Uint64()
			bubble(t, func(ctx context.Context) error {
				w := newTown(hookSet, seed)
				say := answer()
				w.peer.answer = func(n int, r *http.Request, _ []byte) int { return say(w, n, r) }
				return w.hour(ctx, nil)
			})
			if t.Failed() {
				t.Logf("seed %d", seed)
			}
		})
	}
}

// hour writes events for an hour and waits until they have arrived. It calls mind
// every minute.
func (w *town) hour(ctx context.Context, mind func(minute int) error) error {
	end, err := w.serve()
	if err != nil {
		return err
	}
	defer func() { end() }()
	p, err := w.notifier(ctx)
	if err != nil {
		return err
	}
	defer func() { p.end() }()
	time.Sleep(10 * time.Second) // until the channel has begun
	for minute := range 60 {
		if err := w.happenings(ctx, 3, time.Minute); err != nil {
			return err
		}
		if mind != nil {
			if err := mind(minute); err != nil {
				return err
			}
		}
	}
	time.Sleep(2 * time.Hour)
	return w.check()
}

// TestReceiverGone checks that every event is delivered although the receiver does
// not answer for an hour, or only now and then.
func TestReceiverGone(t *testing.T) {
	for name, up := range map[string]func(minute int) bool{
		"for an hour": func(minute int) bool { return minute >= 59 },
		"restarting":  func(minute int) bool { return minute%3 != 1 },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(ctx context.Context) error {
				w := newTown(hookSet, rand.Uint64())
				p, err := w.notifier(ctx)
				if err != nil {
					return err
				}
				defer func() { p.end() }()
				time.Sleep(10 * time.Second)
				var end func()
				for minute := range 60 {
					if on := up(minute); on != (end != nil) {
						if on {
							if end, err = w.serve(); err != nil {
								return err
							}
						} else {
							end()
							end = nil
						}
					}
					if err := w.happenings(ctx, 3, time.Minute); err != nil {
						return err
					}
					l, err := p.fleet.Deliveries(ctx)
					if err != nil || len(l) != 1 || minute == 58 && name == "for an hour" && (l[0].FailingSince == nil || l[0].LastError == "" || l[0].Pending == 0) {
						return fmt.Errorf("the channel shows as %+v, %w", l, err)
					}
				}
				defer func() { end() }()
				time.Sleep(time.Hour)
				l, err := p.fleet.Deliveries(ctx)
				if err != nil || l[0].FailingSince != nil || l[0].Pending != 0 || l[0].Delivered < int64(len(w.want)) {
					return fmt.Errorf("in the end the channel shows as %+v, %w", l, err)
				}
				return w.check()
			})
		})
	}
}

// runs returns the number of runs of each random test.
func runs(t *testing.T) int { return scaletest.Count(t, "LULL_NOTIFY_KILLS", 4) }

// TestKilled checks that no event is lost although the delivering process is killed
// again and again, between the write of an event and its delivery or between that and
// the record of it. The store also loses its history and answers with errors, and a
// second process takes over.
func TestKilled(t *testing.T) {
	for range runs(t) {
		seed := rand.Uint64()
		bubble(t, func(ctx context.Context) error {
			w := newTown(hookSet, seed)
			w.peer.answer = func(n int, _ *http.Request, _ []byte) int {
				return []int{200, 200, 200, 200, 500, 0, 299}[rand.IntN(7)]
			}
			var mu sync.Mutex
			end, err := w.serve()
			if err != nil {
				return err
			}
			defer func() { end() }()
			first, err := w.notifier(ctx)
			if err != nil {
				return err
			}
			time.Sleep(10 * time.Second) // until the channel has begun
			procs := []*process{first}
			faults := func(c mem.Call) mem.Fault {
				mu.Lock()
				defer mu.Unlock()
				if c.Kind != mem.Commit || len(c.Txn.Then) == 0 {
					return mem.Fault{}
				}
				return []mem.Fault{{}, {}, {LoseAnswer: true}, {Latency: 2 * time.Second}, {Err: store.ErrAmbiguous}, {Err: store.ErrUnavailable}}[rand.IntN(6)]
			}
			for range 40 {
				if err := w.happenings(ctx, 5, time.Duration(w.rng.IntN(20)+1)*time.Second); err != nil {
					return err
				}
				switch i := w.rng.IntN(len(procs)); w.rng.IntN(6) {
				case 0, 1:
					procs[i].kill()
					if procs[i], err = w.notifier(ctx); err != nil {
						return err
					}
				case 2:
					if len(procs) < 3 {
						p, err := w.notifier(ctx)
						if err != nil {
							return err
						}
						procs = append(procs, p)
					}
				case 3:
					w.db.Compact(w.db.Revision())
					procs[i].client.Disconnect()
				case 4:
					procs[i].client.Inject(faults)
				case 5:
					procs[i].end()
					if procs[i], err = w.notifier(ctx); err != nil {
						return err
					}
				}
			}
			mu.Lock()
			for _, p := range procs {
				p.client.Inject(nil)
			}
			mu.Unlock()
			time.Sleep(3 * time.Hour)
			for _, p := range procs {
				p.end()
			}
			return w.check()
		})
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// TestRefused checks that a message that the receiver never accepts becomes a listed
// dead letter, that it delays only its own worker, and that the dead letter can be
// retried or dropped.
func TestRefused(t *testing.T) {
	bubble(t, func(ctx context.Context) error {
		w := newTown(hookSet, 1)
		bad := true
		w.peer.answer = func(_ int, _ *http.Request, body []byte) int {
			if bad && strings.Contains(string(body), `"detail":"2"`) {
				return http.StatusUnprocessableEntity
			}
			return http.StatusOK
		}
		end, err := w.serve()
		if err != nil {
			return err
		}
		defer func() { end() }()
		p, err := w.notifier(ctx)
		if err != nil {
			return err
		}
		defer func() { p.end() }()
		time.Sleep(10 * time.Second)
		for _, worker := range []string{"a", "b", "b", "a"} {
			if err := w.happen(ctx, worker, audit.EventPaused); err != nil {
				return err
			}
		}
		time.Sleep(time.Minute)
		dead, err := p.fleet.DeadLetters(ctx)
		if err != nil || len(dead) != 1 || dead[0].ID != w.want[1].id || dead[0].Tries != 3 || !strings.Contains(dead[0].Error, "422") {
			return fmt.Errorf("the dead letters are %+v, %w", dead, err)
		}
		if err := w.check(w.want[1].id); err != nil {
			return err
		}
		by := audit.Actor{Name: "ada", Kind: audit.KindUser}
		if _, err := p.fleet.RetryDead(ctx, by, "ops", dead[0].ID); err != nil {
			return err
		}
		time.Sleep(time.Minute)
		if dead, err = p.fleet.DeadLetters(ctx); err != nil || len(dead) != 1 || dead[0].Tries != 4 || dead[0].RetryAt != nil {
			return fmt.Errorf("after a retry that fails the dead letters are %+v, %w", dead, err)
		}
		bad = false
		if _, err := p.fleet.RetryDead(ctx, by, "ops", dead[0].ID); err != nil {
			return err
		}
		time.Sleep(time.Minute)
		if dead, err = p.fleet.DeadLetters(ctx); err != nil || len(dead) != 0 {
			return fmt.Errorf("after a retry that works the dead letters are %+v, %w", dead, err)
		}
		if got := w.peer.taken(); got[len(got)-1].id != w.want[1].id {
			return fmt.Errorf("the dead letter did not arrive: %+v", got)
		}
		if err := p.fleet.DropDead(ctx, by, "ops", "none"); err == nil {
			return fmt.Errorf("a dead letter that there is not was dropped")
		}
		return nil
	})
}

// TestGivenUp checks that events become dead letters if the receiver fails for longer
// than the retry time, and that newer messages still arrive.
func TestGivenUp(t *testing.T) {
	bubble(t, func(ctx context.Context) error {
		w := newTown(hookSet, 1, "NOTIFY_RETRY_MINUTES=30")
		p, err := w.notifier(ctx)
		if err != nil {
			return err
		}
		defer func() { p.end() }()
		time.Sleep(10 * time.Second)
		for range 4 {
			if err := w.happen(ctx, "a", audit.EventPaused); err != nil {
				return err
			}
			time.Sleep(15 * time.Minute)
		}
		dead, err := p.fleet.DeadLetters(ctx)
		if err != nil || len(dead) < 1 || len(dead) > 3 {
			return fmt.Errorf("the dead letters are %+v, %w", dead, err)
		}
		end, err := w.serve()
		if err != nil {
			return err
		}
		defer func() { end() }()
		time.Sleep(time.Hour)
		var lost []string
		for _, d := range dead {
			lost = append(lost, d.ID)
		}
		return w.check(lost...)
	})
}

// TestTogether checks that a digest contains the events of its period, that quiet
// hours delay all events until they end, and that neither delays a warning.
func TestTogether(t *testing.T) {
	for name, c := range map[string]struct {
		channel string
		want    []time.Duration // expected arrival after the start, by event
	}{
		"digest":     {`"digest":"1h"`, []time.Duration{time.Hour, time.Hour, 30 * time.Minute, 2 * time.Hour}},
		"quiet":      {`"quiet_hours":"00:05-06:30"`, []time.Duration{0, 6*time.Hour + 30*time.Minute, 30 * time.Minute, 6*time.Hour + 30*time.Minute}},
		"both":       {`"digest":"1h","quiet_hours":"23:00-02:00"`, []time.Duration{2 * time.Hour, 2 * time.Hour, 30 * time.Minute, 2 * time.Hour}},
		"other rule": {`"digest":"30m","urgent":["worker.paused"]`, []time.Duration{0, 10 * time.Minute, time.Hour, 70 * time.Minute}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(ctx context.Context) error {
				w := newTown(`{"ops":{"type":"webhook","url":"http://receiver/",`+c.channel+`}}`, 1)
				end, err := w.serve()
				if err != nil {
					return err
				}
				defer func() { end() }()
				p, err := w.notifier(ctx)
				if err != nil {
					return err
				}
				defer func() { p.end() }()
				// Bubbles start at midnight UTC. Wait for the next midnight, so that
				// the channel has begun.
				time.Sleep(time.Until(time.Now().Truncate(24 * time.Hour).Add(24 * time.Hour)))
				start := time.Now()
				for _, e := range []struct {
					at    time.Duration
					event string
				}{{0, audit.EventPaused}, {10 * time.Minute, audit.EventPaused}, {30 * time.Minute, audit.EventPauseWarning}, {70 * time.Minute, audit.EventPaused}} {
					time.Sleep(time.Until(start.Add(e.at)))
					if err := w.happen(ctx, "a", e.event); err != nil {
						return err
					}
				}
				time.Sleep(time.Until(start.Add(12 * time.Hour)))
				got := map[string]seen{}
				for _, g := range w.peer.taken() {
					if _, twice := got[g.id]; twice {
						return fmt.Errorf("%s arrived twice", g.id)
					}
					got[g.id] = g
				}
				for i, e := range w.want {
					late := got[e.id].at.Sub(start.Add(c.want[i]))
					if late < 0 || late > time.Minute {
						return fmt.Errorf("event %d arrived %s after the start, want %s", i, got[e.id].at.Sub(start), c.want[i])
					}
				}
				return nil
			})
		})
	}
}

// TestBacklog checks that a backlog larger than a queue is read from the log in
// parts, so that memory stays bounded.
func TestBacklog(t *testing.T) {
	bubble(t, func(ctx context.Context) error {
		w := newTown(hookSet, 1)
		p, err := w.notifier(ctx)
		if err != nil {
			return err
		}
		time.Sleep(10 * time.Second)
		p.end()
		for i := range 4500 {
			if err := w.happen(ctx, fmt.Sprint("w", i%50), audit.EventPaused); err != nil {
				return err
			}
			time.Sleep(time.Millisecond)
		}
		w.db.Compact(w.db.Revision())
		end, err := w.serve()
		if err != nil {
			return err
		}
		defer func() { end() }()
		if p, err = w.notifier(ctx); err != nil {
			return err
		}
		defer func() { p.end() }()
		time.Sleep(2 * time.Hour)
		if n := len(w.peer.taken()); n != len(w.want) {
			return fmt.Errorf("%d arrivals of %d events", n, len(w.want))
		}
		return w.check()
	})
}

// TestDigestAgain checks that a digest that is retried, by this process or the next,
// stays the same message, and that newer events go into another digest. So a receiver
// that accepted the first digest, but answered with an error for half an hour, loses
// nothing.
func TestDigestAgain(t *testing.T) {
	for range runs(t) {
		seed := rand.Uint64()
		bubble(t, func(ctx context.Context) error {
			w := newTown(`{"ops":{"type":"webhook","url":"http://receiver/","key":"env:KEY","digest":"10m"}}`, seed)
			taken := map[string]bool{} // by webhook-id; receivers drop duplicates
			w.peer.answer = func(_ int, r *http.Request, _ []byte) int {
				id, away := r.Header.Get("Webhook-Id"), time.Now().Minute()%40 < 30
				switch {
				case taken[id] && !away:
					return http.StatusAccepted // dropped as a duplicate
				case taken[id] || away && rand.IntN(3) > 0:
					return http.StatusInternalServerError
				case away:
					taken[id] = true
					return 299
				}
				return http.StatusOK
			}
			end, err := w.serve()
			if err != nil {
				return err
			}
			defer func() { end() }()
			p, err := w.notifier(ctx)
			if err != nil {
				return err
			}
			time.Sleep(10 * time.Second) // until the channel has begun
			for range 12 {
				if err := w.happenings(ctx, 5, 5*time.Minute); err != nil {
					return err
				}
				switch w.rng.IntN(4) {
				case 0:
					p.kill()
				case 1:
					p.end()
				case 2:
					w.db.Compact(w.db.Revision())
					p.client.Disconnect()
					continue
				default:
					continue
				}
				if p, err = w.notifier(ctx); err != nil {
					return err
				}
			}
			time.Sleep(12 * time.Hour)
			p.end()
			return w.check()
		})
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// TestUrgentFirst checks that a warning waits only for earlier messages about its own
// worker, while the receiver fails and when it works again. A warning that is
// delivered after its pause must say so and offer no action.
func TestUrgentFirst(t *testing.T) {
	bubble(t, func(ctx context.Context) error {
		w := newTown(`{"ops":{"type":"webhook","url":"http://receiver/","key":"env:KEY","digest":"10m"},"chat":{"type":"slack","url":"env:ADDRESS"}}`, 1, "NOTIFY_PUBLIC_URL=https://lull.example")
		down := true
		var texts []string
		w.peer.answer = func(_ int, r *http.Request, body []byte) int {
			switch {
			case down:
				return http.StatusServiceUnavailable
			case r.Header.Get("Webhook-Id") == "":
				texts = append(texts, string(body))
				return http.StatusAccepted
			}
			return http.StatusOK
		}
		end, err := w.serve()
		if err != nil {
			return err
		}
		defer func() { end() }()
		p, err := w.notifier(ctx)
		if err != nil {
			return err
		}
		defer func() { p.end() }()
		time.Sleep(10 * time.Second)
		for range 40 { // digests become due and fail, and the delays between attempts grow long
			if err := w.happen(ctx, "a", audit.EventPaused); err != nil {
				return err
			}
			time.Sleep(time.Minute)
		}
		warn := func(id string, in time.Duration) (audit.Entry, error) {
			e := audit.Entry{At: time.Now().UTC(), Action: "pause_warning", Events: []string{audit.EventPauseWarning}, WorkerID: id, WorkerName: id,
				Warning: &warning.Warning{PauseAt: time.Now().Add(in).UTC(), Action: worker.ActionStop, Reason: power.ReasonIdleTimeout}}
			ops, err := audit.Ops(e)
			if err != nil {
				return e, err
			}
			_, err = w.writer.Commit(ctx, store.Txn{Then: ops})
			return e, err
		}
		if _, err := warn("late", time.Minute); err != nil {
			return err
		}
		time.Sleep(2 * time.Minute)
		if _, err := warn("early", 5*time.Minute); err != nil {
			return err
		}
		w.peer.mu.Lock()
		down = false
		w.peer.mu.Unlock()
		back := time.Now()
		time.Sleep(time.Hour)
		w.peer.mu.Lock()
		defer w.peer.mu.Unlock()
		if w.peer.fault != nil {
			return w.peer.fault
		}
		got := w.peer.got
		early := slices.IndexFunc(got, func(g seen) bool { return g.worker == "early" })
		if len(got) != 42 || got[0].worker != "late" || early < 0 || got[early].at.Sub(back) > 31*time.Second {
			return fmt.Errorf("a warning waited: back at %s, then %d events, first %+v", back, len(got), got[0])
		}
		all := strings.Join(texts, "\n")
		for _, want := range []string{"late was to be paused at ", "because it was not in use; this warning was delayed.", "early will be paused at "} {
			if !strings.Contains(all, want) {
				return fmt.Errorf("nothing says %q: %s", want, all)
			}
		}
		for _, text := range texts {
			if strings.Contains(text, "answer/") != strings.Contains(text, "early") {
				return fmt.Errorf("links in %q", text)
			}
		}
		return nil
	})
}
