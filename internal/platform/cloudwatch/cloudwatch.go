// Package cloudwatch reads the utilization of EC2 instances from CloudWatch.
//
// Read requests three metrics of each instance in batches of 500 queries per
// call: CPU use, which EC2 publishes, and memory and disk use, which only the
// CloudWatch agent publishes. Each reading is a value with its time, missing
// (CloudWatch answered and has none), or failed with its error. The three are
// never confused, and a batch that fails does not affect the others.
//
// What a value means, and how old one may be, is up to the caller.
package cloudwatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/service/cloudwatch"
	"github.com/aws/aws-sdk-go-v2/service/cloudwatch/types"
	"golang.org/x/time/rate"
)

const (
	// maxQueries is GetMetricData's maximum per call.
	maxQueries = 500
	// maxPages bounds the pages of one call's answer.
	maxPages = 100
)

// Metric is one of the metrics that are read.
type Metric int

// The metrics.
const (
	CPU Metric = iota
	Memory
	Disk
	metrics // the number of metrics
)

// String returns the metric's name in the API of the fleet.
func (m Metric) String() string {
	switch m {
	case CPU:
		return "cpu_utilization"
	case Memory:
		return "memory_utilization"
	case Disk:
		return "disk_utilization"
	}
	return "metric " + strconv.Itoa(int(m))
}

// State classifies a reading.
type State string

// The states of a reading.
const (
	Present State = "present"
	Missing State = "missing" // CloudWatch answered and has no value in the window
	Failed  State = "failed"  // CloudWatch did not answer for this metric
)

// Reading is the newest value of one metric.
type Reading struct {
	State State
	Value float64   // percent, if present
	At    time.Time // end of the value's window, if present
	Err   error     // cause of a failed reading
	// Windows are all windows that were read, oldest first, if present.
	Windows []Window
}

// Window is the average of one complete period.
type Window struct {
	End   time.Time
	Value float64 // percent
}

// Readings are the readings of one instance, by Metric.
type Readings [metrics]Reading

// AgentMetric describes how the CloudWatch agent publishes a metric. The
// default is the plain InstanceId dimension, which the agent publishes when its
// configuration aggregates by it ("aggregation_dimensions": [["InstanceId"]]).
type AgentMetric struct {
	Namespace, Name string
	// Dimensions are the dimensions in addition to InstanceId.
	Dimensions map[string]string
}

// Config configures a Client.
type Config struct {
	// AWS is the SDK's configuration for the account and region. It must come
	// from ec2.Access.Load, which bounds answers and works around a fault of the
	// SDK's request bodies.
	AWS aws.Config
	// Endpoint replaces AWS's endpoint; empty means AWS's.
	Endpoint string
	// Memory and Disk replace the agent's default metrics.
	Memory, Disk AgentMetric
	// Window is how far back to look for a value; 0 means 15 min.
	Window time.Duration
	// Period is the length of the averages; 0 means 5 min, the period at which
	// EC2 publishes without detailed monitoring.
	Period time.Duration
	// Rate and Burst limit the calls; 0 means a rate of 5 per second and a burst
	// of 10.
	Rate  float64
	Burst int
	// Attempts bounds the attempts per call; 0 means 4.
	Attempts int
}

// Client reads CloudWatch for one account in one region.
type Client struct {
	cfg   Config
	limit *rate.Limiter
	// A function value instead of the SDK's client, so that the linker drops the
	// calls that are not used; see ec2.api.
	api struct {
		GetMetricData func(context.Context, *cloudwatch.GetMetricDataInput, ...func(*cloudwatch.Options)) (*cloudwatch.GetMetricDataOutput, error)
	}
}

// New returns a client. It makes no connection.
func New(cfg Config) (*Client, error) {
	if cfg.Memory.Name == "" {
		cfg.Memory = AgentMetric{Namespace: "CWAgent", Name: "mem_used_percent"}
	}
	if cfg.Disk.Name == "" {
		cfg.Disk = AgentMetric{Namespace: "CWAgent", Name: "disk_used_percent"}
	}
	cfg.Window = cmp.Or(cfg.Window, 15*time.Minute)
	cfg.Period = cmp.Or(cfg.Period, 5*time.Minute)
	cfg.Rate, cfg.Burst = cmp.Or(cfg.Rate, 5), cmp.Or(cfg.Burst, 10)
	cfg.Attempts = cmp.Or(cfg.Attempts, 4)
	if cfg.Period < time.Second || cfg.Window < cfg.Period || cfg.Period > 24*time.Hour {
		return nil, fmt.Errorf("cannot use CloudWatch settings: window %v, period %v", cfg.Window, cfg.Period)
	}
	c := &Client{cfg: cfg, limit: rate.NewLimiter(rate.Limit(cfg.Rate), cfg.Burst)}
	c.api.GetMetricData = cloudwatch.NewFromConfig(cfg.AWS, func(o *cloudwatch.Options) {
		if cfg.Endpoint != "" {
			o.BaseEndpoint = aws.String(cfg.Endpoint)
		}
		o.Retryer = retry.NewStandard(func(s *retry.StandardOptions) { s.MaxAttempts = cfg.Attempts })
	}).GetMetricData
	return c, nil
}

// Period returns the length of a window.
func (c *Client) Period() time.Duration { return c.cfg.Period }

// Read returns the readings of every requested instance from the windows that
// were complete at now. They reach back for Config.Window, or to since if that is
// earlier and not zero.
func (c *Client) Read(ctx context.Context, ids []string, since, now time.Time) map[string]Readings {
	if from := now.Add(-c.cfg.Window); since.IsZero() || since.After(from) {
		since = from
	}
	ids = slices.Compact(slices.Sorted(slices.Values(ids)))
	out := make(map[string]Readings, len(ids))
	for part := range slices.Chunk(ids, maxQueries/int(metrics)) {
		readings := make([]Readings, len(part))
		if err := c.batch(ctx, part, readings, since, now); err != nil {
			err = fmt.Errorf("cannot read CloudWatch metrics in %s: %w", c.cfg.AWS.Region, err)
			for i := range readings {
				for m := range readings[i] {
					readings[i][m] = Reading{State: Failed, Err: err}
				}
			}
		}
		for i, id := range part {
			out[id] = readings[i]
		}
	}
	return out
}

// batch reads the metrics of at most maxQueries/metrics instances.
func (c *Client) batch(ctx context.Context, ids []string, into []Readings, since, now time.Time) error {
	in := &cloudwatch.GetMetricDataInput{
		// The end is truncated because an unfinished window would be the average
		// of its beginning only.
		StartTime: aws.Time(since.Truncate(c.cfg.Period)), EndTime: aws.Time(now.Truncate(c.cfg.Period)),
		ScanBy: types.ScanByTimestampDescending,
	}
	for i, id := range ids {
		for m := range metrics {
			in.MetricDataQueries = append(in.MetricDataQueries, c.query(i, m, id))
			into[i][m].State = Missing
		}
	}
	for range maxPages {
		if err := c.limit.Wait(ctx); err != nil {
			return fmt.Errorf("held back by the rate limit: %w", err)
		}
		out, err := c.api.GetMetricData(ctx, in)
		if err != nil {
			return err
		}
		for _, r := range out.MetricDataResults {
			if err := take(r, into, c.cfg.Period); err != nil {
				return err
			}
		}
		if aws.ToString(out.NextToken) == "" {
			return nil
		}
		if in.NextToken != nil && *in.NextToken == *out.NextToken {
			return errors.New("the answer's pages repeat their token")
		}
		in.NextToken = out.NextToken
	}
	return fmt.Errorf("the answer has more than %d pages", maxPages)
}

func (c *Client) query(i int, m Metric, id string) types.MetricDataQuery {
	how := AgentMetric{Namespace: "AWS/EC2", Name: "CPUUtilization"}
	switch m {
	case Memory:
		how = c.cfg.Memory
	case Disk:
		how = c.cfg.Disk
	}
	dimensions := []types.Dimension{{Name: aws.String("InstanceId"), Value: aws.String(id)}}
	for name, value := range how.Dimensions {
		dimensions = append(dimensions, types.Dimension{Name: aws.String(name), Value: aws.String(value)})
	}
	return types.MetricDataQuery{
		Id: aws.String(queryID(i, m)),
		MetricStat: &types.MetricStat{
			Metric: &types.Metric{Namespace: aws.String(how.Namespace), MetricName: aws.String(how.Name), Dimensions: dimensions},
			Period: aws.Int32(int32(c.cfg.Period / time.Second)), Stat: aws.String("Average"),
		},
	}
}

// queryID returns the ID of a query within its batch. CloudWatch repeats it in
// the answer.
func queryID(i int, m Metric) string { return fmt.Sprintf("q%d_%d", i, int(m)) }

func parseQueryID(s string, n int) (i int, m Metric, ok bool) {
	var metric int
	if k, err := fmt.Sscanf(s, "q%d_%d", &i, &metric); k != 2 || err != nil {
		return 0, 0, false
	}
	m = Metric(metric)
	ok = i >= 0 && i < n && m >= 0 && m < metrics && queryID(i, m) == s
	return i, m, ok
}

// take stores one result in into. The values of one metric may be spread over
// several pages.
func take(r types.MetricDataResult, into []Readings, period time.Duration) error {
	i, m, ok := parseQueryID(aws.ToString(r.Id), len(into))
	if !ok {
		return fmt.Errorf("the answer contains a metric that was not requested: %q", aws.ToString(r.Id))
	}
	if len(r.Timestamps) != len(r.Values) {
		return fmt.Errorf("the answer for %s holds %d times and %d values", aws.ToString(r.Id), len(r.Timestamps), len(r.Values))
	}
	reading := &into[i][m]
	for k, at := range r.Timestamps {
		v := r.Values[k]
		if math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
			continue
		}
		end := at.UTC().Add(period)
		if reading.State != Present || end.After(reading.At) {
			reading.State, reading.Value, reading.At, reading.Err = Present, v, end, nil
		}
		reading.Windows = append(reading.Windows, Window{end, v})
	}
	slices.SortFunc(reading.Windows, func(a, b Window) int { return a.End.Compare(b.End) })
	switch r.StatusCode {
	case types.StatusCodeInternalError, types.StatusCodeForbidden:
		if reading.State != Present {
			*reading = Reading{State: Failed, Err: fmt.Errorf("cannot read %v from CloudWatch: %s%s", m, r.StatusCode, said(r.Messages))}
		}
	}
	return nil
}

func said(messages []types.MessageData) string {
	text := ""
	for _, m := range messages {
		text += fmt.Sprintf("; %s: %s", aws.ToString(m.Code), aws.ToString(m.Value))
	}
	return text
}
