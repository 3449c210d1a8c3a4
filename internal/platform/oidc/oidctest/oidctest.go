// Package oidctest is a small OpenID Connect issuer for tests, written without
// the libraries under test. It supports discovery, keys, the authorization code
// flow with PKCE (a browser's user agrees at once), the device flow and refresh.
package oidctest

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"maps"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"testing"
	"time"
)

// Issuer is a running issuer. It is reachable at URL until the test ends.
type Issuer struct {
	URL string
	// Claims are added to the required ones in every token.
	Claims map[string]any
	// Life is the lifetime of a token.
	Life time.Duration

	handler http.Handler

	mu        sync.Mutex
	key       *rsa.PrivateKey
	kid       string
	down      bool
	reads     int // of its keys
	codes     map[string]url.Values
	refreshes map[string]bool
	approved  bool // the device code
}

// New starts an issuer with a key.
func New(t *testing.T) *Issuer {
	t.Helper()
	i := &Issuer{Claims: map[string]any{}, Life: time.Hour, codes: map[string]url.Values{}, refreshes: map[string]bool{}}
	i.Rotate(t)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", i.configuration)
	mux.HandleFunc("GET /keys", i.keys)
	mux.HandleFunc("GET /authorize", i.authorize)
	mux.HandleFunc("POST /token", i.token)
	mux.HandleFunc("POST /device", i.device)
	i.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i.mu.Lock()
		down := i.down
		i.mu.Unlock()
		if down {
			http.Error(w, "down", http.StatusServiceUnavailable)
			return
		}
		mux.ServeHTTP(w, r)
	})
	srv := httptest.NewServer(i.handler)
	t.Cleanup(srv.Close)
	i.URL = srv.URL
	return i
}

// Client returns an HTTP client that reaches the issuer without a network. A
// synctest bubble can then wait for the goroutines of a request.
func (i *Issuer) Client() *http.Client { return &http.Client{Transport: direct{i.handler}} }

type direct struct{ handler http.Handler }

func (d direct) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	d.handler.ServeHTTP(w, r)
	return w.Result(), nil
}

// Rotate replaces the key; the old one is no longer published.
func (i *Issuer) Rotate(t *testing.T) {
	t.Helper()
	k, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.key, i.kid = k, rand.Text()
}

// Down makes the issuer answer every request with 503, or work normally again.
func (i *Issuer) Down(down bool) { i.mu.Lock(); defer i.mu.Unlock(); i.down = down }

// Reads returns how often the keys were requested.
func (i *Issuer) Reads() int { i.mu.Lock(); defer i.mu.Unlock(); return i.reads }

// Approve approves the pending device code, as a user would.
func (i *Issuer) Approve() { i.mu.Lock(); defer i.mu.Unlock(); i.approved = true }

func b64(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

func part(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain data of a test
	}
	return b64(b)
}

// Token returns a signed token for client. claims override the usual ones; a nil
// value omits a claim.
func (i *Issuer) Token(client string, claims map[string]any) string {
	return i.Sign(i.header(), i.body(client, claims))
}

func (i *Issuer) header() map[string]any {
	i.mu.Lock()
	defer i.mu.Unlock()
	return map[string]any{"alg": "RS256", "typ": "JWT", "kid": i.kid}
}

func (i *Issuer) body(client string, claims map[string]any) map[string]any {
	c := map[string]any{"iss": i.URL, "aud": client, "sub": "u-1", "iat": time.Now().Unix(), "exp": time.Now().Add(i.Life).Unix()}
	maps.Copy(c, i.Claims)
	maps.Copy(c, claims)
	maps.DeleteFunc(c, func(_ string, v any) bool { return v == nil })
	return c
}

// Sign signs any header and body with the present key.
func (i *Issuer) Sign(header, body map[string]any) string {
	i.mu.Lock()
	key := i.key
	i.mu.Unlock()
	text := part(header) + "." + part(body)
	sum := sha256.Sum256([]byte(text))
	sig, err := rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA256, sum[:])
	if err != nil {
		panic(err) // cannot fail with a 2048-bit key
	}
	return text + "." + b64(sig)
}

// Unsigned returns a token without a signature, with alg none.
func (i *Issuer) Unsigned(client string) string {
	return part(map[string]any{"alg": "none", "typ": "JWT"}) + "." + part(i.body(client, nil)) + "."
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil {
		panic(http.ErrAbortHandler)
	}
}

func (i *Issuer) configuration(w http.ResponseWriter, _ *http.Request) {
	answer(w, map[string]any{"issuer": i.URL, "authorization_endpoint": i.URL + "/authorize", "token_endpoint": i.URL + "/token", "jwks_uri": i.URL + "/keys",
		"device_authorization_endpoint": i.URL + "/device", "id_token_signing_alg_values_supported": []string{"RS256", "none", "HS256"}})
}

func (i *Issuer) keys(w http.ResponseWriter, _ *http.Request) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.reads++
	answer(w, map[string]any{"keys": []any{map[string]any{"kty": "RSA", "alg": "RS256", "use": "sig", "kid": i.kid,
		"n": b64(i.key.N.Bytes()), "e": b64(big.NewInt(int64(i.key.E)).Bytes())}}})
}

// authorize redirects with a code at once, like a user who consents immediately.
func (i *Issuer) authorize(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	back, err := url.Parse(q.Get("redirect_uri"))
	if err != nil || q.Get("response_type") != "code" || q.Get("code_challenge_method") != "S256" || q.Get("code_challenge") == "" {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	code := rand.Text()
	i.mu.Lock()
	i.codes[code] = q
	i.mu.Unlock()
	back.RawQuery = url.Values{"code": {code}, "state": {q.Get("state")}}.Encode()
	http.Redirect(w, r, back.String(), http.StatusFound)
}

func (i *Issuer) device(w http.ResponseWriter, _ *http.Request) {
	answer(w, map[string]any{"device_code": "dev", "user_code": "ABCD", "verification_uri": i.URL + "/activate", "expires_in": 600, "interval": 1})
}

func (i *Issuer) token(w http.ResponseWriter, r *http.Request) {
	fail := func(what string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusBadRequest)
		answer(w, map[string]string{"error": what})
	}
	client, nonce := r.FormValue("client_id"), ""
	if user, _, ok := r.BasicAuth(); ok {
		client = user
	}
	switch r.FormValue("grant_type") {
	case "authorization_code":
		i.mu.Lock()
		q, ok := i.codes[r.FormValue("code")]
		delete(i.codes, r.FormValue("code"))
		i.mu.Unlock()
		sum := sha256.Sum256([]byte(r.FormValue("code_verifier")))
		if !ok || b64(sum[:]) != q.Get("code_challenge") || r.FormValue("redirect_uri") != q.Get("redirect_uri") || client != q.Get("client_id") {
			fail("invalid_grant")
			return
		}
		nonce = q.Get("nonce")
	case "urn:ietf:params:oauth:grant-type:device_code":
		i.mu.Lock()
		ok := i.approved
		i.mu.Unlock()
		if !ok {
			fail("authorization_pending")
			return
		}
	case "refresh_token":
		i.mu.Lock()
		ok := i.refreshes[r.FormValue("refresh_token")]
		i.mu.Unlock()
		if !ok {
			fail("invalid_grant")
			return
		}
	default:
		fail("unsupported_grant_type")
		return
	}
	claims := map[string]any{}
	if nonce != "" {
		claims["nonce"] = nonce
	}
	refresh := rand.Text()
	i.mu.Lock()
	i.refreshes[refresh] = true
	i.mu.Unlock()
	answer(w, map[string]any{"access_token": "opaque", "token_type": "Bearer", "expires_in": 3600, "refresh_token": refresh, "id_token": i.Token(client, claims)})
}
