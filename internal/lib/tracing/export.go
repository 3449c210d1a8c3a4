package tracing

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"

	"lull/internal/lib/delay"
)

const (
	// timeout is how long a collector may take to answer unless the environment
	// sets a limit.
	timeout = 10 * time.Second
	// leastRetry and mostRetry bound the delay before the same spans are sent
	// again to a busy collector.
	leastRetry, mostRetry = 5 * time.Second, 30 * time.Second
	// maxAnswer bounds how much of a collector's answer is read, in bytes.
	maxAnswer = 64 << 10
)

// exporter sends spans by OTLP over HTTP.
type exporter struct {
	url    string
	header http.Header
	gzip   bool
	http   *http.Client
}

// newExporter returns an exporter as configured in the environment. It sends
// through t and replaces t's TLS settings.
func newExporter(getenv func(string) string, version string, t *http.Transport) (*exporter, error) {
	get := func(name string) string {
		if v := getenv("OTEL_EXPORTER_OTLP_TRACES_" + name); v != "" {
			return v
		}
		return getenv("OTEL_EXPORTER_OTLP_" + name)
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"} {
		if p := getenv(name); p != "" && p != "http/protobuf" {
			return nil, fmt.Errorf("%s is %q, and only http/protobuf is supported", name, p)
		}
	}
	e := &exporter{header: http.Header{}, http: &http.Client{Transport: t, Timeout: timeout}}
	at, err := url.Parse(get("ENDPOINT"))
	if err != nil || at.Host == "" || at.Scheme != "http" && at.Scheme != "https" {
		return nil, fmt.Errorf("cannot use OTEL_EXPORTER_OTLP_ENDPOINT %q: want http://host:port or https://host:port", get("ENDPOINT"))
	}
	if getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" {
		at = at.JoinPath("v1/traces") // OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, in contrast, is the whole URL
	}
	e.url = at.String()
	e.header.Set("Content-Type", "application/x-protobuf")
	e.header.Set("User-Agent", "lull/"+version)
	for pair := range strings.SplitSeq(get("HEADERS"), ",") {
		name, value, ok := strings.Cut(pair, "=")
		if value, err = url.PathUnescape(strings.TrimSpace(value)); strings.TrimSpace(pair) != "" && (!ok || err != nil) {
			return nil, errors.New("cannot use OTEL_EXPORTER_OTLP_HEADERS: want name=value,..., percent-encoded") // the error omits the value, which may be secret
		}
		if ok {
			e.header.Set(strings.TrimSpace(name), value)
		}
	}
	switch c := get("COMPRESSION"); c {
	case "", "none":
	case "gzip":
		e.gzip = true
		e.header.Set("Content-Encoding", "gzip")
	default:
		return nil, fmt.Errorf("cannot use OTEL_EXPORTER_OTLP_COMPRESSION %q: want gzip or none", c)
	}
	if v := get("TIMEOUT"); v != "" {
		ms, err := strconv.ParseUint(v, 10, 31)
		if err != nil {
			return nil, fmt.Errorf("cannot use OTEL_EXPORTER_OTLP_TIMEOUT %q: want milliseconds", v)
		}
		e.http.Timeout = time.Duration(ms) * time.Millisecond
	}
	t.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	if file := get("CERTIFICATE"); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("cannot read OTEL_EXPORTER_OTLP_CERTIFICATE: %w", err)
		}
		t.TLSClientConfig.RootCAs = x509.NewCertPool()
		if !t.TLSClientConfig.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("cannot use OTEL_EXPORTER_OTLP_CERTIFICATE %s: it contains no certificate", file)
		}
	}
	if cert, key := get("CLIENT_CERTIFICATE"), get("CLIENT_KEY"); cert != "" && key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("cannot use OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE: %w", err)
		}
		t.TLSClientConfig.Certificates = []tls.Certificate{pair}
	}
	return e, nil
}

// ExportSpans implements sdk.SpanExporter. While the collector is too busy, it
// retries until ctx ends.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	if len(spans) == 0 {
		return nil
	}
	body := encode(spans)
	if e.gzip {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, _ = z.Write(body) // a bytes.Buffer cannot fail
		_ = z.Close()
		body = b.Bytes()
	}
	for failures := 0; ; failures++ {
		wait, err := e.send(ctx, body)
		if err == nil || wait == 0 {
			return err
		}
		if delay.For(ctx, max(wait, delay.Backoff(failures, leastRetry, mostRetry))) != nil {
			return err
		}
	}
}

// busy lists the statuses by which a collector reports that it may accept the
// same spans later.
var busy = []int{http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout}

// send sends one request. retry is positive if the collector may accept the
// request later, and is then at least the delay that the collector asks for.
func (e *exporter) send(ctx context.Context, body []byte) (retry time.Duration, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	r.Header = e.header.Clone()
	resp, err := e.http.Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	answer, _ := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	switch {
	case slices.Contains(busy, resp.StatusCode):
		s, _ := strconv.ParseUint(resp.Header.Get("Retry-After"), 10, 16)
		return max(time.Second, time.Duration(s)*time.Second), fmt.Errorf("the collector answered %s", resp.Status)
	case resp.StatusCode/100 != 2:
		return 0, fmt.Errorf("the collector answered %s: %.200q", resp.Status, answer)
	case len(answer) > 2 && resp.Header.Get("Content-Type") == "application/x-protobuf": // contains more than an empty partial_success
		return 0, fmt.Errorf("the collector rejected a part of the spans: %.200q", answer)
	}
	return 0, nil
}

// Shutdown implements sdk.SpanExporter.
func (e *exporter) Shutdown(context.Context) error {
	e.http.CloseIdleConnections()
	return nil
}
