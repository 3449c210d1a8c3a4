package policy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/policy/when"
)

// DefaultGrace is how long a worker must be quiet outside its hours before its
// schedule pauses it, if the schedule does not set GraceMinutes.
const DefaultGrace = 15 * time.Minute

// Window is an interval of the week, or of one date, in which a schedule is
// open.
type Window struct {
	Name string    `json:"name,omitempty"`
	Days when.Days `json:"days,omitempty"` // days on which it begins; empty with Date
	Date string    `json:"date,omitempty"` // the only day on which it begins, such as 2026-12-24
	// From and To are wall clock times in the schedule's zone. If To is not after
	// From, it is a time of the next day.
	From when.Clock `json:"from" pattern:"^(([01]?[0-9]|2[0-3]):[0-5][0-9]|24:00)$"`
	To   when.Clock `json:"to" pattern:"^(([01]?[0-9]|2[0-3]):[0-5][0-9]|24:00)$"`
	// Hold marks a maintenance window: no idle pause happens while it is
	// open.
	Hold bool `json:"hold,omitempty"`
	// OnHolidays makes the window open on holidays too. A window with a date
	// always does.
	OnHolidays bool `json:"on_holidays,omitempty"`
}

// ParseWindow parses a window such as mon-fri 08:00-18:00 or
// 2026-12-24 22:00-06:00.
func ParseWindow(text string) (Window, error) {
	var w Window
	day, clocks, ok := strings.Cut(strings.TrimSpace(text), " ")
	from, to, ranged := strings.Cut(strings.TrimSpace(clocks), "-")
	if !ok || !ranged {
		return w, fmt.Errorf("cannot read window %.80q: want one such as mon-fri 08:00-18:00", text)
	}
	var errs [3]error
	if d, err := when.ParseDate(day); err == nil {
		w.Date = d.String()
	} else {
		w.Days, errs[0] = when.ParseDays(day)
	}
	w.From, errs[1] = when.ParseClock(from)
	w.To, errs[2] = when.ParseClock(to)
	if err := errors.Join(errs[:]...); err != nil {
		return w, fmt.Errorf("cannot read window %.80q: %w", text, err)
	}
	return w, w.validate()
}

// String formats w for ParseWindow, without its name and switches.
func (w Window) String() string {
	day := w.Date
	if day == "" {
		day = w.Days.String()
	}
	return day + " " + w.From.String() + "-" + w.To.String()
}

func (w Window) validate() error {
	switch {
	case (w.Days == 0) == (w.Date == ""):
		return errors.New("set either days or a date")
	case w.Days > when.Every:
		return errors.New("there are no such days")
	case w.From < 0 || w.From >= when.EndOfDay || w.To < 0 || w.To > when.EndOfDay:
		return errors.New("its times are not between 00:00 and 24:00")
	case w.From == w.To:
		return fmt.Errorf("its beginning and end are both %s; a whole day is 00:00-24:00", w.From)
	case len(w.Name) > 64:
		return errors.New("its name has more than 64 bytes")
	}
	if w.Date != "" {
		_, err := when.ParseDate(w.Date)
		return err
	}
	return nil
}

// Schedule states when workers run, as windows on the wall clock of a time
// zone. It is open inside its windows and closed outside them.
type Schedule struct {
	Name        string   `json:"name"`
	Description string   `json:"description,omitempty"`
	Zone        string   `json:"zone"` // IANA name
	Windows     []Window `json:"windows"`
	// Holidays are days on which no window begins: 2026-12-25, or 12-25 for
	// every year.
	Holidays []string `json:"holidays,omitempty"`
	// Start makes the schedule resume workers when it opens. Otherwise it only
	// pauses them.
	Start bool `json:"start,omitempty"`
	// GraceMinutes is how long a worker must be quiet outside its hours
	// before it is paused; nil means 15.
	GraceMinutes *int `json:"grace_minutes,omitempty"`
	// ChangedAt is when the schedule's hours last changed. A change takes effect
	// at the next boundary.
	ChangedAt time.Time `json:"changed_at,omitzero"`

	Stamp

	read *hours
}

// Grace returns how long a worker must be quiet before the schedule pauses it.
func (s *Schedule) Grace() time.Duration {
	if s.GraceMinutes == nil {
		return DefaultGrace
	}
	return time.Duration(*s.GraceMinutes) * time.Minute
}

// The limits of a schedule.
const (
	maxWindows  = 100
	maxHolidays = 1000
)

// Validate returns every fault of s, each a *failure.Invalid.
func (s Schedule) Validate() error {
	var f faults
	f.name("name", s.Name)
	f.text("description", s.Description, 1024)
	if _, err := when.Zone(s.Zone); err != nil {
		f.add("zone", "%v", err)
	}
	if n := len(s.Windows); n == 0 || n > maxWindows {
		f.add("windows", "there are %d, want 1 to %d", n, maxWindows)
	}
	for i, w := range s.Windows {
		if err := w.validate(); err != nil {
			f.add(fmt.Sprintf("windows[%d]", i), "%v", err)
		}
	}
	if n := len(s.Holidays); n > maxHolidays {
		f.add("holidays", "there are %d, the limit is %d", n, maxHolidays)
	}
	for i, h := range s.Holidays {
		if _, err := parseHoliday(h); err != nil {
			f.add(fmt.Sprintf("holidays[%d]", i), "%v", err)
		}
	}
	f.between("grace_minutes", s.GraceMinutes, 1, 1440)
	return f.err()
}

// SameHours reports whether s and o are open at the same times.
func (s Schedule) SameHours(o Schedule) bool {
	return s.Zone == o.Zone && slices.Equal(s.Windows, o.Windows) && slices.Equal(s.Holidays, o.Holidays)
}

// parseHoliday parses a date, or a month and day that repeat every year. For the
// latter it returns year 0.
func parseHoliday(text string) (when.Date, error) {
	if d, err := when.ParseDate(text); err == nil {
		return d, nil
	}
	if len(text) == 5 {
		// 2000 is a leap year, so 02-29 is accepted.
		if d, err := when.ParseDate("2000-" + text); err == nil {
			d.Year = 0
			return d, nil
		}
	}
	return when.Date{}, fmt.Errorf("%.20q is not a day: want 2026-12-25, or 12-25 for every year", text)
}

// Span is an interval in which a schedule is open, from From up to but not
// including To. A zero time means that the span continues further than schedules
// are evaluated.
type Span struct {
	From time.Time `json:"from,omitzero"`
	To   time.Time `json:"to,omitzero"`
}

// Boundary is a moment at which a schedule opens or closes.
type Boundary struct {
	At    time.Time `json:"at"`
	Opens bool      `json:"opens"`
}

// hours is a parsed schedule. It is safe for concurrent use.
type hours struct {
	loc      *time.Location
	windows  []Window
	dated    map[when.Date][]Window
	holidays map[when.Date]bool
	yearly   bool // some holiday repeats every year
	// early and late are the first and last dates that the schedule names; zero
	// if it names none.
	early, late when.Date

	// The boundaries and open spans near a moment, cached because many workers
	// share a schedule.
	mu         sync.Mutex
	center     time.Time
	edges      []Boundary
	open, hold []Span
}

// hours parses s. The copies of a prepared schedule share the result.
func (s *Schedule) hours() (*hours, error) {
	if s.read != nil {
		return s.read, nil
	}
	loc, err := when.Zone(s.Zone)
	if err != nil {
		return nil, err
	}
	h := &hours{loc: loc, dated: map[when.Date][]Window{}, holidays: map[when.Date]bool{}}
	for _, w := range s.Windows {
		if w.Date == "" {
			h.windows = append(h.windows, w)
			continue
		}
		d, err := when.ParseDate(w.Date)
		if err != nil {
			return nil, err
		}
		h.dated[d] = append(h.dated[d], w)
		h.reach(d)
	}
	for _, text := range s.Holidays {
		d, err := parseHoliday(text)
		if err != nil {
			return nil, err
		}
		h.holidays[d] = true
		h.yearly = h.yearly || d.Year == 0
		h.reach(d)
	}
	return h, nil
}

func (h *hours) reach(d when.Date) {
	if d.Year == 0 {
		return
	}
	if h.early == (when.Date{}) || d.String() < h.early.String() {
		h.early = d
	}
	if d.String() > h.late.String() {
		h.late = d
	}
}

func (h *hours) holiday(d when.Date) bool {
	return h.holidays[d] || h.yearly && h.holidays[when.Date{Month: d.Month, Day: d.Day}]
}

// on returns the spans of the windows that begin on d. The span of a window
// contains all moments at which the wall clock shows a time in the window.
func (h *hours) on(d when.Date, only func(Window) bool) []Span {
	var out []Span
	add := func(w Window) {
		if only != nil && !only(w) {
			return
		}
		end := d
		if w.To <= w.From {
			end = d.Add(1)
		}
		if s := (Span{d.First(w.From, h.loc), end.After(w.To, h.loc)}); s.From.Before(s.To) {
			out = append(out, s)
		}
	}
	off := h.holiday(d)
	for _, w := range h.windows {
		if w.Days.Has(d.Weekday()) && (!off || w.OnHolidays) {
			add(w)
		}
	}
	for _, w := range h.dated[d] {
		add(w)
	}
	slices.SortFunc(out, func(a, b Span) int { return a.From.Compare(b.From) })
	return out
}

// spans returns the open spans that begin within days of t. Adjacent spans are
// merged.
func (h *hours) spans(t time.Time, days int, only func(Window) bool) []Span {
	var out []Span
	middle := when.DateOf(t.In(h.loc))
	for n := -days; n <= days; n++ {
		for _, s := range h.on(middle.Add(n), only) {
			if last := len(out) - 1; last >= 0 && !s.From.After(out[last].To) {
				if s.To.After(out[last].To) {
					out[last].To = s.To
				}
				continue
			}
			out = append(out, s)
		}
	}
	return out
}

// reaches are how many days around a moment boundaries are searched for, in
// successive attempts. The last one always includes a leap day.
var reaches = []int{near, 60, 400, 3000}

// near is enough days for every schedule that repeats weekly. Results computed
// for a moment are reused for moments up to slack away.
const (
	near  = 16
	slack = 3 * 24 * time.Hour
)

// complete reports whether the given number of days around t show everything that
// the schedule ever does: every date that it names lies well within them.
func (h *hours) complete(t time.Time, days int) bool {
	middle := when.DateOf(t.In(h.loc))
	return !h.yearly && (h.early == (when.Date{}) ||
		h.early.String() > middle.Add(near-days).String() && h.late.String() < middle.Add(days-near).String())
}

// around returns the last boundary at or before t and the first after it; nil if
// there is none.
func (h *hours) around(t time.Time) (last, next *Boundary) {
	for _, days := range reaches {
		last, next = nil, nil
		for _, b := range h.boundaries(t, days) {
			if !b.At.After(t) {
				last = &b
			} else if next == nil {
				next = &b
			}
		}
		if last != nil && next != nil || h.complete(t, days) {
			break
		}
	}
	return last, next
}

// boundaries returns the boundaries within days of t. It omits the outermost
// days, on which spans that began earlier are not known.
func (h *hours) boundaries(t time.Time, days int) []Boundary {
	if days == near {
		edges, _, _ := h.nearby(t)
		return edges
	}
	return edgesOf(h.spans(t, days, nil), t.AddDate(0, 0, 3-days), t.AddDate(0, 0, days-3))
}

func edgesOf(spans []Span, from, to time.Time) []Boundary {
	var out []Boundary
	for _, s := range spans {
		for _, b := range []Boundary{{s.From, true}, {s.To, false}} {
			if b.At.After(from) && b.At.Before(to) {
				out = append(out, b)
			}
		}
	}
	return out
}

// nearby returns the cached results around t.
func (h *hours) nearby(t time.Time) (edges []Boundary, open, hold []Span) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if away := t.Sub(h.center); away < -slack || away > slack {
		h.center = t
		h.open = h.spans(t, near, nil)
		h.hold = h.spans(t, near, func(w Window) bool { return w.Hold })
		h.edges = edgesOf(h.open, t.AddDate(0, 0, 3-near), t.AddDate(0, 0, near-3))
	}
	return h.edges, h.open, h.hold
}

func within(spans []Span, t time.Time) (Span, bool) {
	for _, s := range spans {
		if !s.From.After(t) && t.Before(s.To) {
			return s, true
		}
	}
	return Span{}, false
}

// Open reports whether s is open at t.
func (s *Schedule) Open(t time.Time) (bool, error) {
	h, err := s.hours()
	if err != nil {
		return false, err
	}
	_, open, _ := h.nearby(t)
	_, is := within(open, t)
	return is, nil
}

// Boundaries returns at most n boundaries of s after from, up to eight years
// ahead.
func (s *Schedule) Boundaries(from time.Time, n int) ([]Boundary, error) {
	h, err := s.hours()
	if err != nil {
		return nil, err
	}
	out := []Boundary{}
	for t := from; len(out) < n; {
		_, next := h.around(t)
		if next == nil {
			break
		}
		next.At = next.At.In(h.loc)
		out, t = append(out, *next), next.At
	}
	return out, nil
}

// ScheduleState is the state of a schedule for one worker at one moment.
type ScheduleState struct {
	Schedule string `json:"schedule"`
	Zone     string `json:"zone"`
	Open     bool   `json:"open"`
	// Last is the boundary in effect: the last one that no override suppresses
	// and that came after the schedule was assigned. It is nil if there has been
	// none.
	Last *Boundary `json:"last,omitempty"`
	// Next is the next boundary that no override suppresses. NextClose is the
	// next such one that closes the schedule, NextOpen the next that opens it.
	Next      *Boundary  `json:"next,omitempty"`
	NextClose *time.Time `json:"next_close"`
	NextOpen  *time.Time `json:"next_open"`
	// HeldUntil is the end of the maintenance window that is open now.
	HeldUntil *time.Time `json:"held_until,omitempty"`
	Start     bool       `json:"start"`
	Force     bool       `json:"force"`
	Grace     float64    `json:"grace_minutes"`
}

// maxVoid limits how many suppressed boundaries are skipped in a row.
const maxVoid = 100

// State returns the state of s at now for a worker to which it has applied
// since the given time. Boundaries for which void returns true are ignored;
// void may be nil.
func (s *Schedule) State(now, since time.Time, void func(time.Time) bool) (ScheduleState, error) {
	out := ScheduleState{Schedule: s.Name, Zone: s.Zone, Start: s.Start, Grace: s.Grace().Minutes()}
	h, err := s.hours()
	if err != nil {
		return out, err
	}
	_, open, hold := h.nearby(now)
	_, out.Open = within(open, now)
	if held, is := within(hold, now); is {
		out.HeldUntil = &held.To
	}
	speaks := func(b *Boundary) bool { return void == nil || !void(b.At) }
	last, next := h.around(now)
	for range maxVoid {
		if last == nil || last.At.Before(since) || speaks(last) {
			break
		}
		last, _ = h.around(last.At.Add(-time.Nanosecond))
	}
	if last != nil && !last.At.Before(since) && speaks(last) {
		out.Last = last
	}
	for range maxVoid {
		if next == nil || out.NextClose != nil && out.NextOpen != nil {
			break
		}
		if speaks(next) {
			if out.Next == nil {
				out.Next = next
			}
			switch {
			case next.Opens && out.NextOpen == nil:
				out.NextOpen = &next.At
			case !next.Opens && out.NextClose == nil:
				out.NextClose = &next.At
			}
		}
		_, next = h.around(next.At)
	}
	return out, nil
}

// Pauses reports whether the schedule wants a worker paused that was last started
// at the given time: whether it has closed since.
func (s *ScheduleState) Pauses(started time.Time) bool {
	return s.Last != nil && !s.Last.Opens && started.Before(s.Last.At)
}

// Starts reports whether the schedule wants a worker started that was last
// stopped at the given time: whether it has opened since and is still open.
func (s *ScheduleState) Starts(stopped time.Time) bool {
	return s.Start && s.Open && s.Last != nil && s.Last.Opens && stopped.Before(s.Last.At)
}

// ScheduleName is the prefix of the name of the policy that applies in closed
// hours.
const ScheduleName = "schedule "

// OffHours returns the policy and evidence by which the schedule pauses a worker
// in closed hours. The worker must be quiet for the schedule's grace or, with
// force, is paused regardless of readings.
func (s *ScheduleState) OffHours(p idle.Policy, e idle.Evidence) (idle.Policy, idle.Evidence) {
	p.Name, p.Detection, p.AutoPause = ScheduleName+s.Schedule, true, true
	p.Timeout = min(p.Timeout, idle.Duration(s.Grace*float64(time.Minute)))
	if s.Force {
		// Only the warning delays the pause. The timeout is twice the warning,
		// because the engine warns at most half of the timeout ahead.
		p.Timeout, p.Signals = max(2*p.WarnBefore, idle.Duration(time.Second)), []string{}
		e.LastActivityAt, e.Connections = time.Time{}, 0
	}
	return p, e
}

// Describe returns the schedule's state as a sentence.
func (s *ScheduleState) Describe() string {
	state := "closed"
	if s.Open {
		state = "open"
	}
	text := "Schedule " + s.Schedule + " is " + state
	if s.Next != nil {
		what := "closes"
		if s.Next.Opens {
			what = "opens"
		}
		text += " and " + what + " at " + ClockIn(s.Next.At, s.Zone)
	}
	return text + "."
}

// ClockIn formats t in a zone, with the zone's name.
func ClockIn(t time.Time, zone string) string {
	if loc, err := when.Zone(zone); err == nil {
		t = t.In(loc)
	}
	return t.Format("Mon 2006-01-02 15:04 ") + cmp.Or(zone, "UTC")
}
