package policy

import (
	"errors"
	"strings"

	"lull/internal/core/failure"
)

// faults collects the faults of one object, each a *failure.Invalid.
type faults []error

func (f *faults) add(field, format string, args ...any) {
	*f = append(*f, failure.Invalidf(field, format, args...))
}

func (f faults) err() error { return errors.Join(f...) }

// name checks that s is safe as part of a store key and a URL path.
func (f *faults) name(field, s string) {
	switch {
	case s == "" || len(s) > 64:
		f.add(field, "it has %d bytes, want 1 to 64", len(s))
	case s == "." || s == ".." || strings.IndexFunc(s, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-')
	}) >= 0:
		f.add(field, "%.64q may hold only letters, digits, '.', '_' and '-'", s)
	}
}

func (f *faults) text(field, s string, most int) {
	if len(s) > most {
		f.add(field, "it has %d bytes, the limit is %d", len(s), most)
	}
}

func (f *faults) between(field string, v *int, least, most int) {
	if v != nil && (*v < least || *v > most) {
		f.add(field, "%d is not between %d and %d", *v, least, most)
	}
}

func (f *faults) oneOf(field string, v *string, allowed ...string) {
	if v == nil {
		return
	}
	for _, a := range allowed {
		if *v == a {
			return
		}
	}
	f.add(field, "%.40q is not one of %s", *v, strings.Join(allowed, ", "))
}
