// Package access says who may do what at the server: tokens, their roles, and
// the person, agent or wake call behind a request.
//
// It guarantees that a token is stored as a hash only, that a revoked or
// expired one is refused by every server as soon as the store has told it
// (by the one that revoked it at once), that comparing takes the same time
// whatever is wrong, and that the token of a machine speaks for that machine
// alone. It leaves HTTP out, and which role a call needs.
//
// A token is "lull_" + id + "_" + secret. The secret has 130 random bits, so
// that a plain SHA-256 of it is enough.
package access

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/store"
)

// Role is what a token may do. The roles of people are ordered; those of
// machines allow nothing but to speak for their machine.
type Role string

// The roles.
const (
	Viewer   Role = "viewer"
	Operator Role = "operator"
	Admin    Role = "admin"
	Agent    Role = "agent"
	Host     Role = "host"
)

var rank = map[Role]int{Viewer: 1, Operator: 2, Admin: 3}

// Covers reports whether r may do what need allows.
func (r Role) Covers(need Role) bool {
	if rank[need] == 0 {
		return r == need
	}
	return rank[r] >= rank[need]
}

// Person reports whether r is a role of people.
func (r Role) Person() bool { return rank[r] > 0 }

// Token is what is known of a token; never the token itself.
type Token struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"`
	Role      Role       `json:"role"`
	Machine   string     `json:"machine,omitempty"` // the one that an agent's or host's token speaks for
	CreatedAt time.Time  `json:"created_at"`
	CreatedBy string     `json:"created_by"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"`
	RevokedAt *time.Time `json:"revoked_at,omitempty"`
	RevokedBy string     `json:"revoked_by,omitempty"`
}

// record is a token as it is stored.
type record struct {
	Token
	Hash string `json:"hash"`
}

var codec = store.Codec[record]{Version: 1}

// prefix has the tokens; born is there once the first was made.
const (
	prefix = "access/tokens/"
	born   = "access/born"
)

// The errors of this package. ErrDenied is any token that does not count:
// what is wrong with it is not told to who presents it.
var (
	ErrDenied   = errors.New("cannot accept the token: it is unknown, expired or revoked")
	ErrNotFound = errors.New("cannot find the token")
)

// InvalidError says which field of a new token is wrong.
type InvalidError struct{ Field, Detail string }

func (e *InvalidError) Error() string { return fmt.Sprintf("cannot use %s: %s", e.Field, e.Detail) }

// Tokens are those of one fleet. It is safe for concurrent use; Run must be
// running for it to accept any.
type Tokens struct {
	store store.Store
	ready chan struct{}
	once  sync.Once

	mu   sync.RWMutex
	byID map[string]record
}

// New makes the tokens of a store.
func New(s store.Store) *Tokens {
	return &Tokens{store: s, ready: make(chan struct{}), byID: map[string]record{}}
}

// Ready closes when the tokens have been read.
func (t *Tokens) Ready() <-chan struct{} { return t.ready }

// Run follows the tokens in the store until ctx ends. fault is told of
// records that cannot be read; such a token is refused.
func (t *Tokens) Run(ctx context.Context, fault func(error)) error {
	take := func(v store.Value) {
		r, err := codec.Decode(v.Key, v.Data)
		if err != nil {
			fault(err)
			t.forget(v.Key)
			return
		}
		t.remember(r)
	}
	return store.Follow(ctx, t.store, store.Prefix(prefix), store.Follower{
		Reset: func(p store.Page) error {
			t.mu.Lock()
			clear(t.byID)
			t.mu.Unlock()
			for _, v := range p.Values {
				take(v)
			}
			t.once.Do(func() { close(t.ready) })
			return nil
		},
		Apply: func(b store.Batch) error {
			for _, e := range b.Events {
				if e.Deleted {
					t.forget(e.Value.Key)
				} else {
					take(e.Value)
				}
			}
			return nil
		},
	})
}

func (t *Tokens) forget(key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.byID, strings.TrimPrefix(key, prefix))
}

// remember keeps a record, but never lets an older one undo a revocation.
func (t *Tokens) remember(r record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if old, ok := t.byID[r.ID]; ok && old.RevokedAt != nil && r.RevokedAt == nil {
		return
	}
	t.byID[r.ID] = r
}

// Wanted is a token to be made.
type Wanted struct {
	Name    string
	Role    Role
	Machine string
	TTL     time.Duration // 0 does not expire
	By      string
}

// maxTTL bounds a token's life, and maxTokens how many there are.
const (
	maxTTL    = 10 * 366 * 24 * time.Hour
	maxTokens = 10_000
)

func (w Wanted) validate() error {
	switch {
	case w.Name == "" || len(w.Name) > 128 || strings.ContainsFunc(w.Name, func(r rune) bool { return r < ' ' }):
		return &InvalidError{"name", "it must have 1 to 128 bytes of text"}
	case !w.Role.Person() && w.Role != Agent && w.Role != Host:
		return &InvalidError{"role", fmt.Sprintf("%.20q is not viewer, operator, admin, agent or host", string(w.Role))}
	case w.Role.Person() != (w.Machine == ""):
		return &InvalidError{"machine", "an agent's or host's token names its machine, and no other does"}
	case len(w.Machine) > 128 || strings.ContainsAny(w.Machine, "/ \t\r\n"):
		return &InvalidError{"machine", "it must have at most 128 bytes, without spaces and slashes"}
	case w.TTL < 0 || w.TTL > maxTTL:
		return &InvalidError{"ttl_seconds", "it must lie between 0 and ten years"}
	}
	return nil
}

// Create makes a token and returns it in the clear, which happens only here.
// also are writes for the same transaction, as a rule the audit entry.
// Errors: InvalidError and those of the store.
func (t *Tokens) Create(ctx context.Context, w Wanted, also ...store.Op) (Token, string, error) {
	if err := w.validate(); err != nil {
		return Token{}, "", err
	}
	t.mu.RLock()
	n := len(t.byID)
	t.mu.RUnlock()
	if n >= maxTokens {
		return Token{}, "", &InvalidError{"name", fmt.Sprintf("there are %d tokens; revoke and remove some", n)}
	}
	r, clear := mint(w)
	if err := t.put(ctx, r, also); err != nil {
		return Token{}, "", err
	}
	return r.Token, clear, nil
}

func (t *Tokens) put(ctx context.Context, r record, also []store.Op) error {
	key := prefix + r.ID
	_, err := store.Update(ctx, t.store, key, func(store.Value) ([]byte, []store.Op, error) {
		data, err := codec.Encode(key, r)
		return data, also, err
	})
	if err != nil {
		return fmt.Errorf("cannot store token %q: %w", r.Name, err)
	}
	t.remember(r)
	return nil
}

func mint(w Wanted) (record, string) {
	id, secret := strings.ToLower(rand.Text()[:10]), rand.Text()
	r := record{Token: Token{ID: id, Name: w.Name, Role: w.Role, Machine: w.Machine, CreatedBy: w.By, CreatedAt: now()}, Hash: hash(secret)}
	if w.TTL > 0 {
		end := r.CreatedAt.Add(w.TTL)
		r.ExpiresAt = &end
	}
	return r, "lull_" + id + "_" + secret
}

func now() time.Time { return time.Now().UTC().Truncate(time.Second) }

func hash(secret string) string {
	sum := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(sum[:])
}

// First makes the first admin token of a fleet and returns it, or "" when
// there was one before, whatever became of it. Any number of servers may call
// it at once; one of them makes it.
func (t *Tokens) First(ctx context.Context) (string, error) {
	r, clear := mint(Wanted{Name: "first-admin", Role: Admin, By: "first start"})
	made := false
	_, err := store.Transact(ctx, t.store, []string{born, prefix + r.ID}, func(view []store.Value) ([]store.Op, error) {
		made = false
		if view[0].Exists() {
			return nil, nil
		}
		data, err := codec.Encode(prefix+r.ID, r)
		made = err == nil
		return []store.Op{store.Put(prefix+r.ID, data), store.Put(born, []byte(`{"v":1}`))}, err
	})
	if err != nil {
		return "", fmt.Errorf("cannot make the first admin token: %w", err)
	}
	if !made {
		return "", nil
	}
	t.remember(r)
	return clear, nil
}

// Revoke ends a token for good. also is as with Create.
func (t *Tokens) Revoke(ctx context.Context, id, by string, also ...store.Op) (Token, error) {
	var r record
	_, err := store.Update(ctx, t.store, prefix+id, func(old store.Value) ([]byte, []store.Op, error) {
		if !old.Exists() {
			return nil, nil, ErrNotFound
		}
		var err error
		if r, err = codec.Decode(old.Key, old.Data); err != nil {
			return nil, nil, err
		}
		if r.RevokedAt != nil {
			return old.Data, nil, nil
		}
		at := now()
		r.RevokedAt, r.RevokedBy = &at, by
		data, err := codec.Encode(old.Key, r)
		return data, also, err
	})
	if errors.Is(err, ErrNotFound) {
		return Token{}, fmt.Errorf("%w %q", ErrNotFound, id)
	}
	if err != nil {
		return Token{}, fmt.Errorf("cannot revoke token %q: %w", id, err)
	}
	t.remember(r)
	return r.Token, nil
}

// List returns all tokens, oldest first.
func (t *Tokens) List() []Token {
	t.mu.RLock()
	defer t.mu.RUnlock()
	out := make([]Token, 0, len(t.byID))
	for _, r := range slices.SortedFunc(maps.Values(t.byID), func(a, b record) int {
		return cmpOr(a.CreatedAt.Compare(b.CreatedAt), strings.Compare(a.ID, b.ID))
	}) {
		out = append(out, r.Token)
	}
	return out
}

func cmpOr(a, b int) int {
	if a != 0 {
		return a
	}
	return b
}

// Check returns what is known of a token that is presented, or ErrDenied.
func (t *Tokens) Check(now time.Time, presented string) (Token, error) {
	id, secret, ok := split(presented)
	t.mu.RLock()
	r := t.byID[id]
	t.mu.RUnlock()
	same := subtle.ConstantTimeCompare([]byte(hash(secret)), []byte(r.Hash)) == 1
	switch {
	case !ok, !same, r.RevokedAt != nil, r.ExpiresAt != nil && !now.Before(*r.ExpiresAt):
		return Token{}, ErrDenied
	}
	return r.Token, nil
}

// split takes a token apart; a malformed one gives ok false.
func split(s string) (id, secret string, ok bool) {
	rest, ok := strings.CutPrefix(s, "lull_")
	id, secret, cut := strings.Cut(rest, "_")
	if !ok || !cut || len(id) != 10 || len(secret) != 26 {
		return "", "", false
	}
	return id, secret, true
}
