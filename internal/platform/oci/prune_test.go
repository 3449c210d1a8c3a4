package oci

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

// TestPrune checks that an image is in use as long as an instance is based on it,
// and that it can be removed only after that, and then completely.
func TestPrune(t *testing.T) {
	s, err := OpenStore(t.TempDir(), Limits{})
	if err != nil {
		t.Fatal(err)
	}
	tar := filepath.Join(t.TempDir(), "root.tar")
	if err := os.WriteFile(tar, make([]byte, 1024), 0o600); err != nil { // an empty archive
		t.Fatal(err)
	}
	var key string
	for _, id := range []string{"a", "b"} {
		img, err := s.Use(t.Context(), tar, id)
		errtest.None(t, err)
		key = img.Key
	}
	dir, err := s.Use(t.Context(), t.TempDir(), "c")
	if err != nil || dir.Key != "" {
		t.Errorf("a directory: %+v, %v", dir, err)
	}
	for _, id := range []string{"a", "b"} {
		l, err := s.Images(t.Context())
		if err != nil || len(l) != 1 || !l[0].InUse || l[0].Source != tar || l[0].Bytes == 0 {
			t.Errorf("images: %+v, %v", l, err)
		}
		if err := s.RemoveImage(t.Context(), key); err == nil {
			t.Error("an image in use was removed")
		}
		if err := s.Release(id); err != nil {
			t.Error(err)
		}
	}
	home, old := filepath.Join(s.Dir, "images", key), time.Unix(1_000_000, 0)
	errtest.None(t, errors.Join(os.Chtimes(filepath.Join(home, "config.json"), old, old), os.Chtimes(home, old, old)))
	for _, used := range []bool{false, true} {
		if l, err := s.Images(t.Context()); err != nil || !l[0].MadeAt.Equal(old) || l[0].UsedAt.After(old) != used {
			t.Errorf("made and used long ago, used again %v: %+v, %v", used, l, err)
		}
		errtest.Get(s.Get(t.Context(), tar))(t)
	}
	for _, bad := range []string{"", ".", "..", "../images", "missing"} {
		if err := s.RemoveImage(t.Context(), bad); err == nil {
			t.Errorf("%q was removed", bad)
		}
	}
	if err := s.RemoveImage(t.Context(), key); err != nil {
		t.Error(err)
	}
	if l, err := s.Images(t.Context()); err != nil || len(l) != 0 {
		t.Errorf("images: %+v, %v", l, err)
	}
	if left, err := filepath.Glob(filepath.Join(s.Dir, "new-*")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if err := s.Release("missing"); err != nil {
		t.Error(err)
	}
	if _, err := s.Use(t.Context(), tar, "a"); err != nil { // a removed image is unpacked again
		t.Error(err)
	}
}
