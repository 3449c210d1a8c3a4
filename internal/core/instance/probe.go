package instance

import (
	"cmp"
	"errors"
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
)

// Limits and defaults of probes.
const (
	MaxProbes            = 16
	MinProbeInterval     = time.Second
	MaxProbeInterval     = time.Hour
	MaxProbeTimeout      = time.Minute
	DefaultProbeInterval = 15 * time.Second
	DefaultProbeTimeout  = 5 * time.Second // never above the interval
	DefaultProbeWindow   = time.Minute
)

// Probe is a signal that a user defines for an instance. Its answer is active
// or quiet. Any other outcome leaves the signal unknown, which blocks the idle
// pause.
type Probe struct {
	Name string `json:"name"` // the signal is probe:NAME
	Kind string `json:"kind"`

	Command []string `json:"command,omitempty"` // exec: exit code 0 is active, 1 is quiet
	Inside  bool     `json:"inside,omitempty"`  // exec: run the command inside the instance, not on the host as the daemon's user

	URL   string `json:"url,omitempty"`   // http and prometheus
	Field string `json:"field,omitempty"` // http: path of a field in the JSON of the answer, as in jobs.0.running

	Metric    string  `json:"metric,omitempty"`    // prometheus: NAME or NAME{label="value"} in the exposition at URL
	Query     string  `json:"query,omitempty"`     // prometheus: instant query to the server at URL
	Threshold float64 `json:"threshold,omitempty"` // prometheus: active above it

	Path           string        `json:"path,omitempty"`             // file
	Window         idle.Duration `json:"window,omitempty"`           // file: active if modified within it; default 60 s
	MissingIsQuiet bool          `json:"missing_is_quiet,omitempty"` // file: without the file it is quiet, otherwise unknown

	Interval idle.Duration `json:"interval,omitempty"` // between two readings, default 15 s
	Timeout  idle.Duration `json:"timeout,omitempty"`  // of a reading, default 5 s
}

// Signal returns the name of the probe's signal.
func (p *Probe) Signal() string { return "probe:" + p.Name }

// Every returns the interval in force.
func (p *Probe) Every() time.Duration {
	return cmp.Or(time.Duration(p.Interval), DefaultProbeInterval)
}

// Limit returns the timeout in force.
func (p *Probe) Limit() time.Duration {
	return cmp.Or(time.Duration(p.Timeout), min(DefaultProbeTimeout, p.Every()))
}

// Within returns the window in force.
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

// probeFields lists the settings specific to each kind.
var probeFields = map[string][]string{
	ProbeExec:       {"command", "inside"},
	ProbeHTTP:       {"url", "field"},
	ProbePrometheus: {"url", "metric", "query", "threshold"},
	ProbeFile:       {"path", "window", "missing_is_quiet"},
}

// faults reports every fault of p by its field.
func (p *Probe) faults(bad func(field, format string, args ...any)) {
	if ValidName(p.Name) != nil {
		bad("name", "%q is not 1 to %d of a-z, 0-9, '.', '_' and '-'", p.Name, MaxName)
	}
	has, known := probeFields[p.Kind]
	if !known {
		bad("kind", "%q is not exec, http, prometheus or file", p.Kind)
		return
	}
	for _, f := range []struct {
		name string
		set  bool
	}{{"command", len(p.Command) > 0}, {"inside", p.Inside}, {"url", p.URL != ""}, {"field", p.Field != ""}, {"metric", p.Metric != ""},
		{"query", p.Query != ""}, {"threshold", p.Threshold != 0}, {"path", p.Path != ""}, {"window", p.Window != 0}, {"missing_is_quiet", p.MissingIsQuiet}} {
		if f.set && !slices.Contains(has, f.name) {
			bad(f.name, "a probe of the kind %s has none", p.Kind)
		}
	}
	for name, text := range map[string]string{"command": strings.Join(p.Command, " "), "url": p.URL, "field": p.Field, "metric": p.Metric, "query": p.Query, "path": p.Path} {
		if len(text) > MaxLabel || strings.ContainsRune(text, 0) || name != "command" && strings.ContainsFunc(text, unicode.IsControl) {
			bad(name, "it has more than %d bytes, or control characters", MaxLabel)
		}
	}
	if every := p.Every(); every < MinProbeInterval || every > MaxProbeInterval {
		bad("interval", "%s is not between %s and %s", every, idle.Human(MinProbeInterval), idle.Human(MaxProbeInterval))
	} else if p.Limit() <= 0 || p.Limit() > min(every, MaxProbeTimeout) {
		bad("timeout", "%s is not between 0 and %s, or is above the interval", p.Limit(), idle.Human(MaxProbeTimeout))
	}
	switch p.Kind {
	case ProbeExec:
		if len(p.Command) == 0 || p.Command[0] == "" {
			bad("command", "it is empty")
		}
	case ProbeHTTP, ProbePrometheus:
		p.webFaults(bad)
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

// Selector names series of a metric.
type Selector struct {
	Name   string
	Labels map[string]string // all of them must be equal
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

// probePresets make an exec probe of what follows the name of the preset.
var probePresets = map[string]func(target string) (string, error){
	"postgres": postgresProbe,
	"redis":    redisProbe,
}

// ProbePresets returns the names of the ready-made probes.
func ProbePresets() []string { return []string{"postgres", "redis"} }

// postgresProbe is active while a session other than the probe's runs a statement,
// has a transaction open, or sends the log to a replica, or autovacuum works.
func postgresProbe(conninfo string) (string, error) {
	if strings.ContainsAny(conninfo, "'\x00\n") {
		return "", errors.New("a connection string with quotes needs a probe of your own")
	}
	conninfo = cmp.Or(conninfo, "host=127.0.0.1 user=postgres dbname=postgres")
	return `n=$(psql -XAtqw -d '` + conninfo + `' -c "select count(*) from pg_stat_activity where pid <> pg_backend_pid() and ` +
		`(backend_type in ('autovacuum worker', 'walsender') or backend_type like '%parallel worker%' or ` +
		`backend_type = 'client backend' and (state is null or state not in ('idle', 'disabled')))") || exit 2; [ "$n" -gt 0 ]`, nil
}

var redisTarget = regexp.MustCompile(`^[a-zA-Z0-9.:_-]+$`)

// redisProbe is active while a client is blocked, a replica is connected, or the
// server loads, saves or rewrites its data.
func redisProbe(addr string) (string, error) {
	addr = cmp.Or(addr, "127.0.0.1:6379")
	at := strings.LastIndex(addr, ":")
	if at <= 0 || !redisTarget.MatchString(addr) || addr[0] == '-' {
		return "", fmt.Errorf("%q is not HOST:PORT", addr)
	}
	if _, err := strconv.ParseUint(addr[at+1:], 10, 16); err != nil {
		return "", fmt.Errorf("%q is not HOST:PORT", addr)
	}
	return `i=$(redis-cli -h ` + addr[:at] + ` -p ` + addr[at+1:] + ` info) || exit 2; printf '%s\n' "$i" | tr -d '\r' | awk -F: '` +
		`$1 ~ /^(blocked_clients|connected_slaves|loading|rdb_bgsave_in_progress|aof_rewrite_in_progress)$/ {seen++; n += $2} ` +
		`END {if (seen < 5) exit 2; exit n > 0 ? 0 : 1}'`, nil
}

// ParseProbe reads the short form KIND[,SETTING=VALUE...]:TARGET, in which TARGET is
// a shell command, a URL with #FIELD, #METRIC or #query=QUERY behind it, or a path;
// or PRESET[,SETTING=VALUE...][:ADDRESS]. Name is left empty unless it is set.
func ParseProbe(s string) (Probe, error) {
	head, target, found := strings.Cut(s, ":")
	words := strings.Split(head, ",")
	p := Probe{Kind: words[0]}
	fail := func(format string, args ...any) (Probe, error) {
		return Probe{}, fmt.Errorf("cannot read %q as a probe: %s", s, fmt.Sprintf(format, args...))
	}
	for _, w := range words[1:] {
		if err := p.setting(w); err != nil {
			return fail("%v", err)
		}
	}
	if preset := probePresets[p.Kind]; preset != nil {
		text, err := preset(target)
		if err != nil {
			return fail("%v", err)
		}
		p.Name = cmp.Or(p.Name, p.Kind)
		p.Kind, p.Command = ProbeExec, []string{"/bin/sh", "-c", text}
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

// setting reads a setting of the short form.
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
	case key == "threshold":
		f, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return fmt.Errorf("threshold is %q, not a number", value)
		}
		p.Threshold = f
	default:
		return fmt.Errorf("%q is none of name=, interval=, timeout=, threshold=, window=, inside, missing=quiet", text)
	}
	return nil
}

// NameProbes names the probes that have no name by their kind.
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
