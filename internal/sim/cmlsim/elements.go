package cmlsim

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"lull/internal/sim/world"
)

// Limits of one lab.
const (
	maxNodes      = 1000
	maxInterfaces = 64 // per node
)

// found is a lab that a request may use.
type found struct {
	host *world.Host
	now  world.Moment
	lab  *world.Lab
	e    *world.Elements // nil in calls that are not about elements
}

// inLab returns a handler for a call about the lab in the path. It answers with what
// f returns; nil is a 204.
func inLab(f func(*request, found) (any, error)) func(*request) error {
	return func(q *request) error {
		var v any
		if err := q.with(func(host *world.Host, now world.Moment) error {
			l, err := q.mine(host, q.r.PathValue("lab"))
			if err == nil {
				v, err = f(q, found{host: host, now: now, lab: l})
			}
			return err
		}); err != nil {
			return err
		}
		if v == nil {
			return q.none(http.StatusNoContent)
		}
		return q.ok(v)
	}
}

// opened is like inLab, for a call about the lab's elements. edits means that the
// call changes them.
func opened(edits bool, f func(*request, found) (any, error)) func(*request) error {
	return inLab(func(q *request, x found) (any, error) {
		x.e = x.lab.Open()
		v, err := f(q, x)
		if err == nil && edits {
			x.host.Edited(x.now, x.lab, q.user)
		}
		return v, err
	})
}

// mine returns the lab id if the user may use it: their own labs, shared ones, and
// for administrators all.
func (q *request) mine(host *world.Host, id string) (*world.Lab, error) {
	l := host.LabAt(id)
	if l == nil || !q.sees(host, l, true) {
		return nil, failure{http.StatusNotFound, "Lab not found: " + id}
	}
	return l, nil
}

func (q *request) sees(host *world.Host, l *world.Lab, all bool) bool {
	share := func(s world.Share) bool {
		g := host.GroupAt(s.ID)
		return s.ID == q.user || g != nil && slices.Contains(g.Members, q.user)
	}
	return l.Owner == q.user || q.admin && all || slices.ContainsFunc(append(slices.Clone(l.Shared.Users), l.Shared.Groups...), share)
}

func missing(what, id string) error {
	return failure{http.StatusNotFound, what + " not found: " + id}
}

func (x found) node(q *request) (*world.Node, error) {
	if n := x.e.Node(q.r.PathValue("node")); n != nil {
		return n, nil
	}
	return nil, missing("Node", q.r.PathValue("node"))
}

func (x found) iface(q *request) (*world.Interface, error) {
	if i := x.e.Interface(q.r.PathValue("interface")); i != nil {
		return i, nil
	}
	return nil, missing("Interface", q.r.PathValue("interface"))
}

func (x found) link(q *request) (*world.Link, error) {
	if l := x.e.Link(q.r.PathValue("link")); l != nil {
		return l, nil
	}
	return nil, missing("Link", q.r.PathValue("link"))
}

// runState returns the state and progress of a node. A started node is queued at
// first, and boots for at least 40 s.
func (x found) runState(n *world.Node) (state, progress string) {
	k := slices.IndexFunc(x.e.Nodes, func(m world.Node) bool { return m.ID == n.ID })
	switch up := x.now.World.Sub(n.Run.Since); {
	case !n.Run.Started && n.Run.Since.IsZero():
		return "DEFINED_ON_CORE", "Not running"
	case !n.Run.Started:
		return "STOPPED", "Not running"
	case up < time.Second:
		return "QUEUED", "Not running"
	case up < time.Duration(40+10*k)*time.Second:
		return "STARTED", "Booting"
	}
	return "BOOTED", "Booted"
}

// convergent reports whether a node has reached its requested state.
func (x found) convergent(n *world.Node) bool {
	s, _ := x.runState(n)
	return s != "QUEUED" && s != "STARTED"
}

// wireState returns the state of an interface or link. It follows from the nodes at
// its ends.
func (x found) wireState(down bool, ends ...string) string {
	out := "STARTED"
	for _, id := range ends {
		i := x.e.Interface(id)
		n := x.e.Node(i.Node)
		switch s, _ := x.runState(n); {
		case s == "DEFINED_ON_CORE":
			return s
		case s == "STOPPED" || down || i.Down:
			out = "STOPPED"
		}
	}
	return out
}

// nodeView returns a node in CML's JSON form.
func (x found) nodeView(n *world.Node, configured, operational bool) map[string]any {
	state, progress := x.runState(n)
	v := map[string]any{
		"id": n.ID, "lab_id": x.lab.ID, "label": n.Label, "node_definition": n.Definition, "image_definition": n.Image,
		"x": n.X, "y": n.Y, "ram": n.RAM, "cpus": n.CPUs, "cpu_limit": n.CPULimit, "data_volume": n.DataVolume, "boot_disk_size": n.BootDiskSize,
		"hide_links": n.HideLinks, "tags": n.Tags, "parameters": n.Parameters, "pinned_compute_id": n.PinnedCompute,
		"state": state, "boot_progress": progress,
	}
	if configured {
		v["configuration"] = n.Configuration
	}
	if operational {
		var compute any
		if n.Run.Started {
			compute = x.host.Licence.Product
		}
		v["operational"] = map[string]any{"compute_id": compute, "resource_pool": nil}
	}
	return v
}

func (x found) ifaceView(i *world.Interface) map[string]any {
	return map[string]any{
		"id": i.ID, "lab_id": x.lab.ID, "node": i.Node, "label": i.Label, "slot": i.Slot, "type": i.Type, "mac_address": i.MAC,
		"is_connected": x.e.Connected(i.ID), "state": x.wireState(false, i.ID),
	}
}

func (x found) linkView(l *world.Link) map[string]any {
	return map[string]any{
		"id": l.ID, "lab_id": x.lab.ID, "label": l.Label, "interface_a": l.A, "interface_b": l.B,
		"node_a": x.e.Interface(l.A).Node, "node_b": x.e.Interface(l.B).Node, "state": x.wireState(l.Down, l.A, l.B),
	}
}

// topology returns the whole lab in the form in which clients read and import it.
func (x found) topology(configured bool) map[string]any {
	nodes, links := []any{}, []any{}
	for k := range x.e.Nodes {
		n := x.nodeView(&x.e.Nodes[k], configured, false)
		delete(n, "lab_id")
		list := []any{}
		for i := range x.e.Interfaces {
			if f := &x.e.Interfaces[i]; f.Node == x.e.Nodes[k].ID {
				list = append(list, map[string]any{"id": f.ID, "label": f.Label, "slot": f.Slot, "type": f.Type, "mac_address": f.MAC})
			}
		}
		n["interfaces"] = list
		nodes = append(nodes, n)
	}
	for k := range x.e.Links {
		l := x.linkView(&x.e.Links[k])
		delete(l, "lab_id")
		links = append(links, l)
	}
	return map[string]any{
		"lab":   map[string]any{"title": x.lab.Title, "description": x.lab.Description, "notes": x.lab.Notes, "owner": x.lab.Owner, "version": "0.3.0"},
		"nodes": nodes, "links": links, "annotations": []any{}, "smart_annotations": []any{},
	}
}

func (h *CML) elementRoutes() {
	h.topologyRoutes()
	h.nodeRoutes()
	h.interfaceRoutes()
	h.linkRoutes()
}

// inLab registers a call about the elements of a lab. pattern is a method and a path
// below the lab's.
func (h *CML) inLab(pattern string, f func(*request, found) (any, error)) {
	method, path, _ := strings.Cut(pattern, " ")
	h.handle(method+" labs/{lab}/"+path, false, opened(method != "GET", f))
}

// onNode is a call about the node in its path.
func onNode(f func(*request, found, *world.Node) (any, error)) func(*request, found) (any, error) {
	return func(q *request, x found) (any, error) {
		v, err := x.node(q)
		if err != nil {
			return nil, err
		}
		return f(q, x, v)
	}
}

// onInterface is a call about the interface in its path.
func onInterface(f func(*request, found, *world.Interface) (any, error)) func(*request, found) (any, error) {
	return func(q *request, x found) (any, error) {
		v, err := x.iface(q)
		if err != nil {
			return nil, err
		}
		return f(q, x, v)
	}
}

// onLink is a call about the link in its path.
func onLink(f func(*request, found, *world.Link) (any, error)) func(*request, found) (any, error) {
	return func(q *request, x found) (any, error) {
		v, err := x.link(q)
		if err != nil {
			return nil, err
		}
		return f(q, x, v)
	}
}

// configured reports whether a request wants the configurations of nodes.
func configured(q *request) bool { return q.r.URL.Query().Get("exclude_configurations") != "true" }

func (h *CML) topologyRoutes() {
	h.handle("POST labs", false, (*request).createLab)
	h.handle("POST import", false, (*request).importLab)
	h.handle("GET sample/labs", false, func(q *request) error {
		out := map[string]any{}
		for id, title := range samples {
			out[id] = map[string]any{"title": title, "description": "", "file_path": id}
		}
		return q.ok(out)
	})
	h.handle("PUT sample/labs/{sample}", false, func(q *request) error {
		title, ok := samples[q.r.PathValue("sample")]
		if !ok {
			return missing("Sample lab", q.r.PathValue("sample"))
		}
		return show(func(q *request, host *world.Host, now world.Moment) (any, error) {
			l, err := host.CreateLab(now, q.user)
			if err != nil {
				return nil, err
			}
			l.Title, l.Nodes, l.Elements = title, 3, nil
			host.Log(now, "import_lab", q.user, l)
			return l.ID, nil
		})(q)
	})
	h.handle("GET populate_lab_tiles", false, show(func(q *request, host *world.Host, now world.Moment) (any, error) {
		tiles := map[string]any{}
		for k := range host.Labs {
			if l := &host.Labs[k]; !l.Removed && q.sees(host, l, true) {
				t := details(host, l)
				t["topology"] = found{host, now, l, l.Open()}.topology(false)
				tiles[l.ID] = t
			}
		}
		return map[string]any{"lab_tiles": tiles}, nil
	}))
	h.handle("GET resource_pools", false, func(q *request) error { return q.ok([]any{}) })

	h.handle("PATCH labs/{lab}", false, opened(true, (*request).patchLab))
	h.handle("DELETE labs/{lab}", false, inLab(func(q *request, x found) (any, error) { return nil, x.host.RemoveLab(x.now, x.lab, q.user) }))
	h.inLab("GET topology", func(q *request, x found) (any, error) { return x.topology(configured(q)), nil })
	h.handle("GET labs/{lab}/download", false, func(q *request) error {
		var text string
		if err := q.with(func(host *world.Host, now world.Moment) error {
			l, err := q.mine(host, q.r.PathValue("lab"))
			if err != nil {
				return err
			}
			host.Log(now, "export_lab", q.user, l)
			text, err = found{host, now, l, l.Open()}.export()
			return err
		}); err != nil {
			return err
		}
		return q.text("application/yaml", text)
	})
	h.inLab("GET check_if_converged", func(_ *request, x found) (any, error) {
		return !slices.ContainsFunc(x.e.Nodes, func(n world.Node) bool { return !x.convergent(&n) }), nil
	})
	h.inLab("GET lab_element_state", func(_ *request, x found) (any, error) {
		nodes, links, ifaces := map[string]string{}, map[string]string{}, map[string]string{}
		for k := range x.e.Nodes {
			nodes[x.e.Nodes[k].ID], _ = x.runState(&x.e.Nodes[k])
		}
		for _, i := range x.e.Interfaces {
			ifaces[i.ID] = x.wireState(false, i.ID)
		}
		for _, l := range x.e.Links {
			links[l.ID] = x.wireState(l.Down, l.A, l.B)
		}
		return map[string]any{"nodes": nodes, "links": links, "interfaces": ifaces}, nil
	})
	h.inLab("GET simulation_stats", func(_ *request, x found) (any, error) {
		nodes, links := map[string]any{}, map[string]any{}
		for _, n := range x.e.Nodes {
			if n.Run.Started {
				nodes[n.ID] = map[string]any{"cpu_usage": 1.5, "block0_rd_bytes": 1 << 20, "block0_wr_bytes": 1 << 16}
			}
		}
		for _, l := range x.e.Links {
			links[l.ID] = map[string]any{"readbytes": 0, "readpackets": 0, "writebytes": 0, "writepackets": 0}
		}
		return map[string]any{"nodes": nodes, "links": links}, nil
	})
	h.inLab("GET layer3_addresses", func(*request, found) (any, error) { return map[string]any{}, nil })
	h.inLab("GET connector_mappings", func(*request, found) (any, error) { return []any{}, nil })
	h.inLab("GET resource_pools", func(*request, found) (any, error) { return []any{}, nil })
	h.inLab("GET bootstrap", func(*request, found) (any, error) { return []any{}, nil })
	h.inLab("GET associations", func(_ *request, x found) (any, error) { return shared(x.lab), nil })
	h.inLab("PATCH associations", func(q *request, x found) (any, error) {
		s := x.lab.Shared
		if err := q.strict(&s); err != nil {
			return nil, err
		}
		if err := checkShares(x.host, s); err != nil {
			return nil, err
		}
		x.lab.Shared = s
		return shared(x.lab), nil
	})
}

func (h *CML) nodeRoutes() {
	h.inLab("GET nodes", func(q *request, x found) (any, error) {
		query := q.r.URL.Query()
		out := []any{}
		for k := range x.e.Nodes {
			if query.Get("data") != "true" {
				out = append(out, x.e.Nodes[k].ID)
				continue
			}
			out = append(out, x.nodeView(&x.e.Nodes[k], configured(q), query.Get("operational") == "true"))
		}
		return out, nil
	})
	h.inLab("POST nodes", (*request).createNode)
	h.inLab("GET nodes/{node}", onNode(func(q *request, x found, n *world.Node) (any, error) {
		return x.nodeView(n, configured(q), q.r.URL.Query().Get("operational") == "true"), nil
	}))
	h.inLab("PATCH nodes/{node}", onNode(func(q *request, x found, n *world.Node) (any, error) {
		in := nodeInput{Node: *n}
		in.Tags = slices.Clone(n.Tags)
		if err := q.strict(&in); err != nil {
			return nil, err
		}
		in.Node.ID, in.Node.Run, in.Definition = n.ID, n.Run, n.Definition
		if err := in.check(x.host); err != nil {
			return nil, err
		}
		*n = in.Node
		return n.ID, nil
	}))
	h.inLab("DELETE nodes/{node}", onNode(func(_ *request, x found, n *world.Node) (any, error) {
		if s, _ := x.runState(n); s != "DEFINED_ON_CORE" {
			return nil, failure{http.StatusBadRequest, "Node is " + s + " and cannot be removed: " + n.ID}
		}
		id := n.ID
		for _, i := range slices.Clone(x.e.Interfaces) {
			if i.Node == id {
				x.e.DropInterface(i.ID)
			}
		}
		x.e.Nodes = slices.DeleteFunc(x.e.Nodes, func(n world.Node) bool { return n.ID == id })
		return nil, nil
	}))
	h.inLab("GET nodes/{node}/state", onNode(func(_ *request, x found, n *world.Node) (any, error) {
		state, _ := x.runState(n)
		return map[string]any{"state": state, "label": n.Label, "progress": nil}, nil
	}))
	h.inLab("GET nodes/{node}/check_if_converged", onNode(func(_ *request, x found, n *world.Node) (any, error) {
		return x.convergent(n), nil
	}))
	h.inLab("GET nodes/{node}/layer3_addresses", onNode(func(_ *request, _ found, n *world.Node) (any, error) {
		return map[string]any{"name": n.Label, "interfaces": map[string]any{}}, nil
	}))
	h.inLab("GET nodes/{node}/interfaces", onNode(func(_ *request, x found, n *world.Node) (any, error) {
		out := []any{}
		for k := range x.e.Interfaces {
			if x.e.Interfaces[k].Node == n.ID {
				out = append(out, x.ifaceView(&x.e.Interfaces[k]))
			}
		}
		return out, nil
	}))
	for path, op := range map[string]string{"state/start": "start", "state/stop": "stop", "wipe_disks": "wipe"} {
		h.inLab("PUT nodes/{node}/"+path, func(q *request, x found) (any, error) {
			n, err := x.node(q)
			if err != nil {
				return nil, err
			}
			return nil, x.host.SetNode(x.now, x.lab, n, op, q.user)
		})
	}
	h.inLab("PUT nodes/{node}/extract_configuration", func(q *request, x found) (any, error) {
		n, err := x.node(q)
		if err == nil && !n.Run.Started {
			err = failure{http.StatusBadRequest, "Node does not run: " + n.ID}
		}
		return "OK", err
	})
}

func (h *CML) interfaceRoutes() {
	h.inLab("POST interfaces", (*request).createInterfaces)
	h.inLab("GET interfaces/{interface}", onInterface(func(_ *request, x found, i *world.Interface) (any, error) {
		return x.ifaceView(i), nil
	}))
	h.inLab("PATCH interfaces/{interface}", onInterface(func(q *request, x found, i *world.Interface) (any, error) {
		in := struct {
			MAC *string `json:"mac_address"`
		}{i.MAC}
		if err := q.strict(&in); err != nil {
			return nil, err
		}
		i.MAC = in.MAC
		return x.ifaceView(i), nil
	}))
	h.inLab("DELETE interfaces/{interface}", onInterface(func(_ *request, x found, i *world.Interface) (any, error) {
		x.e.DropInterface(i.ID)
		return nil, nil
	}))
	h.inLab("GET interfaces/{interface}/state", onInterface(func(_ *request, x found, i *world.Interface) (any, error) {
		return map[string]any{"state": x.wireState(false, i.ID), "label": i.Label}, nil
	}))
}

func (h *CML) linkRoutes() {
	h.inLab("GET links", func(_ *request, x found) (any, error) {
		out := []any{}
		for k := range x.e.Links {
			out = append(out, x.e.Links[k].ID)
		}
		return out, nil
	})
	h.inLab("POST links", (*request).createLink)
	h.inLab("GET links/{link}", onLink(func(_ *request, x found, l *world.Link) (any, error) {
		return x.linkView(l), nil
	}))
	h.inLab("DELETE links/{link}", onLink(func(_ *request, x found, l *world.Link) (any, error) {
		id := l.ID
		x.e.Links = slices.DeleteFunc(x.e.Links, func(l world.Link) bool { return l.ID == id })
		return nil, nil
	}))
	h.inLab("GET links/{link}/check_if_converged", func(q *request, x found) (any, error) {
		_, err := x.link(q)
		return err == nil, err
	})
	h.inLab("GET links/{link}/condition", onLink(func(_ *request, _ found, l *world.Link) (any, error) {
		return orEmpty(l.Condition), nil
	}))
	h.inLab("PATCH links/{link}/condition", onLink(func(q *request, _ found, l *world.Link) (any, error) {
		in := map[string]any{}
		if err := q.read(&in); err != nil {
			return nil, err
		}
		l.Condition = in
		return in, nil
	}))
	h.inLab("DELETE links/{link}/condition", func(q *request, x found) (any, error) {
		l, err := x.link(q)
		if err == nil {
			l.Condition = nil
		}
		return nil, err
	})
	for _, op := range []string{"start", "stop"} {
		h.inLab("PUT links/{link}/state/"+op, func(q *request, x found) (any, error) {
			l, err := x.link(q)
			if err == nil {
				l.Down = op == "stop"
			}
			return nil, err
		})
		h.inLab("PUT interfaces/{interface}/state/"+op, func(q *request, x found) (any, error) {
			i, err := x.iface(q)
			if err == nil {
				i.Down = op == "stop"
			}
			return nil, err
		})
	}
}

func orEmpty(m map[string]any) map[string]any {
	if m == nil {
		return map[string]any{}
	}
	return m
}

// samples are the labs that come with CML, by file.
var samples = map[string]string{"server-triangle.yaml": "Server Triangle"}

// nodeInput is a client's description of a node.
type nodeInput struct {
	world.Node
	LabID  any `json:"lab_id"`
	State  any `json:"state"`
	Boot   any `json:"boot_progress"`
	Ifaces any `json:"interfaces"`
}

func (in *nodeInput) check(host *world.Host) error {
	if in.Label == "" || len(in.Label) > 128 {
		return failure{http.StatusBadRequest, "label is not 1 to 128 characters"}
	}
	if definition(host, "node", in.Definition) == nil {
		return failure{http.StatusBadRequest, fmt.Sprintf("node_definition %q is not known", in.Definition)}
	}
	if in.Tags == nil {
		in.Tags = []string{}
	}
	if in.Parameters == nil {
		in.Parameters = map[string]any{}
	}
	return nil
}

func (q *request) createNode(x found) (any, error) {
	var in nodeInput
	if err := q.strict(&in); err != nil {
		return nil, err
	}
	if err := in.check(x.host); err != nil {
		return nil, err
	}
	if len(x.e.Nodes) >= maxNodes {
		return nil, failure{http.StatusBadRequest, "the lab has too many nodes"}
	}
	in.ID, in.Run = x.host.NewID(), world.Run{}
	x.e.Nodes = append(x.e.Nodes, in.Node)
	if q.r.URL.Query().Get("populate_interfaces") == "true" {
		x.addInterfaces(&in.Node, defaultInterfaces(in.Definition)-1)
	}
	return map[string]any{"id": in.ID}, nil
}

// addInterfaces creates the interfaces of a node up to a slot and returns them
// all.
func (x found) addInterfaces(n *world.Node, slot int) []any {
	out := []any{}
	for k := 0; k <= slot; k++ {
		i := slices.IndexFunc(x.e.Interfaces, func(i world.Interface) bool { return i.Node == n.ID && i.Slot == k })
		if i < 0 {
			i = len(x.e.Interfaces)
			x.e.Interfaces = append(x.e.Interfaces, world.Interface{ID: x.host.NewID(), Node: n.ID, Label: interfaceLabel(n.Definition, k), Type: "physical", Slot: k})
		}
		out = append(out, x.ifaceView(&x.e.Interfaces[i]))
	}
	return out
}

// createInterfaces creates the next interface of a node, or all up to a slot.
func (q *request) createInterfaces(x found) (any, error) {
	var in struct {
		Node string  `json:"node"`
		Slot *int    `json:"slot"`
		MAC  *string `json:"mac_address"`
	}
	if err := q.strict(&in); err != nil {
		return nil, err
	}
	n := x.e.Node(in.Node)
	if n == nil {
		return nil, missing("Node", in.Node)
	}
	if in.Slot != nil {
		if *in.Slot < 0 || *in.Slot >= maxInterfaces {
			return nil, failure{http.StatusBadRequest, "slot is out of range"}
		}
		return x.addInterfaces(n, *in.Slot), nil
	}
	next := 0
	for slices.ContainsFunc(x.e.Interfaces, func(i world.Interface) bool { return i.Node == n.ID && i.Slot == next }) {
		next++
	}
	if next >= maxInterfaces {
		return nil, failure{http.StatusBadRequest, "the node has too many interfaces"}
	}
	all := x.addInterfaces(n, next)
	return all[next], nil
}

func (q *request) createLink(x found) (any, error) {
	var in struct {
		Src string `json:"src_int"`
		Dst string `json:"dst_int"`
	}
	if err := q.strict(&in); err != nil {
		return nil, err
	}
	for _, id := range []string{in.Src, in.Dst} {
		if x.e.Interface(id) == nil {
			return nil, missing("Interface", id)
		}
		if x.e.Connected(id) || in.Src == in.Dst {
			return nil, failure{http.StatusBadRequest, "Interface is connected already: " + id}
		}
	}
	a, b := x.e.Interface(in.Src), x.e.Interface(in.Dst)
	l := world.Link{ID: x.host.NewID(), A: a.ID, B: b.ID, Label: x.e.Node(a.Node).Label + "-" + a.Label + "<->" + x.e.Node(b.Node).Label + "-" + b.Label}
	x.e.Links = append(x.e.Links, l)
	return x.linkView(&l), nil
}
