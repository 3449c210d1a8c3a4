package peers

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/url"
	"time"

	"lull/internal/protocol/control"
)

// Hosts reads the hosts that report to one server.
type Hosts interface {
	// HostsHere returns every host that has reported here, stale or not.
	HostsHere() []control.HostSummary
	// HostHere returns one such host with its instances; false if it never reported
	// here.
	HostHere(name string) (control.HostView, bool)
	// HostWhyHere explains the state of an instance; false if the host never reported
	// here.
	HostWhyHere(ctx context.Context, name, instance string, at time.Time) (control.HostReply, bool)
	// HostCommandHere gives a command to a host that reports here.
	HostCommandHere(ctx context.Context, name string, c control.HostCommand) control.HostReply
}

const hostsPath = "/internal/hosts"

// Serve makes h answer for this server's hosts. It must be called before Run.
func (p *Peers) Serve(h Hosts) { p.cfg.Hosts = h }

// Hosts returns the hosts of all other servers that answer in time. A host that moved
// from one server to another may appear more than once.
func (p *Peers) Hosts(ctx context.Context) []control.HostSummary {
	out := []control.HostSummary{}
	answers(ctx, p, hostsPath, func(theirs []control.HostSummary) bool {
		out = append(out, theirs...)
		return true
	})
	return out
}

// Host asks the other servers for a host. It prefers the answer of the server that
// receives the host's reports, then that with the last report.
func (p *Peers) Host(ctx context.Context, name string) (v control.HostView, found bool) {
	answers(ctx, p, hostsPath+"/"+url.PathEscape(name), func(theirs control.HostView) bool {
		if !found || theirs.Later(&v.HostSummary) {
			v, found = theirs, true
		}
		return !v.Heard
	})
	return v, found
}

// HostWhy asks the other servers about an instance of a host. It prefers the server
// that receives the host's reports.
func (p *Peers) HostWhy(ctx context.Context, name, instance string, at time.Time) (a control.HostReply, found bool) {
	q := url.Values{"instance": {instance}}
	if !at.IsZero() {
		q.Set("at", at.UTC().Format(time.RFC3339Nano))
	}
	answers(ctx, p, hostsPath+"/"+url.PathEscape(name)+"/why?"+q.Encode(), func(theirs control.HostReply) bool {
		heard := theirs.Why == nil || theirs.Why.Unheard == ""
		if !found || heard {
			a, found = theirs, true
		}
		return !heard
	})
	return a, found
}

// HostCommand makes another server give a command to a host. If that server was
// reached and its answer is lost, the outcome is unknown.
func (p *Peers) HostCommand(ctx context.Context, server, name string, c control.HostCommand) control.HostReply {
	ctx, cancel := context.WithTimeout(ctx, control.HostCommandWait+Within)
	defer cancel()
	a := control.HostReply{ID: c.ID, Status: http.StatusServiceUnavailable, Code: control.HostNotCarriedOut}
	p.mu.Lock()
	secret, address := p.secret, p.others[server]
	p.mu.Unlock()
	if address == "" {
		a.Detail = "server " + server + ", to which the host reports, does not answer; the command was not carried out"
		return a
	}
	body, err := json.Marshal(c)
	if err == nil {
		body, err = p.ask(ctx, address, http.MethodPost, hostsPath+"/"+url.PathEscape(name)+"/command", secret, body)
	}
	var reply control.HostReply
	if err == nil {
		err = json.Unmarshal(body, &reply)
	}
	if err == nil {
		return reply
	}
	a.Detail = "server " + server + ", to which the host reports, did not take the command; it was not carried out: " + err.Error()
	dial, dialed := errors.AsType[*net.OpError](err)
	if refused := errors.As(err, new(*statusError)); !refused && !(dialed && dial.Op == "dial") {
		a.Status, a.Code = http.StatusGatewayTimeout, control.HostOutcomeUnknown
		a.Detail = "server " + server + ", to which the host reports, took the command, and its answer is lost; the outcome is unknown"
	}
	return a
}

func (p *Peers) hostRoutes(mux *http.ServeMux) {
	mux.HandleFunc("POST "+hostsPath+"/{name}/command", func(w http.ResponseWriter, r *http.Request) {
		p.serve(w, r, func() (any, bool) {
			var c control.HostCommand
			if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxReport)).Decode(&c); err != nil || c.Check() != nil || p.cfg.Hosts == nil {
				return nil, false
			}
			return p.cfg.Hosts.HostCommandHere(r.Context(), r.PathValue("name"), c), true
		})
	})
	route := func(path string, answer func(r *http.Request) (any, bool)) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
			p.serve(w, r, func() (any, bool) {
				if p.cfg.Hosts == nil {
					return nil, false
				}
				return answer(r)
			})
		})
	}
	route(hostsPath, func(*http.Request) (any, bool) { return p.cfg.Hosts.HostsHere(), true })
	route(hostsPath+"/{name}", func(r *http.Request) (any, bool) { return p.cfg.Hosts.HostHere(r.PathValue("name")) })
	route(hostsPath+"/{name}/why", func(r *http.Request) (any, bool) {
		var at time.Time
		if text := r.FormValue("at"); text != "" {
			var err error
			if at, err = time.Parse(time.RFC3339Nano, text); err != nil {
				return nil, false
			}
		}
		return p.cfg.Hosts.HostWhyHere(r.Context(), r.PathValue("name"), r.FormValue("instance"), at)
	})
}
