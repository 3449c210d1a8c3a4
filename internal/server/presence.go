package server

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"lull/internal/protocol/control"
	"lull/internal/store"
)

// presence is the store's record of a machine that reports to some server: enough for
// every server to list it. It is written under the lease of the server that receives
// the reports, and only when that server or the content changes, not with every
// report. Readings stay in that server's memory.
type presence struct {
	Server   string    `json:"server"`
	WorkerID string    `json:"worker_id,omitempty"`
	Version  string    `json:"version,omitempty"`
	Outdated bool      `json:"outdated,omitempty"`
	Stale    bool      `json:"stale,omitempty"`
	At       time.Time `json:"at"` // when the report that caused this write arrived
}

const presencePrefix = "presence/"

// presenceEvery is the interval at which a server checks that the presences of its
// machines in the store are right.
const presenceEvery = time.Minute

var presences = store.Codec[presence]{Version: 1}

// says returns the presence of v, as this server would write it.
func (s *Server) says(v control.Machine) presence {
	return presence{Server: s.name, WorkerID: v.WorkerID, Version: v.Version, Outdated: v.Outdated, Stale: v.Stale, At: *v.ReportedAt}
}

// announce writes a machine's presence unless the store already has it. A failed
// write is retried with the next report.
func (s *Server) announce(ctx context.Context, v control.Machine) {
	lease := store.LeaseID(s.lease.Load())
	p := s.says(v)
	if lease == 0 || !s.machines.news(v, p, lease) {
		return
	}
	key := presencePrefix + v.Kind + "/" + v.Name
	data, err := presences.Encode(key, p)
	if err == nil {
		_, err = s.fleet.Store().Commit(ctx, store.Txn{Then: []store.Op{store.PutLeased(key, data, lease)}})
	}
	if err != nil && !errors.Is(err, store.ErrAmbiguous) {
		s.log.Debug("other servers do not see a machine yet", "machine", v.Name, "err", err)
		return
	}
	s.machines.announced(v, p, lease)
}

// attend corrects the presences in the store: of machines that fell silent, and of
// machines that moved to another server and came back.
func (s *Server) attend(ctx context.Context) error {
	page, err := store.List(ctx, s.fleet.Store(), store.Prefix(presencePrefix))
	if err != nil {
		return err
	}
	known := map[string]store.Value{}
	for _, v := range page.Values {
		known[strings.TrimPrefix(v.Key, presencePrefix)] = v
	}
	lease, now := store.LeaseID(s.lease.Load()), time.Now()
	for _, v := range slices.Concat(s.machines.list("agent", now), s.machines.list("host", now)) {
		old, p := known[v.Kind+"/"+v.Name], s.says(v)
		said, err := presences.Decode(old.Key, old.Data)
		switch {
		case lease == 0 || !old.Exists() || err != nil: // its next report writes it
			s.machines.announced(v, presence{}, 0)
			continue
		case said.Server == s.name && said.Stale == v.Stale,
			said.Server != s.name && !v.ReportedAt.After(said.At): // it has since reported to another server
			continue
		}
		data, err := presences.Encode(old.Key, p)
		if err != nil {
			return err
		}
		t := store.Txn{If: []store.Cond{store.Unchanged(old)}, Then: []store.Op{store.PutLeased(old.Key, data, lease)}}
		if res, err := s.fleet.Store().Commit(ctx, t); err != nil {
			return err
		} else if res.Succeeded {
			s.machines.announced(v, p, lease)
		}
	}
	return nil
}

// present returns the presences in the store for one kind of machine, by name.
func (s *Server) present(ctx context.Context, kind string) (map[string]presence, error) {
	prefix := presencePrefix + kind + "/"
	page, err := store.List(ctx, s.fleet.Store(), store.Prefix(prefix))
	if err != nil {
		return nil, err
	}
	out := map[string]presence{}
	for _, v := range page.Values {
		p, err := presences.Decode(v.Key, v.Data)
		if err != nil {
			return nil, err
		}
		out[strings.TrimPrefix(v.Key, prefix)] = p
	}
	return out, nil
}

// everywhere returns all machines of a kind that report to some server. Those that
// report here are described from memory, the others by their presence.
func (s *Server) everywhere(ctx context.Context, kind string) ([]control.Machine, error) {
	present, err := s.present(ctx, kind)
	if err != nil {
		return nil, err
	}
	all, now := map[string]control.Machine{}, time.Now()
	for _, v := range s.machines.list(kind, now) {
		v.Server = s.name
		all[v.Name] = v
	}
	for name, p := range present {
		if here, ok := all[name]; p.Server == s.name || ok && here.ReportedAt.After(p.At) {
			continue
		}
		all[name] = control.Machine{Kind: kind, Name: name, ReportedAt: &p.At, AgeSeconds: max(0, now.Sub(p.At)).Seconds(),
			Server: p.Server, WorkerID: p.WorkerID, Version: p.Version, Outdated: p.Outdated, Stale: p.Stale}
	}
	out := make([]control.Machine, 0, len(all))
	for _, name := range slices.Sorted(maps.Keys(all)) {
		out = append(out, all[name])
	}
	return out, nil
}

// machine returns one machine of everywhere, or an error if there is none of that
// name.
func (s *Server) machine(ctx context.Context, kind, name string) (control.Machine, error) {
	all, err := s.everywhere(ctx, kind)
	if err != nil {
		return control.Machine{}, err
	}
	if i := slices.IndexFunc(all, func(m control.Machine) bool { return m.Name == name }); i >= 0 {
		return all[i], nil
	}
	return control.Machine{}, notFound(kind, name)
}
