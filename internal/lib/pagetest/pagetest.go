// Package pagetest tests pages of docs as a reader uses them: it runs their
// commands and compares the output with what the page shows.
package pagetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Step is one command of a page.
type Step struct {
	Text  string
	line  int    // line of the command in the page
	shown string // output shown below the command's block; only on the block's last command
	first int    // index of the block's first command, where the shown output begins
}

// Steps returns the commands of a page: those in sh fences. A text fence directly
// after an sh fence shows its output. Anything else that looks like code is an error,
// so that no command is skipped.
func Steps(doc string) ([]Step, error) {
	var out []Step
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
				s := Step{line: begun + 1 + i, Text: body[i], first: first}
				if _, end, here := strings.Cut(body[i], "<<"); here {
					for end = strings.Trim(end, "'"); i+1 < len(body); {
						i++
						s.Text += "\n" + body[i]
						if body[i] == end {
							break
						}
					}
				}
				for strings.HasSuffix(body[i], "\\") && i+1 < len(body) {
					i++
					s.Text += "\n" + body[i]
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

// as returns the pattern for an output as shown on a page. An … within a line
// matches any text, a line with only … matches any number of lines, and spaces
// between columns match any number of spaces.
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

// Follow runs the commands in one shell, in the new directory work below dir and
// with the environment env, and compares the output of each with what the page
// shows. in is a command that runs the shell, such as nsenter; without it the
// shell runs directly.
func Follow(ctx context.Context, all []Step, dir string, env []string, in ...string) (faults []error) {
	var script strings.Builder
	script.WriteString("set -e\n")
	for i, s := range all {
		fmt.Fprintf(&script, "printf '\\001%d\\n'\n%s\n", i, s.Text)
	}
	fmt.Fprintf(&script, "printf '\\001%d\\n'\n", len(all))
	out, err := os.Create(filepath.Join(dir, "stdout")) // a file and not a pipe, because daemons keep standard output open
	if err != nil {
		return []error{err}
	}
	defer out.Close()
	stderr, err := os.Create(filepath.Join(dir, "stderr"))
	if err != nil {
		return []error{err}
	}
	defer stderr.Close()
	in = append(slices.Clip(in), "bash", "-c", script.String())
	cmd := exec.CommandContext(ctx, in[0], in[1:]...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = filepath.Join(dir, "work"), env, out, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	if err := os.Mkdir(cmd.Dir, 0o755); err != nil {
		return []error{err}
	}
	ended := cmd.Run()
	if cmd.Process != nil {
		if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
			faults = append(faults, fmt.Errorf("cannot end what the commands started: %w", err))
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
			return append(faults, fmt.Errorf("line %d is never run: %s\nit ended before (%v) with\n%s%s", s.line, s.Text, ended, outputs[i-1], said))
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
		faults = append(faults, fmt.Errorf("line %d fails: %s\n%v\n%s", all[len(all)-1].line, all[len(all)-1].Text, ended, said))
	}
	return faults
}

// Section returns the part of a page below a second-level heading, up to the next
// one. It returns "" if there is no such heading.
func Section(doc, heading string) string {
	_, section, _ := strings.Cut(doc, "\n## "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n## ")
	return section
}
