package sim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"lull/internal/sim/fault"
	"lull/internal/sim/world"
)

// Control lists the control API's routes. Bodies and answers are JSON; errors
// are {"error": "..."} with status 400 or 404. {ref} is an instance id or a
// scenario name.
//
//	GET    /sim/state                       clock, counts of instances by state, faults
//	GET    /sim/instances                   all instances, as InstanceInfo
//	GET    /sim/instances/{ref}             one of them
//	POST   /sim/instances/{ref}/{op}        start, stop, hibernate or terminate; {"by": "user"|"server"|"spot"|"instance"}
//	PATCH  /sim/instances/{ref}             world.Attributes
//	POST   /sim/instances/{ref}/events      {"category": "...", "user": "..."}: a user does this in CML now
//	GET    /sim/faults                      rules and how often each has struck
//	POST   /sim/faults                      add a rule (fault.Rule; "delay" is in nanoseconds); answers {"id"}
//	DELETE /sim/faults                      remove all
//	DELETE /sim/faults/{id}                 remove one
//	PUT    /sim/clock                       {"speed": 60} and/or {"advance": "1h30m"}
//	GET    /sim/calls                       calls served, by service and action
//	DELETE /sim/calls                       the same, and start again from 0
//	POST   /sim/save                        write the state file
const Control = "/sim/"

// InstanceInfo is the control API's description of an instance.
type InstanceInfo struct {
	ID            string             `json:"id"`
	Name          string             `json:"name,omitempty"`
	Account       string             `json:"account"`
	Region        string             `json:"region"`
	Type          string             `json:"type"`
	State         world.State        `json:"state"`
	PublicIP      string             `json:"public_ip,omitempty"`
	PrivateIP     string             `json:"private_ip,omitempty"`
	MetadataIP    string             `json:"metadata_ip,omitempty"`
	Boots         int                `json:"boots"`
	Stuck         bool               `json:"stuck,omitempty"`
	History       []world.Transition `json:"history,omitempty"`
	CMLVersion    string             `json:"cml_version,omitempty"`
	Profile       string             `json:"profile,omitempty"`
	RunningNodes  int                `json:"running_nodes"`
	LastActivity  *time.Time         `json:"last_activity,omitempty"`
	Interruptions int                `json:"interruptions"`
	Users         []*world.User      `json:"users,omitempty"`
}

func info(i *world.Instance) InstanceInfo {
	out := InstanceInfo{
		ID: i.ID, Name: i.Name, Account: i.Account, Region: i.Region, Type: i.Type, State: i.State,
		Boots: i.Boots, Stuck: i.Stuck, History: append([]world.Transition(nil), i.History...),
	}
	if i.PublicIP.IsValid() {
		out.PublicIP = i.PublicIP.String()
	}
	if i.PrivateIP.IsValid() {
		out.PrivateIP, out.MetadataIP = i.PrivateIP.String(), i.MetadataAddr().String()
	}
	if h := i.Host; h != nil {
		out.CMLVersion, out.Profile, out.RunningNodes, out.Interruptions = h.Version, h.Profile, h.RunningNodes(), h.Interruptions
		if !h.LastActivity.IsZero() {
			at := h.LastActivity
			out.LastActivity = &at
		}
		for _, u := range h.Users {
			c := *u
			out.Users = append(out.Users, &c)
		}
	}
	return out
}

var errNone = errors.New("cannot find it: there is no such instance or rule")

// route adds a control route that answers with the result of serve.
func (s *Server) route(pattern string, serve func(*http.Request) (any, error)) {
	s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		out, err := serve(r)
		status := http.StatusOK
		if err != nil {
			status, out = http.StatusBadRequest, map[string]string{"error": err.Error()}
			if errors.Is(err, errNone) {
				status = http.StatusNotFound
			}
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(out) // the client may have disconnected
	})
}

func body(r *http.Request, v any) error {
	b, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil {
		return fmt.Errorf("cannot read body: %w", err)
	}
	if len(b) == 0 {
		return nil
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("cannot read body: %w", err)
	}
	return nil
}

func (s *Server) control() {
	w := s.World
	done := map[string]bool{"ok": true}
	s.route("GET /sim/state", func(*http.Request) (any, error) { return s.summary(), nil })
	s.route("GET /sim/instances", func(*http.Request) (any, error) {
		out := []InstanceInfo{}
		w.All(func(i *world.Instance, _ world.Moment) { out = append(out, info(i)) })
		return out, nil
	})
	s.route("GET /sim/instances/{ref}", func(r *http.Request) (any, error) {
		var out InstanceInfo
		if !w.Find(r.PathValue("ref"), func(i *world.Instance, _ world.Moment) { out = info(i) }) {
			return nil, errNone
		}
		return out, nil
	})
	s.route("POST /sim/instances/{ref}/{op}", func(r *http.Request) (any, error) {
		in := struct{ By string }{By: "user"}
		if err := body(r, &in); err != nil {
			return nil, err
		}
		return done, w.External(r.PathValue("ref"), r.PathValue("op"), in.By)
	})
	s.route("PATCH /sim/instances/{ref}", func(r *http.Request) (any, error) {
		var in world.Attributes
		if err := body(r, &in); err != nil {
			return nil, err
		}
		return done, w.Set(r.PathValue("ref"), in)
	})
	s.route("POST /sim/instances/{ref}/events", s.event)
	s.faultRoutes(done)
	s.route("PUT /sim/clock", func(r *http.Request) (any, error) {
		var in struct {
			Speed   *float64
			Advance world.Duration
		}
		if err := body(r, &in); err != nil {
			return nil, err
		}
		if in.Speed != nil {
			if err := w.SetSpeed(*in.Speed); err != nil {
				return nil, err
			}
		}
		if in.Advance < 0 {
			return nil, errors.New("cannot advance the clock: time does not go backwards")
		}
		w.Clock.Advance(in.Advance.D())
		return s.summary(), nil
	})
	s.route("GET /sim/calls", func(*http.Request) (any, error) { return w.Calls.All(), nil })
	s.route("DELETE /sim/calls", func(*http.Request) (any, error) { return w.Calls.Reset(), nil })
	s.route("POST /sim/save", func(*http.Request) (any, error) { return done, s.Save() })
}

func (s *Server) faultRoutes(done any) {
	w := s.World
	s.route("GET /sim/faults", func(*http.Request) (any, error) {
		return map[string]any{"rules": w.Faults.Rules(), "hits": w.Faults.Hits()}, nil
	})
	s.route("POST /sim/faults", func(r *http.Request) (any, error) {
		var in fault.Rule
		if err := body(r, &in); err != nil {
			return nil, err
		}
		id, err := w.Faults.Add(in)
		return map[string]string{"id": id}, err
	})
	s.route("DELETE /sim/faults", func(*http.Request) (any, error) { w.Faults.Clear(); return done, nil })
	s.route("DELETE /sim/faults/{id}", func(r *http.Request) (any, error) {
		if !w.Faults.Remove(r.PathValue("id")) {
			return nil, errNone
		}
		return done, nil
	})
}

func (s *Server) event(r *http.Request) (any, error) {
	var in struct{ Category, User string }
	if err := body(r, &in); err != nil {
		return nil, err
	}
	known := false
	reach := s.World.HostAt(r.PathValue("ref"), func(h *world.Host, now world.Moment, _ world.Reach) {
		known = h.Act(now, in.Category, h.UserID(in.User))
	})
	if reach == world.Unreachable {
		return nil, errNone
	}
	if !known {
		return nil, fmt.Errorf("cannot add event: unknown category %s", strconv.Quote(in.Category))
	}
	return map[string]bool{"ok": true}, nil
}

func (s *Server) summary() map[string]any {
	counts := map[world.State]int{}
	s.World.All(func(i *world.Instance, _ world.Moment) { counts[i.State]++ })
	now := s.World.Clock.Now()
	return map[string]any{
		"world_time": now.World, "wire_time": now.Wire, "speed": s.World.Clock.Speed(),
		"instances": counts, "faults": len(s.World.Faults.Rules()),
	}
}
