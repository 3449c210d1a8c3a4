package server

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/daemon/server/access"
	"lull/internal/link/control"
)

// maxReport is the longest report of a machine and maxMachines how many are
// remembered.
const (
	maxReport   = 128 << 10
	maxMachines = 20_000
)

// machines are the agents and hosts that reported to this server, and what
// they said last. They are forgotten when it ends: they report again.
type machines struct {
	mu   sync.Mutex
	last map[string]control.Machine // by kind and name
}

func newMachines() *machines { return &machines{last: map[string]control.Machine{}} }

func (m *machines) put(kind, name string, report json.RawMessage, now time.Time) (control.Machine, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := kind + "/" + name
	if _, known := m.last[key]; !known && len(m.last) >= maxMachines {
		return control.Machine{}, fault(http.StatusServiceUnavailable, "too_many_machines", "cannot remember another machine")
	}
	at := now.UTC().Round(0)
	v := control.Machine{Name: name, Kind: kind, ReportedAt: &at, Report: report}
	m.last[key] = v
	return v, nil
}

func (m *machines) get(kind, name string, now time.Time) (control.Machine, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, known := m.last[kind+"/"+name]
	if !known {
		return v, notFound(kind, name)
	}
	return aged(v, now), nil
}

func (m *machines) list(kind string, now time.Time) []control.Machine {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []control.Machine
	for _, key := range slices.Sorted(maps.Keys(m.last)) {
		if strings.HasPrefix(key, kind+"/") {
			out = append(out, aged(m.last[key], now))
		}
	}
	return out
}

func aged(m control.Machine, now time.Time) control.Machine {
	m.AgeSeconds = max(0, now.Sub(*m.ReportedAt).Seconds())
	return m
}

func (s *Server) machineRoutes() {
	type Named struct {
		Name string `path:"name" maxLength:"128"`
	}
	for _, kind := range []string{"agent", "host"} {
		all, each := base+"/"+kind+"s", base+"/"+kind+"s/{name}"
		register(s, route{id: "list-" + kind + "s", method: "GET", path: all, role: access.Viewer, doc: "Machines that reported to this server as " + kind + "s"},
			func(_ context.Context, in *Paged) (*answer[control.List[control.Machine]], error) {
				return ok(pageOf(s.machines.list(kind, time.Now()), in, func(m control.Machine) string { return m.Name }), nil)
			})
		register(s, route{id: "get-" + kind, method: "GET", path: each, role: access.Viewer, machine: true, doc: "The last report of a machine, and its age"},
			func(_ context.Context, in *Named) (*answer[control.Machine], error) {
				return ok(s.machines.get(kind, in.Name, time.Now()))
			})
		register(s, route{id: "report-" + kind, method: "POST", path: each + "/report", role: access.Admin, machine: true, status: http.StatusOK,
			doc: "Report what a machine sees; its token speaks for it alone"},
			func(_ context.Context, in *struct {
				Named
				Body map[string]any
			}) (*answer[control.Machine], error) {
				report, err := json.Marshal(in.Body)
				if err != nil || len(report) > maxReport {
					return nil, problem(invalid("report", "it is larger than 128 KiB"))
				}
				return ok(s.machines.put(kind, in.Name, report, time.Now()))
			})
	}
}
