package main

import (
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"lull/internal/cli/term"
	"lull/internal/cli/topics"
)

// internals matches words of Go and its libraries, which messages to users must not
// contain.
var internals = regexp.MustCompile(`strconv|arg\(s\)|invalid argument|unmarshal|context deadline|pflag|cobra|%!|0x[0-9a-f]{4}|goroutine|<nil>|command ".*" for "`)

// TestWrongArguments gives every verb too few and too many arguments, unknown flags,
// and a wrong value for each flag that is not free text. It checks that each is a
// usage error without words of Go, and that no request is sent.
func TestWrongArguments(t *testing.T) {
	env := fake(t, func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("%s %s was asked", r.Method, r.URL)
		w.WriteHeader(http.StatusTeapot)
	})
	n := 0
	check := func(args ...string) {
		n++
		out, errs, code := lullWith(env, args...)
		if code != term.ExitUsage || out != "" || !strings.HasPrefix(errs, "lull: ") {
			t.Errorf("%q ended with %d: %q %q", args, code, out, errs)
		}
		if internals.MatchString(errs) || len(errs) > 400 || strings.Count(errs, "\n") != 1 {
			t.Errorf("%q: %q", args, errs)
		}
	}
	for name, cmd := range leaves() {
		if cmd.DisableFlagParsing {
			continue
		}
		verb := strings.Fields(name)
		if cmd.ValidateArgs(nil) != nil {
			check(verb...)
		}
		if many := slices.Repeat([]string{"x1"}, 9); cmd.ValidateArgs(many) != nil {
			check(append(slices.Clone(verb), many...)...)
		}
		check(append(slices.Clone(verb), "--no-such-flag")...)
		check(append(slices.Clone(verb), "-Z")...)
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Hidden || f.Name == "help" {
				return
			}
			if f.NoOptDefVal == "" {
				check(append(slices.Clone(verb), "--"+f.Name)...)
			}
			if !strings.HasPrefix(f.Value.Type(), "string") {
				check(append(slices.Clone(verb), "--"+f.Name+"=?!")...)
			}
		})
	}
	if n < 800 {
		t.Errorf("only %d mistakes were made", n)
	}
}

// TestTypos checks the suggestions for unknown verbs.
func TestTypos(t *testing.T) {
	for typed, want := range map[string]string{
		"startt": "lull start", "stat": "lull start, lull status", "kill": "lull stop", "unpause": "lull resume", "images": "lull image ls", "fleet": "lull worker", "Run": "lull run",
		"worker pase": "lull worker pause", "worker lst": "lull worker ls", "workrs ls": "lull worker", "shards": "lull server shards", "scale-up": "lull worker scale-up",
		"help pase": "lull pause", "xyzzy": "", "worker xyzzy": "",
	} {
		out, errs, code := lullWith(nil, strings.Fields(typed)...)
		_, near, _ := strings.Cut(strings.TrimSuffix(errs, "?\n"), "did you mean: ")
		if code != term.ExitUsage || out != "" || near != want {
			t.Errorf("%s ended with %d: %q %q", typed, code, out, errs)
		}
	}
}

// TestTopics checks that every topic of lull help fits 80 columns and is named by the
// help of lull.
func TestTopics(t *testing.T) {
	help, _, _ := lullWith(nil, "--help")
	for _, topic := range topics.All() {
		out, _, code := lullWith(nil, "help", topic.Name)
		if code != term.ExitDone || out != topic.Text || !strings.Contains(help, topic.Name) {
			t.Errorf("%s ended with %d: %q", topic.Name, code, out)
		}
		for line := range strings.Lines(out) {
			if len(line) > 81 {
				t.Errorf("%s: %q is too long", topic.Name, line)
			}
		}
	}
	if out, _, code := lullWith(nil, "help", "worker", "set"); code != term.ExitDone || !strings.Contains(out, "--idle-timeout") {
		t.Errorf("help of a verb ended with %d: %q", code, out)
	}
}
