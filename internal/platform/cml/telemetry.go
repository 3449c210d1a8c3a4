package cml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

// OptedIn reports whether CML may collect telemetry at all. An answer without the
// flag is an error, not false.
func (c *Client) OptedIn(ctx context.Context) (bool, error) {
	k := call{op: "read telemetry opt-in", method: http.MethodGet, path: "/telemetry"}
	var v struct {
		OptIn *bool `json:"opt_in"`
	}
	if _, _, err := c.fetch(ctx, k, &v); err != nil {
		return false, err
	}
	if v.OptIn == nil {
		return false, &Error{Op: k.op, Host: c.host, Kind: ErrBadAnswer, Err: errors.New("opt_in is missing")}
	}
	return *v.OptIn, nil
}

// Activity reads the opt-in and then the whole telemetry history, through f. seen
// is the Seen of the last reading of this worker.
//
// It never returns an error: a failure is an Activity with a Reason, so that no
// caller can overlook it. If the history was not read at all, Seen is returned
// unchanged. The history of a host that is not opted in is not requested.
func (c *Client) Activity(ctx context.Context, f *Filter, seen Seen) Activity {
	unknown := func(r Reason, err error) Activity {
		return Activity{CheckedAt: time.Now(), Unknown: r, Err: err, Seen: seen}
	}
	in, err := c.OptedIn(ctx)
	switch {
	case err != nil:
		reason := reasonOfCall(err)
		if reason == ReasonRefused {
			reason = ReasonOptInUnknown
		}
		return unknown(reason, err)
	case !in:
		return unknown(ReasonNotOptedIn, fmt.Errorf("cannot determine the activity of CML at %s: telemetry is not opted in", c.host))
	}
	ctx, cancel := context.WithTimeout(ctx, c.events)
	defer cancel()
	a, err := c.history(ctx)
	if err != nil {
		return unknown(reasonOfCall(err), err)
	}
	defer a.Body.Close()
	activity := f.read(a.Body, a.received, a.offset, seen)
	activity.seal(time.Now())
	if activity.Err != nil {
		activity.Err = fmt.Errorf("cannot determine the activity of CML at %s: %w", c.host, activity.Err)
	}
	return activity
}

// RawEvents writes the telemetry history as sent by CML, at most limit bytes,
// to w. It is for diagnosis; idleness is judged from Activity.
func (c *Client) RawEvents(ctx context.Context, w io.Writer, limit int64) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, c.events)
	defer cancel()
	a, err := c.history(ctx)
	if err != nil {
		return 0, err
	}
	defer a.Body.Close()
	n, err := io.Copy(w, io.LimitReader(a.Body, limit))
	if err != nil {
		return n, fmt.Errorf("cannot copy telemetry events of CML at %s: %w", c.host, err)
	}
	return n, nil
}

func (c *Client) history(ctx context.Context) (*answer, error) {
	return c.send(ctx, call{op: "read telemetry events", method: http.MethodGet, path: "/telemetry/events"})
}

// reasonOfCall maps a failed call to a reason for an unknown signal.
func reasonOfCall(err error) Reason {
	switch {
	case errors.Is(err, ErrUnreachable):
		return ReasonUnreachable
	case errors.Is(err, ErrUnauthorized):
		return ReasonUnauthorized
	}
	return ReasonRefused
}

// Identity is the client's account.
type Identity struct {
	ID       string `json:"id"`
	Username string `json:"username"`
	Admin    bool   `json:"admin"`
}

// Identity returns the account of the client, so that its own requests can be
// excluded from the activity by user ID.
func (c *Client) Identity(ctx context.Context) (Identity, error) {
	k := call{
		op: "read our identity", method: http.MethodPost, path: "/auth_extended",
		body: credentials{c.username, string(c.password)}, open: true,
	}
	var v Identity
	_, _, err := c.fetch(ctx, k, &v)
	if errors.Is(err, ErrNotFound) { // only CML 2.10 and later has this for a session
		k = call{op: k.op, method: http.MethodGet, path: "/authentication"}
		_, _, err = c.fetch(ctx, k, &v)
	}
	if err != nil {
		return Identity{}, err
	}
	if v.ID == "" {
		return Identity{}, &Error{Op: k.op, Host: c.host, Kind: ErrBadAnswer, Err: errors.New("id is missing")}
	}
	v.Username = cmp.Or(v.Username, c.username)
	return v, nil
}
