package server

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"html/template"
	"net/http"
	"time"

	"lull/internal/platform/oidc"
	"lull/internal/protocol/control"
	"lull/internal/server/access"
)

// IdentityProvider verifies the tokens of an OIDC issuer and lets its users sign in.
// oidc.Provider implements it.
type IdentityProvider interface {
	Verify(ctx context.Context, token string) (oidc.User, error)
	Issuer() string
	ClientID() string
	URL(ctx context.Context, f oidc.Flow, redirect string) (string, error)
	Exchange(ctx context.Context, f oidc.Flow, redirect, code string) (oidc.Login, error)
}

var _ IdentityProvider = (*oidc.Provider)(nil)

// errIssuer is the error of an issuer that cannot be reached; the request may be
// retried.
type errIssuer struct{ error }

// userToken verifies a token of the issuer and returns the access.Token of its user.
// A user whose claims give no role is authenticated but may do nothing.
func (s *Server) userToken(ctx context.Context, presented string) (access.Token, error) {
	who, err := s.identity.Verify(ctx, presented)
	switch {
	case err == nil:
		role := access.Role(who.Role)
		if role == "" {
			role = "a user without a role"
		}
		return access.Token{ID: "oidc-" + who.Subject, Name: who.Name, Role: role, ExpiresAt: &who.Expires}, nil
	case errors.Is(err, oidc.ErrUnreachable):
		s.log.Warn("cannot verify users' tokens", "err", err)
		return access.Token{}, errIssuer{oidc.ErrUnreachable}
	case errors.Is(err, oidc.ErrExpired):
		return access.Token{}, oidc.ErrExpired
	}
	s.log.Debug("a user's token was refused", "err", err)
	return access.Token{}, oidc.ErrDenied
}

const loginPath = "/auth/login"

func (s *Server) peopleRoutes() {
	register(s, route{id: "auth", method: "GET", path: base + "/auth", status: http.StatusOK, doc: "How users log in: the OIDC issuer, if there is one"},
		func(context.Context, *struct{}) (*answer[control.Auth], error) {
			if s.identity == nil {
				return ok(control.Auth{}, nil)
			}
			return ok(control.Auth{Issuer: s.identity.Issuer(), ClientID: s.identity.ClientID(), Login: loginPath}, nil)
		})
	if s.identity != nil {
		s.mux.HandleFunc("GET "+loginPath, s.login)
		s.mux.HandleFunc("GET "+callbackPath, s.callback)
	}
}

const (
	callbackPath = "/auth/callback"
	flowCookie   = "lull_login"
	flowLife     = 10 * time.Minute
)

// redirect returns the URL to which the issuer sends users back.
func (s *Server) redirect(r *http.Request) string {
	if s.publicURL != "" {
		return s.publicURL + callbackPath
	}
	scheme := "http"
	if r.TLS != nil {
		scheme = "https"
	}
	return scheme + "://" + r.Host + callbackPath
}

// login redirects a browser to the issuer. The flow's secrets are in a cookie that
// only this browser has and no script can read.
func (s *Server) login(w http.ResponseWriter, r *http.Request) {
	f := oidc.NewFlow()
	where, err := s.identity.URL(r.Context(), f, s.redirect(r))
	if err != nil {
		writeProblem(w, http.StatusServiceUnavailable, "issuer", err.Error())
		return
	}
	b, err := json.Marshal(f)
	if err != nil {
		writeProblem(w, http.StatusInternalServerError, "internal", err.Error())
		return
	}
	s.setFlow(w, r, base64.RawURLEncoding.EncodeToString(b), flowLife)
	http.Redirect(w, r, where, http.StatusFound)
}

func (s *Server) setFlow(w http.ResponseWriter, r *http.Request, value string, life time.Duration) {
	age := int(life / time.Second)
	if value == "" {
		age = -1
	}
	http.SetCookie(w, &http.Cookie{Name: flowCookie, Value: value, Path: "/auth/", MaxAge: age, HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteLaxMode})
}

// handOver is the page that stores a session for the dashboard, in the same way as
// SignInPath does.
var handOver = template.Must(template.New("login").Parse(`<!doctype html><meta charset="utf-8"><title>lull</title>
<script nonce="{{.Nonce}}">localStorage.setItem('` + sessionKey + `', {{.Session}}); location.replace('/')</script>
<noscript>The dashboard needs JavaScript.</noscript>
`))

// callback completes a login. It accepts only the browser that began the login and
// the token that was issued for it.
func (s *Server) callback(w http.ResponseWriter, r *http.Request) {
	fail := func(detail string) { writeProblem(w, http.StatusBadRequest, "login", detail) }
	var f oidc.Flow
	c, err := r.Cookie(flowCookie)
	if err == nil {
		var b []byte
		if b, err = base64.RawURLEncoding.DecodeString(c.Value); err == nil {
			err = json.Unmarshal(b, &f)
		}
	}
	s.setFlow(w, r, "", 0)
	q := r.URL.Query()
	switch {
	case err != nil || f.State == "" || f.Nonce == "" || q.Get("state") != f.State:
		fail("cannot complete the login: it was not started in this browser, or has expired; start again at " + loginPath)
		return
	case q.Get("error") != "":
		fail("cannot log in: the issuer answered " + q.Get("error") + " " + q.Get("error_description"))
		return
	}
	l, err := s.identity.Exchange(r.Context(), f, s.redirect(r), q.Get("code"))
	if err != nil {
		fail(err.Error())
		return
	}
	session, err := s.openSession(w, r, l.IDToken)
	if err != nil {
		fail("cannot open a session: " + err.Error())
		return
	}
	nonce := rand.Text()
	w.Header().Set("Content-Security-Policy", "default-src 'none'; script-src 'nonce-"+nonce+"'; base-uri 'none'; frame-ancestors 'none'")
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_ = handOver.Execute(w, map[string]string{"Nonce": nonce, "Session": session}) // if the browser has disconnected, the user starts again
}
