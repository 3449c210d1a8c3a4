// Package hosts keeps what a server knows about the hosts that report to it: their
// instances as last reported, and the questions and commands that wait for them.
//
// It is in memory only. Hosts, instances and questions are limited in number. A
// report is accepted completely or not at all. A host that missed three reports is
// stale, and its instances are unknown, whatever they were. A question is either
// answered by the host or reported as unanswered.
//
// Authorization, other servers and HTTP are left to the caller.
package hosts

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/core/idle"
	"lull/internal/lib/delay"
	"lull/internal/protocol/control"
)

// Limits per server.
const (
	maxHosts     = 20_000
	maxInstances = 200_000 // of all hosts together
	maxQuestions = 16      // pending for one host
)

// FullError means that a report was rejected because a limit is reached.
type FullError struct{ What string }

func (e *FullError) Error() string { return "cannot accept more " + e.What + ": the limit is reached" }

// InvalidError says why a report was rejected.
type InvalidError struct{ Detail string }

func (e *InvalidError) Error() string { return "cannot take the report: " + e.Detail }

// Hosts holds the hosts that report to one server. It is safe for concurrent use.
type Hosts struct {
	version, built string // of the server; hosts are compared with them

	mu   sync.Mutex
	byID map[string]*host // by name
	n    int              // total number of instances
}

// host is the state kept for one host. A report replaces last and its instances, and
// never modifies them, so they can be read without the lock.
type host struct {
	last  control.HostReport // without its instances
	at    time.Time          // when last was accepted
	known known
	// next collects a report that arrives in parts; nil if no report is in progress.
	next known

	asked    map[string]chan control.HostReply // by ID of the question or command
	open     []control.HostQuestion            // not yet fetched by the host
	commands []command                         // not yet fetched by the host
	fresh    chan struct{}                     // closed when there is something to fetch
	turns    int                               // number of polls in progress
	newest   uint64                            // number of the newest poll
	seq      uint64                            // number of the last question
}

// known maps the ID of an instance to its last report.
type known map[string]told

type told struct {
	control.HostInstance
	at     time.Time // by the server's clock
	offset time.Duration
}

// New returns an empty Hosts. Hosts whose version or build differs from version and
// built are shown as such.
func New(version, built string) *Hosts {
	return &Hosts{version: version, built: built, byID: map[string]*host{}}
}

// Take processes a report that control.ReadHostReport accepted. Errors: FullError and
// InvalidError; then nothing has changed.
func (h *Hosts) Take(r control.HostReport, now time.Time) (control.HostAnswer, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byID[r.Host]
	if x == nil {
		if len(h.byID) >= maxHosts {
			return control.HostAnswer{}, &FullError{"hosts"}
		}
		x = &host{asked: map[string]chan control.HostReply{}, fresh: make(chan struct{})}
	}
	if r.After != 0 && (x.last.Sequence != r.After || !x.last.StartedAt.Equal(r.StartedAt)) {
		return control.HostAnswer{Resend: true}, nil
	}
	base := known{}
	switch {
	case r.After != 0 && x.next != nil:
		base = x.next
	case r.After != 0:
		base = x.known
	}
	after, err := base.with(&r, now)
	if err != nil {
		return control.HostAnswer{}, err
	}
	n := h.n + len(after) - len(x.known)
	if n > maxInstances {
		return control.HostAnswer{}, &FullError{"instances of hosts"}
	}
	h.byID[r.Host] = x
	anew := r.After == 0 || x.next != nil
	r.Instances, r.Gone = nil, nil
	x.last, x.at = r, now
	if anew && r.More {
		x.next = after
		return control.HostAnswer{}, nil
	}
	h.n, x.known, x.next = n, after, nil
	return control.HostAnswer{}, nil
}

// with returns k updated by a report. It does not modify k.
func (k known) with(r *control.HostReport, now time.Time) (known, error) {
	out := make(known, len(k)+len(r.Instances))
	names := make(map[string]string, len(k)+len(r.Instances))
	maps.Copy(out, k)
	for _, id := range r.Gone {
		delete(out, id)
	}
	for id, i := range out {
		names[i.Name] = id
	}
	for _, i := range r.Instances {
		if old, taken := names[i.Name]; taken && old != i.ID {
			return nil, &InvalidError{fmt.Sprintf("two instances have the name %s", i.Name)}
		}
		if old, there := out[i.ID]; there {
			delete(names, old.Name)
		}
		names[i.Name] = i.ID
		out[i.ID] = told{i, now, now.Sub(r.At)}
	}
	if len(out) > control.MaxHostInstances {
		return nil, &InvalidError{fmt.Sprintf("it has more than %d instances", control.MaxHostInstances)}
	}
	return out, nil
}

// heard reports whether the host's last report is recent enough to be trusted.
func (x *host) heard(now time.Time) bool { return now.Sub(x.at) <= x.last.Stale() }

// Heard reports whether a host's reports currently arrive at this server.
func (h *Hosts) Heard(name string, now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byID[name]
	return x != nil && x.heard(now)
}

// Summaries returns all hosts that have reported here, sorted by name.
func (h *Hosts) Summaries(now time.Time) []control.HostSummary {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]control.HostSummary, 0, len(h.byID))
	for _, name := range slices.Sorted(maps.Keys(h.byID)) {
		out = append(out, h.summary(h.byID[name], now))
	}
	return out
}

func (h *Hosts) summary(x *host, now time.Time) control.HostSummary {
	r, at, began := &x.last, x.at.UTC().Round(0), x.last.StartedAt
	s := control.HostSummary{Name: r.Host, Heard: x.heard(now), HeardAt: &at, AgeSeconds: max(0, now.Sub(x.at)).Seconds(),
		Interval: time.Duration(r.Interval).Seconds(), Version: r.Version, Outdated: control.Outdated(r.Version, r.BuildDate, h.version, h.built),
		StartedAt: &began, Halted: r.Halted, Halt: r.Halt, Total: len(x.known), LeftOut: r.LeftOut, Commands: r.Commands, Counts: r.Counts, Memory: r.Memory, Faults: r.Faults,
		ClockOffset: r.At.Sub(x.at).Seconds()}
	for _, i := range x.known {
		s.Held += i.Memory
	}
	if !s.Heard {
		s.UnheardSince, s.Unheard = &at, fmt.Sprintf("Its last report was at %s, and three have been missed since. The state of its instances is unknown.", at.Format(time.RFC3339))
	}
	return s
}

// View returns a host with all of its instances; false if it never reported here.
func (h *Hosts) View(name string, now time.Time) (control.HostView, bool) {
	h.mu.Lock()
	x := h.byID[name]
	if x == nil {
		h.mu.Unlock()
		return control.HostView{}, false
	}
	v, all := control.HostView{HostSummary: h.summary(x, now)}, x.known
	h.mu.Unlock()
	v.Instances = make([]control.HostInstance, 0, len(all))
	for _, i := range all {
		v.Instances = append(v.Instances, i.aged(v.Heard, now))
	}
	slices.SortFunc(v.Instances, func(a, b control.HostInstance) int { return strings.Compare(a.Name, b.Name) })
	return v, true
}

// aged returns an instance's state at now. heard is whether the host still reports;
// if not, the state is unknown.
func (t told) aged(heard bool, now time.Time) control.HostInstance {
	i := t.HostInstance
	if !heard {
		i.LastState, i.State, i.PauseAt, i.NextStepAt = i.State, "unknown", nil, nil
		return i
	}
	if i.Connections == 0 && i.LastActivityAt != nil { // an open connection counts as use as long as it lasts
		i.IdleFor = max(i.IdleFor, now.Add(-t.offset).Sub(*i.LastActivityAt).Seconds())
	}
	return i
}

// Turn accepts a host's answers and then waits up to wait for questions and commands.
// It returns early when there is one, when a newer turn of the host begins, or when
// ctx ends.
func (h *Hosts) Turn(ctx context.Context, name string, answers []control.HostReply, wait time.Duration) control.HostQuestions {
	began := time.Now()
	q := h.turn(ctx, name, answers, wait)
	q.Waited = idle.Duration(time.Since(began))
	return q
}

func (h *Hosts) turn(ctx context.Context, name string, answers []control.HostReply, wait time.Duration) control.HostQuestions {
	nothing := control.HostQuestions{Questions: []control.HostQuestion{}}
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byID[name]
	if x == nil { // the host has not reported yet
		h.mu.Unlock()
		_ = delay.For(ctx, min(wait, time.Second))
		h.mu.Lock()
		return nothing
	}
	for _, a := range answers {
		if to := x.asked[a.ID]; to != nil {
			to <- a // the channel has room for the only answer
			delete(x.asked, a.ID)
		}
	}
	if wait <= 0 {
		return nothing
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	x.newest++
	turn := x.newest
	x.wake() // ends the previous turn, whose connection may be dead
	x.turns++
	defer func() { x.turns-- }()
	for len(x.open)+len(x.commands) == 0 {
		fresh := x.fresh
		h.mu.Unlock()
		over := false
		select {
		case <-fresh:
		case <-timer.C:
			over = true
		case <-ctx.Done():
			over = true
		}
		h.mu.Lock()
		if over || x.newest != turn {
			return nothing
		}
	}
	if ctx.Err() != nil {
		return nothing
	}
	out := control.HostQuestions{Questions: append(nothing.Questions, x.open...)}
	for _, c := range x.commands {
		c.Valid = idle.Duration(control.HostCommandFetch)
		out.Commands = append(out.Commands, c.HostCommand)
		close(c.fetched)
	}
	x.open, x.commands = nil, nil
	return out
}

// wake ends the waiting of all turns. h.mu must be held.
func (x *host) wake() {
	close(x.fresh)
	x.fresh = make(chan struct{})
}

// Ask sends a question to a host and returns the answer; false if the host does not
// poll this server or did not answer before ctx ended.
func (h *Hosts) Ask(ctx context.Context, name, instance string, at time.Time) (control.HostReply, bool) {
	h.mu.Lock()
	x := h.byID[name]
	if x == nil || x.turns == 0 && len(x.asked) == 0 || len(x.asked) >= maxQuestions {
		h.mu.Unlock()
		return control.HostReply{}, false
	}
	x.seq++
	id, to := fmt.Sprintf("q%d", x.seq), make(chan control.HostReply, 1)
	x.asked[id] = to
	x.open = append(x.open, control.HostQuestion{ID: id, Instance: instance, At: at})
	x.wake()
	h.mu.Unlock()
	select {
	case a := <-to:
		return a, true
	case <-ctx.Done():
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(x.asked, id)
	x.open = slices.DeleteFunc(x.open, func(q control.HostQuestion) bool { return q.ID == id })
	return control.HostReply{}, false
}

// Within is the time limit for a host's answer.
const Within = 1500 * time.Millisecond

// Why explains the state of an instance of a host. The host itself is asked; if it
// does not answer, the answer is derived from its last report. It returns false if
// the host never reported here. The reply is a refusal if the instance is unknown.
func (h *Hosts) Why(ctx context.Context, name, ref string, at time.Time) (control.HostReply, bool) {
	v, ok := h.View(name, time.Now())
	if !ok {
		return control.HostReply{}, false
	}
	n := slices.IndexFunc(v.Instances, func(i control.HostInstance) bool { return i.ID == ref || i.Name == ref })
	if v.Heard {
		within, cancel := context.WithTimeout(ctx, Within)
		defer cancel()
		if a, answered := h.Ask(within, name, ref, at); answered {
			if a.Why != nil {
				a.Why.Host, a.Why.Unheard, a.Why.Readings = name, "", "live"
				switch {
				case a.Why.Verdict == nil:
					a.Why.Readings = "unknown"
				case !at.IsZero():
					a.Why.Readings = "recorded"
				}
			}
			return a, true
		}
	}
	if n < 0 {
		return Missing(name, ref), true
	}
	why := "The host did not answer in time; shown as last reported."
	if !v.Heard {
		why = v.Unheard
	}
	return control.HostReply{Why: LastHeard(&v, &v.Instances[n], at, why)}, true
}

// Missing returns the refusal for an instance that the host does not have.
func Missing(host, ref string) control.HostReply {
	return control.HostReply{Status: 404, Detail: fmt.Sprintf("cannot find instance %q of host %s", ref, host)}
}
