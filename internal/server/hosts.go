package server

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"time"

	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/server/history"
	"lull/internal/server/hosts"
)

// OtherHosts reads the hosts that report to the other servers of the fleet.
type OtherHosts interface {
	// Hosts returns the hosts of all servers that answer in time.
	Hosts(ctx context.Context) []control.HostSummary
	// Host returns one host with its instances; false if no answering server knows
	// it.
	Host(ctx context.Context, name string) (control.HostView, bool)
	// HostWhy explains the state of a host's instance; false if no answering server
	// knows the host.
	HostWhy(ctx context.Context, name, instance string, at time.Time) (control.HostReply, bool)
	// HostCommand makes the named server give a command to a host that reports to it.
	HostCommand(ctx context.Context, server, name string, c control.HostCommand) control.HostReply
}

// Spoken is the body of a request by which a host polls this server.
type Spoken struct {
	Named
	Body map[string]any
}

func (s *Server) hostRoutes() {
	all, each := base+"/hosts", base+"/hosts/{name}"
	register(s, route{id: "list-hosts", method: "GET", path: all, role: access.Viewer, doc: "Hosts that report to any server of the fleet, and hosts with a token that do not report"},
		func(ctx context.Context, in *Paged) (*answer[control.List[control.HostSummary]], error) {
			l, err := s.allHosts(ctx)
			if err != nil {
				return nil, problem(err)
			}
			return ok(pageOf(l, in, func(h control.HostSummary) string { return h.Name }), nil)
		})
	register(s, route{id: "get-host", method: "GET", path: each, role: access.Viewer, machine: true, doc: "A host with a page of its instances by name, as last reported"},
		func(ctx context.Context, in *struct {
			Named
			Paged
		}) (*answer[control.HostView], error) {
			v, err := s.host(ctx, in.Name)
			if err != nil {
				return nil, problem(err)
			}
			page := pageOf(v.Instances, &in.Paged, func(i control.HostInstance) string { return i.Name })
			v.Instances, v.Next = page.Items, page.Next
			return ok(v, nil)
		})
	register(s, route{id: "why-instance", method: "GET", path: each + "/instances/{instance}/why", role: access.Viewer, machine: true,
		doc: "Why an instance of a host runs, or why it was paused or stopped: the host is asked; now, or at a past time that it recorded"},
		func(ctx context.Context, in *struct {
			OfHost
			Then
		}) (*answer[control.HostWhy], error) {
			at, err := in.read()
			if err != nil {
				return nil, problem(err)
			}
			a, err := s.hostWhy(ctx, in.Name, in.Instance, at)
			if err == nil && a.Why == nil {
				code := map[int]string{http.StatusNotFound: "not_found", http.StatusUnprocessableEntity: "invalid"}[a.Status]
				if code == "" {
					a.Status, code = http.StatusServiceUnavailable, "host_failed"
				}
				err = fault(a.Status, code, a.Detail)
			}
			if err != nil {
				return nil, problem(err)
			}
			return ok(*a.Why, nil)
		})
	register(s, route{id: "report-host", method: "POST", path: each + "/report", role: access.Admin, machine: true, status: http.StatusOK,
		doc: "Report a host's instances, all or those that changed; the token is valid for this host only"},
		func(ctx context.Context, in *Spoken) (*answer[control.HostAnswer], error) {
			body, err := raw(in.Body)
			if err != nil {
				return nil, problem(err)
			}
			r, err := control.ReadHostReport(in.Name, body)
			if err != nil {
				return nil, problem(invalid("report", err.Error()))
			}
			return ok(s.hostReport(ctx, r))
		})
	register(s, route{id: "ask-host", method: "POST", path: each + "/questions", role: access.Admin, machine: true, status: http.StatusOK,
		doc: "Answer requests and commands of the server, and wait for new ones; the token is valid for this host only"},
		func(ctx context.Context, in *Spoken) (*answer[control.HostQuestions], error) {
			body, err := raw(in.Body)
			if err != nil {
				return nil, problem(err)
			}
			t, err := control.ReadHostTurn(body)
			if err != nil {
				return nil, problem(invalid("answers", err.Error()))
			}
			return ok(s.hosts.Turn(ctx, in.Name, t.Answers, time.Duration(t.Wait*float64(time.Second))), nil)
		})
	s.hostCommandRoutes()
}

// hostReport processes a host's report. The store gets only the host's presence; the
// rest of the report stays in memory.
func (s *Server) hostReport(ctx context.Context, r control.HostReport) (control.HostAnswer, error) {
	a, err := s.hosts.Take(r, time.Now())
	if full, ok := errors.AsType[*hosts.FullError](err); ok {
		return a, fault(http.StatusServiceUnavailable, "too_many_machines", full.Error())
	}
	if err != nil {
		return a, invalid("report", err.Error())
	}
	if a.Resend {
		return a, nil
	}
	seen, err := s.machines.put(control.Machine{Kind: "host", Name: r.Host, Version: r.Version, Outdated: control.Outdated(r.Version, r.BuildDate, s.version, s.built)}, r.Stale(), time.Now())
	if err == nil {
		s.announce(ctx, seen)
	}
	return a, err
}

// HostsHere returns the hosts that have reported to this server.
func (s *Server) HostsHere() []control.HostSummary {
	l := s.hosts.Summaries(time.Now())
	for n := range l {
		l[n].Server = s.name
	}
	return l
}

// HostHere returns one such host with its instances; false if it never reported here.
func (s *Server) HostHere(name string) (control.HostView, bool) {
	v, ok := s.hosts.View(name, time.Now())
	v.Server = s.name
	return v, ok
}

// HostWhyHere explains the state of an instance, for a host that reports to this
// server.
func (s *Server) HostWhyHere(ctx context.Context, name, instance string, at time.Time) (control.HostReply, bool) {
	return s.hosts.Why(ctx, name, instance, at)
}

// allHosts returns the hosts of the fleet, sorted by name. A host is described by the
// server that receives its reports. If that server cannot be asked, the host's
// presence in the store counts; hosts with only a token are listed as never reported.
func (s *Server) allHosts(ctx context.Context) ([]control.HostSummary, error) {
	all := map[string]control.HostSummary{}
	take := func(l []control.HostSummary) {
		for _, h := range l {
			if old, known := all[h.Name]; !known || h.Later(&old) {
				all[h.Name] = h
			}
		}
	}
	take(s.HostsHere())
	if s.others != nil {
		take(s.others.Hosts(ctx))
	}
	silent, err := s.unheard(ctx)
	if err != nil {
		return nil, err
	}
	for _, h := range silent {
		if _, known := all[h.Name]; !known {
			all[h.Name] = h
		}
	}
	out := make([]control.HostSummary, 0, len(all))
	for _, name := range slices.Sorted(maps.Keys(all)) {
		out = append(out, all[name])
	}
	return out, nil
}

// unheard returns the hosts that are known without their reports, from the presences
// in the store and from the tokens of hosts.
func (s *Server) unheard(ctx context.Context) ([]control.HostSummary, error) {
	present, err := s.present(ctx, "host")
	if err != nil {
		return nil, err
	}
	var out []control.HostSummary
	bare := func(name, why string) control.HostSummary {
		return control.HostSummary{Name: name, Unheard: why, Counts: map[string]int{}, Faults: []string{}}
	}
	for name, p := range present {
		h := bare(name, "Server "+p.Server+", to which it reports, does not answer. The state of its instances is unknown.")
		h.Server, h.Version, h.Outdated, h.HeardAt, h.AgeSeconds = p.Server, p.Version, p.Outdated, &p.At, max(0, time.Since(p.At)).Seconds()
		out = append(out, h)
	}
	for _, t := range s.tokens.List() {
		if _, known := present[t.Machine]; t.Role == access.Host && !known && t.RevokedAt == nil && (t.ExpiresAt == nil || time.Now().Before(*t.ExpiresAt)) {
			out = append(out, bare(t.Machine, "It has a token, but no running server has heard from it."))
		}
	}
	return out, nil
}

// host returns a host of the fleet with its instances.
func (s *Server) host(ctx context.Context, name string) (control.HostView, error) {
	v, found := s.HostHere(name)
	if s.others != nil && !v.Heard {
		if theirs, ok := s.others.Host(ctx, name); ok && (!found || theirs.Later(&v.HostSummary)) {
			v, found = theirs, true
		}
	}
	if found {
		return v, nil
	}
	l, err := s.unheard(ctx)
	if err != nil {
		return v, err
	}
	if n := slices.IndexFunc(l, func(h control.HostSummary) bool { return h.Name == name }); n >= 0 {
		return control.HostView{HostSummary: l[n], Instances: []control.HostInstance{}}, nil
	}
	return v, notFound("host", name)
}

// hostWhy explains the state of an instance of a host. It asks the server that
// receives the host's reports, then any server that has a report of the host.
// Otherwise the answer is that nothing is known.
func (s *Server) hostWhy(ctx context.Context, name, instance string, at time.Time) (control.HostReply, error) {
	if at.After(time.Now().Add(history.Skew)) {
		return control.HostReply{}, invalid("at", "want a time in the past")
	}
	if s.hosts.Heard(name, time.Now()) {
		if a, ok := s.HostWhyHere(ctx, name, instance, at); ok {
			return a, nil
		}
	}
	if s.others != nil {
		if a, ok := s.others.HostWhy(ctx, name, instance, at); ok {
			return a, nil
		}
	}
	if a, ok := s.HostWhyHere(ctx, name, instance, at); ok {
		return a, nil
	}
	v, err := s.host(ctx, name)
	if err != nil {
		return control.HostReply{}, err
	}
	return control.HostReply{Why: hosts.LastHeard(&v, nil, at, v.Unheard)}, nil
}
