package cml

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
	"testing"
	"time"
)

const benchBytes = 100 << 20

// benchArray returns the benchmark's array, which is generated once.
func benchArray(b *testing.B) []byte {
	text, err := io.ReadAll(newHistoryReader(benchBytes))
	if err != nil {
		b.Fatalf("cannot make the array: %v", err)
	}
	return text
}

// stream counts the elements of text with encoding/json's streaming decoder, used
// token by token.
func stream(text []byte) (int, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	if _, err := dec.Token(); err != nil {
		return 0, err
	}
	n := 0
	for dec.More() {
		var e struct {
			Category  string          `json:"category"`
			Timestamp string          `json:"timestamp"`
			Data      json.RawMessage `json:"data"`
		}
		if err := dec.Decode(&e); err != nil {
			return n, err
		}
		n++
	}
	_, err := dec.Token()
	return n, err
}

// BenchmarkTelemetry alternates between the filter and a streaming encoding/json
// Decoder on the same 100 MB array. It reports the best throughput of each,
// because other load on the machine can only slow them down, and their ratio.
func BenchmarkTelemetry(b *testing.B) {
	text := benchArray(b)
	f, err := NewFilter(defaultFilterConfig())
	if err != nil {
		b.Fatal(err)
	}
	now := historyStart.AddDate(50, 0, 0)
	ours, theirs := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
	for b.Loop() {
		start := time.Now()
		a := f.Read(bytes.NewReader(text), now, Offset{Known: true}, nil)
		ours = min(ours, time.Since(start))
		start = time.Now()
		n, err := stream(text)
		theirs = min(theirs, time.Since(start))
		if err != nil || a.Unknown != ReasonNone || int64(n) != a.Counts.Events {
			b.Fatalf("decoder: %d events, error %v; filter: %d events, %v", n, err, a.Counts.Events, a.Err)
		}
	}
	rate := func(d time.Duration) float64 { return float64(len(text)) / 1e6 / d.Seconds() }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(rate(ours), "filter-MB/s")
	b.ReportMetric(rate(theirs), "decoder-MB/s")
	b.ReportMetric(theirs.Seconds()/ours.Seconds(), "ratio")
}

// BenchmarkFilter measures the filter alone, for profiles.
func BenchmarkFilter(b *testing.B) {
	text := benchArray(b)
	f, err := NewFilter(defaultFilterConfig())
	if err != nil {
		b.Fatal(err)
	}
	now := historyStart.AddDate(50, 0, 0)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		f.Read(bytes.NewReader(text), now, Offset{Known: true}, nil)
	}
}
