// Package cmlsim speaks CML's REST API for the hosts of a simulated world.
//
// Which host a request is for follows from the address or name in the Host
// header, or else from the address that was dialled; ServeHost names it
// outright. A host whose machine is down, or whose CML does not listen yet,
// drops the connection. TLSConfig gives every host a self-signed certificate of
// its own, whose key is the same after every restart.
//
// Everything that carries a time (the Date header, telemetry) is in the host's
// own clock, which may be wrong. Telemetry is written as it is computed: an
// answer of a million events costs one buffer. Faults are those of the service
// "cml", whose actions are a method and a path behind /api/v0/, such as
// "GET telemetry/events" or "GET labs/{lab}".
//
// It leaves out the user interface, the WebSocket, and editing of labs.
package cmlsim

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

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

// ServeHost answers a request for the host with an address, name or instance id.
func (h *CML) ServeHost(ref string, w http.ResponseWriter, r *http.Request) {
	h.mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), refKey{}, ref)))
}

func hostname(hostport string) string {
	if host, _, err := net.SplitHostPort(hostport); err == nil {
		return host
	}
	return hostport
}

// request is one call under way.
type request struct {
	h    *CML
	w    http.ResponseWriter
	r    *http.Request
	ref  string
	user string // id of the account; empty where none is asked for
}

// failure is an error answer.
type failure struct {
	status int
	text   string
}

func (f failure) Error() string { return "cannot answer: " + f.text }

// with visits the host; one that nobody can reach drops the connection.
func (q *request) with(visit func(*world.Host, world.Moment) error) error {
	var err error
	reach := q.h.w.HostAt(q.ref, func(host *world.Host, now world.Moment, reach world.Reach) {
		if reach == world.Booting {
			return
		}
		q.w.Header().Set("Date", now.Wire.Add(host.Offset).UTC().Format(http.TimeFormat))
		err = visit(host, now)
	})
	if reach == world.Nobody || reach == world.Booting {
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
		user, ok := check(host, now, strings.TrimPrefix(q.r.Header.Get("Authorization"), "Bearer "))
		if !ok {
			return failure{http.StatusUnauthorized, "No authorization token provided or the token is not valid"}
		}
		q.user = user
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
	_, _ = q.w.Write(b) // the reader may be gone
	return nil
}

func (q *request) ok(v any) error { return q.send(http.StatusOK, v) }

func (q *request) none(status int) error {
	q.w.WriteHeader(status)
	return nil
}

// maxBody bounds what a client may send.
const maxBody = 1 << 20

func (q *request) read(v any) error {
	b, err := io.ReadAll(io.LimitReader(q.r.Body, maxBody+1))
	if err != nil {
		return failure{http.StatusBadRequest, "the body cannot be read: " + err.Error()}
	}
	if len(b) > maxBody {
		return failure{http.StatusRequestEntityTooLarge, "the body is too large"}
	}
	if err := json.Unmarshal(b, v); err != nil {
		return failure{http.StatusBadRequest, "the body is not valid JSON: " + err.Error()}
	}
	return nil
}

// claims are what a token says. It is void after a cold boot of its host.
type claims struct {
	Host    string `json:"iss"`
	User    string `json:"sub"`
	Session int    `json:"sid"`
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

func check(host *world.Host, now world.Moment, token string) (user string, ok bool) {
	part := strings.Split(token, ".")
	if len(part) != 3 || !hmac.Equal([]byte(part[2]), []byte(seal(host, part[0]+"."+part[1]))) {
		return "", false
	}
	b, err := base64.RawURLEncoding.DecodeString(part[1])
	var c claims
	if err != nil || json.Unmarshal(b, &c) != nil {
		return "", false
	}
	return c.User, c.Host == host.Instance().ID && c.Session == host.Session() && now.Wire.UnixMilli() < c.Until
}

// login checks a password and logs the visit, as CML does.
func (q *request) login() (name, id, token string, err error) {
	var in struct{ Username, Password string }
	if err := q.read(&in); err != nil {
		return "", "", "", err
	}
	err = q.with(func(host *world.Host, now world.Moment) error {
		if in.Username == "" || in.Password != host.Password {
			return failure{http.StatusForbidden, "Authentication failed!"}
		}
		id = host.UserID(in.Username)
		host.Touch(now, id)
		token = sign(host, claims{Host: host.Instance().ID, User: id, Session: host.Session(), Until: now.Wire.Add(host.TokenLife).UnixMilli()})
		return nil
	})
	return in.Username, id, token, err
}

func (h *CML) routes() {
	h.handle("POST authenticate", true, func(q *request) error {
		_, _, token, err := q.login()
		if err != nil {
			return err
		}
		return q.ok(token)
	})
	h.handle("POST auth_extended", true, func(q *request) error {
		name, id, token, err := q.login()
		if err != nil {
			return err
		}
		return q.ok(map[string]any{"username": name, "id": id, "token": token, "admin": true, "error": nil})
	})
	h.handle("GET authok", false, func(q *request) error { return q.ok("OK") })
	h.handle("DELETE logout", false, func(q *request) error { return q.ok(true) })
	h.handle("GET telemetry/events", false, (*request).events)
	h.handle("GET telemetry", false, (*request).optIn)
	h.handle("PUT telemetry", false, (*request).setOptIn)
	h.systemRoutes()
	h.labRoutes()
	h.licenceRoutes()
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
		panic(http.ErrAbortHandler) // the reader is gone in the middle of the answer
	}
	_, _ = q.w.Write(append(out, ']'))
	return nil
}

func (h *CML) licenceRoutes() {
	h.handle("GET licensing", false, (*request).licence)
	h.handle("POST licensing/registration", false, func(q *request) error {
		var in struct {
			Token      string `json:"token"`
			Reregister bool   `json:"reregister"`
		}
		if err := q.read(&in); err != nil {
			return err
		}
		if err := q.with(func(host *world.Host, now world.Moment) error {
			return h.w.Register(host, now, in.Token, in.Reregister)
		}); err != nil {
			return err
		}
		return q.none(http.StatusNoContent)
	})
	h.handle("DELETE licensing/deregistration", false, func(q *request) error {
		status := http.StatusNoContent
		if err := q.with(func(host *world.Host, now world.Moment) error {
			told, err := h.w.Deregister(host, now)
			if !told {
				status = http.StatusAccepted
			}
			return err
		}); err != nil {
			return err
		}
		return q.none(status)
	})
	for _, what := range []string{"registration", "authorization"} {
		h.handle("PUT licensing/"+what+"/renew", false, func(q *request) error {
			if err := q.with(func(host *world.Host, now world.Moment) error {
				if h.w.LicenceOf(host, now).Registration != "COMPLETED" {
					return failure{http.StatusBadRequest, "The product is not registered"}
				}
				return nil
			}); err != nil {
				return err
			}
			return q.none(http.StatusNoContent)
		})
	}
}

func (q *request) licence() error {
	var l world.Licence
	var running int
	if err := q.with(func(host *world.Host, now world.Moment) error {
		l, running = q.h.w.LicenceOf(host, now), host.RunningNodes()
		return nil
	}); err != nil {
		return err
	}
	moment := func(t time.Time, status string) map[string]any {
		m := map[string]any{"succeeded": nil, "attempted": nil, "scheduled": nil, "status": status, "failure": l.Failure, "success": status == "SUCCEEDED"}
		if !t.IsZero() {
			m["succeeded"], m["attempted"] = t.UTC().Format(time.RFC3339), l.Attempted.UTC().Format(time.RFC3339)
		}
		return m
	}
	done := slices.Contains([]string{"COMPLETED"}, l.Registration)
	status := map[bool]string{true: "SUCCEEDED", false: "NOT STARTED"}[done]
	account := func(s string) any {
		if !done {
			return nil
		}
		return s
	}
	return q.ok(map[string]any{
		"udi":           map[string]any{"hostname": q.ref, "product_uuid": l.Product},
		"registration":  map[string]any{"status": l.Registration, "smart_account": account("Simulated Networks"), "virtual_account": account("Default"), "register_time": moment(l.Succeeded, status), "renew_time": moment(time.Time{}, "NOT STARTED"), "expires": nil},
		"authorization": map[string]any{"status": l.Authorization, "renew_time": moment(l.Succeeded, status), "expires": nil},
		"features": []any{map[string]any{
			"id": "regid.cml_enterprise", "name": "CML_ENTERPRISE", "description": "Cisco Modeling Labs", "version": "1.0",
			"in_use": running, "status": l.Authorization, "min": 0, "max": 20000, "minEndDate": nil, "maxEndDate": nil,
		}},
		"reservation_mode": false,
		"product_license":  map[string]any{"active": "CML_Enterprise", "is_enterprise": true},
		"transport":        map[string]any{"proxy": map[string]any{"server": nil, "port": nil}, "ssms": "https://smart.example.net/its", "default_ssms": "https://smart.example.net/its"},
	})
}
