package spell

import "testing"

func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "abc", 3}, {"cml-1", "cml-1", 0}, {"cml1", "cml-1", 1}, {"kitten", "sitting", 3}, {"idle-timeot", "idle-timeout", 1}} {
		if got, back := Distance(c.a, c.b), Distance(c.b, c.a); got != c.want || back != c.want {
			t.Errorf("%q to %q is %d, and back %d, want %d", c.a, c.b, got, back, c.want)
		}
	}
}
