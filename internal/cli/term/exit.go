package term

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"lull/internal/lib/httpx"
	"lull/internal/protocol/guest"
)

// Exit codes of every verb.
const (
	ExitDone     = 0
	ExitFailed   = 1
	ExitUsage    = 2
	ExitNotFound = 3
	ExitRefused  = 4
)

// usageError is a mistake on the command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }

func (e *usageError) Unwrap() error { return e.err }

// ExitError ends the process with the given code and prints nothing.
type ExitError struct{ Code int }

func (e *ExitError) Error() string { return fmt.Sprintf("exit code %d", e.Code) }

// ExitCode returns the exit code for err, which must not be nil.
func ExitCode(err error) int {
	if _, ok := errors.AsType[*usageError](err); ok || strings.HasPrefix(err.Error(), "unknown command") {
		return ExitUsage
	}
	if p, ok := errors.AsType[*guest.Error](err); ok {
		switch p.Code {
		case guest.InvalidParams:
			return ExitUsage
		case guest.Refused:
			return ExitRefused
		}
	}
	if p, ok := errors.AsType[*httpx.Problem](err); ok {
		switch p.Status {
		case http.StatusNotFound:
			return ExitNotFound
		case http.StatusConflict, http.StatusForbidden, http.StatusPreconditionFailed:
			return ExitRefused
		case http.StatusUnprocessableEntity, http.StatusBadRequest, http.StatusRequestEntityTooLarge:
			return ExitUsage
		}
	}
	return ExitFailed
}

// Usage returns err as a mistake on the command line.
func Usage(err error) error { return &usageError{err} }

// Exit returns the error that ends the process with code and prints nothing.
func Exit(code int) error { return &ExitError{code} }
