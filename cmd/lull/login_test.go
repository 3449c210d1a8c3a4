package main

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/fleet"
	"lull/internal/lib/errtest"
	"lull/internal/platform/oidc"
	"lull/internal/platform/oidc/oidctest"
	"lull/internal/server"
	"lull/internal/store/mem"
)

// browser is a terminal whose user opens each URL that is printed.
type browser struct {
	mu    sync.Mutex
	shown strings.Builder
	open  func(text string)
}

func (b *browser) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shown.Write(p)
	b.open(string(p))
	return len(p), nil
}

// TestLogin logs in with each flow, uses the login, and checks that it is renewed and
// can be removed.
func TestLogin(t *testing.T) {
	i := oidctest.New(t)
	i.Claims["groups"] = []string{"staff"}
	p, err := oidc.New(oidc.Config{Issuer: i.URL, ClientID: "lull", RoleClaim: "groups", Roles: map[string]string{"staff": "operator"}})
	if err != nil {
		t.Fatal(err)
	}
	db := mem.New(mem.Options{}).Client()
	t.Cleanup(db.Close)
	f, err := fleet.New(fleet.Options{Store: db, ID: "test"})
	if err != nil {
		t.Fatal(err)
	}
	api, err := server.New(server.Options{Fleet: f, Identity: p})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- api.Run(ctx) }()
	web := httptest.NewServer(api.Handler())
	t.Cleanup(func() {
		web.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	select {
	case <-api.Ready():
	case <-time.After(60 * time.Second):
		t.Fatal("the server does not get ready")
	}

	home := t.TempDir()
	env := map[string]string{"HOME": home, "LULL_SERVER": web.URL}
	lull := func(b *browser, args ...string) (string, int) {
		t.Helper()
		var out strings.Builder
		within, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		code := run(within, args, strings.NewReader(""), &out, b, func(name string) string { return env[name] })
		return out.String(), code
	}
	opened := make(chan error, 4)
	page := &browser{open: func(text string) {
		if u := regexp.MustCompile(`http\S+/authorize\S+`).FindString(text); u != "" {
			go func() {
				res, err := http.Get(u)
				if err == nil {
					_, err = io.Copy(io.Discard, res.Body)
					res.Body.Close()
				}
				opened <- err
			}()
		}
		if strings.Contains(text, "ABCD") {
			i.Approve()
		}
	}}
	if out, code := lull(page, "worker", "ls"); code == 0 {
		t.Fatalf("without a login: %s", out)
	}
	if out, code := lull(page, "login"); code != 0 || !strings.Contains(out, "u-1 (operator)") {
		t.Fatalf("login ended with %d: %s %s", code, out, page.shown.String())
	}
	if err := <-opened; err != nil {
		t.Error(err)
	}
	file := filepath.Join(home, ".config", "lull", "logins.json")
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the file of logins: %v, %v", st, err)
	}
	if out, code := lull(page, "worker", "ls", "--json"); code != 0 || strings.TrimSpace(out) != "[]" {
		t.Errorf("with the login: %d %q %s", code, out, page.shown.String())
	}
	if out, code := lull(page, "login", "--device"); code != 0 || !strings.Contains(out, "operator") {
		t.Fatalf("login by device ended with %d: %s %s", code, out, page.shown.String())
	}
	// An expired login is renewed.
	kept, err := os.ReadFile(file)
	errtest.None(t, err)
	old := regexp.MustCompile(`"expires": "[^"]*"`).ReplaceAll(kept, []byte(`"expires": "2026-01-01T00:00:00Z"`))
	errtest.None(t, os.WriteFile(file, old, 0o600))
	if _, code := lull(page, "worker", "ls"); code != 0 {
		t.Errorf("with a login to be renewed: %s", page.shown.String())
	}
	if renewed, err := os.ReadFile(file); err != nil || string(renewed) == string(old) {
		t.Errorf("the login was not renewed: %v", err)
	}
	if _, code := lull(page, "logout"); code != 0 {
		t.Error("cannot log out")
	}
	if _, code := lull(page, "worker", "ls"); code == 0 {
		t.Error("logged out, and still in")
	}
}
