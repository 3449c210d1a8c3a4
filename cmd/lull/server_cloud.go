package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/daemon/controller"
	"lull/internal/edge/cloudwatch"
	"lull/internal/edge/ec2"
	"lull/internal/fleet"
)

// clouds makes and keeps the clouds of a controller, one for each account and
// region, over the AWS edges.
type clouds struct {
	set    *ec2.Set
	owners []string // of images

	mu     sync.Mutex
	metric map[[2]string]*cloudwatch.Client
}

// loadWithin bounds the search for credentials at the first use of a region.
const loadWithin = 20 * time.Second

func (c *clouds) cloud(account, region string) (controller.Cloud, error) {
	ctx, cancel := context.WithTimeout(context.Background(), loadWithin)
	defer cancel()
	client, err := c.set.Client(ctx, account, region)
	if err != nil {
		return controller.Cloud{}, callError(err)
	}
	load, err := c.cloudwatch(ctx, account, region)
	if err != nil {
		return controller.Cloud{}, err
	}
	r := awsRegion{client: client, load: load, owners: c.owners}
	return controller.Cloud{Look: r, Move: r, Launch: r, Check: r, Tag: r, Load: r, Size: r, Parts: r}, nil
}

func (c *clouds) cloudwatch(ctx context.Context, account, region string) (*cloudwatch.Client, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := [2]string{account, region}
	if m := c.metric[key]; m != nil {
		return m, nil
	}
	cfg, err := c.set.Accounts[account].Load(ctx, region)
	if err != nil {
		return nil, err
	}
	m, err := cloudwatch.New(cloudwatch.Config{AWS: cfg})
	if err != nil {
		return nil, err
	}
	c.metric[key] = m
	return m, nil
}

// accountsOf reads NAME=ROLE-ARN,... ; the account without a name is the
// standard credential chain's own.
func accountsOf(text string) (map[string]ec2.Access, error) {
	out := map[string]ec2.Access{"": {}}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		name, arn, ok := strings.Cut(part, "=")
		if !ok || name == "" || !strings.HasPrefix(arn, "arn:") {
			return nil, fmt.Errorf("cannot use aws-accounts: %q is not NAME=ROLE-ARN", part)
		}
		out[name] = ec2.Access{RoleARN: arn}
	}
	return out, nil
}

// accountNames are the accounts beside the credentials' own.
func accountNames(accounts map[string]ec2.Access) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(accounts)), func(name string) bool { return name == "" })
}

// awsRegion is one region of one account as the controller sees it.
type awsRegion struct {
	client *ec2.Client
	load   *cloudwatch.Client
	owners []string
}

var (
	_ controller.Observer   = awsRegion{}
	_ controller.Mover      = awsRegion{}
	_ controller.Launcher   = awsRegion{}
	_ controller.Inspector  = awsRegion{}
	_ controller.Tagger     = awsRegion{}
	_ controller.LoadReader = awsRegion{}
	_ controller.Sizer      = awsRegion{}
	_ controller.Cataloger  = awsRegion{}
)

// callError gives an error of the edge the controller's kind, which has the
// same name.
func callError(err error) error {
	if err == nil {
		return nil
	}
	kind := controller.Kind(ec2.KindOf(err))
	switch {
	case errors.Is(err, ec2.ErrNoImage):
		kind = controller.NoImage
	case kind == "":
		kind = controller.Unreachable
	}
	return &controller.CallError{Kind: kind, Err: err}
}

func instanceFrom(i ec2.Instance) controller.Instance {
	return controller.Instance{ID: i.ID, State: string(i.State), Cause: controller.Cause(i.Cause()), Reason: strings.TrimSpace(i.ReasonCode + " " + i.ReasonMessage),
		PublicIP: i.PublicIP, PrivateIP: i.PrivateIP, Type: i.Type, ImageID: i.ImageID, Name: i.Tags["Name"], LaunchTime: i.LaunchTime,
		ClientToken: i.ClientToken, Tags: i.Tags, Volumes: i.Volumes}
}

func (r awsRegion) States(ctx context.Context) (map[string]string, error) {
	states, err := r.client.States(ctx)
	if err != nil {
		return nil, callError(err)
	}
	out := make(map[string]string, len(states))
	for id, s := range states {
		out[id] = string(s)
	}
	return out, nil
}

func (r awsRegion) Instances(ctx context.Context, ids []string) (map[string]controller.Instance, []string, error) {
	found, missing, err := r.client.Instances(ctx, ids)
	if err != nil {
		return nil, nil, callError(err)
	}
	out := make(map[string]controller.Instance, len(found))
	for id, i := range found {
		out[id] = instanceFrom(i)
	}
	return out, missing, nil
}

func (r awsRegion) Find(ctx context.Context, q controller.Search) ([]controller.Instance, error) {
	l, err := r.client.Find(ctx, ec2.Query{Tags: q.Tags, ClientToken: q.ClientToken, ImageName: q.ImageName, ImageOwners: r.owners})
	if err != nil {
		return nil, callError(err)
	}
	out := make([]controller.Instance, 0, len(l))
	for _, i := range l {
		out = append(out, instanceFrom(i))
	}
	return out, nil
}

func (r awsRegion) Start(ctx context.Context, id string) error {
	_, err := r.client.Start(ctx, id)
	return callError(err)
}

func (r awsRegion) Stop(ctx context.Context, id string, hibernate bool) (controller.Stopped, error) {
	s, err := r.client.Stop(ctx, id, hibernate)
	return controller.Stopped{Hibernating: s.Hibernating, Fallback: s.Fallback}, callError(err)
}

func (r awsRegion) Terminate(ctx context.Context, id string) error {
	_, err := r.client.Terminate(ctx, id)
	return callError(err)
}

func (r awsRegion) NewestImage(ctx context.Context, pattern string) (string, error) {
	i, err := r.client.NewestImage(ctx, pattern, r.owners)
	return i.ID, callError(err)
}

func (r awsRegion) Run(ctx context.Context, l fleet.Launch) (controller.Instance, error) {
	i, err := r.client.Run(ctx, ec2.Launch{ClientToken: l.Token, ImageID: l.AMIID, InstanceType: l.InstanceType, SubnetID: l.SubnetID,
		SecurityGroupIDs: l.SecurityGroupIDs, KeyName: l.KeyName, IAMInstanceProfile: l.IAMInstanceProfile, UserData: l.UserData, Tags: l.Tags, Hibernation: l.Hibernation, RootVolume: rootVolume(l.RootVolume)})
	return instanceFrom(i), callError(err)
}

func rootVolume(v *fleet.LaunchVolume) *ec2.RootVolume {
	if v == nil {
		return nil
	}
	return &ec2.RootVolume{Device: v.Device, SizeGiB: int32(v.GB), Type: v.Type, Encrypted: v.Encrypted}
}

// Machine describes what a launch would make.
func (r awsRegion) Machine(ctx context.Context, imageID, instanceType string) (controller.Machine, error) {
	m, err := r.client.Machine(ctx, imageID, instanceType)
	return controller.Machine{Hibernates: m.Hibernates, Why: m.Why, MemoryMiB: int(m.MemoryMiB), RootDevice: m.RootDevice, RootGB: int(m.RootGiB)}, callError(err)
}

func (r awsRegion) DeleteTags(ctx context.Context, ids []string, keys []string) error {
	return callError(r.client.DeleteTags(ctx, ids, keys))
}

func (r awsRegion) CreateTags(ctx context.Context, ids []string, tags map[string]string) error {
	return callError(r.client.CreateTags(ctx, ids, tags))
}

// Preflight gives the codes of what a stop would meet. A check that could not
// be made makes the whole unknown.
func (r awsRegion) Preflight(ctx context.Context, id string) ([]string, error) {
	p, err := r.client.Preflight(ctx, id)
	if err != nil {
		return nil, callError(err)
	}
	var found []string
	var errs []error
	for _, c := range []struct {
		code  string
		check ec2.Check
	}{
		{fleet.RiskInstanceStore, p.InstanceStore}, {fleet.RiskNoElasticIP, p.ChangesAddress}, {fleet.RiskASGMember, p.AutoScaling},
		{fleet.RiskSpot, p.Spot}, {fleet.RiskStopProtected, p.StopProtected},
	} {
		switch {
		case c.check.Err != nil:
			errs = append(errs, callError(c.check.Err))
		case c.check.Set:
			found = append(found, c.code)
		}
	}
	return found, errors.Join(errs...)
}

// Volumes reads sizes and types of volumes.
func (r awsRegion) Volumes(ctx context.Context, ids []string) (map[string]fleet.Volume, error) {
	found, err := r.client.Volumes(ctx, ids)
	out := make(map[string]fleet.Volume, len(found))
	for id, v := range found {
		out[id] = fleet.Volume{ID: id, Type: v.Type, GB: v.GiB}
	}
	return out, callError(err)
}

// Load reads CloudWatch. What it has no value of is nil; what failed is an
// error as well.
func (r awsRegion) Load(ctx context.Context, ids []string, since time.Time) map[string]controller.Load {
	out := make(map[string]controller.Load, len(ids))
	for id, readings := range r.load.Read(ctx, ids, since, time.Now()) {
		l := controller.Load{Period: r.load.Period()}
		for _, w := range readings[cloudwatch.CPU].Windows {
			l.Windows = append(l.Windows, controller.LoadWindow{End: w.End, CPU: w.Value})
		}
		for m, into := range map[cloudwatch.Metric]**float64{cloudwatch.CPU: &l.CPU, cloudwatch.Memory: &l.Memory, cloudwatch.Disk: &l.Disk} {
			v := readings[m]
			switch v.State {
			case cloudwatch.Present:
				value := v.Value
				*into = &value
			case cloudwatch.Failed:
				l.Err = v.Err
			}
		}
		out[id] = l
	}
	return out
}
