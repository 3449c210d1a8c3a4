//go:build linux

package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"strings"

	"lull/internal/daemon/agent"
	"lull/internal/link/control"
)

// client makes a client over t whose server is checked as it is set. It follows
// nobody elsewhere: that might be without TLS.
func (r reporting) client(t *http.Transport) (*http.Client, error) {
	if r.ServerCA != "" {
		pem, err := os.ReadFile(r.ServerCA)
		if err != nil {
			return nil, fmt.Errorf("cannot read server-ca: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("cannot use server-ca %s: it holds no certificate", r.ServerCA)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}, nil
}

// dial is a client of the server with the token of now: it is read each time,
// so that a new one is used at once.
func (r reporting) dial(hc *http.Client, option string) (*control.Client, error) {
	token, err := r.token(option)
	if err != nil {
		return nil, err
	}
	return control.NewClient(r.Server, token, hc)
}

// token reads the token's file, which nobody else may read.
func (r reporting) token(option string) (string, error) {
	st, err := os.Stat(r.TokenFile)
	if err != nil {
		return "", fmt.Errorf("cannot read %s: %w", option, err)
	}
	if !st.Mode().IsRegular() || st.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("cannot use %s %s: others may read or write it; want a plain file of mode 0600", option, r.TokenFile)
	}
	b, err := agent.ReadTrusted(r.TokenFile, 1024)
	if err != nil {
		return "", fmt.Errorf("cannot read %s: %w", option, err)
	}
	return strings.TrimSpace(string(b)), nil
}
