package server_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
	"lull/internal/server"
)

// writePair writes a certificate for name, and its key, both with the modification
// time stamp.
func writePair(t *testing.T, dir, name string, stamp time.Time) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	errtest.None(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	errtest.None(t, err)
	raw, err := x509.MarshalPKCS8PrivateKey(private)
	errtest.None(t, err)
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: raw}} {
		errtest.None(t, os.WriteFile(file, pem.EncodeToMemory(block), 0o600))
		errtest.None(t, os.Chtimes(file, stamp, stamp))
	}
	return cert, key
}

// TestCertificateIsReadAgain checks that a running server serves a renewed
// certificate, and that a broken pair in between leaves the old one in use.
func TestCertificateIsReadAgain(t *testing.T) {
	dir, stamp := t.TempDir(), time.Now().Add(-time.Hour)
	certFile, keyFile := writePair(t, dir, "one", stamp)
	c, err := server.NewCertificate(certFile, keyFile)
	errtest.None(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
	srv := &http.Server{TLSConfig: c.Config(), Handler: http.NotFoundHandler()}
	ended := make(chan error, 1)
	go func() { ended <- srv.ServeTLS(l, "", "") }()
	t.Cleanup(func() { _ = srv.Close(); <-ended })
	name := func() string {
		conn, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	if got := name(); got != "one" {
		t.Fatalf("it shows %q", got)
	}
	errtest.None(t, os.WriteFile(certFile, []byte("half"), 0o600))
	if !waittest.Stays(1500*time.Millisecond, func() bool { return name() == "one" }) {
		t.Fatal("with a broken file it shows another certificate")
	}
	writePair(t, dir, "two", stamp.Add(time.Minute))
	waittest.Until(t, "the new certificate is taken up", func() bool { return name() == "two" })
	if _, err := server.NewCertificate(keyFile, certFile); err == nil {
		t.Error("a key for a certificate is accepted")
	}
}
