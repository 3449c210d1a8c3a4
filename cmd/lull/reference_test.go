package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// TestReferenceIsFresh checks that the generated pages are up to date. make generate
// writes them.
func TestReferenceIsFresh(t *testing.T) {
	c := newCLI(nil, io.Discard, io.Discard, func(string) string { return "" })
	pages, err := c.referencePages()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range pages {
		got, err := os.ReadFile(filepath.Join("..", "..", "docs", "reference", name))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("docs/reference/%s is not what the code says (%v): run make generate", name, err)
		}
	}
}
