// Package web serves the dashboard: the files built from /web, embedded in the
// binary.
//
// Pages load and run only files from this server. Browsers may cache only files whose
// name contains a hash of their content, so no page is cached across an upgrade. The
// files need no authorization because they hold no data; everything they show comes
// from the API.
package web

import (
	"bytes"
	"embed"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"time"
)

//go:embed all:dist
var built embed.FS

// policy allows pages to load and run only their own files. It forbids framing and
// inline scripts.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; " +
	"manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"

// Handler serves the files. For every other path it serves the start page, whose
// script interprets the path.
func Handler() http.Handler {
	files, err := fs.Sub(built, "dist")
	if err != nil {
		panic(err) // impossible: the name is the one in the directive above
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "cannot "+r.Method+" a page", http.StatusMethodNotAllowed)
			return
		}
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-cache")
		name := strings.TrimPrefix(path.Clean("/"+r.URL.Path), "/")
		body, err := fs.ReadFile(files, name)
		switch {
		case err == nil && strings.HasPrefix(name, "assets/"):
			h.Set("Cache-Control", "public, max-age=31536000, immutable")
		case err == nil:
		case path.Ext(name) != "" && !strings.HasPrefix(name, "workers/"):
			http.NotFound(w, r)
			return
		default:
			name = "index.html"
			if body, err = fs.ReadFile(files, name); err != nil {
				http.Error(w, "cannot show the dashboard: it is not in this binary", http.StatusInternalServerError)
				return
			}
		}
		http.ServeContent(w, r, path.Base(name), time.Time{}, bytes.NewReader(body))
	})
}
