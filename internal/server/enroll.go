package server

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/core/failure"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

// enrollRoutes registers the routes for machines that were launched with the agent.
// They authenticate with the secret in their user data, which only that EC2 instance
// can read.
func (s *Server) enrollRoutes() {
	register(s, route{id: "enroll-agent", method: "POST", path: base + "/agents/enroll", status: http.StatusOK, secret: true,
		doc: "Exchange the enrollment secret of a launched machine, as the bearer, for the token of its agent, within an hour of the launch; a second exchange replaces the token until the agent has reported"},
		func(ctx context.Context, in *struct{ Body control.Enrollment }) (*answer[control.Enrolled], error) {
			w, err := s.enrolling(ctx)
			if err != nil {
				return nil, err
			}
			return ok(s.enroll(ctx, w, in.Body.InstanceID))
		})
	r := route{id: "agent-program", method: "GET", path: base + "/agents/program",
		doc: "The lull program, for a launched machine with its enrollment secret as the bearer"}
	register(s, r, func(ctx context.Context, in *struct {
		Architecture string `query:"architecture" required:"true" maxLength:"32" doc:"As uname -m prints it"`
	}) (*huma.StreamResponse, error) {
		if _, err := s.enrolling(ctx); err != nil {
			return nil, err
		}
		return s.giveProgram(in.Architecture)
	})
	describe(s, r, "application/octet-stream", "The program")
}

// enrolling returns the worker whose enrollment secret the request contains.
func (s *Server) enrolling(ctx context.Context) (worker.Worker, error) {
	p := principalOf(ctx)
	if !p.given {
		return worker.Worker{}, fault(http.StatusUnauthorized, "no_token", "cannot enroll without the enrollment secret in the header Authorization: Bearer SECRET")
	}
	w, err := s.fleet.Enrolling(ctx, time.Now(), p.waking)
	if errors.Is(err, launch.ErrEnrollment) {
		return w, fault(http.StatusUnauthorized, "bad_token", err.Error())
	}
	if no, refused := errors.AsType[*failure.Refused](err); refused {
		return w, fault(http.StatusForbidden, no.Reason, no.Error())
	}
	return w, problem(err)
}

// enroll creates the token of the agent on w's machine. The first answer may be lost,
// so a second call for the same launch replaces the token; exactly one stays valid,
// even if both calls run at once on different servers. A token that was revoked, or
// whose agent has already reported, is not replaced.
func (s *Server) enroll(ctx context.Context, w worker.Worker, instance string) (control.Enrolled, error) {
	switch {
	case w.EC2InstanceID == "":
		return control.Enrolled{}, fault(http.StatusServiceUnavailable, "not_launched", "cannot enroll yet: the launch of worker "+w.ID+" is not recorded")
	case instance != w.EC2InstanceID:
		return control.Enrolled{}, fault(http.StatusForbidden, "other_machine", "cannot enroll another machine than that of worker "+w.ID)
	}
	_, heard := s.agents.Seen(instance)
	if seen, _ := s.observe(ctx, w.ID); heard || seen.Agent != nil {
		return control.Enrolled{}, fault(http.StatusConflict, "already_enrolled", "cannot enroll again: the agent of worker "+w.ID+" has reported; revoke its token if that was not its machine, and enroll with lull agent enroll --token-file")
	}
	by := audit.Actor{Name: "enrollment of " + w.ID, Kind: audit.KindAgent}
	ops, err := audit.Ops(audit.Entry{Action: "token_created", By: by, WorkerID: w.ID, WorkerName: w.Name, Region: w.AWSRegion, Detail: "agent " + instance, Generation: w.Launch.Generation})
	if err != nil {
		return control.Enrolled{}, err
	}
	_, secret, err := s.tokens.Create(ctx, access.Wanted{Name: "agent of " + w.ID, Role: access.Agent, Machine: instance, By: by.Name, Once: w.Launch.Token}, ops...)
	if errors.Is(err, access.ErrUsed) {
		return control.Enrolled{}, fault(http.StatusConflict, "already_enrolled", "cannot enroll again: the enrollment secret of worker "+w.ID+" was used and its token revoked; enroll with lull agent enroll --token-file")
	}
	return control.Enrolled{WorkerID: w.ID, Machine: instance, Token: secret}, err
}

// architectures maps the output of uname -m to GOARCH.
var architectures = map[string]string{"x86_64": "amd64", "aarch64": "arm64"}

func (s *Server) giveProgram(architecture string) (*huma.StreamResponse, error) {
	if s.program == "" || architectures[architecture] != runtime.GOARCH {
		return nil, fault(http.StatusNotFound, "no_program", "cannot offer a program for "+strconv.Quote(architecture)+": this server has only its own, for linux "+runtime.GOARCH)
	}
	f, err := os.Open(s.program)
	if err != nil {
		return nil, fault(http.StatusNotFound, "no_program", "cannot open the program: "+err.Error())
	}
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		defer f.Close()
		hc.SetHeader("Content-Type", "application/octet-stream")
		hc.SetStatus(http.StatusOK)
		if _, err := io.Copy(hc.BodyWriter(), f); err != nil {
			panic(http.ErrAbortHandler) // a truncated response must not look complete
		}
	}}, nil
}
