package cml

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// What kind of failure an Error is; match with errors.Is.
var (
	// ErrUnreachable: no answer, or one that broke off.
	ErrUnreachable = errors.New("the host cannot be reached")
	// ErrUnauthorized: CML refused our credentials or what they may do.
	ErrUnauthorized = errors.New("the credentials were refused")
	// ErrNotFound: CML does not know the object.
	ErrNotFound = errors.New("the object does not exist")
	// ErrConflict: CML cannot do it in its present state.
	ErrConflict = errors.New("the host's state does not allow it")
	// ErrBadRequest: CML found our request invalid.
	ErrBadRequest = errors.New("the request was refused as invalid")
	// ErrUnavailable: CML failed or is not ready to answer.
	ErrUnavailable = errors.New("the host is not able to answer")
	// ErrBadAnswer: the answer is too large or not what the API describes.
	ErrBadAnswer = errors.New("the answer cannot be understood")
)

// An Error is a failed call of CML's API.
type Error struct {
	Op   string // what was tried, such as "read licensing"
	Host string
	// Status is the HTTP status, 0 without an answer.
	Status int
	// Code and Description are those of CML's error body, empty without one.
	Code        string
	Description string
	// Kind is one of the Err values of this package.
	Kind error
	// Err is the cause below, if any.
	Err error
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "cannot %s of CML at %s: %v", e.Op, e.Host, e.Kind)
	if e.Status != 0 {
		fmt.Fprintf(&b, " (status %d", e.Status)
		if e.Description != "" {
			fmt.Fprintf(&b, ": %s", e.Description)
		}
		b.WriteByte(')')
	}
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	return b.String()
}

// Unwrap gives the kind and the cause.
func (e *Error) Unwrap() []error { return []error{e.Kind, e.Err} }

func kindOf(status int) error {
	switch {
	case status == 401, status == 403:
		return ErrUnauthorized
	case status == 404:
		return ErrNotFound
	case status == 409:
		return ErrConflict
	case status == 429, status >= 500:
		return ErrUnavailable
	case status >= 400:
		return ErrBadRequest
	}
	return ErrBadAnswer
}

// fault reads an error body {code, description}; anything else is left out.
func fault(body []byte) (code, description string) {
	var f struct {
		Code        json.RawMessage `json:"code"`
		Description any             `json:"description"`
	}
	if json.Unmarshal(body, &f) != nil {
		return "", ""
	}
	code = strings.Trim(string(f.Code), `"`)
	switch d := f.Description.(type) {
	case nil:
	case string:
		description = d
	default:
		b, _ := json.Marshal(d)
		description = string(b)
	}
	return sample([]byte(code)), sample([]byte(description))
}
