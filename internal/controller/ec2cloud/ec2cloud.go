// Package ec2cloud adapts EC2 and CloudWatch to the ports of package controller:
// instances, launches, tags, volumes, preflight checks and CPU load, each for one
// region of one account. It keeps one client per region and account. Rate limits,
// retries and error kinds are those of packages ec2 and cloudwatch.
package ec2cloud

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"lull/internal/controller"
	"lull/internal/fleet/worker"
	"lull/internal/platform/cloudwatch"
	"lull/internal/platform/ec2"
)

// Clouds caches one controller.Cloud per account and region. It is safe for
// concurrent use.
type Clouds struct {
	set    *ec2.Set
	owners []string

	mu     sync.Mutex
	metric map[[2]string]*cloudwatch.Client
}

// New returns Clouds over set, which the caller still owns. owners limits image
// searches to these accounts; empty allows every owner.
func New(set *ec2.Set, owners []string) *Clouds {
	return &Clouds{set: set, owners: owners, metric: map[[2]string]*cloudwatch.Client{}}
}

// loadWithin limits the search for credentials when a region is first used.
const loadWithin = 20 * time.Second

// Cloud returns the cloud of one region of an account; "" means the account of the
// credentials. Errors of its calls to EC2 are of type *controller.CallError.
func (c *Clouds) Cloud(account, name string) (controller.Cloud, error) {
	ctx, cancel := context.WithTimeout(context.Background(), loadWithin)
	defer cancel()
	client, err := c.set.Client(ctx, account, name)
	if err != nil {
		return controller.Cloud{}, callError(err)
	}
	load, err := c.cloudwatch(ctx, account, name)
	if err != nil {
		return controller.Cloud{}, err
	}
	return Region(client, load, c.owners), nil
}

// Region returns the cloud of client's region. load may be nil; then no CPU load is
// read.
func Region(client *ec2.Client, load *cloudwatch.Client, owners []string) controller.Cloud {
	r := &region{client: client, load: load, owners: owners}
	c := controller.Cloud{Observe: r, Move: r, Launch: r, Check: r, Tag: r, Size: r, Parts: r}
	if load != nil {
		c.Load = r
	}
	return c
}

func (c *Clouds) cloudwatch(ctx context.Context, account, region string) (*cloudwatch.Client, error) {
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

// region implements the controller's ports for one region of one account.
type region struct {
	client *ec2.Client
	load   *cloudwatch.Client
	owners []string
}

var (
	_ controller.Observer   = (*region)(nil)
	_ controller.Mover      = (*region)(nil)
	_ controller.Launcher   = (*region)(nil)
	_ controller.Inspector  = (*region)(nil)
	_ controller.Tagger     = (*region)(nil)
	_ controller.LoadReader = (*region)(nil)
	_ controller.Sizer      = (*region)(nil)
	_ controller.Cataloger  = (*region)(nil)
)

// callError converts an error of package ec2 or cloudwatch to a *controller.CallError
// of the same kind.
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

func (r *region) States(ctx context.Context) (map[string]string, error) {
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

func (r *region) Instances(ctx context.Context, ids []string) (map[string]controller.Instance, []string, error) {
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

func (r *region) Find(ctx context.Context, q controller.Search) ([]controller.Instance, error) {
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

func (r *region) Start(ctx context.Context, id string) error {
	_, err := r.client.Start(ctx, id)
	return callError(err)
}

func (r *region) Stop(ctx context.Context, id string, hibernate bool) (controller.Stopped, error) {
	s, err := r.client.Stop(ctx, id, hibernate)
	return controller.Stopped{Hibernating: s.Hibernating, Fallback: s.Fallback}, callError(err)
}

func (r *region) Terminate(ctx context.Context, id string) error {
	_, err := r.client.Terminate(ctx, id)
	return callError(err)
}

func (r *region) NewestImage(ctx context.Context, pattern string) (string, error) {
	i, err := r.client.NewestImage(ctx, pattern, r.owners)
	return i.ID, callError(err)
}

func (r *region) Run(ctx context.Context, l worker.Launch) (controller.Instance, error) {
	i, err := r.client.Run(ctx, ec2.Launch{ClientToken: l.Token, ImageID: l.AMIID, InstanceType: l.InstanceType, SubnetID: l.SubnetID,
		SecurityGroupIDs: l.SecurityGroupIDs, KeyName: l.KeyName, IAMInstanceProfile: l.IAMInstanceProfile, UserData: l.UserData, Tags: l.Tags, Hibernation: l.Hibernation, RootVolume: rootVolume(l.RootVolume)})
	return instanceFrom(i), callError(err)
}

func rootVolume(v *worker.LaunchVolume) *ec2.RootVolume {
	if v == nil {
		return nil
	}
	return &ec2.RootVolume{Device: v.Device, SizeGiB: int32(v.GB), Type: v.Type, Encrypted: v.Encrypted}
}

// Machine describes what a launch would create.
func (r *region) Machine(ctx context.Context, imageID, instanceType string) (controller.Machine, error) {
	m, err := r.client.Machine(ctx, imageID, instanceType)
	return controller.Machine{Hibernates: m.Hibernates, Why: m.Why, MemoryMiB: int(m.MemoryMiB), RootDevice: m.RootDevice, RootGB: int(m.RootGiB)}, callError(err)
}

func (r *region) DeleteTags(ctx context.Context, ids []string, keys []string) error {
	return callError(r.client.DeleteTags(ctx, ids, keys))
}

func (r *region) CreateTags(ctx context.Context, ids []string, tags map[string]string) error {
	return callError(r.client.CreateTags(ctx, ids, tags))
}

// Preflight returns the codes of what speaks against a stop. Checks that could not be
// made are reported as *controller.UncheckedRisks.
func (r *region) Preflight(ctx context.Context, id string) ([]string, error) {
	p, err := r.client.Preflight(ctx, id)
	if err != nil {
		return nil, callError(err)
	}
	switch ec2.KindOf(p.StopProtected.Err) {
	case ec2.Throttled, ec2.Canceled:
		// This check would take one call per instance, too many for a large fleet.
		// EC2 itself refuses to stop a protected instance.
		p.StopProtected = ec2.Check{}
	}
	var found, unchecked []string
	var errs []error
	for _, c := range []struct {
		code  string
		check ec2.Check
	}{
		{worker.RiskInstanceStore, p.InstanceStore}, {worker.RiskNoElasticIP, p.ChangesAddress}, {worker.RiskASGMember, p.AutoScaling},
		{worker.RiskSpot, p.Spot}, {worker.RiskStopProtected, p.StopProtected},
	} {
		switch {
		case c.check.Err != nil:
			unchecked = append(unchecked, c.code)
			errs = append(errs, callError(c.check.Err))
		case c.check.Set:
			found = append(found, c.code)
		}
	}
	if len(errs) == 0 {
		return found, nil
	}
	return found, &controller.UncheckedRisks{Codes: unchecked, Err: errors.Join(errs...)}
}

// Volumes returns the sizes and types of volumes.
func (r *region) Volumes(ctx context.Context, ids []string) (map[string]worker.Volume, error) {
	found, err := r.client.Volumes(ctx, ids)
	out := make(map[string]worker.Volume, len(found))
	for id, v := range found {
		out[id] = worker.Volume{ID: id, Type: v.Type, GB: v.GiB}
	}
	return out, callError(err)
}

// Load reads CloudWatch. Metrics without a value are nil; a failed read also sets
// Err.
func (r *region) Load(ctx context.Context, ids []string, since time.Time) map[string]controller.Load {
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
