package cmlsim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"time"

	"lull/internal/sim/world"
)

// admin restricts a route to administrators.
func admin(serve func(*request) error) func(*request) error {
	return func(q *request) error {
		if !q.admin {
			return failure{http.StatusForbidden, "The user is not an administrator"}
		}
		return serve(q)
	}
}

// change returns a handler for a call that changes the host and has an empty
// response.
func change(f func(q *request, host *world.Host, now world.Moment) error) func(*request) error {
	return func(q *request) error {
		if err := q.with(func(host *world.Host, now world.Moment) error { return f(q, host, now) }); err != nil {
			return err
		}
		return q.none(http.StatusNoContent)
	}
}

// show returns a handler for a call that responds with what f returns.
func show(f func(q *request, host *world.Host, now world.Moment) (any, error)) func(*request) error {
	return func(q *request) error {
		var v any
		if err := q.with(func(host *world.Host, now world.Moment) (err error) { v, err = f(q, host, now); return err }); err != nil {
			return err
		}
		return q.ok(v)
	}
}

// products maps CML's license products to the number of nodes they allow.
var products = map[string]int{"CML_Enterprise": 20000, "CML_Education": 300, "CML_Personal": 20, "CML_Personal40": 40, "CML_Internal": 300, "CML_NotForResale": 300}

const (
	baseFeature = "regid.2019-10.com.cisco.CML_ENTERPRISE,1.0_00000000-0000-4000-a000-000000000001"
	nodeFeature = "regid.2019-10.com.cisco.CML_NODE_COUNT,1.0_00000000-0000-4000-a000-000000000002"
)

func (h *CML) licenceRoutes() {
	h.handle("GET licensing", false, admin((*request).licence))
	h.handle("GET licensing/features", false, admin(show(func(q *request, host *world.Host, now world.Moment) (any, error) {
		return features(h.w.LicenceOf(host, now)), nil
	})))
	h.handle("PATCH licensing/features", false, admin((*request).setFeatures))
	h.handle("GET licensing/tech_support", false, admin(func(q *request) error { return q.text("text/plain", "Smart Licensing: simulated\n") }))
	h.handle("PUT licensing/transport", false, admin((*request).setTransport))
	h.handle("PUT licensing/product_license", false, admin(func(q *request) error {
		var name string
		if err := q.read(&name); err != nil {
			return err
		}
		return change(func(q *request, host *world.Host, now world.Moment) error {
			if l := h.w.LicenceOf(host, now); products[name] == 0 || name == l.ActiveProduct() {
				return failure{http.StatusBadRequest, "The product license is unknown or the active one"}
			}
			host.Licence.Active, host.Licence.Counts = name, nil
			return nil
		})(q)
	}))
	h.handle("POST licensing/registration", false, admin(func(q *request) error {
		var in struct {
			Token      string `json:"token"`
			Reregister bool   `json:"reregister"`
		}
		if err := q.strict(&in); err != nil {
			return err
		}
		return change(func(_ *request, host *world.Host, now world.Moment) error {
			return h.w.Register(host, now, in.Token, in.Reregister)
		})(q)
	}))
	h.handle("DELETE licensing/deregistration", false, admin(func(q *request) error {
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
	}))
	for _, what := range []string{"registration", "authorization"} {
		h.handle("PUT licensing/"+what+"/renew", false, admin(change(func(q *request, host *world.Host, now world.Moment) error {
			if h.w.LicenceOf(host, now).Registration != "COMPLETED" {
				return failure{http.StatusBadRequest, "The product is not registered"}
			}
			if what == "registration" {
				host.Licence.Succeeded = now.Wire
			}
			host.Licence.Renewed = now.Wire
			return nil
		})))
	}
	h.handle("PUT licensing/reservation/mode", false, admin(func(q *request) error {
		var on bool
		if err := q.read(&on); err != nil {
			return err
		}
		return change(func(_ *request, host *world.Host, now world.Moment) error { return h.w.Reserve(host, now, on) })(q)
	}))
	h.handle("POST licensing/reservation/request", false, admin(show(func(_ *request, host *world.Host, now world.Moment) (any, error) {
		if l := h.w.LicenceOf(host, now); !l.Reservation {
			return nil, failure{http.StatusBadRequest, "The product is not in reservation mode"}
		}
		host.Licence.Registration = "RESERVATION_IN_PROGRESS"
		return "CB-" + host.Licence.Product, nil
	})))
	h.handle("DELETE licensing/reservation/cancel", false, admin(change(func(_ *request, host *world.Host, now world.Moment) error {
		if l := h.w.LicenceOf(host, now); !l.Reservation {
			return failure{http.StatusBadRequest, "The product is not in reservation mode"}
		}
		host.Licence.Registration = "NOT_REGISTERED"
		return nil
	})))
}

// feature is a licensable feature, in CML's form.
type feature struct {
	ID          string  `json:"id"`
	Name        string  `json:"name"`
	Description string  `json:"description"`
	Version     string  `json:"version"`
	InUse       int     `json:"in_use"`
	Status      string  `json:"status"`
	Min         int     `json:"min"`
	Max         int     `json:"max"`
	MinEndDate  *string `json:"minEndDate"`
	MaxEndDate  *string `json:"maxEndDate"`
}

func features(l world.Licence) []feature {
	list := []feature{
		{ID: baseFeature, Name: "CML - Enterprise License", Description: "Cisco Modeling Labs - Enterprise", InUse: 1, Min: 1, Max: 1},
		{ID: nodeFeature, Name: "CML - Expansion Nodes", Description: "Cisco Modeling Labs - Expansion Nodes", Max: products[l.ActiveProduct()]},
	}
	for k := range list {
		list[k].Version, list[k].Status = "1.0", l.Authorization
		if n, ok := l.Counts[list[k].ID]; ok {
			list[k].InUse = n
		}
	}
	return list
}

// setFeatures accepts a map of counts by id, or a list of {id, count}.
func (q *request) setFeatures() error {
	b, err := q.body()
	if err != nil {
		return err
	}
	counts := map[string]int{}
	var list []struct {
		ID    string `json:"id"`
		Count *int   `json:"count"`
	}
	if json.Unmarshal(b, &list) == nil {
		for _, f := range list {
			if f.Count == nil {
				return failure{http.StatusBadRequest, "count is required"}
			}
			counts[f.ID] = *f.Count
		}
	} else if err := json.Unmarshal(b, &counts); err != nil {
		return failure{http.StatusBadRequest, "the body is neither a map of counts nor a list of features"}
	}
	return change(func(q *request, host *world.Host, now world.Moment) error {
		changed, known := false, features(q.h.w.LicenceOf(host, now))
		for id, n := range counts {
			k := slices.IndexFunc(known, func(f feature) bool { return f.ID == id })
			if k < 0 || n < known[k].Min || n > known[k].Max {
				return failure{http.StatusBadRequest, fmt.Sprintf("feature %q is unknown or its count %d is out of range", id, n)}
			}
			changed = changed || n != known[k].InUse
		}
		if !changed {
			return failure{http.StatusBadRequest, "no feature count changes"}
		}
		if host.Licence.Counts == nil {
			host.Licence.Counts = map[string]int{}
		}
		for id, n := range counts {
			host.Licence.Counts[id] = n
		}
		return nil
	})(q)
}

const defaultSSMS = "https://smart.example.net/its"

var ssmsShape = regexp.MustCompile(`^[\x21-\x7e]{1,256}$`)

func (q *request) setTransport() error {
	var in struct {
		SSMS  *string `json:"ssms"`
		Proxy struct {
			Server *string `json:"server"`
			Port   *int    `json:"port"`
		} `json:"proxy"`
	}
	if err := q.strict(&in); err != nil {
		return err
	}
	for _, s := range []*string{in.SSMS, in.Proxy.Server} {
		if s != nil && !ssmsShape.MatchString(*s) {
			return failure{http.StatusBadRequest, "ssms or proxy.server is not an address"}
		}
	}
	if p := in.Proxy.Port; p != nil && (*p < 0 || *p > 65535) {
		return failure{http.StatusBadRequest, "proxy.port is out of range"}
	}
	return change(func(_ *request, host *world.Host, _ world.Moment) error {
		host.Licence.SSMS, host.Licence.ProxyServer, host.Licence.ProxyPort = "", in.Proxy.Server, in.Proxy.Port
		if in.SSMS != nil {
			host.Licence.SSMS = *in.SSMS
		}
		return nil
	})(q)
}

func (q *request) licence() error {
	var l world.Licence
	if err := q.with(func(host *world.Host, now world.Moment) error {
		l = q.h.w.LicenceOf(host, now)
		return nil
	}); err != nil {
		return err
	}
	moment := func(t time.Time, status string) map[string]any {
		m := map[string]any{"succeeded": nil, "attempted": nil, "scheduled": nil, "status": status, "failure": l.Failure, "success": status}
		if !t.IsZero() {
			m["succeeded"], m["attempted"] = t.UTC().Format(time.RFC3339), t.UTC().Format(time.RFC3339)
		} else if !l.Attempted.IsZero() {
			m["attempted"] = l.Attempted.UTC().Format(time.RFC3339)
		}
		return m
	}
	done := l.Registration == "COMPLETED"
	status := "NOT STARTED"
	var expires, authorized any
	account := func(s string) any { return nil }
	switch {
	case done:
		status = "SUCCEEDED"
		account = func(s string) any { return s }
		expires = l.Succeeded.AddDate(1, 0, 0).UTC().Format(time.RFC3339)
		authorized = latest(l.Succeeded, l.Renewed).AddDate(0, 0, 90).UTC().Format(time.RFC3339)
	case l.Failure != "":
		status = "FAILED"
	}
	ssms := l.SSMS
	if ssms == "" {
		ssms = defaultSSMS
	}
	return q.ok(map[string]any{
		"udi":              map[string]any{"hostname": q.ref, "product_uuid": l.Product},
		"registration":     map[string]any{"status": l.Registration, "smart_account": account("Simulated Networks"), "virtual_account": account("Default"), "register_time": moment(l.Succeeded, status), "renew_time": moment(l.Renewed, "NOT STARTED"), "expires": expires},
		"authorization":    map[string]any{"status": l.Authorization, "renew_time": moment(l.Succeeded, status), "expires": authorized},
		"features":         features(l),
		"reservation_mode": l.Reservation,
		"product_license":  map[string]any{"active": l.ActiveProduct(), "is_enterprise": l.ActiveProduct() == "CML_Enterprise"},
		"transport":        map[string]any{"proxy": map[string]any{"server": l.ProxyServer, "port": l.ProxyPort}, "ssms": ssms, "default_ssms": defaultSSMS},
	})
}

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
