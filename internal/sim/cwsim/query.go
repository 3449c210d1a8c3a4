package cwsim

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"lull/internal/sim/fault"
	"lull/internal/sim/wire"
	"lull/internal/sim/world"
)

const namespace = "http://monitoring.amazonaws.com/doc/2010-08-01/"

// ServeQuery answers one request of the query protocol whose form has been read.
func (h *CloudWatch) ServeQuery(w http.ResponseWriter, r *http.Request, form wire.Form) {
	action := form.Get("Action")
	c, e, err := h.admit(r, action)
	e.Serve(w, r, func(w http.ResponseWriter, rule fault.Rule) { h.failQuery(w, ruleError(rule)) }, func(w http.ResponseWriter) {
		var x wire.XML
		x.OpenNS(action+"Response", namespace)
		if err == nil {
			err = h.doQuery(c, action, form, &x)
		}
		if err != nil {
			h.failQuery(w, asError(err))
			return
		}
		x.In("ResponseMetadata", func() { x.Text("RequestId", requestID) })
		x.Close(action + "Response")
		h.sendXML(w, http.StatusOK, x.Bytes())
	})
}

// ServeHTTP answers requests of either protocol.
func (h *CloudWatch) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/" && r.URL.Path != "" {
		h.ServeCBOR(w, r)
		return
	}
	form, err := wire.ParseForm(r)
	if err != nil {
		h.failQuery(w, asError(err))
		return
	}
	h.ServeQuery(w, r, form)
}

const requestID = "5a110000-0000-4000-8000-000000000000"

func (h *CloudWatch) doQuery(c caller, action string, f wire.Form, x *wire.XML) error {
	switch action {
	case "GetMetricData":
		in, err := dataForm(f)
		if err != nil {
			return err
		}
		out, err := h.getMetricData(c, in)
		if err != nil {
			return err
		}
		writeData(x, out)
	case "GetMetricStatistics":
		in, err := statsForm(f)
		if err != nil {
			return err
		}
		out, err := h.getMetricStatistics(c, in)
		if err != nil {
			return err
		}
		writeStats(x, out)
	case "ListMetrics":
		out, err := h.listMetrics(c, listRequest{Namespace: f.Get("Namespace"), Name: f.Get("MetricName"), Dimensions: dimensions(f, "")})
		if err != nil {
			return err
		}
		writeList(x, out)
	case "PutMetricData":
		in, err := putForm(f)
		if err != nil {
			return err
		}
		return h.putMetricData(c, in)
	default:
		return world.Refuse("InvalidAction", "Could not find operation %.40s", action)
	}
	return nil
}

func when(f wire.Form, key string) (time.Time, error) {
	s := f.Get(key)
	if s == "" {
		return time.Time{}, nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05.999999999", "2006-01-02"} {
		if t, err := time.Parse(layout, s); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("cannot read parameter %s: %.40q is not a time", key, s)
}

func dimensions(f wire.Form, prefix string) []dimension {
	var out []dimension
	for _, g := range f.Groups(prefix + "Dimensions.member") {
		out = append(out, dimension{f.Get(g + "Name"), f.Get(g + "Value")})
	}
	return out
}

func dataForm(f wire.Form) (r dataRequest, err error) {
	if r.Start, err = when(f, "StartTime"); err != nil {
		return r, err
	}
	if r.End, err = when(f, "EndTime"); err != nil {
		return r, err
	}
	if r.MaxDatapoints, err = f.Int("MaxDatapoints", 0); err != nil {
		return r, err
	}
	r.NextToken, r.ScanBy = f.Get("NextToken"), f.Get("ScanBy")
	for _, g := range f.Groups("MetricDataQueries.member") {
		q := dataQuery{ID: f.Get(g + "Id"), Label: f.Get(g + "Label"), Expression: f.Get(g + "Expression")}
		if f.Has(g + "ReturnData") {
			v, err := f.Bool(g + "ReturnData")
			if err != nil {
				return r, err
			}
			q.ReturnData = &v
		}
		if f.Has(g + "MetricStat.Stat") {
			m := g + "MetricStat."
			s := &stat{Stat: f.Get(m + "Stat"), Unit: f.Get(m + "Unit"), Metric: metric{
				Namespace: f.Get(m + "Metric.Namespace"), Name: f.Get(m + "Metric.MetricName"), Dimensions: dimensions(f, m+"Metric."),
			}}
			if s.Period, err = f.Int(m+"Period", 0); err != nil {
				return r, err
			}
			q.Stat = s
		}
		r.Queries = append(r.Queries, q)
	}
	return r, nil
}

func statsForm(f wire.Form) (r statsRequest, err error) {
	if r.Start, err = when(f, "StartTime"); err != nil {
		return r, err
	}
	if r.End, err = when(f, "EndTime"); err != nil {
		return r, err
	}
	if r.Period, err = f.Int("Period", 0); err != nil {
		return r, err
	}
	r.Namespace, r.Name, r.Dimensions = f.Get("Namespace"), f.Get("MetricName"), dimensions(f, "")
	r.Statistics = f.List("Statistics.member")
	return r, nil
}

func putForm(f wire.Form) (r putRequest, err error) {
	r.Namespace = f.Get("Namespace")
	for _, g := range f.Groups("MetricData.member") {
		d := putDatum{Name: f.Get(g + "MetricName"), Dimensions: dimensions(f, g)}
		if d.Timestamp, err = when(f, g+"Timestamp"); err != nil {
			return r, err
		}
		if d.Value, err = strconv.ParseFloat(f.Get(g+"Value"), 64); err != nil {
			return r, fmt.Errorf("cannot read parameter %sValue: %q is not a number", g, f.Get(g+"Value"))
		}
		r.Data = append(r.Data, d)
	}
	return r, nil
}

func writeData(x *wire.XML, out dataAnswer) {
	x.In("GetMetricDataResult", func() {
		x.In("MetricDataResults", func() {
			for _, r := range out.Results {
				x.In("member", func() {
					x.Text("Id", r.ID)
					x.Text("Label", r.Label)
					x.Text("StatusCode", r.StatusCode)
					x.In("Timestamps", func() {
						for _, t := range r.Timestamps {
							x.Time("member", t)
						}
					})
					x.In("Values", func() {
						for _, v := range r.Values {
							x.Float("member", v)
						}
					})
				})
			}
		})
		x.Maybe("NextToken", out.NextToken)
		x.Text("Messages", "")
	})
}

func writeStats(x *wire.XML, out statsAnswer) {
	x.In("GetMetricStatisticsResult", func() {
		x.Text("Label", out.Label)
		x.In("Datapoints", func() {
			for _, d := range out.Datapoints {
				x.In("member", func() {
					x.Time("Timestamp", d.Timestamp)
					x.Text("Unit", d.Unit)
					for _, v := range []struct {
						name string
						v    *float64
					}{{"Average", d.Average}, {"Sum", d.Sum}, {"Minimum", d.Minimum}, {"Maximum", d.Maximum}, {"SampleCount", d.SampleCount}} {
						if v.v != nil {
							x.Float(v.name, *v.v)
						}
					}
				})
			}
		})
	})
}

func writeList(x *wire.XML, out listAnswer) {
	x.In("ListMetricsResult", func() {
		x.In("Metrics", func() {
			for _, m := range out.Metrics {
				x.In("member", func() {
					x.Text("Namespace", m.Namespace)
					x.Text("MetricName", m.Name)
					x.In("Dimensions", func() {
						for _, d := range m.Dimensions {
							x.In("member", func() {
								x.Text("Name", d.Name)
								x.Text("Value", d.Value)
							})
						}
					})
				})
			}
		})
	})
}

func (h *CloudWatch) failQuery(w http.ResponseWriter, e *world.Error) {
	var x wire.XML
	x.OpenNS("ErrorResponse", namespace)
	x.In("Error", func() {
		x.Text("Type", "Sender")
		x.Text("Code", e.Code)
		x.Text("Message", e.Message)
	})
	x.Text("RequestId", requestID)
	x.Close("ErrorResponse")
	h.sendXML(w, e.Status, x.Bytes())
}

func (h *CloudWatch) sendXML(w http.ResponseWriter, status int, b []byte) {
	w.Header().Set("Content-Type", "text/xml")
	w.Header().Set("Date", h.w.Clock.Now().Wire.UTC().Format(http.TimeFormat))
	w.WriteHeader(status)
	_, _ = w.Write(b)
}
