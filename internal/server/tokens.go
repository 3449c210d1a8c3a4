package server

import (
	"context"
	"net/http"
	"time"

	"lull/internal/fleet/audit"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

func tokenOf(t access.Token, secret string) control.Token {
	return control.Token{ID: t.ID, Name: t.Name, Role: string(t.Role), Machine: t.Machine, CreatedAt: t.CreatedAt, CreatedBy: t.CreatedBy,
		ExpiresAt: t.ExpiresAt, RevokedAt: t.RevokedAt, RevokedBy: t.RevokedBy, Secret: secret}
}

func (s *Server) sessionRoute() {
	register(s, route{id: "whoami", method: "GET", path: base + "/session", role: access.Viewer, doc: "The identity of the caller and of the server"},
		func(ctx context.Context, _ *struct{}) (*answer[control.Session], error) {
			p := principalOf(ctx)
			in := control.Session{Name: p.token.Name, Role: string(p.token.Role), Fleet: s.fleet.ID(), Version: s.version, Halted: s.halted(), Shadow: s.shadow}
			if s.local != nil {
				in.Host = s.local.Host
			}
			return ok(in, nil)
		})
}

func (s *Server) tokenRoutes() {
	s.sessionRoute()
	all := base + "/tokens"
	register(s, route{id: "list-tokens", method: "GET", path: all, role: access.Admin, doc: "Tokens, without their secrets"},
		func(_ context.Context, in *Paged) (*answer[control.List[control.Token]], error) {
			var l []control.Token
			for _, t := range s.tokens.List() {
				l = append(l, tokenOf(t, ""))
			}
			return ok(pageOf(l, in, func(t control.Token) string { return t.ID }), nil)
		})
	register(s, route{id: "create-token", method: "POST", path: all, role: access.Admin, status: http.StatusCreated, secret: true, doc: "Create a token; it is shown once"},
		func(ctx context.Context, in *struct{ Body control.NewToken }) (*answer[control.Token], error) {
			by := actor(ctx)
			ops, err := audit.Ops(audit.Entry{Action: "token_created", By: by, Detail: in.Body.Role + " " + in.Body.Name})
			if err != nil {
				return nil, problem(err)
			}
			t, secret, err := s.tokens.Create(ctx, access.Wanted{Name: in.Body.Name, Role: access.Role(in.Body.Role), Machine: in.Body.Machine,
				TTL: time.Duration(in.Body.TTLSeconds) * time.Second, By: by.Name}, ops...)
			a, err := ok(tokenOf(t, secret), err)
			if err == nil {
				a.Status = http.StatusCreated
			}
			return a, err
		})
	register(s, route{id: "revoke-token", method: "DELETE", path: all + "/{id}", role: access.Admin, status: http.StatusOK, doc: "Revoke a token permanently"},
		func(ctx context.Context, in *struct {
			ID string `path:"id" maxLength:"64"`
		}) (*answer[control.Token], error) {
			by := actor(ctx)
			ops, err := audit.Ops(audit.Entry{Action: "token_revoked", By: by, Detail: in.ID})
			if err != nil {
				return nil, problem(err)
			}
			t, err := s.tokens.Revoke(ctx, in.ID, by.Name, ops...)
			return ok(tokenOf(t, ""), err)
		})
}
