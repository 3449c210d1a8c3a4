package ec2sim

import (
	"fmt"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"lull/internal/sim/wire"
	"lull/internal/sim/world"
)

const authorization = "AWS4-HMAC-SHA256 Credential=AKIA/20260101/us-east-1/ec2/aws4_request, Signature=0"

func fleet(t testing.TB, n int, cml bool) *world.World {
	t.Helper()
	c := world.Config{
		Regions:  []world.RegionConfig{{Name: "us-east-1"}},
		Profiles: map[string]world.Profile{"p": {Labs: 3, History: 300, Users: []world.UserScript{{Name: "u"}}}},
		Workers:  []world.WorkerConfig{{Name: "w", Count: n, Profile: "p", Image: "ami-0000000000000d012", Tags: map[string]string{"lull:managed-by": "fleet"}}},
	}
	if cml {
		c.Workers[0].Image = ""
	}
	w, err := world.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func post(h *EC2, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest("POST", "/", strings.NewReader(body))
	r.Header.Set("Authorization", authorization)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func token(body string) string {
	_, rest, ok := strings.Cut(body, "<nextToken>")
	if !ok {
		return ""
	}
	tok, _, _ := strings.Cut(rest, "<")
	return tok
}

// BenchmarkPage reads one page of 1000 in the middle of fleets of several sizes. The
// time should not depend on the size.
func BenchmarkPage(b *testing.B) {
	for _, n := range []int{2_000, 100_000} {
		h := New(fleet(b, n, false))
		tok := ""
		for range n / 2000 {
			tok = token(post(h, "Action=DescribeInstanceStatus&IncludeAllInstances=true&MaxResults=1000&NextToken="+tok).Body.String())
		}
		for _, action := range []string{"DescribeInstanceStatus&IncludeAllInstances=true", "DescribeInstances"} {
			b.Run(fmt.Sprintf("%s/%d", strings.Split(action, "&")[0], n), func(b *testing.B) {
				for b.Loop() {
					if w := post(h, "Action="+action+"&MaxResults=1000&NextToken="+tok); w.Code != 200 || w.Body.Len() < 100_000 {
						b.Fatal(w.Body)
					}
				}
			})
		}
	}
}

// TestWholeFleetInPages lists a fleet of 100,000 in pages while instances come and
// go. Every instance that stays must be listed exactly once.
func TestWholeFleetInPages(t *testing.T) {
	n := 100_000
	if testing.Short() {
		n = 5000
	}
	w := fleet(t, n, false)
	h := New(w)
	seen := map[string]int{}
	pages, tok := 0, ""
	for {
		w := post(h, "Action=DescribeInstanceStatus&IncludeAllInstances=true&MaxResults=1000&NextToken="+tok)
		body := w.Body.String()
		for part := range strings.SplitSeq(body, "<instanceId>") {
			if id, _, ok := strings.Cut(part, "</instanceId>"); ok {
				seen[id]++
			}
		}
		pages++
		if pages == 3 {
			for k := range 10 {
				id := ""
				h.w.Find(fmt.Sprintf("w-%d", k*100+1), func(i *world.Instance, _ world.Moment) { id = i.ID })
				if r := post(h, "Action=TerminateInstances&InstanceId.1="+id); r.Code != 200 {
					t.Fatal(r.Body)
				}
			}
		}
		if tok = token(body); tok == "" {
			break
		}
	}
	for id, k := range seen {
		if k != 1 {
			t.Errorf("%s seen %d times", id, k)
		}
	}
	if len(seen) != n || pages != n/1000 {
		t.Errorf("%d instances in %d pages", len(seen), pages)
	}
}

// TestMemory checks the memory of 10,000 CML hosts with 300 events each.
func TestMemory(t *testing.T) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	w := fleet(t, 10_000, true)
	runtime.GC()
	runtime.ReadMemStats(&after)
	per := (after.HeapAlloc - before.HeapAlloc) / 10_000
	t.Logf("%d bytes a host", per)
	if per > 8192 {
		t.Errorf("a host costs %d bytes", per)
	}
	w.HostAt("w-9999", func(h *world.Host, now world.Moment, _ world.Reach) {
		if n := h.Telemetry(now).Count(); n != 300 {
			t.Errorf("%d events", n)
		}
	})
	runtime.KeepAlive(w)
}

func TestWildcard(t *testing.T) {
	for _, x := range []struct {
		pattern, s string
		match      bool
	}{
		{"", "", true}, {"a", "a", true}, {"a", "b", false}, {"*", "", true}, {"*", "abc", true}, {"a*c", "abbbc", true},
		{"a*c", "abbb", false}, {"a?c", "abc", true}, {"a?c", "ac", false}, {"*b*", "abc", true}, {`a\*`, "a*", true},
		{`a\*`, "ab", false}, {`\?`, "?", true}, {"**a**", "bab", true}, {"cisco-cml2.9*", "cisco-cml2.9.1-x", true}, {`\`, `\`, true},
	} {
		if got := wildcard(x.pattern, x.s); got != x.match {
			t.Errorf("%q against %q: %v", x.pattern, x.s, got)
		}
	}
}

// FuzzAction checks that no form causes a server error, and that every answer is
// well-formed XML.
func FuzzAction(f *testing.F) {
	w := fleet(f, 20, false)
	h := New(w)
	for a := range actions {
		f.Add("Action=" + a)
	}
	f.Add("Action=DescribeInstances&Filter.1.Name=tag:a&Filter.1.Value.1=*&MaxResults=5&NextToken=lullsim-page-zzzzzzzzzzzzz")
	f.Add("Action=RunInstances&ImageId=ami-00000000000000290&MinCount=1&MaxCount=2&UserData=%25&TagSpecification.1.ResourceType=instance&TagSpecification.1.Tag.1.Key=%00")
	f.Add("Action=CreateTags&ResourceId.1=i-0&Tag.1.Key=a")
	f.Fuzz(func(t *testing.T, body string) {
		form, err := wire.Parse(body)
		if err != nil || form.Get("MaxCount") != "" && len(form.Get("MaxCount")) > 1 {
			return
		}
		r := httptest.NewRequest("POST", "/", nil)
		r.Header.Set("Authorization", authorization)
		rec := httptest.NewRecorder()
		h.Serve(rec, r, form)
		if out := rec.Body.String(); rec.Code >= 500 || !strings.HasSuffix(out, "Response>") {
			t.Errorf("status %d: %s", rec.Code, out)
		}
	})
}
