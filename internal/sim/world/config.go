package world

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"lull/internal/sim/fault"
)

// Duration is a time.Duration that scenarios write in Go's form, such as "90s".
type Duration time.Duration

// D returns d as a time.Duration.
func (d Duration) D() time.Duration { return time.Duration(d) }

// MarshalText writes Go's form.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.D().String()), nil }

// UnmarshalText reads Go's form.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return fmt.Errorf("cannot read duration %q: want the form 1h30m", b)
	}
	*d = Duration(v)
	return nil
}

// Config describes a world. Zero fields get the defaults that fill sets.
type Config struct {
	Seed  uint64    `yaml:"seed"`
	Speed float64   `yaml:"speed"` // default 1
	Start time.Time `yaml:"start"` // world's time at the start; default the present

	Accounts        []AccountConfig    `yaml:"accounts"`
	StrictKeys      bool               `yaml:"strict_keys"` // reject unknown access keys; otherwise they belong to the first account
	Regions         []RegionConfig     `yaml:"regions"`     // in every account
	Timing          Timing             `yaml:"timing"`
	Consistency     Consistency        `yaml:"consistency"`
	Limits          Limits             `yaml:"limits"`
	AddressPool     string             `yaml:"address_pool"` // IPv4 prefix of public addresses; default 127.64.0.0/10
	Profiles        map[string]Profile `yaml:"profiles"`
	LaunchedProfile string             `yaml:"launched_profile"` // profile of hosts that clients launch from a CML image
	Workers         []WorkerConfig     `yaml:"workers"`
	Faults          []fault.Rule       `yaml:"faults"`

	addresses netip.Prefix
}

// AccountConfig is one AWS account.
type AccountConfig struct {
	ID         string   `yaml:"id"`
	AccessKeys []string `yaml:"access_keys"`
	Roles      []Role   `yaml:"roles"` // each is also an instance profile
}

// RegionConfig is one region.
type RegionConfig struct {
	Name     string         `yaml:"name"`
	Zones    []string       `yaml:"zones"`
	Subnets  []Subnet       `yaml:"subnets"`
	Groups   []string       `yaml:"security_groups"`
	Images   []Image        `yaml:"images"`
	Capacity map[string]int `yaml:"capacity"` // maximum running instances, by instance type
}

// Subnet is a subnet that instances can be launched into.
type Subnet struct {
	ID   string `yaml:"id"`
	Zone string `yaml:"zone"`
	VPC  string `yaml:"vpc"`
}

// Image is one machine image.
type Image struct {
	ID      string    `yaml:"id"`
	Name    string    `yaml:"name"`
	Created time.Time `yaml:"created"`
	CML     string    `yaml:"cml"`   // version of CML inside; empty for a plain machine
	Owner   string    `yaml:"owner"` // default: the account of the client
	SizeGB  int       `yaml:"size_gb"`
	// Encrypted means that the image's snapshot, and so every volume made from it, is
	// encrypted.
	Encrypted bool `yaml:"encrypted"`
}

// Timing contains the durations of operations, in the world's time.
type Timing struct {
	Pending           Duration `yaml:"pending"`
	Stopping          Duration `yaml:"stopping"`
	Hibernating       Duration `yaml:"hibernating"`
	ShuttingDown      Duration `yaml:"shutting_down"`
	TerminatedVisible Duration `yaml:"terminated_visible"`
	CMLBoot           Duration `yaml:"cml_boot"`        // from running to CML ready
	HibernateReady    Duration `yaml:"hibernate_ready"` // from running until the instance can hibernate; default 0
	Licence           Duration `yaml:"licence"`         // from the accepted registration to its completion
	Background        Duration `yaml:"background"`      // between two events that CML logs by itself; negative means none
	Jitter            float64  `yaml:"jitter"`          // random deviation of durations, as a share in either direction; negative means none
}

// Consistency is how late reads show writes, in the client's time.
type Consistency struct {
	Instances Duration `yaml:"instances"`
	Tags      Duration `yaml:"tags"`
}

// Limits are the request rates above which calls are throttled; 0 means no
// limit.
type Limits struct {
	Reads   Rate `yaml:"reads"`
	Changes Rate `yaml:"changes"`
}

// Rate is a token bucket.
type Rate struct {
	Rate  float64 `yaml:"rate"` // tokens per second, in the client's time
	Burst float64 `yaml:"burst"`
}

// Profile describes how a CML host is set up and used.
type Profile struct {
	Users       []UserScript `yaml:"users"`
	Labs        int          `yaml:"labs"`
	Password    string       `yaml:"password"` // of every account; default "cml"
	TLSKey      string       `yaml:"tls_key"`  // seed of the TLS key in the image; if empty, each host generates its own
	NoOptIn     bool         `yaml:"no_opt_in"`
	Licensed    bool         `yaml:"licensed"`
	ClockOffset Duration     `yaml:"clock_offset"`
	TokenLife   Duration     `yaml:"token_life"`   // default 8h, client's time
	History     int          `yaml:"history"`      // number of events from before the start of the simulation
	HistorySpan Duration     `yaml:"history_span"` // age of the oldest such event; default 720h
	HistoryAge  Duration     `yaml:"history_age"`  // age of the newest such event; default 24h
	Spoil       Spoil        `yaml:"spoil"`
}

// WorkerConfig is one instance, or Count identical ones, that exist at the
// start.
type WorkerConfig struct {
	Name            string            `yaml:"name"` // if Count is above 1, a number is appended
	Count           int               `yaml:"count"`
	Account         string            `yaml:"account"`
	Region          string            `yaml:"region"`
	Type            string            `yaml:"type"`
	Image           string            `yaml:"image"`
	State           State             `yaml:"state"` // running (default) or stopped
	Tags            map[string]string `yaml:"tags"`
	Profile         string            `yaml:"profile"` // profile of the CML host
	InstanceProfile string            `yaml:"instance_profile"`
	Hibernation     bool              `yaml:"hibernation"`
	NoStop          bool              `yaml:"disable_api_stop"`
	Elastic         bool              `yaml:"elastic_ip"`
	Spot            bool              `yaml:"spot"`
	InstanceStore   bool              `yaml:"instance_store"`
	Agent           bool              `yaml:"cloudwatch_agent"`
	TagsInMetadata  bool              `yaml:"tags_in_metadata"`
	TokensRequired  bool              `yaml:"imds_v2_only"`
	HopLimit        int               `yaml:"hop_limit"`
	Up              Duration          `yaml:"up"` // uptime at the start; default 1h
	VolumeGB        int               `yaml:"volume_gb"`
}

func (c *Config) profile(name string) Profile {
	p := c.Profiles[name]
	p.Users = slices.Clone(p.Users)
	for k := range p.Users {
		p.Users[k].fill()
	}
	if p.Password == "" {
		p.Password = "cml"
	}
	if p.TokenLife == 0 {
		p.TokenLife = Duration(8 * time.Hour)
	}
	if p.HistorySpan == 0 {
		p.HistorySpan = Duration(720 * time.Hour)
	}
	if p.HistoryAge == 0 {
		p.HistoryAge = Duration(24 * time.Hour)
	}
	return p
}

// fill sets defaults.
func (c *Config) fill() {
	def := func(d *Duration, v time.Duration) {
		if *d == 0 {
			*d = Duration(v)
		}
	}
	if c.Seed == 0 {
		c.Seed = 1
	}
	if c.Speed == 0 {
		c.Speed = 1
	}
	if len(c.Accounts) == 0 {
		c.Accounts = []AccountConfig{{ID: "111122223333"}}
	}
	if len(c.Regions) == 0 {
		c.Regions = []RegionConfig{{Name: "us-east-1"}}
	}
	if c.AddressPool == "" {
		c.AddressPool = "127.64.0.0/10"
	}
	t := &c.Timing
	def(&t.Pending, 25*time.Second)
	def(&t.Stopping, 35*time.Second)
	def(&t.Hibernating, 70*time.Second)
	def(&t.ShuttingDown, 30*time.Second)
	def(&t.TerminatedVisible, time.Hour)
	def(&t.CMLBoot, 4*time.Minute)
	def(&t.Licence, 12*time.Second)
	def(&t.Background, 15*time.Minute)
	if t.Jitter == 0 {
		t.Jitter = 0.3
	}
	t.Jitter = max(t.Jitter, 0)
	c.Regions = slices.Clone(c.Regions)
	for k := range c.Regions {
		c.Regions[k].fill()
	}
}

func (r *RegionConfig) fill() {
	if len(r.Zones) == 0 {
		r.Zones = []string{r.Name + "a", r.Name + "b", r.Name + "c"}
	}
	if len(r.Subnets) == 0 {
		for k, z := range r.Zones {
			r.Subnets = append(r.Subnets, Subnet{ID: fmt.Sprintf("subnet-%08x", 0xa0+k), Zone: z, VPC: "vpc-0000000a"})
		}
	}
	if len(r.Groups) == 0 {
		r.Groups = []string{"sg-0000000a"}
	}
	if len(r.Images) == 0 {
		day := func(y int, m time.Month, d int) time.Time { return time.Date(y, m, d, 12, 0, 0, 0, time.UTC) }
		r.Images = []Image{
			{ID: "ami-00000000000000290", Name: "cisco-cml2.9.0-lablet-v0.1", Created: day(2025, 6, 3), CML: "2.9.0+build.3", SizeGB: 50},
			{ID: "ami-00000000000000281", Name: "cisco-cml2.8.1-lablet-v0.4", Created: day(2025, 1, 20), CML: "2.8.1+build.14", SizeGB: 50},
			{ID: "ami-00000000000000291", Name: "cisco-cml2.9.1-lablet-v0.2", Created: day(2025, 11, 2), CML: "2.9.1+build.4", SizeGB: 50},
			{ID: "ami-0000000000000d012", Name: "debian-12-amd64", Created: day(2025, 9, 9), SizeGB: 8},
		}
	}
}

func (r RegionConfig) build(account string) *Region {
	return &Region{
		Account: account, Name: r.Name, Zones: r.Zones, Subnets: r.Subnets, Groups: r.Groups,
		Images: r.Images, Capacity: r.Capacity,
	}
}

// Validate reports every fault of a filled configuration.
func (c *Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("cannot use scenario: "+format, args...))
	}
	if c.Speed <= 0 || c.Speed > 1e6 {
		bad("speed %v is outside 0 to 1e6", c.Speed)
	}
	t := c.Timing
	for _, d := range []Duration{t.Pending, t.Stopping, t.Hibernating, t.ShuttingDown, t.TerminatedVisible, t.CMLBoot, t.HibernateReady, t.Licence, c.Consistency.Instances, c.Consistency.Tags} {
		if d < 0 {
			bad("duration %s in timing or consistency is negative", d.D())
		}
	}
	if t.Jitter > 1 {
		bad("timing.jitter %v is above 1", t.Jitter)
	}
	p, err := netip.ParsePrefix(c.AddressPool)
	if err != nil || !p.Addr().Is4() || p.Bits() > 28 {
		bad("address_pool %q is not an IPv4 prefix of at most 28 bits", c.AddressPool)
	}
	c.addresses = p.Masked()
	for name, p := range c.Profiles {
		for _, u := range c.profile(name).Users {
			if err := u.validate(); err != nil {
				errs = append(errs, fmt.Errorf("cannot use scenario: profile %s: %w", name, err))
			}
		}
		if p.Labs < 0 || p.Labs > 1000 || p.History < 0 {
			bad("profile %s: labs %d or history %d is out of range", name, p.Labs, p.History)
		}
	}
	for _, wc := range c.Workers {
		errs = append(errs, c.checkWorker(wc)...)
	}
	for _, r := range c.Faults {
		if err := r.Validate(); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (c *Config) checkWorker(wc WorkerConfig) (errs []error) {
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("cannot use scenario: worker %q: "+format, append([]any{wc.Name}, args...)...))
	}
	if wc.Name == "" {
		bad("name is missing")
	}
	if wc.Region != "" && !slices.ContainsFunc(c.Regions, func(r RegionConfig) bool { return r.Name == wc.Region }) {
		bad("unknown region %q", wc.Region)
	}
	if wc.Account != "" && !slices.ContainsFunc(c.Accounts, func(a AccountConfig) bool { return a.ID == wc.Account }) {
		bad("unknown account %q", wc.Account)
	}
	if wc.State != "" && wc.State != Running && wc.State != Stopped {
		bad("state %q is neither running nor stopped", wc.State)
	}
	if wc.Up < 0 || wc.VolumeGB < 0 || wc.HopLimit < 0 || wc.HopLimit > 64 {
		bad("up, volume_gb or hop_limit is out of range")
	}
	if wc.Count < 0 || wc.Count > 1_000_000 {
		bad("count %d is outside 0 to 1000000", wc.Count)
	}
	if _, ok := c.Profiles[wc.Profile]; wc.Profile != "" && !ok {
		bad("unknown profile %q", wc.Profile)
	}
	return errs
}
