package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/pagetest"
	"lull/internal/lib/programtest"
)

// TestTutorials follows the tutorials as a newcomer would: it runs every command in
// one shell and compares the output with the tutorial's. Nothing may be left behind,
// and the tutorials may need little that a small Linux lacks.
func TestTutorials(t *testing.T) {
	t.Parallel()
	need(t, "bash")
	shim := programtest.Build(t, "lull/cmd/lull-shim")
	for _, name := range []string{"adopt", "fleet", "host", "workspace"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			parent := ""
			if name == "workspace" {
				if os.Geteuid() != 0 {
					t.Skip("only root may end a machine")
				}
				parent = "/run" // only root can write there
			}
			dir, err := os.MkdirTemp(parent, "lull-tutorial-")
			errtest.None(t, err)
			t.Cleanup(func() {
				if err := os.RemoveAll(dir); err != nil {
					t.Log(err) // a daemon that is ending may still be writing
				}
			})
			t.Cleanup(func() { endShim(filepath.Join(dir, "work", "host", "shim")) })
			doc := contents(t, "../../docs/tutorial-"+name+".md")
			if name == "adopt" {
				// Tests in test/e2e/units and test/e2e/containers follow these.
				for _, heading := range []string{"A systemd unit", "Containers and Compose"} {
					section := pagetest.Section(doc, heading)
					if section == "" {
						t.Fatalf("there is no section %q", heading)
					}
					doc = strings.Replace(doc, section, "", 1)
				}
			}
			for _, port := range []string{"7070", "7071", "8443", "8080", "6379"} {
				doc = strings.ReplaceAll(doc, port, freePort(t))
			}
			all, err := pagetest.Steps(doc)
			errtest.None(t, err)
			few := filepath.Join(dir, "bin")
			errtest.None(t, os.Mkdir(few, 0o755))
			tools := []string{"lull", "sh", "cat", "sleep", "grep", "awk", "touch", "rm"}
			if name == "adopt" {
				tools = append(tools, "redis-server", "redis-cli")
			}
			for _, tool := range tools {
				errtest.None(t, os.Symlink(need(t, tool), filepath.Join(few, tool)))
			}
			env := []string{"LULL_HOST_SHIM=" + shim, "HOME=" + dir, "TZ=UTC", "PATH=" + few}
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
			defer cancel()
			for _, err := range pagetest.Follow(ctx, all, dir, env) {
				t.Error(err)
			}
			left, err := os.ReadDir(filepath.Join(dir, "work"))
			if err != nil || len(left) > 0 {
				t.Errorf("the tutorial leaves %v, %v", left, err)
			}
		})
	}
}

// TestTutorialsAreRead checks that the tutorial test fails for a command that fails,
// that is not run, or whose output differs from what is shown.
func TestTutorialsAreRead(t *testing.T) {
	const good = "Words.\n\n```sh\n# a comment\nX=1\ncat > f <<EOF\n$X\nlast\nEOF\necho a \\\n  b; cat f\n```\n\n```text\na  b\n…\nl…t\n```\n"
	for _, c := range []struct{ what, doc, fault string }{
		{"good", good, ""},
		{"a command that fails", strings.Replace(good, "X=1", "X=1\nfalse\ntrue", 1), "line 7 is never run"},
		{"the last command fails", good + "\n```sh\nfalse\n```\n", "line 21 fails"},
		{"another output", strings.Replace(good, "l…t", "list", 1), "shown is"},
		{"output that is not shown", strings.Replace(good, "l…t\n", "", 1), ""}, // the … would match to the end
		{"too little output", strings.Replace(good, "a  b\n…", "a  b\n1\n2\n…", 1), "shown is"},
		{"a fence of another kind", good + "```bash\ntrue\n```\n", "line 19: want a fence"},
		{"code without a fence", good + "\n    true\n", "line 20: code outside"},
		{"text without commands", "```text\nx\n```\n", "line 1: want a fence"},
		{"no end", good + "```sh\ntrue\n", "line 19: a fence without"},
	} {
		all, err := pagetest.Steps(c.doc)
		faults := []error{err}
		if err == nil {
			faults = pagetest.Follow(t.Context(), all, t.TempDir(), os.Environ())
		}
		if got := errors.Join(faults...); (got == nil) != (c.fault == "") || got != nil && !strings.Contains(got.Error(), c.fault) {
			t.Errorf("%s: %v, want %q", c.what, got, c.fault)
		}
	}
}

// TestPages runs the commands of pages that are not tutorials in a shell, in a
// directory that has the programs which the pages take for the reader's own.
func TestPages(t *testing.T) {
	t.Parallel()
	need(t, "python3")
	need(t, "redis-server")
	shim := programtest.Build(t, "lull/cmd/lull-shim")
	dir := t.TempDir()
	t.Cleanup(func() { endShim(filepath.Join(dir, "work", "host", "shim")) })
	const before, after = "```sh\n" + `lull host --data "$PWD/host" --socket "$PWD/host/host.sock" --probe-interval 500ms 2> host.log &
export LULL_HOST="unix://$PWD/host/host.sock"
until lull ps 2>/dev/null; do sleep 1; done
for name in runner web worker; do printf '#!/bin/sh\nexec sleep 1000\n' > $name; chmod +x $name; done
`, "kill %2\nlull rm -f ci worker\nkill %1\nwait\n```\n"
	var body strings.Builder
	for _, page := range []string{"adopt", "probes", "projects"} {
		doc := contents(t, "../../docs/"+page+".md")
		for n, block := range strings.Split(doc, "\n```sh\n")[1:] {
			text, _, _ := strings.Cut(block, "```")
			if _, file, found := strings.Cut(doc, "```yaml\nname: shop\n"); found && n == 0 {
				file, _, _ = strings.Cut(file, "```")
				body.WriteString("cat > lull.yaml <<'EOF'\nname: shop\n" + file + "EOF\n")
			}
			for line := range strings.Lines(text) {
				switch {
				case strings.Contains(line, "jupyter"): // jupyter refuses to run as root; TestJupyterProbe runs it
				case strings.Contains(line, "--watch"):
					body.WriteString("timeout -s INT 2 lull up --watch || [ $? = 124 ]\n")
				default:
					body.WriteString(line)
				}
			}
		}
	}
	doc := before + body.String() + after
	for _, port := range []string{"8000", "8080", "6390"} {
		doc = strings.ReplaceAll(doc, port, freePort(t))
	}
	all, err := pagetest.Steps(doc)
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(need(t, "lull"), filepath.Join(bin, "lull")); err != nil {
		t.Fatal(err)
	}
	env := []string{"LULL_HOST_SHIM=" + shim, "HOME=" + dir, "TZ=UTC", "PATH=" + bin + ":" + os.Getenv("PATH")}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for _, err := range pagetest.Follow(ctx, all, dir, env) {
		t.Error(err)
	}
}
