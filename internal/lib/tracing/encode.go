package tracing

import (
	"math"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/instrumentation"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/encoding/protowire"
)

// message is an encoded protobuf message. OpenTelemetry's own encoder would add 6
// MB of gRPC and reflection to the binary. TestEncode compares this encoder with
// it.
type message []byte

func (m *message) bytes(n protowire.Number, b []byte) {
	if len(b) > 0 {
		m.embed(n, b)
	}
}

// embed adds b as a field, even if it is empty.
func (m *message) embed(n protowire.Number, b []byte) {
	*m = protowire.AppendBytes(protowire.AppendTag(*m, n, protowire.BytesType), b)
}

func (m *message) text(n protowire.Number, s string) { m.bytes(n, []byte(s)) }

func (m *message) varint(n protowire.Number, v uint64) {
	*m = protowire.AppendVarint(protowire.AppendTag(*m, n, protowire.VarintType), v)
}

// count adds the number of dropped items as a field, unless it is 0.
func (m *message) count(n protowire.Number, v int) {
	if v > 0 {
		m.varint(n, uint64(v))
	}
}

func (m *message) fixed64(n protowire.Number, v uint64) {
	*m = protowire.AppendFixed64(protowire.AppendTag(*m, n, protowire.Fixed64Type), v)
}

// encode returns an ExportTraceServiceRequest for spans, all of which have the
// same resource.
func encode(spans []sdk.ReadOnlySpan) []byte {
	var resource, rs, request message
	resource.attributes(1, spans[0].Resource().Attributes())
	rs.embed(1, resource)
	byScope := map[instrumentation.Scope][]sdk.ReadOnlySpan{}
	var scopes []instrumentation.Scope
	for _, s := range spans {
		in := s.InstrumentationScope()
		if byScope[in] == nil {
			scopes = append(scopes, in)
		}
		byScope[in] = append(byScope[in], s)
	}
	for _, in := range scopes {
		var scope, ss message
		scope.text(1, in.Name)
		scope.text(2, in.Version)
		scope.attributes(3, in.Attributes.ToSlice())
		ss.embed(1, scope)
		for _, s := range byScope[in] {
			ss.embed(2, span(s))
		}
		ss.text(3, in.SchemaURL)
		rs.embed(2, ss)
	}
	rs.text(3, spans[0].Resource().SchemaURL())
	request.embed(1, rs)
	return request
}

func span(s sdk.ReadOnlySpan) (m message) {
	c := s.SpanContext()
	m.ids(c)
	m.text(3, c.TraceState().String())
	if id := s.Parent().SpanID(); id.IsValid() {
		m.bytes(4, id[:])
	}
	m.text(5, s.Name())
	m.varint(6, uint64(s.SpanKind())) // the two enumerations have the same numbers
	m.fixed64(7, uint64(s.StartTime().UnixNano()))
	m.fixed64(8, uint64(s.EndTime().UnixNano()))
	m.attributes(9, s.Attributes())
	m.count(10, s.DroppedAttributes())
	for _, e := range s.Events() {
		var event message
		event.fixed64(1, uint64(e.Time.UnixNano()))
		event.text(2, e.Name)
		event.attributes(3, e.Attributes)
		event.count(4, e.DroppedAttributeCount)
		m.embed(11, event)
	}
	m.count(12, s.DroppedEvents())
	for _, l := range s.Links() {
		var link message
		link.ids(l.SpanContext)
		link.attributes(4, l.Attributes)
		link.count(5, l.DroppedAttributeCount)
		link.flags(6, l.SpanContext.TraceFlags(), l.SpanContext)
		m.embed(13, link)
	}
	m.count(14, s.DroppedLinks())
	var status message
	status.text(2, s.Status().Description)
	switch s.Status().Code { // unlike the protocol, OpenTelemetry numbers OK and Error the other way round
	case codes.Ok:
		status.varint(3, 1)
	case codes.Error:
		status.varint(3, 2)
	}
	m.embed(15, status)
	m.flags(16, c.TraceFlags(), s.Parent())
	return m
}

func (m *message) ids(c trace.SpanContext) {
	t, s := c.TraceID(), c.SpanID()
	m.bytes(1, t[:])
	m.bytes(2, s[:])
}

// flags adds the trace flags of a context, and whether its parent is in another
// process.
func (m *message) flags(n protowire.Number, f trace.TraceFlags, parent trace.SpanContext) {
	const known, remote = 1 << 8, 1 << 9
	v := uint32(f) | known
	if parent.IsRemote() {
		v |= remote
	}
	*m = protowire.AppendFixed32(protowire.AppendTag(*m, n, protowire.Fixed32Type), v)
}

func (m *message) attributes(n protowire.Number, l []attribute.KeyValue) {
	for _, kv := range l {
		var pair message
		pair.text(1, string(kv.Key))
		pair.embed(2, value(kv.Value))
		m.embed(n, pair)
	}
}

// value returns an AnyValue.
func value(v attribute.Value) (m message) {
	switch v.Type() {
	case attribute.STRING:
		m.embed(1, []byte(v.AsString()))
	case attribute.BOOL:
		m.varint(2, protowire.EncodeBool(v.AsBool()))
	case attribute.INT64:
		m.varint(3, uint64(v.AsInt64()))
	case attribute.FLOAT64:
		m.fixed64(4, math.Float64bits(v.AsFloat64()))
	case attribute.BOOLSLICE:
		m.embed(5, list(v.AsBoolSlice(), attribute.BoolValue))
	case attribute.INT64SLICE:
		m.embed(5, list(v.AsInt64Slice(), attribute.Int64Value))
	case attribute.FLOAT64SLICE:
		m.embed(5, list(v.AsFloat64Slice(), attribute.Float64Value))
	case attribute.STRINGSLICE:
		m.embed(5, list(v.AsStringSlice(), attribute.StringValue))
	case attribute.SLICE:
		m.embed(5, list(v.AsSlice(), func(v attribute.Value) attribute.Value { return v }))
	case attribute.MAP:
		var pairs message
		pairs.attributes(1, v.AsMap())
		m.embed(6, pairs)
	case attribute.BYTESLICE:
		m.embed(7, v.AsByteSlice())
	}
	return m
}

func list[T any](l []T, as func(T) attribute.Value) (m message) {
	for _, v := range l {
		m.embed(1, value(as(v)))
	}
	return m
}
