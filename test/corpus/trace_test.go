package corpus

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"lull/internal/sim/truth"
)

const day = 24 * time.Hour

// label classifies a period of a day, according to the script.
type label uint8

const (
	idleLabel label = iota // not in use
	// held means not in use, although a peer keeps a connection open or expects
	// answers (a pooler, a probe, a chat client without its user). Whether the
	// object may then sleep is a matter of settings, so held time counts neither
	// as use nor as idle.
	held
	use
)

// act is one action of a script.
type act struct {
	from, to time.Duration // time of the day
	label    label
	shows    []string // the signals that can show it
	timer    bool     // started by the machine's own timer, so nothing from outside wakes it
}

// load is a recording that is played.
type load struct {
	from, to time.Duration
	block    string
	shift    time.Duration // offset in the recording at which it begins
	scale    float64       // factor for its CPU time; 0 means 1
	quiet    bool          // leave out the recorded bytes of the client
	memory   bool          // leave out the recorded disk traffic
}

// flow is network traffic that is not part of a recording.
type flow struct {
	from, to time.Duration
	rate     float64 // bytes per second
}

// message is data on a connection. in means that the peer sent it.
type message struct {
	at    time.Duration
	in    bool
	bytes int
}

// conn is a connection of an instance.
type conn struct {
	from, to time.Duration
	out      bool // the program opened it
	closes   bool // the program closes it first, so the kernel remembers it for a minute
	messages []message
}

// keys is the use of a terminal.
type keys struct {
	from, to time.Duration
	terminal int
	every    time.Duration // approximate time between two key presses; 0 means output only
}

// login is a session of a user.
type login struct {
	from, to time.Duration
	terminal int
}

// event is an entry of CML's telemetry.
type event struct {
	at       time.Duration
	category string
	user     string
}

// trace is one labeled day.
type trace struct {
	name, kind, place string
	base              string // the recording that is played while it is not in use
	port              bool   // it listens, so a client can wake it
	acts              []act
	loads             []load
	flows             []flow
	conns             []conn
	keys              []keys
	logins            []login
	gpu               []load // use of the GPU, as a share in scale
	events            []event
	lab               []load // share of the CPUs that running labs use, in scale
	sources           []string
	snoozes           []load // periods for which a user snoozes it
}

func hm(hour, minute float64) time.Duration {
	return time.Duration(hour*float64(time.Hour) + minute*float64(time.Minute)).Truncate(time.Second)
}

// spans returns the periods with a label. Use takes precedence over held.
func (t *trace) spans(l label) truth.Use {
	var used, kept []truth.Span
	for _, a := range t.acts {
		s := truth.Span{From: at0.Add(a.from), To: at0.Add(min(a.to, day))}
		switch a.label {
		case use:
			used = append(used, s)
		case held:
			kept = append(kept, s)
		}
	}
	switch l {
	case use:
		return truth.Of(used...)
	case held:
		return minus(truth.Of(kept...), truth.Of(used...))
	}
	return minus(truth.Of(truth.Span{From: at0, To: at0.Add(day)}), truth.Of(append(used, kept...)...))
}

// at0 is the time at which every day begins. It is the initial time of a synctest
// bubble.
var at0 = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// minus returns the parts of a that are outside b.
func minus(a, b truth.Use) truth.Use {
	var out []truth.Span
	for _, s := range a.Spans() {
		for _, x := range b.Spans() {
			if !x.From.Before(s.To) || !s.From.Before(x.To) {
				continue
			}
			out = append(out, truth.Span{From: s.From, To: x.From})
			s.From = x.To
		}
		out = append(out, s)
	}
	return truth.Of(out...)
}

// both returns how long a and b overlap.
func both(a, b truth.Use) (d time.Duration) {
	for _, s := range a.Spans() {
		d += time.Duration(b.Share(s.From, s.To) * float64(s.To.Sub(s.From)))
	}
	return d
}

func length(u truth.Use) (d time.Duration) {
	for _, s := range u.Spans() {
		d += s.To.Sub(s.From)
	}
	return d
}

// builder collects what happens on a day.
type builder struct {
	*trace
	rng *rand.Rand
}

// scenario is a kind of day.
type scenario struct {
	name  string
	place string
	base  string
	write func(b *builder)
}

// draw returns the nth day of a scenario.
func (s scenario) draw(seed uint64, n int) *trace {
	h := seed
	for _, c := range s.place + s.name {
		h = h*1099511628211 + uint64(c)
	}
	b := &builder{&trace{name: fmt.Sprintf("%s %d", s.name, n), kind: s.name, place: s.place, base: s.base, port: true}, rand.New(rand.NewPCG(h, uint64(n)))}
	s.write(b)
	b.finish()
	return b.trace
}

// upkeep lists the recordings in which a program that is not in use works for
// itself, and the signals that show this work. It is not use.
var upkeep = map[string][]string{
	"java-idle":     {"disk"},        // the counters that a JVM keeps in a file
	"postgres-idle": {"disk", "cpu"}, // vacuum and checkpoints
	"prometheus":    {"disk", "cpu"}, // its database
	"tsserver-idle": {"disk", "cpu"}, // it loads and checks the project
}

// finish cuts the day off at midnight and sorts it.
func (b *builder) finish() {
	if shows := upkeep[b.base]; shows != nil && b.place == "host" {
		b.did(idleLabel, 0, day, shows...)
	}
	b.conns = slices.DeleteFunc(b.conns, func(c conn) bool { return c.from >= day })
	for i := range b.conns {
		b.conns[i].to = min(b.conns[i].to, day)
	}
	slices.SortStableFunc(b.conns, func(x, y conn) int { return cmp.Compare(x.from, y.from) })
	slices.SortStableFunc(b.acts, func(x, y act) int { return cmp.Compare(x.from, y.from) })
	slices.SortStableFunc(b.events, func(x, y event) int { return cmp.Compare(x.at, y.at) })
}

// between draws a duration from least to most, in whole milliseconds.
func (b *builder) between(least, most time.Duration) time.Duration {
	if most <= least {
		return least
	}
	return (least + time.Duration(b.rng.Int64N(int64(most-least)))).Truncate(time.Millisecond)
}

// amount draws a number of bytes from least to most-1.
func (b *builder) amount(least, most int) int { return least + b.rng.IntN(most-least) }

func (b *builder) chance(p float64) bool { return b.rng.Float64() < p }

// sessions returns when a user with office hours works: before and after lunch,
// and sometimes in the evening.
func (b *builder) sessions() (out [][2]time.Duration) {
	from := b.between(hm(8, 0), hm(10, 0))
	lunch := b.between(hm(11, 45), hm(12, 45))
	out = append(out, [2]time.Duration{from, lunch})
	back := lunch + b.between(hm(0, 50), hm(1, 40))
	out = append(out, [2]time.Duration{back, b.between(hm(15, 30), hm(18, 30))})
	if b.chance(0.3) {
		late := b.between(hm(20, 0), hm(22, 0))
		out = append(out, [2]time.Duration{late, late + b.between(hm(0, 10), hm(0, 50))})
	}
	return out
}

// moments returns n separate periods spread over the day, each from least to most
// long.
func (b *builder) moments(n int, from, to, least, most time.Duration) (out [][2]time.Duration) {
	part := (to - from) / time.Duration(n)
	for i := range n {
		begin := from + time.Duration(i)*part
		length := min(b.between(least, most), part*9/10)
		begin += b.between(0, part-length)
		out = append(out, [2]time.Duration{begin, begin + length})
	}
	return out
}

func (b *builder) did(l label, from, to time.Duration, shows ...string) {
	b.acts = append(b.acts, act{from: from, to: to, label: l, shows: shows})
}

func (b *builder) play(from, to time.Duration, block string) {
	b.loads = append(b.loads, load{from: from, to: to, block: block, shift: b.between(0, 2*time.Minute)})
}
