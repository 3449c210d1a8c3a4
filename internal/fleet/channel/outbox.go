package channel

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/fleet/audit"
	"lull/internal/store"
)

// The outbox is the audit log itself: an event is part of the entry of its change,
// and so of the same transaction. Only the progress of each channel and the
// undeliverable events are stored separately.

// Outbox gives access to the channels' progress in a store.
type Outbox struct {
	store    store.Store
	channels func() map[string]Channel
	guards   []store.Cond
}

// NewOutbox returns the outbox in a store. channels returns those that are
// configured.
func NewOutbox(s store.Store, channels func() map[string]Channel, guards ...store.Cond) *Outbox {
	return &Outbox{s, channels, guards}
}

// Delivery is the progress of a channel. Every event that the channel wants is done
// if its revision is at most Cursor or its ID is in Ahead: it was delivered or has
// become a dead letter.
type Delivery struct {
	Channel string           `json:"channel"`
	Cursor  int64            `json:"cursor"`
	Ahead   map[string]int64 `json:"ahead,omitempty"` // IDs with their revisions
	Batch   *Batch           `json:"batch,omitempty"`

	// The following fields are for display.
	Type            string     `json:"type"`
	Pending         int        `json:"pending"`   // number of events known to be pending; more may follow
	Delivered       int64      `json:"delivered"` // number of messages since the channel was created
	Dead            int        `json:"dead"`      // number of dead letters, counted for a listing
	LastDeliveredAt *time.Time `json:"last_delivered_at"`
	FailingSince    *time.Time `json:"failing_since"`
	LastError       string     `json:"last_error,omitempty"`
	NextTryAt       *time.Time `json:"next_try_at"`
}

// Batch is the combined message that is being sent. It is stored before the first
// attempt and never changes until the receiver has it. If an answer is lost, exactly
// the same message is sent again.
type Batch struct {
	Items []string `json:"items"` // IDs of the events
	UpTo  int64    `json:"up_to"` // revision of the last event
}

// Rest is a mail that some of its addresses have accepted and one has not yet.
type Rest struct {
	Channel string `json:"channel"`
	ID      string `json:"id"` // ID of the message
	To      string `json:"to"`
	// Named are all recipients of the mail. Stream identifies the mails that are sent
	// in order: a worker's, or the digests.
	Named     []string    `json:"named"`
	Stream    string      `json:"stream"`
	Events    []RestEvent `json:"events"`
	Tries     int         `json:"tries"`
	Since     time.Time   `json:"since"`
	NextTryAt time.Time   `json:"next_try_at"`
}

// RestEvent is an event in a Rest. Its entry lacks the decision, which mails do not
// show.
type RestEvent struct {
	ID    string      `json:"id"`
	Event string      `json:"event"`
	Entry audit.Entry `json:"entry"`
}

// DeadLetter is an event that could not be delivered. It stays until a user
// requests another attempt or drops it.
type DeadLetter struct {
	ID      string      `json:"id"`
	Channel string      `json:"channel"`
	Event   string      `json:"event"`
	Entry   audit.Entry `json:"entry"`
	Tries   int         `json:"tries"`
	Error   string      `json:"error"`
	// To is the address that did not get the event, if other addresses did. The ID
	// then ends with AddressMark(To).
	To     string    `json:"to,omitempty"`
	DiedAt time.Time `json:"died_at"`
	// RetryAt is when a user requested another attempt; nil if none is requested.
	RetryAt *time.Time `json:"retry_at"`
}

var (
	deliveryCodec = store.Codec[Delivery]{Version: 1}
	deadCodec     = store.Codec[DeadLetter]{Version: 1}
	restCodec     = store.Codec[Rest]{Version: 1}
)

const (
	deliveryPrefix = "notify/channels/"
	deadPrefix     = "notify/dead/"
	restPrefix     = "notify/rests/"
)

// NotifierKey is held by the one process of the fleet that delivers.
const NotifierKey = "notify/holder"

// DeliveryKey returns the key of a channel's Delivery.
func DeliveryKey(channel string) string { return deliveryPrefix + channel }

// DeliveryKeys returns the keys of all deliveries.
func DeliveryKeys() store.Keys { return store.Prefix(deliveryPrefix) }

// ChannelOf returns the channel of a Delivery's key.
func ChannelOf(key string) string { return strings.TrimPrefix(key, deliveryPrefix) }

// DeadKeys returns the keys of all dead letters.
func DeadKeys() store.Keys { return store.Prefix(deadPrefix) }

func deadKey(channel, id string) string { return deadPrefix + channel + "/" + id }

// DecodeDelivery decodes a Delivery. It returns nil if v does not exist.
func DecodeDelivery(v store.Value) (*Delivery, error) {
	if !v.Exists() {
		return nil, nil
	}
	d, err := deliveryCodec.Decode(v.Key, v.Data)
	return &d, err
}

// DeliveryOp returns the write of d.
func DeliveryOp(d Delivery) (store.Op, error) {
	data, err := deliveryCodec.Encode(DeliveryKey(d.Channel), d)
	return store.Put(DeliveryKey(d.Channel), data), err
}

// DecodeDead decodes a dead letter from a watch or a listing.
func DecodeDead(v store.Value) (DeadLetter, error) { return deadCodec.Decode(v.Key, v.Data) }

// DeadOp returns the write of d.
func DeadOp(d DeadLetter) (store.Op, error) {
	key := deadKey(d.Channel, d.ID)
	data, err := deadCodec.Encode(key, d)
	return store.Put(key, data), err
}

// RestKeys returns the keys of a channel's rests, or of all channels' if
// channel is empty.
func RestKeys(channel string) store.Keys {
	if channel == "" {
		return store.Prefix(restPrefix)
	}
	return store.Prefix(restPrefix + channel + "/")
}

// RestChannelOf returns the channel of a Rest's key.
func RestChannelOf(key string) string {
	channel, _, _ := strings.Cut(strings.TrimPrefix(key, restPrefix), "/")
	return channel
}

func restKey(r *Rest) string { return restPrefix + r.Channel + "/" + r.ID + "." + AddressMark(r.To) }

// AddressMark returns a short name for a mail address, for use in IDs.
func AddressMark(address string) string {
	sum := sha256.Sum256([]byte(address))
	return hex.EncodeToString(sum[:6])
}

// DecodeRest decodes a rest from a listing.
func DecodeRest(v store.Value) (Rest, error) { return restCodec.Decode(v.Key, v.Data) }

// RestOp returns the write of r.
func RestOp(r *Rest) (store.Op, error) {
	data, err := restCodec.Encode(restKey(r), *r)
	return store.Put(restKey(r), data), err
}

// DropRestOp returns the deletion of a rest.
func DropRestOp(r *Rest) store.Op { return store.Delete(restKey(r)) }

// DropOp returns the deletion of a dead letter.
func DropOp(d DeadLetter) store.Op { return store.Delete(deadKey(d.Channel, d.ID)) }

// Deliveries lists the configured channels, by name, with their progress. A channel
// that has not begun has zero values.
func (o *Outbox) Deliveries(ctx context.Context) ([]Delivery, error) {
	page, err := store.List(ctx, o.store, DeliveryKeys())
	if err != nil {
		return nil, fmt.Errorf("cannot list the channels: %w", err)
	}
	dead, err := store.List(ctx, o.store, DeadKeys())
	if err != nil {
		return nil, fmt.Errorf("cannot count the dead letters: %w", err)
	}
	died := map[string]int{}
	for _, v := range dead.Values {
		channel, _, _ := strings.Cut(strings.TrimPrefix(v.Key, deadPrefix), "/")
		died[channel]++
	}
	set := o.channels()
	out := []Delivery{}
	for _, v := range page.Values {
		d, err := DecodeDelivery(v)
		if err != nil {
			return nil, err
		}
		if _, ok := set[d.Channel]; ok {
			out = append(out, *d)
		}
	}
	for name, c := range set {
		if !slices.ContainsFunc(out, func(d Delivery) bool { return d.Channel == name }) {
			out = append(out, Delivery{Channel: name, Type: c.Type})
		}
	}
	for i := range out {
		out[i].Dead = died[out[i].Channel]
	}
	slices.SortFunc(out, func(a, b Delivery) int { return strings.Compare(a.Channel, b.Channel) })
	return out, nil
}

// DeadLetters lists the events that could not be delivered, by channel, oldest first.
func (o *Outbox) DeadLetters(ctx context.Context) ([]DeadLetter, error) {
	page, err := store.List(ctx, o.store, DeadKeys())
	if err != nil {
		return nil, fmt.Errorf("cannot list the dead letters: %w", err)
	}
	out := []DeadLetter{}
	for _, v := range page.Values {
		d, err := DecodeDead(v)
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// RetryDead requests another attempt to send a dead letter.
func (o *Outbox) RetryDead(ctx context.Context, by audit.Actor, channel, id string) (DeadLetter, error) {
	var out DeadLetter
	err := o.changeDead(ctx, by, "dead_letter_retried", channel, id, func(d *DeadLetter) bool {
		now := time.Now().UTC().Round(0)
		d.RetryAt = &now
		out = *d
		return true
	})
	return out, err
}

// DropDead permanently removes a dead letter.
func (o *Outbox) DropDead(ctx context.Context, by audit.Actor, channel, id string) error {
	return o.changeDead(ctx, by, "dead_letter_dropped", channel, id, func(*DeadLetter) bool { return false })
}

func (o *Outbox) changeDead(ctx context.Context, by audit.Actor, action, channel, id string, fn func(*DeadLetter) (keep bool)) error {
	if err := errors.Join(failure.CheckName("channel", channel), failure.CheckName("id", id)); err != nil {
		return err
	}
	key := deadKey(channel, id)
	_, err := store.Update(ctx, o.store, key, func(old store.Value) ([]byte, []store.Op, error) {
		if !old.Exists() {
			return nil, nil, &failure.NotFound{Kind: "dead letter", Name: channel + "/" + id}
		}
		d, err := DecodeDead(old)
		if err != nil {
			return nil, nil, err
		}
		ops, err := audit.Ops(audit.Entry{Action: action, By: by, Detail: channel + "/" + id, WorkerID: d.Entry.WorkerID, WorkerName: d.Entry.WorkerName})
		if err != nil {
			return nil, nil, err
		}
		var data []byte
		if fn(&d) {
			if data, err = deadCodec.Encode(key, d); err != nil {
				return nil, nil, err
			}
		}
		return data, ops, nil
	}, o.guards...)
	return err
}
