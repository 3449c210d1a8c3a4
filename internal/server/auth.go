package server

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/fleet/audit"
	"lull/internal/platform/oidc"
	"lull/internal/server/access"
)

// principalKey is the context key of a request's principal.
type principalKey struct{}

// principal is the caller of a request: a valid token, or the reason why there is
// none.
type principal struct {
	token   access.Token
	given   bool
	denied  error
	waking  string // the presented token, for the wake route
	unready bool
}

func principalOf(ctx context.Context) principal {
	p, _ := ctx.Value(principalKey{}).(principal)
	return p
}

// actor returns the actor that a change is recorded for.
func actor(ctx context.Context) audit.Actor {
	p := principalOf(ctx)
	kind := audit.KindUser
	if p.token.Role == access.Agent || p.token.Role == access.Host {
		kind = audit.KindAgent
	}
	return audit.Actor{Name: p.token.Name, Kind: kind}
}

// identify authenticates a request. The route decides whether the caller has
// the permission.
func (s *Server) identify(r *http.Request) *http.Request {
	p := principal{}
	scheme, presented, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	presented = strings.TrimSpace(presented)
	if strings.EqualFold(scheme, sessionScheme) {
		var ok bool
		if presented, ok = sessionToken(r, presented, time.Now()); !ok {
			p.given, p.denied = true, access.ErrDenied
		}
		scheme = "bearer"
	}
	ofIssuer := s.identity != nil && oidc.Looks(presented)
	if strings.EqualFold(scheme, "bearer") && presented != "" && (len(presented) < 512 || ofIssuer) {
		p.given, p.waking = true, presented
		select {
		case <-s.ready:
			if ofIssuer {
				p.token, p.denied = s.userToken(r.Context(), presented)
				break
			}
			p.token, p.denied = s.tokens.Check(time.Now(), p.waking)
		default:
			p.unready = true
		}
	}
	return r.WithContext(context.WithValue(r.Context(), principalKey{}, p))
}

// authorize checks a request against the role of its route.
func (s *Server) authorize(ctx huma.Context, next func(huma.Context)) {
	r, _ := ctx.Operation().Metadata["route"].(route)
	p := principalOf(ctx.Context())
	switch {
	case r.role == "" && r.id != "":
		next(ctx)
	case p.unready:
		refuse(ctx, fault(http.StatusServiceUnavailable, "starting", "cannot answer yet: the server is starting"))
	case !p.given:
		ctx.SetHeader("WWW-Authenticate", `Bearer realm="lull"`)
		refuse(ctx, fault(http.StatusUnauthorized, "no_token", "missing credentials: send a token in the header Authorization: Bearer TOKEN"))
	case errors.As(p.denied, new(errIssuer)):
		refuse(ctx, fault(http.StatusServiceUnavailable, "issuer", p.denied.Error()))
	case p.denied != nil:
		ctx.SetHeader("WWW-Authenticate", `Bearer realm="lull", error="invalid_token"`)
		refuse(ctx, fault(http.StatusUnauthorized, "bad_token", p.denied.Error()))
	case r.machine && p.token.Machine != "":
		if string(p.token.Role)+"s" != machineKind(ctx.URL().Path) || p.token.Machine != ctx.Param("name") {
			refuse(ctx, fault(http.StatusForbidden, "other_machine", "this token is only valid for machine "+p.token.Machine))
			return
		}
		next(ctx)
	case !p.token.Role.Covers(r.role):
		refuse(ctx, fault(http.StatusForbidden, "role", "cannot do that as "+string(p.token.Role)+": it needs "+string(r.role)))
	default:
		next(ctx)
	}
}

// machineKind returns "agents" or "hosts" for a path below them.
func machineKind(path string) string {
	kind, _, _ := strings.Cut(strings.TrimPrefix(path, base+"/"), "/")
	return kind
}
