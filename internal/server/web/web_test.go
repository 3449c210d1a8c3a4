package web

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"lull/internal/lib/errtest"
)

// sources is the directory of the dashboard's sources, relative to this one.
const sources = "../../../web"

// TestBuiltFromTheseSources fails if /web was changed and not rebuilt, or if the
// built files were edited. The build (web/vite.config.js) writes a hash of the
// sources and names each file after its content.
func TestBuiltFromTheseSources(t *testing.T) {
	names := []string{"index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.js"}
	for _, dir := range []string{"public", "src"} {
		err := filepath.WalkDir(filepath.Join(sources, dir), func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				p, err = filepath.Rel(sources, p)
				names = append(names, filepath.ToSlash(p))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(names)
	h := sha256.New()
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join(sources, name))
		errtest.None(t, err)
		fmt.Fprintf(h, "%s\n%d\n", name, len(b))
		h.Write(b)
	}
	was, err := fs.ReadFile(built, "dist/sources.sha256")
	errtest.None(t, err)
	if now := hex.EncodeToString(h.Sum(nil)); strings.TrimSpace(string(was)) != now {
		t.Errorf("the dashboard in the binary was built from other sources than those in /web: run make web")
	}
}

// TestPages checks that the path of every page returns the start page, under a policy
// that allows nothing from other origins.
func TestPages(t *testing.T) {
	ask := func(method, path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		Handler().ServeHTTP(w, httptest.NewRequest(method, path, nil))
		return w
	}
	start := ask("GET", "/").Body.String()
	for _, path := range []string{"/workers/w-1", "/workers/my.worker", "/audit", "/../audit"} {
		w := ask("GET", path)
		if w.Code != http.StatusOK || w.Body.String() != start || w.Header().Get("Content-Type") != "text/html; charset=utf-8" {
			t.Errorf("%s: %d %s", path, w.Code, w.Header())
		}
		csp := w.Header().Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} {
			if !strings.Contains(csp, want) {
				t.Errorf("%s: the policy %q lacks %q", path, csp, want)
			}
		}
		if strings.Contains(csp, "unsafe") || w.Header().Get("Cache-Control") != "no-cache" {
			t.Errorf("%s: policy %q, cache %q", path, csp, w.Header().Get("Cache-Control"))
		}
	}
	if strings.Contains(start, "<script>") || strings.Contains(start, "//") {
		t.Errorf("the start page has a script in it or loads from elsewhere:\n%s", start)
	}
	entries, err := fs.ReadDir(built, "dist/assets")
	if err != nil || len(entries) < 2 {
		t.Fatalf("%d assets: %v", len(entries), err)
	}
	for _, e := range entries {
		w := ask("GET", "/assets/"+e.Name())
		if w.Code != http.StatusOK || !strings.Contains(w.Header().Get("Cache-Control"), "immutable") {
			t.Errorf("%s: %d, cache %q", e.Name(), w.Code, w.Header().Get("Cache-Control"))
		}
	}
	for path, want := range map[string]int{"/assets/none.js": http.StatusNotFound, "/favicon.ico": http.StatusNotFound, "/icon.svg": http.StatusOK} {
		if w := ask("GET", path); w.Code != want {
			t.Errorf("%s: %d, want %d", path, w.Code, want)
		}
	}
	if w := ask("POST", "/"); w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", w.Code)
	}
}
