package ec2sim

import (
	"slices"
	"strings"

	"lull/internal/sim/world"
)

func (c *call) describeInstanceTypes() error {
	names := c.form.List("InstanceType")
	fs, err := filters(c.form, "instance-type", "hibernation-supported", "instance-storage-supported", "bare-metal")
	if err != nil {
		return err
	}
	for _, n := range names {
		if _, ok := world.LookupType(n); !ok {
			return world.Refuse("InvalidInstanceType", "The following supplied instance types do not exist: [%.40s]", n)
		}
	}
	limit, after, err := c.page(5, 100)
	if err != nil {
		return err
	}
	yes := map[bool]string{true: "true", false: "false"}
	n, more := 0, uint64(0)
	c.x.Open("instanceTypeSet")
	for k := int(min(after, uint64(len(world.Types)))); k < len(world.Types); k++ {
		t := world.Types[k]
		if len(names) > 0 && !slices.Contains(names, t.Name) || slices.ContainsFunc(fs, func(f filter) bool {
			return !f.any(map[string]string{"instance-type": t.Name, "hibernation-supported": yes[t.Hibernation], "instance-storage-supported": yes[t.StoreGB > 0], "bare-metal": yes[t.Metal]}[f.name])
		}) {
			continue
		}
		if n == limit {
			more = uint64(k)
			break
		}
		n++
		c.instanceType(t)
	}
	c.x.Close("instanceTypeSet")
	c.next(more)
	return nil
}

func (c *call) instanceType(t world.TypeInfo) {
	x := &c.x
	x.In("item", func() {
		x.Text("instanceType", t.Name)
		x.Bool("currentGeneration", !strings.HasPrefix(t.Name, "m1."))
		x.Bool("bareMetal", t.Metal)
		x.Bool("hibernationSupported", t.Hibernation)
		x.Bool("instanceStorageSupported", t.StoreGB > 0)
		if t.StoreGB > 0 {
			x.In("instanceStorageInfo", func() { x.Int("totalSizeInGB", t.StoreGB) })
		}
		x.In("vCpuInfo", func() { x.Int("defaultVCpus", t.CPUs) })
		x.In("memoryInfo", func() { x.Int("sizeInMiB", t.MemoryMiB) })
		x.In("processorInfo", func() {
			x.In("supportedArchitectures", func() { x.Text("item", arch(t.Name)) })
		})
		if t.GPU {
			x.In("gpuInfo", func() { x.In("gpus", func() { x.In("item", func() { x.Int("count", 1) }) }) })
		}
	})
}

func (c *call) describeRegions() error {
	names := c.form.List("RegionName")
	c.x.Open("regionInfo")
	for _, r := range c.w.Config().Regions {
		if len(names) > 0 && !slices.Contains(names, r.Name) {
			continue
		}
		c.x.In("item", func() {
			c.x.Text("regionName", r.Name)
			c.x.Text("regionEndpoint", "ec2."+r.Name+".amazonaws.com")
			c.x.Text("optInStatus", "opt-in-not-required")
		})
	}
	c.x.Close("regionInfo")
	return nil
}

func (c *call) describeSubnets() error {
	ids := c.form.List("SubnetId")
	c.x.Open("subnetSet")
	n := 0
	err := c.w.Region(c.who.Account, c.region, func(r *world.Region) {
		for _, s := range r.Subnets {
			if len(ids) > 0 && !slices.Contains(ids, s.ID) {
				continue
			}
			n++
			c.x.In("item", func() {
				c.x.Text("subnetId", s.ID)
				c.x.Text("state", "available")
				c.x.Text("vpcId", s.VPC)
				c.x.Text("availabilityZone", s.Zone)
			})
		}
	})
	c.x.Close("subnetSet")
	if err == nil && n < len(ids) {
		err = world.Refuse("InvalidSubnetID.NotFound", "The subnet ID '%.40s' does not exist", ids[0])
	}
	return err
}

func (c *call) describeSecurityGroups() error {
	ids := c.form.List("GroupId")
	c.x.Open("securityGroupInfo")
	n := 0
	err := c.w.Region(c.who.Account, c.region, func(r *world.Region) {
		for _, g := range r.Groups {
			if len(ids) > 0 && !slices.Contains(ids, g) {
				continue
			}
			n++
			c.x.In("item", func() {
				c.x.Text("ownerId", r.Account)
				c.x.Text("groupId", g)
				c.x.Text("groupName", g)
			})
		}
	})
	c.x.Close("securityGroupInfo")
	if err == nil && n < len(ids) {
		err = world.Refuse("InvalidGroup.NotFound", "The security group '%.40s' does not exist", ids[0])
	}
	return err
}
