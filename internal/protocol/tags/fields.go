package tags

import (
	"errors"
	"fmt"
	"math"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"lull/internal/core/policy/when"
	"lull/internal/lib/spell"
)

// Field is one setting: its name, its format and its description.
type Field struct {
	Name string
	Form string // format of its value, for users
	Doc  string

	set   func(*Settings, string) error
	get   func(*Settings) (string, bool)
	clear func(*Settings)
	show  func(string) string // returns the part of a value that may be shown; nil means all of it
}

// Fields returns all settings, in the order of their reference page.
func Fields() []Field { return slices.Clone(fields) }

const day = 24 * time.Hour

var fields = []Field{
	truth("enabled", "whether to act when the machine is idle", func(s *Settings) **bool { return &s.Enabled }),
	span("idle-timeout", "how long every signal must be quiet", time.Minute, 30*day, func(s *Settings) **time.Duration { return &s.IdleTimeout }),
	span("check-interval", "time between two checks", time.Second, time.Hour, func(s *Settings) **time.Duration { return &s.CheckInterval }),
	span("warn-before", "how long before an action users are warned", 0, day, func(s *Settings) **time.Duration { return &s.WarnBefore }),
	span("boot-grace", "no action for this long after a boot", 0, day, func(s *Settings) **time.Duration { return &s.BootGrace }),
	span("snooze", "no idle action for this long after a resume", 0, 30*day, func(s *Settings) **time.Duration { return &s.Snooze }),
	truth("hibernate-on-idle", "hibernate instead of stop, stop where that is not possible", func(s *Settings) **bool { return &s.HibernateOnIdle }),
	word("on-complete", "action on the completion signal", func(s *Settings) **string { return &s.OnComplete }, "stop", "hibernate", "terminate", "none"),
	text("completion-file", "the file that signals completion; its directory must be root's", absolute, func(s *Settings) **string { return &s.CompletionFile }),
	instant("ttl-deadline", "when the machine expires, even if it is in use", func(s *Settings) **time.Time { return &s.TTLDeadline }),
	word("ttl-action", "action at the deadline", func(s *Settings) **string { return &s.TTLAction }, "stop", "terminate"),
	private(text("pre-stop", "shell command that runs before an action", nonEmpty, func(s *Settings) **string { return &s.PreStop }), Program),
	private(text("post-cancel", "shell command that runs when an action is canceled after pre-stop ran", nonEmpty, func(s *Settings) **string { return &s.PostCancel }), Program),
	span("pre-stop-timeout", "time limit of pre-stop, and of post-cancel", time.Second, time.Hour, func(s *Settings) **time.Duration { return &s.PreStopTimeout }),
	text("pre-stop-user", "the user that runs pre-stop and post-cancel", userName, func(s *Settings) **string { return &s.PreStopUser }),
	number("idle-cpu", "CPU use that counts, in percent of all CPUs", 0, 100, func(s *Settings) **float64 { return &s.IdleCPU }),
	number("idle-cpu-cores", "number of busy CPUs that count as use even if they are less than idle-cpu percent of all; 0 disables this", 0, 4096, func(s *Settings) **float64 { return &s.IdleCPUCores }),
	bytes("idle-network", "network traffic that counts as use, in bytes a minute", func(s *Settings) **float64 { return &s.IdleNetwork }),
	bytes("idle-disk", "disk traffic that counts as use, in bytes a minute", func(s *Settings) **float64 { return &s.IdleDisk }),
	number("idle-gpu", "GPU use that counts, in percent of one GPU", 0, 100, func(s *Settings) **float64 { return &s.IdleGPU }),
	listOf("signals", "which of the seven signals count", func(s *Settings) **[]string { return &s.Signals }, "cpu", "network", "disk", "gpu", "terminals", "users", "recent"),
	listOf("presence", "signals that count by presence alone, without input", func(s *Settings) **[]string { return &s.Presence }, "terminals", "users"),
	listOf("active-processes", "program names that count as use while they run", func(s *Settings) **[]string { return &s.ActiveProcesses }),
	listOf("process-profiles", "named lists of programs", func(s *Settings) **[]string { return &s.ProcessProfiles }, "ml-training", "data-analysis"),
	listOf("active-ports", "TCP ports whose connections count as use", func(s *Settings) **[]string { return &s.ActivePorts }),
	truth("sessions", "whether busy Jupyter, RStudio and VS Code servers count", func(s *Settings) **bool { return &s.Sessions }),
	truth("inhibitors", "whether logind's shutdown, sleep and idle locks count", func(s *Settings) **bool { return &s.Inhibitors }),
	private(text("notify-url", "where warnings and actions are posted", webAddress, func(s *Settings) **string { return &s.NotifyURL }), site),
	word("pause-holder", "who pauses the machine; with a server, its record of the worker decides, and controller prevents the agent from pausing", func(s *Settings) **string { return &s.PauseHolder }, "agent", "controller"),
}

// reserved are names under the prefix that contain state or belong to the server.
// They are not settings.
var reserved = map[string]bool{
	"idle-status": true, "idle-since": true, "idle-action": true, "draining": true,
	"managed-by": true, "worker-id": true, "template": true, "policy": true, "owner": true, "name": true,
	"ttl": true, "launch-time": true,
}

func find(name string) *Field {
	for i := range fields {
		if fields[i].Name == name {
			return &fields[i]
		}
	}
	return nil
}

// field returns the Field whose value is at the pointer that at returns.
func field[T any](name, form, doc string, at func(*Settings) **T, parse func(string) (T, error), write func(T) string) Field {
	return Field{Name: name, Form: form, Doc: doc,
		set: func(s *Settings, text string) error {
			if len([]rune(text)) > MaxValue {
				return fmt.Errorf("longer than %d characters", MaxValue)
			}
			v, err := parse(text)
			if err != nil {
				return err
			}
			*at(s) = &v
			return nil
		},
		get: func(s *Settings) (string, bool) {
			if p := *at(s); p != nil {
				return write(*p), true
			}
			return "", false
		},
		clear: func(s *Settings) { *at(s) = nil },
	}
}

func truth(name, doc string, at func(*Settings) **bool) Field {
	return field(name, "true or false", doc, at, func(v string) (bool, error) {
		switch strings.ToLower(strings.TrimSpace(v)) {
		case "true", "yes", "on", "1":
			return true, nil
		case "false", "no", "off", "0":
			return false, nil
		}
		return false, errors.New("want true or false")
	}, strconv.FormatBool)
}

func span(name, doc string, least, most time.Duration, at func(*Settings) **time.Duration) Field {
	return field(name, "length: "+when.LengthForms, doc, at, func(v string) (time.Duration, error) {
		d, err := when.Span(strings.TrimSpace(v))
		if err != nil {
			return 0, errors.New("want a length such as " + when.LengthForms)
		}
		if d < least || d > most {
			return 0, fmt.Errorf("want between %s and %s", least, most)
		}
		return d, nil
	}, time.Duration.String)
}

func instant(name, doc string, at func(*Settings) **time.Time) Field {
	return field(name, "RFC 3339, such as 2026-01-02T15:04:05Z", doc, at, func(v string) (time.Time, error) {
		t, err := time.Parse(time.RFC3339, strings.TrimSpace(v))
		if err != nil || t.Year() < 2000 || t.Year() > 9000 {
			return time.Time{}, errors.New("want a time in RFC 3339, such as 2026-01-02T15:04:05Z")
		}
		return t, nil
	}, func(t time.Time) string { return t.Format(time.RFC3339Nano) })
}

func number(name, doc string, least, most float64, at func(*Settings) **float64) Field {
	return field(name, fmt.Sprintf("number from %g to %g", least, most), doc, at, func(v string) (float64, error) {
		n, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(v), "%"), 64)
		if err != nil || math.IsNaN(n) || n < least || n > most {
			return 0, fmt.Errorf("want a number from %g to %g", least, most)
		}
		return n, nil
	}, func(n float64) string { return strconv.FormatFloat(n, 'g', -1, 64) })
}

// bytes returns a Field for a number of bytes with an optional unit: KB, MB and
// GB are powers of 1000, as in the default thresholds; KiB, MiB and GiB are
// powers of 1024.
func bytes(name, doc string, at func(*Settings) **float64) Field {
	units := []struct {
		suffix string
		factor float64
	}{{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"b", 1}, {"", 1}}
	return field(name, "bytes a minute, such as 10KB", doc, at, func(v string) (float64, error) {
		v = strings.TrimSuffix(strings.ToLower(strings.TrimSpace(v)), "/min")
		for _, u := range units {
			if rest, ok := strings.CutSuffix(v, u.suffix); ok {
				n, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
				if n *= u.factor; err != nil || math.IsNaN(n) || n < 0 || n > 1e15 {
					break
				}
				return n, nil
			}
		}
		return 0, errors.New("want bytes a minute, such as 10KB")
	}, func(n float64) string { return strconv.FormatFloat(n, 'f', -1, 64) })
}

func text(name, doc string, check func(string) error, at func(*Settings) **string) Field {
	return field(name, "text", doc, at, func(v string) (string, error) {
		if i := strings.IndexFunc(v, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f || r == 0xfffd }); i >= 0 {
			return "", fmt.Errorf("character %d is not printable", i+1)
		}
		return v, check(v)
	}, func(v string) string { return v })
}

func word(name, doc string, at func(*Settings) **string, allowed ...string) Field {
	return field(name, strings.Join(allowed, ", "), doc, at, func(v string) (string, error) {
		v = strings.ToLower(strings.TrimSpace(v))
		if !slices.Contains(allowed, v) {
			return "", fmt.Errorf("want one of %s", strings.Join(allowed, ", "))
		}
		return v, nil
	}, func(v string) string { return v })
}

// listOf returns a Field for a list separated by commas or spaces. If no words
// are allowed explicitly, any plain name is valid.
func listOf(name, doc string, at func(*Settings) **[]string, allowed ...string) Field {
	form := "comma-separated list"
	if len(allowed) > 0 {
		form += " of " + strings.Join(allowed, ", ")
	}
	return field(name, form, doc, at, func(v string) ([]string, error) {
		out := []string{}
		for _, w := range strings.FieldsFunc(v, func(r rune) bool { return r == ',' || r == ' ' || r == ';' || r == '\t' }) {
			if len(allowed) > 0 && !slices.Contains(allowed, w) {
				return nil, fmt.Errorf("%q is not one of %s", w, strings.Join(allowed, ", "))
			}
			if strings.ContainsFunc(w, func(r rune) bool { return r < ' ' || r == 0x7f || r == 0xfffd }) {
				return nil, fmt.Errorf("%q is not printable", w)
			}
			if !slices.Contains(out, w) {
				out = append(out, w)
			}
		}
		if name == "signals" && len(out) == 0 {
			return nil, errors.New("want at least one: without a signal, lull could not tell whether the machine is in use")
		}
		if name == "active-ports" {
			for _, w := range out {
				if n, err := strconv.ParseUint(w, 10, 16); err != nil || n == 0 {
					return nil, fmt.Errorf("%q is not a TCP port", w)
				}
			}
		}
		return out, nil
	}, func(v []string) string { return strings.Join(v, ",") })
}

func nonEmpty(v string) error {
	if strings.TrimSpace(v) == "" {
		return errors.New("want a command")
	}
	return nil
}

func absolute(v string) error {
	if !path.IsAbs(v) || path.Clean(v) != v || v == "/" {
		return errors.New("want an absolute path without . and ..")
	}
	return nil
}

func userName(v string) error {
	if v == "" || len(v) > 32 || v[0] == '-' || strings.ContainsAny(v, " \t:/\\") {
		return errors.New("want a user's name")
	}
	return nil
}

func webAddress(v string) error {
	u, err := url.Parse(v)
	if err != nil || (u.Scheme != "https" && u.Scheme != "http") || u.Host == "" {
		return errors.New("want an http or https address")
	}
	return nil
}

// nearest returns the setting of which name is probably a misspelling, with at
// most two wrong letters; "" if there is none.
func nearest(name string) string {
	best, at := 3, ""
	if len(name) > MaxKey {
		return ""
	}
	for i := range fields {
		if d := spell.Distance(name, fields[i].Name); d < best && 3*d < len(fields[i].Name) {
			best, at = d, fields[i].Name
		}
	}
	return at
}
