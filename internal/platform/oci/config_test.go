package oci

import (
	"slices"
	"testing"
)

// TestPersonBeforeImage checks that a user's setting overrides the image's,
// even if it equals the default without an image.
func TestPersonBeforeImage(t *testing.T) {
	c := Config{WorkingDir: "/srv", Env: []string{"A=1", "NOEQ", "=x", "HOME=/of/image"}}
	for asked, want := range map[string]string{"": "/srv", "/": "/", "/tmp": "/tmp"} {
		if got := c.Dir(asked); got != want {
			t.Errorf("asked for %q it is %s, want %s", asked, got, want)
		}
	}
	path := defaults[0]
	for _, x := range []struct{ asked, want []string }{
		{nil, []string{path, "HOME=/of/image", "A=1"}},
		{defaults, []string{path, "HOME=/of/image", "A=1"}},
		{slices.Concat(defaults, []string{"HOME=/root", "LULL_SOCKET=/x", "B=2"}), []string{path, "HOME=/root", "A=1", "B=2", "LULL_SOCKET=/in"}},
	} {
		own := []string{}
		if len(x.want) > 4 {
			own = append(own, "LULL_SOCKET=/in")
		}
		if got := c.Environ("/home/web", x.asked, own...); !slices.Equal(got, x.want) {
			t.Errorf("asked for %q it is %q, want %q", x.asked, got, x.want)
		}
	}
}

// TestMissingPath checks that a missing path is not taken for the name of an
// image in a registry.
func TestMissingPath(t *testing.T) {
	for _, ref := range []string{"./missing", "../missing", "."} {
		if err := CheckReference(ref); err == nil {
			t.Errorf("%s: %v", ref, err)
		}
	}
}
