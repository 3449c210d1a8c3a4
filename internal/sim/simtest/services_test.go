package simtest

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/feature/ec2/imds"
	"github.com/aws/aws-sdk-go-v2/service/cloudwatch"
	cwtypes "github.com/aws/aws-sdk-go-v2/service/cloudwatch/types"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/sts"

	"lull/internal/lib/errtest"
	"lull/internal/sim/fault"
	"lull/internal/sim/world"
)

func query(id, instance, ns, name string) cwtypes.MetricDataQuery {
	return cwtypes.MetricDataQuery{Id: aws.String(id), MetricStat: &cwtypes.MetricStat{Period: aws.Int32(300), Stat: aws.String("Average"), Metric: &cwtypes.Metric{
		Namespace: aws.String(ns), MetricName: aws.String(name), Dimensions: []cwtypes.Dimension{{Name: aws.String("InstanceId"), Value: aws.String(instance)}},
	}}}
}

func TestMetricDataByCBOR(t *testing.T) {
	c := plain(3)
	c.Workers[0].Agent, c.Workers[0].Up = true, world.Duration(24*time.Hour)
	b, ctx := start(t, c), t.Context()
	cw := cloudwatch.NewFromConfig(b.cfg)
	var ids []string
	b.World.All(func(i *world.Instance, _ world.Moment) { ids = append(ids, i.ID) })
	now := time.Now()
	in := &cloudwatch.GetMetricDataInput{StartTime: aws.Time(now.Add(-time.Hour)), EndTime: &now, MaxDatapoints: aws.Int32(7)}
	for k, id := range ids {
		in.MetricDataQueries = append(in.MetricDataQueries, query(fmt.Sprintf("c%d", k), id, "AWS/EC2", "CPUUtilization"), query(fmt.Sprintf("m%d", k), id, "CWAgent", "mem_used_percent"))
	}
	points, pages := map[string]int{}, 0
	p := cloudwatch.NewGetMetricDataPaginator(cw, in)
	for p.HasMorePages() {
		out := errtest.Get(p.NextPage(ctx))(t)
		for _, r := range out.MetricDataResults {
			points[*r.Id] += len(r.Values)
			for k, v := range r.Values {
				if v <= 0 || v > 100 || r.Timestamps[k].Before(now.Add(-66*time.Minute)) || r.Timestamps[k].After(now) {
					t.Errorf("%s: %v at %s", *r.Id, v, r.Timestamps[k])
				}
			}
		}
		pages++
	}
	for id, n := range points {
		if n < 11 || n > 13 {
			t.Errorf("%s has %d points", id, n)
		}
	}
	if len(points) != 6 || pages < 9 {
		t.Errorf("%d series in %d pages", len(points), pages)
	}
	var many []cwtypes.MetricDataQuery
	for k := range 501 {
		many = append(many, query(fmt.Sprintf("q%d", k), ids[0], "AWS/EC2", "CPUUtilization"))
	}
	_, err := cw.GetMetricData(ctx, &cloudwatch.GetMetricDataInput{StartTime: in.StartTime, EndTime: in.EndTime, MetricDataQueries: many})
	want(t, "501 queries", code(err), "ValidationError")
	out := errtest.Get(cw.GetMetricData(ctx, &cloudwatch.GetMetricDataInput{StartTime: in.StartTime, EndTime: in.EndTime, MetricDataQueries: many[:500]}))(t)
	if len(out.MetricDataResults) != 500 {
		t.Errorf("%d results", len(out.MetricDataResults))
	}
	b.World.Faults.Add(fault.Rule{Service: "monitoring", Kind: fault.Error, Code: "Throttling", Count: 1})
	_, err = cw.GetMetricData(ctx, &cloudwatch.GetMetricDataInput{StartTime: in.StartTime, EndTime: in.EndTime, MetricDataQueries: many[:1]})
	want(t, "fault", code(err), "Throttling")
}

func TestPutAndListMetrics(t *testing.T) {
	b, ctx := start(t, plain(1)), t.Context()
	cw := cloudwatch.NewFromConfig(b.cfg)
	now := time.Now()
	data := make([]cwtypes.MetricDatum, 300) // large enough that the SDK compresses the body
	for k := range data {
		data[k] = cwtypes.MetricDatum{MetricName: aws.String("Depth"), Value: aws.Float64(float64(k)), Timestamp: aws.Time(now.Add(-10 * time.Minute)), Dimensions: []cwtypes.Dimension{{Name: aws.String("Queue"), Value: aws.String("a")}}}
	}
	errtest.Get(cw.PutMetricData(ctx, &cloudwatch.PutMetricDataInput{Namespace: aws.String("Mine"), MetricData: data}))(t)
	out := errtest.Get(cw.GetMetricStatistics(ctx, &cloudwatch.GetMetricStatisticsInput{
		Namespace: aws.String("Mine"), MetricName: aws.String("Depth"), Dimensions: data[0].Dimensions, Period: aws.Int32(3600),
		StartTime: aws.Time(now.Add(-2 * time.Hour)), EndTime: aws.Time(now), Statistics: []cwtypes.Statistic{"Maximum", "SampleCount"},
	}))(t)
	if len(out.Datapoints) != 1 || *out.Datapoints[0].Maximum != 299 || *out.Datapoints[0].SampleCount != 300 {
		t.Errorf("datapoints: %+v", out.Datapoints)
	}
	list := errtest.Get(cw.ListMetrics(ctx, &cloudwatch.ListMetricsInput{Namespace: aws.String("AWS/EC2"), MetricName: aws.String("CPUUtilization")}))(t)
	if len(list.Metrics) != 1 {
		t.Errorf("%d metrics", len(list.Metrics))
	}
}

func TestRolesAndAccounts(t *testing.T) {
	c := plain(1)
	c.Accounts = []world.AccountConfig{
		{ID: "111122223333", AccessKeys: []string{"AKIASIM"}},
		{ID: "444455556666", Roles: []world.Role{{Name: "fleet", Deny: []string{"ec2:Terminate*"}}}},
	}
	c.StrictKeys = true
	c.Workers = append(c.Workers, world.WorkerConfig{Name: "far", Account: "444455556666", Image: "ami-0000000000000d012"})
	b, ctx := start(t, c), t.Context()
	sc := sts.NewFromConfig(b.cfg)
	want(t, "own account", *errtest.Get(sc.GetCallerIdentity(ctx, &sts.GetCallerIdentityInput{}))(t).Account, "111122223333")
	_, err := sc.AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: aws.String("arn:aws:iam::444455556666:role/none"), RoleSessionName: aws.String("s")})
	want(t, "unknown role", code(err), "AccessDenied")
	out := errtest.Get(sc.AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: aws.String("arn:aws:iam::444455556666:role/fleet"), RoleSessionName: aws.String("s")}))(t)
	far := b.cfg
	far.Credentials = credentials.NewStaticCredentialsProvider(*out.Credentials.AccessKeyId, *out.Credentials.SecretAccessKey, *out.Credentials.SessionToken)
	want(t, "other account", *errtest.Get(sts.NewFromConfig(far).GetCallerIdentity(ctx, &sts.GetCallerIdentityInput{}))(t).Arn, "arn:aws:sts::444455556666:assumed-role/fleet/s")
	fe := ec2.NewFromConfig(far)
	got := errtest.Get(fe.DescribeInstances(ctx, &ec2.DescribeInstancesInput{}))(t)
	if len(got.Reservations) != 1 || *got.Reservations[0].OwnerId != "444455556666" {
		t.Errorf("other account sees %+v", got.Reservations)
	}
	_, err = fe.TerminateInstances(ctx, &ec2.TerminateInstancesInput{InstanceIds: []string{*got.Reservations[0].Instances[0].InstanceId}})
	want(t, "denied action", code(err), "UnauthorizedOperation")
	bad := b.cfg
	bad.Credentials = credentials.NewStaticCredentialsProvider("AKIAWRONG", "x", "")
	_, err = ec2.NewFromConfig(bad).DescribeInstances(ctx, &ec2.DescribeInstancesInput{})
	want(t, "unknown key", code(err), "AuthFailure")
}

// metadata returns the SDK's metadata client for one instance, connected to that
// instance's own address, and the address.
func (b *bench) metadata(t *testing.T, name string) (*imds.Client, string) {
	t.Helper()
	var addr, id string
	b.World.Find(name, func(i *world.Instance, _ world.Moment) { addr, id = i.MetadataAddr().String(), i.ID })
	to := strings.TrimPrefix(b.url, "http://")
	tr := &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, to)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return imds.New(imds.Options{Endpoint: "http://" + addr, HTTPClient: &http.Client{Transport: tr}, Retryer: aws.NopRetryer{}}), id
}

func get(t *testing.T, c *imds.Client, path string) (string, error) {
	t.Helper()
	out, err := c.GetMetadata(t.Context(), &imds.GetMetadataInput{Path: path})
	if err != nil {
		return "", err
	}
	defer out.Content.Close()
	body, err := io.ReadAll(out.Content)
	return string(body), err
}

func TestMetadata(t *testing.T) {
	c := plain(1)
	c.Accounts = []world.AccountConfig{{ID: "111122223333", Roles: []world.Role{{Name: "self", SelfOnly: true}}}}
	w := c.Workers[0]
	w.Name, w.TagsInMetadata, w.TokensRequired, w.InstanceProfile = "tagged", true, true, "self"
	w.Tags = map[string]string{"lull:idle-timeout": "1h", "with space": "x"}
	c.Workers = append(c.Workers, w)
	b, ctx := start(t, c), t.Context()
	md, id := b.metadata(t, "tagged")
	for path, value := range map[string]string{
		"instance-id": id, "placement/region": region, "tags/instance/lull:idle-timeout": "1h", "tags/instance": "Name\nlull:idle-timeout",
		"iam/security-credentials/": "self",
	} {
		got, err := get(t, md, path)
		errtest.None(t, err)
		want(t, path, got, value)
	}
	if _, err := get(t, md, "spot/instance-action"); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("spot without notice: %v", err)
	}
	doc := errtest.Get(md.GetInstanceIdentityDocument(ctx, &imds.GetInstanceIdentityDocumentInput{}))(t)
	want(t, "identity", doc.InstanceID+doc.Region+doc.AccountID, id+region+"111122223333")
	other, _ := b.metadata(t, "m")
	if _, err := get(t, other, "tags/instance"); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("tags where they are not allowed: %v", err)
	}

	info := errtest.Get(md.GetIAMInfo(ctx, &imds.GetIAMInfoInput{}))(t)
	want(t, "profile", info.InstanceProfileArn, "arn:aws:iam::111122223333:instance-profile/self")
	tok := world.SessionToken(world.Principal{Account: "111122223333", Role: "self", Instance: id, Expires: time.Now().Add(time.Hour)})
	mine := b.cfg
	mine.Credentials = credentials.NewStaticCredentialsProvider("ASIA", "x", tok)
	var foreign string
	b.World.Find("m", func(i *world.Instance, _ world.Moment) { foreign = i.ID })
	me := ec2.NewFromConfig(mine)
	_, err := me.StopInstances(ctx, &ec2.StopInstancesInput{InstanceIds: []string{foreign}})
	want(t, "stop another", code(err), "UnauthorizedOperation")
	_, err = me.StopInstances(ctx, &ec2.StopInstancesInput{InstanceIds: []string{id}})
	want(t, "stop itself", code(err), "")
	if _, err := get(t, md, "instance-id"); err == nil {
		t.Error("a stopped instance has metadata")
	}
}

func TestMetadataFaults(t *testing.T) {
	c := plain(1)
	c.Workers[0].TokensRequired = true
	b := start(t, c)
	for _, status := range []int{401, 403, 503} {
		b.World.Faults.Clear()
		b.World.Faults.Add(fault.Rule{Service: "imds", Action: "GET *", Kind: fault.Error, Status: status})
		b.World.Faults.Add(fault.Rule{Service: "imds", Action: "GET */*", Kind: fault.Error, Status: status})
		md, _ := b.metadata(t, "m")
		if _, err := get(t, md, "instance-id"); err == nil || !strings.Contains(err.Error(), fmt.Sprint(status)) {
			t.Errorf("status %d: %v", status, err)
		}
	}
	b.World.Faults.Clear()
	b.IMDS.Hops = 2
	md, _ := b.metadata(t, "m")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := md.GetMetadata(ctx, &imds.GetMetadataInput{Path: "instance-id"}); err == nil {
		t.Error("a token crossed two hops with a limit of one")
	}
	two := 2
	errtest.None(t, b.World.Set("m", world.Attributes{HopLimit: &two}))
	md, _ = b.metadata(t, "m")
	if _, err := get(t, md, "instance-id"); err != nil {
		t.Error(err)
	}
}
