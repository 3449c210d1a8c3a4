package world

import (
	"net/netip"
	"slices"
	"strings"
	"time"
)

// State is an EC2 instance state.
type State string

// The states of an instance, with EC2's names.
const (
	Pending      State = "pending"
	Running      State = "running"
	ShuttingDown State = "shutting-down"
	Terminated   State = "terminated"
	Stopping     State = "stopping"
	Stopped      State = "stopped"
)

// Code returns EC2's number of the state.
func (s State) Code() int {
	switch s {
	case Pending:
		return 0
	case Running:
		return 16
	case ShuttingDown:
		return 32
	case Terminated:
		return 48
	case Stopping:
		return 64
	}
	return 80
}

// Legal lists the states that may follow s.
func (s State) Legal() []State {
	switch s {
	case Pending:
		return []State{Running, Stopped, ShuttingDown, Terminated}
	case Running:
		return []State{Stopping, ShuttingDown}
	case Stopping:
		return []State{Stopped, ShuttingDown}
	case Stopped:
		return []State{Pending, ShuttingDown}
	case ShuttingDown:
		return []State{Terminated}
	}
	return nil
}

// Tag is a tag of an instance.
type Tag struct{ Key, Value string }

// Tags are sorted by key and never changed in place.
type Tags []Tag

// Get returns the value of key.
func (t Tags) Get(key string) (string, bool) {
	i, ok := slices.BinarySearchFunc(t, key, func(a Tag, k string) int { return strings.Compare(a.Key, k) })
	if !ok {
		return "", false
	}
	return t[i].Value, true
}

// MakeTags sorts a map into Tags.
func MakeTags(m map[string]string) Tags {
	t := make(Tags, 0, len(m))
	for k, v := range m {
		t = append(t, Tag{k, v})
	}
	slices.SortFunc(t, func(a, b Tag) int { return strings.Compare(a.Key, b.Key) })
	return t
}

func (t Tags) with(changes []Tag) Tags {
	m := make(map[string]string, len(t)+len(changes))
	for _, x := range t {
		m[x.Key] = x.Value
	}
	for _, x := range changes {
		m[x.Key] = x.Value
	}
	return MakeTags(m)
}

// TagChoice names a tag to delete. With a nil Value, the tag is deleted whatever its
// value.
type TagChoice struct {
	Key   string
	Value *string
}

func (t Tags) without(gone []TagChoice) Tags {
	return slices.DeleteFunc(slices.Clone(t), func(x Tag) bool {
		return slices.ContainsFunc(gone, func(g TagChoice) bool {
			return g.Key == x.Key && (g.Value == nil || *g.Value == x.Value)
		})
	})
}

// Reason is EC2's StateReason, and the older form of it in the state transition text.
type Reason struct {
	Code, Message, Transition string
}

// Transition is one change of state, at the client's time.
type Transition struct {
	At       time.Time
	From, To State
	By       string // api, user (a user at the console), server, spot, instance, time
}

// Instance is one EC2 instance. Visitors may read its fields; only World writes them.
type Instance struct {
	ID, Account, Region string
	Seq                 uint64 // order of launch; the page token
	Name                string // name in the scenario; empty for launched ones
	Zone, Subnet, VPC   string
	Type, Image, Key    string
	Profile             string // name of the instance profile
	Groups              []string
	Reservation         string
	LaunchIndex         int
	ClientToken         string

	State      State
	Reason     Reason
	Launched   time.Time // client's time of the launch or the last start
	Created    time.Time // client's time of the first launch
	UpSince    time.Time // world's time of the last change to running
	Due        time.Time // world's time at which DueTo is reached; zero if no transition is in progress
	DueTo      State
	Stuck      bool // transitions do not end
	Impaired   bool // status checks fail
	Boots      int  // number of cold boots; a resume from hibernation does not count
	Hibernated bool // the last stop kept the memory

	PrivateIP, PublicIP netip.Addr
	Elastic             bool // keeps PublicIP while stopped
	Hibernation         bool // launched with hibernation enabled
	NoStop, NoTerminate bool // stop and termination protection
	OnShutdown          string
	Spot                bool
	SpotAt              time.Time // client's time of the announced Spot interruption; zero means none
	InstanceStore       bool      // the root device is an instance-store volume
	UserData            []byte
	HopLimit            int
	TokensRequired      bool // IMDSv1 is not allowed
	TagsInMetadata      bool
	Volume              string
	VolumeGB            int
	VolumeType          string
	Encrypted           bool // the root volume is encrypted
	Agent               bool // CloudWatch agent: memory and disk metrics

	Tags    Tags
	shown   Tags         // the tags that reads still return after a change
	shownTo time.Time    // client's time from which reads return Tags
	Visible time.Time    // client's time from which reads find the instance
	Gone    time.Time    // client's time from which reads no longer find the instance
	History []Transition // newest last, bounded

	purged  bool          // no longer in the world
	cmlBoot time.Duration // world's time from running to CML ready

	Host *Host // the CML host inside; nil for a plain machine
}

// TagsAt returns the tags that a read at wire sees.
func (i *Instance) TagsAt(wire time.Time) Tags {
	if wire.Before(i.shownTo) {
		return i.shown
	}
	return i.Tags
}

// found reports whether a read at wire finds the instance.
func (i *Instance) found(wire time.Time) bool {
	return !wire.Before(i.Visible) && (i.Gone.IsZero() || wire.Before(i.Gone))
}

const historyMax = 32

func (i *Instance) become(at Moment, to State, by string) {
	if len(i.History) >= historyMax {
		i.History = slices.Delete(i.History, 0, len(i.History)-historyMax+1)
	}
	if n := len(i.History); n > 0 && at.Wire.Before(i.History[n-1].At) {
		at.Wire = i.History[n-1].At
	}
	i.History = append(i.History, Transition{At: at.Wire, From: i.State, To: to, By: by})
	i.State = to
	i.Due, i.DueTo = time.Time{}, ""
}

// RunningAt reports whether the instance was running at a client's time. Before the
// oldest transition in History, it assumes the state that this transition left.
func (i *Instance) RunningAt(wire time.Time) bool {
	up := i.State == Running
	for k := len(i.History) - 1; k >= 0; k-- {
		if !i.History[k].At.After(wire) {
			return i.History[k].To == Running
		}
		up = i.History[k].From == Running
	}
	return up && !wire.Before(i.Created)
}
