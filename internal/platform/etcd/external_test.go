package etcd

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/fleet/sealed"
	"lull/internal/lib/errtest"
	"lull/internal/platform/etcd/etcdtest"
	"lull/internal/store"
)

func TestExternalConfig(t *testing.T) {
	for what, c := range map[string]struct {
		cfg  ExternalConfig
		want []string
	}{
		"none":     {ExternalConfig{}, []string{"without endpoints"}},
		"no URL":   {ExternalConfig{Endpoints: []string{"localhost:2379"}}, []string{"localhost:2379"}},
		"unix":     {ExternalConfig{Endpoints: []string{"unix://x"}}, []string{"unix://x"}},
		"user":     {ExternalConfig{Endpoints: []string{"http://u:secret@h:1"}}, []string{"u:xxxxx@h"}},
		"mixed":    {ExternalConfig{Endpoints: []string{"http://h:1", "https://h:2"}}, []string{"mix"}},
		"several":  {ExternalConfig{Endpoints: []string{"http://h:1"}, CertFile: "c", Password: "p"}, []string{"certificates with http", "without its key", "without a user"}},
		"complete": {ExternalConfig{Endpoints: []string{"https://h:1/"}, CAFile: "a", CertFile: "c", KeyFile: "k", Username: "u", Password: "p"}, nil},
	} {
		err := c.cfg.Validate()
		if (err == nil) != (c.want == nil) {
			t.Errorf("%s: %v", what, err)
		}
		for _, part := range c.want {
			if err != nil && !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v lacks %q", what, err, part)
			}
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error tells the password: %v", what, err)
		}
	}
}

func TestExternalUnreachable(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := Dial(ctx, ExternalConfig{Endpoints: []string{"http://127.0.0.1:1"}}); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("nothing there: %v", err)
	}
}

func TestExternalUser(t *testing.T) {
	c := etcdtest.Start(t, 1)
	root := dialTest(t, c)
	ctx := t.Context()
	_, e1 := root.client.UserAdd(ctx, "root", "top")
	_, e2 := root.client.UserGrantRole(ctx, "root", "root")
	_, e3 := root.client.UserAdd(ctx, "nobody", "low")
	_, e4 := root.client.AuthEnable(ctx)
	errtest.None(t, errors.Join(e1, e2, e3, e4))
	for _, c2 := range []struct {
		user, password string
		want           error
	}{{"root", "top", nil}, {"root", "wrong", store.ErrDenied}, {"nobody", "low", store.ErrDenied}, {"", "", store.ErrDenied}} {
		s, err := Dial(ctx, ExternalConfig{Endpoints: c.Endpoints(), Username: c2.user, Password: sealed.Plain(c2.password)})
		if !errors.Is(err, c2.want) {
			t.Errorf("%s/%s: %v, want %v", c2.user, c2.password, err, c2.want)
		}
		if err == nil {
			if _, err := s.Commit(ctx, store.Txn{Then: []store.Op{store.Put("a", nil)}}); err != nil {
				t.Error(err)
			}
			closeTest(t, s)
		}
	}
}

func TestExternalTLS(t *testing.T) {
	dir := t.TempDir()
	writeCerts(t, dir)
	at := func(name string) string { return filepath.Join(dir, name) }
	c := etcdtest.Start(t, 1, "--cert-file="+at("cert.pem"), "--key-file="+at("key.pem"),
		"--client-cert-auth", "--trusted-ca-file="+at("ca.pem"))
	cfg := ExternalConfig{Endpoints: c.Endpoints(), CAFile: at("ca.pem"), CertFile: at("cert.pem"), KeyFile: at("key.pem")}
	s, err := Dial(t.Context(), cfg)
	errtest.None(t, err)
	if _, err := s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("a", nil)}}); err != nil {
		t.Error(err)
	}
	closeTest(t, s)
	bare, unknown, missing := cfg, cfg, cfg
	bare.CertFile, bare.KeyFile = "", ""
	unknown.CAFile = ""
	missing.CAFile = at("none.pem")
	for what, cfg := range map[string]ExternalConfig{"no certificate": bare, "unknown CA": unknown, "CA file missing": missing} {
		cfg.CallTimeout = time.Second
		if _, err := Dial(t.Context(), cfg); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

// writeCerts writes a certificate authority and one certificate for servers and
// clients to dir.
func writeCerts(t *testing.T, dir string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	errtest.None(t, err)
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, IsCA: true, BasicConstraintsValid: true,
		NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "test"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	caDER, e1 := x509.CreateCertificate(rand.Reader, ca, ca, key.Public(), key)
	leafDER, e2 := x509.CreateCertificate(rand.Reader, leaf, ca, key.Public(), key)
	keyDER, e3 := x509.MarshalPKCS8PrivateKey(key)
	errtest.None(t, errors.Join(e1, e2, e3))
	for name, b := range map[string]*pem.Block{
		"ca.pem": {Type: "CERTIFICATE", Bytes: caDER}, "cert.pem": {Type: "CERTIFICATE", Bytes: leafDER},
		"key.pem": {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		errtest.None(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(b), 0o600))
	}
}

func TestExternalNoSpace(t *testing.T) {
	c := etcdtest.Start(t, 1, "--quota-backend-bytes", fmt.Sprint(16<<20))
	fillAndFree(t, dialTest(t, c))
}

func TestExternalBackup(t *testing.T) {
	s := dialTest(t, etcdtest.Start(t, 1))
	errtest.Get(s.Commit(t.Context(), store.Txn{Then: []store.Op{store.Put("k/a", []byte("1"))}}))(t)
	want, err := store.List(t.Context(), s, store.Prefix(""))
	errtest.None(t, err)
	dir := filepath.Join(t.TempDir(), "data")
	errtest.None(t, Restore(backupOf(t, s), dir))
	checkRestored(t, dir, want, want.Revision)
}
