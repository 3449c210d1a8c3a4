//go:build linux

package reporting

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"lull/internal/agent"
	"lull/internal/protocol/control"
)

// HTTPClient returns a client over t that verifies the server as configured in r. It
// follows no redirects, because one could lead away from TLS.
func (r Target) HTTPClient(t *http.Transport) (*http.Client, error) {
	if r.ServerCA != "" {
		pem, err := os.ReadFile(r.ServerCA)
		if err != nil {
			return nil, fmt.Errorf("cannot read server-ca: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("cannot use server-ca %s: it contains no certificate", r.ServerCA)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}, nil
}

// TokenSource says how a daemon reads its token. Option is the setting that names the
// token's file. Read returns at most limit bytes of the file. The agent, which runs
// as root, uses one that also checks who can write to the file.
type TokenSource struct {
	Option string
	Read   func(path string, limit int64) ([]byte, error)
}

// The settings that name the token file of an agent and of a host.
var (
	AgentTokens = TokenSource{AgentOption, agent.ReadTrusted}
	HostTokens  = TokenSource{HostOption, func(path string, limit int64) ([]byte, error) {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		return io.ReadAll(io.LimitReader(f, limit))
	}}
)

// Dial returns a client of the server with the current token. It must be called for
// each connection, so that a new token is used at once.
func (r Target) Dial(hc *http.Client, from TokenSource) (*control.Client, error) {
	token, err := r.ReadToken(from)
	if err != nil {
		return nil, err
	}
	return control.NewClient(r.Server, token, hc)
}

// ReadToken reads the token from its file. It fails if other users can read the file.
func (r Target) ReadToken(from TokenSource) (string, error) {
	st, err := os.Stat(r.TokenFile)
	if err != nil {
		return "", fmt.Errorf("cannot read %s: %w", from.Option, err)
	}
	if !st.Mode().IsRegular() || st.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("cannot use %s %s: others can read or write it; want a regular file of mode 0600", from.Option, r.TokenFile)
	}
	b, err := from.Read(r.TokenFile, 1024)
	if err != nil {
		return "", fmt.Errorf("cannot read %s: %w", from.Option, err)
	}
	return strings.TrimSpace(string(b)), nil
}
