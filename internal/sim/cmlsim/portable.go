package cmlsim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"go.yaml.in/yaml/v3"

	"lull/internal/sim/world"
)

// labInput is a client's description of a lab. A nil field is unchanged.
type labInput struct {
	Title       *string        `json:"title"`
	Description *string        `json:"description"`
	Notes       *string        `json:"notes"`
	Owner       *string        `json:"owner"`
	Shared      *world.Shared  `json:"associations"`
	Groups      []any          `json:"groups"`
	Autostart   map[string]any `json:"autostart"`
	Staging     map[string]any `json:"node_staging"`
}

func (in labInput) apply(host *world.Host, l *world.Lab) error {
	if in.Title != nil && (*in.Title == "" || len(*in.Title) > 64) {
		return failure{http.StatusBadRequest, "title is not 1 to 64 characters"}
	}
	if in.Shared != nil {
		if err := checkShares(host, *in.Shared); err != nil {
			return err
		}
		l.Shared = *in.Shared
	}
	for from, to := range map[*string]*string{in.Title: &l.Title, in.Description: &l.Description, in.Notes: &l.Notes, in.Owner: &l.Owner} {
		if from != nil {
			*to = *from
		}
	}
	return nil
}

func checkShares(host *world.Host, s world.Shared) error {
	for _, g := range s.Groups {
		if host.GroupAt(g.ID) == nil || len(g.Permissions) == 0 {
			return failure{http.StatusBadRequest, "associations.groups names no group, or no permissions"}
		}
	}
	for _, u := range s.Users {
		if host.Account(u.ID) == nil || len(u.Permissions) == 0 {
			return failure{http.StatusBadRequest, "associations.users names no user, or no permissions"}
		}
	}
	return nil
}

func shared(l *world.Lab) world.Shared {
	s := l.Shared
	if s.Groups == nil {
		s.Groups = []world.Share{}
	}
	if s.Users == nil {
		s.Users = []world.Share{}
	}
	return s
}

func (q *request) createLab() error {
	var in labInput
	if err := q.strict(&in); err != nil {
		return err
	}
	return show(func(q *request, host *world.Host, now world.Moment) (any, error) {
		if err := in.apply(host, &world.Lab{}); err != nil {
			return nil, err
		}
		l, err := host.CreateLab(now, q.user)
		if err != nil {
			return nil, err
		}
		l.Title = "Lab at " + now.Wire.Add(host.Offset).UTC().Format("Mon 15:04 PM")
		if err := in.apply(host, l); err != nil {
			return nil, err
		}
		return details(host, l), nil
	})(q)
}

func (q *request) patchLab(x found) (any, error) {
	var in labInput
	if err := q.strict(&in); err != nil {
		return nil, err
	}
	if err := in.apply(x.host, x.lab); err != nil {
		return nil, err
	}
	return details(x.host, x.lab), nil
}

// portable is a lab in the form in which CML exports and imports labs. Its IDs are a
// letter and a number, and are valid only inside it.
type portable struct {
	Lab struct {
		Title       string `json:"title" yaml:"title"`
		Description string `json:"description" yaml:"description"`
		Notes       string `json:"notes" yaml:"notes"`
		Version     string `json:"version" yaml:"version"`
	} `json:"lab" yaml:"lab"`
	Nodes []portableNode `json:"nodes" yaml:"nodes"`
	Links []portableLink `json:"links" yaml:"links"`
}

type portableNode struct {
	ID            string   `json:"id" yaml:"id"`
	Label         string   `json:"label" yaml:"label"`
	Definition    string   `json:"node_definition" yaml:"node_definition"`
	Image         *string  `json:"image_definition" yaml:"image_definition"`
	Configuration any      `json:"configuration" yaml:"configuration"`
	X             int      `json:"x" yaml:"x"`
	Y             int      `json:"y" yaml:"y"`
	RAM           *int     `json:"ram" yaml:"ram"`
	CPUs          *int     `json:"cpus" yaml:"cpus"`
	CPULimit      *int     `json:"cpu_limit" yaml:"cpu_limit"`
	DataVolume    *int     `json:"data_volume" yaml:"data_volume"`
	BootDiskSize  *int     `json:"boot_disk_size" yaml:"boot_disk_size"`
	HideLinks     bool     `json:"hide_links" yaml:"hide_links"`
	Tags          []string `json:"tags" yaml:"tags"`
	Interfaces    []struct {
		ID    string `json:"id" yaml:"id"`
		Label string `json:"label" yaml:"label"`
		Slot  *int   `json:"slot" yaml:"slot"`
		Type  string `json:"type" yaml:"type"`
	} `json:"interfaces" yaml:"interfaces"`
}

type portableLink struct {
	ID    string `json:"id" yaml:"id"`
	N1    string `json:"n1" yaml:"n1"`
	I1    string `json:"i1" yaml:"i1"`
	N2    string `json:"n2" yaml:"n2"`
	I2    string `json:"i2" yaml:"i2"`
	Label string `json:"label" yaml:"label"`
}

func (x found) export() (string, error) {
	var p portable
	p.Lab.Title, p.Lab.Description, p.Lab.Notes, p.Lab.Version = x.lab.Title, x.lab.Description, x.lab.Notes, "0.3.0"
	at := map[string][2]string{} // node and interface by interface id
	for k, n := range x.e.Nodes {
		q := portableNode{ID: "n" + strconv.Itoa(k), Label: n.Label, Definition: n.Definition, Image: n.Image, Configuration: n.Configuration, X: n.X, Y: n.Y,
			RAM: n.RAM, CPUs: n.CPUs, CPULimit: n.CPULimit, DataVolume: n.DataVolume, BootDiskSize: n.BootDiskSize, HideLinks: n.HideLinks, Tags: n.Tags}
		for _, i := range x.e.Interfaces {
			if i.Node != n.ID {
				continue
			}
			id := "i" + strconv.Itoa(len(q.Interfaces))
			at[i.ID] = [2]string{q.ID, id}
			q.Interfaces = append(q.Interfaces, struct {
				ID    string `json:"id" yaml:"id"`
				Label string `json:"label" yaml:"label"`
				Slot  *int   `json:"slot" yaml:"slot"`
				Type  string `json:"type" yaml:"type"`
			}{id, i.Label, &i.Slot, i.Type})
		}
		p.Nodes = append(p.Nodes, q)
	}
	for k, l := range x.e.Links {
		a, b := at[l.A], at[l.B]
		p.Links = append(p.Links, portableLink{ID: "l" + strconv.Itoa(k), N1: a[0], I1: a[1], N2: b[0], I2: b[1], Label: l.Label})
	}
	b, err := yaml.Marshal(p)
	return string(b), err
}

// importLab imports a lab in YAML or JSON; the query may replace its title.
func (q *request) importLab() error {
	b, err := q.body()
	if err != nil {
		return err
	}
	var p portable
	if json.Valid(b) {
		err = json.Unmarshal(b, &p)
	} else {
		err = yaml.Unmarshal(b, &p)
	}
	if err != nil {
		return failure{http.StatusBadRequest, "the topology cannot be read: " + err.Error()}
	}
	if t := q.r.URL.Query().Get("title"); t != "" {
		p.Lab.Title = t
	}
	if p.Lab.Title == "" || len(p.Nodes) > maxNodes {
		return failure{http.StatusBadRequest, "the topology has no lab.title, or too many nodes"}
	}
	return show(func(q *request, host *world.Host, now world.Moment) (any, error) {
		e, err := p.elements(host)
		if err != nil {
			return nil, err
		}
		l, err := host.CreateLab(now, q.user)
		if err != nil {
			return nil, err
		}
		l.Title, l.Description, l.Notes, l.Elements = p.Lab.Title, p.Lab.Description, p.Lab.Notes, e
		host.Edited(now, l, q.user)
		host.Log(now, "import_lab", q.user, l)
		return map[string]any{"id": l.ID, "warnings": []string{}}, nil
	})(q)
}

// elements returns the elements of a portable lab with ids of a host.
func (p *portable) elements(host *world.Host) (*world.Elements, error) {
	e := &world.Elements{}
	ids := map[[2]string]string{}
	for _, n := range p.Nodes {
		if _, ok := ids[[2]string{n.ID}]; ok || n.ID == "" {
			return nil, failure{http.StatusBadRequest, fmt.Sprintf("node id %q is empty or there twice", n.ID)}
		}
		in := nodeInput{Node: world.Node{ID: host.NewID(), Label: n.Label, Definition: n.Definition, Image: n.Image, Configuration: n.Configuration, X: n.X, Y: n.Y,
			RAM: n.RAM, CPUs: n.CPUs, CPULimit: n.CPULimit, DataVolume: n.DataVolume, BootDiskSize: n.BootDiskSize, HideLinks: n.HideLinks, Tags: n.Tags}}
		if err := in.check(host); err != nil {
			return nil, err
		}
		ids[[2]string{n.ID}] = in.ID
		e.Nodes = append(e.Nodes, in.Node)
		if len(n.Interfaces) > maxInterfaces {
			return nil, failure{http.StatusBadRequest, fmt.Sprintf("node %q has too many interfaces", n.ID)}
		}
		for _, i := range n.Interfaces {
			f := world.Interface{ID: host.NewID(), Node: in.ID, Label: i.Label, Type: i.Type, Slot: -1}
			if i.Slot != nil {
				f.Slot = *i.Slot
			}
			ids[[2]string{n.ID, i.ID}] = f.ID
			e.Interfaces = append(e.Interfaces, f)
		}
	}
	for _, l := range p.Links {
		a, b := ids[[2]string{l.N1, l.I1}], ids[[2]string{l.N2, l.I2}]
		if a == "" || b == "" || a == b || e.Connected(a) || e.Connected(b) {
			return nil, failure{http.StatusBadRequest, fmt.Sprintf("link %q does not connect two free interfaces", l.ID)}
		}
		e.Links = append(e.Links, world.Link{ID: host.NewID(), A: a, B: b, Label: l.Label})
	}
	return e, nil
}
