package world

import (
	"fmt"
	"slices"
	"time"
)

// Lab is one CML lab. A scripted lab has only a number of nodes until a client asks
// for its elements, which Open then creates.
type Lab struct {
	ID, Title, Owner   string // Owner is a user id
	Description, Notes string `json:",omitempty"`
	Nodes              int
	Started            bool
	StartedAt          time.Time // world's time; zero if not started since it was last wiped
	Created, Modified  time.Time // client's time
	Removed            bool      `json:",omitempty"` // kept, because events refer to labs by index
	Elements           *Elements `json:",omitempty"`
	Shared             Shared    `json:",omitzero"`
}

// Shared lists the other users of a lab, in CML's shape.
type Shared struct {
	Groups []Share `json:"groups"`
	Users  []Share `json:"users"`
}

// Share gives a group or user permissions on a lab.
type Share struct {
	ID          string   `json:"id"`
	Permissions []string `json:"permissions"`
}

// Elements are the nodes, interfaces and links of a lab.
type Elements struct {
	Nodes      []Node
	Interfaces []Interface
	Links      []Link
}

// Node is a node of a lab, in CML's shape except for Run.
type Node struct {
	ID            string         `json:"id"`
	Label         string         `json:"label"`
	Definition    string         `json:"node_definition"`
	Image         *string        `json:"image_definition"`
	Configuration any            `json:"configuration"`
	X             int            `json:"x"`
	Y             int            `json:"y"`
	RAM           *int           `json:"ram"`
	CPUs          *int           `json:"cpus"`
	CPULimit      *int           `json:"cpu_limit"`
	DataVolume    *int           `json:"data_volume"`
	BootDiskSize  *int           `json:"boot_disk_size"`
	HideLinks     bool           `json:"hide_links"`
	Tags          []string       `json:"tags"`
	Parameters    map[string]any `json:"parameters"`
	PinnedCompute *string        `json:"pinned_compute_id"`
	Run           Run            `json:"run"`
}

// Run is the state of a node. Since is zero if the node was not started after it was
// last wiped.
type Run struct {
	Started bool      `json:"started"`
	Since   time.Time `json:"since"` // world's time of the last start
}

// Interface is an interface of a node, in CML's shape.
type Interface struct {
	ID    string  `json:"id"`
	Node  string  `json:"node"`
	Label string  `json:"label"`
	Type  string  `json:"type"`
	Slot  int     `json:"slot"`
	MAC   *string `json:"mac_address"`
	Down  bool    `json:"down"`
}

// Link connects two interfaces.
type Link struct {
	ID        string         `json:"id"`
	A         string         `json:"interface_a"`
	B         string         `json:"interface_b"`
	Label     string         `json:"label"`
	Down      bool           `json:"down"`
	Condition map[string]any `json:"condition,omitempty"`
}

func (h *Host) newLab(now Moment, title string, owner int) Lab {
	id := AdminID
	if len(h.Users) > 0 {
		id = h.Users[owner%len(h.Users)].ID
	}
	return Lab{ID: h.dice.uuid(), Title: title, Owner: id, Nodes: 2 + h.dice.below(9), Created: now.Wire, Modified: now.Wire}
}

// Open returns the lab's elements. For a scripted lab it first creates them, as a
// chain of routers.
func (l *Lab) Open() *Elements {
	if l.Elements != nil {
		return l.Elements
	}
	e := &Elements{}
	id := func(kind, k int) string { return fmt.Sprintf("%s%04x%08x", l.ID[:24], kind, k+1) }
	for k := range l.Nodes {
		e.Nodes = append(e.Nodes, Node{ID: id(0, k), Label: fmt.Sprintf("n%d", k), Definition: "iosv", X: 100 * k, Tags: []string{}, Parameters: map[string]any{},
			Run: Run{Started: l.Started, Since: l.StartedAt}})
		for slot := range 2 {
			e.Interfaces = append(e.Interfaces, Interface{ID: id(1, 2*k+slot), Node: e.Nodes[k].ID, Label: fmt.Sprintf("GigabitEthernet0/%d", slot), Type: "physical", Slot: slot})
		}
		if k > 0 {
			e.Links = append(e.Links, Link{ID: id(2, k), A: id(1, 2*k-1), B: id(1, 2*k), Label: fmt.Sprintf("n%d<->n%d", k-1, k)})
		}
	}
	l.Elements = e
	return e
}

// Links returns how many links the lab has.
func (l *Lab) Links() int {
	if l.Elements != nil {
		return len(l.Elements.Links)
	}
	return max(l.Nodes-1, 0)
}

// Running returns how many nodes of the lab run.
func (l *Lab) Running() int {
	n := 0
	switch {
	case l.Elements != nil:
		for _, x := range l.Elements.Nodes {
			if x.Run.Started {
				n++
			}
		}
	case l.Started:
		n = l.Nodes
	}
	return n
}

// Node returns the node with an id, nil if there is none.
func (e *Elements) Node(id string) *Node {
	if k := slices.IndexFunc(e.Nodes, func(n Node) bool { return n.ID == id }); k >= 0 {
		return &e.Nodes[k]
	}
	return nil
}

// Interface returns the interface with an id, nil if there is none.
func (e *Elements) Interface(id string) *Interface {
	if k := slices.IndexFunc(e.Interfaces, func(i Interface) bool { return i.ID == id }); k >= 0 {
		return &e.Interfaces[k]
	}
	return nil
}

// Link returns the link with an id, nil if there is none.
func (e *Elements) Link(id string) *Link {
	if k := slices.IndexFunc(e.Links, func(l Link) bool { return l.ID == id }); k >= 0 {
		return &e.Links[k]
	}
	return nil
}

// Connected reports whether an interface is an end of a link.
func (e *Elements) Connected(id string) bool {
	return slices.ContainsFunc(e.Links, func(l Link) bool { return l.A == id || l.B == id })
}

// DropInterface removes an interface and its link.
func (e *Elements) DropInterface(id string) {
	e.Links = slices.DeleteFunc(e.Links, func(l Link) bool { return l.A == id || l.B == id })
	e.Interfaces = slices.DeleteFunc(e.Interfaces, func(i Interface) bool { return i.ID == id })
}

// maxLabs is the maximum number of labs that a host remembers, including removed
// ones.
const maxLabs = 5000

// CreateLab adds a lab of a user and returns it.
func (h *Host) CreateLab(now Moment, user string) (*Lab, error) {
	if len(h.Labs) >= maxLabs {
		return nil, refuse(400, "400", "the host has had %d labs", maxLabs)
	}
	h.Labs = append(h.Labs, Lab{ID: h.dice.uuid(), Owner: user, Created: now.Wire, Modified: now.Wire, Elements: &Elements{}})
	h.by(now, user)
	return &h.Labs[len(h.Labs)-1], nil
}

// NewID returns an id for a new element of a host.
func (h *Host) NewID() string { return h.dice.uuid() }

// by records an action of a user, for LastActivity.
func (h *Host) by(now Moment, user string) {
	if user != AdminID && user != "" {
		h.LastActivity = now.Wire
	}
}

// Edited records that a user changed the elements of a lab, and recounts its
// nodes.
func (h *Host) Edited(now Moment, l *Lab, user string) {
	l.Modified = now.Wire
	if l.Elements != nil {
		l.Nodes = len(l.Elements.Nodes)
	}
	l.renew()
	h.by(now, user)
}

// renew sets the lab's state according to its nodes.
func (l *Lab) renew() {
	if l.Elements == nil || len(l.Elements.Nodes) == 0 {
		return
	}
	started, since := false, time.Time{}
	for _, n := range l.Elements.Nodes {
		started = started || n.Run.Started
		if since.IsZero() || !n.Run.Since.IsZero() && n.Run.Since.Before(since) {
			since = n.Run.Since
		}
	}
	l.Started, l.StartedAt = started, since
}

// Log adds a telemetry event that a user caused in a lab.
func (h *Host) Log(now Moment, category, user string, l *Lab) {
	what := slices.Index(Categories, category)
	if what < 0 {
		return
	}
	h.log(now, uint8(what), user, slices.IndexFunc(h.Labs, func(x Lab) bool { return l != nil && x.ID == l.ID }))
	if userMade(uint8(what)) {
		h.by(now, user)
	}
}

// SetNode starts, stops or wipes one node on behalf of a user. A running node
// cannot be wiped.
func (h *Host) SetNode(now Moment, l *Lab, n *Node, op, user string) error {
	switch {
	case op == "start" && !n.Run.Started:
		n.Run = Run{Started: true, Since: now.World}
		for _, c := range []string{"queue_node", "start_node", "boot_node"} {
			h.Log(now, c, user, l)
		}
	case op == "stop" && n.Run.Started:
		n.Run.Started = false
		h.Log(now, "stop_node", user, l)
	case op == "wipe" && n.Run.Started:
		return refuse(400, "400", "Node %s runs and cannot be wiped", n.ID)
	case op == "wipe":
		n.Run = Run{}
		h.Log(now, "wipe_node", user, l)
	}
	h.Edited(now, l, user)
	return nil
}

// SetLab starts, stops or wipes a lab on behalf of a user. It reports whether the lab
// exists.
func (h *Host) SetLab(now Moment, id, op, user string) bool {
	l := h.LabAt(id)
	if l == nil {
		return false
	}
	h.setLab(now, slices.IndexFunc(h.Labs, func(x Lab) bool { return x.ID == id }), op, user)
	h.by(now, user)
	return true
}

func (h *Host) setLab(now Moment, k int, op, user string) {
	l := &h.Labs[k]
	l.Modified = now.Wire
	was := l.Started
	switch op {
	case "start":
		if l.Started && l.Running() == l.Nodes {
			return
		}
		l.Started, l.StartedAt = true, now.World
	case "stop":
		l.Started = false
	case "wipe":
		l.Started, l.StartedAt = false, time.Time{}
	}
	if l.Elements != nil {
		for i := range l.Elements.Nodes {
			switch n := &l.Elements.Nodes[i].Run; {
			case op == "start" && !n.Started:
				*n = Run{Started: true, Since: now.World}
			case op == "stop":
				n.Started = false
			case op == "wipe":
				*n = Run{}
			}
		}
		l.renew()
	}
	switch {
	case op == "start":
		h.log(now, catStartLab, user, k)
		h.log(now, catQueueNode, user, k)
		h.log(now, catBootNode, user, k)
	case op == "stop" && was:
		h.log(now, catStopLab, user, k)
	case op == "wipe":
		h.log(now, catWipeNode, user, k)
	}
}

// RunningNodes counts the nodes that run.
func (h *Host) RunningNodes() int {
	n := 0
	for k := range h.Labs {
		n += h.Labs[k].Running()
	}
	return n
}

// LabAt finds a lab by id; nil means that there is none.
func (h *Host) LabAt(id string) *Lab {
	for k := range h.Labs {
		if h.Labs[k].ID == id && !h.Labs[k].Removed {
			return &h.Labs[k]
		}
	}
	return nil
}

// RemoveLab removes a lab that is stopped and wiped.
func (h *Host) RemoveLab(now Moment, l *Lab, user string) error {
	if l.Started || !l.StartedAt.IsZero() {
		return refuse(400, "400", "Lab %s is not stopped and wiped", l.ID)
	}
	h.by(now, user)
	l.Removed, l.Nodes, l.Elements = true, 0, &Elements{}
	return nil
}
