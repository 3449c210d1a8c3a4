package policy

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/idle"
	"lull/internal/policy/when"
)

// DefaultGrace is how long a worker must be quiet in closed hours before its
// schedule pauses it, where the schedule does not say.
const DefaultGrace = 15 * time.Minute

// Window is a time of the week, or of one day, at which a schedule is open.
type Window struct {
	Name string    `json:"name,omitempty"`
	Days when.Days `json:"days,omitempty"` // on which it begins; none with a date
	Date string    `json:"date,omitempty"` // the one day on which it begins, 2026-12-24
	// From and To are wall clock times in the schedule's zone. A To that is
	// not after From is on the next day.
	From when.Clock `json:"from" pattern:"^(([01]?[0-9]|2[0-3]):[0-5][0-9]|24:00)$"`
	To   when.Clock `json:"to" pattern:"^(([01]?[0-9]|2[0-3]):[0-5][0-9]|24:00)$"`
	// Hold keeps idleness from pausing anything while the window is open: a
	// maintenance window.
	Hold bool `json:"hold,omitempty"`
	// OnHolidays opens it on holidays too. One with a date always does.
	OnHolidays bool `json:"on_holidays,omitempty"`
}

// ParseWindow reads a window as people write it: mon-fri 08:00-18:00, or
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

// String is w as ParseWindow reads it, without its name and switches.
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
		return errors.New("it has either days or a date")
	case w.Days > when.Every:
		return errors.New("there are no such days")
	case w.From < 0 || w.From >= when.EndOfDay || w.To < 0 || w.To > when.EndOfDay:
		return errors.New("its times are not between 00:00 and 24:00")
	case w.From == w.To:
		return fmt.Errorf("it begins and ends at %s; a whole day is 00:00-24:00", w.From)
	case len(w.Name) > 64:
		return errors.New("its name has more than 64 bytes")
	}
	if w.Date != "" {
		_, err := when.ParseDate(w.Date)
		return err
	}
	return nil
}

// Schedule is when workers shall run, as windows on the wall clock of a zone.
// It is open in its windows and closed outside them.
type Schedule struct {
	Name        string   `json:"name"`
	Description string   `json:"description,omitempty"`
	Zone        string   `json:"zone"` // IANA name
	Windows     []Window `json:"windows"`
	// Holidays are days on which no window begins: 2026-12-25, or 12-25 for
	// every year.
	Holidays []string `json:"holidays,omitempty"`
	// Start makes it resume workers when it opens; without it, it only pauses.
	Start bool `json:"start,omitempty"`
	// GraceMinutes is how long a worker must be quiet in closed hours before
	// it is paused; nil is 15.
	GraceMinutes *int `json:"grace_minutes,omitempty"`
	// ChangedAt is when its hours were last changed. It speaks for the first
	// time at its next boundary.
	ChangedAt time.Time `json:"changed_at,omitzero"`

	Stamp

	read *hours
}

// Grace is how long a worker must be quiet before the schedule pauses it.
func (s *Schedule) Grace() time.Duration {
	if s.GraceMinutes == nil {
		return DefaultGrace
	}
	return time.Duration(*s.GraceMinutes) * time.Minute
}

// Limits of a schedule.
const (
	maxWindows  = 100
	maxHolidays = 1000
)

// Validate returns every fault of s, as Faults.
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

// SameHours tells whether s and o are open at the same times.
func (s Schedule) SameHours(o Schedule) bool {
	return s.Zone == o.Zone && slices.Equal(s.Windows, o.Windows) && slices.Equal(s.Holidays, o.Holidays)
}

// parseHoliday reads a day, or one of every year (with year 0).
func parseHoliday(text string) (when.Date, error) {
	if d, err := when.ParseDate(text); err == nil {
		return d, nil
	}
	if len(text) == 5 {
		// 2000 is a leap year: 02-29 is a day that comes.
		if d, err := when.ParseDate("2000-" + text); err == nil {
			d.Year = 0
			return d, nil
		}
	}
	return when.Date{}, fmt.Errorf("%.20q is no day: want 2026-12-25, or 12-25 for every year", text)
}

// Span is a time without gaps in which a schedule is open: From is in it, To
// is not. A zero time is farther away than anybody plans.
type Span struct {
	From time.Time `json:"from,omitzero"`
	To   time.Time `json:"to,omitzero"`
}

// Boundary is a moment at which a schedule opens or closes.
type Boundary struct {
	At    time.Time `json:"at"`
	Opens bool      `json:"opens"`
}

// hours is a schedule that was read, for counting. It is safe for concurrent
// use.
type hours struct {
	loc      *time.Location
	windows  []Window
	dated    map[when.Date][]Window
	holidays map[when.Date]bool
	yearly   bool // a holiday comes every year
	// early and late are the first and the last day that is named; zero for
	// none.
	early, late when.Date

	// The boundaries and open times around a moment, counted once for the
	// many workers of a schedule.
	mu         sync.Mutex
	center     time.Time
	edges      []Boundary
	open, hold []Span
}

// hours reads s, once for all copies of one that was Prepared.
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

// on lists the windows that begin on a day, each as the span that holds every
// moment at which the wall clock shows a time in it.
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

// spans lists the open times that begin from days before t to days after it;
// those that touch are one.
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

// reaches are how many days around a moment boundaries are looked for. The
// last one holds a leap day.
var reaches = []int{near, 60, 400, 3000}

// near is enough for every schedule that is the same each week; what was
// counted there serves for moments up to slack away.
const (
	near  = 16
	slack = 3 * 24 * time.Hour
)

// settled tells whether days around t show all that the schedule ever does:
// every day that is named lies well within.
func (h *hours) settled(t time.Time, days int) bool {
	middle := when.DateOf(t.In(h.loc))
	return !h.yearly && (h.early == (when.Date{}) ||
		h.early.String() > middle.Add(near-days).String() && h.late.String() < middle.Add(days-near).String())
}

// around finds the last boundary up to t and the first after it; nil is none.
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
		if last != nil && next != nil || h.settled(t, days) {
			break
		}
	}
	return last, next
}

// boundaries lists those within days of t, less a few: what began before is
// not known, so the outermost days show none.
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

// nearby returns what is counted around t.
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

// Open tells whether s is open at t.
func (s *Schedule) Open(t time.Time) (bool, error) {
	h, err := s.hours()
	if err != nil {
		return false, err
	}
	_, open, _ := h.nearby(t)
	_, is := within(open, t)
	return is, nil
}

// Boundaries lists the boundaries of s after from, at most n of them, up to
// eight years ahead.
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

// Standing is what a schedule says at one moment to one worker.
type Standing struct {
	Schedule string `json:"schedule"`
	Zone     string `json:"zone"`
	Open     bool   `json:"open"`
	// Last is the boundary whose word counts now: the last one that no
	// override made void and that came after the schedule began to apply.
	// Absent is none: the schedule has not spoken yet.
	Last *Boundary `json:"last,omitempty"`
	// Next is the next boundary that will speak, NextClose the next of those
	// that closes, NextOpen the next that opens.
	Next      *Boundary  `json:"next,omitempty"`
	NextClose *time.Time `json:"next_close"`
	NextOpen  *time.Time `json:"next_open"`
	// HeldUntil is the end of the maintenance window that is open now.
	HeldUntil *time.Time `json:"held_until,omitempty"`
	Start     bool       `json:"start"`
	Force     bool       `json:"force"`
	Grace     float64    `json:"grace_minutes"`
}

// maxVoid bounds how many void boundaries are passed over in a row.
const maxVoid = 100

// Standing says what s means at now for a worker to which it applies since
// that moment. Boundaries for which void is true do not speak; void may be
// nil.
func (s *Schedule) Standing(now, since time.Time, void func(time.Time) bool) (Standing, error) {
	out := Standing{Schedule: s.Name, Zone: s.Zone, Start: s.Start, Grace: s.Grace().Minutes()}
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

// Pauses tells whether the schedule wants a worker paused that was last
// started at a moment: it has closed since.
func (s *Standing) Pauses(started time.Time) bool {
	return s.Last != nil && !s.Last.Opens && started.Before(s.Last.At)
}

// Starts tells whether the schedule wants a worker started that was last
// stopped at a moment: it has opened since, and is open.
func (s *Standing) Starts(stopped time.Time) bool {
	return s.Start && s.Open && s.Last != nil && s.Last.Opens && stopped.Before(s.Last.At)
}

// ScheduleName is how the name of the numbers of closed hours begins.
const ScheduleName = "schedule "

// OffHours are the numbers and the evidence by which the schedule pauses a
// worker in closed hours: after its grace and, with force, whatever was read.
func (s *Standing) OffHours(p idle.Policy, e idle.Evidence) (idle.Policy, idle.Evidence) {
	p.Name, p.Detection, p.AutoPause = ScheduleName+s.Schedule, true, true
	p.Timeout = min(p.Timeout, idle.Duration(s.Grace*float64(time.Minute)))
	if s.Force {
		// The warning is all that it waits for; the engine grants one half of
		// the timeout.
		p.Timeout, p.Signals = max(2*p.WarnBefore, idle.Duration(time.Second)), []string{}
		e.LastActivityAt, e.Connections = time.Time{}, 0
	}
	return p, e
}

// Describe says the standing in a sentence.
func (s *Standing) Describe() string {
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

// ClockIn shows a moment in a zone, with its name.
func ClockIn(t time.Time, zone string) string {
	if loc, err := when.Zone(zone); err == nil {
		t = t.In(loc)
	}
	return t.Format("Mon 2006-01-02 15:04 ") + cmp.Or(zone, "UTC")
}
