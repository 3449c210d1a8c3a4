package fleet

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"lull/internal/core/failure"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/store"
)

// requestPrefix begins the keys of requests.
const requestPrefix = "requests/"

// Request is a command that only the owner of a worker can carry out. It stays in the
// store until it is answered, or for RequestTTL.
type Request struct {
	ID         string               `json:"id"`
	Kind       string               `json:"kind"` // RequestDetect or RequestReconcile
	WorkerID   string               `json:"worker_id"`
	By         audit.Actor          `json:"by"`
	At         time.Time            `json:"at"`
	Force      bool                 `json:"force,omitempty"`
	AnsweredAt *time.Time           `json:"answered_at,omitempty"`
	Detect     *worker.DetectResult `json:"detect,omitempty"`
	Error      string               `json:"error,omitempty"`
}

// Kinds of requests, and how long one is kept.
const (
	RequestDetect    = "detect-idle"
	RequestReconcile = "reconcile"
	RequestTTL       = 10 * time.Minute
)

// RequestKeys returns the keys of all requests to owners.
func RequestKeys() store.Keys { return store.Prefix(requestPrefix) }

var requestCodec = store.Codec[Request]{Version: 1}

// DecodeRequest decodes a request from a watch or a listing.
func DecodeRequest(v store.Value) (Request, error) { return requestCodec.Decode(v.Key, v.Data) }

// AskOwner writes a request for the owner of a worker. Await returns the answer.
// Errors: NotFound, Invalid.
func (f *Fleet) AskOwner(ctx context.Context, by audit.Actor, kind, worker string, force bool) (Request, error) {
	if _, err := f.Worker(ctx, worker); err != nil {
		return Request{}, err
	}
	if kind != RequestDetect && kind != RequestReconcile {
		return Request{}, failure.Invalidf("kind", "%.40q is not a kind of request", kind)
	}
	r := Request{ID: strings.ToLower(rand.Text()), Kind: kind, WorkerID: worker, By: by, At: time.Now().UTC().Round(0), Force: force}
	_, err := store.Update(ctx, f.store, requestPrefix+r.ID, func(store.Value) ([]byte, []store.Op, error) {
		data, err := requestCodec.Encode(requestPrefix+r.ID, r)
		return data, nil, err
	})
	return r, err
}

// Request reads the current state of a request. Errors: NotFound.
func (f *Fleet) Request(ctx context.Context, id string) (Request, error) {
	if err := failure.CheckName("request", id); err != nil {
		return Request{}, err
	}
	v, err := store.Get(ctx, f.store, requestPrefix+id)
	if errors.Is(err, store.ErrNotFound) {
		return Request{}, &failure.NotFound{Kind: "request", Name: id}
	}
	if err != nil {
		return Request{}, fmt.Errorf("cannot read request %q: %w", id, err)
	}
	return DecodeRequest(v)
}

// Await waits until a request is answered or ctx ends. In the latter case it
// returns the unanswered request without an error.
func (f *Fleet) Await(ctx context.Context, r Request) (Request, error) {
	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	batches := f.store.Watch(watch, store.Key(requestPrefix+r.ID), 0)
	for {
		now, err := f.Request(context.WithoutCancel(ctx), r.ID)
		if err != nil || now.AnsweredAt != nil {
			return now, err
		}
		select {
		case <-ctx.Done():
			return now, nil
		case b, ok := <-batches:
			if !ok || b.Err != nil {
				return now, nil
			}
		}
	}
}

// Answer writes the owner's answer to a request.
func (f *Fleet) Answer(ctx context.Context, r Request) error {
	now := time.Now().UTC().Round(0)
	r.AnsweredAt = &now
	key := requestPrefix + r.ID
	_, err := store.Update(ctx, f.store, key, func(old store.Value) ([]byte, []store.Op, error) {
		if !old.Exists() {
			return nil, nil, nil
		}
		data, err := requestCodec.Encode(key, r)
		return data, nil, err
	}, f.guards...)
	return err
}

// DropRequest removes a request that is older than RequestTTL.
func (f *Fleet) DropRequest(ctx context.Context, id string) error {
	_, err := store.Update(ctx, f.store, requestPrefix+id, func(store.Value) ([]byte, []store.Op, error) {
		return nil, nil, nil
	}, f.guards...)
	return err
}
