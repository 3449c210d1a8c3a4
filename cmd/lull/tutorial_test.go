package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
)

// step is one command of a tutorial.
type step struct {
	line  int // of the document
	text  string
	shown string // what its block shows below it, on the block's last command
	first int    // index of the block's first command whose output the expected text covers
}

// steps extracts the commands of a tutorial: sh fences, each optionally
// followed directly by a text fence with their output. Anything else that looks
// like code is an error, so that no command is skipped.
func steps(doc string) ([]step, error) {
	var out []step
	fence, begun, body, after := "", 0, []string(nil), false
	for n, line := range strings.Split(doc, "\n") {
		n++
		kind, mark := strings.CutPrefix(line, "```")
		switch {
		case fence == "" && mark:
			if kind != "sh" && kind != "text" && kind != "yaml" || kind == "text" && !after {
				return nil, fmt.Errorf("line %d: want a fence of sh, one of text right after it, or one of yaml, which is not run, not %q", n, line)
			}
			fence, begun, body = kind, n, nil
		case fence == "":
			if strings.HasPrefix(line, "    ") || strings.HasPrefix(line, "\t") {
				return nil, fmt.Errorf("line %d: code outside a fence", n)
			}
			after = after && line == ""
		case !mark:
			body = append(body, line)
		case fence == "sh":
			first := len(out)
			for i := 0; i < len(body); i++ {
				if body[i] == "" || strings.HasPrefix(body[i], "#") {
					continue
				}
				s := step{line: begun + 1 + i, text: body[i], first: first}
				if _, end, here := strings.Cut(body[i], "<<"); here {
					for end = strings.Trim(end, "'"); i+1 < len(body); {
						i++
						s.text += "\n" + body[i]
						if body[i] == end {
							break
						}
					}
				}
				for strings.HasSuffix(body[i], "\\") && i+1 < len(body) {
					i++
					s.text += "\n" + body[i]
				}
				out = append(out, s)
			}
			if len(out) == first {
				return nil, fmt.Errorf("line %d: a block without a command", begun)
			}
			fence, after = "", true
		case fence == "yaml":
			fence, after = "", false
		default:
			out[len(out)-1].shown = strings.Join(body, "\n")
			fence, after = "", false
		}
	}
	if fence != "" {
		return nil, fmt.Errorf("line %d: a fence without an end", begun)
	}
	return out, nil
}

// as returns the pattern of a shown output: … within a line matches anything, a
// line of … alone any number of lines, and spaces between columns any number of
// spaces.
func as(shown string) *regexp.Regexp {
	var b strings.Builder
	b.WriteString(`^`)
	for _, line := range strings.Split(shown, "\n") {
		if line == "…" {
			b.WriteString(`(?:.*\n)*?`)
			continue
		}
		for i, part := range strings.Split(line, "…") {
			if i > 0 {
				b.WriteString(`.*`)
			}
			for j, word := range regexp.MustCompile(` +`).Split(part, -1) {
				if j > 0 {
					b.WriteString(` +`)
				}
				b.WriteString(regexp.QuoteMeta(word))
			}
		}
		b.WriteString(` *\n`)
	}
	return regexp.MustCompile(b.String() + `$`)
}

// followed runs a tutorial in one shell, command by command, and compares what
// they print with what is shown.
func followed(ctx context.Context, all []step, dir string, env []string) (faults []error) {
	var script strings.Builder
	script.WriteString("set -e\n")
	for i, s := range all {
		fmt.Fprintf(&script, "printf '\\001%d\\n'\n%s\n", i, s.text)
	}
	fmt.Fprintf(&script, "printf '\\001%d\\n'\n", len(all))
	out, err := os.Create(filepath.Join(dir, "stdout")) // a file, because daemons keep standard output open
	if err != nil {
		return []error{err}
	}
	defer out.Close()
	stderr, err := os.Create(filepath.Join(dir, "stderr"))
	if err != nil {
		return []error{err}
	}
	defer stderr.Close()
	cmd := exec.CommandContext(ctx, "bash", "-c", script.String())
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = filepath.Join(dir, "work"), env, out, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	if err := os.Mkdir(cmd.Dir, 0o755); err != nil {
		return []error{err}
	}
	ended := cmd.Run()
	if cmd.Process != nil {
		if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
			faults = append(faults, fmt.Errorf("cannot end what the tutorial started: %w", err))
		}
	}
	printed, err := os.ReadFile(out.Name())
	if err != nil {
		return append(faults, err)
	}
	said, err := os.ReadFile(stderr.Name())
	if err != nil {
		return append(faults, err)
	}
	outputs := map[int]string{}
	for _, part := range strings.Split(string(printed), "\x01")[1:] {
		n, text, _ := strings.Cut(part, "\n")
		i, err := strconv.Atoi(n)
		if err != nil {
			return append(faults, fmt.Errorf("cannot read where output begins: %w", err))
		}
		outputs[i] = text
	}
	for i, s := range all {
		if _, run := outputs[i]; !run {
			return append(faults, fmt.Errorf("line %d is never run: %s\nit ended before (%v) with\n%s%s", s.line, s.text, ended, outputs[i-1], said))
		}
		if s.shown == "" {
			continue
		}
		text := ""
		for n := s.first; n <= i; n++ {
			text += outputs[n]
		}
		if !as(s.shown).MatchString(text) {
			faults = append(faults, fmt.Errorf("line %d: shown is\n%s\nand printed was\n%s", s.line, s.shown, text))
		}
	}
	if _, whole := outputs[len(all)]; !whole || ended != nil {
		faults = append(faults, fmt.Errorf("line %d fails: %s\n%v\n%s", all[len(all)-1].line, all[len(all)-1].text, ended, said))
	}
	return faults
}

// TestTutorials follows the tutorials as a newcomer does: every command,
// in one shell, with the outputs that they show. They end with nothing left behind,
// and need little that a small Linux lacks.
func TestTutorials(t *testing.T) {
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
				parent = "/run" // writable for root only
			}
			dir, err := os.MkdirTemp(parent, "lull-tutorial-")
			errtest.None(t, err)
			t.Cleanup(func() {
				if err := os.RemoveAll(dir); err != nil {
					t.Log(err) // a daemon that is ending may still write
				}
			})
			t.Cleanup(func() { endShim(filepath.Join(dir, "work", "host", "shim")) })
			doc := contents(t, "../../docs/tutorial-"+name+".md")
			for _, port := range []string{"7070", "7071", "8443", "8080", "6379"} {
				doc = strings.ReplaceAll(doc, port, freePort(t))
			}
			all, err := steps(doc)
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
			for _, err := range followed(ctx, all, dir, env) {
				t.Error(err)
			}
			left, err := os.ReadDir(filepath.Join(dir, "work"))
			if err != nil || len(left) > 0 {
				t.Errorf("the tutorial leaves %v, %v", left, err)
			}
		})
	}
}

// TestTutorialsAreRead checks that the tutorial test fails for commands that
// fail, are not run, or print something other than shown.
func TestTutorialsAreRead(t *testing.T) {
	const good = "Words.\n\n```sh\n# a comment\nX=1\ncat > f <<EOF\n$X\nlast\nEOF\necho a \\\n  b; cat f\n```\n\n```text\na  b\n…\nl…t\n```\n"
	for _, c := range []struct{ what, doc, fault string }{
		{"good", good, ""},
		{"a command that fails", strings.Replace(good, "X=1", "X=1\nfalse\ntrue", 1), "line 7 is never run"},
		{"the last command fails", good + "\n```sh\nfalse\n```\n", "line 21 fails"},
		{"another output", strings.Replace(good, "l…t", "list", 1), "shown is"},
		{"output that is not shown", strings.Replace(good, "l…t\n", "", 1), ""}, // … reaches to the end
		{"too little output", strings.Replace(good, "a  b\n…", "a  b\n1\n2\n…", 1), "shown is"},
		{"a fence of another kind", good + "```bash\ntrue\n```\n", "line 19: want a fence"},
		{"code without a fence", good + "\n    true\n", "line 20: code outside"},
		{"text without commands", "```text\nx\n```\n", "line 1: want a fence"},
		{"no end", good + "```sh\ntrue\n", "line 19: a fence without"},
	} {
		all, err := steps(c.doc)
		faults := []error{err}
		if err == nil {
			faults = followed(t.Context(), all, t.TempDir(), os.Environ())
		}
		if got := errors.Join(faults...); (got == nil) != (c.fault == "") || got != nil && !strings.Contains(got.Error(), c.fault) {
			t.Errorf("%s: %v, want %q", c.what, got, c.fault)
		}
	}
}

// TestPages pastes the commands of pages that are not tutorials into a shell, in a
// folder that has the programs which they take for the reader's own.
func TestPages(t *testing.T) {
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
				case strings.Contains(line, "jupyter"): // refuses to run as root; TestJupyterProbe runs it
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
	all, err := steps(doc)
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
	for _, err := range followed(ctx, all, dir, env) {
		t.Error(err)
	}
}
