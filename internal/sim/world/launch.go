package world

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// LaunchSpec contains the parameters of RunInstances.
type LaunchSpec struct {
	Account, Region    string
	Image, Type        string
	Min, Max           int
	Token              string
	Subnet, Key        string
	Zone               string
	Groups             []string
	Profile            string // name or ARN
	UserData           []byte
	Tags, VolumeTags   []Tag
	Hibernation        bool
	NoStop, NoTerm     bool
	OnShutdown         string
	Spot               bool
	HopLimit           int
	TokensRequired     bool
	TagsInMetadata     bool
	VolumeGB           int
	VolumeType         string
	VolumeDevice       string // device whose mapping describes the volume, or empty
	EncryptedVolume    bool
	name, profileOfUse string // set only for the scenario's own workers
}

// fingerprint returns a value that is equal for launches with equal parameters.
func (s LaunchSpec) fingerprint() string {
	s.Token = ""
	b, err := json.Marshal(s)
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:12])
}

// Launch starts instances and visits each of them in order. If the ClientToken was
// seen before with the same parameters, these are the instances of the earlier
// launch.
func (w *World) Launch(s LaunchSpec, dryRun func() error, visit func(*Instance, Moment)) (reservation string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := w.Clock.Now()
	r, ok := w.regions[regionKey{s.Account, s.Region}]
	if !ok {
		return "", refuse(401, "AuthFailure", "account %s has no region %q", s.Account, s.Region)
	}
	if err := dryRun(); err != nil {
		return "", err
	}
	key, print := tokenKey{s.Account, s.Region, s.Token}, s.fingerprint()
	if l := w.tokens[key]; s.Token != "" && l != nil && (l.until.IsZero() || now.Wire.Before(l.until)) {
		return w.again(now, l, print, visit)
	}
	img, typ, err := w.checkLaunch(r, &s)
	if err != nil {
		return "", err
	}
	n, err := w.capacityLeft(now, r, s, typ)
	if err != nil {
		return "", err
	}
	reservation = w.newID("r")
	l := &launched{print: print, reservation: reservation}
	for k := range n {
		i := w.makeInstance(now, r, s, img, typ)
		i.Reservation, i.LaunchIndex = reservation, k
		l.ids = append(l.ids, i.ID)
		w.boot(now, i, "api")
		visit(i, now)
	}
	if s.Token != "" {
		w.tokens[key] = l
	}
	return reservation, nil
}

// again returns the result of an earlier launch with the same token.
func (w *World) again(now Moment, l *launched, print string, visit func(*Instance, Moment)) (string, error) {
	if l.print != print {
		return "", Refuse("IdempotentParameterMismatch", "Arguments on this idempotent request are inconsistent with arguments used in previous request(s).")
	}
	for _, id := range l.ids {
		if i := w.byID[id]; i != nil {
			w.advance(now, i)
			visit(i, now)
		}
	}
	return l.reservation, nil
}

// checkLaunch validates a launch and fills in the region's defaults.
func (w *World) checkLaunch(r *Region, s *LaunchSpec) (Image, TypeInfo, error) {
	if s.Image == "" {
		return Image{}, TypeInfo{}, Refuse("MissingParameter", "The request must contain the parameter ImageId")
	}
	k := slices.IndexFunc(r.Images, func(i Image) bool { return i.ID == s.Image })
	if k < 0 {
		return Image{}, TypeInfo{}, Refuse("InvalidAMIID.NotFound", "The image id '[%s]' does not exist", s.Image)
	}
	if s.Type == "" {
		s.Type = "m1.small"
	}
	typ, ok := LookupType(s.Type)
	if !ok {
		return Image{}, TypeInfo{}, Refuse("InvalidParameterValue", "Invalid value '%s' for InstanceType.", s.Type)
	}
	if s.Min < 1 || s.Max < s.Min || s.Max > 10000 {
		return Image{}, TypeInfo{}, Refuse("InvalidParameterValue", "Invalid value for MinCount %d and MaxCount %d", s.Min, s.Max)
	}
	if s.Subnet == "" {
		s.Subnet = r.Subnets[0].ID
	}
	sub := slices.IndexFunc(r.Subnets, func(x Subnet) bool { return x.ID == s.Subnet })
	if sub < 0 {
		return Image{}, TypeInfo{}, Refuse("InvalidSubnetID.NotFound", "The subnet ID '%s' does not exist", s.Subnet)
	}
	s.Zone = r.Subnets[sub].Zone
	for _, g := range s.Groups {
		if !slices.Contains(r.Groups, g) {
			return Image{}, TypeInfo{}, Refuse("InvalidGroup.NotFound", "The security group '%s' does not exist", g)
		}
	}
	if s.Profile != "" && !w.hasRole(r.Account, profileName(s.Profile)) {
		return Image{}, TypeInfo{}, Refuse("InvalidParameterValue", "Value (%s) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name", s.Profile)
	}
	if len(s.UserData) > 16<<10 {
		return Image{}, TypeInfo{}, Refuse("InvalidParameterValue", "User data is limited to 16384 bytes")
	}
	if err := checkTags(s.Tags); err != nil {
		return Image{}, TypeInfo{}, err
	}
	if err := checkRoot(s, r.Images[k], typ); err != nil {
		return Image{}, TypeInfo{}, err
	}
	return r.Images[k], typ, nil
}

// RootDevice is the name of every image's root device.
const RootDevice = "/dev/xvda"

// checkRoot checks the root volume against EC2's rules. It must not be smaller than
// the image's snapshot. For hibernation, it must be encrypted and have space for the
// memory, which must be below 150 GiB.
func checkRoot(s *LaunchSpec, img Image, typ TypeInfo) error {
	root := s.VolumeDevice == "" || s.VolumeDevice == RootDevice
	size := max(img.SizeGB, 8)
	if s.VolumeGB > 0 && root {
		if s.VolumeGB < size {
			return Refuse("InvalidBlockDeviceMapping", "Volume of size %dGB is smaller than snapshot 'snap-%s', expect size >= %dGB", s.VolumeGB, s.Image[4:], size)
		}
		size = s.VolumeGB
	}
	memory := (typ.MemoryMiB + 1023) / 1024
	const code = "UnsupportedHibernationConfiguration"
	switch {
	case !s.Hibernation:
	case !typ.Hibernation || typ.Metal || memory >= 150:
		return Refuse(code, "Hibernation is not supported on instance type %s", s.Type)
	case s.EncryptedVolume && !root || !s.EncryptedVolume && !img.Encrypted:
		return Refuse(code, "The root volume must be encrypted to enable hibernation.")
	case size <= memory:
		return Refuse(code, "The root volume of %d GiB is too small to store the contents of RAM (%d GiB).", size, memory)
	}
	return nil
}

func profileName(p string) string { return p[strings.LastIndexByte(p, '/')+1:] }

// capacityLeft returns how many instances of the launch fit into the region's
// capacity.
func (w *World) capacityLeft(now Moment, r *Region, s LaunchSpec, typ TypeInfo) (int, error) {
	limit, limited := r.Capacity[s.Type]
	if !limited {
		return s.Max, nil
	}
	w.advanceType(now, r, s.Type)
	used := r.up(s.Type)
	if used+s.Min > limit {
		return 0, noCapacity(typ.Name)
	}
	return min(s.Max, limit-used), nil
}

func noCapacity(typ string) *Error {
	return refuse(500, "InsufficientInstanceCapacity", "We currently do not have sufficient %s capacity in the Availability Zone you requested.", typ)
}

// fits reports whether capacity remains for i to start, if others of its type are
// about to start too.
func (w *World) fits(i *Instance, others int) bool {
	r := w.regions[regionKey{i.Account, i.Region}]
	limit, limited := r.Capacity[i.Type]
	return !limited || r.up(i.Type)+others < limit
}

// advanceType advances all instances of a type to now, if their number is
// limited.
func (w *World) advanceType(now Moment, r *Region, typ string) {
	if _, limited := r.Capacity[typ]; !limited {
		return
	}
	for _, i := range r.list {
		if i.Type == typ {
			w.advance(now, i)
		}
	}
}

// up returns how many instances of a type use capacity, by their last known state. It
// advances none of them, because it is called while an instance is being advanced.
func (r *Region) up(typ string) int {
	used := 0
	for _, i := range r.list {
		if i.Type == typ && (i.State == Pending || i.State == Running || i.State == Stopping) {
			used++
		}
	}
	return used
}

func (w *World) makeInstance(now Moment, r *Region, s LaunchSpec, img Image, typ TypeInfo) *Instance {
	i := &Instance{
		ID: w.newID("i"), Account: s.Account, Region: s.Region, Name: s.name,
		Zone: s.Zone, Subnet: s.Subnet, Type: s.Type, Image: s.Image, Key: s.Key,
		Profile: profileName(s.Profile), Groups: s.Groups, ClientToken: s.Token,
		Created: now.Wire, Launched: now.Wire,
		Hibernation: s.Hibernation, NoStop: s.NoStop, NoTerminate: s.NoTerm, OnShutdown: s.OnShutdown,
		Spot: s.Spot, UserData: s.UserData, HopLimit: s.HopLimit, TokensRequired: s.TokensRequired,
		TagsInMetadata: s.TagsInMetadata, Volume: w.newID("vol"), VolumeGB: s.VolumeGB, VolumeType: s.VolumeType, Encrypted: s.EncryptedVolume,
		Tags: Tags(nil).with(s.Tags), Visible: now.Wire.Add(w.cfg.Consistency.Instances.D()),
	}
	i.Seq = w.seq
	if k := slices.IndexFunc(r.Subnets, func(x Subnet) bool { return x.ID == s.Subnet }); k >= 0 {
		i.VPC = r.Subnets[k].VPC
	}
	if i.OnShutdown == "" {
		i.OnShutdown = "stop"
	}
	if i.HopLimit == 0 {
		i.HopLimit = 1
	}
	if i.VolumeGB == 0 {
		i.VolumeGB = max(img.SizeGB, 8)
	}
	if i.VolumeType == "" {
		i.VolumeType = "gp3"
	}
	w.privateN++
	i.PrivateIP = netip.AddrFrom4([4]byte{10, byte(w.privateN >> 16), byte(w.privateN >> 8), byte(w.privateN)})
	w.byPrivate[i.PrivateIP] = i
	if d := w.cfg.Consistency.Tags.D(); d > 0 {
		i.shownTo = now.Wire.Add(d)
	}
	if img.CML != "" {
		i.cmlBoot = w.cfg.Timing.CMLBoot.D()
		profile := s.profileOfUse
		if profile == "" {
			profile = w.cfg.LaunchedProfile
		}
		i.Host = w.newHost(now, i, img.CML, profile)
	}
	r.list = append(r.list, i)
	w.byID[i.ID] = i
	if i.Name != "" {
		w.byName[i.Name] = i
	}
	return i
}

// boot puts an instance into pending.
func (w *World) boot(now Moment, i *Instance, by string) {
	i.become(now, Pending, by)
	i.Reason = Reason{}
	i.Launched = now.Wire
	i.Gone = time.Time{}
	w.address(i)
	d := w.jitter(i, w.cfg.Timing.Pending)
	w.due(now, i, Running, d)
	if e := w.Faults.Pick(now.Wire, boots(i)); e.Rule.Code != "" {
		i.DueTo, i.Reason = Stopped, Reason{Code: e.Rule.Code, Message: e.Rule.Code + ": " + e.Rule.Message}
		if i.Boots == 0 {
			i.DueTo = Terminated
		}
	}
}

// address assigns a public address to an instance. An address is reused only after
// all others of the pool.
func (w *World) address(i *Instance) {
	if i.PublicIP.IsValid() {
		return
	}
	pool := w.cfg.addresses
	base := pool.Addr().As4()
	size := uint32(1) << (32 - pool.Bits())
	start := uint32(base[0])<<24 | uint32(base[1])<<16 | uint32(base[2])<<8 | uint32(base[3])
	for range size {
		w.publicN++
		off := w.publicN % size
		if last := byte(off); last == 0 || last == 255 {
			continue
		}
		v := start + off
		a := netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
		if _, used := w.byPublic[a]; !used {
			i.PublicIP = a
			w.byPublic[a] = i
			return
		}
	}
}

func (w *World) due(now Moment, i *Instance, to State, d time.Duration) {
	i.Due, i.DueTo = now.World.Add(d), to
}

// jitter varies a duration randomly by the configured share. Equal seeds give equal
// results.
func (w *World) jitter(i *Instance, d Duration) time.Duration {
	w.seq++
	g := seedDice(w.cfg.Seed+w.seq, i.ID)
	return g.around(d.D(), w.cfg.Timing.Jitter)
}
