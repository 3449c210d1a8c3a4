package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"lull/internal/fleet/sealed"
	"lull/internal/store"
)

// ExternalConfig configures the connection to an existing cluster.
type ExternalConfig struct {
	// Endpoints are URLs, all http or all https.
	Endpoints []string
	// CAFile contains the certificate authorities of the servers, in PEM; empty
	// means the system's. CertFile and KeyFile identify this client and require
	// https.
	CAFile, CertFile, KeyFile string
	// Username and Password are those of an etcd user; without https they are
	// sent in the clear.
	Username string
	Password sealed.Plain
	// Logger receives the client's log; nil discards it.
	Logger *slog.Logger
	// CallTimeout bounds each call; 0 means DefaultCallTimeout.
	CallTimeout time.Duration
	// Maintain lets Run compact and defragment the cluster. Leave it unset for a
	// cluster that other programs use too: compaction affects the whole key
	// space.
	Maintain bool
	// KeepRevisions has the meaning of EmbeddedConfig.KeepRevisions.
	KeepRevisions int64
}

// Validate returns every fault of c.
func (c ExternalConfig) Validate() error {
	var errs []error
	if len(c.Endpoints) == 0 {
		errs = append(errs, errors.New("cannot reach etcd without endpoints"))
	}
	secure := 0
	for _, e := range c.Endpoints {
		u, err := url.Parse(e)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("cannot use etcd endpoint: %w", err))
		case u.Scheme != "http" && u.Scheme != "https", u.Host == "", u.Path != "" && u.Path != "/", u.User != nil:
			errs = append(errs, fmt.Errorf("cannot use etcd endpoint %q: want http://host:port or https://host:port", u.Redacted()))
		case u.Scheme == "https":
			secure++
		}
	}
	if secure > 0 && secure < len(c.Endpoints) {
		errs = append(errs, errors.New("cannot mix http and https etcd endpoints"))
	}
	if secure == 0 && (c.CAFile != "" || c.CertFile != "" || c.KeyFile != "") {
		errs = append(errs, errors.New("cannot use certificates with http etcd endpoints"))
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		errs = append(errs, errors.New("cannot use an etcd client certificate without its key, or a key without its certificate"))
	}
	if c.Password != "" && c.Username == "" {
		errs = append(errs, errors.New("cannot use an etcd password without a user"))
	}
	return errors.Join(errs...)
}

func (c ExternalConfig) tls() (*tls.Config, error) {
	u, err := url.Parse(c.Endpoints[0])
	if err != nil || u.Scheme != "https" {
		return nil, err
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CAFile != "" {
		pem, err := os.ReadFile(c.CAFile)
		if err != nil {
			return nil, fmt.Errorf("cannot read etcd CA: %w", err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("cannot read etcd CA %q: it contains no certificate", c.CAFile)
		}
	}
	if c.CertFile != "" {
		// The files are read at every handshake, so that a renewed certificate is
		// used.
		if _, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile); err != nil {
			return nil, fmt.Errorf("cannot read etcd client certificate: %w", err)
		}
		t.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			cert, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
			return &cert, err
		}
	}
	return t, nil
}

// Dial connects to an existing cluster and returns an error if it does not
// answer.
func Dial(ctx context.Context, cfg ExternalConfig) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.KeepRevisions == 0 {
		cfg.KeepRevisions = defaultKeep
	}
	secure, err := cfg.tls()
	if err != nil {
		return nil, err
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: cfg.Endpoints, TLS: secure,
		Username: cfg.Username, Password: string(cfg.Password),
		DialTimeout:          DefaultCallTimeout,
		DialKeepAliveTime:    5 * time.Second,
		DialKeepAliveTimeout: 3 * time.Second,
		MaxCallSendMsgSize:   4 << 20,
		Logger:               zapLogger(cfg.Logger),
	})
	if err != nil {
		return nil, readError("reach etcd", err)
	}
	s := newStore(client, cfg.Logger)
	s.external = true
	if cfg.CallTimeout > 0 {
		s.callTimeout = cfg.CallTimeout
	}
	if cfg.Maintain {
		s.keep = cfg.KeepRevisions
		s.defragment = s.defragmentMembers
	}
	if _, err := s.Range(ctx, store.Query{Keys: store.Key("lull"), KeysOnly: true}); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// defragmentMembers defragments one member after the other, because a member does
// not respond while it is defragmented.
func (s *Store) defragmentMembers(ctx context.Context) error {
	var errs []error
	for _, endpoint := range s.client.Endpoints() {
		_, err := s.client.Defragment(ctx, endpoint)
		if err != nil {
			errs = append(errs, fmt.Errorf("cannot defragment etcd member %q: %w", endpoint, err))
		}
	}
	return errors.Join(errs...)
}
