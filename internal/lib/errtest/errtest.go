// Package errtest ends a test at an error that it does not expect.
package errtest

// fataler is a test, benchmark or fuzz target, or what acts as one. If it has a
// method Helper, the test's output names the line of the caller.
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

// Get returns a function that returns v or, if err is not nil, ends its test. It
// takes the results of a call: errtest.Get(os.Open(name))(t).
func Get[T any](v T, err error) func(t fataler) T {
	return func(t fataler) T {
		if h, ok := t.(interface{ Helper() }); ok {
			h.Helper()
		}
		None(t, err)
		return v
	}
}
