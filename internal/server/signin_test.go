package server_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/server"
	"lull/internal/server/access"
	"lull/internal/store/mem"
)

// TestSignInLink checks that only the page's own POST uses up a link, once, and
// that the answer explains why another is refused.
func TestSignInLink(t *testing.T) {
	b := newBench(t, mem.New(mem.Options{}).Client())
	link, err := b.tokens.Link(t.Context(), access.ID(b.admin), time.Minute)
	errtest.None(t, err)
	ask := func(method, body string, head map[string]string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, b.url+server.SignInPath, strings.NewReader(body))
		errtest.None(t, err)
		for k, v := range head {
			req.Header.Set(k, v)
		}
		res, err := http.DefaultClient.Do(req)
		errtest.None(t, err)
		defer res.Body.Close()
		got, err := io.ReadAll(res.Body)
		errtest.None(t, err)
		if method == "GET" && res.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("the page may be kept: %v", res.Header)
		}
		return res.StatusCode, string(got)
	}
	post := fmt.Sprintf(`{"link": %q}`, link)
	for range 2 { // previews and prefetches
		for _, method := range []string{"HEAD", "GET"} {
			if code, said := ask(method, "", map[string]string{"Sec-Purpose": "prefetch"}); code != http.StatusOK || strings.Contains(said, link) {
				t.Errorf("%s: %d %s", method, code, said)
			}
		}
	}
	if code, said := ask("POST", post, map[string]string{"Sec-Fetch-Site": "cross-site"}); code != http.StatusForbidden {
		t.Errorf("from another site: %d %s", code, said)
	}
	codeOf := func(said string) string {
		var p struct{ Type string }
		if err := json.Unmarshal([]byte(said), &p); err != nil {
			t.Errorf("%v: %s", err, said)
		}
		return p.Type[strings.LastIndexAny(p.Type, ":/")+1:]
	}
	for _, c := range []struct {
		body string
		code int
		want string
	}{
		{`no`, http.StatusBadRequest, "invalid"},
		{`{"link": "` + strings.Repeat("x", 40_000) + `"}`, http.StatusBadRequest, "invalid"},
		{`{}`, http.StatusForbidden, "link_unknown"},
	} {
		if code, said := ask("POST", c.body, nil); code != c.code || codeOf(said) != c.want {
			t.Errorf("%.40s: %d %s", c.body, code, said)
		}
	}
	code, said := ask("POST", post, nil)
	if code != http.StatusOK {
		t.Fatalf("%d %s", code, said)
	}
	if code, said := ask("POST", post, nil); code != http.StatusGone || codeOf(said) != "link_used" {
		t.Errorf("used twice: %d %s", code, said)
	}
	old, err := b.tokens.Link(t.Context(), access.ID(b.admin), -time.Second)
	errtest.None(t, err)
	if code, said := ask("POST", fmt.Sprintf(`{"link": %q}`, old), nil); code != http.StatusGone || codeOf(said) != "link_expired" {
		t.Errorf("expired: %d %s", code, said)
	}
}
