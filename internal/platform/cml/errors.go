package cml

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// The kinds of an Error, for errors.Is.
var (
	// ErrUnreachable means that there was no complete answer.
	ErrUnreachable = errors.New("the host cannot be reached")
	// ErrUnauthorized means that CML rejected our credentials or their
	// permissions.
	ErrUnauthorized = errors.New("the credentials were refused")
	// ErrNotFound means that CML does not know the object.
	ErrNotFound = errors.New("the object does not exist")
	// ErrConflict means that CML cannot do it in its present state.
	ErrConflict = errors.New("the host's state does not allow it")
	// ErrBadRequest means that CML considers our request invalid.
	ErrBadRequest = errors.New("the request was refused as invalid")
	// ErrUnavailable means that CML failed internally or is not ready.
	ErrUnavailable = errors.New("the host is not able to answer")
	// ErrBadAnswer means that the answer is too large or does not match the API
	// description.
	ErrBadAnswer = errors.New("the answer cannot be understood")
)

// Error is a failed call of CML's API.
type Error struct {
	Op   string // the operation, such as "read licensing"
	Host string
	// Status is the HTTP status, 0 if there was no answer.
	Status int
	// Code and Description are from CML's error body, empty if the answer had
	// none.
	Code        string
	Description string
	// Kind is one of the Err values of this package.
	Kind error
	// Err is the cause, if any.
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

// Unwrap returns the kind and the cause.
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

// fault parses an error body {code, description} and ignores anything else.
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
