// Package cmlconsole adapts the CML of a worker to the ports of package
// controller: telemetry, system state, licenses and notices. It keeps one client
// for each worker, so that it logs in once and not at every detection.
package cmlconsole

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"reflect"
	"regexp"
	"sync"
	"time"

	"lull/internal/controller"
	"lull/internal/fleet"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/warning"
	"lull/internal/fleet/worker"
	"lull/internal/platform/cml"
)

// Config says how consoles reach their CML.
type Config struct {
	Fleet  *fleet.Fleet                              // settings and default credentials
	Secret func(sealed.Secret) (sealed.Plain, error) // decrypts passwords
	Port   string                                    // CML's port on workers whose address has none
	// Dial connects to workers; nil means net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// Consoles keeps one CML client per worker. It is safe for concurrent use.
type Consoles struct {
	Config

	mu   sync.Mutex
	byID map[string]*console
}

// New returns an empty set of consoles.
func New(cfg Config) *Consoles { return &Consoles{Config: cfg, byID: map[string]*console{}} }

// Close closes the clients and their idle connections.
func (c *Consoles) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range c.byID {
		one.client.Close()
	}
	clear(c.byID)
}

// maxConsoles is the maximum number of cached clients. When it is reached, the cache
// is emptied.
const maxConsoles = 200_000

// console is the connection to one worker's CML.
type console struct {
	made   cml.Config // the configuration of client, to notice changes
	client *cml.Client
	fleet  *fleet.Fleet

	mu     sync.Mutex
	self   string // ID of lull's own CML user; empty until known
	known  bool
	rules  rules
	filter *cml.Filter
}

// rules are the settings from which a filter is made.
type rules struct {
	categories []string
	excluded   string
	stored     int
	self       string
}

var (
	_ controller.Console  = (*console)(nil)
	_ controller.Licenser = (*console)(nil)
	_ controller.Warner   = (*console)(nil)
)

// config returns how to reach the CML of w.
func (c *Consoles) config(w worker.Worker) (cml.Config, error) {
	s := c.Fleet.Settings()
	user, ref := w.CMLUsername, w.CMLPassword
	if user == "" {
		user = s.CMLDefaultUsername
	}
	if ref == "" {
		ref = s.CMLDefaultPassword
	}
	password, err := c.Secret(ref)
	if err != nil {
		return cml.Config{}, fmt.Errorf("cannot decrypt the CML password of worker %q: %w", w.ID, err)
	}
	u, err := url.Parse(w.HTTPSEndpoint)
	if err != nil || u.Host == "" {
		return cml.Config{}, fmt.Errorf("cannot reach the CML of worker %q: it has no address", w.ID)
	}
	if u.Port() == "" && c.Port != "443" {
		u.Host = net.JoinHostPort(u.Hostname(), c.Port)
	}
	cfg := cml.Config{URL: u.String(), Username: user, Password: password,
		TLS: cml.TLS{CA: []byte(w.TLSCA), Pin: w.TLSPin, Insecure: w.TLSInsecure}}
	if w.TLSCA == "" {
		cfg.TLS.CA = nil
	}
	cfg.Dial = c.Dial
	return cfg, nil
}

// Console returns the console of w. It is made anew if the address, credentials or
// certificate settings of w have changed.
func (c *Consoles) Console(w worker.Worker) (controller.Console, error) {
	made, err := c.config(w)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.byID[w.ID]
	cfg := made
	cfg.Dial = nil // functions cannot be compared
	if old != nil && reflect.DeepEqual(old.made, cfg) {
		return old, nil
	}
	v, err := open(c.Fleet, made)
	if err != nil {
		return nil, err
	}
	if old != nil {
		old.client.Close()
	}
	if len(c.byID) >= maxConsoles {
		clear(c.byID)
	}
	v.made = cfg
	c.byID[w.ID] = v
	return v, nil
}

// Open returns a console for the CML at cfg, with the settings of f.
func Open(f *fleet.Fleet, cfg cml.Config) (controller.Console, error) {
	c, err := open(f, cfg)
	if err != nil {
		return nil, err
	}
	return c, nil
}

func open(f *fleet.Fleet, cfg cml.Config) (*console, error) {
	client, err := cml.New(cfg)
	if err != nil {
		return nil, err
	}
	return &console{made: cfg, client: client, fleet: f}, nil
}

// filterFor returns the filter for the current settings. It excludes lull's own CML
// user, so that what lull does never counts as activity.
func (c *console) filterFor(ctx context.Context) (*cml.Filter, error) {
	s := c.fleet.Settings()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.known {
		id, err := c.client.Identity(ctx)
		if err != nil && !errors.Is(err, cml.ErrNotFound) {
			return nil, err
		}
		c.self, c.known = id.ID, true
	}
	want := rules{categories: s.WorkerActivityCategories, excluded: s.WorkerActivityExcludedUsers, stored: s.WorkerActivityEventsMaxStored, self: c.self}
	if c.filter != nil && reflect.DeepEqual(want, c.rules) {
		return c.filter, nil
	}
	cfg := cml.FilterConfig{Categories: want.categories, MaxStored: want.stored}
	if want.excluded != "" {
		re, err := regexp.Compile(want.excluded)
		if err != nil {
			return nil, fmt.Errorf("cannot use worker_activity_excluded_user_pattern: %w", err)
		}
		cfg.ExcludedUsers = re
	}
	if want.self != "" {
		cfg.ExcludedIDs = []string{want.self}
	}
	f, err := cml.NewFilter(cfg)
	if err == nil {
		c.filter, c.rules = f, want
	}
	return f, err
}

func (c *console) Telemetry(ctx context.Context, seen json.RawMessage) worker.Telemetry {
	unknown := func(err error) worker.Telemetry {
		return worker.Telemetry{CheckedAt: time.Now(), Unknown: err.Error(), Seen: seen}
	}
	f, err := c.filterFor(ctx)
	if err != nil {
		return unknown(err)
	}
	var before cml.Seen
	if len(seen) > 0 {
		if err := json.Unmarshal(seen, &before); err != nil {
			return unknown(fmt.Errorf("cannot read the stored future events: %w", err))
		}
	}
	a := c.client.Activity(ctx, f, before)
	after, err := json.Marshal(a.Seen)
	if err != nil {
		return unknown(err)
	}
	t := worker.Telemetry{CheckedAt: a.CheckedAt, Unknown: string(a.Unknown), Newest: a.Newest, Seen: after,
		Future: a.Counts.Future, Malformed: a.Counts.Malformed, Categories: a.Counts.UnknownCategories}
	if a.Err != nil {
		t.Unknown = string(a.Unknown) + ": " + a.Err.Error()
	}
	for _, e := range a.Recent {
		t.Recent = append(t.Recent, worker.Event{Category: e.Category, Timestamp: e.At, Data: e.Data})
	}
	return t
}

// System reads CML's own status. Parts that cannot be read are left unknown; it is an
// error only if version and readiness cannot be read.
func (c *console) System(ctx context.Context) (controller.System, error) {
	info, err := c.client.Information(ctx)
	if err != nil {
		return controller.System{}, err
	}
	s := controller.System{Version: info.Version, Ready: info.Ready}
	if stats, err := c.client.Stats(ctx); err == nil {
		if n, ok := stats.RunningNodes(); ok {
			s.Nodes = &n
		}
		if b, err := json.Marshal(stats.All); err == nil {
			s.Info = b
		}
	}
	if labs, err := c.client.CountLabs(ctx); err == nil {
		s.Labs, s.Running = &labs.Labs, &labs.Started
	}
	return s, nil
}

func (c *console) RunningLabs(ctx context.Context) (int, error) {
	n, err := c.client.CountLabs(ctx)
	return n.Started, err
}

func (c *console) Register(ctx context.Context, token sealed.Plain, reregister bool) error {
	return licenseError(c.client.Register(ctx, token, reregister))
}

// licenseError wraps err with controller.ErrRefused if CML rejected the request
// itself. An unreachable CML, or one whose current state does not allow the request,
// has not refused it.
func licenseError(err error) error {
	for _, kind := range []error{cml.ErrBadRequest, cml.ErrUnauthorized} {
		if errors.Is(err, kind) {
			return fmt.Errorf("%w: %w", controller.ErrRefused, err)
		}
	}
	return err
}

func (c *console) State(ctx context.Context) (controller.LicenseState, error) {
	l, err := c.client.Licensing(ctx)
	if err != nil {
		return controller.LicenseState{}, err
	}
	if l.Registration.Status == "" {
		return controller.LicenseState{}, fmt.Errorf("cannot read the license of the CML at %s: no registration status in its answer", c.made.URL)
	}
	outcome, why := l.Outcome()
	return controller.LicenseState{Done: outcome == cml.OutcomeDone, Failed: outcome == cml.OutcomeFailed, None: l.None(), Seat: l.Seat(), Detail: why,
		Registration: l.Registration.Status, Authorization: l.Authorization.Status}, nil
}

func (c *console) Deregister(ctx context.Context) (bool, error) {
	d, err := c.client.Deregister(ctx)
	return d == cml.DeregisteredLocally, licenseError(err)
}

// noticeLabel marks lull's notices, so that they can be found if their IDs are
// unknown.
const noticeLabel = "lull: this machine is about to go down"

// Warn shows a notice in CML's own pages. It replaces lull's earlier notices.
func (c *console) Warn(ctx context.Context, x warning.Warning) (string, error) {
	if err := c.Withdraw(ctx, ""); err != nil {
		return "", err
	}
	text := x.Sentence("This machine", c.fleet.Settings().Zone()) + "."
	if !x.Forced {
		text += " Use it to keep it running."
	}
	if x.Action != "terminate" {
		text += " Disks are kept."
	}
	return c.client.PostNotice(ctx, cml.Notice{Level: "WARNING", Label: noticeLabel, Enabled: true, Content: text})
}

// Withdraw removes the notice id; if id is empty, all of lull's notices.
func (c *console) Withdraw(ctx context.Context, id string) error {
	if id != "" {
		return c.client.DeleteNotice(ctx, id)
	}
	all, err := c.client.Notices(ctx)
	if err != nil {
		return err
	}
	for _, n := range all {
		if n.Label != noticeLabel {
			continue
		}
		if err := c.client.DeleteNotice(ctx, n.ID); err != nil {
			return err
		}
	}
	return nil
}
