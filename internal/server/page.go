package server

import (
	"bytes"
	"context"
	"html/template"
	"maps"
	"net/http"
	"slices"
	"sync"

	"github.com/danielgtaylor/huma/v2"
)

// reference is the human-readable API page: the operations of the OpenAPI document as a
// table, without scripts or external resources.
var reference = template.Must(template.New("reference").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>lull: API</title>
<style>
:root{color-scheme:light dark;font:16px/1.45 system-ui,sans-serif}body{max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #8884;vertical-align:top}
code{font-family:ui-monospace,monospace}
</style>
<h1>lull: API</h1>
<p>Version {{.Version}}. The whole document, for programs: <a href="/openapi.json">openapi.json</a>. Ask with <code>Authorization: Bearer TOKEN</code>.
Everything about workers is below <code>/api/v1/region/{aws_region}/workers</code> as well.</p>
<table><tr><th>Call<th>Effect<th>Parameters<th>Role</tr>
{{range .Rows}}<tr id="{{.ID}}"><td><code>{{.Method}} {{.Path}}</code><td>{{.Doc}}<td>{{range .Params}}<code>{{.}}</code> {{end}}<td>{{.Role}}</tr>
{{end}}</table></html>
`))

type referenceRow struct {
	ID, Method, Path, Doc, Role string
	Params                      []string
}

// rows lists the operations of the document, except the regional copies.
func (s *Server) rows() []referenceRow {
	var out []referenceRow
	paths := s.api.OpenAPI().Paths
	for _, p := range slices.Sorted(maps.Keys(paths)) {
		item := paths[p]
		for _, op := range []*huma.Operation{item.Get, item.Post, item.Put, item.Patch, item.Delete} {
			if op == nil || len(p) > len(regionalPath) && p[:len(regionalPath)] == regionalPath || p == regionalPath {
				continue
			}
			row := referenceRow{ID: op.OperationID, Method: op.Method, Path: p, Doc: op.Summary}
			row.Role, _ = op.Extensions["x-lull-role"].(string)
			for _, param := range op.Parameters {
				if param.In != "path" {
					row.Params = append(row.Params, param.Name)
				}
			}
			out = append(out, row)
		}
	}
	return out
}

func (s *Server) pageRoute() {
	r := route{id: "reference", method: "GET", path: "/docs", doc: "This document as a page"}
	page := sync.OnceValues(func() ([]byte, error) {
		var b bytes.Buffer
		err := reference.Execute(&b, map[string]any{"Version": s.version, "Rows": s.rows()})
		return b.Bytes(), err
	})
	register(s, r, func(context.Context, *struct{}) (*huma.StreamResponse, error) {
		body, err := page()
		if err != nil {
			return nil, problem(err)
		}
		return &huma.StreamResponse{Body: func(hc huma.Context) {
			hc.SetHeader("Content-Type", "text/html; charset=utf-8")
			hc.SetHeader("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
			hc.SetStatus(http.StatusOK)
			_, _ = hc.BodyWriter().Write(body) // an error means that the client has disconnected
		}}, nil
	})
	describe(s, r, "text/html", "A page that needs nothing from elsewhere")
}
