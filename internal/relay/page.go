package relay

import (
	"html/template"
	"io"
	"net/http"
)

// page is shown to a user in place of an instance.
type page struct {
	Title, Name, Text string
	Refresh           int // seconds; 0 means no refresh
}

var pageTemplate = template.Must(template.New("page").Parse(`<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{{if .Refresh}}<meta http-equiv="refresh" content="{{.Refresh}}">
{{end}}<title>{{.Title}}: {{.Name}}</title>
<style>
body { font: 1.1rem/1.5 system-ui, sans-serif; margin: 0; min-height: 100vh; display: grid; place-items: center; color: #1d2430; background: #f6f7f9; }
main { max-width: 36rem; padding: 2rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; }
@media (prefers-color-scheme: dark) { body { color: #e6e9ee; background: #14181f; } }
</style>
</head>
<body>
<main>
<h1>{{.Title}}: {{.Name}}</h1>
<p role="status">{{.Text}}</p>
</main>
</body>
</html>
`))

func writePage(w io.Writer, p page) {
	// The status has been sent already, so an error means that the client has gone.
	_ = pageTemplate.Execute(w, p)
}

// waitingPage answers with a page that makes the browser reload shortly. Its status
// is 503, so that the page is not mistaken for the application's answer.
func (f *Front) waitingPage(w http.ResponseWriter, name string) {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("Retry-After", "2")
	w.WriteHeader(http.StatusServiceUnavailable)
	writePage(w, page{
		Title: "Waking up", Name: name, Refresh: 2,
		Text: "It was asleep and is being woken. This page reloads every two seconds.",
	})
}
