// Package access authenticates callers of the server: it holds the tokens, their
// roles, and the user, agent or wake call that each stands for.
//
// A token is stored only as a hash. A revoked or expired token is refused by every
// server as soon as the store reports it, and at once by the server that revoked it.
// Comparing takes the same time whatever is wrong with a token. A machine's token is
// valid for that machine only. The caller reads HTTP and decides which role a call
// needs.
//
// A token is "lull_" + id + "_" + secret. The secret has 130 random bits, so a plain
// SHA-256 of it is sufficient.
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

// Role determines what a token permits. The roles of users are ordered: each includes
// the previous one. Those of machines only permit a machine to report.
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

// Covers reports whether r includes the permissions of need.
func (r Role) Covers(need Role) bool {
	if rank[need] == 0 {
		return r == need
	}
	return rank[r] >= rank[need]
}

// OfUsers reports whether r is a role of users.
func (r Role) OfUsers() bool { return rank[r] > 0 }

// Token describes a token, without its secret.
type Token struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"`
	Role      Role       `json:"role"`
	Machine   string     `json:"machine,omitempty"` // the machine that an agent's or host's token belongs to
	CreatedAt time.Time  `json:"created_at"`
	CreatedBy string     `json:"created_by"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"`
	RevokedAt *time.Time `json:"revoked_at,omitempty"`
	RevokedBy string     `json:"revoked_by,omitempty"`
	// Parent is the ID of the token whose sign-in link opened this session. The
	// session ends with that token. Empty for a token that is no session.
	Parent string `json:"parent,omitempty"`
}

// record is a token as stored.
type record struct {
	Token
	Hash string `json:"hash"`
	// Rotations counts the secrets that this one replaced.
	Rotations int `json:"rotations,omitempty"`
}

var codec = store.Codec[record]{Version: 1}

// prefix is the key prefix of the tokens. The key born exists once the first token
// was created.
const (
	prefix = "access/tokens/"
	born   = "access/born"
)

// The errors of this package. ErrDenied covers every invalid token, so that the
// caller does not learn the reason.
var (
	ErrDenied   = errors.New("cannot accept the token: it is unknown, expired or revoked")
	ErrNotFound = errors.New("cannot find the token")
	ErrUsed     = errors.New("cannot create the token: it was created before")
)

// InvalidError says which field of a new token is wrong.
type InvalidError struct{ Field, Detail string }

func (e *InvalidError) Error() string { return fmt.Sprintf("cannot use %s: %s", e.Field, e.Detail) }

// Tokens holds the tokens of one fleet. It is safe for concurrent use. It accepts a
// token only while Run is running.
type Tokens struct {
	store store.Store
	ready chan struct{}
	once  sync.Once

	mu   sync.RWMutex
	byID map[string]record
}

// New returns the tokens of a store.
func New(s store.Store) *Tokens {
	return &Tokens{store: s, ready: make(chan struct{}), byID: map[string]record{}}
}

// Ready closes when the tokens have been read.
func (t *Tokens) Ready() <-chan struct{} { return t.ready }

// Run follows the tokens in the store until ctx ends. It calls fault for each
// unreadable record; such a token is refused.
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

// remember keeps r unless it is older than the known record: an older one must not
// undo a revocation or restore a replaced secret.
func (t *Tokens) remember(r record) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if old, ok := t.byID[r.ID]; ok && (old.RevokedAt != nil && r.RevokedAt == nil || old.Rotations > r.Rotations) {
		return
	}
	t.byID[r.ID] = r
}

// Wanted describes a token to create.
type Wanted struct {
	Name    string
	Role    Role
	Machine string
	TTL     time.Duration // 0 never expires
	By      string
	// Once, if not empty, names the purpose of a machine's token. A second token for
	// the same purpose and machine replaces the first, whose secret becomes invalid.
	// After a revocation, and for another machine, creation fails with ErrUsed
	// permanently.
	Once string
}

// maxTTL bounds the lifetime of a token, and maxTokens their number.
const (
	maxTTL    = 10 * 366 * 24 * time.Hour
	maxTokens = 10_000
)

func (w Wanted) validate() error {
	switch {
	case w.Name == "" || len(w.Name) > 128 || strings.ContainsFunc(w.Name, func(r rune) bool { return r < ' ' }):
		return &InvalidError{"name", "it must have 1 to 128 bytes of text"}
	case !w.Role.OfUsers() && w.Role != Agent && w.Role != Host:
		return &InvalidError{"role", fmt.Sprintf("%.20q is not viewer, operator, admin, agent or host", string(w.Role))}
	case w.Role.OfUsers() != (w.Machine == ""):
		return &InvalidError{"machine", "an agent's or host's token names its machine, and no other does"}
	case len(w.Machine) > 128 || strings.ContainsAny(w.Machine, "/ \t\r\n"):
		return &InvalidError{"machine", "it must have at most 128 bytes, without spaces and slashes"}
	case w.TTL < 0 || w.TTL > maxTTL:
		return &InvalidError{"ttl_seconds", "it must lie between 0 and ten years"}
	}
	return nil
}

// Create creates a token and returns it together with its plaintext, which is not
// available later. also are writes for the same transaction, usually the audit entry.
// Errors: InvalidError, ErrUsed and those of the store.
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
	r, err := t.put(ctx, r, w.Once != "", also)
	if err != nil {
		return Token{}, "", err
	}
	return r.Token, clear, nil
}

func (t *Tokens) put(ctx context.Context, r record, replace bool, also []store.Op) (record, error) {
	key := prefix + r.ID
	_, err := store.Update(ctx, t.store, key, func(old store.Value) ([]byte, []store.Op, error) {
		r.Rotations = 0
		if old.Exists() {
			was, err := codec.Decode(key, old.Data)
			switch {
			case err != nil:
				return nil, nil, err
			case !replace || was.RevokedAt != nil || was.Machine != r.Machine || was.Role != r.Role:
				return nil, nil, ErrUsed
			}
			r.Rotations = was.Rotations + 1
		}
		data, err := codec.Encode(key, r)
		return data, also, err
	})
	if err != nil {
		return r, fmt.Errorf("cannot store token %q: %w", r.Name, err)
	}
	t.remember(r)
	return r, nil
}

func mint(w Wanted) (record, string) {
	id, secret := strings.ToLower(rand.Text()[:10]), rand.Text()
	if w.Once != "" { // this record remains as proof that it was created
		sum := sha256.Sum256([]byte("once:" + w.Once))
		id = hex.EncodeToString(sum[:5])
	}
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

// The name and origin of the first admin token.
const firstName, firstBy = "first-admin", "first start"

// First creates the first admin token of a fleet and returns its plaintext, or "" if
// a token was ever created. If several servers call it at once, exactly one creates
// the token.
func (t *Tokens) First(ctx context.Context) (string, error) {
	r, clear := mint(Wanted{Name: firstName, Role: Admin, By: firstBy})
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

// Revoke permanently revokes a token. also are writes for the same transaction.
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

// Check returns the token whose plaintext was presented, or ErrDenied.
func (t *Tokens) Check(now time.Time, presented string) (Token, error) {
	id, secret, ok := split(presented)
	t.mu.RLock()
	r := t.byID[id]
	parent := t.byID[r.Parent]
	t.mu.RUnlock()
	same := subtle.ConstantTimeCompare([]byte(hash(secret)), []byte(r.Hash)) == 1
	switch {
	case !ok, !same, r.ended(now), r.Parent != "" && (parent.ID == "" || parent.ended(now)):
		return Token{}, ErrDenied
	}
	return r.Token, nil
}

// ended reports whether a token was revoked or has expired.
func (t *Token) ended(now time.Time) bool {
	return t.RevokedAt != nil || t.ExpiresAt != nil && !now.Before(*t.ExpiresAt)
}

// ID returns the ID in a presented token, or "" if that is malformed.
func ID(presented string) string {
	id, _, ok := split(presented)
	if !ok {
		return ""
	}
	return id
}

// split splits a presented token into its parts. ok is false if it is malformed.
func split(s string) (id, secret string, ok bool) {
	rest, ok := strings.CutPrefix(s, "lull_")
	id, secret, cut := strings.Cut(rest, "_")
	if !ok || !cut || len(id) != 10 || len(secret) != 26 {
		return "", "", false
	}
	return id, secret, true
}
