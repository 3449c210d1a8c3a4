package host

import (
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"lull/internal/host/daemontest"
	"lull/internal/host/modeltest"
	"lull/internal/lib/httpx"
)

// What happens in a race is recorded and checked against the model of the fence:
// the daemon's steps, which it traces, and the test's connections and calls. Each
// happened at some moment between two recorded times. Where these intervals
// overlap the order is unknown, and the model must allow at least one of the
// possible orders.

// spans is a collector of traces.
type spans struct {
	*httptest.Server
	mu  sync.Mutex
	all []*otlp.Span
}

func collect(t *testing.T) *spans {
	s := &spans{}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

// env returns the environment with which a daemon sends every span soon.
func (s *spans) env() []string {
	return []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + s.URL, "OTEL_BSP_SCHEDULE_DELAY=100", "OTEL_BSP_MAX_QUEUE_SIZE=1000000"}
}

func (s *spans) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	body := io.Reader(q.Body)
	var err error
	if q.Header.Get("Content-Encoding") == "gzip" {
		body, err = gzip.NewReader(q.Body)
	}
	var b []byte
	if err == nil {
		b, err = io.ReadAll(body)
	}
	var m collector.ExportTraceServiceRequest
	if err == nil {
		err = proto.Unmarshal(b, &m)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, rs := range m.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			s.all = append(s.all, ss.Spans...)
		}
	}
}

// of returns the spans of an instance, ordered by their beginning.
func (s *spans) of(name string) (out []*otlp.Span) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sp := range s.all {
		if attribute(sp, "lull.instance.name") == name {
			out = append(out, sp)
		}
	}
	slices.SortStableFunc(out, func(a, b *otlp.Span) int { return cmp.Compare(a.StartTimeUnixNano, b.StartTimeUnixNano) })
	return out
}

func attribute(s *otlp.Span, key string) string {
	for _, a := range s.Attributes {
		if a.Key == key {
			return a.Value.GetStringValue()
		}
	}
	return ""
}

// flush waits until every span of what the daemon has done so far has arrived.
// Spans are sent in the order of their ends, so it waits for that of a last
// command.
func (s *spans) flush(d *daemontest.Host, name string) {
	d.T.Helper()
	since := time.Now().UnixNano()
	if _, err := d.Do(d.T.Context(), name, "resume", nil); err != nil { // a resume of a running instance is only a check
		d.T.Fatal(err)
	}
	daemontest.Wait(d.T, "a later span arrives", func() (bool, string) {
		all := s.of(name)
		return slices.ContainsFunc(all, func(sp *otlp.Span) bool { return int64(sp.StartTimeUnixNano) > since }), fmt.Sprintf("%d spans", len(all))
	})
}

// sighting is an action of the test itself, such as a connection or a call.
type sighting struct {
	name     string
	n        int // number of the connection or of the verb
	from, to time.Time
	lost     bool // a call that got no answer: it may not have arrived
}

// Numbers of the verbs in the model.
const (
	verbResume = 2
	verbPause  = 6
)

// note records a sighting that began at from and ends now.
func (l *lane) note(name string, n int, from time.Time) {
	l.noted(sighting{name: name, n: n, from: from})
}

func (l *lane) noted(s sighting) {
	s.to = time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen = append(l.seen, s)
}

// do executes a command like Do, and records it.
func (l *lane) do(ctx context.Context, verb string, n int) (err error) {
	s := sighting{name: "called", n: n, from: time.Now()}
	_, err = l.d.Do(ctx, l.name, verb, nil)
	_, answered := errors.AsType[*httpx.Problem](err)
	s.lost = err != nil && !answered
	l.noted(s)
	return err
}

// watched is a client whose doings are recorded.
type watched struct {
	*client
	l      *lane
	n      int
	dialed time.Time // when it began to connect; zero once its first request was sent
}

// dial connects.
func (l *lane) dial() (*watched, error) {
	began := time.Now()
	c, err := dial(l.addr)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conns++
	return &watched{c, l, l.conns - 1, began}, nil
}

// echo is client.echo, recorded. A connection counts from its first request,
// because only then does its client wait for something. The relay forwards data
// at an unknown later time.
func (c *watched) echo(line string) error {
	what, from := "sent", time.Now()
	began := from
	if !c.dialed.IsZero() {
		what, from, c.dialed = "queued", c.dialed, time.Time{}
	}
	if _, err := io.WriteString(c.Conn, line+"\n"); err != nil {
		return err
	}
	if !c.l.relay {
		c.l.note(what, c.n, from)
	}
	got, err := c.r.ReadString('\n')
	if err == nil && got != "echo "+line+"\n" {
		err = fmt.Errorf("sent %q, got %q", line, got)
	}
	if err != nil {
		return fmt.Errorf("no answer to %q: %w", line, err)
	}
	if c.l.relay {
		c.l.note(what, c.n, from)
	}
	c.l.note("answered", c.n, began)
	return nil
}

// Close closes the connection.
func (c *watched) Close() error {
	defer c.l.note("closed", c.n, time.Now())
	return c.client.Close()
}

// stepEvents maps the names of the daemon's steps to the model's events.
var stepEvents = map[string]string{"intent": "intent", "gate": "hold", "freeze": "freeze", "look": "look", "arm": "arm", "look-again": "final", "commit": "commit",
	"undo-disarm": "disarm", "undo-thaw": "thaw", "undo-publish": "release", "disarm": "disarm", "thaw": "thaw", "publish": "release"}

// A daemon traces the events in reported and untraced. Those in untraced also happen
// while a daemon starts, and while there is none, and then nothing traces them.
var (
	reported = []string{"intent", "freeze", "look", "arm", "final", "commit", "disarm"}
	untraced = []string{"hold", "thaw", "release"}
)

// crash is a crash of the daemon at some moment from from to to. began is before any
// transition that the crash can have ended, and ended is after the next daemon has
// taken over.
type crash struct{ began, from, to, ended time.Time }

// lostChecks is the number of attempts to pause before a crash of which nothing may
// have been recorded.
const lostChecks = 1

// slack is added on both sides of the test's own times. They use the same clock
// as the daemon's, but durations are measured with another one.
const slack = 10 * time.Microsecond

// traces divides what happened in a lane until a time into traces for the model.
// At the beginning and end of each, the program runs, no transition or call is in
// progress and no connection is open. few is the number of traces that were
// dropped because they have more connections than the model supports. A trace is
// returned in several forms if calls in it may not have arrived.
func (l *lane) traces(all []*otlp.Span, until time.Time) (out [][]modeltest.Trace, few int, err error) {
	type part struct {
		from, to int64
		event    *modeltest.Event
		check    bool // a pause that the idle timer attempted
		lost     bool // the event may not have happened
	}
	var parts []part
	asleep, armed, frozen, crashes := int64(0), false, false, l.crashes
	for _, s := range all {
		from, to := int64(s.StartTimeUnixNano), int64(s.EndTimeUnixNano)
		failed := s.GetStatus().GetCode() == otlp.Status_STATUS_CODE_ERROR
		for len(crashes) > 0 && crashes[0].from.UnixNano() < from {
			asleep, armed, frozen, crashes = 0, false, false, crashes[1:]
		}
		switch s.Name {
		case "instance.pause":
			parts = append(parts, part{from: from, to: to, check: attribute(s, "lull.by") == "idle_timeout"})
			if !failed {
				asleep = from
			}
			continue
		case "instance.wake":
			if failed {
				return nil, 0, fmt.Errorf("a wake failed: %v", s.Status)
			}
			if asleep > 0 {
				from, asleep = asleep, 0
			}
			parts = append(parts, part{from: from, to: to})
			continue
		case "instance.detect":
			continue
		}
		e := modeltest.Event{Name: stepEvents[s.Name], From: from, To: to}
		switch {
		case e.Name == "":
			return nil, 0, fmt.Errorf("the model has no step %q", s.Name)
		case failed && !modeltest.CanFail[e.Name]:
			return nil, 0, fmt.Errorf("the step %q failed: %v", s.Name, s.Status)
		case failed:
			e.N = 1
		case len(s.ParentSpanId) == 0 && s.Name == "gate": // as it was when the daemon began
			continue
		case len(s.ParentSpanId) == 0 && s.Name == "freeze": // it is frozen already
			frozen = true
			continue
		case len(s.ParentSpanId) == 0 && s.Name == "commit": // the pause of an earlier daemon
			asleep = from
		case e.Name == "arm":
			armed = true
		case e.Name == "freeze":
			frozen = true
		case e.Name == "disarm" && !armed, e.Name == "thaw" && !frozen: // nothing to undo
			continue
		case e.Name == "disarm":
			armed = false
		case e.Name == "thaw":
			frozen = false
		}
		parts = append(parts, part{from: from, to: to, event: &e})
	}
	if asleep > 0 { // asleep until the end of the recording
		parts = append(parts, part{from: asleep, to: until.UnixNano()})
	}
	first, last := map[int]int64{}, map[int]int64{}
	for _, s := range l.seen {
		from, to := s.from.Add(-slack).UnixNano(), s.to.Add(slack).UnixNano()
		parts = append(parts, part{from: from, to: to, event: &modeltest.Event{Name: s.name, N: s.n, From: from, To: to}, lost: s.lost})
		if s.name != "called" {
			if first[s.n] == 0 {
				first[s.n] = from
			}
			first[s.n], last[s.n] = min(first[s.n], from), max(last[s.n], to)
		}
	}
	for n, from := range first {
		parts = append(parts, part{from: from, to: last[n]})
	}
	for _, c := range l.crashes {
		from, to := c.from.Add(-slack).UnixNano(), c.to.Add(slack).UnixNano()
		parts = append(parts, part{from: c.began.UnixNano(), to: c.ended.UnixNano()}, part{from: from, to: to, event: &modeltest.Event{Name: "crash", From: from, To: to}})
	}
	slices.SortStableFunc(parts, func(a, b part) int { return cmp.Compare(a.from, b.from) })
	for len(parts) > 0 {
		n, end := 1, parts[0].to
		for n < len(parts) && parts[n].from <= end {
			end = max(end, parts[n].to)
			n++
		}
		t := modeltest.Trace{Scenario: modeltest.Scenario{Quiet: true, Requests: 2, Timed: true, Real: true, Kept: true},
			Hidden: []string{"accepted", "gone", "gated", "passed", "sleep"}}
		if l.relay {
			t.Late = true
		}
		conns, lost := map[int]int{}, map[int]bool{}
		for _, p := range parts[:n] {
			switch {
			case p.check && t.Crashes > 0:
				t.Later++
			case p.check:
				t.Checks++
			}
			if p.event == nil {
				continue
			}
			e := *p.event
			switch e.Name {
			case "called":
				t.Users, t.Verbs = t.Users+1, t.Verbs|1<<e.N
			case "crash":
				t.Crashes, t.Checks = 1, t.Checks+lostChecks
				t.Delayed, t.Untraced = slices.Concat(reported, untraced), untraced
			case "queued", "sent", "answered", "closed":
				if _, ok := conns[e.N]; !ok {
					conns[e.N] = len(conns)
				}
				e.N = conns[e.N]
				if e.Name == "closed" && l.relay { // the relay forwards the close later
					e.To = modeltest.Open
				}
			}
			lost[len(t.Events)] = p.lost
			t.Events = append(t.Events, e)
		}
		parts = parts[n:]
		switch {
		case end >= until.UnixNano(), len(t.Events) == 0:
		case len(conns) > modeltest.MaxClients, l.relay && len(conns) > 1: // it is unknown when the relay forwards data
			few++
		default:
			t.Clients = len(conns)
			for c := range t.Clients {
				t.Relayed[c] = l.relay
			}
			out = append(out, forms(t, lost))
		}
	}
	return out, few, nil
}

// forms returns a trace with all events, and those that lack some of the calls that
// may be lost.
func forms(t modeltest.Trace, lost map[int]bool) []modeltest.Trace {
	all := []modeltest.Trace{t}
	for n := len(t.Events) - 1; n >= 0; n-- {
		if !lost[n] {
			continue
		}
		for _, f := range slices.Clone(all) {
			f.Users, f.Events = f.Users-1, slices.Delete(slices.Clone(f.Events), n, n+1)
			all = append(all, f)
		}
	}
	return all
}

// followed checks what the lanes did until a time against the model, and that the
// model rejects it once it is changed.
func followed(t *testing.T, lanes []*lane, s *spans, until time.Time, changes map[string]func(*modeltest.Trace) bool) {
	f := modeltest.NewFollower(t)
	var all [][]modeltest.Trace
	transitions, few, crashes := 0, 0, 0
	for _, l := range lanes {
		l.calls.Wait()
		traces, n, err := l.traces(s.of(l.name), until)
		if err != nil {
			t.Fatalf("%s: %v", l.name, err)
		}
		all, few = append(all, traces...), few+n
	}
	var each []modeltest.Trace
	var which []int
	for n, forms := range all {
		transitions, crashes = transitions+len(forms[0].Events), crashes+forms[0].Crashes
		for _, tr := range forms {
			each, which = append(each, tr), append(which, n)
		}
	}
	furthest, failed := map[int]int{}, map[int]int{}
	for n, at := range f.Follow(t, each) {
		furthest[which[n]] = max(furthest[which[n]], at)
		failed[which[n]]++
	}
	for n, forms := range all {
		if failed[n] == len(forms) {
			t.Errorf("not a behavior of the model, but for event %d: %s", furthest[n], forms[0].Until(len(forms[0].Events)))
		}
	}
	t.Logf("REPORT race: %d traces with %d transitions and %d crashes are behaviors of the model, %d with more connections than it has were left out; %d states", len(all), transitions, crashes, few, f.States)
	if transitions == 0 {
		t.Error("nothing was recorded")
	}
	most := 10       // changed traces
	if crashes > 0 { // to reject a long one takes long
		most = 3
		slices.SortStableFunc(all, func(a, b []modeltest.Trace) int { return cmp.Compare(len(a[0].Events), len(b[0].Events)) })
	}
	for name, change := range changes {
		var changed []modeltest.Trace
		for _, forms := range all {
			tr := forms[0]
			if tr.Events = slices.Clone(tr.Events); len(forms) == 1 && len(changed) < most && change(&tr) {
				slices.SortStableFunc(tr.Events, func(a, b modeltest.Event) int { return cmp.Compare(a.From, b.From) })
				changed = append(changed, tr)
			}
		}
		rejected := f.Follow(t, changed)
		for n, tr := range changed {
			if _, ok := rejected[n]; !ok {
				t.Errorf("%s, and the model accepts it: %s", name, tr.Until(len(tr.Events)))
				break
			}
		}
		if t.Logf("%s: %d of %d rejected", name, len(rejected), len(changed)); len(changed) == 0 {
			t.Errorf("%s: no trace is suited", name)
		}
	}
}

// raceChanges change a trace so that the model must reject it. Each reports
// whether the trace was suitable for its change.
var raceChanges = map[string]func(t *modeltest.Trace) bool{
	"a frozen program answers": func(t *modeltest.Trace) bool {
		commit, thaw := step(t, "commit"), step(t, "thaw")
		answer := slices.IndexFunc(t.Events, func(e modeltest.Event) bool { return e.Name == "answered" && thaw >= 0 && e.To > t.Events[thaw].To })
		if commit < 0 || thaw < commit || answer < 0 || t.Events[thaw].From <= t.Events[commit].To+1 {
			return false
		}
		if slices.ContainsFunc(t.Events, func(e modeltest.Event) bool {
			return e.N == t.Events[answer].N && e.Name == "answered" && e.To < t.Events[commit].To
		}) {
			return false // this may have been the answer
		}
		t.Events[answer].From, t.Events[answer].To = t.Events[commit].To+1, t.Events[commit].To+1
		return true
	},
	"it is not thawed": func(t *modeltest.Trace) bool {
		thaw := step(t, "thaw")
		ok := step(t, "commit") >= 0 && thaw >= 0
		if ok {
			t.Events = slices.Delete(t.Events, thaw, thaw+1)
		}
		return ok
	},
	"it is thawed before the sockets are given back": func(t *modeltest.Trace) bool {
		disarm, thaw := step(t, "disarm"), step(t, "thaw")
		ok := disarm >= 0 && thaw >= 0
		if ok {
			t.Events[disarm].Name, t.Events[thaw].Name = "thaw", "disarm"
		}
		return ok
	},
	"it is watched before it is frozen": func(t *modeltest.Trace) bool {
		freeze, arm := step(t, "freeze"), step(t, "arm")
		ok := freeze >= 0 && arm >= 0
		if ok {
			t.Events[freeze].Name, t.Events[arm].Name = "arm", "freeze"
		}
		return ok
	},
}

// killChanges are such changes to traces in which a daemon takes over a pause.
var killChanges = map[string]func(t *modeltest.Trace) bool{
	"no daemon has died": func(t *modeltest.Trace) bool {
		at := takenOver(t)
		if at >= 0 {
			t.Crashes, t.Events = 0, slices.Delete(t.Events, at, at+1)
		}
		return at >= 0
	},
	"the next daemon does not watch what it takes over": func(t *modeltest.Trace) bool { return leaveOut(t, "arm") },
	"what the next daemon took over is not thawed":      func(t *modeltest.Trace) bool { return leaveOut(t, "thaw") },
}

// takenOver returns the index of the crash if the next daemon took over a pause; -1
// otherwise.
func takenOver(t *modeltest.Trace) int {
	at := slices.IndexFunc(t.Events, func(e modeltest.Event) bool { return e.Name == "crash" })
	if at < 0 {
		return -1
	}
	for _, e := range t.Events[at:] {
		switch {
		case e.Name == "intent", e.N == 1 && modeltest.CanFail[e.Name]:
			return -1
		case e.Name == "commit":
			return at
		}
	}
	return -1
}

// leaveOut leaves out the first step of that name after a pause was taken over.
func leaveOut(t *modeltest.Trace, name string) bool {
	at := takenOver(t)
	if at < 0 {
		return false
	}
	n := slices.IndexFunc(t.Events[at:], func(e modeltest.Event) bool { return e.Name == name })
	if n >= 0 {
		t.Events = slices.Delete(t.Events, at+n, at+n+1)
	}
	return n >= 0
}

// step returns the index of the first event with that name that did not fail; -1
// if there is none.
func step(t *modeltest.Trace, name string) int {
	return slices.IndexFunc(t.Events, func(e modeltest.Event) bool { return e.Name == name && e.N == 0 })
}
