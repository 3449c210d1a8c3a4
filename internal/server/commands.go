package server

import (
	"context"
	"math"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/core/policy/when"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/server/roster"
)

// detectWait is how long the API waits for the worker's owner before it answers 202.
const detectWait = 20 * time.Second

func (s *Server) commandRoutes() {
	at := func(suffix string) string { return workersPath + "/{worker_id}/" + suffix }
	type do func(context.Context, audit.Actor, string) (worker.Worker, error)
	for _, v := range []struct {
		name, doc string
		do        do
	}{
		{"start", "Start it: desired RUNNING", s.fleet.StartWorker},
		{"resume", "The same as start", s.fleet.ResumeWorker},
		{"stop", "Stop it manually", s.fleet.StopWorker},
		{"pause", "The same as stop, recorded as a manual pause", func(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
			return s.fleet.PauseWorker(ctx, by, id, worker.Pause{Reason: power.ReasonManual})
		}},
		{"drain", "Take nothing new, and stop when nothing runs or the drain times out", s.fleet.DrainWorker},
		{"cancel-drain", "Return a draining worker to service", s.fleet.CancelDrain},
		{"retry", "Try a failed worker again", s.fleet.RetryWorker},
	} {
		register(s, route{id: v.name + "-worker", method: "POST", path: at(v.name), role: access.Operator, long: true, doc: v.doc},
			func(ctx context.Context, in *One) (*answer[worker.Worker], error) {
				return accepted(v.do(ctx, actor(ctx), in.ID))
			})
	}
	register(s, route{id: "terminate-worker", method: "POST", path: at("terminate"), role: access.Admin, long: true, doc: "Terminate it permanently, with its volumes; its CML license is released first"},
		func(ctx context.Context, in *struct {
			One
			LeaveLicense bool `query:"leave_license" doc:"Terminate a stopped worker although its CML license can only be released while it runs"`
			Body         control.Confirmation
		}) (*answer[worker.Worker], error) {
			w, err := s.fleet.Worker(ctx, in.ID)
			if err != nil {
				return nil, problem(err)
			}
			if in.Body.Confirm != w.Name {
				return nil, fault(http.StatusUnprocessableEntity, "confirm", "cannot terminate "+w.Name+": confirm must be its name",
					&huma.ErrorDetail{Message: "want the worker's name", Location: "body.confirm"})
			}
			return accepted(s.fleet.Terminate(ctx, actor(ctx), in.ID, fleet.Termination{LeaveLicense: in.LeaveLicense}))
		})
	for _, v := range []struct {
		name, id, doc string
		role          access.Role
		do            do
	}{
		{"idle-detection/enable", "enable-idle-detection", "Switch idle detection on", access.Operator, func(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
			return s.fleet.SetIdleDetection(ctx, by, id, true)
		}},
		{"idle-detection/disable", "disable-idle-detection", "Never pause it for idleness", access.Operator, func(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
			return s.fleet.SetIdleDetection(ctx, by, id, false)
		}},
		{"arm", "arm-worker", "Take it out of dry-run mode", access.Admin, func(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
			return s.fleet.ArmWorker(ctx, by, id, true)
		}},
		{"disarm", "disarm-worker", "Put it in dry-run mode: decisions are only recorded", access.Operator, func(ctx context.Context, by audit.Actor, id string) (worker.Worker, error) {
			return s.fleet.ArmWorker(ctx, by, id, false)
		}},
	} {
		register(s, route{id: v.id, method: "POST", path: at(v.name), role: v.role, doc: v.doc},
			func(ctx context.Context, in *One) (*answer[worker.Worker], error) {
				return shown(v.do(ctx, actor(ctx), in.ID))
			})
	}
	s.snoozeRoute(at)
	s.detectRoutes(at)
	s.licenseRoutes(at)
	s.wakeRoutes(at)
	register(s, route{id: "arm-workers", method: "POST", path: workersPath + "/arm", role: access.Admin, doc: "Take all workers that a selector matches out of dry-run mode"},
		func(ctx context.Context, in *struct{ Body control.Selector }) (*answer[control.List[worker.Worker]], error) {
			return ok(s.armSelected(ctx, in.Body))
		})
	register(s, route{id: "scale-up", method: "POST", path: workersPath + "/scale-up", role: access.Admin, status: http.StatusAccepted, long: true,
		doc: "One more worker of a template: a stopped one is started before one is launched"},
		func(ctx context.Context, in *struct{ Body control.ScaleUp }) (*answer[worker.Worker], error) {
			if err := intoRegionOf(ctx, &in.Body.AWSRegion); err != nil {
				return nil, problem(err)
			}
			return accepted(s.fleet.ScaleUp(ctx, actor(ctx), in.Body.Template, in.Body.AWSRegion, in.Body.Reason))
		})
}

func (s *Server) snoozeRoute(at func(string) string) {
	register(s, route{id: "snooze-worker", method: "POST", path: at("snooze"), role: access.Operator, doc: "Protect it from automatic pauses: until a time, or for minutes; without either, end the snooze"},
		func(ctx context.Context, in *struct {
			One
			Body control.Snooze
		}) (*answer[worker.Worker], error) {
			var until time.Time
			switch b := in.Body; {
			case b.Until != "" && b.Minutes > 0:
				return nil, problem(invalid("minutes", "give until or minutes, not both"))
			case b.Until != "":
				var err error
				if until, err = when.Moment(time.Now().UTC(), b.Until); err != nil {
					return nil, problem(invalid("until", err.Error()))
				}
			case b.Minutes > 0:
				until = time.Now().Add(time.Duration(b.Minutes) * time.Minute)
			}
			return shown(s.fleet.SnoozeWorker(ctx, actor(ctx), in.ID, until))
		})
}

func (s *Server) detectRoutes(at func(string) string) {
	register(s, route{id: "detect-idle", method: "POST", path: at("detect-idle"), role: access.Operator, long: true,
		doc: "Check now whether it is idle, and pause it if it is eligible; 202 if its server has not answered yet"},
		func(ctx context.Context, in *One) (*answer[fleet.Request], error) {
			r, err := s.fleet.AskOwner(ctx, actor(ctx), fleet.RequestDetect, in.ID, true)
			if err != nil {
				return nil, problem(err)
			}
			wait, cancel := context.WithTimeout(ctx, detectWait)
			defer cancel()
			if r, err = s.fleet.Await(wait, r); err != nil {
				return nil, problem(err)
			}
			a := &answer[fleet.Request]{Status: http.StatusOK, Body: r}
			if r.AnsweredAt == nil {
				a.Status, a.Location = http.StatusAccepted, base+"/requests/"+r.ID
			}
			return a, nil
		})
	register(s, route{id: "get-request", method: "GET", path: base + "/requests/{request_id}", role: access.Viewer, doc: "A command that its worker's owner carries out, and its answer"},
		func(ctx context.Context, in *struct {
			ID string `path:"request_id" maxLength:"128"`
		}) (*answer[fleet.Request], error) {
			return ok(s.fleet.Request(ctx, in.ID))
		})
}

func (s *Server) licenseRoutes(at func(string) string) {
	register(s, route{id: "register-license", method: "POST", path: at("license"), role: access.Operator, status: http.StatusAccepted, long: true, doc: "Register its CML license"},
		func(ctx context.Context, in *struct {
			One
			Body control.LicenseRequest
		}) (*answer[worker.Worker], error) {
			return accepted(s.fleet.RegisterLicense(ctx, actor(ctx), in.ID, in.Body.Token, in.Body.Reregister))
		})
	register(s, route{id: "deregister-license", method: "DELETE", path: at("license"), role: access.Operator, status: http.StatusAccepted, long: true, doc: "Release its CML license"},
		func(ctx context.Context, in *One) (*answer[worker.Worker], error) {
			return accepted(s.fleet.DeregisterLicense(ctx, actor(ctx), in.ID))
		})
}

func (s *Server) wakeRoutes(at func(string) string) {
	register(s, route{id: "wake-worker", method: "POST", path: at("wake"), long: true,
		doc: "Resume it with its own wake token as the bearer; limited in rate"},
		func(ctx context.Context, in *One) (*answer[worker.Worker], error) {
			p := principalOf(ctx)
			if !p.given {
				return nil, fault(http.StatusUnauthorized, "no_token", "cannot wake a worker without its wake token in the header Authorization: Bearer TOKEN")
			}
			w, err := s.fleet.WakeWorker(ctx, in.ID, p.waking)
			if refused := problem(err); refused != nil {
				if m, is := refused.(interface{ GetStatus() int }); is && m.GetStatus() == http.StatusNotFound {
					return nil, fault(http.StatusUnauthorized, "bad_token", "cannot wake the worker: the wake token is not valid for it")
				}
				return nil, refused
			}
			// A caller with only a wake token does not get the complete record.
			return accepted(worker.Worker{ID: w.ID, Name: w.Name, AWSRegion: w.AWSRegion, Status: w.Status, DesiredStatus: w.DesiredStatus}, nil)
		})
	register(s, route{id: "new-wake-token", method: "POST", path: at("wake-token"), role: access.Admin, secret: true, doc: "Create a wake token that replaces the present one; it is shown once"},
		func(ctx context.Context, in *One) (*answer[control.WakeToken], error) {
			t, err := s.fleet.NewWakeToken(ctx, actor(ctx), in.ID)
			return ok(control.WakeToken{WorkerID: in.ID, Token: t, URL: workersPath + "/" + in.ID + "/wake"}, err)
		})
}

// armSelected arms all workers selected by sel. Workers armed before an error
// stay armed; the call can be repeated.
func (s *Server) armSelected(ctx context.Context, sel control.Selector) (control.List[worker.Worker], error) {
	out := control.List[worker.Worker]{Items: []worker.Worker{}}
	if len(sel.WorkerIDs) == 0 && len(sel.Tags) == 0 && sel.Region == "" && !sel.All {
		return out, invalid("all", "an empty selector needs all: true")
	}
	arm := func(id string) error {
		w, err := s.fleet.ArmWorker(ctx, actor(ctx), id, true)
		if err == nil {
			out.Items = append(out.Items, w.Public())
		}
		return err
	}
	for _, id := range sel.WorkerIDs {
		if err := arm(id); err != nil {
			return out, err
		}
	}
	if len(sel.WorkerIDs) > 0 {
		return out, nil
	}
	page, err := s.roster.Select(ctx, roster.Query{Filter: worker.Filter{Region: sel.Region, Tags: sel.Tags}, Unarmed: true, Limit: math.MaxInt})
	if err != nil {
		return out, err
	}
	for _, id := range page.IDs {
		if err := arm(id); err != nil {
			return out, err
		}
	}
	return out, nil
}
