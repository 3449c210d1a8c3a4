package router

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"time"
)

const maxNoiseRules = 256

// Noise names traffic that neither keeps an instance running nor wakes it. The
// zero value ignores nothing. While the instance runs, such traffic is served;
// while it sleeps, a connection is closed and a health check is answered in the
// instance's place.
type Noise struct {
	// Sources are client addresses, such as a port scanner's.
	Sources []netip.Prefix
	// SilentFor keeps a new connection apart until its first byte came, for at
	// most this long. Protocols in which the server speaks first do not work
	// with it. Zero: off.
	SilentFor time.Duration
	// Paths are HTTP paths of health checks, exact, or a prefix ending in "*".
	Paths []string
	// UserAgents are words found in the User-Agent of health checks, without
	// regard to case.
	UserAgents []string
	// HealthStatus answers a health check of a sleeping instance; default 200.
	HealthStatus int
}

// ParseNoise reads one rule per element: "source=CIDR or address",
// "silent=DURATION", "path=/healthz", "agent=kube-probe", "status=200".
func ParseNoise(rules []string) (Noise, error) {
	var n Noise
	var errs []error
	if len(rules) > maxNoiseRules {
		return n, fmt.Errorf("cannot use %d noise rules: at most %d", len(rules), maxNoiseRules)
	}
	for _, rule := range rules {
		if err := n.add(rule); err != nil {
			errs = append(errs, fmt.Errorf("cannot use noise rule %.80q: %w", rule, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return Noise{}, err
	}
	return n, n.Validate()
}

func (n *Noise) add(rule string) error {
	key, value, ok := strings.Cut(rule, "=")
	value = strings.TrimSpace(value)
	if !ok || value == "" {
		return errors.New("it must be source=, silent=, path=, agent= or status= with a value")
	}
	switch strings.TrimSpace(key) {
	case "source":
		p, err := parsePrefix(value)
		if err != nil {
			return err
		}
		n.Sources = append(n.Sources, p)
	case "silent":
		d, err := time.ParseDuration(value)
		if err != nil || d <= 0 {
			return errors.New("silent must be a positive duration such as 5s")
		}
		n.SilentFor = d
	case "path":
		n.Paths = append(n.Paths, value)
	case "agent":
		n.UserAgents = append(n.UserAgents, value)
	case "status":
		code := 0
		if _, err := fmt.Sscanf(value, "%d", &code); err != nil || fmt.Sprint(code) != value {
			return errors.New("status must be a number")
		}
		n.HealthStatus = code
	default:
		return errors.New("its name must be source, silent, path, agent or status")
	}
	return nil
}

func parsePrefix(s string) (netip.Prefix, error) {
	if !strings.Contains(s, "/") {
		a, err := netip.ParseAddr(s)
		if err != nil || a.Zone() != "" {
			return netip.Prefix{}, errors.New("source must be an address or a range such as 10.0.0.0/8")
		}
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || p.Addr().Is4In6() {
		return netip.Prefix{}, errors.New("source must be an address or a range such as 10.0.0.0/8")
	}
	return p.Masked(), nil
}

// Validate joins all faults.
func (n Noise) Validate() error {
	var errs []error
	if len(n.Sources)+len(n.Paths)+len(n.UserAgents) > maxNoiseRules {
		errs = append(errs, fmt.Errorf("cannot use noise rules: more than %d", maxNoiseRules))
	}
	for _, p := range n.Sources {
		if !p.IsValid() {
			errs = append(errs, errors.New("cannot use noise source: not a valid range"))
		}
	}
	if n.SilentFor < 0 || n.SilentFor > time.Hour {
		errs = append(errs, errors.New("cannot use noise silent: it must be at most 1h"))
	}
	for _, p := range n.Paths {
		if !strings.HasPrefix(p, "/") || len(p) > 1024 || strings.Contains(strings.TrimSuffix(p, "*"), "*") {
			errs = append(errs, fmt.Errorf("cannot use noise path %.80q: it must start with / and have * only at its end", p))
		}
	}
	for _, a := range n.UserAgents {
		if strings.TrimSpace(a) == "" || len(a) > 256 {
			errs = append(errs, errors.New("cannot use noise agent: it must have 1 to 256 characters"))
		}
	}
	if n.HealthStatus != 0 && (n.HealthStatus < 200 || n.HealthStatus > 599) {
		errs = append(errs, errors.New("cannot use noise status: it must be 200 to 599"))
	}
	return errors.Join(errs...)
}

// rules names every rule that is set, as Stats shows it.
func (n Noise) rules() []string {
	var out []string
	for _, p := range n.Sources {
		out = append(out, "source="+p.String())
	}
	if n.SilentFor > 0 {
		out = append(out, n.silentRule())
	}
	for _, p := range n.Paths {
		out = append(out, "path="+p)
	}
	for _, a := range n.UserAgents {
		out = append(out, "agent="+a)
	}
	return out
}

func (n Noise) silentRule() string { return "silent=" + n.SilentFor.String() }

// source answers the rule that ignores this client, or "".
func (n Noise) source(a netip.Addr) string {
	a = a.Unmap().WithZone("")
	for _, p := range n.Sources {
		if p.Contains(a) {
			return "source=" + p.String()
		}
	}
	return ""
}

// request answers the rule that ignores this HTTP request, or "".
func (n Noise) request(r *http.Request) string {
	for _, p := range n.Paths {
		prefix, wild := strings.CutSuffix(p, "*")
		if r.URL.Path == p || wild && strings.HasPrefix(r.URL.Path, prefix) {
			return "path=" + p
		}
	}
	if len(n.UserAgents) == 0 {
		return ""
	}
	agent := strings.ToLower(r.UserAgent())
	for _, a := range n.UserAgents {
		if strings.Contains(agent, strings.ToLower(a)) {
			return "agent=" + a
		}
	}
	return ""
}
