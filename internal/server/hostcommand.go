package server

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
	"lull/internal/fleet/audit"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/store"
)

// OfHost is the path of an instance of a host.
type OfHost struct {
	Named
	Instance string `path:"instance" maxLength:"64" doc:"Its name or id"`
}

func (s *Server) hostCommandRoutes() {
	at := func(verb string) string { return base + "/hosts/{name}/instances/{instance}/" + verb }
	for _, v := range []struct{ verb, doc string }{
		{control.HostResume, "Resume a paused instance of a host"},
		{control.HostStart, "Start an instance of a host, or resume it when paused"},
		{control.HostStop, "Stop an instance of a host; always works"},
	} {
		register(s, route{id: v.verb + "-instance", method: "POST", path: at(v.verb), role: access.Operator, long: true, doc: v.doc},
			func(ctx context.Context, in *OfHost) (*answer[control.HostOutcome], error) {
				return s.commandHost(ctx, in, control.HostCommand{Verb: v.verb})
			})
	}
	register(s, route{id: "pause-instance", method: "POST", path: at(control.HostPause), role: access.Operator, long: true,
		doc: "Pause an instance of a host; 409 while a connection or lease holds it"},
		func(ctx context.Context, in *struct {
			OfHost
			Force bool `query:"force" doc:"Even if connections or leases hold it"`
		}) (*answer[control.HostOutcome], error) {
			return s.commandHost(ctx, &in.OfHost, control.HostCommand{Verb: control.HostPause, Force: in.Force})
		})
	register(s, route{id: "snooze-instance", method: "POST", path: at(control.HostSnooze), role: access.Operator, long: true,
		doc: "Protect an instance of a host from automatic pauses: until a time, or for minutes; without either, end the snooze"},
		func(ctx context.Context, in *struct {
			OfHost
			Body control.Snooze
		}) (*answer[control.HostOutcome], error) {
			d, err := snoozeOf(in.Body)
			if err != nil {
				return nil, problem(err)
			}
			return s.commandHost(ctx, &in.OfHost, control.HostCommand{Verb: control.HostSnooze, Snooze: idle.Duration(d)})
		})
	register(s, route{id: "instance-logs", method: "GET", path: at(control.HostLogs), role: access.Operator,
		doc: "The last output of an instance of a host, at most 64 KiB. It may contain secrets, so each read is recorded in the audit log"},
		func(ctx context.Context, in *struct {
			OfHost
			Lines int `query:"lines" minimum:"1" maximum:"10000" default:"200" doc:"Lines from the end"`
		}) (*answer[control.HostLog], error) {
			a, err := s.toHost(ctx, &in.OfHost, control.HostCommand{Verb: control.HostLogs, Lines: in.Lines})
			if err == nil && a.Done == nil {
				err = fault(a.Status, a.Code, a.Detail)
			}
			if err != nil {
				return nil, problem(err)
			}
			return ok(control.HostLog{Host: in.Name, Instance: a.Done.Instance.Name, Text: string(a.Done.Log), Cut: a.Done.Cut}, nil)
		})
}

// snoozeOf returns the requested duration of a snooze from now on; 0 ends the snooze.
func snoozeOf(b control.Snooze) (time.Duration, error) {
	if b.Until != "" && b.Minutes > 0 {
		return 0, invalid("minutes", "give until or minutes, not both")
	}
	if b.Until == "" {
		return time.Duration(b.Minutes) * time.Minute, nil
	}
	now := time.Now()
	until, err := when.Moment(now.UTC(), b.Until)
	if err != nil {
		return 0, invalid("until", err.Error())
	}
	d := until.Sub(now)
	if d <= 0 || d > control.MaxHostSnooze {
		return 0, invalid("until", fmt.Sprintf("%s is not between now and %d days from now", until.Format(time.RFC3339), control.MaxHostSnooze/(24*time.Hour)))
	}
	return d, nil
}

// commandHost gives a command to a host and answers with the outcome; 202 if the
// outcome is unknown.
func (s *Server) commandHost(ctx context.Context, in *OfHost, c control.HostCommand) (*answer[control.HostOutcome], error) {
	a, err := s.toHost(ctx, in, c)
	if err != nil {
		return nil, problem(err)
	}
	o := control.HostOutcome{ID: a.ID, Host: in.Name, Verb: c.Verb, Outcome: "done"}
	switch {
	case a.Done != nil:
		o.Instance = a.Done.Instance
		return ok(o, nil)
	case a.Code == control.HostOutcomeUnknown:
		o.Outcome, o.Detail = "unknown", a.Detail
		return &answer[control.HostOutcome]{Status: http.StatusAccepted, Body: o,
			Location: base + "/hosts/" + url.PathEscape(in.Name) + "/instances/" + url.PathEscape(in.Instance) + "/why"}, nil
	}
	return nil, fault(a.Status, a.Code, a.Detail)
}

// toHost gives a command to a host, through the server that the host polls. It writes
// an audit entry before the command and one with the outcome. An error means that the
// command was not given.
func (s *Server) toHost(ctx context.Context, in *OfHost, c control.HostCommand) (control.HostReply, error) {
	v, err := s.host(ctx, in.Name)
	switch {
	case err != nil:
		return control.HostReply{}, err
	case !v.Heard:
		return control.HostReply{}, fault(http.StatusServiceUnavailable, "host_unheard", "cannot command host "+in.Name+": "+v.Unheard)
	case !v.Commands:
		return control.HostReply{}, fault(http.StatusConflict, control.HostCommandsOff,
			"host "+in.Name+" does not accept commands from the server; its owner can allow them with: lull host --server-commands")
	}
	by := actor(ctx)
	c.ID, c.By, c.Instance = commandID(ctx), by.Name, in.Instance
	if err := c.Check(); err != nil {
		return control.HostReply{}, fault(http.StatusUnprocessableEntity, "invalid", "cannot command host "+in.Name+": "+err.Error())
	}
	what := c.Verb + " " + in.Instance + " on host " + in.Name
	if c.Snooze > 0 {
		what += " for " + time.Duration(c.Snooze).Round(time.Second).String()
	}
	if err := s.auditHost(ctx, audit.Entry{Action: "host_command", By: by, Detail: what}); err != nil {
		return control.HostReply{}, err
	}
	a := s.giveHost(ctx, &v, c)
	outcome := audit.Entry{Action: "host_command_outcome", By: by, Reason: "done", Detail: what}
	if a.Done == nil {
		outcome.Reason = a.Code
		outcome.Detail += ": " + a.Detail
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := s.auditHost(last, outcome); err != nil {
		s.log.Warn("outcome of a command for a host is not in the audit log", "command", what, "outcome", outcome.Reason, "err", err)
	}
	return a, nil
}

func (s *Server) auditHost(ctx context.Context, e audit.Entry) error {
	ops, err := audit.Ops(e)
	if err != nil {
		return err
	}
	_, err = s.fleet.Store().Commit(ctx, store.Txn{Then: ops})
	return err
}

// giveHost gives a command here or at the server to which the host reports. The reply
// has either Done and the instance, or a status and a code.
func (s *Server) giveHost(ctx context.Context, v *control.HostView, c control.HostCommand) control.HostReply {
	var a control.HostReply
	here := v.Server == s.name
	if here && s.others != nil && !s.hosts.Polls(v.Name) {
		// The host may have moved to another server within its last intervals.
		if theirs, ok := s.others.Host(ctx, v.Name); ok && theirs.Heard && theirs.Later(&v.HostSummary) {
			v, here = &theirs, false
		}
	}
	if here || s.others == nil {
		a = s.HostCommandHere(ctx, v.Name, c)
	} else {
		a = s.others.HostCommand(ctx, v.Server, v.Name, c)
	}
	a.ID = c.ID
	switch known := map[string]int{control.HostCommandsOff: 409, control.HostNotCarriedOut: 503, control.HostOutcomeUnknown: 504, control.HostRefused: 409,
		control.HostNotFound: 404, control.HostInvalid: 422, control.HostFailed: 503}; {
	case a.Done != nil && a.Done.Instance != nil:
		a.Done.Log = []byte(strings.ToValidUTF8(string(a.Done.Log), "?"))
	case known[a.Code] != 0:
		a.Done, a.Status = nil, known[a.Code]
	default:
		a = control.HostReply{ID: c.ID, Status: 503, Code: control.HostFailed, Detail: "the host's answer has an unknown form"}
	}
	return a
}

// HostCommandHere gives a command to a host that reports to this server.
func (s *Server) HostCommandHere(ctx context.Context, name string, c control.HostCommand) control.HostReply {
	return s.hosts.Command(ctx, name, c)
}

// commandID returns the ID for a command. It is the same for every request with one
// idempotency key, so that the host does not carry a repeated request out again.
func commandID(ctx context.Context) string {
	key, keyed := ctx.Value(onceKey{}).(string)
	if !keyed {
		return strings.ToLower(rand.Text())
	}
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:16])
}
