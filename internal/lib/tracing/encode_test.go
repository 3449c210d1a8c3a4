package tracing

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"lull/internal/lib/errtest"
)

// everything returns ended spans with everything that a span can have.
func everything(t *testing.T) []sdk.ReadOnlySpan {
	t.Helper()
	spans := tracetest.NewSpanRecorder()
	limits := sdk.NewSpanLimits()
	limits.AttributeCountLimit, limits.EventCountLimit, limits.LinkCountLimit = 14, 2, 2
	limits.AttributePerEventCountLimit, limits.AttributePerLinkCountLimit = 1, 1
	p := sdk.NewTracerProvider(sdk.WithSpanProcessor(spans), sdk.WithRawSpanLimits(limits),
		sdk.WithResource(resource.NewWithAttributes("https://example.com/1.0", attribute.String("service.name", "lull"), attribute.Int("process.pid", 7))))
	tracer := p.Tracer("lull", trace.WithInstrumentationVersion("1.2"), trace.WithSchemaURL("https://example.com/2.0"), trace.WithInstrumentationAttributes(attribute.Bool("a", true)))
	state, err := trace.ParseTraceState("vendor=value,other=1")
	errtest.None(t, err)
	remote := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, TraceFlags: trace.FlagsSampled, TraceState: state, Remote: true})
	ctx, s := tracer.Start(trace.ContextWithSpanContext(context.Background(), remote), "everything", trace.WithSpanKind(trace.SpanKindServer))
	s.SetAttributes(attribute.Bool("yes", true), attribute.Bool("no", false), attribute.Int64("negative", -1), attribute.Int64("zero", 0), attribute.Float64("pi", 3.14),
		attribute.String("text", "für \x00 all"), attribute.String("empty", ""), attribute.BoolSlice("bools", []bool{true, false}), attribute.Int64Slice("ints", []int64{1, -2, 0}),
		attribute.Float64Slice("floats", []float64{0, -1.5}), attribute.StringSlice("strings", []string{"", "x"}), attribute.StringSlice("none", nil),
		attribute.KeyValue{Key: "bytes", Value: attribute.ByteSliceValue([]byte{0, 255})},
		attribute.KeyValue{Key: "map", Value: attribute.MapValue(attribute.String("k", "v"), attribute.KeyValue{Key: "list", Value: attribute.SliceValue(attribute.IntValue(1), attribute.StringValue("two"))})},
		attribute.Int("over the limit", 1))
	for range 3 {
		s.AddEvent("happened", trace.WithAttributes(attribute.Int("n", 1), attribute.Int("over the limit", 1)))
		s.AddLink(trace.Link{SpanContext: remote, Attributes: []attribute.KeyValue{attribute.Int("n", 1), attribute.Int("over the limit", 1)}})
	}
	s.SetStatus(codes.Error, "it failed")
	for kind := trace.SpanKindInternal; kind <= trace.SpanKindConsumer; kind++ {
		_, c := tracer.Start(ctx, "child", trace.WithSpanKind(kind), trace.WithTimestamp(time.Unix(1, 2)))
		c.SetStatus(codes.Ok, "ignored")
		c.End(trace.WithTimestamp(time.Unix(3, 4)))
	}
	_, plain := p.Tracer("another").Start(context.Background(), "")
	plain.End()
	s.End()
	return spans.Ended()
}

// sent returns the request that a collector at url receives from export.
func sent(t *testing.T, export func(url string)) *collector.ExportTraceServiceRequest {
	t.Helper()
	out := make(chan []byte, 1)
	web := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err == nil && r.Header.Get("Content-Encoding") == "gzip" {
			var z *gzip.Reader
			if z, err = gzip.NewReader(bytes.NewReader(b)); err == nil {
				b, err = io.ReadAll(z)
			}
		}
		if err != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("%s: %v", r.URL, err)
		}
		out <- b
	}))
	defer web.Close()
	export(web.URL)
	var m collector.ExportTraceServiceRequest
	errtest.None(t, proto.Unmarshal(<-out, &m))
	return &m
}

// TestEncode compares what a collector receives, plain and compressed, with what
// OpenTelemetry's own exporter sends for the same spans.
func TestEncode(t *testing.T) {
	spans := everything(t)
	want := sent(t, func(url string) {
		e, err := otlptracehttp.New(t.Context(), otlptracehttp.WithEndpointURL(url+"/v1/traces"))
		if err == nil {
			err = e.ExportSpans(t.Context(), spans)
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	for _, compression := range []string{"none", "gzip"} {
		got := sent(t, func(url string) {
			env := map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_COMPRESSION": compression}
			e, err := newExporter(func(name string) string { return env[name] }, "1.2", &http.Transport{})
			if err == nil {
				err = errors.Join(e.ExportSpans(t.Context(), spans), e.Shutdown(t.Context()))
			}
			if err != nil {
				t.Fatal(err)
			}
		})
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("compression %s: OpenTelemetry sends (-), lull sends (+):\n%s", compression, diff)
		}
	}
}

// answers is a collector that returns the responses one after the other.
type answers []*http.Response

func (a *answers) RoundTrip(*http.Request) (*http.Response, error) {
	r := (*a)[0]
	*a = (*a)[1:]
	return r, nil
}

func answer(code int, pairs ...string) *http.Response {
	r := &http.Response{StatusCode: code, Status: http.StatusText(code), Header: http.Header{}, Body: http.NoBody}
	for i := 0; i+1 < len(pairs); i += 2 {
		r.Header.Set(pairs[i], pairs[i+1])
	}
	return r
}

// TestBusy checks that spans are sent again to a collector that was busy, not
// before the time that it requested and not after the export's timeout. They are
// not sent again to a collector that refused them.
func TestBusy(t *testing.T) {
	spans := everything(t)
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			name        string
			answers     answers
			least, most time.Duration
			want        string
		}{
			{"busy twice", answers{answer(503), answer(429), answer(200)}, 0, 30 * time.Second, ""},
			{"says when", answers{answer(429, "Retry-After", "20"), answer(200)}, 20 * time.Second, 20 * time.Second, ""},
			{"busy for long", answers{answer(429, "Retry-After", "600"), answer(200)}, time.Minute, time.Minute, "Too Many Requests"},
			{"refuses", answers{answer(400), answer(200)}, 0, 0, "Bad Request"},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			begun := time.Now()
			err := (&exporter{url: "http://collector/v1/traces", http: &http.Client{Transport: &c.answers}}).ExportSpans(ctx, spans)
			if took := time.Since(begun); took < c.least || took > c.most || (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v after %s", c.name, err, took)
			}
			cancel()
		}
	})
}

// TestPartlyRejected checks that a partial rejection is an error with the
// collector's reason.
func TestPartlyRejected(t *testing.T) {
	r := answer(200, "Content-Type", "application/x-protobuf")
	b, err := proto.Marshal(&collector.ExportTraceServiceResponse{PartialSuccess: &collector.ExportTracePartialSuccess{RejectedSpans: 1, ErrorMessage: "too long"}})
	if err != nil {
		t.Fatal(err)
	}
	r.Body = io.NopCloser(bytes.NewReader(b))
	err = (&exporter{url: "http://collector/v1/traces", http: &http.Client{Transport: &answers{r}}}).ExportSpans(t.Context(), everything(t))
	if err == nil || !strings.Contains(err.Error(), "too long") {
		t.Errorf("got %v", err)
	}
}
