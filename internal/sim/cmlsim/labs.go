package cmlsim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"lull/internal/sim/world"
)

func (h *CML) systemRoutes() {
	h.handle("GET system_information", true, func(q *request) error {
		var version string
		if err := q.with(func(host *world.Host, _ world.Moment) error { version = host.Version; return nil }); err != nil {
			return err
		}
		ready := q.ready()
		return q.ok(map[string]any{"version": version, "ready": ready, "allow_ssh_pubkey_auth": false, "oui": nil})
	})
	h.handle("GET system_stats", false, (*request).stats)
	h.handle("GET system_health", false, (*request).health)
	h.handle("GET system/notices", false, show(func(_ *request, host *world.Host, _ world.Moment) (any, error) {
		list := []world.Notice{}
		for _, n := range host.Notices {
			list = append(list, shownNotice(n))
		}
		return list, nil
	}))
	h.handle("POST system/notices", false, (*request).notice)
	h.handle("GET system/notices/{notice}", false, show(func(q *request, host *world.Host, _ world.Moment) (any, error) {
		n, err := noticeOf(q, host)
		if err != nil {
			return nil, err
		}
		return shownNotice(*n), nil
	}))
	h.handle("PATCH system/notices/{notice}", false, admin(func(q *request) error {
		var text json.RawMessage
		if err := q.read(&text); err != nil {
			return err
		}
		return show(func(q *request, host *world.Host, _ world.Moment) (any, error) {
			n, err := noticeOf(q, host)
			if err != nil {
				return nil, err
			}
			in := *n
			if err := json.Unmarshal(text, &in); err != nil {
				return nil, failure{http.StatusBadRequest, err.Error()}
			}
			in.ID = n.ID
			if err := checkLevel(in); err != nil {
				return nil, err
			}
			*n = in
			return shownNotice(in), nil
		})(q)
	}))
	h.handle("DELETE system/notices/{notice}", false, (*request).dropNotice)
	maintenance := func(host *world.Host) map[string]any {
		var id any
		if host.MaintID != "" {
			id = host.MaintID
		}
		return map[string]any{"maintenance_mode": host.Maint, "notice": id, "resolved_notice": nil}
	}
	h.handle("GET system/maintenance_mode", false, show(func(_ *request, host *world.Host, _ world.Moment) (any, error) { return maintenance(host), nil }))
	h.handle("PATCH system/maintenance_mode", false, admin(func(q *request) error {
		var in map[string]any
		if err := q.read(&in); err != nil {
			return err
		}
		return show(func(_ *request, host *world.Host, now world.Moment) (any, error) {
			for key, v := range in {
				on, isBool := v.(bool)
				id, isText := v.(string)
				switch {
				case key == "maintenance_mode" && isBool:
					host.Maint = on
					host.Log(now, "maintenance_state_change", "", nil)
				case key == "notice" && (isText || v == nil):
					host.MaintID = id
				default:
					return nil, failure{http.StatusBadRequest, key + " is not known or has the wrong type"}
				}
			}
			out := maintenance(host)
			for _, n := range host.Notices {
				if n.ID == host.MaintID {
					out["resolved_notice"] = shownNotice(n)
				}
			}
			return out, nil
		})(q)
	}))
	h.computeRoutes()
}

// shownNotice returns a notice without nil lists.
func shownNotice(n world.Notice) world.Notice {
	if n.Acknowledged == nil {
		n.Acknowledged = map[string]bool{}
	}
	return n
}

func noticeOf(q *request, host *world.Host) (*world.Notice, error) {
	id := q.r.PathValue("notice")
	if k := slices.IndexFunc(host.Notices, func(n world.Notice) bool { return n.ID == id }); k >= 0 {
		return &host.Notices[k], nil
	}
	return nil, missing("Notice", id)
}

func checkLevel(n world.Notice) error {
	if !slices.Contains([]string{"INFO", "SUCCESS", "WARNING", "ERROR"}, n.Level) {
		return failure{http.StatusBadRequest, "level is not INFO, SUCCESS, WARNING or ERROR"}
	}
	return nil
}

// maxNotices is the maximum number of notices of a host.
const maxNotices = 100

func (q *request) notice() error {
	var n world.Notice
	if err := q.read(&n); err != nil {
		return err
	}
	if err := checkLevel(n); err != nil {
		return err
	}
	if err := q.with(func(host *world.Host, now world.Moment) error {
		if len(host.Notices) >= maxNotices {
			host.Notices = host.Notices[1:]
		}
		host.Posted++
		n.ID = fmt.Sprintf("%08x-0000-4000-a000-%012x", host.Posted, now.Wire.UnixMilli())
		host.Notices = append(host.Notices, n)
		return nil
	}); err != nil {
		return err
	}
	return q.ok(shownNotice(n))
}

func (q *request) dropNotice() error {
	id := q.r.PathValue("notice")
	if err := q.with(func(host *world.Host, _ world.Moment) error {
		i := slices.IndexFunc(host.Notices, func(n world.Notice) bool { return n.ID == id })
		if i < 0 {
			return failure{http.StatusNotFound, "Notice not found: " + id}
		}
		host.Notices = slices.Delete(host.Notices, i, i+1)
		return nil
	}); err != nil {
		return err
	}
	return q.none(http.StatusNoContent)
}

// load is a host's use of resources, from which stats and health are derived.
type load struct {
	id, name         string
	cpus, memory     int // memory in MiB
	total, running   int
	disk             int // GiB
	licensed, active bool
}

func (q *request) load() (load, error) {
	var l load
	err := q.with(func(host *world.Host, now world.Moment) error {
		i := host.Instance()
		t, _ := world.LookupType(i.Type)
		l = load{id: host.Licence.Product, name: "cml-controller", cpus: t.CPUs, memory: t.MemoryMiB, running: host.RunningNodes(), disk: i.VolumeGB}
		for k := range host.Labs {
			l.total += host.Labs[k].Nodes
		}
		l.licensed = q.h.w.LicenceOf(host, now).Registration == "COMPLETED"
		return nil
	})
	l.active = err == nil && q.ready()
	return l, err
}

// ready reports whether the host's CML can start nodes.
func (q *request) ready() bool {
	return q.h.w.HostAt(q.ref, func(*world.Host, world.Moment, world.Reach) {}) == world.Ready
}

func (q *request) stats() error {
	l, err := q.load()
	if err != nil {
		return err
	}
	percent := min(99.0, 2+100*float64(l.running)/float64(max(4*l.cpus, 1)))
	cpu := map[string]any{"count": l.cpus, "percent": percent, "model": "Simulated CPU", "predicted": float64(l.running) / 2, "load": []float64{percent / 50, percent / 60, percent / 70}}
	total := uint64(l.memory) << 20
	used := min(total, total/8+uint64(l.running)<<29)
	memory := map[string]any{"total": total, "used": used, "free": total - used}
	disk := map[string]any{"total": uint64(l.disk) << 30, "used": uint64(l.disk) << 30 / 3, "free": uint64(l.disk) << 30 * 2 / 3}
	return q.ok(map[string]any{
		"computes": map[string]any{l.id: map[string]any{"hostname": l.name, "is_controller": true, "stats": map[string]any{
			"cpu": cpu, "memory": memory, "disk": disk,
			"dominfo": map[string]any{"total_nodes": l.total, "total_orphans": 0, "running_nodes": l.running, "running_orphans": 0, "allocated_cpus": l.running, "allocated_memory": uint64(l.running) << 29},
		}}},
		"all":        map[string]any{"cpu": map[string]any{"count": l.cpus, "percent": percent}, "memory": memory, "disk": disk},
		"controller": map[string]any{"disk": disk},
	})
}

func (q *request) health() error {
	l, err := q.load()
	if err != nil {
		return err
	}
	return q.ok(map[string]any{
		"valid": l.active, "is_licensed": l.licensed, "is_enterprise": true,
		"computes": map[string]any{l.id: map[string]any{
			"kvm_vmx_enabled": true, "enough_cpus": true, "lld_connected": l.active, "lld_synced": l.active, "libvirt": true,
			"fabric": l.active, "device_mux": l.active, "refplat_images_available": true, "docker_shim": true, "valid": l.active,
			"admission_state": "READY", "is_controller": true, "hostname": l.name,
		}},
		"controller": map[string]any{"core_connected": l.active, "nodes_loaded": l.active, "images_loaded": l.active, "valid": l.active},
	})
}

func (h *CML) labRoutes() {
	h.handle("GET labs", false, func(q *request) error {
		ids := []string{}
		if err := q.with(func(host *world.Host, _ world.Moment) error {
			for k := range host.Labs {
				if l := &host.Labs[k]; !l.Removed && q.sees(host, l, q.r.URL.Query().Get("show_all") == "true") {
					ids = append(ids, l.ID)
				}
			}
			return nil
		}); err != nil {
			return err
		}
		return q.ok(ids)
	})
	h.handle("GET labs/{lab}", false, inLab(func(_ *request, x found) (any, error) { return details(x.host, x.lab), nil }))
	h.handle("GET labs/{lab}/state", false, inLab(func(_ *request, x found) (any, error) { return labState(x.lab), nil }))
	h.handle("GET labs/{lab}/events", false, inLab(func(_ *request, x found) (any, error) {
		return []any{map[string]any{
			"lab_id": x.lab.ID, "event": "CHANGE", "element_type": "LAB", "element_id": x.lab.ID, "data": map[string]any{}, "previous": nil,
			"timestamp": float64(x.lab.Modified.Add(x.host.Offset).UnixMilli()) / 1000,
		}}, nil
	}))
	for _, op := range []string{"start", "stop", "wipe"} {
		h.handle("PUT labs/{lab}/"+op, false, inLab(func(q *request, x found) (any, error) {
			if op == "wipe" && x.lab.Started {
				return nil, failure{http.StatusBadRequest, "Lab is started and cannot be wiped: " + x.lab.ID}
			}
			x.host.SetLab(x.now, x.lab.ID, op, q.user)
			return nil, nil
		}))
	}
}

func labState(l *world.Lab) string {
	switch {
	case l.Started:
		return "STARTED"
	case l.StartedAt.IsZero():
		return "DEFINED_ON_CORE"
	}
	return "STOPPED"
}

// details returns a lab without its elements.
func details(host *world.Host, l *world.Lab) map[string]any {
	owner, full := "admin", ""
	for _, u := range host.Users {
		if u.ID == l.Owner {
			owner = u.Name
		}
	}
	if a := host.Account(l.Owner); a != nil {
		owner, full = a.Name, a.Fullname
	}
	groups := []any{}
	for _, g := range l.Shared.Groups {
		groups = append(groups, map[string]any{"id": g.ID, "permission": "read_only"})
	}
	return map[string]any{
		"id": l.ID, "created": l.Created.Add(host.Offset).UTC().Format(time.RFC3339), "modified": l.Modified.Add(host.Offset).UTC().Format(time.RFC3339),
		"lab_title": l.Title, "lab_description": l.Description, "lab_notes": l.Notes, "owner": l.Owner, "owner_username": owner, "owner_fullname": full,
		"state": labState(l), "node_count": l.Nodes, "link_count": l.Links(), "groups": groups,
		"effective_permissions": []string{"lab_admin", "lab_edit", "lab_exec", "lab_view"},
	}
}
