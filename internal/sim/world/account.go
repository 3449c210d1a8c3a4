package world

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"time"
)

// Principal is the signer of a request.
type Principal struct {
	Account  string    `json:"a"`
	ARN      string    `json:"r"`
	Role     string    `json:"n,omitempty"` // name of the role; empty for a plain key
	Instance string    `json:"i,omitempty"` // instance whose profile issued the credentials
	Expires  time.Time `json:"e,omitzero"`  // client's time
}

// Role is an IAM role. It may do everything except actions that match a pattern in
// Deny, such as "ec2:Terminate*". With SelfOnly, it may change only the instance that
// its credentials come from.
type Role struct {
	Name     string   `yaml:"name" json:"name"`
	Deny     []string `yaml:"deny" json:"deny,omitempty"`
	SelfOnly bool     `yaml:"self_only" json:"self_only,omitempty"`
}

// tokenMark is the prefix of this simulator's session tokens. A token contains its
// principal, so that it survives a restart.
const tokenMark = "lullsim."

// SessionToken returns a session token for a principal.
func SessionToken(p Principal) string {
	b, err := json.Marshal(p)
	if err != nil {
		return ""
	}
	return tokenMark + base64.RawURLEncoding.EncodeToString(b)
}

// Principal returns the principal of an access key and session token.
// Signatures are not verified: a simulator has no secrets.
func (w *World) Principal(key, session string) (Principal, *Error) {
	if key == "" {
		return Principal{}, refuse(http.StatusForbidden, "MissingAuthenticationToken", "Request is missing Authentication Token")
	}
	if rest, ok := strings.CutPrefix(session, tokenMark); ok {
		var p Principal
		b, err := base64.RawURLEncoding.DecodeString(rest)
		if err == nil {
			err = json.Unmarshal(b, &p)
		}
		if err != nil || !slices.ContainsFunc(w.cfg.Accounts, func(a AccountConfig) bool { return a.ID == p.Account }) {
			return Principal{}, refuse(http.StatusForbidden, "InvalidClientTokenId", "The security token included in the request is invalid.")
		}
		if !p.Expires.IsZero() && w.Clock.Now().Wire.After(p.Expires) {
			return Principal{}, refuse(http.StatusForbidden, "ExpiredToken", "The security token included in the request is expired")
		}
		return p, nil
	}
	for _, a := range w.cfg.Accounts {
		if slices.Contains(a.AccessKeys, key) {
			return Principal{Account: a.ID, ARN: "arn:aws:iam::" + a.ID + ":user/" + key}, nil
		}
	}
	if w.cfg.StrictKeys {
		return Principal{}, refuse(http.StatusForbidden, "InvalidClientTokenId", "The security token included in the request is invalid.")
	}
	a := w.cfg.Accounts[0].ID
	return Principal{Account: a, ARN: "arn:aws:iam::" + a + ":user/lull"}, nil
}

// May reports whether a principal may perform an action, such as "ec2:StopInstances",
// on the instances targets; targets is empty for actions without targets.
func (w *World) May(p Principal, action string, targets []string) bool {
	r, ok := w.role(p.Account, p.Role)
	if !ok {
		return true
	}
	if slices.ContainsFunc(r.Deny, func(d string) bool { m, err := path.Match(d, action); return err == nil && m }) {
		return false
	}
	if !r.SelfOnly || len(targets) == 0 {
		return true
	}
	return !slices.ContainsFunc(targets, func(t string) bool { return t != p.Instance })
}

func (w *World) role(account, name string) (Role, bool) {
	if name == "" {
		return Role{}, false
	}
	for _, a := range w.cfg.Accounts {
		if a.ID != account {
			continue
		}
		for _, r := range a.Roles {
			if r.Name == name {
				return r, true
			}
		}
	}
	return Role{}, false
}

func (w *World) hasRole(account, name string) bool { _, ok := w.role(account, name); return ok }

// HasRole reports whether an account has a role.
func (w *World) HasRole(account, name string) bool { return w.hasRole(account, name) }

// Calls counts the requests to each simulator.
type Calls struct {
	mu sync.Mutex
	n  map[string]int
}

func newCalls() *Calls { return &Calls{n: map[string]int{}} }

// Count counts one call of an action, under the key "service action".
func (c *Calls) Count(service, action string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[service+" "+action]++
}

// All returns the counts since the start or the latest Reset.
func (c *Calls) All() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make(map[string]int, len(c.n))
	for k, v := range c.n {
		out[k] = v
	}
	return out
}

// Reset resets the counts and returns the previous ones.
func (c *Calls) Reset() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.n
	c.n = map[string]int{}
	return out
}

// bucket is a token bucket for request throttling, in the client's time.
type bucket struct {
	tokens float64
	at     time.Time
}

// Throttled takes a token from an account's bucket in a region, and reports whether
// the call must be throttled because there was none. Reads and changes have separate
// buckets.
func (w *World) Throttled(account, region, action string) bool {
	l := w.cfg.Limits.Reads
	class := "read"
	if !strings.HasPrefix(action, "Describe") {
		l, class = w.cfg.Limits.Changes, "change"
	}
	if l.Rate <= 0 {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.Clock.Now().Wire
	key := account + " " + region + " " + class
	b := w.throttles[key]
	if b == nil {
		b = &bucket{tokens: l.Burst, at: now}
		w.throttles[key] = b
	}
	b.tokens = min(l.Burst, b.tokens+l.Rate*now.Sub(b.at).Seconds())
	b.at = now
	if b.tokens < 1 {
		return true
	}
	b.tokens--
	return false
}
