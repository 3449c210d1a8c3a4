package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/fleet/audit"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

// AuditFilter selects entries of the log. Embedded parameters must be exported:
// huma ignores others.
type AuditFilter struct {
	WorkerID string `query:"worker_id" maxLength:"128"`
	Action   string `query:"action" maxLength:"128"`
	By       string `query:"by" maxLength:"128" doc:"Part of the actor's name, case-insensitive"`
	Kind     string `query:"kind" enum:"person,controller,agent,wake,schedule,cloud" doc:"Kind of actor"`
	Between
}

func (q AuditFilter) query() (audit.Query, error) {
	from, to, err := q.Between.read()
	return audit.Query{WorkerID: q.WorkerID, Action: q.Action, By: q.By, Kind: q.Kind, From: from, To: to}, err
}

type auditList struct {
	Paged
	AuditFilter
	Newest bool `query:"newest" doc:"The newest entries, newest first; next then goes back in time"`
}

func (s *Server) auditRoutes() {
	list := func(ctx context.Context, in auditList) (control.List[audit.Entry], error) {
		q, err := in.query()
		if err != nil {
			return control.List[audit.Entry]{}, err
		}
		q.After, q.Limit = in.After, in.Limit
		if in.Newest {
			page, err := s.fleet.NewestAudit(ctx, q)
			return control.List[audit.Entry]{Items: page.Entries, Next: page.Next}, err
		}
		page, err := s.fleet.Audit(ctx, q)
		if page.Entries == nil {
			page.Entries = []audit.Entry{}
		}
		return control.List[audit.Entry]{Items: page.Entries, Next: page.Next}, err
	}
	register(s, route{id: "list-audit", method: "GET", path: base + "/audit", role: access.Viewer, doc: "The audit log, oldest first"},
		func(ctx context.Context, in *auditList) (*answer[control.List[audit.Entry]], error) {
			return ok(list(ctx, *in))
		})
	register(s, route{id: "worker-audit", method: "GET", path: workersPath + "/{worker_id}/audit", role: access.Viewer, doc: "The audit log of one worker, oldest first"},
		func(ctx context.Context, in *struct {
			One
			Paged
			Newest bool `query:"newest" doc:"The newest entries, newest first"`
		}) (*answer[control.List[audit.Entry]], error) {
			return ok(list(ctx, auditList{Paged: in.Paged, AuditFilter: AuditFilter{WorkerID: in.ID}, Newest: in.Newest}))
		})
	export := route{id: "export-audit", method: "GET", path: base + "/audit/export", role: access.Viewer, doc: "The audit log as JSON lines or as a table, oldest first"}
	register(s, export, func(ctx context.Context, in *struct {
		AuditFilter
		Format string `query:"format" enum:"jsonl,csv" default:"jsonl" doc:"csv is a table without the readings behind decisions"`
	}) (*huma.StreamResponse, error) {
		q, err := in.query()
		if err != nil {
			return nil, problem(err)
		}
		mime, write := "application/jsonl", s.fleet.ExportAudit
		if in.Format == "csv" {
			mime, write = "text/csv; charset=utf-8", s.fleet.ExportAuditCSV
		}
		return &huma.StreamResponse{Body: func(hc huma.Context) {
			hc.SetHeader("Content-Type", mime)
			hc.SetStatus(http.StatusOK)
			if err := write(hc.Context(), hc.BodyWriter(), q); err != nil {
				s.log.Warn("export of the audit log was cut", "err", err)
				panic(http.ErrAbortHandler) // a truncated response must not look complete
			}
		}}, nil
	})
	describe(s, export, "application/jsonl", "One entry in each line")
}

// describe documents the response of a route that writes its body itself.
func describe(s *Server, r route, mime, doc string) {
	item := s.api.OpenAPI().Paths[r.path]
	op := item.Get
	if r.method == http.MethodPost {
		op = item.Post
	}
	delete(op.Responses, "204")
	op.Responses["200"] = &huma.Response{Description: doc, Content: map[string]*huma.MediaType{mime: {Schema: &huma.Schema{Type: huma.TypeString}}}}
}
