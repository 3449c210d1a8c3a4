package access_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/server/access"
	"lull/internal/store"
	"lull/internal/store/mem"
)

func open(t *testing.T, db *mem.DB) *access.Tokens {
	c := db.Client()
	tokens := access.New(c)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- tokens.Run(ctx, func(err error) { t.Error(err) }) }()
	t.Cleanup(func() { cancel(); <-ended; c.Close() })
	<-tokens.Ready()
	return tokens
}

func TestFirstTokenIsMadeOnce(t *testing.T) {
	db := mem.New(mem.Options{})
	a, b := open(t, db), open(t, db)
	made := make(chan string, 2)
	for _, tokens := range []*access.Tokens{a, b} {
		go func() {
			s, err := tokens.First(t.Context())
			if err != nil {
				t.Error(err)
			}
			made <- s
		}()
	}
	one, two := <-made, <-made
	if (one == "") == (two == "") {
		t.Fatalf("two servers made %q and %q, want one token", one, two)
	}
	first := one + two
	waittest.Until(t, "both servers accept it", func() bool {
		_, errA := a.Check(time.Now(), first)
		_, errB := b.Check(time.Now(), first)
		return errA == nil && errB == nil
	})
	errtest.Get(a.Revoke(t.Context(), a.List()[0].ID, "me"))(t)
	if s, err := a.First(t.Context()); s != "" || err != nil {
		t.Errorf("after its end another first token was made: %q, %v", s, err)
	}
}

func TestTokensAreStoredHashed(t *testing.T) {
	db := mem.New(mem.Options{})
	c := db.Client()
	defer c.Close()
	tokens := open(t, db)
	_, secret, err := tokens.Create(t.Context(), access.Wanted{Name: "x", Role: access.Viewer})
	if err != nil {
		t.Fatal(err)
	}
	page, err := store.List(t.Context(), c, store.Prefix(""))
	errtest.None(t, err)
	for _, v := range page.Values {
		if strings.Contains(string(v.Data), secret[len(secret)-20:]) {
			t.Errorf("%s holds the token in the clear", v.Key)
		}
	}
}

func TestCheck(t *testing.T) {
	db := mem.New(mem.Options{})
	a, b := open(t, db), open(t, db)
	tok, secret, err := a.Create(t.Context(), access.Wanted{Name: "x", Role: access.Agent, Machine: "m", TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	other, otherSecret, err := a.Create(t.Context(), access.Wanted{Name: "y", Role: access.Admin})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for name, c := range map[string]struct {
		given string
		at    time.Time
		ok    bool
	}{
		"good":             {secret, now, true},
		"expired":          {secret, now.Add(2 * time.Hour), false},
		"empty":            {"", now, false},
		"cut":              {secret[:len(secret)-1], now, false},
		"longer":           {secret + "A", now, false},
		"other's secret":   {"lull_" + tok.ID + otherSecret[len("lull_")+len(other.ID):], now, false},
		"other prefix":     {"wake" + secret[4:], now, false},
		"without a prefix": {secret[5:], now, false},
	} {
		got, err := a.Check(c.at, c.given)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, access.ErrDenied) || c.ok && got.Machine != "m" {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	waittest.Until(t, "the other server accepts it", func() bool { _, err := b.Check(now, secret); return err == nil })
	errtest.Get(b.Revoke(t.Context(), tok.ID, "me"))(t)
	if _, err := b.Check(now, secret); err == nil {
		t.Error("the server that revoked it accepts it")
	}
	waittest.Until(t, "the other server refuses it", func() bool { _, err := a.Check(now, secret); return err != nil })
	if _, err := a.Revoke(t.Context(), "missing", "me"); !errors.Is(err, access.ErrNotFound) {
		t.Errorf("revoking no token: %v", err)
	}
}

func TestRoles(t *testing.T) {
	order := []access.Role{access.Viewer, access.Operator, access.Admin}
	for i, r := range order {
		for j, need := range order {
			if r.Covers(need) != (i >= j) {
				t.Errorf("%s covers %s: %t", r, need, r.Covers(need))
			}
		}
		for _, m := range []access.Role{access.Agent, access.Host} {
			if r.Covers(m) || m.Covers(r) {
				t.Errorf("%s and %s cover each other", r, m)
			}
		}
	}
}

func TestCreateRefuses(t *testing.T) {
	tokens := open(t, mem.New(mem.Options{}))
	for field, w := range map[string]access.Wanted{
		"name":        {Role: access.Viewer},
		"role":        {Name: "x", Role: "root"},
		"machine":     {Name: "x", Role: access.Agent},
		"ttl_seconds": {Name: "x", Role: access.Viewer, TTL: -1},
	} {
		_, _, err := tokens.Create(t.Context(), w)
		var bad *access.InvalidError
		if !errors.As(err, &bad) || bad.Field != field {
			t.Errorf("%+v: %v, want a fault in %s", w, err, field)
		}
	}
}

// FuzzCheck presents random tokens. Only the real token may be accepted.
func FuzzCheck(f *testing.F) {
	c := mem.New(mem.Options{}).Client()
	tokens := access.New(c)
	_, secret, err := tokens.Create(f.Context(), access.Wanted{Name: "x", Role: access.Admin})
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{"", "lull_", "lull__", secret, secret[:20], strings.ToUpper(secret), "lull_\x00_"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, given string) {
		if _, err := tokens.Check(time.Now(), given); (err == nil) != (given == secret) {
			t.Errorf("%q: %v", given, err)
		}
	})
}

// TestOnceReplaces checks that creating a machine's token again, even on two servers
// at once, leaves exactly one valid secret, and that a revoked token cannot be
// created again.
func TestOnceReplaces(t *testing.T) {
	db := mem.New(mem.Options{})
	a, b := open(t, db), open(t, db)
	w := access.Wanted{Name: "agent of w", Role: access.Agent, Machine: "i-1", By: "test", Once: "launch"}
	secrets := make([]string, 8)
	var all sync.WaitGroup
	for i := range secrets {
		all.Go(func() {
			var err error
			if _, secrets[i], err = []*access.Tokens{a, b}[i%2].Create(t.Context(), w); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	valid := func(x *access.Tokens) (n int) {
		for _, secret := range secrets {
			if _, err := x.Check(time.Now(), secret); err == nil {
				n++
			}
		}
		return n
	}
	last := ""
	waittest.Until(t, "both servers accept the same one secret", func() bool {
		both := 0
		for _, secret := range secrets {
			_, errA := a.Check(time.Now(), secret)
			_, errB := b.Check(time.Now(), secret)
			if errA == nil && errB == nil {
				both, last = both+1, secret
			}
		}
		return both == 1 && valid(a) == 1 && valid(b) == 1
	})
	other := w
	other.Machine = "i-2"
	if _, _, err := a.Create(t.Context(), other); !errors.Is(err, access.ErrUsed) {
		t.Errorf("another machine: %v", err)
	}
	errtest.Get(a.Revoke(t.Context(), a.List()[0].ID, "me"))(t)
	if _, _, err := b.Create(t.Context(), w); !errors.Is(err, access.ErrUsed) {
		t.Errorf("after the revocation: %v", err)
	}
	if _, err := a.Check(time.Now(), last); !errors.Is(err, access.ErrDenied) {
		t.Errorf("the revoked secret: %v", err)
	}
}
