package tartree

import (
	"archive/tar"
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"lull/internal/lib/errtest"
)

func root(t *testing.T, dir string) *os.Root {
	t.Helper()
	r, err := os.OpenRoot(dir)
	errtest.None(t, err)
	t.Cleanup(func() { r.Close() })
	return r
}

// TestRoundTrip packs a tree and unpacks it under another name. It checks modes,
// links, empty directories and the calls of own.
func TestRoundTrip(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	for _, err := range []error{
		os.MkdirAll(filepath.Join(from, "a/empty"), 0o755),
		os.WriteFile(filepath.Join(from, "a/run.sh"), []byte("true\n"), 0o755),
		os.Symlink("/etc/passwd", filepath.Join(from, "a/out")),
		os.WriteFile(filepath.Join(to, "old"), nil, 0o644),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	var b bytes.Buffer
	errtest.None(t, Pack(&b, root(t, from), "tree"))
	var owned []string
	errtest.None(t, Unpack(&b, root(t, to), "new", func(name string) error { owned = append(owned, name); return nil }))
	if st, err := os.Stat(filepath.Join(to, "new/a/run.sh")); err != nil || st.Mode().Perm() != 0o755 || st.Size() != 5 {
		t.Errorf("%v, %v", st, err)
	}
	if link, err := os.Readlink(filepath.Join(to, "new/a/out")); err != nil || link != "/etc/passwd" {
		t.Errorf("%q, %v", link, err)
	}
	if st, err := os.Stat(filepath.Join(to, "new/a/empty")); err != nil || !st.IsDir() || len(owned) != 5 {
		t.Errorf("%v, %v, %q", st, err, owned)
	}
}

// TestNothingLeavesTheRoot checks that streams that try to write outside the root
// are refused and do not.
func TestNothingLeavesTheRoot(t *testing.T) {
	for name, entries := range map[string][]tar.Header{
		"dots":     {{Name: "../x", Typeflag: tar.TypeReg}},
		"absolute": {{Name: "/x", Typeflag: tar.TypeReg}},
		"link":     {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, {Name: "l/x", Typeflag: tar.TypeReg}},
		"device":   {{Name: "x", Typeflag: tar.TypeChar}},
		"empty":    nil,
	} {
		outside := t.TempDir()
		dir := filepath.Join(outside, "dir")
		errtest.None(t, os.Mkdir(dir, 0o755))
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range entries {
			errtest.None(t, w.WriteHeader(&h))
		}
		w.Close()
		err := Unpack(&b, root(t, dir), "", nil)
		if _, there := os.Lstat(filepath.Join(outside, "x")); err == nil || there == nil {
			t.Errorf("%s: %v, written outside: %t", name, err, there == nil)
		}
	}
}

// FuzzUnpack unpacks random streams. Nothing may be written outside the root.
func FuzzUnpack(f *testing.F) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	_ = w.WriteHeader(&tar.Header{Name: "a/b", Typeflag: tar.TypeReg, Size: 1})
	_, _ = w.Write([]byte("x"))
	_ = w.Close()
	f.Add(b.Bytes(), "as")
	f.Add([]byte("no archive"), "")
	f.Fuzz(func(t *testing.T, stream []byte, as string) {
		outside := t.TempDir()
		dir := filepath.Join(outside, "dir")
		errtest.None(t, os.Mkdir(dir, 0o755))
		_ = Unpack(bytes.NewReader(stream), root(t, dir), as, nil)
		if l, err := fs.ReadDir(os.DirFS(outside), "."); err != nil || len(l) != 1 {
			t.Errorf("%v, %v", l, err)
		}
	})
}
