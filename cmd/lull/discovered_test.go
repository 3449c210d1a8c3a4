package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"lull/internal/cli/term"
	"lull/internal/fleet"
	"lull/internal/lib/errtest"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/control"
)

// TestScanIsTold checks that a fleet with default settings scans the default region
// and lists instances of CML images. The scan must count the instances that it found
// and skipped, and name the regions that did not answer.
func TestScanIsTold(t *testing.T) {
	inCloud(t, twoRegions(), nil, func(r *cloudRig) {
		t := r.t
		r.pass(time.Minute)
		l, err := control.Read[control.ListDiscovered](t.Context(), r.asks, "/workers/discovered")
		if err != nil || l.Scan == nil || len(l.Scan.Regions) != 1 {
			t.Fatalf("%+v, %v", l, err)
		}
		s := l.Scan.Regions[0]
		if s.Region != home || s.Error != "" || s.Found != len(l.Items) || s.Found != 3 || s.Instances != 7 || s.Skipped[fleet.SkipNoMatch] != 4 {
			t.Errorf("scanned %+v, listed %d", s, len(l.Items))
		}
		errtest.Get(r.imports(fleet.ImportedWorker{EC2InstanceID: r.id("plain")}))(t)
		r.with(func() { r.dead["ec2."+away] = true })
		errtest.Get(control.Write[any](t.Context(), r.asks, "PATCH", "/settings", map[string]any{"discovery_regions": home + "," + away}))(t)
		r.pass(10 * time.Minute)
		l, err = control.Read[control.ListDiscovered](t.Context(), r.asks, "/workers/discovered")
		if err != nil || l.Scan == nil || len(l.Scan.Regions) != 2 {
			t.Fatalf("%+v, %v", l, err)
		}
		if s := l.Scan.Regions[0]; s.Region != away || s.Error == "" || s.Instances != 0 {
			t.Errorf("a region that does not answer: %+v", s)
		}
		if s := l.Scan.Regions[1]; s.Skipped[fleet.SkipWorker] != 1 || s.Skipped[fleet.SkipNoMatch] != 3 {
			t.Errorf("after an import: %+v", s)
		}
	})
}

// TestWhyWithBothPlaces checks that with LULL_HOST and LULL_SERVER set, lull why
// explains instances of the host and workers of the server. A name that exists in
// both means the host's instance unless --server is given.
func TestWhyWithBothPlaces(t *testing.T) {
	env := fake(t, func(w http.ResponseWriter, r *http.Request) {
		path := strings.TrimPrefix(r.URL.Path, "/api/v1")
		switch {
		case path == "/workers/campus-1", path == "/workers/both":
			fmt.Fprint(w, `{"id":"w-1","name":"campus-1"}`)
		case path == "/workers/w-1/why":
			fmt.Fprint(w, `{"kind":"worker"}`)
		case path == "/instances/web/why", path == "/instances/both/why":
			fmt.Fprint(w, `{"kind":"instance"}`)
		case path == "/workers":
			fmt.Fprint(w, `{"items":[]}`)
		case !strings.HasPrefix(path, "/instances/") && !strings.HasPrefix(path, "/workers/"):
			fmt.Fprint(w, `{}`)
		default:
			httpx.WriteProblem(w, httpx.NewProblem(404, "none", "cannot find it"))
		}
	})
	server := "--server=" + env["LULL_SERVER"]
	for _, c := range []struct {
		words []string
		kind  string
		code  int
	}{
		{[]string{"web"}, "instance", term.ExitDone},
		{[]string{"campus-1"}, "worker", term.ExitDone},
		{[]string{"both"}, "instance", term.ExitDone},
		{[]string{"both", server}, "worker", term.ExitDone},
		{[]string{"none"}, "", term.ExitNotFound},
	} {
		out, errs, code := lullWith(env, append([]string{"why", "--json"}, c.words...)...)
		var y struct{ Kind string }
		if out != "" {
			if err := json.Unmarshal([]byte(out), &y); err != nil {
				t.Errorf("%v: %v", c.words, err)
			}
		}
		if code != c.code || y.Kind != c.kind {
			t.Errorf("%v ended with %d about %q: %s", c.words, code, y.Kind, errs)
		}
	}
}
