package server

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// TestSessionExpires checks that a session ends after sessionLife even without
// signing out, and that its cookie is marked secure if the dashboard has a public
// https address.
func TestSessionExpires(t *testing.T) {
	s := &Server{publicURL: "https://lull.example.org"}
	w := httptest.NewRecorder()
	half, err := s.openSession(w, httptest.NewRequest("POST", SignInPath, http.NoBody), "the-token")
	if err != nil {
		t.Fatal(err)
	}
	cookies := w.Result().Cookies()
	if len(cookies) != 1 || !cookies[0].Secure {
		t.Fatalf("cookies: %v", cookies)
	}
	r := httptest.NewRequest("GET", "/", http.NoBody)
	r.AddCookie(cookies[0])
	for after, valid := range map[time.Duration]bool{0: true, sessionLife - time.Minute: true, sessionLife + time.Minute: false} {
		if token, ok := sessionToken(r, half, time.Now().Add(after)); ok != valid || valid && token != "the-token" {
			t.Errorf("after %v: %q, %t", after, token, ok)
		}
	}
}

// FuzzSession presents random halves of a session. None may be accepted or crash the
// server.
func FuzzSession(f *testing.F) {
	for _, s := range []string{"", ".", "aaaaaaaaaa.", "aaaaaaaaaa.AAAA", "aaaaaaaaaa.!"} {
		f.Add(s, "AAAA")
	}
	f.Fuzz(func(t *testing.T, half, key string) {
		r := httptest.NewRequest("GET", "/", http.NoBody)
		r.AddCookie(&http.Cookie{Name: sessionCookie + "aaaaaaaaaa", Value: key})
		if _, ok := sessionToken(r, half, time.Now()); ok {
			t.Errorf("%q with the key %q is a session", half, key)
		}
	})
}
