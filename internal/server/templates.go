package server

import (
	"context"
	"net/http"
	"strings"
	"time"

	"lull/internal/core/policy/when"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/settings"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

type NamedTemplate struct {
	Name string `path:"name" maxLength:"128" doc:"Name of a template"`
}

func shownTemplate(t launch.Template, err error) (*answer[launch.Template], error) {
	a, err := ok(t.Public(), err)
	if err == nil {
		a.ETag = etag(t.Revision())
	}
	return a, err
}

func (s *Server) templateRoutes() {
	all, each := base+"/templates", base+"/templates/{name}"
	register(s, route{id: "list-templates", method: "GET", path: all, role: access.Viewer, doc: "Templates, by name"},
		func(ctx context.Context, in *Paged) (*answer[control.List[launch.Template]], error) {
			l, err := s.fleet.Templates(ctx)
			for i := range l {
				l[i] = l[i].Public()
			}
			return ok(pageOf(l, in, func(t launch.Template) string { return t.Name }), err)
		})
	register(s, route{id: "get-template", method: "GET", path: each, role: access.Viewer, doc: "One template"},
		func(ctx context.Context, in *NamedTemplate) (*answer[launch.Template], error) {
			return shownTemplate(s.fleet.Template(ctx, in.Name))
		})
	register(s, route{id: "put-template", method: "PUT", path: each, role: access.Admin, doc: "Create or replace a template; If-Match guards against concurrent changes"},
		func(ctx context.Context, in *struct {
			NamedTemplate
			Match string `header:"If-Match" maxLength:"40"`
			Body  control.TemplateBody
		}) (*answer[launch.Template], error) {
			if in.Body.Name != "" && in.Body.Name != in.Name {
				return nil, problem(invalid("name", "differs from the name in the path"))
			}
			at, err := revisionOf(in.Match)
			if err != nil {
				return nil, err
			}
			return shownTemplate(s.fleet.PutTemplateWith(ctx, actor(ctx), in.Body.Template(in.Name), in.Body.CMLPassword, at))
		})
	register(s, route{id: "delete-template", method: "DELETE", path: each, role: access.Admin, doc: "Remove a template; workers launched from it remain"},
		func(ctx context.Context, in *NamedTemplate) (*struct{}, error) {
			return nil, problem(s.fleet.DeleteTemplate(ctx, actor(ctx), in.Name))
		})
}

// pageOf returns one page of a list that is sorted by key.
func pageOf[T any](l []T, p *Paged, key func(T) string) control.List[T] {
	out := control.List[T]{Items: []T{}}
	for _, v := range l {
		if p.After != "" && strings.Compare(key(v), p.After) <= 0 {
			continue
		}
		if len(out.Items) == p.Limit {
			out.Next = key(out.Items[len(out.Items)-1])
			return out
		}
		out.Items = append(out.Items, v)
	}
	return out
}

func (s *Server) settingRoutes() {
	all := base + "/settings"
	register(s, route{id: "list-settings", method: "GET", path: all, role: access.Viewer, doc: "Effective settings with the source of each"},
		func(ctx context.Context, _ *struct{}) (*answer[control.Settings], error) {
			if err := s.fleet.Refresh(ctx); err != nil {
				return nil, problem(err)
			}
			l, revision := s.fleet.AllSettings()
			return ok(control.Settings{Items: l, Revision: revision}, nil)
		})
	register(s, route{id: "change-settings", method: "PATCH", path: all, role: access.Admin, doc: "Change stored settings, all or none; null removes one, so that the next layer applies"},
		func(ctx context.Context, in *struct{ Body map[string]any }) (*answer[control.Settings], error) {
			if len(in.Body) == 0 {
				return nil, problem(invalid("settings", "name at least one setting"))
			}
			for k := range in.Body {
				if _, known := settings.FieldOf(k); !known {
					return nil, problem(invalid(k, "there is no such setting"))
				}
			}
			l, err := s.fleet.PutSettings(ctx, actor(ctx), in.Body)
			_, revision := s.fleet.AllSettings()
			return ok(control.Settings{Items: l, Revision: revision}, err)
		})
	register(s, route{id: "get-halt", method: "GET", path: base + "/halt", role: access.Viewer, doc: "Whether all automatic actions are stopped"},
		func(ctx context.Context, _ *struct{}) (*answer[halt.Halt], error) {
			if err := s.fleet.Refresh(ctx); err != nil {
				return nil, problem(err)
			}
			return ok(s.fleet.Halted(), nil)
		})
	register(s, route{id: "halt", method: "POST", path: base + "/halt", role: access.Operator, status: http.StatusOK, doc: "Stop all automatic actions, permanently or until a time, or resume them"},
		func(ctx context.Context, in *struct {
			Body control.Halting
		}) (*answer[halt.Halt], error) {
			r := halt.Request{On: in.Body.On, Reason: in.Body.Reason}
			switch u := in.Body.Until; {
			case u != "" && !r.On:
				return nil, problem(invalid("until", "only a halt has an end"))
			case u != "":
				t, err := when.Ahead(time.Now().UTC(), u)
				if err != nil {
					return nil, problem(invalid("until", err.Error()))
				}
				r.Until = &t
			}
			return ok(s.fleet.SetHalt(ctx, actor(ctx), r))
		})
}
