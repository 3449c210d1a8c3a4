package server

import (
	"bytes"
	"context"
	"errors"
	"html/template"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/core/failure"
	"lull/internal/core/power"
	"lull/internal/fleet/warning"
	"lull/internal/fleet/worker"
)

// Here are the pages behind the links of a warning. They need no login: the signature
// in the link authorizes one answer. GET requests have no effect, because mail
// scanners follow every link. Only the form on the page acts.

// question is the wording on the page before and after the answer is given, by kind
// of answer.
var question = map[string]struct{ ask, button, done string }{
	warning.Extend:   {"Keep it running for another hour?", "Extend by an hour", "It is kept running until"},
	warning.NotToday: {"Keep it running for the rest of the day?", "Not today", "It is kept running until"},
	warning.Stop:     {"Stop it now? Its disks are kept.", "Stop now", "It is being stopped."},
}

var answerPage = template.Must(template.New("answer").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><meta name="robots" content="noindex"><title>lull: {{.Title}}</title>
<style>
:root{color-scheme:light dark;font:17px/1.5 system-ui,sans-serif;background:light-dark(#f6f6f3,#11151a);color:light-dark(#1b2025,#e9ecef)}
main{max-width:32rem;margin:12vh auto 3rem;padding:0 1rem}
section{background:light-dark(#fff,#191e25);border:1px solid light-dark(#e2e2dc,#2c343f);border-radius:12px;padding:1.4rem 1.6rem}
.brand{display:flex;gap:.6rem;align-items:center;font-size:1.2rem;font-weight:640;margin:0 0 .8rem .2rem}
h1{font-size:1.5rem;line-height:1.2;margin:0 0 .6rem}p{margin:0 0 .8rem}
button{font:inherit;font-weight:560;padding:.6rem 1.4rem;border-radius:8px;border:0;cursor:pointer;background:light-dark(#0f6b66,#63d2c7);color:light-dark(#fff,#0d1f1d)}
button:focus-visible{outline:2px solid light-dark(#0f6b66,#63d2c7);outline-offset:2px}
</style>
<main>
<p class="brand"><svg viewBox="0 0 32 32" width="26" height="26" aria-hidden="true"><rect width="32" height="32" rx="9" fill="#0f6b66"/><path d="M21.5 19.5A8 8 0 0 1 12.5 8.6a8.2 8.2 0 1 0 10.9 10.5 8 8 0 0 1-1.9.4z" fill="#fff"/></svg>lull</p>
<section>
<h1>{{.Title}}</h1>
{{range .Lines}}<p>{{.}}</p>
{{end}}{{if .Button}}<form method="post"><button type="submit">{{.Button}}</button></form>
{{end}}</section></main></html>
`))

type shownAnswer struct {
	Title  string
	Lines  []string
	Button string
}

type linkToken struct {
	Token string `path:"token" maxLength:"2048" doc:"The signed answer, from a link in a warning"`
}

func (s *Server) answerRoutes() {
	look := route{id: "look-at-answer", method: "GET", path: "/answer/{token}", doc: "The page behind a link in a warning; opening it changes nothing"}
	give := route{id: "give-answer", method: "POST", path: "/answer/{token}", doc: "Give the answer of a warning's link, once; the link's signature authorizes it"}
	for _, r := range []route{look, give} {
		register(s, r, func(ctx context.Context, in *linkToken) (*huma.StreamResponse, error) {
			status, p := s.answer(ctx, in.Token, r.method == "POST")
			var body bytes.Buffer
			if err := answerPage.Execute(&body, p); err != nil {
				return nil, problem(err)
			}
			return &huma.StreamResponse{Body: func(hc huma.Context) {
				hc.SetHeader("Content-Type", "text/html; charset=utf-8")
				hc.SetHeader("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
				hc.SetHeader("Referrer-Policy", "no-referrer") // the URL contains the credential
				hc.SetStatus(status)
				_, _ = hc.BodyWriter().Write(body.Bytes()) // an error means that the client has disconnected
			}}, nil
		})
		describe(s, r, "text/html", "A page that needs nothing from elsewhere")
	}
}

// over returns the page for a link that is no longer valid.
func over(why string) (int, shownAnswer) {
	return http.StatusGone, shownAnswer{Title: "Nothing to do", Lines: []string{why}}
}

// warned returns the text of the warning that a answers.
func (s *Server) warned(ctx context.Context, w *worker.Worker, a warning.Answer) string {
	who, zone := w.Name+" ("+w.AWSRegion+")", s.fleet.Settings().Zone()
	x, err := s.fleet.WarningOf(ctx, a)
	if err != nil || x == nil {
		return who + " will be paused at " + a.PauseAt.In(zone).Format("15:04 MST")
	}
	return x.Sentence(who, zone)
}

// answer returns the page for a link. If act is set, it first does what
// the link asks for.
func (s *Server) answer(ctx context.Context, token string, act bool) (int, shownAnswer) {
	a, err := s.fleet.ReadAnswer(time.Now(), token)
	if err != nil {
		return http.StatusNotFound, shownAnswer{Title: "This link is not valid", Lines: []string{"It has expired, or was copied incompletely. Nothing was done."}}
	}
	w, err := s.fleet.Worker(ctx, a.WorkerID)
	if _, gone := errors.AsType[*failure.NotFound](err); gone {
		return over("The worker is no longer here.")
	}
	zone, q, life := s.fleet.Settings().Zone(), question[a.Verb], w.WarningFor == power.ReasonTTL
	switch {
	case err != nil:
	case !w.Awaits(a):
		return over("The warning about " + w.Name + " has ended: it was answered, or the worker was used or stopped. It is " + strings.ToLower(string(w.Status)) + " now.")
	case !act:
		if life && a.Verb == warning.Extend {
			q.ask = "Move its ttl_deadline by an hour?"
		}
		says := s.warned(ctx, &w, a) + "."
		if h := s.fleet.Halted(); h.On {
			says = "Its users were warned, but " + w.Name + " is not stopped for that now: " + h.Sentence()
		}
		return http.StatusOK, shownAnswer{Title: w.Name, Button: q.button, Lines: []string{says, q.ask}}
	default:
		w, err = s.fleet.AnswerWarning(ctx, a)
	}
	if _, refused := errors.AsType[*failure.Refused](err); refused {
		return over("The warning has already been answered. This link changed nothing.")
	}
	if err != nil {
		return http.StatusServiceUnavailable, shownAnswer{Title: "Not done", Lines: []string{"The server cannot do that at the moment. Try again."}, Button: q.button}
	}
	line, until := q.done, w.SnoozedUntil
	if life && a.Verb == warning.Extend {
		line, until = "Its ttl_deadline is now", w.TTLDeadline
	}
	if until != nil && a.Verb != warning.Stop {
		line += " " + until.In(zone).Format("15:04 MST on Monday, 2 January") + "."
	}
	return http.StatusOK, shownAnswer{Title: w.Name, Lines: []string{line}}
}
