// Package failure defines the errors of commands and queries that callers
// distinguish: a missing object, invalid input, a refusal and a conflict.
package failure

import (
	"fmt"
	"strings"

	"lull/internal/core/idle"
)

// NotFound means that an object does not exist. Find it with errors.AsType.
type NotFound struct {
	Kind string `json:"kind"` // "worker", "template", "setting", "request"
	Name string `json:"name"`
}

func (e *NotFound) Error() string { return fmt.Sprintf("cannot find %s %q", e.Kind, e.Name) }

// Refused means that a command cannot be carried out in the present state, and
// why. Blocks are the idle engine's reasons, if it decided.
type Refused struct {
	Command string       `json:"command"`
	Name    string       `json:"name"`
	Reason  string       `json:"reason"` // a code
	Detail  string       `json:"detail"` // a sentence for users
	Blocks  []idle.Block `json:"blocks,omitempty"`
}

func (e *Refused) Error() string {
	return fmt.Sprintf("cannot %s %q: %s", e.Command, e.Name, e.Detail)
}

// Invalid is an error in one field of an input.
type Invalid struct {
	Field  string `json:"field"`
	Detail string `json:"detail"`
}

func (e *Invalid) Error() string { return fmt.Sprintf("cannot use %s: %s", e.Field, e.Detail) }

// Conflict means that an object is not in the state that the caller expected:
// it already exists, was changed concurrently, or is pinned.
type Conflict struct {
	Kind   string `json:"kind"`
	Name   string `json:"name"`
	Detail string `json:"detail"`
}

func (e *Conflict) Error() string {
	return fmt.Sprintf("cannot change %s %q: %s", e.Kind, e.Name, e.Detail)
}

// Invalidf returns an Invalid for a field.
func Invalidf(field, format string, args ...any) *Invalid {
	return &Invalid{Field: field, Detail: fmt.Sprintf(format, args...)}
}

// CheckName checks that an object's name is safe in a key, a path and a header:
// 1 to 128 bytes of letters, digits, '.', '_' and '-'.
func CheckName(field, s string) error {
	switch {
	case s == "":
		return Invalidf(field, "it is empty")
	case len(s) > 128:
		return Invalidf(field, "it has %d bytes, the limit is 128", len(s))
	case s == "." || s == "..":
		return Invalidf(field, "%q is not a name", s)
	}
	bad := strings.IndexFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-')
	})
	if bad >= 0 {
		return Invalidf(field, "%q may hold only letters, digits, '.', '_' and '-'", s)
	}
	return nil
}
