// Package oidc authenticates users with OpenID Connect. It verifies the ID tokens
// of one issuer, derives the role from their claims, and obtains such tokens with
// the authorization code flow with PKCE or the device flow.
//
// Guarantees. A token is accepted only with a signature by a key that the issuer
// publishes now, with the right issuer, with this client as an audience, and
// before it expires. Unsigned tokens and symmetric algorithms are never accepted.
// A user whose claims give no role gets none. The issuer's documents are
// requested when first needed. An unknown key causes another request, but at most
// one every fetchEvery, so that forged tokens do not cause load on the issuer.
//
// The meaning of a role is up to the caller. The package stores nothing about
// users.
package oidc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"golang.org/x/oauth2"
	"golang.org/x/time/rate"

	"lull/internal/fleet/sealed"
)

// Limits of requests to an issuer.
const (
	within     = 10 * time.Second // one request
	fetchEvery = 5 * time.Second  // minimum interval between requests to the issuer, after a burst of fetchBurst
	fetchBurst = 10
	MaxToken   = 16 << 10 // bytes of a token
)

// Config describes the issuer and lull's client registration.
type Config struct {
	Issuer       string // https, or http on loopback
	ClientID     string
	ClientSecret sealed.Plain // empty for a public client
	// RoleClaim names the claim that determines the role. Its value is a string
	// or a list of strings. Dots lead into nested objects (realm_access.roles).
	RoleClaim string
	// Roles maps values of the claim to roles. The key "*" stands for every user
	// of the issuer.
	Roles map[string]string
	// HTTP is the client for the issuer; nil means the default client.
	HTTP *http.Client
}

// User is the user that a token identifies. Role is empty if the claims give
// none.
type User struct {
	Subject string
	Name    string // the verified mail address, otherwise the subject
	Role    string
	Expires time.Time
}

// Errors of this package, besides network errors.
var (
	ErrExpired     = errors.New("cannot accept the token: it has expired; log in again")
	ErrDenied      = errors.New("cannot accept the token: the issuer did not issue it for this server")
	ErrUnreachable = errors.New("cannot check the token: its issuer cannot be reached")
)

// rank lists the roles, lowest first. A user gets the highest role that the
// claims give.
var rank = []string{"viewer", "operator", "admin"}

// Provider is one issuer. It is safe for concurrent use.
type Provider struct {
	cfg  Config
	http *http.Client

	mu       sync.Mutex
	found    *oidc.Provider
	verifier *oidc.IDTokenVerifier
	tryAt    time.Time
}

// New returns a Provider without doing I/O. It reports every fault of cfg.
func New(cfg Config) (*Provider, error) {
	var errs []error
	u, err := url.Parse(cfg.Issuer)
	switch {
	case err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http":
		errs = append(errs, fmt.Errorf("cannot use oidc-issuer %q: want an https URL", cfg.Issuer))
	case u.Scheme == "http" && !loopback(u.Hostname()):
		errs = append(errs, fmt.Errorf("cannot use oidc-issuer %q without TLS: a man in the middle could issue tokens", cfg.Issuer))
	}
	if cfg.ClientID == "" {
		errs = append(errs, errors.New("cannot use an oidc-issuer without oidc-client-id"))
	}
	for value, role := range cfg.Roles {
		if !slices.Contains(rank, role) {
			errs = append(errs, fmt.Errorf("cannot give %q the role %q: want viewer, operator or admin", value, role))
		}
	}
	base := http.DefaultClient
	if cfg.HTTP != nil {
		base = cfg.HTTP
	}
	next := base.Transport
	if next == nil {
		next = http.DefaultTransport
	}
	c := &http.Client{Timeout: within, Transport: sparing{next, rate.NewLimiter(rate.Every(fetchEvery), fetchBurst)}}
	return &Provider{cfg: cfg, http: c}, errors.Join(errs...)
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// sparing is a transport that refuses requests to the issuer that come too often.
type sparing struct {
	next  http.RoundTripper
	limit *rate.Limiter
}

var errSparing = errors.New("too many requests to the issuer")

func (s sparing) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet && !s.limit.Allow() {
		return nil, errSparing
	}
	return s.next.RoundTrip(r)
}

// Issuer returns the URL of the issuer.
func (p *Provider) Issuer() string { return p.cfg.Issuer }

// ClientID returns this server's id at the issuer.
func (p *Provider) ClientID() string { return p.cfg.ClientID }

// discover returns the provider described by the issuer's document, which it
// reads once. After a failure it waits before it tries again.
func (p *Provider) discover(ctx context.Context) (*oidc.Provider, *oidc.IDTokenVerifier, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.found != nil {
		return p.found, p.verifier, nil
	}
	if time.Now().Before(p.tryAt) {
		return nil, nil, ErrUnreachable
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), within)
	defer cancel()
	found, err := oidc.NewProvider(oidc.ClientContext(ctx, p.http), p.cfg.Issuer)
	if err != nil {
		p.tryAt = time.Now().Add(fetchEvery)
		return nil, nil, fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	p.found, p.verifier = found, found.Verifier(&oidc.Config{ClientID: p.cfg.ClientID})
	return p.found, p.verifier, nil
}

// Looks reports whether token has the form of an ID token: three parts joined by
// dots.
func Looks(token string) bool {
	return len(token) <= MaxToken && strings.Count(token, ".") == 2 && !strings.ContainsAny(token, " \t\r\n")
}

// Verify returns the user that a token identifies. Its errors wrap ErrExpired,
// ErrDenied or ErrUnreachable, and their cause.
func (p *Provider) Verify(ctx context.Context, token string) (User, error) {
	t, err := p.verified(ctx, token)
	if err != nil {
		return User{}, err
	}
	var claims map[string]any
	if err := t.Claims(&claims); err != nil {
		return User{}, fmt.Errorf("%w: %w", ErrDenied, err)
	}
	who := User{Subject: t.Subject, Name: t.Subject, Expires: t.Expiry}
	if mail, _ := claims["email"].(string); mail != "" && claims["email_verified"] == true {
		who.Name = mail
	}
	if who.Subject == "" || len(who.Name) > 128 || strings.ContainsFunc(who.Name, func(r rune) bool { return r < ' ' }) {
		return User{}, fmt.Errorf("%w: its subject is not a valid name", ErrDenied)
	}
	who.Role = p.role(claims)
	return who, nil
}

func (p *Provider) verified(ctx context.Context, token string) (*oidc.IDToken, error) {
	if !Looks(token) {
		return nil, ErrDenied
	}
	_, v, err := p.discover(ctx)
	if err != nil {
		return nil, err
	}
	t, err := v.Verify(oidc.ClientContext(ctx, p.http), token)
	if _, expired := errors.AsType[*oidc.TokenExpiredError](err); expired {
		return nil, fmt.Errorf("%w: %w", ErrExpired, err)
	}
	// The library reports a failure to fetch keys only in the error's text.
	if err != nil && strings.Contains(err.Error(), "fetching keys") {
		return nil, fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDenied, err)
	}
	return t, nil
}

// role returns the highest role that the claim's values give.
func (p *Provider) role(claims map[string]any) string {
	best := slices.Index(rank, p.cfg.Roles["*"])
	var at any = claims
	for part := range strings.SplitSeq(p.cfg.RoleClaim, ".") {
		m, ok := at.(map[string]any)
		if !ok {
			at = nil
			break
		}
		at = m[part]
	}
	values, ok := at.([]any)
	if !ok {
		values = []any{at}
	}
	for _, v := range values {
		if s, ok := v.(string); ok && s != "*" {
			best = max(best, slices.Index(rank, p.cfg.Roles[s]))
		}
	}
	if best < 0 {
		return ""
	}
	return rank[best]
}

// Login is the result of a flow.
type Login struct {
	IDToken      string    `json:"id_token"`
	RefreshToken string    `json:"refresh_token,omitempty"`
	Expires      time.Time `json:"expires"`
}

func (p *Provider) oauth(ctx context.Context, redirect string) (oauth2.Config, error) {
	found, _, err := p.discover(ctx)
	if err != nil {
		return oauth2.Config{}, err
	}
	return oauth2.Config{ClientID: p.cfg.ClientID, ClientSecret: string(p.cfg.ClientSecret), Endpoint: found.Endpoint(), RedirectURL: redirect,
		Scopes: []string{oidc.ScopeOpenID, "profile", "email", oidc.ScopeOfflineAccess}}, nil
}

// Flow is one authorization code flow with PKCE. The caller that began it keeps
// it until Exchange. State and Nonce are sent to the issuer with the user's
// browser; Verifier must be kept secret.
type Flow struct {
	State    string `json:"state"`
	Nonce    string `json:"nonce"`
	Verifier string `json:"verifier"`
}

// NewFlow returns a flow with fresh secrets.
func NewFlow() Flow {
	return Flow{State: oauth2.GenerateVerifier(), Nonce: oauth2.GenerateVerifier(), Verifier: oauth2.GenerateVerifier()}
}

// URL returns the address at which a user logs in. The issuer then sends the
// browser to redirect.
func (p *Provider) URL(ctx context.Context, f Flow, redirect string) (string, error) {
	c, err := p.oauth(ctx, redirect)
	if err != nil {
		return "", err
	}
	return c.AuthCodeURL(f.State, oidc.Nonce(f.Nonce), oauth2.S256ChallengeOption(f.Verifier)), nil
}

// Exchange exchanges the returned code for a login. The token's nonce must be
// the flow's.
func (p *Provider) Exchange(ctx context.Context, f Flow, redirect, code string) (Login, error) {
	c, err := p.oauth(ctx, redirect)
	if err != nil {
		return Login{}, err
	}
	t, err := c.Exchange(oidc.ClientContext(ctx, p.http), code, oauth2.VerifierOption(f.Verifier))
	if err != nil {
		return Login{}, fmt.Errorf("cannot log in: %w", err)
	}
	return p.login(ctx, t, f.Nonce)
}

// Device logs a user in from a machine without a browser. It calls show with the
// address and the code that the user must enter in any browser, and waits for
// that.
func (p *Provider) Device(ctx context.Context, show func(uri, code string)) (Login, error) {
	c, err := p.oauth(ctx, "")
	if err != nil {
		return Login{}, err
	}
	if c.Endpoint.DeviceAuthURL == "" {
		return Login{}, errors.New("cannot log in by a device code: the issuer does not offer it")
	}
	ctx = oidc.ClientContext(ctx, p.http)
	d, err := c.DeviceAuth(ctx)
	if err != nil {
		return Login{}, fmt.Errorf("cannot log in: %w", err)
	}
	show(d.VerificationURI, d.UserCode)
	t, err := c.DeviceAccessToken(ctx, d)
	if err != nil {
		return Login{}, fmt.Errorf("cannot log in: %w", err)
	}
	return p.login(ctx, t, "")
}

// Refresh renews a login. old must have a refresh token.
func (p *Provider) Refresh(ctx context.Context, old Login) (Login, error) {
	if old.RefreshToken == "" {
		return Login{}, ErrExpired
	}
	c, err := p.oauth(ctx, "")
	if err != nil {
		return Login{}, err
	}
	t, err := c.TokenSource(oidc.ClientContext(ctx, p.http), &oauth2.Token{RefreshToken: old.RefreshToken}).Token()
	if err != nil {
		return Login{}, fmt.Errorf("cannot renew the login: %w", err)
	}
	l, err := p.login(ctx, t, "")
	if err == nil && l.RefreshToken == "" {
		l.RefreshToken = old.RefreshToken
	}
	return l, err
}

// login takes the ID token from an answer and verifies it.
func (p *Provider) login(ctx context.Context, t *oauth2.Token, nonce string) (Login, error) {
	raw, _ := t.Extra("id_token").(string)
	if raw == "" {
		return Login{}, errors.New("cannot log in: the issuer gave no ID token")
	}
	id, err := p.verified(ctx, raw)
	if err != nil {
		return Login{}, err
	}
	if nonce != "" && id.Nonce != nonce {
		return Login{}, fmt.Errorf("%w: it belongs to another login", ErrDenied)
	}
	return Login{IDToken: raw, RefreshToken: t.RefreshToken, Expires: id.Expiry}, nil
}
