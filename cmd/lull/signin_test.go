package main

import (
	"net/http"
	"path/filepath"
	"regexp"
	"testing"
)

// TestSignInLink checks the sign-in link that the first start prints: link previews
// do not use it up, it signs in one browser, and a second browser sees that it was
// used.
func TestSignInLink(t *testing.T) {
	chrome := startBrowser(t)
	t.Setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
	link := daemon(t, regexp.MustCompile(`(http://\S+#\S+)$`), "server", "--data", filepath.Join(t.TempDir(), "data"), "--listen", "127.0.0.1:0", "--log-level", "error")[0]
	for _, preview := range []func(string) (*http.Response, error){http.Head, http.Get} {
		res, err := preview(link)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != http.StatusOK {
			t.Errorf("a preview: %s", res.Status)
		}
	}
	w := open(t, chrome, link)
	w.until(`location.pathname === '/' && (localStorage.getItem('lull-session') ?? '') !== ''`)
	w.until(`document.querySelector('nav') !== null`)

	late := open(t, chrome, link)
	late.until(`document.getElementById('said').dataset.code === 'link_used'`)
	late.forgive("410")
	if !late.holds(`location.pathname === '/sign-in' && location.hash === '' && localStorage.getItem('lull-session') === null`) {
		t.Error("a link that was used signed a second browser in, or is still in its address")
	}
}
