// Package cmlsim implements CML's REST API for the hosts of a simulated world.
//
// A request is for the host that its Host header names by address or name, otherwise
// for the one whose address was dialed; ServeHost names the host explicitly. A host
// whose machine is down, or whose CML does not listen yet, drops the connection.
// TLSConfig gives every host its own self-signed certificate; its key stays the same
// after restarts.
//
// All times (the Date header, telemetry) are in the host's own clock, which may be
// wrong. Telemetry is written as it is computed: an answer of a million events costs
// one buffer. Faults are those of the service "cml", whose actions are a method and a
// path below /api/v0/, such as "GET telemetry/events" or "GET labs/{lab}".
//
// Clients may do what Cisco's own client library does: create, import, edit, run and
// remove labs, and manage users, groups, definitions, compute hosts and the license.
// What a user does is a telemetry event if CML reports it as one, and counts as an
// action of that user (world.Host.LastActivity). A name that logs in with the host's
// password and was not created is an administrator.
//
// It has no user interface, WebSocket, consoles, packet captures, annotations, lab
// repositories or LDAP.
package cmlsim

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"

	"lull/internal/sim/fault"
	"lull/internal/sim/world"
)

// CML serves all CML hosts of a world.
type CML struct {
	w     *world.World
	mux   *http.ServeMux
	certs certs
}

// New returns a handler for the CML hosts of a world.
func New(w *world.World) *CML {
	h := &CML{w: w, mux: http.NewServeMux()}
	h.routes()
	return h
}

const base = "/api/v0/"

type refKey struct{}

// ServeHTTP answers a request for the host that it was sent to.
func (h *CML) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ref := hostname(r.Host)
	known := h.w.Locate(ref, func(*world.Instance, world.Moment) {})
	if a, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok && !known {
		ref = a.IP.String()
	}
	h.ServeHost(ref, w, r)
}

// ServeHost answers a request for the host with the address, name or instance ID ref.
func (h *CML) ServeHost(ref string, w http.ResponseWriter, r *http.Request) {
	h.mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), refKey{}, ref)))
}

func hostname(hostport string) string {
	if host, _, err := net.SplitHostPort(hostport); err == nil {
		return host
	}
	return hostport
}

// request is one call in progress.
type request struct {
	h    *CML
	w    http.ResponseWriter
	r    *http.Request
	ref  string
	user string // ID of the account; empty if the route needs none
	// admin reports whether the account may administer the host.
	admin bool
	token string
}

// failure is an error response.
type failure struct {
	status int
	text   string
}

func (f failure) Error() string { return "cannot answer: " + f.text }

// with calls visit with the host of the request. If the host is unreachable, it drops
// the connection.
func (q *request) with(visit func(*world.Host, world.Moment) error) error {
	var err error
	reach := q.h.w.HostAt(q.ref, func(host *world.Host, now world.Moment, reach world.Reach) {
		if reach == world.Booting {
			return
		}
		q.w.Header().Set("Date", now.Wire.Add(host.Offset).UTC().Format(http.TimeFormat))
		err = visit(host, now)
	})
	if reach == world.Unreachable || reach == world.Booting {
		panic(http.ErrAbortHandler)
	}
	return err
}

// handle adds a route. open routes need no token.
func (h *CML) handle(pattern string, open bool, serve func(*request) error) {
	method, path, _ := strings.Cut(pattern, " ")
	h.mux.HandleFunc(method+" "+base+path, func(w http.ResponseWriter, r *http.Request) {
		q := &request{h: h, w: w, r: r}
		q.ref, _ = r.Context().Value(refKey{}).(string)
		h.w.Calls.Count("cml", pattern)
		call := fault.Call{Service: "cml", Action: pattern, Targets: []string{q.ref}}
		h.w.Locate(q.ref, func(i *world.Instance, _ world.Moment) {
			call.Region, call.Targets = i.Region, []string{q.ref, i.ID, i.Name}
		})
		e := h.w.Faults.Pick(h.w.Clock.Now().Wire, call)
		e.Serve(w, r, func(w http.ResponseWriter, rule fault.Rule) {
			q.w = w
			status := rule.Status
			if status == 0 {
				status = http.StatusInternalServerError
			}
			q.fail(failure{status, rule.Message})
		}, func(w http.ResponseWriter) {
			q.w = w
			if err := q.run(open, serve); err != nil {
				q.fail(err)
			}
		})
	})
}

func (q *request) run(open bool, serve func(*request) error) error {
	if err := q.with(func(host *world.Host, now world.Moment) error {
		if open {
			return nil
		}
		token := strings.TrimPrefix(q.r.Header.Get("Authorization"), "Bearer ")
		user, ok := check(host, now, token)
		if !ok {
			return failure{http.StatusUnauthorized, "No authorization token provided or the token is not valid"}
		}
		q.user, q.admin, q.token = user.ID, user.Admin, token
		return nil
	}); err != nil {
		return err
	}
	return serve(q)
}

func (q *request) fail(err error) {
	f, ok := errors.AsType[failure](err)
	if !ok {
		f = failure{http.StatusBadRequest, err.Error()}
		if e, ok := errors.AsType[*world.Error](err); ok {
			f = failure{e.Status, e.Message}
		}
	}
	q.send(f.status, map[string]any{"code": f.status, "description": f.text})
}

func (q *request) send(status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	q.w.Header().Set("Content-Type", "application/json")
	q.w.WriteHeader(status)
	_, _ = q.w.Write(b) // the client may have disconnected
	return nil
}

func (q *request) ok(v any) error { return q.send(http.StatusOK, v) }

func (q *request) text(kind, s string) error {
	q.w.Header().Set("Content-Type", kind)
	_, _ = io.WriteString(q.w, s) // the client may have disconnected
	return nil
}

func (q *request) none(status int) error {
	q.w.WriteHeader(status)
	return nil
}

// maxBody limits the size of a request.
const maxBody = 1 << 20

// body returns the body of a request.
func (q *request) body() ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(q.r.Body, maxBody+1))
	if err != nil {
		return nil, failure{http.StatusBadRequest, "the body cannot be read: " + err.Error()}
	}
	if len(b) > maxBody {
		return nil, failure{http.StatusRequestEntityTooLarge, "the body is too large"}
	}
	return b, nil
}

func (q *request) read(v any) error {
	b, err := q.body()
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return failure{http.StatusBadRequest, "the body is not valid JSON: " + err.Error()}
	}
	return nil
}

// strict decodes the body into v, and rejects members that v does not have.
func (q *request) strict(v any) error {
	b, err := q.body()
	if err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return failure{http.StatusBadRequest, "the body is not what the API describes: " + err.Error()}
	}
	return nil
}

// claims are the content of a token. A cold boot of the host makes its tokens void.
type claims struct {
	Host    string `json:"iss"`
	User    string `json:"sub"`
	Session int    `json:"sid"`
	Epoch   int    `json:"epoch"` // Epoch of the user when the token was issued
	ID      string `json:"jti"`
	Until   int64  `json:"exp"` // ms
}

func sign(host *world.Host, c claims) string {
	b, err := json.Marshal(c)
	if err != nil {
		return ""
	}
	head := "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9." + base64.RawURLEncoding.EncodeToString(b)
	return head + "." + seal(host, head)
}

func seal(host *world.Host, text string) string {
	m := hmac.New(sha256.New, []byte(host.Instance().ID+host.Licence.Product))
	m.Write([]byte(text))
	return base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

func check(host *world.Host, now world.Moment, token string) (user world.Account, ok bool) {
	part := strings.Split(token, ".")
	if len(part) != 3 || !hmac.Equal([]byte(part[2]), []byte(seal(host, part[0]+"."+part[1]))) || slices.Contains(host.LoggedOut, part[2]) {
		return world.Account{}, false
	}
	b, err := base64.RawURLEncoding.DecodeString(part[1])
	var c claims
	if err != nil || json.Unmarshal(b, &c) != nil {
		return world.Account{}, false
	}
	a := host.Account(c.User)
	if a == nil {
		return world.Account{}, false
	}
	return *a, c.Host == host.Instance().ID && c.Session == host.Session() && c.Epoch == host.Epochs[c.User] && now.Wire.UnixMilli() < c.Until
}

// login checks the password in the request and records the login as CML does.
func (q *request) login() (who world.Account, token string, err error) {
	var in struct{ Username, Password string }
	if err := q.read(&in); err != nil {
		return who, "", err
	}
	err = q.with(func(host *world.Host, now world.Moment) error {
		a := host.Login(now, in.Username, in.Password)
		if a == nil {
			return failure{http.StatusForbidden, "Authentication failed!"}
		}
		who = *a
		host.Touch(now, a.ID)
		token = sign(host, claims{Host: host.Instance().ID, User: a.ID, Session: host.Session(), Epoch: host.Epochs[a.ID], ID: rand.Text(),
			Until: now.Wire.Add(host.TokenLife).UnixMilli()})
		return nil
	})
	return who, token, err
}

// maxLoggedOut is the maximum number of revoked tokens that are remembered.
const maxLoggedOut = 1000

func (q *request) logout() error {
	if err := q.with(func(host *world.Host, _ world.Moment) error {
		if q.r.URL.Query().Get("clear_all_sessions") == "true" {
			host.EndSessions(q.user)
			return nil
		}
		if len(host.LoggedOut) >= maxLoggedOut {
			host.LoggedOut = host.LoggedOut[1:]
		}
		host.LoggedOut = append(host.LoggedOut, q.token[strings.LastIndexByte(q.token, '.')+1:])
		return nil
	}); err != nil {
		return err
	}
	return q.ok(true)
}

func (h *CML) routes() {
	h.handle("POST authenticate", true, func(q *request) error {
		_, token, err := q.login()
		if err != nil {
			return err
		}
		return q.ok(token)
	})
	h.handle("POST auth_extended", true, func(q *request) error {
		who, token, err := q.login()
		if err != nil {
			return err
		}
		return q.ok(map[string]any{"username": who.Name, "id": who.ID, "token": token, "admin": who.Admin, "error": nil})
	})
	h.handle("GET authok", false, func(q *request) error { return q.ok("OK") })
	h.handle("GET authentication", false, func(q *request) error {
		var who world.Account
		if err := q.with(func(host *world.Host, _ world.Moment) error { who = *host.Account(q.user); return nil }); err != nil {
			return err
		}
		return q.ok(map[string]any{"username": who.Name, "id": who.ID, "token": q.token, "admin": who.Admin, "error": nil})
	})
	h.handle("DELETE logout", false, (*request).logout)
	h.handle("GET telemetry/events", false, (*request).events)
	h.handle("GET telemetry", false, (*request).optIn)
	h.handle("PUT telemetry", false, (*request).setOptIn)
	h.systemRoutes()
	h.labRoutes()
	h.licenceRoutes()
	h.elementRoutes()
	h.peopleRoutes()
	h.definitionRoutes()
	h.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		q := &request{h: h, w: w, r: r}
		q.ref, _ = r.Context().Value(refKey{}).(string)
		h.w.Calls.Count("cml", "other")
		q.fail(q.with(func(*world.Host, world.Moment) error { return failure{http.StatusNotFound, "Not Found"} }))
	})
}

func (q *request) optIn() error {
	var in bool
	if err := q.with(func(host *world.Host, _ world.Moment) error {
		if in = host.OptIn; host.OptInFault {
			return failure{http.StatusInternalServerError, "The telemetry setting cannot be read"}
		}
		return nil
	}); err != nil {
		return err
	}
	return q.ok(map[string]any{"opt_in": in, "show_modal": false})
}

func (q *request) setOptIn() error {
	var in struct {
		OptIn *bool `json:"opt_in"`
	}
	if err := q.read(&in); err != nil {
		return err
	}
	if in.OptIn == nil {
		return failure{http.StatusBadRequest, "opt_in is required"}
	}
	if err := q.with(func(host *world.Host, _ world.Moment) error { host.OptIn = *in.OptIn; return nil }); err != nil {
		return err
	}
	return q.none(http.StatusNoContent)
}

// events streams the whole history.
func (q *request) events() error {
	var view *world.Telemetry
	if err := q.with(func(host *world.Host, now world.Moment) error { view = host.Telemetry(now); return nil }); err != nil {
		return err
	}
	q.w.Header().Set("Content-Type", "application/json")
	out := make([]byte, 0, 32<<10)
	out = append(out, '[')
	first := true
	err := view.Each(make([]byte, 0, 512), func(b []byte) error {
		if !first {
			out = append(out, ',')
		}
		first = false
		out = append(out, b...)
		if len(out) < 31<<10 {
			return nil
		}
		_, err := q.w.Write(out)
		out = out[:0]
		return err
	})
	if err != nil {
		panic(http.ErrAbortHandler) // the reader disconnected in the middle of the answer
	}
	_, _ = q.w.Write(append(out, ']'))
	return nil
}
