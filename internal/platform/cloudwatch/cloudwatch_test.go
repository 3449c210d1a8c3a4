package cloudwatch

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/fxamacker/cbor/v2"
)

var now = time.Date(2025, 11, 20, 12, 0, 0, 0, time.UTC)

// query and result are in the API's wire format, rpc-v2-cbor.
type query struct {
	ID         string `cbor:"Id"`
	MetricStat struct {
		Metric struct {
			Namespace, MetricName string
			Dimensions            []struct{ Name, Value string }
		}
		Period int
		Stat   string
	}
}

type request struct {
	MetricDataQueries []query
	NextToken         string
}

type result struct {
	ID         string     `cbor:"Id"`
	StatusCode string     `cbor:"StatusCode"`
	Timestamps []cbor.Tag `cbor:"Timestamps"`
	Values     []float64  `cbor:"Values"`
	Messages   []cbor.Tag `cbor:"Messages,omitempty"`
}

type response struct {
	MetricDataResults []result
	NextToken         string `cbor:",omitempty"`
}

// at returns a result for q whose values have times that are minutes before now,
// newest first.
func at(q query, minutes int, values ...float64) result {
	r := result{ID: q.ID, StatusCode: "Complete"}
	for i, v := range values {
		when := now.Add(-time.Duration(minutes+5*i) * time.Minute)
		r.Timestamps = append(r.Timestamps, cbor.Tag{Number: 1, Content: float64(when.Unix())})
		r.Values = append(r.Values, v)
	}
	return r
}

func (q query) instance() string { return q.MetricStat.Metric.Dimensions[0].Value }

// fake is a server that answers GetMetricData.
type fake struct {
	*httptest.Server
	mu     sync.Mutex
	asked  []request
	answer func(request) (response, error)
}

func newFake(t *testing.T, answer func(request) (response, error)) *fake {
	t.Helper()
	f := &fake{answer: answer}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	body, err := io.ReadAll(r.Body)
	var in request
	if err == nil {
		err = cbor.Unmarshal(body, &in)
	}
	if err != nil || !strings.HasSuffix(r.URL.Path, "/operation/GetMetricData") {
		http.Error(w, fmt.Sprint(r.URL.Path, err), http.StatusTeapot)
		return
	}
	f.asked = append(f.asked, in)
	w.Header().Set("Content-Type", "application/cbor")
	w.Header().Set("Smithy-Protocol", "rpc-v2-cbor")
	out, err := f.answer(in)
	var text []byte
	if err == nil {
		text, err = cbor.Marshal(out)
	}
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		text, _ = cbor.Marshal(map[string]string{"__type": err.Error(), "message": "because"})
	}
	w.Write(text)
}

// plain hides io.WriterTo of the SDK's request bodies, which makes a request fail
// if the answer comes too early. Outside of tests, ec2.Access.Load does this.
type plain struct{ client *http.Client }

func (p plain) Do(r *http.Request) (*http.Response, error) {
	r = r.WithContext(r.Context())
	r.Body = struct{ io.ReadCloser }{r.Body}
	return p.client.Do(r)
}

func (f *fake) client(t *testing.T, change func(*Config)) *Client {
	t.Helper()
	cfg := Config{
		AWS:      aws.Config{Region: "eu-test-1", Credentials: credentials.NewStaticCredentialsProvider("a", "b", ""), HTTPClient: plain{f.Client()}},
		Endpoint: f.URL, Attempts: 1, Rate: 1e6, Burst: 1e6,
	}
	if change != nil {
		change(&cfg)
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func ids(n int) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf("i-%017x", i))
	}
	return out
}

func TestReadBatches(t *testing.T) {
	f := newFake(t, func(in request) (response, error) {
		var out response
		for _, q := range in.MetricDataQueries {
			switch q.MetricStat.Metric.MetricName {
			case "CPUUtilization":
				out.MetricDataResults = append(out.MetricDataResults, at(q, 5, 7.5, 50))
			case "mem_used_percent":
				out.MetricDataResults = append(out.MetricDataResults, at(q, 5))
			}
		}
		return out, nil
	})
	got := f.client(t, nil).Read(t.Context(), append(ids(400), ids(1)...), time.Time{}, now)
	if len(got) != 400 || len(f.asked) != 3 {
		t.Fatalf("%d instances in %d calls", len(got), len(f.asked))
	}
	for _, in := range f.asked {
		if len(in.MetricDataQueries) > maxQueries {
			t.Errorf("%d queries in a call", len(in.MetricDataQueries))
		}
	}
	for id, r := range got {
		want := Readings{
			CPU:    {State: Present, Value: 7.5, At: now},
			Memory: {State: Missing}, Disk: {State: Missing},
		}
		if r = plainly(r); !reflect.DeepEqual(r, want) {
			t.Fatalf("%s: %+v, want %+v", id, r, want)
		}
	}
	q := f.asked[0].MetricDataQueries[0]
	if m := q.MetricStat; m.Metric.Namespace != "AWS/EC2" || m.Metric.MetricName != "CPUUtilization" || m.Period != 300 ||
		m.Stat != "Average" || m.Metric.Dimensions[0].Name != "InstanceId" || q.instance() != ids(1)[0] {
		t.Errorf("asked for %+v", q)
	}
}

func TestReadPages(t *testing.T) {
	f := newFake(t, func(in request) (response, error) {
		q := in.MetricDataQueries
		switch in.NextToken {
		case "":
			partial := at(q[0], 10, 1)
			partial.StatusCode = "PartialData"
			return response{[]result{partial}, "p2"}, nil
		case "p2":
			return response{[]result{at(q[0], 5, 2), at(q[1], 5, 30)}, "p3"}, nil
		}
		return response{[]result{at(q[0], 0), at(q[2], 5, 40)}, ""}, nil
	})
	got := f.client(t, nil).Read(t.Context(), ids(1), time.Time{}, now)[ids(1)[0]]
	if w := got[CPU].Windows; len(w) == 0 || !w[len(w)-1].End.Equal(got[CPU].At) {
		t.Errorf("windows %+v, want the newest last", w)
	}
	got = plainly(got)
	if want := (Readings{{State: Present, Value: 2, At: now}, {State: Present, Value: 30, At: now}, {State: Present, Value: 40, At: now}}); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// plainly returns r without its Windows, so that readings can be compared by
// their newest value.
func plainly(r Readings) Readings {
	for i := range r {
		r[i].Windows = nil
	}
	return r
}

func TestReadStates(t *testing.T) {
	f := newFake(t, func(in request) (response, error) {
		q := in.MetricDataQueries
		forbidden, broken := at(q[0], 0), at(q[1], 5, 12)
		forbidden.StatusCode, broken.StatusCode = "Forbidden", "InternalError"
		return response{MetricDataResults: []result{forbidden, broken, at(q[2], 5, -1)}}, nil
	})
	got := f.client(t, nil).Read(t.Context(), ids(1), time.Time{}, now)[ids(1)[0]]
	if got[CPU].State != Failed || got[CPU].Err == nil || !strings.Contains(got[CPU].Err.Error(), "cpu_utilization") {
		t.Errorf("a forbidden metric: %+v", got[CPU])
	}
	if got[Memory].State != Present || got[Memory].Value != 12 {
		t.Errorf("a metric with a value and an error: %+v", got[Memory])
	}
	if got[Disk].State != Missing {
		t.Errorf("a value that cannot be: %+v", got[Disk])
	}
}

func TestReadFailedBatchLeavesTheOthers(t *testing.T) {
	var answer func(request) (response, error)
	f := newFake(t, func(in request) (response, error) { return answer(in) })
	c := f.client(t, nil)
	bad := ids(200)[0]
	for name, fail := range map[string]func(request) (response, error){
		"refused":       func(request) (response, error) { return response{}, fmt.Errorf("AccessDeniedException") },
		"not asked for": func(request) (response, error) { return response{MetricDataResults: []result{{ID: "q999_0"}}}, nil },
		"half a result": func(in request) (response, error) {
			r := at(in.MetricDataQueries[0], 5, 1)
			r.Values = nil
			return response{MetricDataResults: []result{r}}, nil
		},
		"endless": func(request) (response, error) { return response{NextToken: "again"}, nil },
	} {
		answer = func(in request) (response, error) {
			if in.MetricDataQueries[0].instance() == bad {
				return fail(in)
			}
			return response{MetricDataResults: []result{at(in.MetricDataQueries[0], 5, 1)}}, nil
		}
		got := c.Read(t.Context(), ids(200), time.Time{}, now)
		failed, missing, present := 0, 0, 0
		for _, r := range got {
			for _, m := range r {
				switch m.State {
				case Failed:
					failed++
				case Missing:
					missing++
				case Present:
					present++
				}
			}
		}
		if want := maxQueries / 3 * 3; failed != want || present != 1 || missing != 600-want-1 {
			t.Errorf("%s: %d failed, %d missing, %d present", name, failed, missing, present)
		}
		if err := got[bad][CPU].Err; err == nil || !strings.HasPrefix(err.Error(), "cannot ") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAgentDimensions(t *testing.T) {
	f := newFake(t, func(in request) (response, error) { return response{}, nil })
	c := f.client(t, func(cfg *Config) {
		cfg.Disk = AgentMetric{Namespace: "CWAgent", Name: "disk_used_percent", Dimensions: map[string]string{"path": "/"}}
	})
	c.Read(t.Context(), ids(1), time.Time{}, now)
	if d := f.asked[0].MetricDataQueries[Disk].MetricStat.Metric.Dimensions; len(d) != 2 || d[1].Name != "path" || d[1].Value != "/" {
		t.Errorf("asked with %+v", d)
	}
	if got := c.Read(t.Context(), nil, time.Time{}, now); len(got) != 0 || len(f.asked) != 1 {
		t.Errorf("no worker was asked for, yet %d calls", len(f.asked))
	}
}

func TestNewRefuses(t *testing.T) {
	for _, cfg := range []Config{{Period: time.Millisecond}, {Window: time.Minute}, {Period: 48 * time.Hour, Window: 96 * time.Hour}} {
		if _, err := New(cfg); err == nil {
			t.Errorf("window %v, period %v was taken", cfg.Window, cfg.Period)
		}
	}
}

func FuzzQueryID(f *testing.F) {
	for _, s := range []string{"q0_0", "q165_2", "q01_0", "q1_9", "", "q-1_0", "q1_0 "} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if i, m, ok := parseQueryID(s, 166); ok && queryID(i, m) != s {
			t.Errorf("%q was taken for %d, %v", s, i, m)
		}
	})
}
