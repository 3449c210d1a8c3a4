package bundle

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"

	"lull/internal/lib/errtest"
)

// carrying returns the embedded files of a binary whose helper is program.
func carrying(t *testing.T, program string) fstest.MapFS {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	errtest.Get(w.Write([]byte(program)))(t)
	errtest.None(t, w.Close())
	sum := sha256.Sum256([]byte(program))
	return fstest.MapFS{
		"helper.gz":     {Data: b.Bytes()},
		"helper.sha256": {Data: []byte(hex.EncodeToString(sum[:]) + "  helper\n")},
	}
}

func wants(t *testing.T, path, program string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil || string(b) != program {
		t.Errorf("unpacked %q, %v; want %q", b, err, program)
	}
	if st, err := os.Stat(path); err != nil || st.Mode() != 0o755 {
		t.Errorf("mode %v, %v; want 0755", st.Mode(), err)
	}
}

// TestUnpack checks the first and second use, an upgrade, and the repair of a
// file that is damaged, not executable, or something else.
func TestUnpack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data", "bin")
	one, two := carrying(t, "#!/bin/one\n"), carrying(t, "#!/bin/two\n")
	path, err := unpack(one, dir, "helper")
	if err != nil || path != filepath.Join(dir, "helper") {
		t.Fatal(path, err)
	}
	wants(t, path, "#!/bin/one\n")
	before, err := os.Stat(path)
	errtest.None(t, err)
	errtest.Get(unpack(one, dir, "helper"))(t)
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Error("written again although it was the same")
	}
	running, err := os.Open(path)
	errtest.None(t, err)
	defer running.Close()
	errtest.Get(unpack(two, dir, "helper"))(t)
	wants(t, path, "#!/bin/two\n")
	if b := make([]byte, 11); true {
		if _, err := running.ReadAt(b, 0); err != nil || string(b) != "#!/bin/one\n" {
			t.Errorf("a process that runs the old file has %q, %v", b, err)
		}
	}
	for name, spoil := range map[string]func() error{
		"damaged":   func() error { return os.WriteFile(path, []byte("#!/bin/tw"), 0o755) },
		"wrongmode": func() error { return os.Chmod(path, 0o600) },
		"removed":   func() error { return os.Remove(path) },
	} {
		if err := spoil(); err != nil {
			t.Fatal(name, err)
		}
		if _, err := unpack(two, dir, "helper"); err != nil {
			t.Error(name, err)
		}
		wants(t, path, "#!/bin/two\n")
	}
	if all, err := os.ReadDir(dir); err != nil || len(all) != 1 {
		t.Errorf("left behind: %v, %v", all, err)
	}
}

// TestUnpackRefuses checks that a helper that is missing or corrupt inside the
// binary is an error, and that no file is written.
func TestUnpackRefuses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bin")
	if _, err := unpack(fstest.MapFS{}, dir, "helper"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a binary without helpers: %v", err)
	}
	for name, spoil := range map[string]func(fstest.MapFS){
		"checksum":   func(m fstest.MapFS) { m["helper.sha256"].Data = []byte("00  helper\n") },
		"truncated":  func(m fstest.MapFS) { m["helper.gz"].Data = m["helper.gz"].Data[:20] },
		"no archive": func(m fstest.MapFS) { m["helper.gz"].Data = []byte("plain") },
		"no sum":     func(m fstest.MapFS) { delete(m, "helper.sha256") },
	} {
		m := carrying(t, "#!/bin/one\n")
		spoil(m)
		if path, err := unpack(m, dir, "helper"); err == nil || path != "" {
			t.Errorf("%s: %q, %v", name, path, err)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("something was written: %v", err)
	}
}
