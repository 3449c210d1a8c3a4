package world

import (
	"cmp"
	"fmt"
	"time"
)

// populate creates the instances that a scenario starts with.
func (w *World) populate(now Moment, c WorkerConfig) error {
	account := cmp.Or(c.Account, w.cfg.Accounts[0].ID)
	r := w.regions[regionKey{account, cmp.Or(c.Region, w.cfg.Regions[0].Name)}]
	spec := LaunchSpec{
		Account: account, Region: r.Name, Image: cmp.Or(c.Image, r.Images[0].ID), Type: cmp.Or(c.Type, "m5.large"),
		Min: 1, Max: 1, Profile: c.InstanceProfile, Hibernation: c.Hibernation, NoStop: c.NoStop, Spot: c.Spot,
		HopLimit: c.HopLimit, TokensRequired: c.TokensRequired, TagsInMetadata: c.TagsInMetadata, VolumeGB: c.VolumeGB,
		profileOfUse: c.Profile,
	}
	if spec.Hibernation && c.VolumeGB == 0 {
		spec.VolumeGB = 200
	}
	spec.EncryptedVolume = spec.Hibernation
	img, typ, err := w.checkLaunch(r, &spec)
	if err != nil {
		return fmt.Errorf("cannot use scenario: worker %q: %w", c.Name, err)
	}
	for k := range max(c.Count, 1) {
		s := spec
		s.name = c.Name
		if c.Count > 1 {
			s.name = fmt.Sprintf("%s-%d", c.Name, k+1)
		}
		if w.byName[s.name] != nil {
			return fmt.Errorf("cannot use scenario: two workers are named %q", s.name)
		}
		w.createPast(now, w.makeInstance(now, r, s, img, typ), c)
	}
	return nil
}

// createPast gives an instance of the scenario the past that c describes.
func (w *World) createPast(now Moment, i *Instance, c WorkerConfig) {
	up := c.Up.D()
	if up == 0 {
		up = time.Hour
	}
	past := Moment{World: now.World.Add(-up), Wire: now.Wire.Add(-up)}
	i.Reservation = w.newID("r")
	i.Created, i.Launched, i.Visible = past.Wire, past.Wire, time.Time{}
	i.shown, i.shownTo = nil, time.Time{}
	i.Elastic, i.InstanceStore, i.Agent = c.Elastic, c.InstanceStore, c.Agent
	tags := map[string]string{"Name": i.Name}
	for k, v := range c.Tags {
		tags[k] = v
	}
	i.Tags = MakeTags(tags)
	i.Boots = 1
	if c.State == Stopped {
		i.State = Stopped
		i.Reason = stopReason(past, "user", false)
		if i.Elastic {
			w.address(i)
		}
		return
	}
	w.address(i)
	i.State, i.UpSince = Running, past.World
	if i.Host != nil {
		i.Host.powerOn(past.World)
		i.Host.noisy = now.World
	}
}
