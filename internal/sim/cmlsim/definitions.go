package cmlsim

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"lull/internal/sim/world"
)

// builtin has the node definitions that come with CML: how many interfaces a new node
// has, and their names.
var builtin = map[string]struct {
	interfaces int
	label      string
}{
	"iosv": {4, "GigabitEthernet0/%d"}, "iosvl2": {4, "GigabitEthernet0/%d"}, "csr1000v": {4, "GigabitEthernet%d"}, "nxosv": {4, "Ethernet1/%d"},
	"alpine": {1, "eth%d"}, "server": {1, "eth%d"}, "ubuntu": {1, "ens%d"}, "external_connector": {1, "port"}, "unmanaged_switch": {8, "port%d"},
}

func defaultInterfaces(definition string) int { return max(builtin[definition].interfaces, 1) }

func interfaceLabel(definition string, slot int) string {
	label := orText(builtin[definition].label, "eth%d")
	if !strings.Contains(label, "%d") {
		return label
	}
	return fmt.Sprintf(label, slot)
}

// definition returns a node or image definition, nil if there is none.
func definition(host *world.Host, kind, id string) map[string]any {
	custom, ok := host.Settings.NodeDefs[id]
	if kind == "image" {
		custom, ok = host.Settings.ImageDefs[id]
	}
	var v map[string]any
	if ok && json.Unmarshal(custom, &v) != nil {
		return nil
	}
	b, known := builtin[strings.TrimSuffix(id, "-image")]
	switch {
	case ok:
	case !known:
		return nil
	case kind == "node" && !strings.HasSuffix(id, "-image"):
		v = map[string]any{
			"id": id, "schema_version": "0.0.1",
			"general": map[string]any{"nature": "router", "description": id, "read_only": true},
			"device":  map[string]any{"interfaces": map[string]any{"has_loopback_zero": false, "default_count": b.interfaces, "physical": []string{interfaceLabel(id, 0)}, "serial_ports": 1}},
			"ui":      map[string]any{"visible": true, "label": id, "label_prefix": id + "-", "icon": "router", "group": "Cisco"},
			"sim":     map[string]any{"linux_native": map[string]any{"libvirt_domain_driver": "kvm", "ram": 512, "cpus": 1, "cpu_limit": 100}},
			"boot":    map[string]any{"timeout": 60, "completed": []string{"login:"}}, "configuration": map[string]any{}, "inherited": map[string]any{"image": map[string]any{}, "node": map[string]any{}},
		}
	case kind == "image" && strings.HasSuffix(id, "-image"):
		node := strings.TrimSuffix(id, "-image")
		v = map[string]any{"id": id, "node_definition_id": node, "label": node, "description": "", "disk_image": node + ".qcow2", "read_only": true, "schema_version": "0.0.1"}
	}
	if on, set := host.Settings.ReadOnly[kind+" "+id]; set && v != nil {
		if g, ok := v["general"].(map[string]any); ok {
			g["read_only"] = on
		} else {
			v["read_only"] = on
		}
	}
	return v
}

func definitions(host *world.Host, kind string) []any {
	ids := slices.Sorted(maps.Keys(builtin))
	custom := host.Settings.NodeDefs
	if kind == "image" {
		custom = host.Settings.ImageDefs
		for k := range ids {
			ids[k] += "-image"
		}
	}
	out := []any{}
	for _, id := range append(ids, slices.Sorted(maps.Keys(custom))...) {
		out = append(out, definition(host, kind, id))
	}
	return out
}

var definitionID = regexp.MustCompile(`^[a-zA-Z0-9_.-]{1,250}$`)

const maxDefinitions = 200

// putDefinition creates or updates a definition given in YAML or JSON.
func (q *request) putDefinition(kind string, update bool) error {
	b, err := q.body()
	if err != nil {
		return err
	}
	var v map[string]any
	if json.Valid(b) {
		err = json.Unmarshal(b, &v)
	} else {
		err = yaml.Unmarshal(b, &v)
	}
	id, _ := v["id"].(string)
	if err != nil || !definitionID.MatchString(id) {
		return failure{http.StatusBadRequest, "the definition cannot be read or has no id"}
	}
	text, err := json.Marshal(v)
	if err != nil {
		return failure{http.StatusBadRequest, "the definition cannot be read: " + err.Error()}
	}
	return show(func(_ *request, host *world.Host, _ world.Moment) (any, error) {
		s := &host.Settings
		custom := &s.NodeDefs
		if kind == "image" {
			custom = &s.ImageDefs
		}
		_, exists := (*custom)[id]
		switch {
		case update && !exists:
			return nil, missing("Definition", id)
		case !update && definition(host, kind, id) != nil:
			return nil, failure{http.StatusUnprocessableEntity, "Definition already exists: " + id}
		case len(*custom) >= maxDefinitions:
			return nil, failure{http.StatusBadRequest, "the host has too many definitions"}
		}
		if kind == "node" {
			for _, part := range []string{"general", "device", "ui", "sim"} {
				if _, ok := v[part].(map[string]any); !ok {
					return nil, failure{http.StatusBadRequest, part + " is required"}
				}
			}
		} else {
			node, _ := v["node_definition_id"].(string)
			disk, _ := v["disk_image"].(string)
			k := slices.Index(s.DropFolder, disk)
			switch {
			case definition(host, "node", node) == nil:
				return nil, failure{http.StatusBadRequest, "node_definition_id is not known"}
			case k < 0 && !exists:
				return nil, missing("Image file", disk)
			case k >= 0:
				s.DropFolder = slices.Delete(s.DropFolder, k, k+1)
			}
		}
		if *custom == nil {
			*custom = map[string]json.RawMessage{}
		}
		(*custom)[id] = text
		return "Success", nil
	})(q)
}

func (h *CML) definitionRoutes() {
	for _, kind := range []string{"node", "image"} {
		all := kind + "_definitions"
		h.handle("GET "+all, false, show(func(_ *request, host *world.Host, _ world.Moment) (any, error) { return definitions(host, kind), nil }))
		h.handle("POST "+all, false, admin(func(q *request) error { return q.putDefinition(kind, false) }))
		h.handle("PUT "+all, false, admin(func(q *request) error { return q.putDefinition(kind, true) }))
		h.handle("GET "+all+"/{definition}", false, func(q *request) error {
			var v map[string]any
			id := q.r.PathValue("definition")
			if err := q.with(func(host *world.Host, _ world.Moment) error { v = definition(host, kind, id); return nil }); err != nil {
				return err
			}
			if v == nil {
				return missing("Definition", id)
			}
			b, err := yaml.Marshal(v)
			if err != nil {
				return err
			}
			return q.text("application/yaml", string(b))
		})
		h.handle("DELETE "+all+"/{definition}", false, admin(change(func(q *request, host *world.Host, _ world.Moment) error {
			id := q.r.PathValue("definition")
			v := definition(host, kind, id)
			if v == nil {
				return missing("Definition", id)
			}
			custom := host.Settings.NodeDefs
			if kind == "image" {
				custom = host.Settings.ImageDefs
			}
			if _, ok := custom[id]; !ok || host.Settings.ReadOnly[kind+" "+id] {
				return failure{http.StatusBadRequest, "Definition is read-only: " + id}
			}
			if disk, ok := v["disk_image"].(string); ok {
				host.Settings.DropFolder = append(host.Settings.DropFolder, disk)
				slices.Sort(host.Settings.DropFolder)
			}
			delete(custom, id)
			return nil
		})))
		h.handle("PUT "+all+"/{definition}/read_only", false, admin(func(q *request) error {
			var on bool
			if err := q.read(&on); err != nil {
				return err
			}
			return show(func(q *request, host *world.Host, _ world.Moment) (any, error) {
				id := q.r.PathValue("definition")
				if definition(host, kind, id) == nil {
					return nil, missing("Definition", id)
				}
				if host.Settings.ReadOnly == nil {
					host.Settings.ReadOnly = map[string]bool{}
				}
				host.Settings.ReadOnly[kind+" "+id] = on
				return definition(host, kind, id), nil
			})(q)
		}))
	}
	h.handle("GET node_definitions/{definition}/image_definitions", false, show(func(q *request, host *world.Host, _ world.Moment) (any, error) {
		id := q.r.PathValue("definition")
		if definition(host, "node", id) == nil {
			return nil, missing("Definition", id)
		}
		return slices.DeleteFunc(definitions(host, "image"), func(v any) bool { return v.(map[string]any)["node_definition_id"] != id }), nil
	}))
	h.handle("GET list_image_definition_drop_folder", false, show(func(_ *request, host *world.Host, _ world.Moment) (any, error) {
		return append([]string{}, host.Settings.DropFolder...), nil
	}))
	h.handle("POST images/upload", false, admin((*request).upload))
	h.handle("DELETE images/manage/{file}", false, admin(show(func(q *request, host *world.Host, _ world.Moment) (any, error) {
		k := slices.Index(host.Settings.DropFolder, q.r.PathValue("file"))
		if k < 0 {
			return nil, missing("Image file", q.r.PathValue("file"))
		}
		host.Settings.DropFolder = slices.Delete(host.Settings.DropFolder, k, k+1)
		return "Success", nil
	})))
}

var imageFile = regexp.MustCompile(`^[a-zA-Z0-9_.-]{1,200}\.(qcow2?|iol|tar|tar\.gz)$`)

// upload accepts an image file and keeps only its name.
func (q *request) upload() error {
	name := q.r.Header.Get("X-Original-File-Name")
	kind, params, err := mime.ParseMediaType(q.r.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/form-data" || params["boundary"] == "" || !imageFile.MatchString(name) {
		return failure{http.StatusBadRequest, "the file has no name with a known extension, or is no form"}
	}
	if _, err := io.Copy(io.Discard, q.r.Body); err != nil {
		return failure{http.StatusBadRequest, "the file cannot be read: " + err.Error()}
	}
	return show(func(_ *request, host *world.Host, _ world.Moment) (any, error) {
		s := &host.Settings
		if len(s.DropFolder) >= maxDefinitions {
			return nil, failure{http.StatusBadRequest, "the drop folder is full"}
		}
		if !slices.Contains(s.DropFolder, name) {
			s.DropFolder = append(s.DropFolder, name)
			slices.Sort(s.DropFolder)
		}
		return "Success", nil
	})(q)
}
