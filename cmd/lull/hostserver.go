//go:build linux && !portable

package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"

	"lull/internal/cli/reporting"
	"lull/internal/cli/term"
	"lull/internal/host"
	"lull/internal/host/report"
	"lull/internal/protocol/control"
	"lull/internal/protocol/hostctl"
)

// newReporter returns the part that reports to the server in cfg; nil if there is
// none.
func newReporter(cfg hostConfig, h *host.Host, commands *report.Commands, faults []string, log *slog.Logger) (*report.Reporter, error) {
	if cfg.Server == "" {
		return nil, nil
	}
	t := http.DefaultTransport.(*http.Transport).Clone()
	hc, err := cfg.HTTPClient(t)
	if err != nil {
		return nil, err
	}
	if _, err := cfg.ReadToken(reporting.HostTokens); err != nil {
		return nil, err
	}
	r := &report.Reporter{Host: h, Server: hostServer{cfg.Target, hc}, Where: cfg.Server, Name: cfg.Target.Machine,
		Version: version, BuildDate: buildDate, Every: cfg.ReportEvery, Faults: faults, Log: log}
	if cfg.ServerCommands {
		r.Commands, r.Via = commands, "server"
	}
	return r, nil
}

// hostServer is the server that a host reports to.
type hostServer struct {
	reporting.Target
	http *http.Client
}

var _ report.Server = hostServer{}

// ReportHost implements report.Server.
func (s hostServer) ReportHost(ctx context.Context, r control.HostReport) (a control.HostAnswer, err error) {
	cl, err := s.Dial(s.http, reporting.HostTokens)
	if err != nil {
		return a, err
	}
	return cl.ReportHost(ctx, r)
}

// HostTurn implements report.Server.
func (s hostServer) HostTurn(ctx context.Context, name string, t control.HostTurn) (q control.HostQuestions, err error) {
	cl, err := s.Dial(s.http, reporting.HostTokens)
	if err != nil {
		return q, err
	}
	return cl.HostTurn(ctx, name, t)
}

// AwaitHalt implements report.Server.
func (s hostServer) AwaitHalt(ctx context.Context, name string, t control.HaltTurn) (a control.HaltAnswer, err error) {
	cl, err := s.Dial(s.http, reporting.HostTokens)
	if err != nil {
		return a, err
	}
	return cl.AwaitHostHalt(ctx, name, t)
}

// serverFinding returns the finding about the connection to the server that this host
// reports to, if any. run is the running host's status; err is why that is missing.
func serverFinding(cfg hostConfig, run hostctl.Status, err error) []term.Finding {
	l := run.Server
	f := term.Finding{What: "server"}
	switch {
	case l == nil && cfg.Server == "":
		return nil
	case err != nil:
		f.Found, f.Do = "configured to report to "+cfg.Server+", but no host is running", "start it: lull host"
		if _, terr := cfg.ReadToken(reporting.HostTokens); terr != nil {
			f.Found, f.Do = terr.Error(), "create a token with: lull token create NAME --role host --machine "+cfg.Target.Machine
		}
	case l == nil:
		f.Found, f.Do = "the running host does not report, but "+cfg.Server+" is set here", "restart it with this setting"
	case l.Error != "":
		f.Found = fmt.Sprintf("%s has received no report from this host since %s: %s", l.URL, term.Time(*l.FailingSince), l.Error)
		f.Do = "instances are unaffected; check the server, the network path and the token"
	case l.ReportedAt == nil:
		f.Found = "the first report to " + l.URL + " is in progress"
		f.OK = true
	default:
		f.OK, f.Found = true, fmt.Sprintf("%s received a report from %s at %s", l.URL, l.Host, term.Time(*l.ReportedAt))
	}
	return []term.Finding{f}
}
