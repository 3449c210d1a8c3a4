package api

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
	"lull/internal/host"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/hostctl"
)

// changes registers an operation that changes an instance and returns its view. do
// returns the instance's name or ID.
func changes[I any](a *API, api huma.API, op huma.Operation, do func(context.Context, *I) (name string, err error)) {
	huma.Register(api, op, func(ctx context.Context, in *I) (*answer[hostctl.Instance], error) {
		name, err := do(ctx, in)
		if err != nil {
			return nil, err
		}
		o, err := a.Host.Get(name)
		return &answer[hostctl.Instance]{o}, problem(err)
	})
}

// created is operation for a request that creates an instance.
func created(id, path, summary string) huma.Operation {
	op := operation(id, "POST", path, summary)
	op.DefaultStatus = http.StatusCreated
	return op
}

// moment parses a time in a request. An empty text gives the zero time.
func moment(text string) (at time.Time, err error) {
	if text == "" {
		return time.Time{}, nil
	}
	if at, err = when.Moment(time.Now(), text); err != nil {
		return time.Time{}, invalid(err)
	}
	return at, nil
}

func invalid(err error) error {
	return httpx.NewProblem(http.StatusUnprocessableEntity, "invalid", err.Error())
}

// making registers the requests that create, change and remove instances.
func (a *API) making(api huma.API) {
	changes(a, api, created("create-instance", "/instances", "Create an instance"),
		func(ctx context.Context, in *struct{ Body hostctl.Create }) (string, error) {
			var id string
			var err error
			if in.Body.Replace {
				err = a.Host.Complete(ctx, func(ctx context.Context) (err error) {
					id, err = a.Host.Replace(ctx, in.Body.Spec)
					return err
				})
			} else if id, err = a.Host.Create(ctx, in.Body.Spec); err == nil && in.Body.Start {
				err = a.Host.Complete(ctx, func(ctx context.Context) error {
					err := a.Host.Start(ctx, id, host.ByManual)
					if err != nil && in.Body.RemoveFailed {
						err = a.Host.Discard(ctx, id, err)
					}
					return err
				})
			}
			return id, problem(err)
		})
	changes(a, api, created("clone-instance", "/instances/{name}/clone", "Clone an instance from a hibernated one's snapshot; 409 while that runs or clients are connected"),
		func(ctx context.Context, in *struct {
			Named
			Body hostctl.Clone
		}) (id string, err error) {
			err = a.Host.Complete(ctx, func(ctx context.Context) (err error) {
				id, err = a.Host.Clone(ctx, in.Name, in.Body)
				return err
			})
			return id, problem(err)
		})
	changes(a, api, operation("change-instance", "PATCH", "/instances/{name}", "Change its timers, and how it is woken and restarted; absent fields are unchanged"),
		func(ctx context.Context, in *struct {
			Named
			Body hostctl.Change
		}) (string, error) {
			return in.Name, problem(a.Host.Change(ctx, in.Name, in.Body, host.ByManual))
		})
	huma.Register(api, operation("delete-instance", "DELETE", "/instances/{name}", "Stop and remove an instance"),
		func(ctx context.Context, in *Named) (*struct{}, error) {
			return nil, problem(a.Host.Complete(ctx, func(ctx context.Context) error { return a.Host.Delete(ctx, in.Name, host.ByManual) }))
		})
}

// power registers the requests that start, stop, pause, resume and hold an
// instance.
func (a *API) power(api huma.API) {
	type verb struct {
		Named
		Force   bool `query:"force" doc:"pause: even if connections or leases hold it"`
		Disable bool `query:"disable" doc:"stop: and do not wake it again"`
	}
	for _, v := range []struct {
		name, summary string
		do            func(context.Context, *verb) error
	}{
		{"start", "Start it, or resume it when paused", func(ctx context.Context, in *verb) error { return a.Host.Start(ctx, in.Name, host.ByManual) }},
		{"restart", "Stop it and start it again; connections to its exposed ports wait", func(ctx context.Context, in *verb) error { return a.Host.Restart(ctx, in.Name, host.ByManual) }},
		{"stop", "Stop it; always works", func(ctx context.Context, in *verb) error { return a.Host.Stop(ctx, in.Name, host.ByManual, in.Disable) }},
		{"pause", "Freeze it; 409 while a connection or lease holds it", func(ctx context.Context, in *verb) error {
			return a.Host.Pause(ctx, in.Name, host.ByManual, in.Force)
		}},
		{"resume", "Thaw it", func(ctx context.Context, in *verb) error { return a.Host.Resume(ctx, in.Name, host.ByManual) }},
	} {
		changes(a, api, operation(v.name+"-instance", "POST", "/instances/{name}/"+v.name, v.summary), func(ctx context.Context, in *verb) (string, error) {
			return in.Name, problem(a.Host.Complete(ctx, func(ctx context.Context) error { return v.do(ctx, in) }))
		})
	}
	changes(a, api, operation("snooze-instance", "POST", "/instances/{name}/snooze", "Keep it running until a time; without one, end the snooze"),
		func(ctx context.Context, in *struct {
			Named
			Body struct {
				Until string `json:"until,omitempty" maxLength:"80" doc:"RFC 3339, 18:00, fri 18:00, tomorrow, 2006-01-02 15:04 or +2h, in the host's zone or with one such as Europe/Berlin behind it"`
			}
		}) (string, error) {
			until, err := moment(in.Body.Until)
			if err != nil {
				return "", err
			}
			return in.Name, problem(a.Host.Snooze(ctx, in.Name, until))
		})
	changes(a, api, operation("wake-at", "POST", "/instances/{name}/wake-at", "Wake it in time to run at a given time; without one, clear that time"),
		func(ctx context.Context, in *struct {
			Named
			Body struct {
				At string `json:"at,omitempty" maxLength:"80" doc:"As until of a snooze"`
			}
		}) (string, error) {
			at, err := moment(in.Body.At)
			if err != nil {
				return "", err
			}
			return in.Name, problem(a.Host.WakeAt(ctx, in.Name, at))
		})
}

// control registers the requests about the host as a whole, and commands.
func (a *API) control(api huma.API) {
	huma.Register(api, operation("open-dashboard", "POST", "/dashboard/links", "Make a link that signs a browser in to the dashboard, once"),
		func(ctx context.Context, _ *struct{}) (*answer[hostctl.Link], error) {
			l, err := a.Link(ctx, httpx.UserOf(ctx))
			if err != nil {
				return nil, httpx.NewProblem(http.StatusConflict, "no_dashboard", err.Error())
			}
			return &answer[hostctl.Link]{l}, nil
		})
	huma.Register(api, operation("halt", "POST", "/halt", "Stop all automatic actions, until a time or until lifted, or lift the halt"),
		func(ctx context.Context, in *struct {
			Body struct {
				On     bool   `json:"on"`
				Reason string `json:"reason,omitempty" maxLength:"512" doc:"Shown with the halt everywhere"`
				Until  string `json:"until,omitempty" maxLength:"80" doc:"End of the halt; RFC 3339, 18:00, fri 18:00, tomorrow, 2006-01-02 15:04 or +2h, in the host's time zone or followed by one such as Europe/Berlin"`
			}
		}) (*answer[hostctl.Status], error) {
			by := httpx.UserOf(ctx)
			var x *idle.HaltedBy
			if in.Body.On {
				x = &idle.HaltedBy{By: by, Since: time.Now().UTC().Round(0), Reason: in.Body.Reason}
				if u := in.Body.Until; u != "" {
					end, err := when.Ahead(time.Now(), u)
					if err != nil {
						return nil, invalid(err)
					}
					end = end.UTC().Round(0)
					x.Until = &end
				}
			}
			if err := a.Host.Halt(x, by); err != nil {
				return nil, problem(err)
			}
			return &answer[hostctl.Status]{a.Status()}, nil
		})
	huma.Register(api, operation("exec", "POST", "/instances/{name}/exec", "Run a command inside an instance"),
		func(ctx context.Context, in *struct {
			Named
			Body hostctl.ExecRequest
		}) (*answer[hostctl.ExecResult], error) {
			r, err := a.Host.Exec(ctx, in.Name, in.Body)
			return &answer[hostctl.ExecResult]{r}, problem(err)
		})
}
