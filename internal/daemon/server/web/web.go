// Package web serves the dashboard: the files that /web builds, carried in the
// binary.
//
// It guarantees that a page runs nothing and loads nothing from anywhere but
// this server, and that no page is kept after an upgrade: only files whose
// name holds their hash may be kept by a browser. It leaves out who may ask:
// the files hold no data, and what they show comes from the API.
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

// policy lets pages run and load their own files only, be framed by nobody,
// and make no script out of text.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; " +
	"manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"

// Handler serves the files, and the start page for every path that is none:
// the page itself finds out what the path means.
func Handler() http.Handler {
	files, err := fs.Sub(built, "dist")
	if err != nil {
		panic(err) // the name is that of the directive above
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
