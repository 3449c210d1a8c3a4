package world

import (
	"cmp"
	"regexp"
	"strings"
	"time"
)

// Licence is CML's smart license. A registration is first accepted and succeeds
// or fails later.
type Licence struct {
	Product       string    `json:"product"`
	Registration  string    `json:"registration"`  // NOT_REGISTERED, IN_PROGRESS, COMPLETED, FAILED, RETRY_IN_PROGRESS, RESERVATION_IN_PROGRESS
	Authorization string    `json:"authorization"` // EVAL, IN_COMPLIANCE, OUT_OF_COMPLIANCE
	Token         string    `json:"token,omitempty"`
	Failure       string    `json:"failure,omitempty"`
	Attempted     time.Time `json:"attempted,omitzero"` // client's time
	Succeeded     time.Time `json:"succeeded,omitzero"` // client's time
	Due           time.Time `json:"due,omitzero"`       // world's time of the next change
	Renewed       time.Time `json:"renewed,omitzero"`   // client's time

	Active      string         `json:"active,omitempty"` // product; empty means CML_Enterprise
	Counts      map[string]int `json:"counts,omitempty"` // number of requested licenses, by feature
	Reservation bool           `json:"reservation,omitempty"`
	SSMS        string         `json:"ssms,omitempty"` // URL of Smart Licensing; empty means the default
	ProxyServer *string        `json:"proxy_server,omitempty"`
	ProxyPort   *int           `json:"proxy_port,omitempty"`
}

// ActiveProduct returns the licensed product.
func (l *Licence) ActiveProduct() string { return cmp.Or(l.Active, "CML_Enterprise") }

// Reserve turns reservation mode on or off, for a product that is not registered.
func (w *World) Reserve(h *Host, now Moment, on bool) error {
	l := &h.Licence
	l.advance(w, now)
	if l.Registration == "IN_PROGRESS" || l.Registration == "COMPLETED" {
		return refuse(400, "400", "The product is registered")
	}
	l.Reservation, l.Registration = on, "NOT_REGISTERED"
	return nil
}

var tokenShape = regexp.MustCompile(`^[a-zA-Z\d+/%=-]{1,256}$`)

func (l *Licence) complete(wire time.Time) {
	l.Registration, l.Authorization, l.Failure = "COMPLETED", "IN_COMPLIANCE", ""
	l.Attempted, l.Succeeded = wire, wire
}

// advance applies what has become due by now.
func (l *Licence) advance(w *World, now Moment) {
	if l.Registration == "" {
		l.Registration, l.Authorization = "NOT_REGISTERED", "EVAL"
	}
	for !l.Due.IsZero() && !l.Due.After(now.World) {
		at := w.Clock.At(l.Due)
		switch {
		case l.Registration != "IN_PROGRESS":
			l.Authorization, l.Due = "IN_COMPLIANCE", time.Time{}
		case strings.HasPrefix(strings.ToLower(l.Token), "bad"):
			l.Registration, l.Due = "FAILED", time.Time{}
			l.Failure = "Agent received a failure status in a response message: The token '" + l.Token + "' is not valid."
		default:
			l.Registration, l.Succeeded, l.Failure = "COMPLETED", at.Wire, ""
			l.Due = l.Due.Add(w.cfg.Timing.Licence.D() / 3)
			if strings.HasPrefix(l.Token, "over") {
				l.Authorization, l.Due = "OUT_OF_COMPLIANCE", time.Time{}
			}
		}
	}
}

// LicenceOf returns the host's license at now.
func (w *World) LicenceOf(h *Host, now Moment) Licence {
	h.Licence.advance(w, now)
	return h.Licence
}

// Register begins a registration. Tokens that begin with "bad", in any case,
// are accepted and fail later; those that begin with "over" register and stay
// out of compliance. The error's Status is CML's response status.
func (w *World) Register(h *Host, now Moment, token string, again bool) error {
	l := &h.Licence
	l.advance(w, now)
	switch {
	case !tokenShape.MatchString(token):
		return refuse(400, "400", "token does not match the pattern")
	case l.Registration == "IN_PROGRESS":
		return refuse(409, "409", "A registration is in progress already")
	case l.Reservation:
		return refuse(400, "400", "The product is in reservation mode")
	case l.Registration == "COMPLETED" && !again:
		return refuse(400, "400", "The product is registered already; use reregister")
	}
	l.Token, l.Registration, l.Failure = token, "IN_PROGRESS", ""
	l.Attempted = now.Wire
	l.Due = now.World.Add(h.dice.around(w.cfg.Timing.Licence.D(), 0.3))
	h.log(now, catLicenseInfo, "", -1)
	return nil
}

// Deregister ends a registration. told is false if Smart Licensing was not reached,
// so that only CML considers the product deregistered.
func (w *World) Deregister(h *Host, now Moment) (told bool, err error) {
	l := &h.Licence
	l.advance(w, now)
	switch l.Registration {
	case "IN_PROGRESS":
		return false, refuse(409, "409", "A registration is in progress")
	case "COMPLETED":
	default:
		return false, refuse(400, "400", "The product is not registered")
	}
	*l = Licence{Product: l.Product, Registration: "NOT_REGISTERED", Authorization: "EVAL", Active: l.Active, SSMS: l.SSMS, ProxyServer: l.ProxyServer, ProxyPort: l.ProxyPort}
	h.log(now, catLicenseInfo, "", -1)
	return !h.DeregSlow, nil
}
