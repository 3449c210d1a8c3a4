package channel_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"lull/internal/core/policy/when/whentest"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/channel"
	"lull/internal/fleet/settings"
	"lull/internal/lib/errtest"
)

func channels(t testing.TB, text string) (settings.Settings, error) {
	t.Helper()
	s, _, err := settings.Resolve(settings.Layer{Source: settings.FromStored, Values: map[string]any{"notify_channels": text}})
	return s, err
}

// TestChannelFaults checks that the error for an invalid channel names the field, and
// never repeats what may be a secret.
func TestChannelFaults(t *testing.T) {
	for text, want := range map[string]string{
		`{"a":{"type":"fax"}}`:                                                                                          "notify_channels.a.type",
		`{"a b":{"type":"webhook","url":"https://x/"}}`:                                                                 "notify_channels.a b",
		`{"a":{"type":"webhook"}}`:                                                                                      "notify_channels.a.url",
		`{"a":{"type":"webhook","url":"ftp://x/"}}`:                                                                     "notify_channels.a.url",
		`{"a":{"type":"webhook","url":"https://u:s3cret@x/"}}`:                                                          "notify_channels.a.url",
		`{"a":{"type":"webhook","url":"https://x/?token=s3cret"}}`:                                                      "notify_channels.a.url",
		`{"a":{"type":"webhook","url":"https://x/","key":"s3cret"}}`:                                                    "notify_channels.a.key",
		`{"a":{"type":"slack","url":"https://x/s3cret"}}`:                                                               "notify_channels.a.url",
		`{"a":{"type":"slack","url":"env:U","key":"env:K"}}`:                                                            "notify_channels.a.key",
		`{"a":{"type":"webhook","url":"https://x/","to":["a@b"]}}`:                                                      "notify_channels.a.type",
		`{"a":{"type":"mail","relay":"r:25","from":"a@b","to":["c@d"],"password":"s3cret"}}`:                            "notify_channels.a.password",
		`{"a":{"type":"mail","relay":"r","from":"a@b","to":["c@d"]}}`:                                                   "notify_channels.a.relay",
		`{"a":{"type":"mail","relay":"r:25","from":"A <a@b>","to":["c@d"]}}`:                                            "notify_channels.a.from",
		`{"a":{"type":"mail","relay":"r:25","from":"a@b"}}`:                                                             "notify_channels.a.to",
		`{"a":{"type":"mail","relay":"r:25","from":"a@b","to":["c@d\r\nBcc: e@f"]}}`:                                    "notify_channels.a.to",
		`{"a":{"type":"mail","relay":"r:25","tls":"none","from":"a@b","to":["c@d"],"username":"u","password":"env:P"}}`: "notify_channels.a.password",
		`{"a":{"type":"webhook","url":"https://x/","events":["worker.exploded"]}}`:                                      "notify_channels.a.events",
		`{"a":{"type":"webhook","url":"https://x/","digest":"1s"}}`:                                                     "notify_channels.a.digest",
		`{"a":{"type":"webhook","url":"https://x/","quiet_hours":"22-7"}}`:                                              "notify_channels.a.quiet_hours",
		`{"a":{"type":"webhook","url":"https://x/","tls_ca":"no"}}`:                                                     "notify_channels.a.tls_ca",
		`{"a":{"type":"webhook","url":"https://x/","colour":"red"}}`:                                                    "colour",
		`[]`:   "notify_channels",
		`{} x`: "notify_channels",
	} {
		_, err := channels(t, text)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: %v, want %s named", text, err, want)
		}
	}
	many := map[string]any{}
	for i := range 21 {
		many["c"+string(rune('a'+i))] = map[string]any{"type": "webhook", "url": "https://x/"}
	}
	b, err := json.Marshal(many)
	errtest.None(t, err)
	if _, err := channels(t, string(b)); err == nil || !strings.Contains(err.Error(), fmt.Sprint(channel.Most)) {
		t.Errorf("21 channels: %v", err)
	}
	for _, v := range []map[string]any{{"notify_public_url": "lull.example.com"}, {"notify_public_url": "https://x/?a"}, {"notify_public_url": "https://x/"},
		{"notify_time_zone": "Middle/Earth"}} {
		if _, _, err := settings.Resolve(settings.Layer{Source: settings.FromStored, Values: v}); err == nil {
			t.Errorf("%v is taken", v)
		}
	}
}

// TestDue checks when events are sent, around midnight and clock changes, and that
// urgent events are not delayed.
func TestDue(t *testing.T) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	errtest.None(t, err)
	c := channel.Channel{Type: channel.Mail, QuietHours: "22:00-07:00"}
	for at, want := range map[string]string{
		"2026-07-01T12:00:00+02:00": "2026-07-01T12:00:00+02:00",
		"2026-07-01T21:59:59+02:00": "2026-07-01T21:59:59+02:00",
		"2026-07-01T22:00:00+02:00": "2026-07-02T07:00:00+02:00",
		"2026-07-02T06:59:59+02:00": "2026-07-02T07:00:00+02:00",
		"2026-07-02T07:00:00+02:00": "2026-07-02T07:00:00+02:00",
		"2026-03-28T23:00:00+01:00": "2026-03-29T07:00:00+02:00", // summer time begins in between
		"2026-10-24T23:00:00+02:00": "2026-10-25T07:00:00+01:00", // summer time ends in between
	} {
		when, err := time.Parse(time.RFC3339, at)
		errtest.None(t, err)
		due, together := c.Due(when, audit.EventPaused, berlin)
		if got := due.In(berlin).Format(time.RFC3339); got != want || together == (got == when.In(berlin).Format(time.RFC3339)) {
			t.Errorf("%s is due %s (together %t), want %s", at, got, together, want)
		}
		if due, together := c.Due(when, audit.EventPauseWarning, berlin); !due.Equal(when) || together {
			t.Errorf("a warning at %s is due %s", at, due)
		}
	}
}

// TestQuietHoursEnd checks that quiet hours end after the delayed event, at a time
// that is outside them on the clock, even around clock changes that skip or repeat
// times.
func TestQuietHoursEnd(t *testing.T) {
	from, to := time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2028, 1, 1, 0, 0, 0, 0, time.UTC)
	whentest.Changes(t, from, to, func(zone *time.Location, change time.Time) {
		for _, hours := range []string{"22:00-00:00", "20:00-00:30", "00:00-02:15", "23:30-07:00"} {
			c := channel.Channel{Type: channel.Mail, QuietHours: hours}
			for at := change.Add(-5 * time.Hour); at.Before(change.Add(5 * time.Hour)); at = at.Add(15 * time.Minute) {
				due, held := c.Due(at, audit.EventPaused, zone)
				if !held {
					continue
				}
				if again, still := c.Due(due, audit.EventPaused, zone); still || !due.After(at) || due.Sub(at) > 12*time.Hour {
					t.Fatalf("in quiet hours %s of %s, what happens at %s is due at %s, and that at %s", hours, zone, at.In(zone), due, again)
				}
			}
		}
	})
}

// TestDigestDays checks that a digest ends on the clock of its zone, even around
// clock changes, and is never much longer than configured.
func TestDigestDays(t *testing.T) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	errtest.None(t, err)
	for _, c := range []struct{ every, at, want string }{
		{"1d", "2026-07-01T12:00:00+02:00", "2026-07-02T00:00:00+02:00"},
		{"1d", "2026-07-01T00:00:00+02:00", "2026-07-02T00:00:00+02:00"},
		{"1d", "2026-07-01T23:59:59+02:00", "2026-07-02T00:00:00+02:00"},
		{"24h", "2026-03-28T12:00:00+01:00", "2026-03-29T00:00:00+01:00"},
		{"1d", "2026-03-29T12:00:00+02:00", "2026-03-30T00:00:00+02:00"},
		{"1d", "2026-10-25T12:00:00+01:00", "2026-10-26T00:00:00+01:00"},
		{"7d", "2026-10-21T12:00:00+02:00", "2026-10-26T00:00:00+01:00"}, // a Monday
		{"12h", "2026-10-25T00:30:00+02:00", "2026-10-25T12:00:00+01:00"},
		{"4h", "2026-03-29T01:00:00+01:00", "2026-03-29T04:00:00+02:00"},
		{"1h", "2026-10-25T02:30:00+02:00", "2026-10-25T02:00:00+01:00"},
		{"15m", "2026-07-01T12:14:59+02:00", "2026-07-01T12:15:00+02:00"},
	} {
		at, err := time.Parse(time.RFC3339, c.at)
		errtest.None(t, err)
		due, together := channel.Channel{Type: channel.Mail, Digest: c.every}.Due(at, audit.EventPaused, berlin)
		if got := due.In(berlin).Format(time.RFC3339); got != c.want || !together {
			t.Errorf("with a digest of %s what happens at %s is due %s, want %s", c.every, c.at, got, c.want)
		}
	}
	from, to := time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2028, 1, 1, 0, 0, 0, 0, time.UTC)
	whentest.Changes(t, from, to, func(zone *time.Location, change time.Time) {
		for every, longest := range map[string]time.Duration{"10m": 10 * time.Minute, "1h": time.Hour, "2h": 6 * time.Hour, "12h": 15 * time.Hour, "1d": 50 * time.Hour} {
			c := channel.Channel{Type: channel.Mail, Digest: every}
			for at := change.Add(-30 * time.Hour); at.Before(change.Add(30 * time.Hour)); at = at.Add(30 * time.Minute) {
				due, _ := c.Due(at, audit.EventPaused, zone)
				if !due.After(at) || due.Sub(at) > longest {
					t.Fatalf("with a digest of %s in %s what happens at %s is due %s", every, zone, at.In(zone), due.In(zone))
				}
			}
		}
	})
}

// TestQuietGrammar checks that quiet hours are written like other times of day.
func TestQuietGrammar(t *testing.T) {
	day := time.Date(2026, 7, 1, 0, 0, 0, 0, time.UTC)
	for hours, want := range map[string]time.Duration{"18:00-24:00": 24 * time.Hour, "8:00-20:00": 20 * time.Hour, "18:00 - 7:00": 31 * time.Hour, "24:00-20:00": 20 * time.Hour} {
		s, err := channels(t, `{"a":{"type":"webhook","url":"https://x/","quiet_hours":"`+hours+`"}}`)
		if err != nil {
			t.Errorf("%s is refused: %v", hours, err)
			continue
		}
		if due, _ := s.NotifyChannels["a"].Due(day.Add(19*time.Hour), audit.EventPaused, time.UTC); due.Sub(day) != want {
			t.Errorf("in quiet hours %s what happens at 19:00 is due %s", hours, due)
		}
	}
	for _, hours := range []string{"00:00-24:00", "24:00-00:00", "7:00-7:00", "25:00-7:00", "7:60-8:00", "7-8"} {
		if _, err := channels(t, `{"a":{"type":"webhook","url":"https://x/","quiet_hours":"`+hours+`"}}`); err == nil {
			t.Errorf("%s is taken", hours)
		}
	}
}

// TestWants checks that channels for users get the events that users can act on, and
// webhooks all events.
func TestWants(t *testing.T) {
	failed := &audit.Entry{To: "FAILED"}
	for _, c := range []struct {
		channel channel.Channel
		entry   *audit.Entry
		event   string
		want    bool
	}{
		{channel.Channel{Type: channel.Webhook}, &audit.Entry{}, audit.EventActivity, true},
		{channel.Channel{Type: channel.Mail}, &audit.Entry{}, audit.EventActivity, false},
		{channel.Channel{Type: channel.Mail}, &audit.Entry{}, audit.EventPauseWarning, true},
		{channel.Channel{Type: channel.Slack}, &audit.Entry{}, audit.EventStatus, false},
		{channel.Channel{Type: channel.Slack}, failed, audit.EventStatus, true},
		{channel.Channel{Type: channel.Webhook, Events: []string{audit.EventPaused}}, failed, audit.EventStatus, false},
	} {
		if got := c.channel.Wants(c.entry, c.event); got != c.want {
			t.Errorf("%s wants %s: %t", c.channel.Type, c.event, got)
		}
	}
}

// FuzzChannels checks that no text crashes the parser, and that accepted
// settings are accepted again.
func FuzzChannels(f *testing.F) {
	for _, s := range []string{`{}`, `null`, `{"a":null}`, `{"a":{"type":"webhook","url":"https://x/","quiet_hours":"22:00-07:00","digest":"1h"}}`, `{"a":{"type":"webhook","url":"https://x/","digest":"1d"}}`,
		`{"a":{"type":"mail","relay":"[::1]:25","from":"a@b","to":["c@d"]}}`, `{"a":{"type":"slack","url":"env:X"}}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := channels(t, text)
		if err != nil {
			return
		}
		b, err := json.Marshal(s.NotifyChannels)
		errtest.None(t, err)
		if _, err := channels(t, string(b)); err != nil {
			t.Errorf("%s is taken, and %s is not: %v", text, b, err)
		}
		for _, c := range s.NotifyChannels {
			at := time.Unix(1_800_000_000, 0)
			if due, _ := c.Due(at, audit.EventPaused, time.UTC); due.Before(at) || due.Sub(at) > 9*24*time.Hour {
				t.Errorf("%+v makes %s of %s", c, due, at)
			}
		}
	})
}
