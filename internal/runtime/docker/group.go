package docker

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"lull/internal/core/instance"
)

// composeDepends is the label in which Compose (from version 2) stores the
// dependencies of a service: SERVICE:CONDITION:RESTART, comma-separated.
const composeDepends = "com.docker.compose.depends_on"

// member holds a container's relations to other containers, from its labels.
type member struct {
	id       string // ID of its instance
	name     string
	project  string // its Compose project; empty for none
	service  string
	group    string
	services []string // services of its project that it depends on
	names    []string // containers, or services of its project, that it depends on
	addrs    []netip.Addr
	past     []netip.Addr // addresses of its last run, while it does not run
}

func memberOf(id string, d *details) member {
	l := d.Config.Labels
	m := member{id: id, name: d.name(), project: l[composeProject], service: l[composeService]}
	if group, set := l[LabelGroup]; set {
		m.group = group
	} else {
		m.group = m.project
	}
	if instance.ValidName(m.group) != nil {
		m.group = ""
	}
	for _, s := range list(l[composeDepends]) {
		service, _, _ := strings.Cut(s, ":")
		m.services = append(m.services, service)
	}
	m.names = list(l[LabelDepends])
	for _, n := range d.NetworkSettings.Networks {
		for _, a := range []string{n.IPAddress, n.GlobalIPv6Address} {
			if addr, err := netip.ParseAddr(a); err == nil && d.runs() {
				m.addrs = append(m.addrs, addr)
			}
		}
	}
	return m
}

// list splits s at commas and drops empty elements.
func list(s string) []string {
	all := strings.FieldsFunc(s, func(r rune) bool { return r == ',' })
	for n := range all {
		all[n] = strings.TrimSpace(all[n])
	}
	return slices.DeleteFunc(all, func(s string) bool { return s == "" })
}

// needs reports whether m depends on o.
func (m *member) needs(o *member) bool {
	here := m.project != "" && m.project == o.project
	return here && slices.Contains(m.services, o.service) || slices.Contains(m.names, o.name) || here && slices.Contains(m.names, o.service)
}

// relations holds the members of adopted containers, by container ID.
type relations struct {
	mu sync.Mutex
	of map[string]member
}

// keep drops the containers that are not keys of there.
func (r *relations) keep(there map[string]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.of, func(c string, _ member) bool { _, ok := there[c]; return !ok })
}

func (r *relations) forget(container string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.of, container)
}

// release drops the container of an instance.
func (r *relations) release(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.of, func(_ string, m member) bool { return m.id == id })
}

func (r *relations) set(container string, m member) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == nil {
		r.of = map[string]member{}
	}
	if old := r.of[container]; len(m.addrs) == 0 {
		m.past = append(old.addrs, old.past...)
	}
	r.of[container] = m
}

// all returns every member with the IDs of the instances on which it depends.
func (r *relations) all() map[*member][]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := map[*member][]string{}
	for _, m := range r.of {
		var on []string
		for _, o := range r.of {
			if m.id != o.id && m.needs(&o) {
				on = append(on, o.id)
			}
		}
		out[&m] = on
	}
	return out
}

// at returns the container that has an address or, if none has, the one that had it
// in its last run. It reports whether that is in the same group as container.
func (r *relations) at(addr netip.Addr, container string) (other string, same bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c, m := range r.of {
		if slices.Contains(m.addrs, addr) {
			other = c
			break
		}
		if slices.Contains(m.past, addr) {
			other = c
		}
	}
	g := r.of[container].group
	return other, other != "" && g != "" && g == r.of[other].group
}

// beside returns the other containers in the group of a container.
func (r *relations) beside(container string) (others []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c, m := range r.of {
		if c != container && m.group != "" && m.group == r.of[container].group {
			others = append(others, c)
		}
	}
	return others
}

// relate applies the relations of all members to their instances. Errors are
// logged.
func (f *follower) relate(ctx context.Context) {
	for m, on := range f.r.relations.all() {
		if m.group == "" && len(m.services)+len(m.names) == 0 && m.project == "" {
			continue // keep what a user has set
		}
		if err := f.h.RelatedOutside(ctx, m.id, m.group, on); err != nil && ctx.Err() == nil {
			f.r.log.Warn("cannot apply the dependencies of a container", "container", m.name, "err", err)
		}
	}
}

// leaveOutGroup removes from a sample those connections within the group that do not
// keep the container in use: connections to a frozen container, and connections on
// which neither end waits for an answer, such as pooled ones. A group therefore stays
// in use while a member works or has a client from outside, and can otherwise sleep
// as a whole.
func (r *Runtime) leaveOutGroup(s *instance.Sample, container string) {
	asleep := map[string]bool{}
	inside := func(c instance.Conn) (same, sleeps bool) {
		remote, err := netip.ParseAddrPort(c.Remote)
		if err != nil {
			return false, false
		}
		other, same := r.relations.at(remote.Addr().Unmap(), container)
		if !same || other == container {
			return false, false
		}
		if _, known := asleep[other]; !known {
			if w := r.workOf(other); w != nil {
				still, err := w.still()
				asleep[other] = err == nil && still
			}
		}
		return true, asleep[other]
	}
	s.Inbound = slices.DeleteFunc(s.Inbound, func(c instance.Conn) bool {
		same, sleeps := inside(c)
		return same && (sleeps || c.Accepted && c.Unread == 0 && !c.Owes())
	})
	s.Calls = slices.DeleteFunc(s.Calls, func(c instance.Conn) bool {
		same, sleeps := inside(c)
		drop := same && (sleeps || c.Unread == 0 && !c.Awaits())
		if drop && !c.Loopback {
			s.Outbound--
		}
		return drop
	})
}

// leaves reports whether lull has asked a container to exit, or the container does
// not run.
func (r *Runtime) leaves(container string) bool {
	w := r.workOf(container)
	return w == nil || w.asked.Load()
}

// goodbye reports whether the only reason for a wake is that other containers of
// the group are exiting: they send last data on their connections, or open new
// ones.
func (w *Work) goodbye(why string) bool {
	bye := func(peer netip.AddrPort) bool {
		other, same := w.r.relations.at(peer.Addr().Unmap(), w.container)
		return same && other != w.container && w.r.leaves(other)
	}
	if _, from, ok := strings.Cut(why, " from "); ok {
		peer, err := netip.ParseAddrPort(from)
		return err == nil && bye(peer)
	}
	if !slices.ContainsFunc(w.r.relations.beside(w.container), w.r.leaves) {
		return false
	}
	peers, err := w.Waiting()
	return err == nil && len(peers) > 0 && !slices.ContainsFunc(peers, func(p netip.AddrPort) bool { return !bye(p) })
}
