package relay

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"time"
)

const maxNoiseRules = 256

// Noise describes traffic that neither keeps an instance awake nor wakes it. The
// zero value describes none. While the instance runs, such traffic is served. While
// it sleeps, a connection is closed, and a health check is answered in place of the
// instance.
type Noise struct {
	// Sources are address ranges of clients, such as a port scanner's.
	Sources []netip.Prefix
	// SilentFor is how long at most a new connection is not counted while it has
	// not sent a byte. It does not suit protocols in which the server speaks first.
	// Zero disables it.
	SilentFor time.Duration
	// Paths are HTTP paths of health checks: exact ones, or prefixes that end in
	// "*".
	Paths []string
	// UserAgents are words in the User-Agent header of health checks. Case is
	// ignored.
	UserAgents []string
	// HealthStatus is the status with which a health check of a sleeping instance
	// is answered; default 200.
	HealthStatus int
}

// Validate returns every fault, joined, or nil.
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
		errs = append(errs, fmt.Errorf("cannot use noise silent: %s is not between 0 and 1h", n.SilentFor))
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

// rules returns the names of all configured rules, as in Stats.
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

// source returns the rule that applies to a client, or "".
func (n Noise) source(a netip.Addr) string {
	a = a.Unmap().WithZone("")
	for _, p := range n.Sources {
		if p.Contains(a) {
			return "source=" + p.String()
		}
	}
	return ""
}

// request returns the rule that applies to an HTTP request, or "".
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
