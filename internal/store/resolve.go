package store

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"
)

// ResolveTime is how long Update and Transact continue to determine the outcome
// of a write after the caller's context has ended.
const ResolveTime = 3 * time.Second

// scanRevisions limits how many revisions are read one by one if the key with the
// write ID was deleted meanwhile.
const scanRevisions = 256

// resolve determines the outcome of an attempt whose answer was lost. The write may
// still be in transit. Its absence is final only once one of its keys has changed,
// because its conditions then fail. Until then, resolve sends the same transaction
// again.
func (a *attempt) resolve(ctx context.Context, s Store, cause error) (Result, bool, error) {
	look := context.WithoutCancel(ctx)
	look, cancel := context.WithCancel(look)
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(ResolveTime, cancel)
		context.AfterFunc(look, func() { timer.Stop() })
	})()
	for try := 0; ; try++ {
		res, err := s.Commit(look, Txn{Read: a.txn.Read})
		if err == nil {
			var out outcome
			if out, err = a.compare(look, s, res); err == nil {
				switch out.what {
				case applied:
					res.Revision = out.revision
					return res, true, nil
				case impossible:
					return res, false, ctxErr(ctx)
				}
				if err := a.lost(res); err != nil {
					return res, false, err
				}
				if ctx.Err() != nil {
					return Result{}, false, cause
				}
				res, err = s.Commit(ctx, a.txn)
				if err == nil && res.Succeeded {
					return res, true, nil
				}
			}
		}
		if err != nil && !errors.Is(err, ErrUnavailable) && !errors.Is(err, ErrAmbiguous) {
			return Result{}, false, fmt.Errorf("cannot determine the outcome of a write: %w: %w", ErrAmbiguous, err)
		}
		if err := pause(look, try); err != nil {
			return Result{}, false, cause
		}
	}
}

func ctxErr(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return fmt.Errorf("cannot finish the update: %w: %w", ErrUnavailable, context.Cause(ctx))
}

type outcome struct {
	what     int
	revision int64
}

const (
	undecided  = iota // not applied yet, but still possible
	applied           // at outcome.revision
	impossible        // not applied, and its conditions can no longer hold
)

// compare derives the outcome of the attempt from the state in res.
func (a *attempt) compare(ctx context.Context, s Store, res Result) (outcome, error) {
	changed := a.changed(res)
	if a.marker == "" {
		return a.lookDeleted(res, changed)
	}
	now := res.Read[len(res.Read)-1]
	revision, err := a.find(ctx, s, now, res.Revision)
	switch {
	case err != nil:
		return outcome{}, err
	case revision > 0:
		return outcome{applied, revision}, nil
	case changed:
		return outcome{what: impossible}, nil
	}
	return outcome{what: undecided}, nil
}

// lookDeleted judges an attempt that only deletes. If its one key has been deleted
// since, the attempt counts as applied, even if another client deleted the key.
// Several deletes cannot be told from those of other clients.
func (a *attempt) lookDeleted(res Result, changed bool) (outcome, error) {
	if !changed {
		return outcome{what: undecided}, nil
	}
	op := a.txn.Then[0]
	if len(a.txn.Then) == 1 {
		for i, c := range a.txn.If[:a.keys] {
			if v := res.Read[i]; c.Key == op.Key {
				if !v.Exists() || v.CreateRevision > a.base {
					return outcome{applied, res.Revision}, nil
				}
				return outcome{what: impossible}, nil
			}
		}
	}
	return outcome{}, fmt.Errorf("cannot tell who deleted %q", op.Key)
}

// find searches for the attempt's ID in the history of its marker after the attempt's
// base, newest first. It returns the revision, or 0 if there is none.
func (a *attempt) find(ctx context.Context, s Store, v Value, newest int64) (int64, error) {
	for v.Exists() {
		if v.ModRevision <= a.base {
			return 0, nil
		}
		if writeID(v.Data) == a.id {
			return v.ModRevision, nil
		}
		newest = v.ModRevision - 1
		if newest <= a.base {
			return 0, nil
		}
		var err error
		if v, err = readAt(ctx, s, a.marker, newest); err != nil {
			return 0, err
		}
	}
	if newest-a.base > scanRevisions {
		return 0, fmt.Errorf("cannot search %d revisions of %q", newest-a.base, a.marker)
	}
	for r := a.base + 1; r <= newest; r++ {
		v, err := readAt(ctx, s, a.marker, r)
		if err != nil {
			return 0, err
		}
		if writeID(v.Data) == a.id {
			return v.ModRevision, nil
		}
	}
	return 0, nil
}

func readAt(ctx context.Context, s Store, key string, revision int64) (Value, error) {
	page, err := s.Range(ctx, Query{Keys: Key(key), Revision: revision})
	if err != nil || len(page.Values) == 0 {
		return Value{Key: key}, err
	}
	return page.Values[0], nil
}

// A write ID is the first member of a JSON object, in exactly this form, so that it
// can be found and removed without parsing.
const (
	idPrefix = `{"w":"`
	idLength = 26
)

// addWriteID returns data with a new write ID, which replaces an earlier one. ok is
// false if data is not a JSON object.
func addWriteID(data []byte) (id string, marked []byte, ok bool) {
	data = bytes.TrimSpace(StripWriteID(data))
	if len(data) < 2 || data[0] != '{' {
		return "", nil, false
	}
	rest := bytes.TrimLeft(data[1:], " \t\r\n")
	id = rand.Text()
	marked = make([]byte, 0, len(idPrefix)+idLength+2+len(rest))
	marked = append(marked, idPrefix...)
	marked = append(marked, id...)
	marked = append(marked, '"')
	if len(rest) > 0 && rest[0] != '}' {
		marked = append(marked, ',')
	}
	return id, append(marked, rest...), true
}

// writeID returns the write ID in data, or "".
func writeID(data []byte) string {
	end := len(idPrefix) + idLength
	if len(data) < end+2 || !bytes.HasPrefix(data, []byte(idPrefix)) || data[end] != '"' || !endsMember(data[end+1:]) {
		return ""
	}
	return string(data[len(idPrefix):end])
}

// StripWriteID returns data without the write ID that Update added. Data without an
// ID is returned unchanged.
func StripWriteID(data []byte) []byte {
	if writeID(data) == "" {
		return data
	}
	rest := data[len(idPrefix)+idLength+1:]
	if rest[0] == ',' {
		rest = rest[1:]
	}
	return append([]byte{'{'}, rest...)
}
