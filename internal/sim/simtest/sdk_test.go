package simtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"
	"github.com/aws/smithy-go"

	"lull/internal/lib/errtest"
	"lull/internal/sim"
	"lull/internal/sim/fault"
	"lull/internal/sim/world"
)

const region = "us-east-1"

// bench is a simulator on loopback with an SDK that is configured for it.
type bench struct {
	*sim.Server
	url string
	cfg aws.Config
	ec2 *ec2.Client
}

func start(t *testing.T, c world.Config) *bench {
	t.Helper()
	s, err := sim.New(sim.Options{Scenario: c})
	if err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(s.Handler())
	t.Cleanup(web.Close)
	b := &bench{Server: s, url: web.URL, cfg: aws.Config{
		Region: region, BaseEndpoint: aws.String(web.URL),
		Credentials:      credentials.NewStaticCredentialsProvider("AKIASIM", "secret", ""),
		RetryMaxAttempts: 1, HTTPClient: whole{web.Client()},
	}}
	b.ec2 = ec2.NewFromConfig(b.cfg)
	return b
}

// whole is an HTTP client that keeps request bodies readable until the transport has
// sent them. It works around smithy-go 1.28.8, which closes the body once the
// answer's header has arrived. If the transport has not noticed yet that all is
// written, as on loopback, it takes that for a failed write and drops the connection
// (about one large answer in ten).
type whole struct{ *http.Client }

func (c whole) Do(r *http.Request) (*http.Response, error) {
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	q := r.Clone(r.Context())
	q.Body = io.NopCloser(bytes.NewReader(b))
	return c.Client.Do(q)
}

// plain returns a scenario of n machines without CML.
func plain(n int) world.Config {
	return world.Config{
		Regions: []world.RegionConfig{{Name: region}, {Name: "eu-west-1"}},
		Workers: []world.WorkerConfig{{Name: "m", Count: n, Image: "ami-0000000000000d012", Hibernation: true}},
	}
}

// code returns the EC2 error code in an error of the SDK.
func code(err error) string {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[smithy.APIError](err); ok {
		return e.ErrorCode()
	}
	return "not an API error: " + err.Error()
}

func want(t *testing.T, what string, got, wanted string) {
	t.Helper()
	if got != wanted {
		t.Errorf("%s: got %q, want %q", what, got, wanted)
	}
}

func (b *bench) state(t *testing.T, id string) string {
	t.Helper()
	out := errtest.Get(b.ec2.DescribeInstances(t.Context(), &ec2.DescribeInstancesInput{InstanceIds: []string{id}}))(t)
	return string(out.Reservations[0].Instances[0].State.Name)
}

func launch(token string) *ec2.RunInstancesInput {
	return &ec2.RunInstancesInput{
		ImageId: aws.String("ami-00000000000000291"), InstanceType: types.InstanceTypeM5Large,
		MinCount: aws.Int32(1), MaxCount: aws.Int32(1), ClientToken: aws.String(token),
		TagSpecifications: []types.TagSpecification{{ResourceType: types.ResourceTypeInstance, Tags: []types.Tag{
			{Key: aws.String("Name"), Value: aws.String("w <&> \"1\"")}, {Key: aws.String("lull:worker-id"), Value: aws.String("w1")},
		}}},
		HibernationOptions: &types.HibernationOptionsRequest{Configured: aws.Bool(true)},
		BlockDeviceMappings: []types.BlockDeviceMapping{{DeviceName: aws.String(world.RootDevice),
			Ebs: &types.EbsBlockDevice{VolumeSize: aws.Int32(80), Encrypted: aws.Bool(true)}}},
	}
}

func TestLifeOfAnInstance(t *testing.T) {
	b, ctx := start(t, plain(0)), t.Context()
	run := errtest.Get(b.ec2.RunInstances(ctx, launch("t1")))(t)
	id := *run.Instances[0].InstanceId
	want(t, "after RunInstances", b.state(t, id), "pending")
	b.World.Clock.Advance(time.Minute)
	got := errtest.Get(b.ec2.DescribeInstances(ctx, &ec2.DescribeInstancesInput{Filters: []types.Filter{
		{Name: aws.String("tag:lull:worker-id"), Values: []string{"w?"}}, {Name: aws.String("instance-state-name"), Values: []string{"running"}},
	}}))(t).Reservations[0].Instances[0]
	if !*got.HibernationOptions.Configured || got.PublicIpAddress == nil || *got.Tags[0].Value != `w <&> "1"` || *got.ClientToken != "t1" {
		t.Errorf("running instance: %+v", got)
	}
	stop := errtest.Get(b.ec2.StopInstances(ctx, &ec2.StopInstancesInput{InstanceIds: []string{id}, Hibernate: aws.Bool(true)}))(t)
	want(t, "previous state", string(stop.StoppingInstances[0].PreviousState.Name), "running")
	_, err := b.ec2.StartInstances(ctx, &ec2.StartInstancesInput{InstanceIds: []string{id}})
	want(t, "start while stopping", code(err), "IncorrectInstanceState")
	b.World.Clock.Advance(2 * time.Minute)
	down := errtest.Get(b.ec2.DescribeInstances(ctx, &ec2.DescribeInstancesInput{InstanceIds: []string{id}}))(t).Reservations[0].Instances[0]
	want(t, "after stop", string(down.State.Name), "stopped")
	want(t, "reason", *down.StateReason.Code, "Client.UserInitiatedHibernate")
	if down.PublicIpAddress != nil {
		t.Errorf("a stopped instance keeps the address %s", *down.PublicIpAddress)
	}
	errtest.Get(b.ec2.StartInstances(ctx, &ec2.StartInstancesInput{InstanceIds: []string{id}}))(t)
	b.World.Clock.Advance(time.Minute)
	up := errtest.Get(b.ec2.DescribeInstances(ctx, &ec2.DescribeInstancesInput{InstanceIds: []string{id}}))(t).Reservations[0].Instances[0]
	if up.State.Name != "running" || *up.PublicIpAddress == *got.PublicIpAddress {
		t.Errorf("after start: %s at %s, before %s", up.State.Name, *up.PublicIpAddress, *got.PublicIpAddress)
	}
	errtest.Get(b.ec2.TerminateInstances(ctx, &ec2.TerminateInstancesInput{InstanceIds: []string{id}}))(t)
	b.World.Clock.Advance(time.Minute)
	want(t, "after terminate", b.state(t, id), "terminated")
	_, err = b.ec2.StartInstances(ctx, &ec2.StartInstancesInput{InstanceIds: []string{id}})
	want(t, "start of a terminated instance", code(err), "IncorrectInstanceState")
}

func TestClientToken(t *testing.T) {
	b, ctx := start(t, plain(0)), t.Context()
	first := errtest.Get(b.ec2.RunInstances(ctx, launch("same")))(t)
	again := errtest.Get(b.ec2.RunInstances(ctx, launch("same")))(t)
	want(t, "second launch", *again.Instances[0].InstanceId, *first.Instances[0].InstanceId)
	want(t, "reservation", *again.ReservationId, *first.ReservationId)
	other := launch("same")
	other.InstanceType = types.InstanceTypeM5Xlarge
	_, err := b.ec2.RunInstances(ctx, other)
	want(t, "other parameters", code(err), "IdempotentParameterMismatch")

	b.World.Faults.Add(fault.Rule{Service: "ec2", Action: "RunInstances", Kind: fault.Lose, Count: 1})
	if _, err := b.ec2.RunInstances(ctx, launch("lost")); err == nil {
		t.Fatal("the lost answer arrived")
	}
	errtest.Get(b.ec2.RunInstances(ctx, launch("lost")))(t)
	out := errtest.Get(b.ec2.DescribeInstances(ctx, &ec2.DescribeInstancesInput{Filters: []types.Filter{{Name: aws.String("client-token"), Values: []string{"lost"}}}}))(t)
	if n := len(out.Reservations); n != 1 {
		t.Errorf("%d instances for one token", n)
	}
}

func TestPages(t *testing.T) {
	b, ctx := start(t, plain(2345)), t.Context()
	seen := map[string]bool{}
	pages := 0
	p := ec2.NewDescribeInstanceStatusPaginator(b.ec2, &ec2.DescribeInstanceStatusInput{IncludeAllInstances: aws.Bool(true), MaxResults: aws.Int32(1000)})
	for p.HasMorePages() {
		out := errtest.Get(p.NextPage(ctx))(t)
		for _, s := range out.InstanceStatuses {
			seen[*s.InstanceId] = true
		}
		pages++
	}
	if len(seen) != 2345 || pages != 3 {
		t.Errorf("statuses: %d in %d pages", len(seen), pages)
	}
	n := 0
	d := ec2.NewDescribeInstancesPaginator(b.ec2, &ec2.DescribeInstancesInput{MaxResults: aws.Int32(100)})
	for d.HasMorePages() {
		for _, r := range errtest.Get(d.NextPage(ctx))(t).Reservations {
			n += len(r.Instances)
		}
	}
	tags := 0
	tp := ec2.NewDescribeTagsPaginator(b.ec2, &ec2.DescribeTagsInput{MaxResults: aws.Int32(500), Filters: []types.Filter{{Name: aws.String("key"), Values: []string{"Name"}}}})
	for tp.HasMorePages() {
		tags += len(errtest.Get(tp.NextPage(ctx))(t).Tags)
	}
	if n != 2345 || tags != 2345 {
		t.Errorf("%d instances and %d tags", n, tags)
	}
	if got := b.World.Calls.All()["ec2 DescribeInstanceStatus"]; got != 3 {
		t.Errorf("%d calls counted, want 3", got)
	}
	_, err := b.ec2.DescribeInstances(ctx, &ec2.DescribeInstancesInput{NextToken: aws.String("nonsense")})
	want(t, "bad token", code(err), "InvalidParameterValue")
}

func TestErrorCodes(t *testing.T) {
	c := plain(1)
	c.Workers = append(c.Workers,
		world.WorkerConfig{Name: "nohib", Image: "ami-0000000000000d012"},
		world.WorkerConfig{Name: "kept", Image: "ami-0000000000000d012", NoStop: true})
	c.Regions[0].Capacity = map[string]int{"c5.metal": 1}
	b := start(t, c)
	ids := map[string][]string{}
	b.World.All(func(i *world.Instance, _ world.Moment) { ids[i.Name] = []string{i.ID} })
	stop := func(name string, hib bool) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := b.ec2.StopInstances(ctx, &ec2.StopInstancesInput{InstanceIds: ids[name], Hibernate: aws.Bool(hib)})
			return err
		}
	}
	inEurope := ec2.NewFromConfig(b.cfg, func(o *ec2.Options) { o.Region = "eu-west-1" })
	metal := launch("")
	metal.InstanceType, metal.MinCount, metal.MaxCount, metal.HibernationOptions = types.InstanceTypeC5Metal, aws.Int32(2), aws.Int32(2), nil
	for _, x := range []struct {
		name, code string
		do         func(context.Context) error
	}{
		{"hibernate without configuration", "UnsupportedHibernationConfiguration", stop("nohib", true)},
		{"stop protection", "OperationNotPermitted", stop("kept", false)},
		{"unknown id", "InvalidInstanceID.NotFound", func(ctx context.Context) error {
			_, err := b.ec2.DescribeInstances(ctx, &ec2.DescribeInstancesInput{InstanceIds: []string{"i-0123456789abcdef0"}})
			return err
		}},
		{"malformed id", "InvalidInstanceID.Malformed", func(ctx context.Context) error {
			_, err := b.ec2.DescribeInstances(ctx, &ec2.DescribeInstancesInput{InstanceIds: []string{"i-xyz"}})
			return err
		}},
		{"wrong region", "InvalidInstanceID.NotFound", func(ctx context.Context) error {
			_, err := inEurope.DescribeInstanceStatus(ctx, &ec2.DescribeInstanceStatusInput{InstanceIds: ids["m"]})
			return err
		}},
		{"no capacity", "InsufficientInstanceCapacity", func(ctx context.Context) error { _, err := b.ec2.RunInstances(ctx, metal); return err }},
		{"unknown image", "InvalidAMIID.NotFound", func(ctx context.Context) error {
			in := launch("")
			in.ImageId = aws.String("ami-1")
			_, err := b.ec2.RunInstances(ctx, in)
			return err
		}},
		{"dry run", "DryRunOperation", func(ctx context.Context) error {
			_, err := b.ec2.StopInstances(ctx, &ec2.StopInstancesInput{InstanceIds: ids["m"], DryRun: aws.Bool(true)})
			return err
		}},
		{"small page", "InvalidParameterValue", func(ctx context.Context) error {
			_, err := b.ec2.DescribeInstances(ctx, &ec2.DescribeInstancesInput{MaxResults: aws.Int32(2)})
			return err
		}},
		{"reserved tag", "InvalidParameterValue", func(ctx context.Context) error {
			_, err := b.ec2.CreateTags(ctx, &ec2.CreateTagsInput{Resources: ids["m"], Tags: []types.Tag{{Key: aws.String("aws:x"), Value: aws.String("")}}})
			return err
		}},
		{"action that is not served", "InvalidAction", func(ctx context.Context) error {
			_, err := b.ec2.DescribeHosts(ctx, &ec2.DescribeHostsInput{})
			return err
		}},
	} {
		want(t, x.name, code(x.do(t.Context())), x.code)
	}
	want(t, "state after the dry run", b.state(t, ids["m"][0]), "running")
	for _, c := range []string{"RequestLimitExceeded", "UnauthorizedOperation", "InternalError"} {
		b.World.Faults.Add(fault.Rule{Service: "ec2", Action: "Describe*", Kind: fault.Error, Code: c, Count: 1})
		_, err := b.ec2.DescribeInstances(t.Context(), &ec2.DescribeInstancesInput{})
		want(t, "fault", code(err), c)
	}
}

func TestDescribeTheRest(t *testing.T) {
	c := plain(2)
	c.Workers = append(c.Workers, world.WorkerConfig{Name: "kept", NoStop: true, Elastic: true, Type: "c5d.4xlarge"})
	b, ctx := start(t, c), t.Context()
	var id string
	b.World.Find("kept", func(i *world.Instance, _ world.Moment) { id = i.ID })
	images := errtest.Get(b.ec2.DescribeImages(ctx, &ec2.DescribeImagesInput{Owners: []string{"self"}, Filters: []types.Filter{{Name: aws.String("name"), Values: []string{"cisco-cml2.9*"}}}}))(t).Images
	newest := images[0]
	for _, i := range images {
		if *i.CreationDate > *newest.CreationDate {
			newest = i
		}
	}
	if len(images) != 2 || *newest.Name != "cisco-cml2.9.1-lablet-v0.2" || *images[0].ImageId == *newest.ImageId {
		t.Errorf("images: %d, newest %s; the newest must not come first", len(images), *newest.Name)
	}
	vol := errtest.Get(b.ec2.DescribeVolumes(ctx, &ec2.DescribeVolumesInput{Filters: []types.Filter{{Name: aws.String("attachment.instance-id"), Values: []string{id}}}}))(t).Volumes
	if len(vol) != 1 || *vol[0].Attachments[0].InstanceId != id || *vol[0].Size != 50 {
		t.Errorf("volumes: %+v", vol)
	}
	addr := errtest.Get(b.ec2.DescribeAddresses(ctx, &ec2.DescribeAddressesInput{}))(t).Addresses
	if len(addr) != 1 || *addr[0].InstanceId != id {
		t.Errorf("addresses: %+v", addr)
	}
	attr := errtest.Get(b.ec2.DescribeInstanceAttribute(ctx, &ec2.DescribeInstanceAttributeInput{InstanceId: &id, Attribute: types.InstanceAttributeNameDisableApiStop}))(t)
	if !*attr.DisableApiStop.Value {
		t.Error("disableApiStop is not shown")
	}
	errtest.Get(b.ec2.ModifyInstanceAttribute(ctx, &ec2.ModifyInstanceAttributeInput{InstanceId: &id, DisableApiStop: &types.AttributeBooleanValue{Value: aws.Bool(false)}}))(t)
	errtest.Get(b.ec2.StopInstances(ctx, &ec2.StopInstancesInput{InstanceIds: []string{id}}))(t)
	typ := errtest.Get(b.ec2.DescribeInstanceTypes(ctx, &ec2.DescribeInstanceTypesInput{InstanceTypes: []types.InstanceType{"c5d.4xlarge"}}))(t).InstanceTypes[0]
	if !*typ.HibernationSupported || !*typ.InstanceStorageSupported || *typ.VCpuInfo.DefaultVCpus != 16 {
		t.Errorf("type: %+v", typ)
	}
	if r := errtest.Get(b.ec2.DescribeRegions(ctx, &ec2.DescribeRegionsInput{}))(t).Regions; len(r) != 2 {
		t.Errorf("%d regions", len(r))
	}
	sub := errtest.Get(b.ec2.DescribeSubnets(ctx, &ec2.DescribeSubnetsInput{}))(t).Subnets
	sg := errtest.Get(b.ec2.DescribeSecurityGroups(ctx, &ec2.DescribeSecurityGroupsInput{}))(t).SecurityGroups
	if len(sub) != 3 || len(sg) != 1 {
		t.Errorf("%d subnets, %d groups", len(sub), len(sg))
	}
}

func TestTagsLagBehind(t *testing.T) {
	c := plain(1)
	c.Consistency.Tags = world.Duration(time.Hour)
	b, ctx := start(t, c), t.Context()
	var id string
	b.World.Find("m", func(i *world.Instance, _ world.Moment) { id = i.ID })
	read := func() string {
		out := errtest.Get(b.ec2.DescribeTags(ctx, &ec2.DescribeTagsInput{Filters: []types.Filter{{Name: aws.String("resource-id"), Values: []string{id}}}}))(t)
		return fmt.Sprint(len(out.Tags))
	}
	errtest.Get(b.ec2.CreateTags(ctx, &ec2.CreateTagsInput{Resources: []string{id}, Tags: []types.Tag{{Key: aws.String("a"), Value: aws.String("b")}}}))(t)
	want(t, "tags at once", read(), "1")
	var later int
	b.World.Find(id, func(i *world.Instance, now world.Moment) { later = len(i.TagsAt(now.Wire.Add(2 * time.Hour))) })
	want(t, "tags later", fmt.Sprint(later), "2")
}
