package server_test

import (
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/platform/oidc"
	"lull/internal/platform/oidc/oidctest"
	"lull/internal/protocol/control"
	"lull/internal/server"
	"lull/internal/server/access"
)

// TestPeople checks that users of an issuer may do what their claims allow, that
// other tokens are refused, and that the server's own tokens stay valid.
func TestPeople(t *testing.T) {
	i := oidctest.New(t)
	p, err := oidc.New(oidc.Config{Issuer: i.URL, ClientID: "lull", RoleClaim: "groups", Roles: map[string]string{"chiefs": "admin", "guests": "viewer"}})
	if err != nil {
		t.Fatal(err)
	}
	b := newBenchWith(t, memory(t), func(o *server.Options) { o.Identity = p })
	group := func(g string) map[string]any {
		return map[string]any{"groups": []string{g}, "email": g + "@example.com", "email_verified": true}
	}
	chief, guest, roleless := i.Token("lull", group("chiefs")), i.Token("lull", group("guests")), i.Token("lull", group("others"))
	worker := "/api/v1/workers/" + b.worker()
	snooze := []byte(`{"minutes":5}`)
	for name, c := range map[string]struct {
		token, method, path string
		body                []byte
		want                int
	}{
		"a viewer looks":            {guest, "GET", worker, nil, 200},
		"a viewer acts":             {guest, "POST", worker + "/snooze", snooze, 403},
		"an admin acts":             {chief, "POST", worker + "/snooze", snooze, 200},
		"an admin makes tokens":     {chief, "GET", "/api/v1/tokens", nil, 200},
		"no role":                   {roleless, "GET", worker, nil, 403},
		"no role reports":           {roleless, "POST", "/api/v1/agents/m1/report", []byte(bodies["report-agent"]), 403},
		"expired":                   {i.Token("lull", map[string]any{"exp": time.Now().Add(-time.Minute).Unix()}), "GET", worker, nil, 401},
		"another audience":          {i.Token("other", group("chiefs")), "GET", worker, nil, 401},
		"alg none":                  {i.Unsigned("lull"), "GET", worker, nil, 401},
		"the server's own token":    {b.admin, "GET", worker, nil, 200},
		"an agent's token":          {b.token(access.Agent, "m1"), "POST", "/api/v1/agents/m1/report", []byte(bodies["report-agent"]), 200},
		"a long token of no issuer": {strings.Repeat("a", 20000) + ".b.c", "GET", worker, nil, 401},
	} {
		if res, data := b.ask(c.method, c.path, c.token, c.body); res.StatusCode != c.want {
			t.Errorf("%s: %d %s, want %d", name, res.StatusCode, data, c.want)
		}
	}
	_, data := b.ask("GET", worker+"/audit", b.admin, nil)
	if !strings.Contains(string(data), "chiefs@example.com") {
		t.Errorf("the audit log does not name who acted: %s", data)
	}
	_, data = b.ask("GET", "/api/v1/auth", "", nil)
	if a := decode[control.Auth](t, data); a.Issuer != i.URL || a.ClientID != "lull" {
		t.Errorf("how to log in: %s", data)
	}
}

// TestIssuerIsDown checks that a request is not answered as if its token were invalid
// while the issuer is unreachable.
func TestIssuerIsDown(t *testing.T) {
	i := oidctest.New(t)
	p, err := oidc.New(oidc.Config{Issuer: i.URL, ClientID: "lull", RoleClaim: "groups", Roles: map[string]string{"*": "viewer"}})
	if err != nil {
		t.Fatal(err)
	}
	i.Down(true)
	b := newBenchWith(t, memory(t), func(o *server.Options) { o.Identity = p })
	res, data := b.ask("GET", "/api/v1/workers", i.Token("lull", nil), nil)
	b.problem("down", res, data, 503)
	if res, data := b.ask("GET", "/api/v1/workers", b.admin, nil); res.StatusCode != 200 {
		t.Errorf("the server's own token: %d %s", res.StatusCode, data)
	}
}

// TestBrowserLogin checks that a browser can log in to the dashboard, and that the
// callback URL of an attacker's login is refused.
func TestBrowserLogin(t *testing.T) {
	i := oidctest.New(t)
	p, err := oidc.New(oidc.Config{Issuer: i.URL, ClientID: "lull", RoleClaim: "groups", Roles: map[string]string{"*": "viewer"}})
	if err != nil {
		t.Fatal(err)
	}
	b := newBenchWith(t, memory(t), func(o *server.Options) { o.Identity = p })
	jar, err := cookiejar.New(nil)
	errtest.None(t, err)
	get := func(c *http.Client, path string) (*http.Response, string) {
		t.Helper()
		res, err := c.Get(path)
		errtest.None(t, err)
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		errtest.None(t, err)
		return res, string(body)
	}
	res, page := get(&http.Client{Jar: jar}, b.url+"/auth/login")
	m := regexp.MustCompile(`setItem\('lull-session', "([^"]+)"\)`).FindStringSubmatch(page)
	if res.StatusCode != 200 || m == nil || !strings.Contains(res.Header.Get("Content-Security-Policy"), "script-src 'nonce-") {
		t.Fatalf("%d %v %s", res.StatusCode, res.Header, page)
	}
	if code, _ := b.withSession(&http.Client{Jar: jar}, "GET", "/api/v1/workers", m[1]); code != 200 {
		t.Errorf("the session of the page: %d", code)
	}
	// the callback URL of someone else's login, opened in a browser that began none
	stop := &http.Client{Jar: jar, CheckRedirect: func(r *http.Request, _ []*http.Request) error {
		if r.URL.Path == "/auth/callback" {
			return http.ErrUseLastResponse
		}
		return nil
	}}
	res, _ = get(stop, b.url+"/auth/login")
	back := res.Header.Get("Location")
	if res, body := get(&http.Client{}, back); res.StatusCode != 400 || strings.Contains(body, "lull-session") {
		t.Errorf("without the cookie: %d %s", res.StatusCode, body)
	}
	u, err := url.Parse(back)
	errtest.None(t, err)
	q := u.Query()
	q.Set("state", "made-up")
	u.RawQuery = q.Encode()
	if res, body := get(&http.Client{Jar: jar}, u.String()); res.StatusCode != 400 || strings.Contains(body, "lull-session") {
		t.Errorf("with another state: %d %s", res.StatusCode, body)
	}
}
