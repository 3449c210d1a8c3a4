package imdssim

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"lull/internal/sim/world"
)

type bench struct {
	*IMDS
	t *testing.T
}

func newBench(t *testing.T, v2only bool) bench {
	t.Helper()
	w, err := world.New(world.Config{Workers: []world.WorkerConfig{{Name: "h", TokensRequired: v2only, TagsInMetadata: true, Tags: map[string]string{"a": "1"}}}})
	if err != nil {
		t.Fatal(err)
	}
	h := New(w)
	h.Default = "h"
	return bench{h, t}
}

func (b bench) do(method, path string, header map[string]string) (int, string) {
	r := httptest.NewRequest(method, "http://169.254.169.254/latest/"+path, nil)
	for k, v := range header {
		r.Header.Set(k, v)
	}
	w := httptest.NewRecorder()
	b.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

func (b bench) token(seconds int) string {
	b.t.Helper()
	status, tok := b.do("PUT", "api/token", map[string]string{"X-aws-ec2-metadata-token-ttl-seconds": strconv.Itoa(seconds)})
	if status != http.StatusOK {
		b.t.Fatalf("token: %d %s", status, tok)
	}
	return tok
}

func TestTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, true)
		tok := b.token(60)
		want := func(what string, status int, method, path string, header map[string]string) {
			t.Helper()
			if got, body := b.do(method, path, header); got != status {
				t.Errorf("%s: status %d, want %d: %s", what, got, status, body)
			}
		}
		with := map[string]string{"X-aws-ec2-metadata-token": tok}
		want("with a token", 200, "GET", "meta-data/instance-id", with)
		want("without one", 401, "GET", "meta-data/instance-id", nil)
		want("with a wrong one", 401, "GET", "meta-data/instance-id", map[string]string{"X-aws-ec2-metadata-token": "x" + tok})
		want("no such path", 404, "GET", "meta-data/nothing", with)
		want("a tag that is not there", 404, "GET", "meta-data/tags/instance/b", with)
		want("life of 0", 400, "PUT", "api/token", map[string]string{"X-aws-ec2-metadata-token-ttl-seconds": "0"})
		want("life of a day", 400, "PUT", "api/token", map[string]string{"X-aws-ec2-metadata-token-ttl-seconds": "86400"})
		want("no life", 400, "PUT", "api/token", nil)
		want("through a proxy", 403, "PUT", "api/token", map[string]string{"X-aws-ec2-metadata-token-ttl-seconds": "60", "X-Forwarded-For": "10.0.0.1"})
		want("GET of a token", 405, "GET", "api/token", nil)
		want("POST", 405, "POST", "meta-data/instance-id", with)
		time.Sleep(time.Minute)
		want("with an expired one", 401, "GET", "meta-data/instance-id", with)
	})
	if status, _ := newBench(t, false).do("GET", "meta-data/instance-id", nil); status != 200 {
		t.Errorf("the older protocol where it is allowed: %d", status)
	}
}

func TestSpotNotice(t *testing.T) {
	b := newBench(t, true)
	with := map[string]string{"X-aws-ec2-metadata-token": b.token(60)}
	if status, _ := b.do("GET", "meta-data/spot/instance-action", with); status != 404 {
		t.Errorf("before: %d", status)
	}
	d := world.Duration(2 * time.Minute)
	if err := b.w.Set("h", world.Attributes{SpotNotice: &d}); err != nil {
		t.Fatal(err)
	}
	status, body := b.do("GET", "meta-data/spot/instance-action", with)
	if status != 200 || !strings.Contains(body, `"action": "stop"`) {
		t.Errorf("after: %d %s", status, body)
	}
}

func TestListing(t *testing.T) {
	b := newBench(t, true)
	with := map[string]string{"X-aws-ec2-metadata-token": b.token(60)}
	for path, wanted := range map[string]string{"meta-data/placement/": "availability-zone\nregion", "meta-data/tags/instance": "Name\na", "meta-data/tags/": "instance/"} {
		if status, got := b.do("GET", path, with); status != 200 || got != wanted {
			t.Errorf("%s: %d %q", path, status, got)
		}
	}
}
