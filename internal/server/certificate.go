package server

import (
	"crypto/tls"
	"fmt"
	"os"
	"sync"
	"time"
)

// Certificate is a certificate and key in files. Changed files are read again, so a
// renewal needs no restart. If a new pair cannot be read, the last good one stays in
// use.
type Certificate struct {
	certFile, keyFile string

	mu     sync.Mutex
	pair   *tls.Certificate
	stamps [2]time.Time
	looked time.Time
}

// lookEvery is the minimum interval between checks for changed files.
const lookEvery = time.Second

// NewCertificate reads the files for the first time.
func NewCertificate(certFile, keyFile string) (*Certificate, error) {
	c := &Certificate{certFile: certFile, keyFile: keyFile}
	stamps, err := c.look()
	if err != nil {
		return nil, err
	}
	return c, c.load(stamps)
}

// Config returns a server's TLS configuration with the certificate.
func (c *Certificate) Config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.current(time.Now()), nil }}
}

func (c *Certificate) current(now time.Time) *tls.Certificate {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.looked) < lookEvery {
		return c.pair
	}
	c.looked = now
	if stamps, err := c.look(); err == nil && stamps != c.stamps {
		_ = c.load(stamps) // a half-written pair is rejected; the next check finds it complete
	}
	return c.pair
}

func (c *Certificate) look() (stamps [2]time.Time, err error) {
	for i, name := range []string{c.certFile, c.keyFile} {
		info, err := os.Stat(name)
		if err != nil {
			return stamps, fmt.Errorf("cannot use the TLS certificate: %w", err)
		}
		stamps[i] = info.ModTime()
	}
	return stamps, nil
}

func (c *Certificate) load(stamps [2]time.Time) error {
	pair, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return fmt.Errorf("cannot use the TLS certificate %s with key %s: %w", c.certFile, c.keyFile, err)
	}
	c.pair, c.stamps = &pair, stamps
	return nil
}
