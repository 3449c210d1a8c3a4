package imds

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// metadata is a metadata service whose parts can be made to fail one by one.
type metadata struct {
	tags     map[string]string
	token    int // status of the token request; 0 is 200
	list     int // of the list of tags
	hang     bool
	expired  atomic.Int32 // number of requests to answer with 401 although they have a token
	identity string
	release  chan struct{}
}

func (s *metadata) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.hang {
		<-s.release
		return
	}
	if r.URL.Path == "/latest/api/token" {
		if s.token != 0 {
			w.WriteHeader(s.token)
			return
		}
		if r.Method != http.MethodPut || r.Header.Get("X-Aws-Ec2-Metadata-Token-Ttl-Seconds") == "" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		w.Header().Set("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", "21600")
		fmt.Fprint(w, "secret")
		return
	}
	if r.Header.Get("X-Aws-Ec2-Metadata-Token") != "secret" || s.expired.Add(-1) >= 0 {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	path := strings.TrimPrefix(r.URL.Path, "/latest/")
	switch {
	case path == "dynamic/instance-identity/document":
		fmt.Fprint(w, s.identity)
	case path == "meta-data/tags/instance" || path == "meta-data/tags/instance/":
		if s.list != 0 {
			w.WriteHeader(s.list)
			return
		}
		for k := range s.tags {
			fmt.Fprintln(w, k)
		}
	default:
		v, ok := s.tags[strings.TrimPrefix(path, "meta-data/tags/instance/")]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		fmt.Fprint(w, v)
	}
}

func serve(t *testing.T, s *metadata) *Client {
	t.Helper()
	s.release = make(chan struct{})
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	t.Cleanup(func() { close(s.release) })
	return New(Options{Endpoint: srv.URL, Timeout: 300 * time.Millisecond})
}

func TestTags(t *testing.T) {
	want := map[string]string{"lull:idle-timeout": "1h", "Name": "work space", "empty": "", "lull:pre-stop": "/home/u/clean.sh --all"}
	got, err := serve(t, &metadata{tags: want}).Tags(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestNoTagsIsNoError(t *testing.T) {
	got, err := serve(t, &metadata{}).Tags(t.Context())
	if err != nil || got == nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestFailures(t *testing.T) {
	for _, tt := range []struct {
		name string
		s    *metadata
		want Kind
	}{
		{"tags are not shown", &metadata{list: 404}, NotAllowed},
		{"service switched off", &metadata{token: 403}, Disabled},
		{"token refused", &metadata{token: 401}, BadToken},
		{"token overloaded", &metadata{token: 503}, Unavailable},
		{"list overloaded", &metadata{list: 503}, Unavailable},
		{"list throttled", &metadata{list: 429}, Unavailable},
		{"list forbidden", &metadata{list: 403}, Disabled},
		{"hangs", &metadata{hang: true}, Unreachable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			started := time.Now()
			_, err := serve(t, tt.s).Tags(t.Context())
			if KindOf(err) != tt.want {
				t.Errorf("%v is %q, want %q", err, KindOf(err), tt.want)
			}
			if took := time.Since(started); took > 30*time.Second {
				t.Errorf("took %s", took)
			}
		})
	}
}

func TestNobodyThere(t *testing.T) {
	c := New(Options{Endpoint: "http://127.0.0.1:1", Timeout: time.Second})
	if _, err := c.Tags(t.Context()); KindOf(err) != Unreachable {
		t.Errorf("%v", err)
	}
}

func TestCallerEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := serve(t, &metadata{}).Tags(ctx)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestExpiredTokenIsRenewed(t *testing.T) {
	s := &metadata{tags: map[string]string{"a": "b"}}
	s.expired.Store(1)
	got, err := serve(t, s).Tags(t.Context())
	if err != nil || got["a"] != "b" {
		t.Errorf("%v, %v", got, err)
	}
}

func TestIdentity(t *testing.T) {
	s := &metadata{identity: `{"instanceId":"i-0123456789abcdef0","region":"eu-west-1","availabilityZone":"eu-west-1a","accountId":"123456789012","instanceType":"m7i.large"}`}
	got, err := serve(t, s).Identity(t.Context())
	if err != nil || got.InstanceID != "i-0123456789abcdef0" || got.Region != "eu-west-1" {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "{}", "[]", `{"instanceId":"x","region":"eu-west-1"}`, `{"instanceId":"i-1"}`} {
		if got, err := serve(t, &metadata{identity: bad}).Identity(t.Context()); err == nil {
			t.Errorf("%q is read as %+v", bad, got)
		}
	}
}
