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

	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/store"
)

// maxReport is the maximum size of a machine's report, and maxMachines the
// maximum number of machines kept.
const (
	maxReport   = 128 << 10
	maxMachines = 20_000
)

// machines holds the agents and hosts that have reported to this server, and the
// agents' last reports. Package hosts keeps the hosts' reports. All of it is lost
// when the server ends, and sent again by the machines. Other servers know these
// machines from their presence in the store.
type machines struct {
	mu   sync.Mutex
	last map[string]machine // by kind and name
}

// machine is a machine that has reported, how long it may then be silent (0 is
// forever), and its presence in the store with the lease.
type machine struct {
	control.Machine
	span  time.Duration
	told  presence
	under store.LeaseID
}

func newMachines() *machines { return &machines{last: map[string]machine{}} }

func (m *machines) put(v control.Machine, span time.Duration, now time.Time) (control.Machine, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := v.Kind + "/" + v.Name
	old, known := m.last[key]
	if !known && len(m.last) >= maxMachines {
		return control.Machine{}, fault(http.StatusServiceUnavailable, "too_many_machines", "cannot accept reports of another machine: the limit is reached")
	}
	at := now.UTC().Round(0)
	v.ReportedAt = &at
	m.last[key] = machine{v, span, old.told, old.under}
	return v, nil
}

// news reports whether the store lacks p for v, or holds it under another lease. A
// newer report alone is no reason to write.
func (m *machines) news(v control.Machine, p presence, lease store.LeaseID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	old := m.last[v.Kind+"/"+v.Name]
	old.told.At = p.At
	return old.told != p || old.under != lease
}

// announced remembers that p was written to the store under lease.
func (m *machines) announced(v control.Machine, p presence, lease store.LeaseID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if old, known := m.last[v.Kind+"/"+v.Name]; known {
		old.told, old.under = p, lease
		m.last[v.Kind+"/"+v.Name] = old
	}
}

func (m *machines) list(kind string, now time.Time) []control.Machine {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []control.Machine
	for _, key := range slices.Sorted(maps.Keys(m.last)) {
		if strings.HasPrefix(key, kind+"/") {
			out = append(out, m.last[key].aged(now))
		}
	}
	return out
}

func (m machine) aged(now time.Time) control.Machine {
	age := max(0, now.Sub(*m.ReportedAt))
	m.AgeSeconds, m.Stale = age.Seconds(), m.span > 0 && age > m.span
	return m.Machine
}

// Named is the path of a machine.
type Named struct {
	Name string `path:"name" maxLength:"128"`
}

func (s *Server) machineRoutes() {
	register(s, route{id: "list-agents", method: "GET", path: base + "/agents", role: access.Viewer, doc: "Machines whose agents report to any server of the fleet, with the last report if it was sent to this server"},
		func(ctx context.Context, in *Paged) (*answer[control.List[control.Machine]], error) {
			l, err := s.everywhere(ctx, "agent")
			if err != nil {
				return nil, problem(err)
			}
			return ok(pageOf(l, in, func(m control.Machine) string { return m.Name }), nil)
		})
	register(s, route{id: "get-agent", method: "GET", path: base + "/agents/{name}", role: access.Viewer, machine: true, doc: "The last report of a machine and its age, if it was sent to this server"},
		func(ctx context.Context, in *Named) (*answer[control.Machine], error) {
			return ok(s.machine(ctx, "agent", in.Name))
		})
	s.agentRoutes()
	s.hostRoutes()
}

// raw encodes a report for storage.
func raw(body map[string]any) (json.RawMessage, error) {
	b, err := json.Marshal(body)
	if err != nil || len(b) > maxReport {
		return nil, invalid("report", "it is larger than 128 KiB")
	}
	return b, nil
}
