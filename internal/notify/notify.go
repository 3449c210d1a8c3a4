// Package notify delivers the events of a fleet to the configured receivers
// (NOTIFY_CHANNELS): webhooks, Slack-compatible webhooks and mail.
//
// The outbox is the audit log: an event is durable with its change, before any
// receiver gets it. One process of the fleet holds the right to deliver and keeps
// each channel's progress in the store.
//
// Every event that a channel wants arrives at least once or becomes a visible dead
// letter. A duplicate has the same ID. Events that are sent at once arrive in order
// for each worker, however often receivers, the process or the store fail in between.
// Events that wait for a digest or quiet hours stay in order among themselves, and
// urgent events overtake them. A new channel begins with the events after its
// configuration.
//
// A failing receiver delays only its own channel. A message that the receiver rejects
// delays only its own worker, and becomes a dead letter after three attempts. Package
// fleet defines the events and the answers to a warning.
package notify

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"reflect"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"lull/internal/core/failure"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/channel"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/lib/delay"
	"lull/internal/store"
)

// Config configures a Notifier. Fleet, Secret and Dial are required.
type Config struct {
	Fleet *fleet.Fleet
	// Secret resolves a reference to a secret.
	Secret func(sealed.Secret) (sealed.Plain, error)
	// Dial connects to receivers; base/outward limits the destinations.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Server names this process in the store.
	Server  string
	Version string
	Log     *slog.Logger
}

// Notifier delivers events, and tests channels. Create it with New.
type Notifier struct {
	cfg   Config
	store store.Store
	log   *slog.Logger
	count counters
}

// leaseTTL is how long after its last renewal the delivering process keeps the right
// to deliver.
const leaseTTL = 15 * time.Second

// lookEvery is the interval at which the running lines are compared with the
// settings.
const lookEvery = 2 * time.Second

// New returns a Notifier. It starts nothing.
func New(c Config) (*Notifier, error) {
	if c.Fleet == nil || c.Secret == nil || c.Dial == nil {
		return nil, errors.New("cannot make a notifier: Fleet, Secret and Dial are required")
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Notifier{cfg: c, store: c.Fleet.Store(), log: c.Log, count: newCounters()}, nil
}

// String names the notifier in errors and logs.
func (n *Notifier) String() string { return "the notifier" }

// Run delivers while this process holds the right to deliver, until ctx ends.
func (n *Notifier) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := n.hold(ctx); err != nil && ctx.Err() == nil {
			n.log.Warn("notifications wait", "err", err)
			_ = delay.For(ctx, 2*time.Second)
		}
	}
	return nil
}

// holder is the record of the delivering process.
type holder struct {
	Server string `json:"server"`
}

// hold waits for the right to deliver, and delivers until it is lost.
func (n *Notifier) hold(ctx context.Context) (err error) {
	lease, err := n.store.Grant(ctx, leaseTTL)
	if err != nil {
		return err
	}
	defer func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		if e := lease.Revoke(last); e != nil {
			n.log.Debug("lease will expire", "err", e)
		}
	}()
	data, err := (store.Codec[holder]{Version: 1}).Encode(channel.NotifierKey, holder{n.cfg.Server})
	if err != nil {
		return err
	}
	own, err := store.Campaign(ctx, n.store, lease, channel.NotifierKey, data)
	if err != nil {
		return err
	}
	held, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() { // ends when held ends
		select {
		case <-lease.Lost():
			stop(store.ErrLeaseLost)
		case <-held.Done():
		}
	}()
	return n.supervise(held, own.Guard())
}

// running is a line that runs in its own goroutine.
type running struct {
	channel channel.Channel
	set     settings.Settings
	cancel  context.CancelFunc
	retry   chan channel.DeadLetter
	ended   chan struct{}
	err     error
}

// supervise runs a line for each configured channel, and restarts a line that fails
// or whose settings changed. It returns when ctx ends or the right to deliver is
// lost.
func (n *Notifier) supervise(ctx context.Context, guard store.Cond) error {
	lines := map[string]*running{}
	defer func() {
		for _, r := range lines {
			r.cancel()
		}
		for _, r := range lines {
			<-r.ended
		}
	}()
	if err := n.forget(ctx, guard, n.cfg.Fleet.Settings()); err != nil {
		return err
	}
	dead := make(chan channel.DeadLetter)
	go n.followDead(ctx, dead)
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		set := n.cfg.Fleet.Settings()
		for name, r := range lines {
			c, wanted := set.NotifyChannels[name]
			ended := false
			select {
			case <-r.ended:
				ended = true
			default:
			}
			if wanted && !ended && reflect.DeepEqual(c, r.channel) && set.NotifyTimeZone == r.set.NotifyTimeZone && set.NotifyRetry == r.set.NotifyRetry {
				continue
			}
			r.cancel()
			<-r.ended
			delete(lines, name)
			if errors.Is(r.err, store.ErrLeaseLost) {
				return r.err
			}
			if r.err != nil {
				n.log.Error("a notification channel failed", "channel", name, "err", r.err)
			}
			if !wanted {
				n.count.forget(name)
				if err := n.forget(ctx, guard, set); err != nil {
					return err
				}
			}
		}
		for name, c := range set.NotifyChannels {
			if lines[name] == nil {
				lines[name] = n.begin(ctx, guard, name, c, set)
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case d := <-dead:
			if r := lines[d.Channel]; r != nil {
				select {
				case r.retry <- d:
				default: // the line is busy; it will find the request in the store
				}
			}
		case <-tick.C:
		}
	}
}

// forget removes the progress of channels that are no longer configured. If such a
// channel is configured again, it starts over.
func (n *Notifier) forget(ctx context.Context, guard store.Cond, set settings.Settings) error {
	page, err := store.List(ctx, n.store, channel.DeliveryKeys())
	if err != nil {
		return err
	}
	for _, v := range page.Values {
		if _, ok := set.NotifyChannels[channel.ChannelOf(v.Key)]; ok {
			continue
		}
		if _, err := n.store.Commit(ctx, store.Txn{If: []store.Cond{guard}, Then: []store.Op{store.Delete(v.Key)}}); err != nil {
			return fmt.Errorf("cannot forget channel %q: %w", channel.ChannelOf(v.Key), err)
		}
	}
	rests, err := store.List(ctx, n.store, channel.RestKeys(""))
	if err != nil {
		return err
	}
	for _, v := range rests.Values {
		if c, ok := set.NotifyChannels[channel.RestChannelOf(v.Key)]; ok && c.Type == channel.Mail {
			continue
		}
		if _, err := n.store.Commit(ctx, store.Txn{If: []store.Cond{guard}, Then: []store.Op{store.Delete(v.Key)}}); err != nil {
			return fmt.Errorf("cannot forget a mail of channel %q: %w", channel.RestChannelOf(v.Key), err)
		}
	}
	return nil
}

// begin starts a line. If a secret of the channel cannot be resolved, the channel
// keeps its position, shows the error and is retried.
func (n *Notifier) begin(ctx context.Context, guard store.Cond, name string, c channel.Channel, set settings.Settings) *running {
	ctx, cancel := context.WithCancel(ctx)
	r := &running{channel: c, set: set, cancel: cancel, retry: make(chan channel.DeadLetter, 256), ended: make(chan struct{})}
	l := &line{n: n, name: name, channel: c, set: set, guard: guard, retry: r.retry, to: &lazyReceiver{n: n, name: name, channel: c, set: set}}
	go func() { // supervise waits for ended
		defer close(r.ended)
		r.err = l.run(ctx)
	}()
	return r
}

// followDead sends dead letters whose retry was requested to out, until ctx ends.
func (n *Notifier) followDead(ctx context.Context, out chan<- channel.DeadLetter) {
	take := func(v store.Value) error {
		d, err := channel.DecodeDead(v)
		if err != nil || d.RetryAt == nil {
			return nil // the listing shows it as unreadable
		}
		select {
		case out <- d:
		case <-ctx.Done():
		}
		return nil
	}
	err := store.Follow(ctx, n.store, channel.DeadKeys(), store.Follower{
		Reset: func(p store.Page) error {
			for _, v := range p.Values {
				if err := take(v); err != nil {
					return err
				}
			}
			return nil
		},
		Apply: func(b store.Batch) error {
			for _, e := range b.Events {
				if !e.Deleted {
					if err := take(e.Value); err != nil {
						return err
					}
				}
			}
			return nil
		},
	})
	if err != nil && ctx.Err() == nil {
		n.log.Error("cannot follow retry requests for dead letters", "err", err)
	}
}

// lazyReceiver opens a channel's receiver on first use, so that an unreadable secret
// is handled like a failure of the receiver.
type lazyReceiver struct {
	n       *Notifier
	name    string
	channel channel.Channel
	set     settings.Settings

	mu sync.Mutex // messages are sent concurrently
	to receiver
}

func (l *lazyReceiver) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.to != nil {
		l.to.close()
	}
}

func (l *lazyReceiver) prepare() (receiver, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.to != nil {
		return l.to, nil
	}
	to, err := l.n.open(l.name, l.channel, l.set)
	if err == nil {
		l.to = to
	}
	return to, err
}

func (l *lazyReceiver) send(ctx context.Context, m message) error {
	to, err := l.prepare()
	if err != nil {
		return err
	}
	return to.send(ctx, m)
}

// Test sends a synthetic event to a channel at once, bypassing the outbox, and
// returns the receiver's answer as an error. Errors: NotFound, Refused.
func (n *Notifier) Test(ctx context.Context, by audit.Actor, channel string) error {
	set := n.cfg.Fleet.Settings()
	c, ok := set.NotifyChannels[channel]
	if !ok {
		return &failure.NotFound{Kind: "channel", Name: channel}
	}
	to, err := n.open(channel, c, set)
	if err == nil {
		defer to.close()
		now := time.Now().UTC()
		id := "test." + now.Format("20060102T150405.000000000")
		err = to.send(ctx, message{id: id, events: []event{{id: id, name: "test",
			entry: audit.Entry{At: now, Action: "notification_test", By: by, WorkerName: "A test", Detail: fmt.Sprintf("channel %s works", channel)}}}})
	}
	if err != nil {
		return &failure.Refused{Command: "deliver a test to", Name: channel, Reason: "not_delivered", Detail: err.Error()}
	}
	return nil
}

// message builds the message for items. Its ID is derived from its content, so the
// same items have the same ID at every attempt. Other items, or a warning that has
// become late, get another ID.
func (l *line) message(now time.Time, items []*item) message {
	m := message{}
	sum := sha256.New()
	for _, it := range items {
		e := event{id: it.id, name: it.event, entry: it.entry}
		id := it.id
		if x := it.entry.Warning; it.event == audit.EventPauseWarning && x != nil {
			if e.late = now.After(x.PauseAt); e.late {
				id += ".late"
			} else {
				e.links = l.n.cfg.Fleet.Links(it.entry.WorkerID, l.name, it.entry.At, x)
			}
		}
		if it.event == audit.EventPaused {
			e.page = l.n.cfg.Fleet.PageOf(it.entry.WorkerID)
		}
		fmt.Fprintln(sum, id)
		if m.id == "" {
			m.id = id
		}
		m.events = append(m.events, e)
	}
	if len(items) > 1 {
		m.id += ".digest." + hex.EncodeToString(sum.Sum(nil)[:6])
	}
	return m
}

// counters are the metrics of deliveries.
type counters struct {
	sent       *prometheus.CounterVec
	dead       *prometheus.CounterVec
	pending    *prometheus.GaugeVec
	delay      prometheus.Histogram
	unreadable prometheus.Counter
}

func newCounters() counters {
	return counters{
		sent: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lull_notify_messages_total",
			Help: "Messages offered to receivers, by channel and outcome."}, []string{"channel", "outcome"}),
		dead: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "lull_notify_dead_total",
			Help: "Events that became dead letters, by channel."}, []string{"channel"}),
		pending: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "lull_notify_pending",
			Help: "Events that are due and wait for delivery, by channel, on the server that delivers. What a digest or quiet hours hold back is not due."}, []string{"channel"}),
		delay: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "lull_notify_delay_seconds",
			Help: "Seconds from when an event was due to its delivery.", Buckets: []float64{.1, .5, 1, 5, 30, 60, 300, 1800, 3600, 21600, 86400}}),
		unreadable: prometheus.NewCounter(prometheus.CounterOpts{Name: "lull_notify_unreadable_total",
			Help: "Log entries that could not be read and were therefore not sent."}),
	}
}

func (c *counters) all() []prometheus.Collector {
	return []prometheus.Collector{c.sent, c.dead, c.pending, c.delay, c.unreadable}
}

// begin sets a channel's counters to zero. Without that, a counter would first appear
// with the value one, which Prometheus does not see as an increase, so the first dead
// letter would raise no alert.
func (c *counters) begin(channel string) {
	c.sent.WithLabelValues(channel, outcomeOf(nil))
	c.dead.WithLabelValues(channel)
}

// rest removes the channel's pending count from this process's metrics, because the
// next delivering process reports it.
func (c *counters) rest(channel string) { c.pending.DeleteLabelValues(channel) }

func (c *counters) forget(channel string) {
	for _, v := range []interface {
		DeletePartialMatch(prometheus.Labels) int
	}{c.sent, c.dead, c.pending} {
		v.DeletePartialMatch(prometheus.Labels{"channel": channel})
	}
}

// Describe implements prometheus.Collector.
func (n *Notifier) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range n.count.all() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (n *Notifier) Collect(ch chan<- prometheus.Metric) {
	for _, c := range n.count.all() {
		c.Collect(ch)
	}
}

// counted counts one message in the metrics.
func (l *line) counted(items []*item, err error) {
	l.n.count.sent.WithLabelValues(l.name, outcomeOf(err)).Inc()
	if err != nil {
		return
	}
	for _, it := range items {
		if !it.due.IsZero() {
			l.n.count.delay.Observe(max(0, time.Since(it.due).Seconds()))
		}
	}
}
