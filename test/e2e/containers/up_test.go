package containers

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/host/daemontest"
)

// TestUpTakesAComposeFile uses a Compose file with features that only Docker has,
// such as a named volume and service names, through the life of a project. Docker
// Compose is Debian's.
func TestUpTakesAComposeFile(t *testing.T) {
	_, err := exec.LookPath("docker-compose")
	if err != nil {
		err = exec.Command("docker", "compose", "version").Run()
	}
	daemontest.Need(t, err, "docker-compose")
	k := newDock(t)
	dir := t.TempDir()
	at := daemontest.Addr(t)
	_, port, _ := strings.Cut(at, ":")
	file := filepath.Join(dir, "compose.yaml")
	write := func(pause, greeting string) {
		t.Helper()
		text := `version: "3.8"
services:
  web:
    image: box:1
    command: [guest, serve, -listen, "0.0.0.0:8080"]
    environment: {GREETING: ` + greeting + `}
    ports: ["127.0.0.1:` + port + `:8080"]
    depends_on: [db]
    x-lull: {pause_after: ` + pause + `, stop_after: 3h}
  db:
    image: box:1
    command: [guest, serve, -listen, "0.0.0.0:9000"]
    volumes: ["data:/var/lib/data"]
    x-lull: {pause_after: 0}
  labeled:
    image: box:1
    command: [guest, serve, -listen, "0.0.0.0:9000"]
    labels: {lull.pause-after: 2h}
volumes:
  data: {}
`
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	lull := func(ok bool, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), daemontest.Program("lull"), args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "DOCKER_HOST=unix://"+k.Socket(), "LULL_HOST=unix://"+filepath.Join(k.d.Dir, "host.sock"))
		out, err := cmd.CombinedOutput()
		if (err == nil) != ok {
			t.Fatalf("lull %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	steps := func(args ...string) map[string]string {
		t.Helper()
		out := lull(true, append([]string{"up", "--dry-run"}, args...)...)
		of := map[string]string{}
		for line := range strings.Lines(out) {
			if f := strings.Fields(line); len(f) > 2 {
				of[f[1]] = strings.Join(f[2:], " ")
			}
		}
		return of
	}
	all := func(of map[string]string, want string) {
		t.Helper()
		if len(of) != 3 {
			t.Errorf("planned %v, want three services", of)
		}
		for name, does := range of {
			if !strings.HasPrefix(does, want) {
				t.Errorf("%s: %s, want %s", name, does, want)
			}
		}
	}

	write("1h", "hello")
	all(steps("--project", "shop"), "create")
	if ids := k.Say("ps", "-aq"); ids != "" {
		t.Errorf("a plan made %s", ids)
	}
	t.Setenv("COMPOSE_PROJECT_NAME", "") // ignore that of the user who runs the tests
	lull(true, "up", "--project", "shop")
	web := k.d.Show("shop-web")
	if web.PauseAfter != 3600 || web.StopAfter != 3*3600 || web.Runtime != "docker" || web.State != "running" {
		t.Errorf("web is %+v", web)
	}
	if o := k.d.Show("shop-db"); o.PauseAfter != 0 {
		t.Errorf("db is paused after %v s", o.PauseAfter)
	}
	k.answers(at)
	all(steps("--project", "shop"), "unchanged")

	// A second up leaves a sleeping service asleep, and starts one that a user
	// stopped.
	if err := k.d.Force("shop-web"); err != nil {
		t.Fatal(err)
	}
	k.d.Await("shop-web", "paused")
	lull(true, "up", "--project", "shop")
	if o := k.d.Show("shop-web"); o.State != "paused" {
		t.Errorf("a second lull up woke web: it is %s", o.State)
	}
	k.d.Must("shop-db", "stop")
	lull(true, "up", "--project", "shop")
	k.d.Await("shop-db", "running")

	// A changed setting is applied in place. For any other change, Compose
	// creates the container again, which keeps its settings.
	write("2h", "hello")
	if of := steps("--project", "shop"); of["shop-web"] != "change: pause_after" {
		t.Errorf("planned %v", of)
	}
	lull(true, "up", "--project", "shop")
	if o := k.d.Show("shop-web"); o.PauseAfter != 2*3600 || o.State != "paused" || o.ID != web.ID {
		t.Errorf("web is %s, paused after %v s", o.State, o.PauseAfter)
	}
	write("2h", "bye")
	if of := steps("--project", "shop"); of["shop-web"] != "replace: container" {
		t.Errorf("planned %v", of)
	}
	lull(true, "up", "--project", "shop")
	k.d.Await("shop-web", "running")
	if o := k.d.Show("shop-web"); o.PauseAfter != 2*3600 || o.ID != web.ID {
		t.Errorf("created again, web is %s, paused after %v s", o.ID, o.PauseAfter)
	}
	k.answers(at)
	all(steps("--project", "shop"), "unchanged")

	if out := lull(true, "down", "--project", "shop", "--dry-run"); strings.Count(out, "remove") != 3 {
		t.Errorf("would remove %s", out)
	}
	lull(true, "down", "--project", "shop")
	if ids := k.Say("ps", "-aq"); ids != "" {
		t.Errorf("left are %s", ids)
	}
	daemontest.Wait(t, "no instance is left", func() (bool, string) {
		l, err := k.d.List(t.Context())
		return err == nil && len(l) == 0, ""
	})
}
