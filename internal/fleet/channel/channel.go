// Package channel defines the receivers of notifications: which events each gets and
// when, how far each has got in the audit log, and which notifications could not be
// delivered.
package channel

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/mail"
	"net/url"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/core/policy/when"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/sealed"
)

// Types of channels.
const (
	Webhook = "webhook" // CloudEvents over HTTP, signed
	Slack   = "slack"   // a Slack-compatible incoming webhook
	Mail    = "mail"    // SMTP
)

// Encryption of the connection to a mail relay.
const (
	MailStartTLS = "starttls" // the default; a relay that does not offer it is an error
	MailTLS      = "tls"      // from the first byte
	MailPlain    = "none"     // unencrypted, without a password
)

// Channel is one receiver of notifications. Every secret in it is a reference,
// file:PATH or env:NAME, so that the secret is neither in the store, nor in a
// backup, nor in an API response.
type Channel struct {
	Type string `json:"type"` // URL is an http or https address, or a reference to one. An address that is itself a secret must be a reference: every Slack-compatible one, and any with a query.
	// URL is an http or https address, or a reference to one. An address that
	// is itself a secret (every Slack-compatible one, and any with a query)
	// must be a reference.
	URL string `json:"url,omitempty"`
	// Key refers to the key that signs webhooks. If empty, they are not signed.
	Key sealed.Secret `json:"key,omitempty"`

	Relay      string        `json:"relay,omitempty"` // host:port of the mail relay
	TLS        string        `json:"tls,omitempty"`   // one of the Mail constants
	Username   string        `json:"username,omitempty"`
	Password   sealed.Secret `json:"password,omitempty"`
	From       string        `json:"from,omitempty"`
	To         []string      `json:"to,omitempty"`
	ToContacts bool          `json:"to_contacts,omitempty"` // also send to the worker's contacts

	// CA are PEM certificates that are trusted instead of the system's.
	CA string `json:"tls_ca,omitempty"`
	// Events are the names of the events to send. If empty, a webhook gets all
	// events, and users get those they can act on (see Wants).
	Events []string `json:"events,omitempty"`
	// Urgent events wait neither for a digest nor for the end of quiet hours.
	// If empty, the warning before a pause is urgent.
	Urgent []string `json:"urgent,omitempty"`
	// Digest is the interval at which all other events are sent together, from a
	// minute to a week. If empty, they are sent at once.
	Digest string `json:"digest,omitempty"`
	// QuietHours is a part of the day in which only urgent events are sent,
	// such as 22:00-07:00 in the zone of NOTIFY_TIME_ZONE.
	QuietHours string `json:"quiet_hours,omitempty"`
}

// eventNames are all names of domain events.
var eventNames = []string{audit.EventCreated, audit.EventImported, audit.EventActivity, audit.EventPaused, audit.EventResumed, audit.EventStatus, audit.EventDrained, audit.EventLicense,
	audit.EventDetection, audit.EventPauseWarning, audit.EventUnknownSignal, audit.EventLateAction, audit.EventLateActivity, audit.EventPauseCancelled, audit.EventStartWithdrawn}

// forPeople are the events that users can act on. They are the default of channels
// for users.
var forPeople = []string{audit.EventPaused, audit.EventResumed, audit.EventDrained, audit.EventPauseWarning, audit.EventPauseCancelled, audit.EventUnknownSignal, audit.EventLateAction, audit.EventLateActivity}

// Wants reports whether the channel sends an event of e. A channel for users
// without a list of events also sends failures of workers.
func (c Channel) Wants(e *audit.Entry, event string) bool {
	switch {
	case len(c.Events) > 0:
		return slices.Contains(c.Events, event)
	case c.Type == Webhook:
		return true
	}
	return slices.Contains(forPeople, event) || event == audit.EventStatus && e.To == "FAILED"
}

// IsUrgent reports whether an event is sent without delay.
func (c Channel) IsUrgent(event string) bool {
	if len(c.Urgent) == 0 {
		return event == audit.EventPauseWarning
	}
	return slices.Contains(c.Urgent, event)
}

// Due returns when a channel sends an event that happened at at, and whether it is
// sent together with others. QuietHours and the days of a digest are in zone.
func (c Channel) Due(at time.Time, event string, zone *time.Location) (due time.Time, together bool) {
	if c.IsUrgent(event) {
		return at, false
	}
	due = at
	if every, err := when.Length(c.Digest); err == nil {
		due, together = nextDigest(at, every, zone), true
	}
	if q, err := parseQuiet(c.QuietHours); err == nil && c.QuietHours != "" {
		if end, in := q.end(due, zone); in {
			due, together = end, true
		}
	}
	return due, together
}

// quiet is a part of the day in minutes from midnight. It may include midnight.
type quiet struct{ from, to int }

func parseQuiet(s string) (quiet, error) {
	from, to, ok := strings.Cut(s, "-")
	a, err := when.ParseClock(strings.TrimSpace(from))
	b, err2 := when.ParseClock(strings.TrimSpace(to))
	if !ok || err != nil || err2 != nil {
		return quiet{}, fmt.Errorf("%.40q is not two times of day like 22:00-07:00", s)
	}
	q := quiet{int(a % when.EndOfDay), int(b)}
	if q.from == q.to%int(when.EndOfDay) {
		return quiet{}, fmt.Errorf("%.40q begins and ends at the same time", s)
	}
	return q, nil
}

// nextDigest returns when a digest sends an event: at the next multiple of every on
// the zone's clock, counted from midnight; for a week, from Monday. For up to an
// hour, multiples are counted from midnight in elapsed time, so that no interval is
// longer when the clock is set back.
func nextDigest(at time.Time, every time.Duration, zone *time.Location) time.Time {
	local := at.In(zone)
	day := when.DateOf(local)
	if every <= time.Hour {
		begin, end := day.First(0, zone), day.Add(1).First(0, zone)
		due := begin.Add(at.Sub(begin).Truncate(every) + every)
		if due.After(end) && end.After(at) {
			return end
		}
		return due
	}
	const inDay = int64(when.EndOfDay)
	n := int64(every / time.Minute)
	now := (time.Date(day.Year, day.Month, day.Day, 0, 0, 0, 0, time.UTC).Unix()/86400+beforeUnix)*inDay + int64(local.Hour()*60+local.Minute())
	next := now - now%n + n
	date, clock := day.Add(int(next/inDay-now/inDay)), when.Clock(next%inDay)
	if due := date.First(clock, zone); due.After(at) {
		return due
	}
	return date.After(clock, zone) // the clock is set back before then
}

// beforeUnix is the number of days from Monday, January 1 of year 1, to January 1,
// 1970.
const beforeUnix = 719162

// end returns when the quiet hours that contain t end; false if t is outside them.
func (q quiet) end(t time.Time, zone *time.Location) (time.Time, bool) {
	t = t.In(zone)
	now := t.Hour()*60 + t.Minute()
	in, day := now >= q.from && now < q.to, 0
	if q.from > q.to {
		in = now >= q.from || now < q.to
		if now >= q.from {
			day = 1
		}
	}
	if !in {
		return t, false
	}
	last := when.DateOf(t).Add(day)
	end := last.First(when.Clock(q.to), zone)
	if !end.After(t) { // the clock is set back before then
		end = last.After(when.Clock(q.to), zone)
	}
	return end, true
}

// Most is the maximum number of channels of a fleet, because each reads the whole
// log.
const Most = 20

// Validate returns every fault of a channel. at is the field that contains the
// channel.
func (c Channel) Validate(at string) error {
	var errs []error
	bad := func(field, format string, a ...any) {
		errs = append(errs, failure.Invalidf(at+"."+field, format, a...))
	}
	switch c.Type {
	case Webhook, Slack:
		c.validateURL(bad)
		if c.Relay != "" || c.From != "" || len(c.To) > 0 || c.ToContacts || c.TLS != "" || c.Username != "" || c.Password != "" {
			bad("type", "relay, tls, username, password, from, to and to_contacts are for mail")
		}
	case Mail:
		c.validateMail(bad)
	default:
		bad("type", "%.40q is not webhook, slack or mail", c.Type)
	}
	for field, s := range map[string]sealed.Secret{"key": c.Key, "password": c.Password} {
		if s != "" && !s.IsReference() {
			bad(field, "a secret is given as file:PATH or env:NAME")
		}
	}
	if c.Key != "" && c.Type != Webhook {
		bad("key", "only a webhook can have a signing key")
	}
	for field, list := range map[string][]string{"events": c.Events, "urgent": c.Urgent} {
		for _, name := range list {
			if !slices.Contains(eventNames, name) {
				bad(field, "there is no event %.60q; known: %s", name, strings.Join(eventNames, ", "))
			}
		}
	}
	if d, err := when.Length(c.Digest); c.Digest != "" && (err != nil || d < time.Minute || d > 7*24*time.Hour) {
		bad("digest", "%.40q is not a duration from 1m to 7d", c.Digest)
	}
	if _, err := parseQuiet(c.QuietHours); c.QuietHours != "" && err != nil {
		bad("quiet_hours", "%v", err)
	}
	if c.CA != "" && (len(c.CA) > 64<<10 || !x509.NewCertPool().AppendCertsFromPEM([]byte(c.CA))) {
		bad("tls_ca", "must be PEM certificates, at most 64 KiB in all")
	}
	return errors.Join(errs...)
}

func (c Channel) validateURL(bad func(field, format string, a ...any)) {
	switch {
	case sealed.Secret(c.URL).IsReference():
	case c.Type == Slack:
		bad("url", "the address of a Slack-compatible webhook is a secret: give file:PATH or env:NAME")
	default:
		if err := CheckAddress(c.URL); err != nil {
			bad("url", "%v", err)
		} else if strings.Contains(c.URL, "?") {
			bad("url", "an address with a query may hold a secret: give file:PATH or env:NAME")
		}
	}
}

// CheckAddress returns what is wrong with the address of a webhook. The error
// never contains the address, which may be a secret.
func CheckAddress(s string) error {
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || len(s) > 2048:
		return errors.New("must be an http or https address of at most 2048 bytes")
	case u.User != nil || u.Fragment != "":
		return errors.New("the address must have no user and no fragment")
	}
	return nil
}

func (c Channel) validateMail(bad func(field, format string, a ...any)) {
	if host, port, err := net.SplitHostPort(c.Relay); err != nil || host == "" || port == "" || len(c.Relay) > 260 {
		bad("relay", "%.60q is not host:port", c.Relay)
	}
	if !slices.Contains([]string{"", MailStartTLS, MailTLS, MailPlain}, c.TLS) {
		bad("tls", "%.40q is not starttls, tls or none", c.TLS)
	}
	if c.TLS == MailPlain && c.Password != "" {
		bad("password", "with tls none it would be sent unencrypted")
	}
	if (c.Username == "") != (c.Password == "") {
		bad("username", "set both username and password, or neither")
	}
	if c.URL != "" {
		bad("url", "mail is sent through a relay and has no url")
	}
	if !IsMailAddress(c.From) {
		bad("from", "%.60q is not a mail address", c.From)
	}
	if len(c.To) == 0 && !c.ToContacts || len(c.To) > 50 {
		bad("to", "it needs 1 to 50 addresses, or to_contacts")
	}
	for _, a := range c.To {
		if !IsMailAddress(a) {
			bad("to", "%.60q is not a mail address", a)
		}
	}
}

// IsMailAddress reports whether s is a bare mail address.
func IsMailAddress(s string) bool {
	a, err := mail.ParseAddress(s)
	return err == nil && a.Address == s && len(s) <= 254 && !strings.ContainsAny(s, "\r\n")
}
