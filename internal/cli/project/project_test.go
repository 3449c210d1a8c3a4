package project

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/protocol/hostctl"
)

// parse reads a project file with the given text.
func parse(t *testing.T, text string, env ...string) (*project, []string, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "lull.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return parseFile(t, path, env...)
}

func parseFile(t *testing.T, path string, env ...string) (*project, []string, error) {
	t.Helper()
	f, err := read(path)
	if err != nil {
		return nil, nil, err
	}
	loaded, notes, err := load(t.Context(), f, "", env, false)
	if err != nil {
		return nil, nil, err
	}
	p, err := describe(f, loaded)
	return p, notes, err
}

const shop = `name: shop
x-defaults: &defaults
  restart: always
  pause_after: 30s
services:
  web:
    <<: *defaults
    command: python3 -m http.server ${PORT:-8080}
    ports: ["8080", "127.0.0.1:8443:443", "[::1]:53:53/udp"]
    environment: {GREETING: "it costs 5$$", FROM: "${WHO}"}
    stop_after: 1h
    wake: false
    schedule: ["0 7 * * mon-fri", "@every 10m"]
    depends_on: [api]
  api:
    image: example.com/api:1
    entrypoint: [/api]
    command: [--port, "9000"]
    expose: ["9000"]
    volumes: ["./data:/data:ro"]
    deploy: {resources: {limits: {memory: 512m, cpus: "1.5"}}}
    depends_on: {db: {condition: service_healthy}}
    labels: {lull.pause-after: 2m, team: blue}
  db:
    command: [postgres]
    expose: [5432]
    stop_grace_period: 1m
    x-lull: {idle_policy: leases_only, quiet_connection_after: 10m}
`

func TestDescribe(t *testing.T) {
	p, notes, err := parse(t, shop, "WHO=me", "PORT=8080")
	if err != nil || len(notes) > 0 {
		t.Fatal(err, notes)
	}
	var order []string
	specs := map[string]instance.Spec{}
	for _, s := range p.services {
		order = append(order, s.name)
		specs[s.name] = s.spec
	}
	if !slices.Equal(order, []string{"db", "api", "web"}) {
		t.Errorf("order %v", order)
	}
	web, api, db := specs["web"], specs["api"], specs["db"]
	span := func(d time.Duration) *idle.Duration { v := idle.Duration(d); return &v }
	if want := (instance.Spec{Name: "shop-web", Runtime: "process", Command: []string{"python3", "-m", "http.server", "8080"},
		Env: []string{"FROM=me", "GREETING=it costs 5$"}, Workdir: web.Workdir, Restart: "always", PauseAfter: span(30 * time.Second), StopAfter: span(time.Hour),
		WakeSchedule: []string{"0 7 * * mon-fri", "@every 10m"}, WakeFromStopped: new(false), Labels: map[string]string{}, DependsOn: []string{"shop-api"}, Expose: []instance.Endpoint{
			{Listen: "127.0.0.1:8080", Target: "127.0.0.1:8080", Path: "auto"}, {Listen: "127.0.0.1:8443", Target: "127.0.0.1:443", Path: "auto"},
			{Proto: "udp", Listen: "[::1]:53", Target: "[::1]:53", Path: "auto"}}}); !reflect.DeepEqual(web, want) {
		t.Errorf("web is\n%+v, want\n%+v", web, want)
	}
	if !filepath.IsAbs(web.Workdir) || db.Workdir != web.Workdir {
		t.Errorf("working directories %s, %s", web.Workdir, db.Workdir)
	}
	if want := (instance.Spec{Name: "shop-api", Runtime: "container", Image: "example.com/api:1", Command: []string{"/api", "--port", "9000"}, Memory: 512 << 20, CPUs: 1.5,
		Workspace: filepath.Join(web.Workdir, "data") + ":/data:ro", PauseAfter: span(2 * time.Minute), Labels: map[string]string{"team": "blue"}, DependsOn: []string{"shop-db"},
		Expose: []instance.Endpoint{{Listen: "127.0.0.1:9000", Target: "127.0.0.1:9000", Path: "auto"}}}); !reflect.DeepEqual(api, want) {
		t.Errorf("api is\n%+v, want\n%+v", api, want)
	}
	if db.IdlePolicy != "leases_only" || time.Duration(db.QuietConnectionAfter) != 10*time.Minute || time.Duration(db.StopGrace) != time.Minute || db.PauseAfter != nil {
		t.Errorf("db is %+v", db)
	}
}

// TestShownIsRead checks that a project is the same after it was printed by lull
// config and read again.
func TestShownIsRead(t *testing.T) {
	p, _, err := parse(t, shop, "WHO=me")
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	if err := p.show().write(&text); err != nil {
		t.Fatal(err)
	}
	again, _, err := parse(t, text.String())
	if err != nil {
		t.Fatalf("%v in\n%s", err, &text)
	}
	if !reflect.DeepEqual(p, again) {
		t.Errorf("read again it is\n%+v, want\n%+v", again, p)
	}
}

// TestFaults checks that the error for each fault names the line and the attribute.
func TestFaults(t *testing.T) {
	for _, c := range []struct{ name, text, where string }{
		{"no YAML", "services:\n  web:\n   - a\n  b\n", "lull.yaml:4: "},
		{"twice", "services:\n  a: {command: x}\n  a: {command: y}\n", "lull.yaml:3: "},
		{"empty", "", "lull.yaml: "},
		{"a list", "- a\n", "lull.yaml: "},
		{"two documents", "services: {}\n---\nservices: {}\n", "lull.yaml: "},
		{"no services", "name: shop\n", "lull.yaml: services: "},
		{"unknown", "services:\n  web:\n    command: x\n    portz: [80]\n", "lull.yaml:4: services.web.portz: "},
		{"unknown at the top", "services:\n  web: {command: x}\nvolumez: {}\n", "lull.yaml:3: volumez: "},
		{"port", "services:\n  db: {command: y}\n  web:\n    command: x\n    ports: [eighty]\n", "lull.yaml:5: services.web.ports: "},
		{"port range", "services:\n  web:\n    command: x\n    ports: [80, \"8000-8001:90\"]\n", "lull.yaml:4: services.web.ports.1: "},
		{"dependency", "services:\n  web:\n    command: x\n    depends_on: [db]\n", "services.web"},
		{"circle", "services:\n  a: {command: x, depends_on: [b]}\n  b: {command: x, depends_on: [a]}\n", "lull.yaml"},
		{"time", "services:\n  web:\n    command: x\n    pause_after: soon\n", "lull.yaml:4: services.web.pause_after: "},
		{"schedule", "services:\n  web:\n    command: x\n    schedule: hourly\n", "lull.yaml:4: services.web.schedule: "},
		{"wake", "services:\n  web:\n    command: x\n    wake: perhaps\n", "lull.yaml:4: services.web.wake: "},
		{"ladder", "services:\n  web:\n    command: x\n    stop_after: 1m\n    reclaim_after: 2m\n", "lull.yaml:2: services.web: "},
		{"extension", "services:\n  web:\n    command: x\n    x-lull: {pause-after: 1m}\n", "services.web.pause-after: "},
		{"label", "services:\n  web:\n    command: x\n    labels: {lull.pauseafter: 1m}\n", "lull.yaml:2: services.web.pauseafter: "},
		{"set twice", "services:\n  web:\n    command: x\n    pause_after: 1m\n    x-lull: {pause_after: 2m}\n", "lull.yaml:4: services.web.pause_after: "},
		{"no command", "services:\n  web: {ports: [80]}\n", "lull.yaml:2: services.web"},
		{"command without the entrypoint", "services:\n  web:\n    image: a:1\n    command: x\n", "lull.yaml:4: services.web.command: "},
		{"build", "services:\n  web:\n    build: .\n", "lull.yaml:3: services.web.build: "},
		{"privileged", "services:\n  web:\n    image: a\n    privileged: true\n", "lull.yaml:4: services.web.privileged: "},
		{"named volume", "services:\n  web:\n    image: a\n    volumes: [data:/data]\nvolumes: {data: {}}\n", "lull.yaml:4: services.web.volumes"},
		{"two folders", "services:\n  web:\n    image: a\n    volumes: [/a:/a, /b:/b]\n", "lull.yaml:4: services.web.volumes.1: "},
		{"copies", "services:\n  web:\n    command: x\n    deploy: {replicas: 2}\n", "lull.yaml:4: services.web.deploy: "},
		{"a job", "services:\n  a: {command: x}\n  web:\n    command: x\n    depends_on: {a: {condition: service_completed_successfully}}\n", "lull.yaml:5: services.web.depends_on.a: "},
		{"runtime", "services:\n  web:\n    command: x\n    runtime: jail\n", "lull.yaml:4: services.web.runtime: "},
		{"variable", "services:\n  web:\n    command: ${WHO:?is missing}\n", "lull.yaml:3: services.web.command: "},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, _, err := parse(t, c.text)
			if err == nil {
				t.Fatalf("read %+v", p)
			}
			if !strings.Contains(err.Error(), c.where) {
				t.Errorf("%q does not contain %q", err, c.where)
			}
			if strings.Contains(err.Error(), nothing) {
				t.Errorf("%q names the placeholder image", err)
			}
		})
	}
}

// TestComposeFile checks that a typical Compose file can be read, and that attributes
// without effect are named with their lines.
func TestComposeFile(t *testing.T) {
	_, notes, err := parse(t, `version: "3.8"
services:
  cache:
    image: redis:7
    container_name: cache
    restart: unless-stopped
    ports: ["6379:6379"]
    healthcheck:
      test: ["CMD", "redis-cli", "ping"]
    networks: [back]
networks:
  back: {driver: bridge}
`)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"lull.yaml:5: services.cache.container_name has no effect", "lull.yaml:8: services.cache.healthcheck has no effect", "lull.yaml:10: services.cache.networks has no effect"}
	slices.Sort(notes)
	slices.Sort(want)
	if !slices.Equal(notes, want) {
		t.Errorf("notes %q, want %q", notes, want)
	}
}

// TestSchemaKnowsEveryAttribute checks that the schema has every attribute in the
// files of these tests.
func TestSchemaKnowsEveryAttribute(t *testing.T) {
	var s struct {
		Properties struct {
			Services struct {
				AdditionalProperties struct{ Properties map[string]any }
			}
		}
	}
	if err := json.Unmarshal(Schema(), &s); err != nil {
		t.Fatal(err)
	}
	known := s.Properties.Services.AdditionalProperties.Properties
	shown := reflect.TypeFor[shownService]()
	for n := range shown.NumField() {
		name, _, _ := strings.Cut(shown.Field(n).Tag.Get("yaml"), ",")
		if known[name] == nil {
			t.Errorf("the schema lacks %s", name)
		}
	}
}

// asListed returns the instance that the host would list after lull up created one
// from spec.
func asListed(spec instance.Spec) hostctl.Instance {
	seconds := func(d *idle.Duration, none float64) float64 {
		if d == nil {
			return none
		}
		return time.Duration(*d).Seconds()
	}
	return hostctl.Instance{Name: spec.Name, State: "running", Labels: spec.Labels, PauseAfter: seconds(spec.PauseAfter, 60), StopAfter: seconds(spec.StopAfter, 300),
		ReclaimAfter: time.Duration(spec.ReclaimAfter).Seconds(), HibernateAfter: time.Duration(spec.HibernateAfter).Seconds(), IdlePolicy: spec.IdlePolicy, Wakes: spec.Wakes()}
}

// TestPlanNamesWhatDiffers changes random settings of a service. It checks that the
// plan names exactly these settings, and replaces the instance only if one of them
// requires that.
func TestPlanNamesWhatDiffers(t *testing.T) {
	span := func(d idle.Duration) *idle.Duration { return &d }
	edits := map[string]struct {
		do   func(*instance.Spec)
		live bool
	}{
		"command":           {func(s *instance.Spec) { s.Command = []string{"other"} }, false},
		"env":               {func(s *instance.Spec) { s.Env = []string{"A=2"} }, false},
		"workdir":           {func(s *instance.Spec) { s.Workdir = "/other" }, false},
		"expose":            {func(s *instance.Spec) { s.Expose = nil }, false},
		"depends_on":        {func(s *instance.Spec) { s.DependsOn = []string{"shop-db"} }, false},
		"probes":            {func(s *instance.Spec) { s.Probes = []instance.Probe{{Name: "file", Kind: "file", Path: "/p"}} }, false},
		"user":              {func(s *instance.Spec) { s.User = "nobody" }, false},
		"pause_after":       {func(s *instance.Spec) { s.PauseAfter = span(7e9) }, true},
		"stop_after":        {func(s *instance.Spec) { s.StopAfter = nil }, false}, // back to the host's default
		"reclaim_after":     {func(s *instance.Spec) { s.ReclaimAfter = 5e9 }, true},
		"stop_grace":        {func(s *instance.Spec) { s.StopGrace = 0 }, true},
		"restart":           {func(s *instance.Spec) { s.Restart = "no" }, true},
		"wake_from_stopped": {func(s *instance.Spec) { s.WakeFromStopped = new(true) }, true},
		"labels":            {func(s *instance.Spec) { s.Labels = map[string]string{"team": "red"} }, true},
	}
	names := slices.Sorted(maps.Keys(edits))
	rapid.Check(t, func(t *rapid.T) {
		was := instance.Spec{Name: "shop-web", Runtime: "process", Command: []string{"web"}, Env: []string{"A=1"}, Workdir: "/w", PauseAfter: span(9e9), StopAfter: span(90e9),
			StopGrace: 3e9, Restart: "always", WakeFromStopped: new(false), Labels: map[string]string{"team": "blue"}, Expose: []instance.Endpoint{{Listen: "127.0.0.1:80", Target: "127.0.0.1:80", Path: "auto"}}}
		now := was
		picked := rapid.SliceOfDistinct(rapid.SampledFrom(names), func(s string) string { return s }).Draw(t, "edited")
		live := true
		for _, name := range picked {
			edits[name].do(&now)
			live = live && edits[name].live
		}
		p := &project{name: "shop", services: []member{{name: "web", spec: now}}}
		steps, err := plan(p, []hostctl.Instance{asListed(labeled("shop", "web", was))}, nil, false)
		if err != nil || len(steps) != 1 {
			t.Fatal(steps, err)
		}
		slices.Sort(picked)
		slices.Sort(steps[0].Changed)
		want := map[bool]action{true: change, false: replace}[live]
		if len(picked) == 0 {
			want = unchanged
		}
		if steps[0].Action != want || !slices.Equal(steps[0].Changed, picked) {
			t.Fatalf("%s %q, want %s %q", steps[0].Action, steps[0].Changed, want, picked)
		}
		if want == change {
			after := steps[0].change.Apply(labeled("shop", "web", was))
			if again, _ := plan(p, []hostctl.Instance{asListed(after)}, nil, false); again[0].Action != unchanged {
				t.Fatalf("after the change: %s %q", again[0].Action, again[0].Changed)
			}
		}
	})
}

func TestPlan(t *testing.T) {
	p, _, err := parse(t, shop)
	if err != nil {
		t.Fatal(err)
	}
	of := func(steps []step) string {
		var text []string
		for _, s := range steps {
			text = append(text, string(s.Action)+" "+s.Instance)
		}
		return strings.Join(text, ", ")
	}
	var all []hostctl.Instance
	for _, s := range p.services {
		all = append(all, asListed(labeled("shop", s.name, s.spec)))
	}
	asleep, stopped, ended := slices.Clone(all), slices.Clone(all), slices.Clone(all)
	asleep[0].State = "paused"
	stopped[0].State, stopped[0].StartsOnConnection = "stopped", true
	ended[0].State = "stopped"
	set := slices.Clone(all)
	set[1].PauseAfter = 5
	stranger := hostctl.Instance{Name: "shop-old", State: "running", Labels: map[string]string{labelProject: "shop", labelService: "old"}}
	other := hostctl.Instance{Name: "shop-older", State: "running", Labels: map[string]string{labelProject: "shops"}}
	for _, c := range []struct {
		name    string
		now     []hostctl.Instance
		only    []string
		orphans bool
		want    string
	}{
		{"nothing is there", nil, nil, false, "create shop-db, create shop-api, create shop-web"},
		{"a service and what it depends on", nil, []string{"api"}, false, "create shop-db, create shop-api"},
		{"all is there", all, nil, false, "unchanged shop-db, unchanged shop-api, unchanged shop-web"},
		{"one is paused", asleep, nil, false, "unchanged shop-db, unchanged shop-api, unchanged shop-web"},
		{"one is stopped and a connection starts it", stopped, nil, false, "unchanged shop-db, unchanged shop-api, unchanged shop-web"},
		{"one has ended", ended, nil, false, "start shop-db, unchanged shop-api, unchanged shop-web"},
		{"one was set by a user", set, nil, false, "unchanged shop-db, change shop-api, unchanged shop-web"},
		{"one too many", append(slices.Clone(all), stranger, other), nil, false, "unchanged shop-db, unchanged shop-api, unchanged shop-web, orphan shop-old"},
		{"one too many, removed", append(slices.Clone(all), stranger, other), nil, true, "unchanged shop-db, unchanged shop-api, unchanged shop-web, remove shop-old"},
	} {
		steps, err := plan(p, c.now, c.only, c.orphans)
		if got := of(steps); err != nil || got != c.want {
			t.Errorf("%s: %s (%v), want %s", c.name, got, err, c.want)
		}
	}
	if steps, err := plan(p, []hostctl.Instance{{Name: "shop-db"}}, nil, false); err == nil {
		t.Errorf("takes over an instance that lull up did not create: %s", of(steps))
	}
	if _, err := plan(p, nil, []string{"cache"}, false); err == nil {
		t.Error("plans for a service that the file lacks")
	}
	if got, want := of(teardown("shop", p, append(slices.Clone(all), stranger, other))), "remove shop-web, remove shop-api, remove shop-db, remove shop-old"; got != want {
		t.Errorf("down: %s, want %s", got, want)
	}
}

func FuzzFile(f *testing.F) {
	f.Add([]byte(shop))
	f.Add([]byte("services: {a: {image: 3, command: [1, {}]}}"))
	f.Add([]byte("services: &a {b: *a}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "lull.yaml")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if p, _, err := parseFile(t, path); err == nil {
			for _, s := range p.services {
				if err := s.spec.CheckNew(); err != nil {
					t.Errorf("%s is accepted: %v", s.name, err)
				}
			}
		}
	})
}

// TestWhoRunsAFile checks which files Docker Compose runs by default.
func TestWhoRunsAFile(t *testing.T) {
	for _, c := range []struct {
		file, text string
		docker     bool
	}{
		{"compose.yaml", "services: {a: {image: x}, b: {build: .}}", true},
		{"docker-compose.yml", "services: {a: {image: x, networks: [n]}}\nnetworks: {n: {}}", true},
		{"lull.yaml", "services: {a: {image: x}}", false},
		{"compose.yaml", "services: {a: {image: x}, b: {command: sleep 9}}", false},
		{"compose.yaml", "services: {}", false},
	} {
		path := filepath.Join(t.TempDir(), c.file)
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := read(path)
		if err != nil {
			t.Fatal(err)
		}
		if f.inDocker() != c.docker {
			t.Errorf("%s with %q: %t, want %t", c.file, c.text, !c.docker, c.docker)
		}
	}
}

// inCompose reads a compose.yaml that Docker Compose runs.
func inCompose(t *testing.T, text string) (*project, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "compose.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	_, p, _, err := (&source{file: path, docker: "true"}).open(t.Context(), nil)
	return p, err
}

// TestComposeFaults checks that settings that an adopted container cannot have are
// rejected with their line.
func TestComposeFaults(t *testing.T) {
	for text, want := range map[string]string{
		"services:\n  a:\n    image: x\n    pause_after: 5s\n":                      "compose.yaml:4: services.a.pause_after: ",
		"services:\n  a:\n    image: x\n    x-lull:\n      pause_after: soon\n":     "compose.yaml:",
		"services:\n  a:\n    image: x\n    x-lull: {schedule: '@every 10m'}\n":     "compose.yaml:4: services.a.x-lull.schedule: ",
		"services:\n  a:\n    image: x\n    x-lull:\n      hibernate_after: 5m\n":   "compose.yaml:5: services.a.x-lull.hibernate_after: ",
		"services:\n  a:\n    image: x\n    x-lull: {wake_on_outbound: true}\n":     "compose.yaml:4: services.a.x-lull.wake_on_outbound: ",
		"services:\n  a:\n    image: x\n    x-lull: {runtime: microvm}\n":           "compose.yaml:4: services.a.x-lull.runtime: ",
		"services:\n  a:\n    image: x\n    depends_on: [b]\n  b:\n    imagee: y\n": "compose.yaml:6: services.b.imagee: ",
	} {
		if _, err := inCompose(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}

// TestPlanInDocker checks the plan for services whose containers are in various
// states.
func TestPlanInDocker(t *testing.T) {
	p, err := inCompose(t, "name: shop\nservices:\n  web: {image: x, depends_on: [db], x-lull: {pause_after: 30s}}\n  db: {image: y}\n")
	if err != nil {
		t.Fatal(err)
	}
	spec := labeled("shop", "web", p.services[1].spec)
	web := made{id: "abc", name: "shop-web-1", service: "web", hash: "1", state: "running", number: 1}
	asWeb := hostctl.Instance{Name: "w", Runtime: instance.RuntimeDocker, Image: "shop/web/1", State: "running", PauseAfter: 30, Labels: spec.Labels}
	changed := func(edit func(m *made, o *hostctl.Instance)) (made, hostctl.Instance) {
		m, o := web, asWeb
		edit(&m, &o)
		return m, o
	}
	for name, c := range map[string]struct {
		edit func(m *made, o *hostctl.Instance)
		want action
	}{
		"as it should be":                   {func(*made, *hostctl.Instance) {}, unchanged},
		"asleep":                            {func(m *made, _ *hostctl.Instance) { m.state = "paused" }, unchanged},
		"stopped by lull":                   {func(m *made, o *hostctl.Instance) { m.state, o.StartsOnConnection = "exited", true }, unchanged},
		"stopped by a user":                 {func(m *made, _ *hostctl.Instance) { m.state = "exited" }, start},
		"never started":                     {func(m *made, _ *hostctl.Instance) { m.state = "created" }, start},
		"of another description":            {func(m *made, _ *hostctl.Instance) { m.hash = "0" }, replace},
		"not adopted":                       {func(_ *made, o *hostctl.Instance) { o.Image = "other/web/1" }, adopt},
		"not adopted, with a label":         {func(m *made, o *hostctl.Instance) { m.labeled, o.Image = true, "other/web/1" }, unchanged},
		"adopted by its name":               {func(_ *made, o *hostctl.Instance) { o.Image = "shop-web-1" }, unchanged},
		"a user has changed a setting":      {func(_ *made, o *hostctl.Instance) { o.PauseAfter = 31 }, change},
		"adopted by a user":                 {func(_ *made, o *hostctl.Instance) { o.Labels = nil }, change},
		"the same, and the label has rules": {func(m *made, o *hostctl.Instance) { m.labeled, o.Labels = true, nil }, unchanged},
	} {
		m, o := changed(c.edit)
		steps, err := planDocker(p, map[string]string{"web": "1", "db": "2"}, []made{m}, []hostctl.Instance{o}, []string{"web"}, false)
		if err != nil || len(steps) != 2 || steps[1].Action != c.want || steps[0].Action != create {
			t.Errorf("%s: %+v, %v, want %s", name, steps, err, c.want)
		}
	}
	// A container of a service that is no longer in the file.
	old := web
	old.service, old.name = "old", "shop-old-1"
	for _, removes := range []bool{false, true} {
		steps, err := planDocker(p, nil, []made{old}, nil, nil, removes)
		if want := map[bool]action{false: orphan, true: remove}[removes]; err != nil || len(steps) != 3 || steps[2].Action != want {
			t.Errorf("%+v, %v, want %s", steps, err, want)
		}
	}
}
