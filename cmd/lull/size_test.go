package main

import (
	"bytes"
	"compress/gzip"
	"os"
	"path/filepath"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
)

// TestSize checks that the stripped programs are within their size limits. make size
// shows what takes the space.
func TestSize(t *testing.T) {
	dir := t.TempDir()
	errtest.None(t, programtest.Into(dir, "lull/cmd/lull", "lull/cmd/lull-agent", "lull/cmd/lull-shim", "lull/cmd/lull-harness"))
	one := int64(0) // lull as released, with its compressed helper programs
	for name, limit := range map[string]int{"lull": 63e6, "lull-agent": 20e6, "lull-shim": 6e6, "lull-harness": 6e6} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		errtest.None(t, err)
		if len(b) > limit {
			t.Errorf("%s has %d bytes, at most %d are allowed", name, len(b), limit)
		}
		switch name {
		case "lull":
			one += int64(len(b))
		case "lull-shim", "lull-harness":
			var packed bytes.Buffer
			w := gzip.NewWriter(&packed)
			errtest.Get(w.Write(b))(t)
			errtest.None(t, w.Close())
			one += int64(packed.Len())
		}
	}
	if one > 63e6 {
		t.Errorf("lull with its helpers has %d bytes, at most 63 MB are allowed", one)
	}
}
