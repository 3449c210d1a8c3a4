package notify_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/fleet/audit"
	"lull/internal/fleet/channel"
	"lull/internal/sim/smtpsim"
	"lull/internal/store"
)

// mailTown returns a town whose receiver is a mail relay.
func mailTown(channel string, recipient func(string) string) (w *town, relay *smtpsim.Relay, end func(), err error) {
	w = newTown(`{"ops":{"type":"mail","relay":"relay:25","tls":"none","from":"lull@example.com",`+channel+`}}`, 1, "NOTIFY_RETRY_MINUTES=180")
	l, err := w.net.Listen("relay:25")
	if err != nil {
		return nil, nil, nil, err
	}
	relay = &smtpsim.Relay{Recipient: recipient}
	ended := make(chan struct{})
	go func() { defer close(ended); relay.Serve(l) }()
	return w, relay, func() { l.Close(); <-ended }, nil
}

// had returns the details of the events that an address received, in order.
func had(relay *smtpsim.Relay, address string) (out []string) {
	for _, m := range relay.Mails() {
		if !slices.Contains(m.To, address) {
			continue
		}
		for line := range strings.SplitSeq(m.Body, "\n") {
			if _, n, ok := strings.Cut(strings.TrimSpace(line), "is being paused: "); ok {
				out = append(out, strings.TrimSuffix(n, "."))
			}
		}
	}
	return out
}

// What the relay does with an address.
const (
	missing = "there is no such mailbox"
	full    = "the mailbox is full"
)

// TestOneBadAddress checks that an address that fails, permanently or for some time,
// does not prevent the others from getting each mail once and in time, directly or in
// a digest. An event that never arrives must become a dead letter for that address.
// What arrives must be in order, even if the sending process is killed in between.
func TestOneBadAddress(t *testing.T) {
	for name, digest := range map[string]string{"at once": ``, "digest": `,"digest":"5m"`} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(ctx context.Context) error {
				asked := map[string]time.Time{}
				w, relay, end, err := mailTown(`"to":["ada@example.com","later@example.com","never@example.com","refused@example.com"]`+digest, func(a string) string {
					if asked[a].IsZero() {
						asked[a] = time.Now()
					}
					switch {
					case strings.HasPrefix(a, "refused@"):
						return "550 " + missing
					case strings.HasPrefix(a, "never@"):
						return "452 " + full
					case strings.HasPrefix(a, "later@") && time.Since(asked[a]) < 20*time.Minute:
						return "451 try again"
					}
					return ""
				})
				if err != nil {
					return err
				}
				defer func() { end() }()
				p, err := w.notifier(ctx)
				if err != nil {
					return err
				}
				pass(10 * time.Second) // until the channel has begun
				var want []string
				for i := range 8 {
					if err := w.happen(ctx, "a", audit.EventPaused); err != nil {
						return err
					}
					want = append(want, fmt.Sprint(i+1))
					pass(6 * time.Minute)
					if got := had(relay, "ada@example.com"); !slices.Equal(got, want) {
						return fmt.Errorf("after %d events ada has %v", i+1, got)
					}
					if i%3 == 1 {
						p.kill()
						if p, err = w.notifier(ctx); err != nil {
							return err
						}
					}
				}
				pass(8 * time.Hour)
				defer func() { p.end() }()
				for address, has := range map[string][]string{"ada@example.com": want, "later@example.com": want, "never@example.com": nil, "refused@example.com": nil} {
					if got := had(relay, address); !slices.Equal(got, has) {
						return fmt.Errorf("%s has %v, want %v", address, got, has)
					}
				}
				dead, err := p.fleet.DeadLetters(ctx)
				to := map[string]int{}
				for _, d := range dead {
					to[d.To]++
					if !strings.Contains(d.Error, full) && !strings.Contains(d.Error, missing) {
						return fmt.Errorf("a dead letter is %+v", d)
					}
				}
				if err != nil || !maps.Equal(to, map[string]int{"never@example.com": 8, "refused@example.com": 8}) {
					return fmt.Errorf("the dead letters are %v, %w", to, err)
				}
				l, err := p.fleet.Deliveries(ctx)
				if err != nil || l[0].Pending != 0 || l[0].FailingSince != nil {
					return fmt.Errorf("the channel shows as %+v, %w", l, err)
				}
				rests, err := store.List(ctx, w.writer, channel.RestKeys(""))
				if err != nil || len(rests.Values) != 0 {
					return fmt.Errorf("%d mails are left, %w", len(rests.Values), err)
				}
				return w.sendAgain(ctx, p, relay, dead[0])
			})
		})
	}
}

// sendAgain retries a dead letter of one address. It checks that the address refuses
// it again and that no other address gets it.
func (w *town) sendAgain(ctx context.Context, p *process, relay *smtpsim.Relay, d channel.DeadLetter) error {
	before := len(relay.Mails())
	if _, err := p.fleet.RetryDead(ctx, audit.Actor{Name: "ada", Kind: audit.KindUser}, d.Channel, d.ID); err != nil {
		return err
	}
	pass(time.Minute)
	dead, err := p.fleet.DeadLetters(ctx)
	i := slices.IndexFunc(dead, func(x channel.DeadLetter) bool { return x.ID == d.ID })
	if err != nil || i < 0 || dead[i].Tries != d.Tries+1 || dead[i].RetryAt != nil || len(relay.Mails()) != before {
		return fmt.Errorf("sent again, it is %+v (%d mails), %w", dead, len(relay.Mails())-before, err)
	}
	return nil
}

// TestMailIsTheSame checks that a mail has the same Message-ID whenever it is sent
// again, to whichever recipient.
func TestMailIsTheSame(t *testing.T) {
	bubble(t, func(ctx context.Context) error {
		w, relay, end, err := mailTown(`"to":["ada@example.com","bob@example.com"],"digest":"5m"`, func(a string) string {
			if rand.IntN(2) == 0 {
				return "451 try again"
			}
			return ""
		})
		if err != nil {
			return err
		}
		defer func() { end() }()
		p, err := w.notifier(ctx)
		if err != nil {
			return err
		}
		defer func() { p.end() }()
		pass(10 * time.Second)
		if err := w.happenings(ctx, 30, time.Hour); err != nil {
			return err
		}
		pass(6 * time.Hour)
		bodies := map[string]string{}
		for _, m := range relay.Mails() {
			id := m.Head.Get("Message-ID")
			text := m.Head.Get("To") + m.Subject + m.Body
			if old, again := bodies[id]; again && old != text {
				return fmt.Errorf("%s is of two mails:\n%s\n%s", id, old, text)
			}
			bodies[id] = text
		}
		for _, address := range []string{"ada@example.com", "bob@example.com"} {
			if got := had(relay, address); len(got) != len(w.want) {
				return fmt.Errorf("%s has %d of %d events", address, len(got), len(w.want))
			}
		}
		return nil
	})
}
