package cmlsim

import (
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
	h.handle("GET system/notices", false, func(q *request) error {
		list := []world.Notice{}
		if err := q.with(func(host *world.Host, _ world.Moment) error { list = append(list, host.Notices...); return nil }); err != nil {
			return err
		}
		return q.ok(list)
	})
	h.handle("POST system/notices", false, (*request).notice)
	h.handle("DELETE system/notices/{notice}", false, (*request).dropNotice)
	h.handle("GET system/maintenance_mode", false, func(q *request) error {
		on := false
		if err := q.with(func(host *world.Host, _ world.Moment) error { on = host.Maint; return nil }); err != nil {
			return err
		}
		return q.ok(map[string]any{"maintenance_mode": on, "notice": nil})
	})
}

// maxNotices bounds what clients can leave behind.
const maxNotices = 100

func (q *request) notice() error {
	var n world.Notice
	if err := q.read(&n); err != nil {
		return err
	}
	switch n.Level {
	case "INFO", "SUCCESS", "WARNING", "ERROR":
	default:
		return failure{http.StatusBadRequest, "level is not INFO, SUCCESS, WARNING or ERROR"}
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
	return q.ok(n)
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

// load is what stats and health are computed from.
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
		for _, lab := range host.Labs {
			l.total += lab.Nodes
		}
		l.licensed = q.h.w.LicenceOf(host, now).Registration == "COMPLETED"
		return nil
	})
	l.active = err == nil && q.ready()
	return l, err
}

// ready reports whether CML can start nodes.
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
			for _, l := range host.Labs {
				if q.r.URL.Query().Get("show_all") == "true" || l.Owner == q.user {
					ids = append(ids, l.ID)
				}
			}
			return nil
		}); err != nil {
			return err
		}
		return q.ok(ids)
	})
	h.handle("GET labs/{lab}", false, (*request).lab)
	h.handle("GET labs/{lab}/state", false, func(q *request) error {
		l, _, _, err := q.findLab()
		if err != nil {
			return err
		}
		return q.ok(labState(l))
	})
	h.handle("GET labs/{lab}/nodes", false, (*request).nodes)
	h.handle("GET labs/{lab}/lab_element_state", false, func(q *request) error {
		l, now, _, err := q.findLab()
		if err != nil {
			return err
		}
		nodes := map[string]string{}
		for k := range l.Nodes {
			nodes[nodeID(l, k)], _ = nodeState(l, k, now)
		}
		return q.ok(map[string]any{"nodes": nodes, "links": map[string]string{}, "interfaces": map[string]string{}})
	})
	h.handle("GET labs/{lab}/events", false, func(q *request) error {
		l, _, offset, err := q.findLab()
		if err != nil {
			return err
		}
		return q.ok([]any{map[string]any{
			"lab_id": l.ID, "event": "CHANGE", "element_type": "LAB", "element_id": l.ID, "data": map[string]any{}, "previous": nil,
			"timestamp": float64(l.Modified.Add(offset).UnixMilli()) / 1000,
		}})
	})
	for _, op := range []string{"start", "stop", "wipe"} {
		h.handle("PUT labs/{lab}/"+op, false, func(q *request) error {
			if err := q.with(func(host *world.Host, now world.Moment) error {
				if !host.SetLab(now, q.r.PathValue("lab"), op, q.user) {
					return noLab(q)
				}
				return nil
			}); err != nil {
				return err
			}
			return q.none(http.StatusNoContent)
		})
	}
}

func noLab(q *request) error {
	return failure{http.StatusNotFound, "Lab not found: " + q.r.PathValue("lab")}
}

func (q *request) findLab() (l world.Lab, at world.Moment, offset time.Duration, err error) {
	err = q.with(func(host *world.Host, now world.Moment) error {
		var ok bool
		if l, ok = host.Lab(q.r.PathValue("lab")); !ok {
			return noLab(q)
		}
		at, offset = now, host.Offset
		return nil
	})
	return l, at, offset, err
}

func labState(l world.Lab) string {
	if l.Started {
		return "STARTED"
	}
	if l.StartedAt.IsZero() {
		return "DEFINED_ON_CORE"
	}
	return "STOPPED"
}

func (q *request) lab() error {
	l, _, offset, err := q.findLab()
	if err != nil {
		return err
	}
	owner := "admin"
	if err := q.with(func(host *world.Host, _ world.Moment) error {
		for _, u := range host.Users {
			if u.ID == l.Owner {
				owner = u.Name
			}
		}
		return nil
	}); err != nil {
		return err
	}
	return q.ok(map[string]any{
		"id": l.ID, "created": l.Created.Add(offset).UTC().Format(time.RFC3339), "modified": l.Modified.Add(offset).UTC().Format(time.RFC3339),
		"lab_title": l.Title, "lab_description": "", "lab_notes": "", "owner": l.Owner, "owner_username": owner, "state": labState(l),
		"node_count": l.Nodes, "link_count": max(l.Nodes-1, 0), "groups": []any{}, "effective_permissions": []string{"lab_admin", "lab_edit", "lab_exec", "lab_view"},
	})
}

func nodeID(l world.Lab, k int) string { return fmt.Sprintf("%s%012x", l.ID[:24], k+1) }

// nodeState gives every node of a started lab a boot of 40 s and more.
func nodeState(l world.Lab, k int, now world.Moment) (state, progress string) {
	switch {
	case !l.Started && l.StartedAt.IsZero():
		return "DEFINED_ON_CORE", "Not running"
	case !l.Started:
		return "STOPPED", "Not running"
	case now.World.Sub(l.StartedAt) < time.Duration(40+10*k)*time.Second:
		return "STARTED", "Booting"
	}
	return "BOOTED", "Booted"
}

func (q *request) nodes() error {
	l, now, _, err := q.findLab()
	if err != nil {
		return err
	}
	if q.r.URL.Query().Get("data") != "true" {
		ids := []string{}
		for k := range l.Nodes {
			ids = append(ids, nodeID(l, k))
		}
		return q.ok(ids)
	}
	list := []any{}
	for k := range l.Nodes {
		state, progress := nodeState(l, k, now)
		list = append(list, map[string]any{
			"id": nodeID(l, k), "lab_id": l.ID, "label": fmt.Sprintf("n%d", k), "node_definition": "iosv",
			"state": state, "boot_progress": progress, "cpu_limit": 100, "ram": 512,
		})
	}
	return q.ok(list)
}
