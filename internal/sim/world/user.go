package world

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// UserScript describes how one user uses a CML host.
type UserScript struct {
	Name   string   `yaml:"name" json:"name"`
	Days   string   `yaml:"days" json:"days"`     // mon-fri (default), daily, weekend, or a list such as "mon,wed"
	From   string   `yaml:"from" json:"from"`     // arrival, HH:MM of the world's calendar; default 09:00
	To     string   `yaml:"to" json:"to"`         // departure; if not after From, the next day; default 17:00
	Spread Duration `yaml:"spread" json:"spread"` // random deviation of both times, in either direction; default 30m
	Every  Duration `yaml:"every" json:"every"`   // mean time between actions; default 6m
	Chance float64  `yaml:"chance" json:"chance"` // probability of coming on such a day; 0 means 0.9
	Break  Duration `yaml:"break" json:"break"`   // longest break in the middle of the work; default 1h
	Stops  float64  `yaml:"stops" json:"stops"`   // probability of stopping the labs when leaving; default 0
	Starts bool     `yaml:"starts" json:"starts"` // starts the machine in the console if it is down
}

func (u *UserScript) fill() {
	def := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	def(&u.Days, "mon-fri")
	def(&u.From, "09:00")
	def(&u.To, "17:00")
	if u.Spread == 0 {
		u.Spread = Duration(30 * time.Minute)
	}
	if u.Every == 0 {
		u.Every = Duration(6 * time.Minute)
	}
	if u.Chance == 0 {
		u.Chance = 0.9
	}
	if u.Break == 0 {
		u.Break = Duration(time.Hour)
	}
}

var dayNames = []string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"}

// parseDays returns a set of weekdays as bits.
func parseDays(s string) (uint8, error) {
	switch s {
	case "daily":
		return 0x7f, nil
	case "mon-fri":
		return 0x3e, nil
	case "weekend":
		return 0x41, nil
	}
	var out uint8
	for d := range strings.SplitSeq(s, ",") {
		k := slices.Index(dayNames, strings.TrimSpace(strings.ToLower(d)))
		if k < 0 {
			return 0, fmt.Errorf("cannot use user script: unknown day %q", d)
		}
		out |= 1 << k
	}
	return out, nil
}

func parseClock(s string) (time.Duration, error) {
	t, err := time.Parse("15:04", s)
	if err != nil {
		return 0, fmt.Errorf("cannot use user script: time of day %q is not HH:MM", s)
	}
	return time.Duration(t.Hour())*time.Hour + time.Duration(t.Minute())*time.Minute, nil
}

func (u UserScript) validate() error {
	if _, err := parseDays(u.Days); err != nil {
		return err
	}
	if _, err := parseClock(u.From); err != nil {
		return err
	}
	if _, err := parseClock(u.To); err != nil {
		return err
	}
	if u.Name == "" || u.Name == "admin" {
		return fmt.Errorf("cannot use user script: name %q is empty or CML's own", u.Name)
	}
	for _, d := range []Duration{u.Spread, u.Break} {
		if d < 0 || d.D() > 12*time.Hour {
			return fmt.Errorf("cannot use user script %s: spread or break %s is outside 0 to 12h", u.Name, d.D())
		}
	}
	if u.Every.D() < time.Second || u.Every.D() > 24*time.Hour || u.Stops < 0 || u.Stops > 1 || u.Chance < 0 || u.Chance > 1 {
		return fmt.Errorf("cannot use user script %s: every %s, chance %v or stops %v is out of range", u.Name, u.Every.D(), u.Chance, u.Stops)
	}
	return nil
}

// User is one scripted user.
type User struct {
	Name    string     `json:"name"`
	ID      string     `json:"id"`
	Script  UserScript `json:"script"`
	Present bool       `json:"present"`
	Next    time.Time  `json:"next"`   // world's time of the next step
	Leaves  time.Time  `json:"leaves"` // world's time of departure
	Broke   bool       `json:"broke"`  // already had today's break
	Acted   bool       `json:"acted"`  // has acted since arriving
	Dice    uint64     `json:"dice"`
}

func newUser(now Moment, s UserScript, d *dice) *User {
	u := &User{Name: s.Name, ID: d.uuid(), Script: s, Dice: d.next()}
	u.plan(now.World, true)
	return u
}

// plan sets the user's next arrival after t. first means the start of the simulation:
// a user whose working hours have begun then arrives soon after t.
func (u *User) plan(t time.Time, first bool) {
	d := dice(u.Dice)
	defer func() { u.Dice = uint64(d) }()
	days, _ := parseDays(u.Script.Days)
	from, _ := parseClock(u.Script.From)
	to, _ := parseClock(u.Script.To)
	if to <= from {
		to += 24 * time.Hour
	}
	spread := u.Script.Spread.D()
	midnight := time.Date(t.Year(), t.Month(), t.Day(), 0, 0, 0, 0, t.Location())
	for k := range 15 {
		day := midnight.AddDate(0, 0, k)
		if days>>day.Weekday()&1 == 0 || d.unit() >= u.Script.Chance {
			continue
		}
		come := day.Add(from + d.between(-spread, spread))
		leave := day.Add(to + d.between(-spread, spread))
		if first && come.Before(t) && leave.After(t.Add(spread)) {
			come = t.Add(d.between(0, min(spread, 15*time.Minute)))
		}
		if come.After(t) && leave.After(come) {
			u.Present, u.Broke, u.Acted, u.Next, u.Leaves = false, false, false, come, leave
			return
		}
	}
	u.Present, u.Next, u.Leaves = false, midnight.AddDate(0, 0, 15), time.Time{}
}

func (h *Host) nextUser() time.Time {
	var next time.Time
	for _, u := range h.Users {
		if next.IsZero() || u.Next.Before(next) {
			next = u.Next
		}
	}
	return next
}

// stepUser performs the next action of the user whose turn is earliest.
func (w *World) stepUser(at Moment, i *Instance) {
	h := i.Host
	u := h.Users[0]
	for _, x := range h.Users[1:] {
		if x.Next.Before(u.Next) {
			u = x
		}
	}
	d := dice(u.Dice)
	switch {
	case u.Leaves.IsZero():
		u.plan(at.World, false)
		return
	case !at.World.Before(u.Leaves):
		w.leave(at, h, u, &d)
		return
	case h.reach(at) != Ready:
		u.Next = at.World.Add(w.absent(at, i, u, &d))
	default:
		u.Present = true
		h.act(at, u, &d)
		u.Next = at.World.Add(h.pace(at, u, &d))
	}
	u.Dice = uint64(d)
}

// absent is the reaction of a user who finds CML down: wait for a boot in progress, start
// the machine, or check again later. It returns the time until the next check.
func (w *World) absent(at Moment, i *Instance, u *User, d *dice) time.Duration {
	if u.Present && u.Acted && (i.State == Stopping || i.State == Stopped) {
		i.Host.Interruptions++
		u.Acted = false
	}
	if i.State == Stopped && u.Script.Starts && !i.Stuck && w.fits(i, 0) {
		w.boot(at, i, "user")
	}
	if i.State == Pending || i.State == Running {
		return d.between(time.Minute, 2*time.Minute)
	}
	return d.between(5*time.Minute, 15*time.Minute)
}

func (w *World) leave(at Moment, h *Host, u *User, d *dice) {
	if u.Present && h.reach(at) == Ready && d.unit() < u.Script.Stops {
		for k := range h.Labs {
			if h.Labs[k].Owner == u.ID && h.Labs[k].Started {
				h.setLab(at, k, "stop", u.ID)
				h.LastActivity = at.Wire
			}
		}
	}
	u.Dice = uint64(*d)
	u.plan(at.World, false)
}

// act performs one action of a user in CML.
func (h *Host) act(at Moment, u *User, d *dice) {
	h.LastActivity = at.Wire
	u.Acted = true
	lab := -1
	if len(h.Labs) > 0 {
		lab = d.below(len(h.Labs))
		if h.Labs[lab].Removed {
			lab = -1
		}
	}
	roll := d.below(100)
	switch {
	case lab < 0 || roll < 55:
		h.log(at, catUserActivity, u.ID, -1)
	case roll < 75:
		if h.Labs[lab].Started {
			h.log(at, []uint8{catStartNode, catStopNode, catPacketCapture}[d.below(3)], u.ID, lab)
		} else {
			h.setLab(at, lab, "start", u.ID)
		}
	case roll < 85:
		if h.Labs[lab].Started {
			h.setLab(at, lab, "stop", u.ID)
		} else {
			h.log(at, catExportLab, u.ID, lab)
		}
	case roll < 90:
		h.log(at, catImportLab, u.ID, lab)
		h.Labs[lab].Modified = at.Wire
	default:
		h.log(at, catUserActivity, u.ID, -1)
	}
}

// pace returns the time until the user's next action: usually a short one, once a day
// a break.
func (h *Host) pace(at Moment, u *User, d *dice) time.Duration {
	if !u.Broke && u.Leaves.Sub(at.World) < 4*time.Hour && d.unit() < 0.5 {
		u.Broke = true
		return d.between(u.Script.Break.D()/2, u.Script.Break.D())
	}
	mean := u.Script.Every.D()
	return d.between(mean/5, mean*9/5)
}
