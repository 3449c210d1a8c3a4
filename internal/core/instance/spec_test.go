package instance

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/lib/errtest"
)

func TestParseExpose(t *testing.T) {
	for _, c := range []struct {
		in   string
		want Endpoint
	}{
		{"8080", Endpoint{Listen: "127.0.0.1:8080", Target: "127.0.0.1:8080"}},
		{"8080:80", Endpoint{Listen: "127.0.0.1:8080", Target: "127.0.0.1:80"}},
		{"0.0.0.0:8080", Endpoint{Listen: "0.0.0.0:8080", Target: "0.0.0.0:8080"}},
		{"10.0.0.1:8080:80", Endpoint{Listen: "10.0.0.1:8080", Target: "127.0.0.1:80"}},
		{"10.0.0.1:8080:10.0.0.2:80", Endpoint{Listen: "10.0.0.1:8080", Target: "10.0.0.2:80"}},
		{"[::1]:8080", Endpoint{Listen: "[::1]:8080", Target: "[::1]:8080"}},
		{"[::]:8080:80", Endpoint{Listen: "[::]:8080", Target: "127.0.0.1:80"}},
		{"[::1]:8080:[fd00::2]:80", Endpoint{Listen: "[::1]:8080", Target: "[fd00::2]:80"}},
		{"[::1]:53/udp", Endpoint{Proto: "udp", Listen: "[::1]:53", Target: "[::1]:53"}},
		{"53/udp", Endpoint{Proto: "udp", Listen: "127.0.0.1:53", Target: "127.0.0.1:53"}},
	} {
		got, err := ParseExpose(c.in, "")
		if err != nil || got != c.want {
			t.Errorf("%s: %+v, %v", c.in, got, err)
		}
	}
	for _, path := range []string{"/run/app.sock", "/run/app:1.sock", "/a", "/run/udp"} {
		want := Endpoint{Proto: "unix", Listen: path, Target: path, Path: PathDirect}
		if got, err := ParseExpose("unix:"+path, PathDirect); err != nil || got != want {
			t.Errorf("unix:%s: %+v, %v", path, got, err)
		}
	}
	for bad, say := range map[string]string{
		"/run/app.sock": "written unix:/run/app.sock", "@app": "written unix:/", "unix:": "as in unix:/run/app.sock",
		"unix:run/app.sock": "not an absolute path", "unix:@app": "abstract", "unix:\x00app": "abstract",
		"unix:/run//app.sock": "write unix:/run/app.sock", "unix:/run/app.sock/": "write unix:/run/app.sock", "unix:/": "plain path",
		"unix:/run/../app.sock": "write unix:/app.sock", "unix:/a.sock:/b.sock": "two paths", "unix:/run/a\nb": "control",
		"unix:/" + strings.Repeat("x", 94): "at most 94",
	} {
		if got, err := ParseExpose(bad, ""); err == nil || !strings.Contains(err.Error(), "cannot read") || !strings.Contains(err.Error(), say) {
			t.Errorf("%q was read as %+v, %v; want an error that says %q", bad, got, err, say)
		}
	}
	if _, err := ParseExpose("unix:/run/app.sock", PathRelay); err == nil || !strings.Contains(err.Error(), "never relayed") {
		t.Errorf("a relayed unix socket: %v", err)
	}
	for _, bad := range []string{"", "0", "65536", "x", "a:b", "1:2:3:4:5", "80/tcp", "example.com:80", "[::1]", "[::1:80", "::1]:80", "[1.2.3.4]:80", "[x]:80", "[80]"} {
		if got, err := ParseExpose(bad, ""); err == nil || !strings.Contains(err.Error(), "cannot read") {
			t.Errorf("%q was read as %+v, %v", bad, got, err)
		}
	}
}

// FuzzParseExpose checks that every accepted endpoint makes a valid spec, and
// that its own addresses can be parsed again.
func FuzzParseExpose(f *testing.F) {
	for _, s := range []string{"8080", "8080:80", "0.0.0.0:8080", "10.0.0.1:8080:10.0.0.2:80", "[::1]:8080", "[::1]:8080:[fd00::2]:80", "53/udp",
		"[::]:53/udp", "unix:/run/app.sock", "unix:@app", "unix:/a:/b", "unix:/run/udp", "/run/app.sock", "::1:1", "unix:", "localhost:80", "[fe80::1%eth0]:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := ParseExpose(s, "")
		if err != nil {
			return
		}
		spec := good()
		spec.Expose = []Endpoint{e}
		if err := spec.Validate(); err != nil {
			t.Errorf("%q is %+v, which is not valid: %v", s, e, err)
		}
		again := e.Listen
		switch {
		case e.Proto == ProtoUnix:
			again = "unix:" + again
		case e.Listen != e.Target:
			again += ":" + e.Target
		case e.Proto == ProtoUDP:
			again += "/udp"
		}
		if b, err := ParseExpose(again, ""); err != nil || b != e {
			t.Errorf("%q is %+v, but %q is %+v, %v", s, e, again, b, err)
		}
	})
}

func TestParseExposeSaysThatIPv6NeedsBrackets(t *testing.T) {
	if _, err := ParseExpose("::1:18083", ""); err == nil || !strings.Contains(err.Error(), "brackets") {
		t.Error(err)
	}
}

func good() Spec {
	return Spec{Name: "a", Command: []string{"x"}, Expose: []Endpoint{{Listen: "127.0.0.1:1", Target: "127.0.0.1:1"}}}
}

// TestValidateNamesTheField makes one field invalid at a time and checks that the
// error names it.
func TestValidateNamesTheField(t *testing.T) {
	s := good()
	errtest.None(t, s.Validate())
	d := func(x time.Duration) *idle.Duration { v := idle.Duration(x); return &v }
	for field, spoil := range map[string]func(*Spec){
		"as a name":              func(s *Spec) { s.Name = "-a" },
		"command":                func(s *Spec) { s.Command = nil },
		"command or env":         func(s *Spec) { s.Command = []string{"a\x00b"} },
		"env[1]":                 func(s *Spec) { s.Env = []string{"A=1", "B"} },
		"workdir":                func(s *Spec) { s.Workdir = "here" },
		"idle_policy":            func(s *Spec) { s.IdlePolicy = "lazy" },
		"restart":                func(s *Spec) { s.Restart = "maybe" },
		"log_max_bytes":          func(s *Spec) { s.LogMax = -1 },
		"pause_after":            func(s *Spec) { s.PauseAfter = d(-1) },
		"stop_after":             func(s *Spec) { s.StopAfter = d(MaxDeadline + 1) },
		"reclaim_after":          func(s *Spec) { s.ReclaimAfter, s.StopAfter = *d(time.Minute), d(time.Minute) },
		"quiet_connection_after": func(s *Spec) { s.QuietConnectionAfter = -1 },
		"expose[0]":              func(s *Spec) { s.Expose[0].Path = "tunnel" },
		"image":                  func(s *Spec) { s.Image = "a\x00b" },
		"memory_bytes":           func(s *Spec) { s.Memory = 1 },
		"cpus":                   func(s *Spec) { s.CPUs = math.NaN() },
		"net":                    func(s *Spec) { s.Net = "some" },
		"workspace":              func(s *Spec) { s.Workspace = "here" },
		"hibernate_after":        func(s *Spec) { s.ReclaimAfter, s.HibernateAfter = 2, 2 },
		"expose[1]":              func(s *Spec) { s.Expose = append(s.Expose, s.Expose[0]) },
		"noise.sources[0]":       func(s *Spec) { s.Noise = &Noise{Sources: []string{"all"}} },
	} {
		s := good()
		spoil(&s)
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestValidateAdopted does the same for the spec of an adopted program.
func TestValidateAdopted(t *testing.T) {
	fine := func() Spec {
		return Spec{Name: "a", Command: []string{"x"}, Runtime: RuntimeAdopted, Restart: RestartNo, StopAfter: new(idle.Duration), Adopted: &Adopted{PID: 2}}
	}
	s := fine()
	errtest.None(t, s.Validate())
	yes, minute := true, idle.Duration(time.Minute)
	for field, spoil := range map[string]func(*Spec){
		"runtime adopted":   func(s *Spec) { s.Adopted = nil },
		"runtime":           func(s *Spec) { s.Runtime = "process" },
		"stop_after":        func(s *Spec) { s.StopAfter = &minute },
		"restart":           func(s *Spec) { s.Restart = RestartAlways },
		"wake_from_stopped": func(s *Spec) { s.WakeFromStopped = &yes },
		"env":               func(s *Spec) { s.Env = []string{"A=1"} },
		"user":              func(s *Spec) { s.User = "nobody" },
		"workdir":           func(s *Spec) { s.Workdir = "/" },
		"expose":            func(s *Spec) { s.Expose = good().Expose },
		"listen_fds":        func(s *Spec) { s.ListenFDs = true },
		"adopted":           func(s *Spec) { s.Adopted = &Adopted{PID: 1} },
		"use adopted":       func(s *Spec) { s.Adopted = &Adopted{PID: 2, Cgroup: "/g"} },
		"absolute":          func(s *Spec) { s.Adopted = &Adopted{Cgroup: "g"} },
	} {
		s := fine()
		spoil(&s)
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestCheckNewIsStricter checks that settings that records of earlier versions
// may contain are refused in a new spec.
func TestCheckNewIsStricter(t *testing.T) {
	for field, want := range map[string]func(*Spec){
		"workspace":     func(s *Spec) { s.Workspace = "/w:/data:RO" },
		"log_max_bytes": func(s *Spec) { s.LogMax = 1 },
		"stop_grace":    func(s *Spec) { s.StopGrace = idle.Duration(100 * 24 * time.Hour) },
		"listen_fds":    func(s *Spec) { s.Expose, s.ListenFDs = nil, true },
	} {
		s := good()
		want(&s)
		if err := s.Validate(); err != nil {
			t.Errorf("%s: a record of it cannot be read: %v", field, err)
		}
		if err := s.CheckNew(); err == nil || !strings.Contains(err.Error(), "cannot use "+field+": ") {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestWorkspace parses every valid form of a workspace, and checks that a
// misspelled ro or rw is refused instead of being read as part of a path, which
// would share the directory writable.
func TestWorkspace(t *testing.T) {
	for s, want := range map[string]Workspace{
		"":                 {},
		"/w":               {Dir: "/w", Path: "/workspace"},
		"/w:ro":            {Dir: "/w", Path: "/workspace", ReadOnly: true},
		"/w:rw":            {Dir: "/w", Path: "/workspace"},
		"/w:/data":         {Dir: "/w", Path: "/data"},
		"/w:/data:ro":      {Dir: "/w", Path: "/data", ReadOnly: true},
		"/w:/data:rw":      {Dir: "/w", Path: "/data"},
		"/a:b/w:/data":     {Dir: "/a:b/w", Path: "/data"},
		"/a:b:rw":          {Dir: "/a:b", Path: "/workspace"},
		"/a:b:/data:ro":    {Dir: "/a:b", Path: "/data", ReadOnly: true},
		"/a:/b:/data":      {Dir: "/a:/b", Path: "/data"},
		"/w:/data/sub-d.x": {Dir: "/w", Path: "/data/sub-d.x"},
	} {
		if got, err := ParseWorkspace(s); err != nil || got != want {
			t.Errorf("%q: %+v, %v", s, got, err)
		}
		if err := CheckWorkspace(s); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	for s, says := range map[string]string{
		"/w:/data:RO": `"RO" is neither ro nor rw`, "/w:RO": `"RO" is neither`, "/w:/data:r": `"r" is neither`, "/w:": `"" is neither`,
		"/w:/data:": `"" is neither`, "/w:/data:ro:ro": "a colon", "/w:/data:x/y": "a colon", "/w:/data:ro,z": "neither", "w": "absolute", "/w:/proc": "other than",
	} {
		if err := CheckWorkspace(s); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v; want %q", s, err, says)
		}
	}
}

// FuzzSpec decodes specs as the API does. Every accepted one must be valid and
// survive a round trip.
func FuzzSpec(f *testing.F) {
	s := good()
	b, err := json.Marshal(s)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"name":"a","command":["x"],"expose":[{"listen":":1","target":"localhost:2","path":"relay"}],"pause_after":1.5}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var s Spec
		if json.Unmarshal(b, &s) != nil || s.Validate() != nil {
			return
		}
		out, err := json.Marshal(s)
		errtest.None(t, err)
		var again Spec
		if err := json.Unmarshal(out, &again); err != nil || again.Validate() != nil {
			t.Fatalf("%s came back as %s: %v", b, out, err)
		}
		if len(s.Env) > 0 && !cmp.Equal(s.Env, again.Env) {
			t.Fatalf("the environment changed")
		}
	})
}

// TestCheckForNamesWhatARuntimeLacks requests one feature at a time of a runtime
// without that capability, and checks that the error names the field.
func TestCheckForNamesWhatARuntimeLacks(t *testing.T) {
	for field, want := range map[string]func(*Spec){
		"image":           func(s *Spec) { s.Image = "/img" },
		"memory_bytes":    func(s *Spec) { s.Memory = 64 << 20 },
		"cpus":            func(s *Spec) { s.CPUs = 1 },
		"net":             func(s *Spec) { s.Net = NetNone },
		"workspace":       func(s *Spec) { s.Workspace = "/w" },
		"reclaim_after":   func(s *Spec) { s.ReclaimAfter = 1 },
		"hibernate_after": func(s *Spec) { s.HibernateAfter = 1 },
		"expose[0]":       func(s *Spec) { s.Expose[0].Path = PathRelay },
	} {
		s := good()
		s.Runtime = "bare"
		want(&s)
		if err := s.Validate(); err != nil {
			t.Errorf("%s: %v", field, err)
		}
		err := s.CheckFor(power.Capabilities{})
		if err == nil || !strings.Contains(err.Error(), "cannot use "+field+": ") {
			t.Errorf("%s: %v", field, err)
		}
		if err := s.CheckFor(power.Capabilities{Image: true, Limits: true, Network: true, Workspace: true, Reclaim: true, Hibernate: true}); err != nil {
			t.Errorf("%s: refused by a runtime that has it: %v", field, err)
		}
	}
	for field, want := range map[string]func(*Spec){
		"listen_fds": func(s *Spec) { s.ListenFDs = true },
		"expose[0]":  func(s *Spec) { s.Expose[0].Path = PathDirect },
		"expose[1]":  func(s *Spec) { s.Expose = append(s.Expose, Endpoint{Proto: "udp", Listen: ":2", Target: ":2"}) },
	} {
		s := good()
		want(&s)
		if err := s.CheckFor(power.Capabilities{Network: true}); err == nil || !strings.Contains(err.Error(), "cannot use "+field+": ") {
			t.Errorf("%s: %v", field, err)
		}
	}
	s := good()
	s.Expose = []Endpoint{{Proto: "unix", Listen: "/run/app.sock", Target: "/run/app.sock"}}
	if err := s.CheckFor(power.Capabilities{}); err != nil {
		t.Errorf("a unix socket of a program of this machine: %v", err)
	}
	if err := s.CheckFor(power.Capabilities{Network: true}); err == nil {
		t.Error("a container accepts a unix socket")
	}
	for _, bad := range []Endpoint{{Proto: "unix", Listen: "@app", Target: "@app"}, {Proto: "unix", Listen: "/a", Target: "/b"}, {Proto: "tcp", Listen: ":1", Target: ":1"},
		{Proto: "unix", Listen: "/a", Target: "/a", Path: PathRelay}, {Listen: "/a", Target: "/a"}} {
		s.Expose = []Endpoint{bad}
		if err := s.Validate(); err == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}

func TestTheLadderRises(t *testing.T) {
	for _, c := range []struct {
		reclaim, hibernate, stop time.Duration
		wrong                    string
	}{
		{1, 2, 3, ""}, {0, 0, 3, ""}, {1, 2, 0, ""}, {0, 2, 0, ""},
		{2, 2, 3, "reclaim_after"}, {3, 0, 3, "reclaim_after"}, {0, 3, 3, "hibernate_after"}, {1, 4, 3, "hibernate_after"},
	} {
		s := good()
		s.ReclaimAfter, s.HibernateAfter = idle.Duration(c.reclaim), idle.Duration(c.hibernate)
		err := s.CheckLadder(c.stop)
		if (err == nil) != (c.wrong == "") || err != nil && !strings.Contains(err.Error(), "cannot use "+c.wrong) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestHow(t *testing.T) {
	for _, c := range []struct {
		e    Exit
		want string
	}{
		{Exit{Code: 3}, "exited with code 3"},
		{Exit{Lost: true}, "ended with an unknown exit status"},
		{Exit{Code: 143, Signal: 15}, "ended by signal 15 (terminated)"},
		{Exit{Code: 137, Signal: 9, Why: Starved("the kernel", 0)}, "ended by signal 9 (killed): out of memory: the kernel ended it"},
		{Exit{Code: 137, Why: Starved("the kernel", 64<<20)}, "exited with code 137: out of memory: the kernel ended it; it has 64 MiB: raise --memory"},
		{Exit{Lost: true, Machine: "the machine is shutdown"}, "the virtual machine ended: the machine is shutdown"},
	} {
		if got := c.e.How(); got != c.want {
			t.Errorf("%+v: %q, want %q", c.e, got, c.want)
		}
	}
}
