package notify

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/fleet/channel"
	"lull/internal/store"
)

// loadRests reads the mails that are pending for single addresses.
func (l *line) loadRests(ctx context.Context) error {
	page, err := store.List(ctx, l.n.store, channel.RestKeys(l.name))
	if err != nil {
		return fmt.Errorf("cannot read the queued mails of channel %q: %w", l.name, err)
	}
	for _, v := range page.Values {
		r, err := channel.DecodeRest(v)
		if err != nil {
			l.n.log.Error("record cannot be read", "key", v.Key, "err", err)
			l.n.count.unreadable.Inc()
			continue
		}
		l.rests = append(l.rests, &r)
	}
	slices.SortStableFunc(l.rests, func(a, b *channel.Rest) int { return a.Since.Compare(b.Since) })
	return nil
}

// held returns the addresses for which an earlier mail of a stream is pending. Later
// mails of the stream to them must wait.
func (l *line) held(stream string) []string {
	var out []string
	for _, r := range l.rests {
		if r.Stream == stream {
			out = append(out, r.To)
		}
	}
	return out
}

// firstRests returns the oldest pending mail of each stream and address.
func (l *line) firstRests() []*channel.Rest {
	var out []*channel.Rest
	busy := map[[2]string]bool{}
	for _, r := range l.rests {
		if k := [2]string{r.Stream, r.To}; !busy[k] {
			busy[k] = true
			out = append(out, r)
		}
	}
	return out
}

// split handles a mail that some recipients did not get. A recipient that was
// rejected gets a dead letter. For one that was deferred, the mail is sent again
// later to that recipient alone.
func (l *line) split(now time.Time, r outcome, p *partly) []store.Op {
	l.state.LastError = p.Error()
	var ops []store.Op
	for a, err := range p.Refused {
		for _, it := range r.items {
			ops = append(ops, l.dieFor(a, channel.RestEvent{ID: it.id, Event: it.event, Entry: it.entry}, 1, now, err)...)
		}
	}
	for a := range p.Later {
		rest := &channel.Rest{Channel: l.name, ID: r.message.id, To: a, Named: p.named, Stream: r.items[0].stream(), Since: now, NextTryAt: now.Add(l.restWait(0))}
		for _, it := range r.items {
			e := it.entry
			e.Decision = nil
			rest.Events = append(rest.Events, channel.RestEvent{ID: it.id, Event: it.event, Entry: e})
		}
		ops = append(ops, l.keep(rest)...)
		l.rests = append(l.rests, rest)
	}
	return ops
}

// restWait returns the delay after an address has deferred a mail. Mail servers that
// request a retry expect one after a minute or more.
func (l *line) restWait(tries int) time.Duration {
	return min(longestWait, time.Minute<<min(tries, 4))
}

func (l *line) keep(r *channel.Rest) []store.Op {
	op, err := channel.RestOp(r)
	if err != nil {
		l.n.log.Error("cannot store a notification", "channel", l.name, "id", r.ID, "err", err)
		return nil
	}
	l.died = true // write the progress
	return []store.Op{op}
}

// sendRests retries the mails that are pending for single addresses, and
// returns the resulting writes.
func (l *line) sendRests(ctx context.Context) []store.Op {
	var ops []store.Op
	sent := 0
	for _, r := range l.firstRests() {
		if sent == parallel || ctx.Err() != nil || time.Now().Before(r.NextTryAt) {
			continue
		}
		sent++
		more, goOn := l.sendRest(ctx, r)
		if ops = append(ops, more...); !goOn {
			break
		}
	}
	return ops
}

// sendRest sends one pending mail again, and returns the resulting writes. It returns
// false if the receiver fails for every address.
func (l *line) sendRest(ctx context.Context, r *channel.Rest) ([]store.Op, bool) {
	var items []*item
	for _, e := range r.Events {
		items = append(items, &item{id: e.ID, event: e.Event, entry: e.Entry, due: r.Since})
	}
	m := l.message(time.Now(), items)
	m.only, m.named = []string{r.To}, r.Named
	err := l.to.send(ctx, m)
	now := time.Now().UTC().Round(0)
	l.tried = now
	if ctx.Err() != nil && err != nil {
		return nil, false
	}
	part, some := errors.AsType[*partly](err)
	l.counted(items, err)
	r.Tries++
	switch {
	case err == nil:
		l.works(now)
		return l.drop(r), true
	case some && len(part.Refused) > 0 || !some && verdict(err) == refusesMessage || now.Sub(r.Since) >= l.set.NotifyRetry:
		var ops []store.Op
		for _, e := range r.Events {
			ops = append(ops, l.dieFor(r.To, e, r.Tries, now, err)...)
		}
		return append(ops, l.drop(r)...), true
	}
	r.NextTryAt = now.Add(l.restWait(r.Tries))
	if !some {
		l.fails(now, err)
	}
	return l.keep(r), some
}

func (l *line) drop(r *channel.Rest) []store.Op {
	l.rests = slices.DeleteFunc(l.rests, func(x *channel.Rest) bool { return x == r })
	l.died = true // write the progress
	return []store.Op{channel.DropRestOp(r)}
}

// dieFor returns the write of a dead letter of an event for one address.
func (l *line) dieFor(address string, e channel.RestEvent, tries int, now time.Time, why error) []store.Op {
	op, err := channel.DeadOp(channel.DeadLetter{ID: e.ID + "." + channel.AddressMark(address), Channel: l.name, Event: e.Event, Entry: e.Entry,
		To: address, Tries: tries, Error: sayWho(address, why), DiedAt: now})
	if err != nil {
		l.n.log.Error("cannot store a notification", "channel", l.name, "id", e.ID, "err", err)
		return nil
	}
	l.n.log.Error("a notification could not be delivered to an address; see lull notify dead", "channel", l.name, "address", address, "err", why)
	l.n.count.dead.WithLabelValues(l.name).Inc()
	l.died = true
	return []store.Op{op}
}

// sayWho adds the address to an error about it, unless it is named already.
func sayWho(address string, err error) string {
	if s := err.Error(); strings.Contains(s, address) {
		return s
	}
	return address + ": " + err.Error()
}
