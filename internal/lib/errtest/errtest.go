// Package errtest ends a test when an unexpected error occurs.
package errtest

// fataler is a test, benchmark or fuzz target, or a type that acts as one. If it
// has a method Helper, the test's output names the caller's line.
type fataler interface{ Fatal(args ...any) }

// None ends the test if err is not nil.
func None(t fataler, err error) {
	if err == nil {
		return
	}
	if h, ok := t.(interface{ Helper() }); ok {
		h.Helper()
	}
	t.Fatal(err)
}

// Get returns a function that returns v or, if err is not nil, ends the test it
// is given. It wraps a call with two results: errtest.Get(os.Open(name))(t).
func Get[T any](v T, err error) func(t fataler) T {
	return func(t fataler) T {
		if h, ok := t.(interface{ Helper() }); ok {
			h.Helper()
		}
		None(t, err)
		return v
	}
}
