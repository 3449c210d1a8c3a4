package server

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"html/template"
	"net/http"
	"time"

	"lull/internal/fleet/audit"
	"lull/internal/platform/oidc"
	"lull/internal/server/access"
	"lull/internal/store"
)

// A sign-in link is SignInPath#SECRET. Browsers do not send what follows the #, so
// the secret appears in no log of a server or proxy. Opening the page does not use
// the link up: link previews, prefetches and HEAD requests get the same page. Only
// the page's script, once a user sees the page, uses the link up with a POST.

// SignInPath is the page on which sign-in links are used.
const SignInPath = "/sign-in"

var signInPage = template.Must(template.New("sign-in").Parse(`<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><meta name="robots" content="noindex"><title>lull: sign in</title>
<style nonce="{{.}}">:root{color-scheme:light dark;font:16px/1.45 system-ui,sans-serif}main{max-width:32rem;margin:20vh auto 0;padding:0 1rem}</style>
<main><h1>lull</h1><p id="said" role="status">Signing in …</p><p><a href="/">Sign in with a token</a></p>
<noscript>The dashboard needs JavaScript.</noscript></main>
<script nonce="{{.}}">
const link = location.hash.slice(1), said = document.getElementById('said')
history.replaceState(null, '', location.pathname)
const seen = async () => {
  if (document.prerendering) await new Promise(go => document.addEventListener('prerenderingchange', go, {once: true}))
  while (document.visibilityState !== 'visible') await new Promise(go => document.addEventListener('visibilitychange', go, {once: true}))
}
const signIn = async () => {
  if (!link) { said.textContent = 'This is not a whole sign-in link.'; return }
  await seen()
  const answer = await fetch(location.pathname, {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify({link})})
  const body = await answer.json()
  if (!answer.ok) { said.textContent = body.detail; said.dataset.code = body.type.split(/[:/]/).pop(); return }
  localStorage.setItem('` + sessionKey + `', body.session)
  location.replace('/')
}
signIn().catch(() => { said.textContent = 'The server does not answer. Load the link again.' })
</script></html>
`))

func (s *Server) signInRoutes() {
	s.mux.HandleFunc("GET "+SignInPath, s.showSignIn)
	s.mux.HandleFunc("POST "+SignInPath, s.signIn)
	s.mux.HandleFunc("DELETE "+SignInPath, s.signOut)
}

func (s *Server) showSignIn(w http.ResponseWriter, _ *http.Request) {
	nonce := rand.Text()
	h := w.Header()
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'nonce-"+nonce+"'; style-src 'nonce-"+nonce+"'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Referrer-Policy", "no-referrer")
	_ = signInPage.Execute(w, nonce) // a browser that has disconnected can repeat the request
}

// signIn opens a session for a sign-in link, which it uses up, or for a token.
func (s *Server) signIn(w http.ResponseWriter, r *http.Request) {
	select {
	case <-s.ready:
	default:
		writeProblem(w, http.StatusServiceUnavailable, "starting", "cannot answer yet: the server is starting")
		return
	}
	var in struct {
		Link  string `json:"link"`
		Token string `json:"token"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, oidc.MaxToken+64)).Decode(&in); err != nil {
		writeProblem(w, http.StatusBadRequest, "invalid", "cannot read the request: want {\"link\": \"...\"} or {\"token\": \"...\"}")
		return
	}
	if in.Token != "" {
		s.signInWith(w, r, in.Token)
		return
	}
	_, secret, err := s.tokens.SignIn(r.Context(), time.Now(), in.Link, func(t access.Token) ([]store.Op, error) {
		return audit.Ops(audit.Entry{Action: "signed_in", By: audit.Actor{Name: t.CreatedBy, Kind: audit.KindUser}, Detail: t.ID + " by a sign-in link"})
	})
	switch {
	case err == nil:
		s.answerSession(w, r, secret)
	case errors.Is(err, access.ErrLinkUsed):
		writeProblem(w, http.StatusGone, "link_used", err.Error())
	case errors.Is(err, access.ErrLinkExpired):
		writeProblem(w, http.StatusGone, "link_expired", err.Error())
	case errors.Is(err, access.ErrLinkUnknown):
		writeProblem(w, http.StatusForbidden, "link_unknown", err.Error())
	default:
		s.log.Error("a sign-in link could not be checked", "err", err)
		writeProblem(w, http.StatusServiceUnavailable, "store_unavailable", "cannot sign in: the server's store does not answer; load the link again")
	}
}
