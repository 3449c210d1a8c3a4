package main

import (
	"runtime/debug"
	"testing"
)

func TestOf(t *testing.T) {
	info := &debug.BuildInfo{GoVersion: "go1.26.8", Deps: []*debug.Module{
		{Path: "z.org/last", Version: "v1.0.0"},
		{Path: "a.org/old", Version: "v0.1.0", Replace: &debug.Module{Path: "a.org/new", Version: "v2.0.0"}},
	}}
	var got []string
	for _, c := range of(info, "lull", "1").Components {
		got = append(got, c.PURL)
	}
	want := []string{"pkg:golang/a.org/new@v2.0.0", "pkg:golang/stdlib@1.26.8", "pkg:golang/z.org/last@v1.0.0"}
	for i := range want {
		if len(got) != len(want) || got[i] != want[i] {
			t.Fatalf("got %v, want %v", got, want)
		}
	}
}
