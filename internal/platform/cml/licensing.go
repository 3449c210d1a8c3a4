package cml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"time"

	"lull/internal/fleet/sealed"
)

// Statuses of CML's smart licensing agent that mean success.
const (
	registrationCompleted    = "COMPLETED"
	authorizationInCompliant = "IN_COMPLIANCE"
)

// defaultPoll is the default poll interval of a registration.
const defaultPoll = 1500 * time.Millisecond

var licenseToken = regexp.MustCompile(`^[a-zA-Z0-9+/%=-]{1,256}$`)

// Licensing is the state of a host's license.
type Licensing struct {
	Registration  LicenseState `json:"registration"`
	Authorization LicenseState `json:"authorization"`
	Product       struct {
		IsEnterprise bool `json:"is_enterprise"`
	} `json:"product_license"`
}

// LicenseState is the state of one half of a license: the registration (identity)
// or the authorization (permitted use).
type LicenseState struct {
	Status         string      `json:"status"`
	SmartAccount   string      `json:"smart_account"`
	VirtualAccount string      `json:"virtual_account"`
	RegisterTime   LicenseTime `json:"register_time"`
	RenewTime      LicenseTime `json:"renew_time"`
	Expires        string      `json:"expires"`
}

// LicenseTime describes the last attempt to register or renew.
type LicenseTime struct {
	Attempted string `json:"attempted"`
	Succeeded string `json:"succeeded"`
	Status    string `json:"status"`
	Failure   string `json:"failure"`
}

// Outcome is the state of a registration.
type Outcome string

// The outcomes of a registration.
const (
	OutcomePending Outcome = "pending"
	OutcomeDone    Outcome = "done"
	OutcomeFailed  Outcome = "failed"
)

// Outcome returns whether the host is registered and in compliance, has failed,
// or is still in progress, and the reason. A pending outcome carries the last
// failure as its reason, because nothing else may be known.
func (l Licensing) Outcome() (Outcome, string) {
	reason := cmp.Or(l.Registration.RegisterTime.Failure, l.Registration.RenewTime.Failure)
	switch l.Registration.Status {
	case "FAILED", "NOT_SUPPORTED", "EXPIRED":
		return OutcomeFailed, "registration " + l.Registration.Status + suffix(reason)
	case registrationCompleted:
	default:
		return OutcomePending, "registration " + cmp.Or(l.Registration.Status, "unknown") + suffix(reason)
	}
	reason = l.Authorization.RenewTime.Failure
	switch l.Authorization.Status {
	case authorizationInCompliant:
		return OutcomeDone, ""
	case "OUT_OF_COMPLIANCE", "AUTHORIZATION_EXPIRED", "NOT_AUTHORIZED":
		return OutcomeFailed, "authorization " + l.Authorization.Status + suffix(reason)
	}
	return OutcomePending, "authorization " + cmp.Or(l.Authorization.Status, "unknown") + suffix(reason)
}

// None reports whether no registration is in progress or completed.
func (l Licensing) None() bool { return l.Registration.Status == "NOT_REGISTERED" }

// Seat reports whether the host has, or is about to have, a registration that a
// deregistration can release. It need not be in compliance. A reservation that is
// only requested does not count.
func (l Licensing) Seat() bool {
	switch l.Registration.Status {
	case "", "NOT_REGISTERED", "FAILED", "NOT_SUPPORTED", "EXPIRED", "RESERVATION_IN_PROGRESS":
		return false
	}
	return true
}

// quotedToken matches what may be a registration token in CML's messages: CML
// quotes an invalid token back.
var quotedToken = regexp.MustCompile(`(['"])[a-zA-Z0-9+/%=_-]{8,}['"]`)

func suffix(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + sample([]byte(quotedToken.ReplaceAllString(reason, "${1}[token]${1}")))
}

// Licensing reads the state of the license.
func (c *Client) Licensing(ctx context.Context) (Licensing, error) {
	var v Licensing
	_, _, err := c.fetch(ctx, call{op: "read licensing", method: http.MethodGet, path: "/licensing"}, &v)
	return v, err
}

// Register asks CML to register with a token. Success means that CML accepted
// the request, not that it is registered: see AwaitRegistration.
func (c *Client) Register(ctx context.Context, token sealed.Plain, reregister bool) error {
	if !licenseToken.MatchString(string(token)) {
		return &Error{Op: "register license", Host: c.host, Kind: ErrBadRequest, Err: errors.New("the token is not 1 to 256 letters, digits or +/%=-")}
	}
	body := struct {
		Token      string `json:"token"`
		Reregister bool   `json:"reregister"`
	}{string(token), reregister}
	_, _, err := c.fetch(ctx, call{op: "register license", method: http.MethodPost, path: "/licensing/registration", body: body}, nil)
	return err
}

// RegistrationError means that CML accepted a request to register but the
// registration did not succeed.
type RegistrationError struct {
	Host string
	// Outcome is failed, or pending if the time ran out first.
	Outcome Outcome
	Reason  string
	Err     error
}

func (e *RegistrationError) Error() string {
	text := fmt.Sprintf("cannot register license of CML at %s: %s", e.Host, e.Reason)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns the error that ended the wait, nil if the registration itself
// failed.
func (e *RegistrationError) Unwrap() error { return e.Err }

// AwaitRegistration polls at an interval (0 means 1.5 s) until the registration
// is completed and in compliance, has failed, or ctx ends. A failure is a
// *RegistrationError. A failed poll is retried, because the host may be busy.
func (c *Client) AwaitRegistration(ctx context.Context, every time.Duration) error {
	tick := time.NewTicker(cmp.Or(every, defaultPoll))
	defer tick.Stop()
	reason := "its state was never read"
	var last error
	for {
		l, err := c.Licensing(ctx)
		switch {
		case errors.Is(err, ErrUnauthorized):
			return &RegistrationError{Host: c.host, Outcome: OutcomePending, Reason: reason, Err: err}
		case err != nil:
			last = err
		default:
			var outcome Outcome
			outcome, reason = l.Outcome()
			last = nil
			if outcome == OutcomeDone {
				return nil
			}
			if outcome == OutcomeFailed {
				return &RegistrationError{Host: c.host, Outcome: outcome, Reason: reason}
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return &RegistrationError{Host: c.host, Outcome: OutcomePending, Reason: reason, Err: errors.Join(ctx.Err(), last)}
		}
	}
}

// Deregistration is the result of a request to deregister.
type Deregistration string

// The results of a deregistration.
const (
	// Deregistered means that the license was released on the host and at Smart
	// Licensing.
	Deregistered Deregistration = "deregistered"
	// DeregisteredLocally means that Smart Licensing could not be reached; the
	// seat there may still be taken.
	DeregisteredLocally Deregistration = "deregistered_locally"
	// NotRegistered means that there was no registration to release.
	NotRegistered Deregistration = "not_registered"
)

// Deregister releases the license.
func (c *Client) Deregister(ctx context.Context) (Deregistration, error) {
	k := call{op: "deregister license", method: http.MethodDelete, path: "/licensing/deregistration"}
	status, _, err := c.fetch(ctx, k, nil)
	var refused *Error
	switch {
	case errors.As(err, &refused) && refused.Status == http.StatusBadRequest:
		return NotRegistered, nil
	case err != nil:
		return "", err
	case status == http.StatusNoContent:
		return Deregistered, nil
	case status == http.StatusAccepted:
		return DeregisteredLocally, nil
	}
	return "", &Error{Op: k.op, Host: c.host, Status: status, Kind: ErrBadAnswer, Err: errors.New("neither 204 nor 202")}
}
