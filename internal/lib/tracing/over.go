package tracing

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"time"
)

// timeout is how long a collector may take unless the environment sets a limit.
const timeout = 10 * time.Second

// over returns a client that sends through t as configured in the environment.
// The exporter ignores the environment if it gets a custom client.
func over(t *http.Transport, getenv func(string) string) (*http.Client, error) {
	get := func(name string) string {
		if v := getenv("OTEL_EXPORTER_OTLP_TRACES_" + name); v != "" {
			return v
		}
		return getenv("OTEL_EXPORTER_OTLP_" + name)
	}
	c := &http.Client{Transport: t, Timeout: timeout}
	if v := get("TIMEOUT"); v != "" {
		ms, err := strconv.ParseUint(v, 10, 31)
		if err != nil {
			return nil, fmt.Errorf("cannot use OTEL_EXPORTER_OTLP_TIMEOUT %q: want milliseconds", v)
		}
		c.Timeout = time.Duration(ms) * time.Millisecond
	}
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if file := get("CERTIFICATE"); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("cannot read OTEL_EXPORTER_OTLP_CERTIFICATE: %w", err)
		}
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("cannot use OTEL_EXPORTER_OTLP_CERTIFICATE %s: it holds no certificate", file)
		}
	}
	if cert, key := get("CLIENT_CERTIFICATE"), get("CLIENT_KEY"); cert != "" && key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("cannot use OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE: %w", err)
		}
		conf.Certificates = []tls.Certificate{pair}
	}
	t.TLSClientConfig = conf
	return c, nil
}
