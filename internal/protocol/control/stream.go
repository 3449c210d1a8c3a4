package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"time"

	"lull/internal/fleet/audit"
	"lull/internal/lib/delay"
	"lull/internal/lib/httpx"
)

// Events configures the reading of the event stream.
type Events struct {
	WorkerID string
	// After is the ID of the last entry already read; 0 means to begin now.
	After int64
	// Each is called for every entry, Reset for every notice that entries may be
	// missing. If one returns an error, the stream ends with that error. Reset
	// may be nil.
	Each  func(audit.Entry) error
	Reset func(reason string) error
	// Started is called each time the stream is connected. It may be nil.
	Started func()
}

// maxEvent limits an event, in bytes.
const maxEvent = 2 << 20

// callbackError marks an error returned by a callback.
type callbackError struct{ err error }

func (e *callbackError) Error() string { return e.err.Error() }

// Follow reads the stream until ctx ends. It reconnects if the connection breaks,
// and resumes after the last event received, so that no event is missed or
// repeated. It returns the errors of Each and Reset, and a *httpx.Problem if a
// retry would not help.
func (c *Client) Follow(ctx context.Context, e Events) error {
	at := e.After
	for try := 0; ; try++ {
		begun, err := c.follow(ctx, e, &at)
		if begun {
			try = 0
		}
		own, mine := errors.AsType[*callbackError](err)
		p, refused := errors.AsType[*httpx.Problem](err)
		switch {
		case ctx.Err() != nil:
			return nil
		case mine:
			return own.err
		case refused && p.Status < 500:
			return err
		case try >= 8 && !begun:
			return err
		}
		if delay.For(ctx, min(5*time.Second, 50*time.Millisecond<<min(try, 7))) != nil {
			return nil
		}
	}
}

// follow reads the stream over one connection. begun reports whether the stream
// was opened.
func (c *Client) follow(ctx context.Context, e Events, at *int64) (begun bool, err error) {
	q := url.Values{}
	if e.WorkerID != "" {
		q.Set("worker_id", e.WorkerID)
	}
	stream, err := c.open(ctx, api+"/events?"+q.Encode(), lastID(*at))
	if err != nil {
		return false, err
	}
	defer stream.Close()
	if e.Started != nil {
		e.Started()
	}
	return true, read(stream, at, e)
}

// read passes each event of a stream to e and stores the last ID in at. Events
// before an ID belong to the same change. They are passed on when the ID arrives,
// so that a change arrives either completely or again over the next connection.
func read(body io.Reader, at *int64, e Events) error {
	var held []audit.Entry
	for ev, err := range httpx.ReadEvents(body, maxEvent) {
		if err != nil {
			return err
		}
		var id int64
		if ev.ID != "" {
			if id, err = strconv.ParseInt(ev.ID, 10, 64); err != nil {
				return fmt.Errorf("cannot read the stream: id %.40q is not a number", ev.ID)
			}
		}
		if ev.Name == "event" {
			var entry audit.Entry
			if err := json.Unmarshal(ev.Data, &entry); err != nil {
				return fmt.Errorf("cannot read an event: %w", err)
			}
			held = append(held, entry)
		}
		if id > 0 {
			if err := deliver(ev, held, e); err != nil {
				return &callbackError{err}
			}
			*at, held = id, nil
		}
	}
	return io.ErrUnexpectedEOF
}

func deliver(ev httpx.Event, held []audit.Entry, e Events) error {
	for _, entry := range held {
		if err := e.Each(entry); err != nil {
			return err
		}
	}
	if ev.Name != "reset" || e.Reset == nil {
		return nil
	}
	var r Reset
	if err := json.Unmarshal(ev.Data, &r); err != nil {
		return fmt.Errorf("cannot read a reset: %w", err)
	}
	return e.Reset(r.Reason)
}
