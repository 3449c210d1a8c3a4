package notify

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"lull/internal/core/failure"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/channel"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/platform/smtp"
	"lull/internal/platform/webhook"
)

// message is the content of one delivery: one event, or several together.
type message struct {
	id     string
	events []event

	// For mail: only are the recipients, if not all addressees. named are all
	// addressees. held are the addressees that must wait, because an earlier mail to
	// them is pending.
	only, named []string
	held        []string
}

// event is one event, with data that is not in its entry.
type event struct {
	id    string
	name  string
	entry audit.Entry
	links map[string]string // links of a warning, by verb
	late  bool              // the announced time of the warning has passed
	page  string            // for a pause: URL of the worker's page, if known
}

// data is the data of an event in a webhook: the entry, the links of a warning, and
// after a pause the worker's page.
type data struct {
	audit.Entry
	PauseAt *time.Time        `json:"pause_at,omitempty"`
	Links   map[string]string `json:"links,omitempty"`
	Page    string            `json:"page,omitempty"` // page of the paused worker
}

// receiver sends the messages of one channel.
type receiver interface {
	send(ctx context.Context, m message) error
	close()
}

// open returns the receiver of a channel.
func (n *Notifier) open(name string, c channel.Channel, s settings.Settings) (receiver, error) {
	secret := func(field string, ref sealed.Secret) (sealed.Plain, error) {
		v, err := n.cfg.Secret(ref)
		if err != nil {
			return "", fmt.Errorf("cannot open %s of channel %q: %w", field, name, err)
		}
		return v, nil
	}
	if c.Type == channel.Mail {
		password, err := secret("the password", c.Password)
		if err != nil {
			return nil, err
		}
		client, err := smtp.New(smtp.Config{Relay: c.Relay, TLS: c.TLS, CA: c.CA, Username: c.Username, Password: password, From: c.From, Dial: n.cfg.Dial})
		if err != nil {
			return nil, err
		}
		return &mailbox{client: client, channel: c, fleet: n.cfg.Fleet, zone: s.Zone(), domain: n.cfg.Fleet.ID()}, nil
	}
	address := c.URL
	if channel.CheckAddress(address) != nil {
		opened, err := secret("the address", sealed.Secret(c.URL))
		if err != nil {
			return nil, err
		}
		address = string(opened)
		if err := channel.CheckAddress(address); err != nil {
			return nil, fmt.Errorf("cannot use the address of channel %q: %w", name, err)
		}
	}
	key, err := secret("the key", c.Key)
	if err != nil {
		return nil, err
	}
	client, err := webhook.New(webhook.Config{URL: address, Key: key, CA: c.CA, Dial: n.cfg.Dial, Agent: "lull/" + n.cfg.Version})
	if err != nil {
		return nil, err
	}
	if c.Type == channel.Slack {
		return &slackHook{client, s.Zone()}, nil
	}
	return &hook{client, "lull/" + n.cfg.Fleet.ID()}, nil
}

// hook is a webhook that accepts CloudEvents.
type hook struct {
	client *webhook.Client
	source string
}

func (h *hook) close() { h.client.Close() }

func (h *hook) send(ctx context.Context, m message) error {
	events := make([]webhook.Event, 0, len(m.events))
	for _, e := range m.events {
		d := data{Entry: e.entry, Links: e.links, Page: e.page}
		if x := e.entry.Warning; x != nil {
			d.PauseAt = &x.PauseAt
		}
		body, err := json.Marshal(d)
		if err != nil {
			return fmt.Errorf("cannot encode an event: %w", err)
		}
		ce := webhook.Event{SpecVersion: "1.0", ID: e.id, Source: h.source, Type: e.name, Time: e.entry.At.UTC(), ContentType: "application/json",
			Sequence: fmt.Sprintf("%020d", e.entry.ID), Data: body}
		if e.entry.WorkerID != "" {
			ce.Subject = "workers/" + e.entry.WorkerID
		}
		events = append(events, ce)
	}
	return h.client.Send(ctx, m.id, events...)
}

// slackHook is a Slack-compatible webhook.
type slackHook struct {
	client *webhook.Client
	zone   *time.Location
}

func (r *slackHook) close() { r.client.Close() }

func (r *slackHook) send(ctx context.Context, m message) error {
	return r.client.Text(ctx, chat(m, r.zone))
}

// mailbox sends the mail of one channel.
type mailbox struct {
	client  *smtp.Client
	channel channel.Channel
	fleet   *fleet.Fleet
	zone    *time.Location
	domain  string
}

func (b *mailbox) close() {}

func (b *mailbox) send(ctx context.Context, m message) error {
	named, err := b.addresses(ctx, m)
	if err != nil {
		return err
	}
	to := m.only
	if to == nil {
		to = slices.DeleteFunc(slices.Clone(named), func(a string) bool { return slices.Contains(m.held, a) })
	}
	part := &partly{Partly: smtp.Partly{Refused: map[string]error{}, Later: map[string]error{}}, named: named}
	if len(to) > 0 {
		subject, body := letter(m, b.zone)
		err := b.client.Send(ctx, smtp.Message{ID: m.id, Domain: b.domain, To: named, Only: to, Subject: subject, Body: body, Date: m.events[0].entry.At})
		if p, ok := errors.AsType[*smtp.Partly](err); ok {
			part.Partly = *p
		} else if err != nil {
			return err
		}
	}
	for _, a := range m.held {
		if slices.Contains(named, a) {
			part.Later[a] = errWaits
		}
	}
	if len(part.Refused)+len(part.Later) > 0 {
		return part
	}
	return nil // it was sent to all, or there is no address
}

var errWaits = errors.New("an earlier mail to that address is still being sent")

// partly is the error of a mail that some recipients did not get.
type partly struct {
	smtp.Partly
	named []string
}

// addresses returns all addressees of a message.
func (b *mailbox) addresses(ctx context.Context, m message) ([]string, error) {
	if m.named != nil {
		return m.named, nil
	}
	to := slices.Clone(b.channel.To)
	if b.channel.ToContacts {
		seen := map[string]bool{}
		for _, e := range m.events {
			if id := e.entry.WorkerID; id != "" && !seen[id] {
				seen[id] = true
				more, err := b.contacts(ctx, id)
				if err != nil {
					return nil, err
				}
				to = append(to, more...)
			}
		}
	}
	slices.Sort(to)
	return slices.Compact(to), nil
}

// contacts returns the mail addresses among a worker's contacts.
func (b *mailbox) contacts(ctx context.Context, worker string) ([]string, error) {
	w, err := b.fleet.Worker(ctx, worker)
	if _, gone := errors.AsType[*failure.NotFound](err); gone {
		return nil, nil // the other addresses get the mail
	}
	if err != nil {
		return nil, fmt.Errorf("cannot read the contacts of worker %q: %w", worker, err)
	}
	return slices.DeleteFunc(slices.Clone(w.Contacts), func(a string) bool { return !channel.IsMailAddress(a) }), nil
}

// verdictOn says whether a failure concerns one event or the whole receiver.
type verdictOn int

const (
	failsReceiver  verdictOn = iota // every message to the receiver would fail
	refusesMessage                  // only this message fails
)

func verdict(err error) verdictOn {
	if e, ok := errors.AsType[*webhook.StatusError](err); ok && e.Rejected() || smtp.Rejected(err) {
		return refusesMessage
	}
	return failsReceiver
}

// retryAfter returns the delay that the receiver requested.
func retryAfter(err error) time.Duration {
	if e, ok := errors.AsType[*webhook.StatusError](err); ok {
		return e.RetryAfter
	}
	return 0
}

// outcomeOf returns the metric label of an outcome, one of a few fixed words.
func outcomeOf(err error) string {
	if err == nil {
		return "ok"
	}
	if e, ok := errors.AsType[*webhook.StatusError](err); ok {
		return strconv.Itoa(e.Status/100) + "xx"
	}
	if n, ok := errors.AsType[net.Error](err); ok && n.Timeout() {
		return "timeout"
	}
	return "failed"
}
