package ec2sim

import (
	"encoding/base64"
	"slices"
	"strings"
	"time"

	"lull/internal/sim/world"
)

func (c *call) describeInstances() error {
	ids := c.form.List("InstanceId")
	fs, err := filters(c.form, instanceFilters...)
	if err != nil {
		return err
	}
	limit, after, err := c.page(5, 1000)
	if err != nil {
		return err
	}
	if len(ids) > 0 && (c.form.Has("MaxResults") || c.form.Has("NextToken")) {
		return world.Refuse("InvalidParameterCombination", "The parameter instancesSet cannot be used with the parameter maxResults")
	}
	if len(ids) > 0 {
		limit = 0
	}
	c.x.Open("reservationSet")
	more, err := c.w.Instances(world.Query{
		Account: c.who.Account, Region: c.region, IDs: ids, After: after, Limit: limit, Match: matcher(fs),
	}, func(i *world.Instance, now world.Moment) {
		c.x.Open("item")
		c.reservation(i.Reservation, i.Account)
		c.x.Open("instancesSet")
		c.instance(i, now)
		c.x.Close("instancesSet")
		c.x.Close("item")
	})
	c.x.Close("reservationSet")
	c.next(more)
	return err
}

func (c *call) reservation(id, account string) {
	c.x.Text("reservationId", id)
	c.x.Text("ownerId", account)
	c.x.Text("groupSet", "")
}

// instance writes one instance as in DescribeInstances and RunInstances.
func (c *call) instance(i *world.Instance, now world.Moment) {
	x := &c.x
	x.Open("item")
	x.Text("instanceId", i.ID)
	x.Text("imageId", i.Image)
	state(c, "instanceState", i.State)
	x.Text("privateDnsName", dns(i.PrivateIP.IsValid(), "ip-", i.PrivateIP.String(), ".ec2.internal"))
	x.Text("dnsName", dns(i.PublicIP.IsValid(), "ec2-", i.PublicIP.String(), ".compute.amazonaws.com"))
	x.Text("reason", i.Reason.Transition)
	x.Maybe("keyName", i.Key)
	x.Int("amiLaunchIndex", i.LaunchIndex)
	x.Text("instanceType", i.Type)
	x.Time("launchTime", i.Launched)
	x.In("placement", func() {
		x.Text("availabilityZone", i.Zone)
		x.Text("groupName", "")
		x.Text("tenancy", "default")
	})
	x.In("monitoring", func() { x.Text("state", "disabled") })
	if i.State != world.Terminated {
		x.Maybe("subnetId", i.Subnet)
		x.Maybe("vpcId", i.VPC)
	}
	if i.PrivateIP.IsValid() {
		x.Text("privateIpAddress", i.PrivateIP.String())
	}
	if i.PublicIP.IsValid() {
		x.Text("ipAddress", i.PublicIP.String())
	}
	x.Bool("sourceDestCheck", true)
	x.In("groupSet", func() {
		for _, g := range i.Groups {
			x.In("item", func() {
				x.Text("groupId", g)
				x.Text("groupName", g)
			})
		}
	})
	if i.Reason.Code != "" {
		x.In("stateReason", func() {
			x.Text("code", i.Reason.Code)
			x.Text("message", i.Reason.Message)
		})
	}
	c.machine(i)
	tagSet(c, i.TagsAt(now.Wire))
	x.Close("item")
}

// machine writes the hardware and image of an instance.
func (c *call) machine(i *world.Instance) {
	x := &c.x
	x.Text("architecture", arch(i.Type))
	x.Text("rootDeviceType", rootType(i))
	x.Text("rootDeviceName", "/dev/xvda")
	x.In("blockDeviceMapping", func() {
		if i.InstanceStore || i.State == world.Terminated {
			return
		}
		x.In("item", func() {
			x.Text("deviceName", "/dev/xvda")
			x.In("ebs", func() {
				x.Text("volumeId", i.Volume)
				x.Text("status", "attached")
				x.Time("attachTime", i.Created)
				x.Bool("deleteOnTermination", true)
			})
		})
	})
	x.Text("virtualizationType", "hvm")
	x.Maybe("clientToken", i.ClientToken)
	x.Text("hypervisor", "xen")
	if i.Spot {
		x.Text("instanceLifecycle", "spot")
		x.Text("spotInstanceRequestId", "sir-"+i.ID[len(i.ID)-8:])
	}
	if i.Profile != "" {
		x.In("iamInstanceProfile", func() {
			x.Text("arn", profileARN(i))
			x.Text("id", "AIPA"+strings.ToUpper(i.ID[len(i.ID)-16:]))
		})
	}
	x.In("hibernationOptions", func() { x.Bool("configured", i.Hibernation) })
	x.In("metadataOptions", func() {
		x.Text("state", "applied")
		x.Text("httpTokens", choose(i.TokensRequired, "required", "optional"))
		x.Int("httpPutResponseHopLimit", i.HopLimit)
		x.Text("httpEndpoint", "enabled")
		x.Text("instanceMetadataTags", choose(i.TagsInMetadata, "enabled", "disabled"))
	})
	x.Text("platformDetails", "Linux/UNIX")
}

func choose(yes bool, a, b string) string {
	if yes {
		return a
	}
	return b
}

func dns(ok bool, before, addr, after string) string {
	if !ok {
		return ""
	}
	return before + strings.ReplaceAll(addr, ".", "-") + after
}

func state(c *call, name string, s world.State) {
	c.x.Open(name)
	c.x.Int("code", s.Code())
	c.x.Text("name", string(s))
	c.x.Close(name)
}

func tagSet(c *call, tags world.Tags) {
	if len(tags) == 0 {
		return
	}
	c.x.Open("tagSet")
	for _, t := range tags {
		c.x.Open("item")
		c.x.Text("key", t.Key)
		c.x.Text("value", t.Value)
		c.x.Close("item")
	}
	c.x.Close("tagSet")
}

var statusFilters = []string{"availability-zone", "instance-state-name", "instance-state-code", "instance-id", "tag:", "instance-status.status", "system-status.status"}

func (c *call) describeInstanceStatus() error {
	ids := c.form.List("InstanceId")
	fs, err := filters(c.form, statusFilters...)
	if err != nil {
		return err
	}
	limit, after, err := c.page(5, 1000)
	if err != nil {
		return err
	}
	if len(ids) > 0 && c.form.Has("MaxResults") {
		return world.Refuse("InvalidParameterCombination", "The parameter instancesSet cannot be used with the parameter maxResults")
	}
	all, err := c.form.Bool("IncludeAllInstances")
	if err != nil {
		return err
	}
	if len(ids) > 0 {
		limit = 0
	}
	fresh := c.w.Clock.Now().World.Add(-2 * time.Minute)
	match := func(i *world.Instance, wire time.Time) bool {
		if !all && i.State != world.Running {
			return false
		}
		for _, f := range fs {
			ok := false
			switch f.name {
			case "instance-status.status", "system-status.status":
				ok = f.any(health(i, fresh))
			default:
				ok = f.instance(i, wire)
			}
			if !ok {
				return false
			}
		}
		return true
	}
	c.x.Open("instanceStatusSet")
	more, err := c.w.Instances(world.Query{
		Account: c.who.Account, Region: c.region, IDs: ids, After: after, Limit: limit, Match: match,
	}, func(i *world.Instance, _ world.Moment) { c.status(i, health(i, fresh)) })
	c.x.Close("instanceStatusSet")
	c.next(more)
	return err
}

// health returns the result of an instance's status checks.
func health(i *world.Instance, fresh time.Time) string {
	switch {
	case i.State != world.Running:
		return "not-applicable"
	case i.Impaired:
		return "impaired"
	case i.UpSince.After(fresh):
		return "initializing"
	}
	return "ok"
}

func (c *call) status(i *world.Instance, health string) {
	x := &c.x
	x.Open("item")
	x.Text("instanceId", i.ID)
	x.Text("availabilityZone", i.Zone)
	state(c, "instanceState", i.State)
	detail := map[string]string{"ok": "passed", "impaired": "failed", "initializing": "initializing"}[health]
	for _, name := range []string{"systemStatus", "instanceStatus"} {
		x.Open(name)
		x.Text("status", health)
		if detail != "" {
			x.Open("details")
			x.Open("item")
			x.Text("name", "reachability")
			x.Text("status", detail)
			x.Close("item")
			x.Close("details")
		}
		x.Close(name)
	}
	x.Close("item")
}

func (c *call) runInstances() error {
	s, err := c.launchSpec()
	if err != nil {
		return err
	}
	var first, rest = true, c.x
	reservation, err := c.w.Launch(s, c.check, func(i *world.Instance, now world.Moment) {
		if first {
			c.reservation(i.Reservation, i.Account)
			c.x.Open("instancesSet")
			first = false
		}
		c.instance(i, now)
	})
	if err != nil {
		c.x = rest
		return err
	}
	if first {
		c.reservation(reservation, c.who.Account)
		c.x.Open("instancesSet")
	}
	c.x.Close("instancesSet")
	return nil
}

func (c *call) launchSpec() (world.LaunchSpec, error) {
	f := c.form
	s := world.LaunchSpec{
		Account: c.who.Account, Region: c.region, Image: f.Get("ImageId"), Type: f.Get("InstanceType"),
		Token: f.Get("ClientToken"), Subnet: f.Get("SubnetId"), Key: f.Get("KeyName"), Groups: f.List("SecurityGroupId"),
		OnShutdown: f.Get("InstanceInitiatedShutdownBehavior"), Spot: f.Get("InstanceMarketOptions.MarketType") == "spot",
		TokensRequired: f.Get("MetadataOptions.HttpTokens") == "required",
		TagsInMetadata: f.Get("MetadataOptions.InstanceMetadataTags") == "enabled",
		VolumeDevice:   f.Get("BlockDeviceMapping.1.DeviceName"), VolumeType: f.Get("BlockDeviceMapping.1.Ebs.VolumeType"),
	}
	if s.Profile = f.Get("IamInstanceProfile.Name"); s.Profile == "" {
		s.Profile = f.Get("IamInstanceProfile.Arn")
	}
	if f.Has("NetworkInterface.1.SubnetId") {
		s.Subnet, s.Groups = f.Get("NetworkInterface.1.SubnetId"), f.List("NetworkInterface.1.SecurityGroupId")
	}
	if len(s.Token) > 64 {
		return s, world.Refuse("InvalidParameterValue", "Value for parameter clientToken is longer than 64 characters")
	}
	var err error
	for _, n := range []struct {
		key string
		def int
		to  *int
	}{{"MinCount", 0, &s.Min}, {"MaxCount", 0, &s.Max}, {"MetadataOptions.HttpPutResponseHopLimit", 0, &s.HopLimit}, {"BlockDeviceMapping.1.Ebs.VolumeSize", 0, &s.VolumeGB}} {
		if *n.to, err = f.Int(n.key, n.def); err != nil {
			return s, err
		}
	}
	for _, b := range []struct {
		key string
		to  *bool
	}{{"HibernationOptions.Configured", &s.Hibernation}, {"DisableApiStop", &s.NoStop}, {"DisableApiTermination", &s.NoTerm}, {"BlockDeviceMapping.1.Ebs.Encrypted", &s.EncryptedVolume}} {
		if *b.to, err = f.Bool(b.key); err != nil {
			return s, err
		}
	}
	if u := f.Get("UserData"); u != "" {
		if s.UserData, err = base64.StdEncoding.DecodeString(u); err != nil {
			return s, world.Refuse("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data.")
		}
	}
	return s, c.launchTags(&s)
}

func (c *call) launchTags(s *world.LaunchSpec) error {
	for _, g := range c.form.Groups("TagSpecification") {
		tags := c.tags(g + "Tag")
		switch t := c.form.Get(g + "ResourceType"); t {
		case "instance":
			s.Tags = append(s.Tags, tags...)
		case "volume":
			s.VolumeTags = append(s.VolumeTags, tags...)
		case "network-interface", "spot-instances-request":
		default:
			return world.Refuse("InvalidParameterValue", "'%.40s' is not a valid taggable resource type for this operation.", t)
		}
	}
	return nil
}

func (c *call) tags(key string) []world.Tag {
	var out []world.Tag
	for _, g := range c.form.Groups(key) {
		out = append(out, world.Tag{Key: c.form.Get(g + "Key"), Value: c.form.Get(g + "Value")})
	}
	return out
}

func (c *call) startInstances() error {
	return c.changes(c.w.Start(c.who.Account, c.region, c.form.List("InstanceId"), "api", c.check))
}

func (c *call) stopInstances() error {
	var o world.StopOptions
	var err error
	if o.Hibernate, err = c.form.Bool("Hibernate"); err != nil {
		return err
	}
	if o.Force, err = c.form.Bool("Force"); err != nil {
		return err
	}
	return c.changes(c.w.Stop(c.who.Account, c.region, c.form.List("InstanceId"), o, "api", c.check))
}

func (c *call) terminateInstances() error {
	return c.changes(c.w.Terminate(c.who.Account, c.region, c.form.List("InstanceId"), "api", c.check))
}

func (c *call) changes(list []world.Change, err error) error {
	if err != nil {
		return err
	}
	c.x.Open("instancesSet")
	for _, ch := range list {
		c.x.Open("item")
		c.x.Text("instanceId", ch.ID)
		state(c, "currentState", ch.After)
		state(c, "previousState", ch.Before)
		c.x.Close("item")
	}
	c.x.Close("instancesSet")
	return nil
}

func (c *call) rebootInstances() error {
	if err := c.w.Reboot(c.who.Account, c.region, c.form.List("InstanceId"), c.check); err != nil {
		return err
	}
	c.x.Bool("return", true)
	return nil
}

// instanceIDs returns those of ids that are instances. Other kinds of resource have
// no tags in the simulator.
func instanceIDs(ids []string) ([]string, error) {
	k := slices.IndexFunc(ids, func(id string) bool { return !strings.HasPrefix(id, "i-") })
	if k >= 0 {
		return nil, world.Refuse("InvalidID", "The ID '%.40s' is not valid", ids[k])
	}
	return ids, nil
}
