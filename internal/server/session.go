package server

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"lull/internal/fleet/audit"
	"lull/internal/server/access"
)

// A browser's session is a token, encrypted. The page keeps the ciphertext in the
// storage of its origin and sends it with each request. The key is in a cookie that
// no script can read. Neither is worth anything alone: browsers send cookies to every
// port of a host, and scripts can read the storage. A request that another site
// causes lacks the ciphertext. The server keeps nothing, so any server of a fleet
// accepts the session, and each request checks the token again.

const (
	sessionScheme = "Session"       // scheme of the Authorization header; the ciphertext follows
	sessionCookie = "lull_session_" // followed by the session's ID, because servers on other ports share the cookies
	sessionLife   = 7 * 24 * time.Hour
)

// sessionKey is the key under which the dashboard stores the ciphertext.
const sessionKey = "lull-session"

type sealed struct {
	Token string    `json:"token"`
	Until time.Time `json:"until"`
}

// aead returns the cipher for a session with this key.
func aead(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// openSession sets the cookie of a new session and returns its ciphertext.
func (s *Server) openSession(w http.ResponseWriter, r *http.Request, token string) (string, error) {
	key, id := make([]byte, 32), strings.ToLower(rand.Text()[:10])
	_, _ = rand.Read(key) // never fails
	plain, err := json.Marshal(sealed{Token: token, Until: time.Now().Add(sessionLife)})
	if err != nil {
		return "", err
	}
	box, err := aead(key)
	if err != nil {
		return "", err
	}
	s.setSession(w, r, id, base64.RawURLEncoding.EncodeToString(key))
	return id + "." + base64.RawURLEncoding.EncodeToString(box.Seal(nil, nil, plain, []byte(id))), nil
}

// setSession sets the cookie of a session. The cookie ends with the browser; an empty
// value deletes it.
func (s *Server) setSession(w http.ResponseWriter, r *http.Request, id, value string) {
	c := &http.Cookie{Name: sessionCookie + id, Value: value, Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode,
		Secure: r.TLS != nil || strings.HasPrefix(s.publicURL, "https:")}
	if value == "" {
		c.MaxAge = -1
	}
	http.SetCookie(w, c)
}

// sessionToken returns the token of a session; false if the session has expired or
// either half is missing or wrong.
func sessionToken(r *http.Request, given string, now time.Time) (string, bool) {
	id, text, _ := strings.Cut(given, ".")
	c, err := r.Cookie(sessionCookie + id)
	if err != nil {
		return "", false
	}
	key, err := base64.RawURLEncoding.DecodeString(c.Value)
	if err != nil {
		return "", false
	}
	box, err := aead(key)
	if err != nil {
		return "", false
	}
	data, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		return "", false
	}
	plain, err := box.Open(nil, nil, data, []byte(id))
	var v sealed
	if err != nil || json.Unmarshal(plain, &v) != nil || !now.Before(v.Until) {
		return "", false
	}
	return v.Token, true
}

// answerSession opens a session for a token and answers with the ciphertext.
func (s *Server) answerSession(w http.ResponseWriter, r *http.Request, token string) {
	text, err := s.openSession(w, r, token)
	if err != nil {
		writeProblem(w, http.StatusInternalServerError, "internal", "cannot open a session: "+err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]string{"session": text}) // a client that has disconnected can repeat the request
}

// signInWith opens a session for a token that the user entered.
func (s *Server) signInWith(w http.ResponseWriter, r *http.Request, token string) {
	r.Header.Set("Authorization", "Bearer "+token)
	p := principalOf(s.identify(r).Context())
	switch {
	case !p.given || p.denied != nil:
		writeProblem(w, http.StatusUnauthorized, "bad_token", access.ErrDenied.Error())
	case !p.token.Role.Covers(access.Viewer):
		writeProblem(w, http.StatusForbidden, "role", "cannot sign in with a token of the role "+string(p.token.Role))
	default:
		s.answerSession(w, r, token)
	}
}

// signOut deletes the cookie of a session, and revokes the token that a sign-in
// link made for it.
func (s *Server) signOut(w http.ResponseWriter, r *http.Request) {
	scheme, given, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	id, _, ok := strings.Cut(given, ".")
	if scheme != sessionScheme || !ok || len(id) != 10 {
		writeProblem(w, http.StatusBadRequest, "invalid", "cannot sign out: there is no session in the header Authorization")
		return
	}
	if t := principalOf(r.Context()).token; t.Parent != "" {
		ops, err := audit.Ops(audit.Entry{Action: "token_revoked", By: audit.Actor{Name: t.Name, Kind: audit.KindUser}, Detail: t.ID + " by signing out"})
		if err == nil {
			_, err = s.tokens.Revoke(r.Context(), t.ID, t.Name, ops...)
		}
		if err != nil {
			s.log.Warn("the token of a session stays valid until it expires", "token", t.ID, "err", err)
		}
	}
	s.setSession(w, r, id, "")
	w.WriteHeader(http.StatusNoContent)
}
