package ec2sim

import (
	"encoding/base64"
	"errors"
	"slices"
	"strings"
	"time"

	"lull/internal/sim/world"
)

func (c *call) createTags() error {
	ids, err := instanceIDs(c.form.List("ResourceId"))
	if err != nil {
		return err
	}
	tags := c.tags("Tag")
	if len(tags) == 0 {
		return world.Refuse("MissingParameter", "The request must contain the parameter Tag")
	}
	if err := c.w.Tag(c.who.Account, c.region, ids, tags, c.check); err != nil {
		return err
	}
	c.x.Bool("return", true)
	return nil
}

func (c *call) deleteTags() error {
	ids, err := instanceIDs(c.form.List("ResourceId"))
	if err != nil {
		return err
	}
	var gone []world.TagChoice
	for _, g := range c.form.Groups("Tag") {
		t := world.TagChoice{Key: c.form.Get(g + "Key")}
		if c.form.Has(g + "Value") {
			v := c.form.Get(g + "Value")
			t.Value = &v
		}
		gone = append(gone, t)
	}
	if err := c.w.Untag(c.who.Account, c.region, ids, gone, c.check); err != nil {
		return err
	}
	c.x.Bool("return", true)
	return nil
}

// describeTags pages by instance, so a page may exceed MaxResults by the tags of one
// instance.
func (c *call) describeTags() error {
	fs, err := filters(c.form, "resource-id", "resource-type", "key", "value", "tag:")
	if err != nil {
		return err
	}
	limit, after, err := c.page(5, 1000)
	if err != nil {
		return err
	}
	n := 0
	q := world.Query{Account: c.who.Account, Region: c.region, After: after, Enough: func() bool { return n >= limit }}
	show := func(i *world.Instance, now world.Moment) {
		for _, t := range i.TagsAt(now.Wire) {
			if !tagMatches(fs, i, t) {
				continue
			}
			n++
			c.x.Open("item")
			c.x.Text("resourceId", i.ID)
			c.x.Text("resourceType", "instance")
			c.x.Text("key", t.Key)
			c.x.Text("value", t.Value)
			c.x.Close("item")
		}
	}
	c.x.Open("tagSet")
	ids, more := only(fs, "resource-id"), uint64(0)
	if ids == nil {
		more, err = c.w.Instances(q, show)
	}
	for _, id := range ids {
		q.IDs = []string{id}
		_, err := c.w.Instances(q, show)
		if e, ok := errors.AsType[*world.Error](err); ok && !strings.HasPrefix(e.Code, "InvalidInstanceID") {
			return err // a resource without tags is not an error, found or not
		}
	}
	c.x.Close("tagSet")
	c.next(more)
	return err
}

func tagMatches(fs []filter, i *world.Instance, t world.Tag) bool {
	for _, f := range fs {
		ok := false
		switch f.name {
		case "resource-id":
			ok = f.any(i.ID)
		case "resource-type":
			ok = f.any("instance")
		case "key":
			ok = f.any(t.Key)
		case "value":
			ok = f.any(t.Value)
		default:
			ok = f.name == "tag:"+t.Key && f.any(t.Value)
		}
		if !ok {
			return false
		}
	}
	return true
}

// only returns the values of the filter called name if all are plain; nil if the
// filter is absent or has patterns.
func only(fs []filter, name string) []string {
	for _, f := range fs {
		if f.name == name && !slices.ContainsFunc(f.values, func(v string) bool { return strings.ContainsAny(v, `*?\`) }) {
			return f.values
		}
	}
	return nil
}

func (c *call) describeImages() error {
	fs, err := filters(c.form, "name", "image-id", "state", "architecture", "owner-id", "tag:", "is-public", "virtualization-type", "root-device-type")
	if err != nil {
		return err
	}
	ids, owners := c.form.List("ImageId"), c.form.List("Owner")
	found := map[string]bool{}
	c.x.Open("imagesSet")
	err = c.w.Region(c.who.Account, c.region, func(r *world.Region) {
		for _, img := range r.Images {
			owner := img.Owner
			if owner == "" {
				owner = r.Account
			}
			if len(ids) > 0 && !slices.Contains(ids, img.ID) {
				continue
			}
			found[img.ID] = true
			mine := owner == r.Account && slices.Contains(owners, "self")
			if len(owners) > 0 && !mine && !slices.Contains(owners, owner) || !imageMatches(fs, img, owner) {
				continue
			}
			c.image(img, owner)
		}
	})
	c.x.Close("imagesSet")
	if err != nil {
		return err
	}
	for _, id := range ids {
		if !found[id] {
			return world.Refuse("InvalidAMIID.NotFound", "The image id '[%.40s]' does not exist", id)
		}
	}
	return nil
}

func imageMatches(fs []filter, img world.Image, owner string) bool {
	for _, f := range fs {
		ok := false
		switch f.name {
		case "name":
			ok = f.any(img.Name)
		case "image-id":
			ok = f.any(img.ID)
		case "state":
			ok = f.any("available")
		case "architecture":
			ok = f.any("x86_64")
		case "owner-id":
			ok = f.any(owner)
		case "is-public":
			ok = f.any("false")
		case "virtualization-type":
			ok = f.any("hvm")
		case "root-device-type":
			ok = f.any("ebs")
		}
		if !ok {
			return false
		}
	}
	return true
}

func (c *call) image(img world.Image, owner string) {
	x := &c.x
	x.In("item", func() {
		x.Text("imageId", img.ID)
		x.Text("imageLocation", owner+"/"+img.Name)
		x.Text("imageState", "available")
		x.Text("imageOwnerId", owner)
		x.Text("creationDate", stamp(img.Created))
		x.Bool("isPublic", false)
		x.Text("architecture", "x86_64")
		x.Text("imageType", "machine")
		x.Text("name", img.Name)
		x.Text("description", img.Name)
		x.Text("rootDeviceType", "ebs")
		x.Text("rootDeviceName", world.RootDevice)
		x.In("blockDeviceMapping", func() {
			x.In("item", func() {
				x.Text("deviceName", world.RootDevice)
				x.In("ebs", func() {
					x.Text("snapshotId", "snap-"+strings.TrimPrefix(img.ID, "ami-"))
					x.Int("volumeSize", max(img.SizeGB, 8))
					x.Bool("deleteOnTermination", true)
					x.Text("volumeType", "gp3")
					x.Bool("encrypted", img.Encrypted)
				})
			})
		})
		x.Text("virtualizationType", "hvm")
		x.Text("hypervisor", "xen")
	})
}

func (c *call) describeVolumes() error {
	fs, err := filters(c.form, "attachment.instance-id", "volume-id", "status", "volume-type")
	if err != nil {
		return err
	}
	ids := c.form.List("VolumeId")
	limit, after, err := c.page(5, 1000)
	if err != nil {
		return err
	}
	match := func(i *world.Instance, _ time.Time) bool {
		if i.State == world.Terminated || i.InstanceStore || len(ids) > 0 && !slices.Contains(ids, i.Volume) {
			return false
		}
		for _, f := range fs {
			v := map[string]string{"attachment.instance-id": i.ID, "volume-id": i.Volume, "status": "in-use", "volume-type": "gp3"}[f.name]
			if !f.any(v) {
				return false
			}
		}
		return true
	}
	n := 0
	c.x.Open("volumeSet")
	more, err := c.w.Instances(world.Query{Account: c.who.Account, Region: c.region, After: after, Limit: limit, Match: match}, func(i *world.Instance, _ world.Moment) {
		n++
		c.volume(i)
	})
	c.x.Close("volumeSet")
	if err == nil && n < len(ids) {
		return world.Refuse("InvalidVolume.NotFound", "The volume '%.40s' does not exist.", ids[0])
	}
	c.next(more)
	return err
}

func (c *call) volume(i *world.Instance) {
	x := &c.x
	x.In("item", func() {
		x.Text("volumeId", i.Volume)
		x.Int("size", i.VolumeGB)
		x.Text("availabilityZone", i.Zone)
		x.Text("status", "in-use")
		x.Time("createTime", i.Created)
		x.In("attachmentSet", func() {
			x.In("item", func() {
				x.Text("volumeId", i.Volume)
				x.Text("instanceId", i.ID)
				x.Text("device", "/dev/xvda")
				x.Text("status", "attached")
				x.Time("attachTime", i.Created)
				x.Bool("deleteOnTermination", true)
			})
		})
		x.Text("volumeType", i.VolumeType)
		x.Int("iops", 3000)
		x.Int("throughput", 125)
		x.Bool("encrypted", i.Encrypted)
	})
}

func (c *call) describeAddresses() error {
	fs, err := filters(c.form, "instance-id", "public-ip", "domain", "allocation-id")
	if err != nil {
		return err
	}
	c.x.Open("addressesSet")
	_, err = c.w.Instances(world.Query{Account: c.who.Account, Region: c.region, Match: func(i *world.Instance, _ time.Time) bool {
		if !i.Elastic || !i.PublicIP.IsValid() {
			return false
		}
		for _, f := range fs {
			v := map[string]string{"instance-id": i.ID, "public-ip": i.PublicIP.String(), "domain": "vpc", "allocation-id": allocation(i)}[f.name]
			if !f.any(v) {
				return false
			}
		}
		return true
	}}, func(i *world.Instance, _ world.Moment) {
		c.x.In("item", func() {
			c.x.Text("publicIp", i.PublicIP.String())
			c.x.Text("allocationId", allocation(i))
			c.x.Text("associationId", "eipassoc-"+i.ID[2:])
			c.x.Text("domain", "vpc")
			c.x.Text("instanceId", i.ID)
		})
	})
	c.x.Close("addressesSet")
	return err
}

func allocation(i *world.Instance) string { return "eipalloc-" + i.ID[2:] }

func (c *call) describeInstanceAttribute() error {
	id, attr := c.form.Get("InstanceId"), c.form.Get("Attribute")
	known := true
	_, err := c.w.Instances(world.Query{Account: c.who.Account, Region: c.region, IDs: []string{id}}, func(i *world.Instance, _ world.Moment) {
		c.x.Text("instanceId", i.ID)
		value := func(write func()) { c.x.In(attr, write) }
		switch attr {
		case "disableApiStop":
			value(func() { c.x.Bool("value", i.NoStop) })
		case "disableApiTermination":
			value(func() { c.x.Bool("value", i.NoTerminate) })
		case "instanceType":
			value(func() { c.x.Text("value", i.Type) })
		case "instanceInitiatedShutdownBehavior":
			value(func() { c.x.Text("value", i.OnShutdown) })
		case "rootDeviceName":
			value(func() { c.x.Text("value", "/dev/xvda") })
		case "userData":
			value(func() { c.x.Maybe("value", base64.StdEncoding.EncodeToString(i.UserData)) })
		default:
			known = false
		}
	})
	if err == nil && !known {
		err = world.Refuse("InvalidParameterValue", "Value (%.40s) for parameter attribute is invalid. Unknown attribute.", attr)
	}
	return err
}

func (c *call) modifyInstanceAttribute() error {
	var a world.Attributes
	for _, b := range []struct {
		key string
		to  **bool
	}{{"DisableApiStop.Value", &a.NoStop}, {"DisableApiTermination.Value", &a.NoTerminate}} {
		if !c.form.Has(b.key) {
			continue
		}
		v, err := c.form.Bool(b.key)
		if err != nil {
			return err
		}
		*b.to = &v
	}
	for _, s := range []struct {
		key string
		to  **string
	}{{"InstanceType.Value", &a.Type}, {"InstanceInitiatedShutdownBehavior.Value", &a.OnShutdown}} {
		if c.form.Has(s.key) {
			v := c.form.Get(s.key)
			*s.to = &v
		}
	}
	id := c.form.Get("InstanceId")
	if _, err := c.w.Instances(world.Query{Account: c.who.Account, Region: c.region, IDs: []string{id}}, func(*world.Instance, world.Moment) {}); err != nil {
		return err
	}
	if err := c.check(); err != nil {
		return err
	}
	if err := c.w.Set(id, a); err != nil {
		return err
	}
	c.x.Bool("return", true)
	return nil
}
