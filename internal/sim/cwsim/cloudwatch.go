// Package cwsim implements CloudWatch for a simulated world, in both protocols of
// current clients: rpc-v2-cbor (the AWS SDKs) and query (awscli 1 and older 2). It
// serves GetMetricData with CloudWatch's limits and pagination, GetMetricStatistics,
// ListMetrics and PutMetricData.
//
// Everything else is missing, such as metric math, alarms and dashboards.
package cwsim

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"lull/internal/sim/fault"
	"lull/internal/sim/wire"
	"lull/internal/sim/world"
)

// Limits of GetMetricData.
const (
	maxQueries    = 500
	maxDatapoints = 100_800
)

// CloudWatch serves the CloudWatch API.
type CloudWatch struct{ w *world.World }

// New returns a CloudWatch for w.
func New(w *world.World) *CloudWatch { return &CloudWatch{w} }

// Shapes of requests and answers, shared by both protocols.
type dimension struct {
	Name  string `cbor:"Name"`
	Value string `cbor:"Value,omitempty"`
}

type metric struct {
	Namespace  string      `cbor:"Namespace"`
	Name       string      `cbor:"MetricName"`
	Dimensions []dimension `cbor:"Dimensions"`
}

type stat struct {
	Metric metric `cbor:"Metric"`
	Period int    `cbor:"Period"`
	Stat   string `cbor:"Stat"`
	Unit   string `cbor:"Unit"`
}

type dataQuery struct {
	ID         string `cbor:"Id"`
	Label      string `cbor:"Label"`
	Expression string `cbor:"Expression"`
	Stat       *stat  `cbor:"MetricStat"`
	ReturnData *bool  `cbor:"ReturnData"`
}

type dataRequest struct {
	Queries       []dataQuery `cbor:"MetricDataQueries"`
	Start         time.Time   `cbor:"StartTime"`
	End           time.Time   `cbor:"EndTime"`
	NextToken     string      `cbor:"NextToken"`
	ScanBy        string      `cbor:"ScanBy"`
	MaxDatapoints int         `cbor:"MaxDatapoints"`
}

type dataResult struct {
	ID         string      `cbor:"Id"`
	Label      string      `cbor:"Label"`
	Timestamps []time.Time `cbor:"Timestamps"`
	Values     []float64   `cbor:"Values"`
	StatusCode string      `cbor:"StatusCode"`
}

type dataAnswer struct {
	Results   []dataResult `cbor:"MetricDataResults"`
	NextToken string       `cbor:"NextToken,omitempty"`
	Messages  []string     `cbor:"Messages"`
}

type statsRequest struct {
	metric
	Start      time.Time `cbor:"StartTime"`
	End        time.Time `cbor:"EndTime"`
	Period     int       `cbor:"Period"`
	Statistics []string  `cbor:"Statistics"`
}

type datapoint struct {
	Timestamp   time.Time `cbor:"Timestamp"`
	Average     *float64  `cbor:"Average,omitempty"`
	Sum         *float64  `cbor:"Sum,omitempty"`
	Minimum     *float64  `cbor:"Minimum,omitempty"`
	Maximum     *float64  `cbor:"Maximum,omitempty"`
	SampleCount *float64  `cbor:"SampleCount,omitempty"`
	Unit        string    `cbor:"Unit"`
}

type statsAnswer struct {
	Label      string      `cbor:"Label"`
	Datapoints []datapoint `cbor:"Datapoints"`
}

type listRequest struct {
	Namespace  string      `cbor:"Namespace"`
	Name       string      `cbor:"MetricName"`
	Dimensions []dimension `cbor:"Dimensions"`
}

type listAnswer struct {
	Metrics []metric `cbor:"Metrics"`
}

type putDatum struct {
	Name       string      `cbor:"MetricName"`
	Dimensions []dimension `cbor:"Dimensions"`
	Timestamp  time.Time   `cbor:"Timestamp"`
	Value      float64     `cbor:"Value"`
}

type putRequest struct {
	Namespace string     `cbor:"Namespace"`
	Data      []putDatum `cbor:"MetricData"`
}

// caller is the identity of a client, and its region.
type caller struct {
	who    world.Principal
	region string
}

func (c caller) metric(ns, name string, dims []dimension) world.Metric {
	m := map[string]string{}
	for _, d := range dims {
		m[d.Name] = d.Value
	}
	return world.Metric{Account: c.who.Account, Region: c.region, Namespace: ns, Name: name, Dimensions: world.MakeTags(m)}
}

func invalid(format string, args ...any) error {
	return world.Refuse("ValidationError", format, args...)
}

// getMetricData returns one page. NextToken contains the query and where to continue.
func (h *CloudWatch) getMetricData(c caller, r dataRequest) (dataAnswer, error) {
	if err := r.check(); err != nil {
		return dataAnswer{}, err
	}
	limit := r.MaxDatapoints
	if limit == 0 {
		limit = maxDatapoints
	}
	firstQuery, firstPoint, err := parseToken(r.NextToken, len(r.Queries))
	if err != nil {
		return dataAnswer{}, err
	}
	out := dataAnswer{Results: []dataResult{}, Messages: []string{}}
	for k := firstQuery; k < len(r.Queries); k++ {
		q := r.Queries[k]
		if q.ReturnData != nil && !*q.ReturnData {
			continue
		}
		res := dataResult{ID: q.ID, Label: q.Label, StatusCode: "Complete", Timestamps: []time.Time{}, Values: []float64{}}
		if res.Label == "" {
			res.Label = q.Stat.Metric.Name
		}
		points := h.w.Points(c.metric(q.Stat.Metric.Namespace, q.Stat.Metric.Name, q.Stat.Metric.Dimensions), r.Start, r.End, time.Duration(q.Stat.Period)*time.Second)
		if r.ScanBy != "TimestampAscending" {
			slices.Reverse(points)
		}
		from := 0
		if k == firstQuery {
			from = min(firstPoint, len(points))
		}
		to := min(len(points), from+limit)
		for _, p := range points[from:to] {
			v, err := pick(p, q.Stat.Stat)
			if err != nil {
				return dataAnswer{}, err
			}
			res.Timestamps, res.Values = append(res.Timestamps, p.At), append(res.Values, v)
		}
		limit -= to - from
		if to < len(points) {
			res.StatusCode = "PartialData"
			out.NextToken = makeToken(k, to)
			out.Results = append(out.Results, res)
			return out, nil
		}
		out.Results = append(out.Results, res)
		if limit == 0 && k+1 < len(r.Queries) {
			out.NextToken = makeToken(k+1, 0)
			return out, nil
		}
	}
	return out, nil
}

func (r dataRequest) check() error {
	switch {
	case len(r.Queries) == 0:
		return invalid("The parameter MetricDataQueries is required.")
	case len(r.Queries) > maxQueries:
		return invalid("The collection MetricDataQueries must not have a size greater than %d.", maxQueries)
	case r.Start.IsZero() || r.End.IsZero():
		return invalid("The parameters StartTime and EndTime are required.")
	case !r.Start.Before(r.End):
		return invalid("The parameter StartTime must be less than the parameter EndTime.")
	case r.MaxDatapoints < 0 || r.MaxDatapoints > maxDatapoints:
		return invalid("MaxDatapoints must be between 1 and %d.", maxDatapoints)
	case r.ScanBy != "" && r.ScanBy != "TimestampAscending" && r.ScanBy != "TimestampDescending":
		return invalid("Value '%.40s' at 'scanBy' failed to satisfy constraint", r.ScanBy)
	}
	seen := map[string]bool{}
	for _, q := range r.Queries {
		switch {
		case q.ID == "" || q.ID[0] < 'a' || q.ID[0] > 'z':
			return invalid("The value %.40q for parameter MetricDataQueries.Id is not matching the expected pattern ^[a-z][a-zA-Z0-9_]*$", q.ID)
		case seen[q.ID]:
			return invalid("The values for parameter id in MetricDataQueries are not unique: %.40s", q.ID)
		case q.Stat == nil:
			return invalid("Query %.40s has no MetricStat; metric math is not simulated", q.ID)
		case badPeriod(q.Stat.Period):
			return invalid("Query %.40s: the period %d is not 1, 5, 10, 30 or a multiple of 60", q.ID, q.Stat.Period)
		}
		seen[q.ID] = true
	}
	return nil
}

func badPeriod(p int) bool {
	return p != 1 && p != 5 && p != 10 && p != 30 && (p < 60 || p%60 != 0 || p > 86400*30)
}

func pick(p world.Point, name string) (float64, error) {
	switch name {
	case "Average":
		return p.Avg, nil
	case "Sum":
		return p.Sum, nil
	case "Minimum":
		return p.Min, nil
	case "Maximum":
		return p.Max, nil
	case "SampleCount":
		return p.Count, nil
	}
	return 0, invalid("The statistic %.40q is not known", name)
}

func makeToken(query, point int) string { return fmt.Sprintf("cw-%d-%d", query, point) }

func parseToken(tok string, queries int) (query, point int, err error) {
	if tok == "" {
		return 0, 0, nil
	}
	part := strings.Split(tok, "-")
	if len(part) == 3 && part[0] == "cw" {
		var err1, err2 error
		query, err1 = strconv.Atoi(part[1])
		point, err2 = strconv.Atoi(part[2])
		if err1 == nil && err2 == nil && query >= 0 && query < queries && point >= 0 {
			return query, point, nil
		}
	}
	return 0, 0, world.Refuse("InvalidNextToken", "The next token specified is invalid.")
}

func (h *CloudWatch) getMetricStatistics(c caller, r statsRequest) (statsAnswer, error) {
	switch {
	case !r.Start.Before(r.End):
		return statsAnswer{}, world.Refuse("InvalidParameterCombination", "The parameter StartTime must be less than the parameter EndTime.")
	case badPeriod(r.Period):
		return statsAnswer{}, world.Refuse("InvalidParameterValue", "The period %d is not valid", r.Period)
	case len(r.Statistics) == 0:
		return statsAnswer{}, world.Refuse("InvalidParameterCombination", "At least one of the parameters Statistics and ExtendedStatistics must be specified.")
	}
	out := statsAnswer{Label: r.Name, Datapoints: []datapoint{}}
	for _, p := range h.w.Points(c.metric(r.Namespace, r.Name, r.Dimensions), r.Start, r.End, time.Duration(r.Period)*time.Second) {
		d := datapoint{Timestamp: p.At, Unit: "None"}
		for _, s := range r.Statistics {
			v, err := pick(p, s)
			if err != nil {
				return statsAnswer{}, err
			}
			*map[string]**float64{"Average": &d.Average, "Sum": &d.Sum, "Minimum": &d.Minimum, "Maximum": &d.Maximum, "SampleCount": &d.SampleCount}[s] = &v
		}
		out.Datapoints = append(out.Datapoints, d)
	}
	return out, nil
}

func (h *CloudWatch) listMetrics(c caller, r listRequest) (listAnswer, error) {
	out := listAnswer{Metrics: []metric{}}
	for _, m := range h.w.Series(c.who.Account, c.region, 500, func(m world.Metric) bool {
		if r.Namespace != "" && r.Namespace != m.Namespace || r.Name != "" && r.Name != m.Name {
			return false
		}
		for _, d := range r.Dimensions {
			if v, ok := m.Dimensions.Get(d.Name); !ok || d.Value != "" && d.Value != v {
				return false
			}
		}
		return true
	}) {
		x := metric{Namespace: m.Namespace, Name: m.Name}
		for _, d := range m.Dimensions {
			x.Dimensions = append(x.Dimensions, dimension{d.Key, d.Value})
		}
		out.Metrics = append(out.Metrics, x)
	}
	return out, nil
}

func (h *CloudWatch) putMetricData(c caller, r putRequest) error {
	if r.Namespace == "" || strings.HasPrefix(r.Namespace, "AWS/") {
		return world.Refuse("InvalidParameterValue", "The value %.40q for parameter Namespace is invalid.", r.Namespace)
	}
	if len(r.Data) > 1000 {
		return world.Refuse("InvalidParameterValue", "The collection MetricData must not have a size greater than 1000.")
	}
	for _, d := range r.Data {
		if d.Name == "" || len(d.Dimensions) > 30 {
			return world.Refuse("InvalidParameterValue", "MetricData: a metric needs a name and at most 30 dimensions")
		}
		at := d.Timestamp
		if at.IsZero() {
			at = h.w.Clock.Now().Wire
		}
		if err := h.w.Put(c.metric(r.Namespace, d.Name, d.Dimensions), world.Datum{At: at, Value: d.Value}); err != nil {
			return err
		}
	}
	return nil
}

// admit counts a call and identifies its caller.
func (h *CloudWatch) admit(r *http.Request, action string) (caller, fault.Effect, error) {
	from := wire.CallerOf(r)
	h.w.Calls.Count("monitoring", action)
	e := h.w.Faults.Pick(h.w.Clock.Now().Wire, fault.Call{Service: "monitoring", Action: action, Region: from.Region})
	who, refusal := h.w.Principal(from.Key, from.Session)
	if refusal != nil {
		return caller{}, e, refusal
	}
	if !h.w.May(who, "cloudwatch:"+action, nil) {
		return caller{}, e, &world.Error{Code: "AccessDenied", Status: 403, Message: "User: " + who.ARN + " is not authorized to perform: cloudwatch:" + action}
	}
	return caller{who, from.Region}, e, nil
}

func asError(err error) *world.Error {
	if e, ok := errors.AsType[*world.Error](err); ok {
		return e
	}
	return world.Refuse("InvalidParameterValue", "%s", err)
}

func ruleError(r fault.Rule) *world.Error {
	e := &world.Error{Code: r.Code, Status: r.Status, Message: r.Message}
	if e.Code == "" {
		e.Code = "InternalServiceFault"
	}
	if e.Status == 0 {
		e.Status = 400
		if e.Code == "InternalServiceFault" {
			e.Status = 500
		}
	}
	return e
}
