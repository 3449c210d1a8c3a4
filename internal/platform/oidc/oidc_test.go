package oidc_test

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/platform/oidc"
	"lull/internal/platform/oidc/oidctest"
)

const client = "lull"

func provider(t *testing.T, i *oidctest.Issuer) *oidc.Provider {
	t.Helper()
	p, err := oidc.New(oidc.Config{Issuer: i.URL, ClientID: client, RoleClaim: "realm.groups", Roles: map[string]string{"chiefs": "admin", "staff": "operator", "guests": "viewer"}})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestTokens checks which tokens are accepted, and the error for each of the
// others.
func TestTokens(t *testing.T) {
	i, other := oidctest.New(t), oidctest.New(t)
	p := provider(t, i)
	good := map[string]any{"alg": "RS256", "typ": "JWT"}
	claims := map[string]any{"iss": i.URL, "aud": client, "sub": "u-1", "exp": time.Now().Add(time.Hour).Unix()}
	for name, c := range map[string]struct {
		token string
		want  error
	}{
		"good":             {i.Token(client, nil), nil},
		"many audiences":   {i.Token(client, map[string]any{"aud": []string{"other", client}}), nil},
		"no key id":        {i.Sign(good, claims), nil},
		"another audience": {i.Token("other", nil), oidc.ErrDenied},
		"no audience":      {i.Token(client, map[string]any{"aud": nil}), oidc.ErrDenied},
		"expired":          {i.Token(client, map[string]any{"exp": time.Now().Add(-time.Minute).Unix()}), oidc.ErrExpired},
		"no expiry":        {i.Token(client, map[string]any{"exp": nil}), oidc.ErrExpired},
		"not yet":          {i.Token(client, map[string]any{"nbf": time.Now().Add(time.Hour).Unix()}), oidc.ErrDenied},
		"another issuer":   {other.Token(client, nil), oidc.ErrDenied},
		"pretends issuer":  {other.Token(client, map[string]any{"iss": i.URL}), oidc.ErrDenied},
		"alg none":         {i.Unsigned(client), oidc.ErrDenied},
		"alg HS256":        {i.Sign(map[string]any{"alg": "HS256"}, claims), oidc.ErrDenied},
		"alg RS384":        {i.Sign(map[string]any{"alg": "RS384"}, claims), oidc.ErrDenied},
		"no subject":       {i.Token(client, map[string]any{"sub": nil}), oidc.ErrDenied},
		"changed":          {changed(i.Token(client, nil)), oidc.ErrDenied},
		"cut off":          {strings.TrimRight(i.Token(client, nil), "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"), oidc.ErrDenied},
		"nonsense":         {"a.b.c", oidc.ErrDenied},
		"empty":            {"", oidc.ErrDenied},
		"too long":         {strings.Repeat("a", oidc.MaxToken) + ".b.c", oidc.ErrDenied},
	} {
		t.Run(name, func(t *testing.T) {
			who, err := p.Verify(t.Context(), c.token)
			if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) || err == nil && who.Subject != "u-1" {
				t.Errorf("%+v, %v; want %v", who, err, c.want)
			}
		})
	}
}

// changed returns token with one character of its middle part changed.
func changed(token string) string {
	at := strings.IndexByte(token, '.') + 10
	other := byte('A')
	if token[at] == other {
		other = 'B'
	}
	return token[:at] + string(other) + token[at+1:]
}

// TestRotatedKey checks that after a rotation the new key is accepted and the old
// one refused at once, and that tokens with unknown key IDs do not cause a fetch
// each.
//
// The library may finish a fetch only after it has answered, so the test waits
// for that where the next token depends on the fetched keys.
func TestRotatedKey(t *testing.T) {
	i := oidctest.New(t)
	synctest.Test(t, func(t *testing.T) {
		p, err := oidc.New(oidc.Config{Issuer: i.URL, ClientID: client, HTTP: i.Client()})
		if err != nil {
			t.Fatal(err)
		}
		verify := func(token string) error {
			_, err := p.Verify(t.Context(), token)
			synctest.Wait()
			return err
		}
		old := i.Token(client, nil)
		errtest.None(t, verify(old))
		i.Rotate(t)
		if err := verify(i.Token(client, nil)); err != nil {
			t.Errorf("the new key: %v", err)
		}
		if err := verify(old); !errors.Is(err, oidc.ErrDenied) {
			t.Errorf("the old key: %v", err)
		}
		made := i.Sign(map[string]any{"alg": "RS256", "kid": "made-up"}, map[string]any{"iss": i.URL, "aud": client, "sub": "x", "exp": time.Now().Add(time.Hour).Unix()})
		for range 50 {
			if err := verify(made); err == nil {
				t.Fatal("a made-up key is accepted")
			}
		}
		if n := i.Reads(); n > 10 { // the bubble's clock does not advance
			t.Errorf("the keys were read %d times", n)
		}
	})
}

// TestUnreachable checks that an issuer that is down yields ErrUnreachable, and
// that tokens are accepted once it is up.
func TestUnreachable(t *testing.T) {
	i := oidctest.New(t)
	i.Down(true)
	p := provider(t, i)
	if _, err := p.Verify(t.Context(), i.Token(client, nil)); !errors.Is(err, oidc.ErrUnreachable) {
		t.Errorf("down: %v", err)
	}
	i.Down(false)
	waittest.NoError(t, "the issuer is asked again", func() error {
		_, err := p.Verify(t.Context(), i.Token(client, nil))
		return err
	})
}

func TestRoles(t *testing.T) {
	i := oidctest.New(t)
	groups := func(v any) map[string]any { return map[string]any{"realm": map[string]any{"groups": v}} }
	for name, c := range map[string]struct {
		claims map[string]any
		want   string
	}{
		"highest":      {groups([]string{"guests", "chiefs", "staff"}), "admin"},
		"one":          {groups([]string{"guests"}), "viewer"},
		"text":         {groups("staff"), "operator"},
		"unknown":      {groups([]string{"others"}), ""},
		"star":         {groups([]string{"*"}), ""},
		"not a text":   {groups([]any{1, nil, map[string]any{}}), ""},
		"none":         {nil, ""},
		"another form": {map[string]any{"realm": "groups"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			who, err := provider(t, i).Verify(t.Context(), i.Token(client, c.claims))
			if err != nil || who.Role != c.want {
				t.Errorf("%q, %v; want %q", who.Role, err, c.want)
			}
		})
	}
	p, err := oidc.New(oidc.Config{Issuer: i.URL, ClientID: client, RoleClaim: "groups", Roles: map[string]string{"*": "viewer", "chiefs": "admin"}})
	if err != nil {
		t.Fatal(err)
	}
	for mail, verified := range map[string]bool{"anna@example.com": true, "mallory@example.com": false} {
		who, err := p.Verify(t.Context(), i.Token(client, map[string]any{"email": mail, "email_verified": verified}))
		if err != nil || who.Role != "viewer" || (who.Name == mail) != verified {
			t.Errorf("%+v, %v", who, err)
		}
	}
}

// TestFlows logs in with each flow and renews each login.
func TestFlows(t *testing.T) {
	i := oidctest.New(t)
	p := provider(t, i)
	const redirect = "http://127.0.0.1:1/callback"
	code := func(f oidc.Flow) (string, string) {
		where, err := p.URL(t.Context(), f, redirect)
		errtest.None(t, err)
		c := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
		res, err := c.Get(where)
		errtest.None(t, err)
		res.Body.Close()
		back, err := url.Parse(res.Header.Get("Location"))
		errtest.None(t, err)
		return back.Query().Get("code"), back.Query().Get("state")
	}
	f := oidc.NewFlow()
	c, state := code(f)
	if state != f.State {
		t.Errorf("state %q", state)
	}
	l, err := p.Exchange(t.Context(), f, redirect, c)
	errtest.None(t, err)
	if _, err := p.Verify(t.Context(), l.IDToken); err != nil {
		t.Error(err)
	}
	if _, err := p.Exchange(t.Context(), f, redirect, c); err == nil {
		t.Error("a code is used twice")
	}
	c, _ = code(f)
	if _, err := p.Exchange(t.Context(), oidc.Flow{State: f.State, Nonce: f.Nonce, Verifier: oidc.NewFlow().Verifier}, redirect, c); err == nil {
		t.Error("a code is used without its verifier")
	}
	c, _ = code(f)
	if _, err := p.Exchange(t.Context(), oidc.Flow{State: f.State, Nonce: "other", Verifier: f.Verifier}, redirect, c); !errors.Is(err, oidc.ErrDenied) {
		t.Errorf("another login's token: %v", err)
	}
	again, err := p.Refresh(t.Context(), l)
	if err != nil || again.IDToken == "" || again.RefreshToken == "" {
		t.Errorf("refresh: %+v, %v", again, err)
	}
	if _, err := p.Refresh(t.Context(), oidc.Login{RefreshToken: "made-up"}); err == nil {
		t.Error("a made-up refresh token renews")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	shown := ""
	d, err := p.Device(ctx, func(uri, code string) { shown = uri + " " + code; i.Approve() })
	if err != nil || d.IDToken == "" || shown != i.URL+"/activate ABCD" {
		t.Errorf("device: %v, shown %q", err, shown)
	}
}

func TestConfig(t *testing.T) {
	for name, c := range map[string]oidc.Config{
		"no URL":    {Issuer: "x", ClientID: "c"},
		"plain":     {Issuer: "http://id.example.com", ClientID: "c"},
		"no client": {Issuer: "https://id.example.com"},
		"bad role":  {Issuer: "https://id.example.com", ClientID: "c", Roles: map[string]string{"a": "root"}},
	} {
		if _, err := oidc.New(c); err == nil || !strings.HasPrefix(err.Error(), "cannot ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzVerify(f *testing.F) {
	p, err := oidc.New(oidc.Config{Issuer: "http://127.0.0.1:1", ClientID: client})
	if err != nil {
		f.Fatal(err)
	}
	f.Add("a.b.c")
	f.Add("eyJhbGciOiJub25lIn0.e30.")
	f.Fuzz(func(t *testing.T, s string) {
		if _, err := p.Verify(t.Context(), s); err == nil {
			t.Error("accepted without an issuer")
		}
	})
}
