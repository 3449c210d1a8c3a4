package cml

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// TLS configures how a worker's certificate is verified. The zero value
// verifies it against the system's roots. CML's own certificates are
// self-signed, so workers normally have a pin or their own CA.
type TLS struct {
	// CA contains PEM certificates that replace the system's roots.
	CA []byte
	// Pin is the SHA-256 of the certificate's SubjectPublicKeyInfo, in hex or
	// base64, with an optional prefix "sha256/". Without a CA the pin alone
	// decides: a pinned certificate may be self-signed, expired or for another
	// name.
	Pin string
	// Insecure disables verification. It excludes CA and Pin.
	Insecure bool
	// ServerName is verified instead of the host's name or address.
	ServerName string
}

// config returns the client's TLS configuration.
func (t TLS) config() (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName}
	if t.Insecure {
		if len(t.CA) > 0 || t.Pin != "" {
			return nil, errors.New("cannot use TLS settings: insecure excludes a CA and a pin")
		}
		cfg.InsecureSkipVerify = true
		return cfg, nil
	}
	if len(t.CA) > 0 {
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(t.CA) {
			return nil, errors.New("cannot use TLS settings: the CA contains no PEM certificate")
		}
	}
	if t.Pin == "" {
		return cfg, nil
	}
	pin, err := parsePin(t.Pin)
	if err != nil {
		return nil, err
	}
	cfg.InsecureSkipVerify = len(t.CA) == 0
	cfg.VerifyConnection = func(state tls.ConnectionState) error {
		if len(state.PeerCertificates) == 0 {
			return errors.New("cannot verify the host: it sent no certificate")
		}
		got := PinOf(state.PeerCertificates[0])
		if subtle.ConstantTimeCompare(got[:], pin) != 1 {
			return fmt.Errorf("cannot verify the host: its key's pin is %s, not the one configured", hex.EncodeToString(got[:]))
		}
		return nil
	}
	return cfg, nil
}

// PinOf returns the pin of a certificate.
func PinOf(cert *x509.Certificate) [sha256.Size]byte {
	return sha256.Sum256(cert.RawSubjectPublicKeyInfo)
}

func parsePin(s string) ([]byte, error) {
	text := strings.ReplaceAll(strings.TrimPrefix(s, "sha256/"), ":", "")
	if b, err := hex.DecodeString(text); err == nil && len(b) == sha256.Size {
		return b, nil
	}
	if b, err := base64.StdEncoding.DecodeString(text); err == nil && len(b) == sha256.Size {
		return b, nil
	}
	return nil, fmt.Errorf("cannot use TLS settings: the pin %q is not a SHA-256 in hex or base64", s)
}
