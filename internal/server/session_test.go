package server_test

import (
	"encoding/json"
	"net/http"
	"net/http/cookiejar"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/store/mem"
)

// withSession makes a browser's request with the ciphertext of a session. It returns
// the status and the problem's code, if any.
func (b *bench) withSession(c *http.Client, method, path, session string) (int, string) {
	b.t.Helper()
	req, err := http.NewRequestWithContext(b.t.Context(), method, b.url+path, http.NoBody)
	if err != nil {
		b.t.Fatal(err)
	}
	if session != "" {
		req.Header.Set("Authorization", "Session "+session)
	}
	res, err := c.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer res.Body.Close()
	var p struct{ Type string }
	_ = json.NewDecoder(res.Body).Decode(&p) // not every answer has a body
	return res.StatusCode, p.Type[strings.LastIndexAny(p.Type, ":/")+1:]
}

// signedIn returns a browser that has signed in with body at SignInPath, and the
// session's ciphertext.
func (b *bench) signedIn(body string) (*http.Client, string) {
	b.t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		b.t.Fatal(err)
	}
	c := &http.Client{Jar: jar}
	res, err := c.Post(b.url+server.SignInPath, "application/json", strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	defer res.Body.Close()
	var in struct{ Session string }
	if err := json.NewDecoder(res.Body).Decode(&in); err != nil || res.StatusCode != http.StatusOK || len(res.Cookies()) != 1 {
		b.t.Fatalf("signing in: %s, %v, cookies %v", res.Status, err, res.Cookies())
	}
	k := res.Cookies()[0]
	if !k.HttpOnly || k.SameSite != http.SameSiteStrictMode || k.MaxAge != 0 || !k.Expires.IsZero() {
		b.t.Errorf("the cookie is %+v", k)
	}
	return c, in.Session
}

// TestSession checks that a session needs both of its halves, that a change needs the
// half that no other site can send, and that the session ends with its token and by
// signing out.
func TestSession(t *testing.T) {
	b := newBench(t, mem.New(mem.Options{}).Client())
	tok, secret, err := b.tokens.Create(t.Context(), access.Wanted{Name: "alice", Role: access.Operator})
	if err != nil {
		t.Fatal(err)
	}
	body := `{"token": "` + secret + `"}`
	c, half := b.signedIn(body)
	_, other := b.signedIn(body)
	if strings.Contains(half, secret[len(secret)-20:]) {
		t.Error("the page holds the token")
	}
	want := func(what string, c *http.Client, method, path, half string, code int, problem string) {
		t.Helper()
		if got, p := b.withSession(c, method, path, half); got != code || p != problem {
			t.Errorf("%s: %d %q, want %d %q", what, got, p, code, problem)
		}
	}
	const whoami = "/api/v1/session"
	bad := http.StatusUnauthorized
	want("both halves", c, "GET", whoami, half, http.StatusOK, "")
	want("the cookie alone", c, "GET", whoami, "", bad, "no_token")
	want("the cookie alone, a change", c, "POST", "/api/v1/halt", "", bad, "no_token")
	want("the stored half alone", http.DefaultClient, "GET", whoami, half, bad, "bad_token")
	want("halves of two sessions", c, "GET", whoami, other, bad, "bad_token")
	id, text, _ := strings.Cut(half, ".")
	_, text2, _ := strings.Cut(other, ".")
	want("another's text under this id", c, "GET", whoami, id+"."+text2, bad, "bad_token")
	want("a changed half", c, "GET", whoami, id+"."+text[:len(text)-2]+"AA", bad, "bad_token")
	for _, x := range []string{"x", ".", id + ".", id + ".!!", strings.Repeat("a", 5000)} {
		want("no half: "+x[:1], c, "GET", whoami, x, bad, "bad_token")
	}
	if res, data := b.ask("GET", whoami, secret, nil); res.StatusCode != http.StatusOK {
		t.Errorf("the token in the header: %d %s", res.StatusCode, data)
	}

	want("signing out with another's half", c, "DELETE", server.SignInPath, "", http.StatusBadRequest, "invalid")
	c2, half2 := b.signedIn(body)
	want("signing out", c2, "DELETE", server.SignInPath, half2, http.StatusNoContent, "")
	want("after signing out", c2, "GET", whoami, half2, bad, "bad_token")
	want("another browser", c, "GET", whoami, half, http.StatusOK, "")
	if _, err := b.tokens.Check(time.Now(), secret); err != nil {
		t.Errorf("signing out of a browser revoked the user's token: %v", err)
	}
	errtest.Get(b.tokens.Revoke(t.Context(), tok.ID, "test"))(t)
	want("a revoked token", c, "GET", whoami, half, bad, "bad_token")

	// Signing out revokes the token that a sign-in link created.
	link, err := b.tokens.Link(t.Context(), access.ID(b.admin), time.Minute)
	errtest.None(t, err)
	c, half = b.signedIn(`{"link": "` + link + `"}`)
	want("by a link", c, "GET", whoami, half, http.StatusOK, "")
	want("signing out", c, "DELETE", server.SignInPath, half, http.StatusNoContent, "")
	for _, x := range b.tokens.List() {
		if x.Parent != "" && x.RevokedAt == nil {
			t.Errorf("the token of the link stays valid: %+v", x)
		}
	}

	for what, c := range map[string]struct {
		body string
		code int
		want string
	}{
		"an unknown token": {`{"token": "lull_aaaaaaaaaa_aaaaaaaaaaaaaaaaaaaaaaaaaa"}`, bad, "bad_token"},
		"a machine":        {`{"token": "` + b.token(access.Host, "m") + `"}`, http.StatusForbidden, "role"},
	} {
		res, data := b.ask("POST", server.SignInPath, "", []byte(c.body))
		if p := b.problem(what, res, data, c.code); !strings.HasSuffix(p.Type, c.want) || len(res.Cookies()) > 0 {
			t.Errorf("%s: %s, cookies %v", what, p.Type, res.Cookies())
		}
	}
}
