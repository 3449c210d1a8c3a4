package access

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"strings"
	"time"

	"lull/internal/store"
)

// linkPrefix is the key prefix of sign-in links, by the id of their token.
const linkPrefix = "access/links/"

// link is a sign-in link as stored. A token has at most one; the next replaces
// it.
type link struct {
	Hash      string     `json:"hash"`
	ExpiresAt time.Time  `json:"expires_at"`
	UsedAt    *time.Time `json:"used_at,omitempty"`
}

var linkCodec = store.Codec[link]{Version: 1}

// The reasons for refusing a sign-in link. ErrLinkUnknown covers a wrong link, a
// replaced one, and one whose token is no longer valid.
var (
	ErrLinkUsed    = errors.New("cannot sign in: this link was used before, and is valid once")
	ErrLinkExpired = errors.New("cannot sign in: this link has expired")
	ErrLinkUnknown = errors.New("cannot sign in: this link is not valid")
)

// SessionTTL is the lifetime of a session from a sign-in link.
const SessionTTL = 12 * time.Hour

// Link creates a link's secret, which opens one session with the rights of a token,
// within ttl. The store keeps only its hash. It fails if the token is unknown,
// revoked or a machine's.
func (t *Tokens) Link(ctx context.Context, token string, ttl time.Duration) (string, error) {
	secret := rand.Text()
	key := linkPrefix + token
	_, err := store.Transact(ctx, t.store, []string{prefix + token, key}, func(view []store.Value) ([]store.Op, error) {
		if _, err := valid(view[0], time.Now()); err != nil {
			return nil, err
		}
		data, err := linkCodec.Encode(key, link{Hash: hash(secret), ExpiresAt: now().Add(ttl)})
		return []store.Op{store.Put(key, data)}, err
	})
	if err != nil {
		return "", fmt.Errorf("cannot make a sign-in link: %w", err)
	}
	return token + "_" + secret, nil
}

// valid returns a stored token of a user, or ErrLinkUnknown if it admits no user.
func valid(v store.Value, at time.Time) (record, error) {
	if !v.Exists() {
		return record{}, ErrLinkUnknown
	}
	r, err := codec.Decode(v.Key, v.Data)
	switch {
	case err != nil:
		return r, err
	case !r.Role.OfUsers() || r.ended(at):
		return r, ErrLinkUnknown
	}
	return r, nil
}

// SignIn uses up a sign-in link and returns the plaintext token of the session that
// it opens. The session has the role of the link's token and ends with that token.
// also returns writes for the same transaction. Errors: ErrLinkUsed, ErrLinkExpired,
// ErrLinkUnknown and those of the store; after any of them nothing has changed.
func (t *Tokens) SignIn(ctx context.Context, at time.Time, presented string, also func(Token) ([]store.Op, error)) (Token, string, error) {
	parent, secret, ok := strings.Cut(presented, "_")
	if !ok || len(parent) != 10 || len(secret) != 26 || strings.Contains(parent, "/") {
		return Token{}, "", ErrLinkUnknown
	}
	var r record
	var clear string
	key := linkPrefix + parent
	_, err := store.Transact(ctx, t.store, []string{prefix + parent, key}, func(view []store.Value) ([]store.Op, error) {
		of, err := valid(view[0], at)
		if err != nil {
			return nil, err
		}
		if !view[1].Exists() {
			return nil, ErrLinkUnknown
		}
		l, err := linkCodec.Decode(key, view[1].Data)
		switch {
		case err != nil:
			return nil, err
		case subtle.ConstantTimeCompare([]byte(hash(secret)), []byte(l.Hash)) != 1:
			return nil, ErrLinkUnknown
		case l.UsedAt != nil:
			return nil, ErrLinkUsed
		case !at.Before(l.ExpiresAt):
			return nil, ErrLinkExpired
		}
		r, clear = mint(Wanted{Name: of.Name + " (sign-in link)", Role: of.Role, TTL: SessionTTL, By: of.Name})
		r.Parent = parent
		used := at.UTC()
		l.UsedAt = &used
		spent, err := linkCodec.Encode(key, l)
		data, terr := codec.Encode(prefix+r.ID, r)
		more, merr := also(r.Token)
		return append([]store.Op{store.Put(key, spent), store.Put(prefix+r.ID, data)}, more...), errors.Join(err, terr, merr)
	})
	if err != nil {
		return Token{}, "", err
	}
	t.remember(r)
	return r.Token, clear, nil
}

// FirstID reads the ID of the first admin token from the store; "" if that token is
// no longer valid.
func (t *Tokens) FirstID(ctx context.Context) (string, error) {
	all, err := t.store.Range(ctx, store.Query{Keys: store.Prefix(prefix)})
	if err != nil {
		return "", fmt.Errorf("cannot read the tokens: %w", err)
	}
	for _, v := range all.Values {
		if r, err := valid(v, time.Now()); err == nil && r.Name == firstName && r.CreatedBy == firstBy {
			return r.ID, nil
		}
	}
	return "", nil
}
