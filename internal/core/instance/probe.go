package instance

import (
	"cmp"
	"fmt"
	"math"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"lull/internal/core/idle"
)

// The kinds of probes.
const (
	ProbeExec       = "exec"       // the exit code of a command
	ProbeHTTP       = "http"       // the status of an answer, or a field of its JSON
	ProbePrometheus = "prometheus" // a metric of an exposition, or a query
	ProbeFile       = "file"       // when a file was last modified

	ProbeJupyter    = "jupyter"    // the kernels of a Jupyter server
	ProbeMinecraft  = "minecraft"  // the players that a Minecraft server reports
	ProbeBeanstalkd = "beanstalkd" // the jobs of a beanstalkd
)

// Limits and defaults of probes.
const (
	MaxProbes            = 16
	MinProbeInterval     = time.Second
	MaxProbeInterval     = time.Hour
	MaxProbeTimeout      = time.Minute
	DefaultProbeInterval = 15 * time.Second
	DefaultProbeTimeout  = 5 * time.Second // reduced to the interval if that is shorter
	DefaultProbeWindow   = time.Minute
)

// Probe is a signal that a user defines for an instance. Its result is active or
// quiet. If it fails, the signal is unknown, which blocks the idle pause.
type Probe struct {
	Name string `json:"name"` // the signal is probe:NAME
	Kind string `json:"kind"`

	Command []string `json:"command,omitempty"` // exec: exit code 0 is active, 1 is quiet
	Inside  bool     `json:"inside,omitempty"`  // exec: run the command inside the instance, not on the host as the daemon's user

	URL   string `json:"url,omitempty"`   // http, prometheus and jupyter
	Field string `json:"field,omitempty"` // http: path of a field in the answer's JSON, such as jobs.0.running, or "." for all of it; beanstalkd: a tube
	// TokenFile is a file whose first line is sent as a token with each request.
	// It is for http, prometheus and jupyter.
	TokenFile string `json:"token_file,omitempty"`
	Address   string `json:"address,omitempty"` // minecraft and beanstalkd: HOST:PORT

	Metric    string  `json:"metric,omitempty"`    // prometheus: NAME or NAME{label="value"} in the exposition at URL
	Query     string  `json:"query,omitempty"`     // prometheus: instant query to the server at URL
	Threshold float64 `json:"threshold,omitempty"` // prometheus: active above it

	Path           string        `json:"path,omitempty"`             // file
	Window         idle.Duration `json:"window,omitempty"`           // file: active if modified within this time; default 60 s
	MissingIsQuiet bool          `json:"missing_is_quiet,omitempty"` // file: whether a missing file is quiet; otherwise it is unknown

	Interval idle.Duration `json:"interval,omitempty"` // time between two readings, default 15 s
	Timeout  idle.Duration `json:"timeout,omitempty"`  // time limit of one reading, default 5 s
}

// Signal returns the name of the probe's signal.
func (p *Probe) Signal() string { return "probe:" + p.Name }

// Every returns the probe's interval, or its default.
func (p *Probe) Every() time.Duration {
	return cmp.Or(time.Duration(p.Interval), DefaultProbeInterval)
}

// Limit returns the probe's timeout, or its default.
func (p *Probe) Limit() time.Duration {
	return cmp.Or(time.Duration(p.Timeout), min(DefaultProbeTimeout, p.Every()))
}

// Within returns the probe's window, or its default.
func (p *Probe) Within() time.Duration {
	return cmp.Or(time.Duration(p.Window), DefaultProbeWindow)
}

// checkProbes validates the probes of a spec.
func (s *Spec) checkProbes() (errs []error) {
	if len(s.Probes) > MaxProbes {
		return []error{fmt.Errorf("cannot use probes: %d probes, at most %d", len(s.Probes), MaxProbes)}
	}
	seen := map[string]bool{}
	for n := range s.Probes {
		p := &s.Probes[n]
		if seen[p.Name] {
			errs = append(errs, fmt.Errorf("cannot use probes[%d].name: there are two probes %q", n, p.Name))
		}
		seen[p.Name] = true
		p.faults(func(field, format string, args ...any) {
			errs = append(errs, fmt.Errorf("cannot use probes[%d].%s: %s", n, field, fmt.Sprintf(format, args...)))
		})
	}
	return errs
}

// probeFields lists the settings that apply to each kind of probe.
var probeFields = map[string][]string{
	ProbeExec:       {"command", "inside"},
	ProbeHTTP:       {"url", "token_file", "field"},
	ProbePrometheus: {"url", "token_file", "metric", "query", "threshold"},
	ProbeFile:       {"path", "window", "missing_is_quiet"},
	ProbeJupyter:    {"url", "token_file"},
	ProbeMinecraft:  {"address"},
	ProbeBeanstalkd: {"address", "field"},
}

// ProbeKinds returns the kinds of probes.
func ProbeKinds() []string {
	return []string{ProbeExec, ProbeHTTP, ProbePrometheus, ProbeFile, ProbeJupyter, ProbeMinecraft, ProbeBeanstalkd}
}

// faults calls bad for every fault of p, with the field.
func (p *Probe) faults(bad func(field, format string, args ...any)) {
	if ValidName(p.Name) != nil {
		bad("name", "%q is not 1 to %d of a-z, 0-9, '.', '_' and '-'", p.Name, MaxName)
	}
	has, known := probeFields[p.Kind]
	if !known {
		bad("kind", "%q is none of %s", p.Kind, strings.Join(ProbeKinds(), ", "))
		return
	}
	for _, f := range []struct {
		name string
		set  bool
	}{{"command", len(p.Command) > 0}, {"inside", p.Inside}, {"url", p.URL != ""}, {"token_file", p.TokenFile != ""}, {"address", p.Address != ""}, {"field", p.Field != ""}, {"metric", p.Metric != ""},
		{"query", p.Query != ""}, {"threshold", p.Threshold != 0}, {"path", p.Path != ""}, {"window", p.Window != 0}, {"missing_is_quiet", p.MissingIsQuiet}} {
		if f.set && !slices.Contains(has, f.name) {
			bad(f.name, "a probe of the kind %s does not take this setting", p.Kind)
		}
	}
	for name, text := range map[string]string{"command": strings.Join(p.Command, " "), "url": p.URL, "field": p.Field, "metric": p.Metric, "query": p.Query, "path": p.Path,
		"token_file": p.TokenFile, "address": p.Address} {
		if len(text) > MaxLabel || strings.ContainsRune(text, 0) || name != "command" && strings.ContainsFunc(text, unicode.IsControl) {
			bad(name, "it has more than %d bytes, or control characters", MaxLabel)
		}
	}
	if every := p.Every(); every < MinProbeInterval || every > MaxProbeInterval {
		bad("interval", "%s is not between %s and %s", every, idle.Human(MinProbeInterval), idle.Human(MaxProbeInterval))
	} else if p.Limit() <= 0 || p.Limit() > min(every, MaxProbeTimeout) {
		bad("timeout", "%s is out of range: want more than 0 and at most %s", p.Limit(), idle.Human(min(every, MaxProbeTimeout)))
	}
	switch p.Kind {
	case ProbeExec:
		if len(p.Command) == 0 || p.Command[0] == "" {
			bad("command", "it is empty")
		}
	case ProbeHTTP, ProbePrometheus, ProbeJupyter:
		p.webFaults(bad)
	case ProbeMinecraft, ProbeBeanstalkd:
		if _, _, err := splitAddress(p.Address); err != nil {
			bad("address", "%v", err)
		}
		if strings.ContainsAny(p.Field, " \t") || len(p.Field) > maxTube {
			bad("field", "%.40q is not the name of a tube", p.Field)
		}
	case ProbeFile:
		if !filepath.IsAbs(p.Path) {
			bad("path", "%q is not absolute", p.Path)
		}
		if w := p.Within(); w < 0 || w > MaxDeadline {
			bad("window", "%s is not between 0 and %s", w, MaxDeadline)
		}
	}
}

func (p *Probe) webFaults(bad func(field, format string, args ...any)) {
	if u, err := url.Parse(p.URL); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.Fragment != "" {
		bad("url", "%q is not http://HOST[:PORT]/PATH", p.URL)
	}
	if p.TokenFile != "" && !filepath.IsAbs(p.TokenFile) {
		bad("token_file", "%q is not absolute", p.TokenFile)
	}
	if p.Kind != ProbePrometheus {
		return
	}
	if math.IsNaN(p.Threshold) || math.IsInf(p.Threshold, 0) {
		bad("threshold", "%v is not a number", p.Threshold)
	}
	switch {
	case p.Metric == "" && p.Query == "":
		bad("metric", "name a metric, or a query")
	case p.Metric != "" && p.Query != "":
		bad("query", "a probe has a metric or a query, not both")
	case p.Metric != "":
		if _, err := ParseSelector(p.Metric); err != nil {
			bad("metric", "%v", err)
		}
	}
}

// Selector selects series of a metric.
type Selector struct {
	Name   string
	Labels map[string]string // labels that a series must have with these values
}

var (
	metricName = regexp.MustCompile(`^[a-zA-Z_:][a-zA-Z0-9_:]*`)
	labelName  = regexp.MustCompile(`^\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*`)
)

// ParseSelector reads NAME or NAME{label="value",...}.
func ParseSelector(s string) (Selector, error) {
	fail := fmt.Errorf(`%q is not NAME or NAME{label="value"}`, s)
	out := Selector{Name: metricName.FindString(s), Labels: map[string]string{}}
	rest := s[len(out.Name):]
	if out.Name == "" {
		return Selector{}, fail
	}
	if rest == "" {
		return out, nil
	}
	rest, opened := strings.CutPrefix(rest, "{")
	rest, closed := strings.CutSuffix(rest, "}")
	if !opened || !closed {
		return Selector{}, fail
	}
	for strings.TrimSpace(rest) != "" {
		m := labelName.FindStringSubmatch(rest)
		if m == nil {
			return Selector{}, fail
		}
		quoted, err := strconv.QuotedPrefix(rest[len(m[0]):])
		if err != nil || quoted[0] != '"' {
			return Selector{}, fail
		}
		value, err := strconv.Unquote(quoted)
		if err != nil {
			return Selector{}, fail
		}
		if _, twice := out.Labels[m[1]]; twice {
			return Selector{}, fail
		}
		out.Labels[m[1]] = value
		rest = strings.TrimSpace(rest[len(m[0])+len(quoted):])
		more, comma := strings.CutPrefix(rest, ",")
		if !comma && rest != "" {
			return Selector{}, fail
		}
		rest = more
	}
	return out, nil
}

// ParseProbe parses the short form of a probe. One form is
// KIND[,SETTING=VALUE...]:TARGET, with a shell command, a URL followed by #FIELD,
// #METRIC or #query=QUERY, or a path as the TARGET. The other is
// PRESET[,SETTING=VALUE...][:ADDRESS]. The probe has a Name only if a setting
// gives one.
func ParseProbe(s string) (Probe, error) {
	head, target, found := strings.Cut(s, ":")
	words := strings.Split(head, ",")
	p := Probe{Kind: words[0]}
	fail := func(format string, args ...any) (Probe, error) {
		return Probe{}, fmt.Errorf("cannot read %q as a probe: %s", s, fmt.Sprintf(format, args...))
	}
	preset := findPreset(p.Kind)
	if preset != nil {
		var err error
		if p, err = preset.of(target); err != nil {
			return fail("%v", err)
		}
		p.Name = words[0]
	}
	for _, w := range words[1:] {
		if err := p.setting(w); err != nil {
			return fail("%v", err)
		}
	}
	if preset != nil {
		return p, nil
	}
	if _, known := probeFields[p.Kind]; !known || !found || strings.TrimSpace(target) == "" {
		return fail("want exec:COMMAND, http:URL[#FIELD], prometheus:URL#METRIC, prometheus:URL#query=QUERY, file:PATH, or one of %s", strings.Join(ProbePresets(), ", "))
	}
	switch p.Kind {
	case ProbeExec:
		p.Command = []string{"/bin/sh", "-c", target}
	case ProbeFile:
		p.Path = target
	default:
		behind := ""
		p.URL, behind, _ = strings.Cut(target, "#")
		query, isQuery := strings.CutPrefix(behind, "query=")
		switch {
		case p.Kind == ProbeHTTP:
			p.Field = behind
		case isQuery:
			p.Query = query
		default:
			p.Metric = behind
		}
	}
	return p, nil
}

// setting applies one SETTING=VALUE of the short form.
func (p *Probe) setting(text string) error {
	key, value, _ := strings.Cut(text, "=")
	span := func(to *idle.Duration) error {
		d, err := time.ParseDuration(value)
		if err != nil || d <= 0 {
			return fmt.Errorf("%s is %q, not a duration such as 30s", key, value)
		}
		*to = idle.Duration(d)
		return nil
	}
	switch {
	case key == "name":
		p.Name = value
	case key == "interval":
		return span(&p.Interval)
	case key == "timeout":
		return span(&p.Timeout)
	case key == "window":
		return span(&p.Window)
	case text == "inside":
		p.Inside = true
	case text == "missing=quiet":
		p.MissingIsQuiet = true
	case key == "token-file":
		p.TokenFile = value
	case key == "threshold":
		f, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return fmt.Errorf("threshold is %q, not a number", value)
		}
		p.Threshold = f
	default:
		return fmt.Errorf("%q is none of name=, interval=, timeout=, threshold=, window=, token-file=, inside, missing=quiet", text)
	}
	return nil
}

// NameProbes gives probes without a name a name derived from their kind.
func NameProbes(probes []Probe) {
	used := map[string]bool{}
	for _, p := range probes {
		used[p.Name] = true
	}
	for n := range probes {
		if probes[n].Name != "" {
			continue
		}
		name := probes[n].Kind
		for k := 2; used[name]; k++ {
			name = fmt.Sprintf("%s-%d", probes[n].Kind, k)
		}
		probes[n].Name, used[name] = name, true
	}
}
