package world

import (
	"net/netip"
	"time"
)

// Host is the CML server inside an instance.
type Host struct {
	Version string
	Profile string
	Offset  time.Duration // how far its clock is ahead of the clients'

	OptIn      bool   // telemetry is collected
	OptInFault bool   // the opt-in cannot be read
	Password   string // of every account
	TLSKey     string `json:",omitempty"` // seed of the host's TLS key; empty means the instance's ID
	Spoil      Spoil  // faults of the host's telemetry
	DeregSlow  bool   // Smart Licensing does not answer a deregistration in time (status 202)
	TokenLife  time.Duration
	Labs       []Lab
	Licence    Licence
	Notices    []Notice
	Posted     int // number of notices ever posted
	Maint      bool
	MaintID    string         `json:",omitempty"` // id of the notice shown during maintenance
	Accounts   []Account      `json:",omitempty"` // ID of the notice that is shown during maintenance
	Groups     []Group        `json:",omitempty"`
	Epochs     map[string]int `json:",omitempty"` // by user ID; increased to make all tokens of a user void
	LoggedOut  []string       `json:",omitempty"` // signatures of revoked tokens
	Settings   Settings       `json:",omitzero"`

	History BaseHistory // events from before the simulation began
	events  []event     // events since then, oldest first
	others  []string    // IDs of accounts that no script uses; events refer to them by index

	Users         []*User
	Interruptions int       // how often the machine stopped while a user was working
	LastActivity  time.Time // client's time of the newest real user action

	instance *Instance
	readyAt  time.Time // world's time at which CML can start nodes
	session  int       // increased at each cold boot; tokens of an earlier one are void
	noisy    time.Time // world's time up to which background events have been added
	dice     dice
}

// Spoil is the share (0 to 1) of new events that are late, duplicated, out of
// order, dated in the future, or not events at all.
type Spoil struct {
	Late      float64  `yaml:"late" json:"late,omitempty"`
	LateBy    Duration `yaml:"late_by" json:"late_by,omitempty"` // default 10 min, client's time
	Duplicate float64  `yaml:"duplicate" json:"duplicate,omitempty"`
	Reorder   float64  `yaml:"reorder" json:"reorder,omitempty"`
	Future    float64  `yaml:"future" json:"future,omitempty"` // dated an hour ahead
	Malformed float64  `yaml:"malformed" json:"malformed,omitempty"`
}

// Notice is a message to the users of CML.
type Notice struct {
	ID      string `json:"id"`
	Level   string `json:"level"`
	Label   string `json:"label"`
	Content string `json:"content"`
	Enabled bool   `json:"enabled"`
	// Acknowledged says which users have acknowledged the notice, by ID.
	Acknowledged map[string]bool `json:"acknowledged"`
	Groups       []string        `json:"groups"` // nil means all
}

// AdminID is the id of CML's built-in account, which the default of
// WORKER_ACTIVITY_EXCLUDED_USER_PATTERN matches.
const AdminID = "00000000-0000-4000-a000-000000000000"

// newHost creates the CML host of a new instance.
func (w *World) newHost(now Moment, i *Instance, version, profile string) *Host {
	p := w.cfg.profile(profile)
	h := &Host{
		Version: version, Profile: profile, Offset: p.ClockOffset.D(), OptIn: !p.NoOptIn,
		Password: p.Password, TLSKey: p.TLSKey, Spoil: p.Spoil, TokenLife: p.TokenLife.D(),
		instance: i, noisy: now.World, dice: seedDice(w.cfg.Seed, "host", i.ID),
	}
	if i.Name != "" {
		h.dice = seedDice(w.cfg.Seed, "host", i.Name)
	}
	h.Licence.Product = h.dice.uuid()
	if p.Licensed {
		h.Licence.complete(now.Wire)
	}
	if p.History > 0 {
		h.History = BaseHistory{
			Events: p.History, Seed: h.dice.next(),
			From: now.Wire.Add(-p.HistorySpan.D()), To: now.Wire.Add(-p.HistoryAge.D()),
		}
	}
	for _, u := range p.Users {
		h.Users = append(h.Users, newUser(now, u, &h.dice))
	}
	for k := range p.Labs {
		h.Labs = append(h.Labs, h.newLab(now, "Lab "+string(rune('A'+k%26)), k))
	}
	return h
}

// powerOn begins CML's boot. powerOff shuts CML down.
func (h *Host) powerOn(at time.Time) {
	h.readyAt = at.Add(h.instance.cmlBoot)
	h.noisy = at
	if !h.instance.Hibernated {
		h.session++
		for k := range h.Labs {
			h.Labs[k].Started = false
			if e := h.Labs[k].Elements; e != nil {
				for i := range e.Nodes {
					e.Nodes[i].Run.Started = false
				}
			}
		}
		return
	}
	h.readyAt = at.Add(h.instance.cmlBoot / 10)
}

func (h *Host) powerOff(bool) { h.readyAt = time.Time{} }

// Reach is how far a connection to a host gets.
type Reach int

// The possible results of a connection to a host.
const (
	Unreachable Reach = iota // no machine has this address, or it is not up
	Booting                  // the machine is up, CML does not listen yet
	Warming                  // CML answers but is not ready
	Ready                    // CML can start nodes
)

func (h *Host) reach(now Moment) Reach {
	boot := h.instance.cmlBoot
	switch {
	case h.instance.State != Running || h.readyAt.IsZero():
		return Unreachable
	case now.World.Before(h.readyAt.Add(-boot / 2)):
		return Booting
	case now.World.Before(h.readyAt):
		return Warming
	}
	return Ready
}

// HostAt visits the CML host with the address, scenario name or instance ID ref. If
// there is none or it is not up, HostAt returns Unreachable and visits nothing. The
// visitor may call the methods of Host, which change the host, and the methods of
// World that take a Host.
func (w *World) HostAt(ref string, visit func(*Host, Moment, Reach)) Reach {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := w.resolve(ref)
	if i == nil || i.Host == nil {
		return Unreachable
	}
	now := w.Clock.Now()
	w.advance(now, i)
	r := i.Host.reach(now)
	if r == Unreachable {
		return r
	}
	w.background(now, i.Host)
	visit(i.Host, now, r)
	return r
}

// resolve returns the instance with an ID, scenario name or address. Besides its
// public and private addresses, an instance has one for its metadata service that
// never changes: that of 10.a.b.c is 127.(128+a).b.c.
func (w *World) resolve(ref string) *Instance {
	if i := w.lookup(ref); i != nil {
		return i
	}
	a, err := netip.ParseAddr(ref)
	if err != nil || !a.Unmap().Is4() {
		return nil
	}
	a = a.Unmap()
	if i := w.byPublic[a]; i != nil {
		return i
	}
	b := a.As4()
	if b[0] == 127 && b[1] >= 128 {
		a = netip.AddrFrom4([4]byte{10, b[1] - 128, b[2], b[3]})
	}
	return w.byPrivate[a]
}

// MetadataAddr returns the loopback address of an instance's metadata service.
func (i *Instance) MetadataAddr() netip.Addr {
	if !i.PrivateIP.IsValid() {
		return netip.Addr{}
	}
	b := i.PrivateIP.As4()
	return netip.AddrFrom4([4]byte{127, b[1] + 128, b[2], b[3]})
}

// Locate is like Find, and also accepts an address.
func (w *World) Locate(ref string, visit func(*Instance, Moment)) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := w.resolve(ref)
	if i == nil {
		return false
	}
	now := w.Clock.Now()
	w.advance(now, i)
	visit(i, now)
	return true
}

// Instance returns the instance that h runs on. Only visitors may call it.
func (h *Host) Instance() *Instance { return h.instance }

// Session returns a number that changes at each cold boot.
func (h *Host) Session() int { return h.session }

// UserID returns the ID of an account of the host: admin, a scripted user, or any
// other name. A name that the host has not seen gets the ID that it would get if it
// were created.
func (h *Host) UserID(name string) string {
	if name == "admin" {
		return AdminID
	}
	for _, u := range h.Users {
		if u.Name == name {
			return u.ID
		}
	}
	for _, a := range h.Accounts {
		if a.Name == name {
			return a.ID
		}
	}
	d := seedDice(0, "account", name)
	return d.uuid()
}
