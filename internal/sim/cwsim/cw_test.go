package cwsim

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"lull/internal/sim/wire"
	"lull/internal/sim/world"
)

func simulator(t testing.TB) *CloudWatch {
	t.Helper()
	w, err := world.New(world.Config{Workers: []world.WorkerConfig{{Name: "h", Image: "ami-0000000000000d012"}}})
	if err != nil {
		t.Fatal(err)
	}
	return New(w)
}

const authorization = "AWS4-HMAC-SHA256 Credential=AKIA/20260101/us-east-1/monitoring/aws4_request, Signature=0"

// FuzzCBOR checks that every operation answers any body in CBOR, and never with a
// server error.
func FuzzCBOR(f *testing.F) {
	h := simulator(f)
	now := time.Now()
	good, err := encoder.Marshal(map[string]any{"StartTime": now.Add(-time.Hour), "EndTime": now, "MetricDataQueries": []any{map[string]any{
		"Id": "a", "MetricStat": map[string]any{"Stat": "Average", "Period": 60, "Metric": map[string]any{"Namespace": "AWS/EC2", "MetricName": "CPUUtilization"}},
	}}})
	if err != nil {
		f.Fatal(err)
	}
	for _, op := range []string{"GetMetricData", "GetMetricStatistics", "ListMetrics", "PutMetricData", "Else"} {
		f.Add(op, good)
		f.Add(op, []byte{0xbf, 0xff})
		f.Add(op, []byte{0x9b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
		f.Add(op, bytes.Repeat([]byte{0x81}, 100))
		f.Add(op, []byte{})
	}
	f.Fuzz(func(t *testing.T, op string, body []byte) {
		r := httptest.NewRequest("POST", CBORPath, bytes.NewReader(body))
		r.URL.Path = CBORPath + op
		r.Header.Set("Authorization", authorization)
		r.Header.Set("Smithy-Protocol", "rpc-v2-cbor")
		w := httptest.NewRecorder()
		h.ServeCBOR(w, r)
		var v any
		if w.Code >= 500 || decoder.Unmarshal(w.Body.Bytes(), &v) != nil {
			t.Errorf("status %d, body %x", w.Code, w.Body.Bytes())
		}
	})
}

// FuzzQuery checks the same for the query protocol.
func FuzzQuery(f *testing.F) {
	h := simulator(f)
	f.Add("Action=GetMetricData&StartTime=2026-01-01T00:00:00Z&EndTime=2026-01-02&MetricDataQueries.member.1.Id=a&MetricDataQueries.member.1.MetricStat.Stat=Sum")
	f.Add("Action=GetMetricStatistics&Period=60&Statistics.member.1=Sum")
	f.Add("Action=PutMetricData&Namespace=x&MetricData.member.1.MetricName=m&MetricData.member.1.Value=NaN")
	f.Add("Action=ListMetrics&Dimensions.member.1.Name=x")
	f.Fuzz(func(t *testing.T, body string) {
		form, err := wire.Parse(body)
		if err != nil {
			return
		}
		r := httptest.NewRequest("POST", "/", nil)
		r.Header.Set("Authorization", authorization)
		w := httptest.NewRecorder()
		h.ServeQuery(w, r, form)
		if w.Code >= 500 {
			t.Errorf("status %d", w.Code)
		}
	})
}

func TestProtocolErrors(t *testing.T) {
	h := simulator(t)
	for _, x := range []struct {
		name, path, protocol, auth string
		status                     int
		code                       string
	}{
		{"no protocol header", CBORPath + "GetMetricData", "", authorization, 400, "UnknownOperationException"},
		{"unknown operation", CBORPath + "DeleteAlarms", "rpc-v2-cbor", authorization, 400, "UnknownOperationException"},
		{"not signed", CBORPath + "GetMetricData", "rpc-v2-cbor", "", 403, "MissingAuthenticationToken"},
		{"empty request", CBORPath + "GetMetricData", "rpc-v2-cbor", authorization, 400, "ValidationError"},
	} {
		r := httptest.NewRequest(http.MethodPost, x.path, nil)
		r.Header.Set("Smithy-Protocol", x.protocol)
		r.Header.Set("Authorization", x.auth)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != x.status || !strings.HasPrefix(w.Header().Get("X-Amzn-Query-Error"), x.code+";") {
			t.Errorf("%s: %d %s", x.name, w.Code, w.Header().Get("X-Amzn-Query-Error"))
		}
	}
}
