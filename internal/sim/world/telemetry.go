package world

import (
	"slices"
	"strconv"
	"time"
)

// Categories are the 25 categories of CML 2.9, in the order of its enumeration.
var Categories = []string{
	"start_lab", "stop_lab", "queue_node", "stop_node", "start_node", "boot_node", "wipe_node", "packet_capture",
	"license_info", "maintenance_state_change", "notice_state_change", "running_nodes", "resource_pool",
	"user_activity", "user_group", "system_stats", "blkinfo", "vmware", "dmiinfo", "cpuinfo", "meminfo",
	"hypervisor", "import_lab", "export_lab", "aaa_info",
}

const (
	catStartLab uint8 = iota
	catStopLab
	catQueueNode
	catStopNode
	catStartNode
	catBootNode
	catWipeNode
	catPacketCapture
	catLicenseInfo
	catMaintenance
	catNotice
	catRunningNodes
	catResourcePool
	catUserActivity
	catUserGroup
	catSystemStats
	catBlkinfo
	catVMware
	catDmiinfo
	catCpuinfo
	catMeminfo
	catHypervisor
	catImportLab
	catExportLab
	catAaaInfo
)

// Flags of an event.
const (
	flagDuplicate uint8 = 1 << iota
	flagReorder
	flagFuture
	flagMalformed
)

// event is one entry of the telemetry, 24 bytes.
type event struct {
	at    int64  // client's time, ms
	late  uint32 // ms from the event until answers contain it
	who   uint32 // index into Host.Users plus 2; 0 is none, 1 is admin; from whoHashed on, a hash of another account's name
	what  uint8
	flags uint8
	lab   int16
	extra uint32
}

// whoHashed is the first value of who that stands for a hashed account name.
const whoHashed = 1 << 16

// log appends an event that the user caused in a lab; lab -1 means none.
func (h *Host) log(now Moment, what uint8, user string, lab int) {
	if !h.OptIn {
		return
	}
	e := event{at: now.Wire.UnixMilli(), what: what, lab: int16(lab), who: h.whoIs(user), extra: uint32(h.dice.next())}
	if what == catRunningNodes {
		e.extra = uint32(h.RunningNodes())
	}
	s := h.Spoil
	roll := func(p float64) bool { return p > 0 && h.dice.unit() < p }
	if roll(s.Late) {
		by := s.LateBy.D()
		if by == 0 {
			by = 10 * time.Minute
		}
		e.late = uint32(by.Milliseconds())
	}
	for _, f := range []struct {
		p float64
		f uint8
	}{{s.Duplicate, flagDuplicate}, {s.Reorder, flagReorder}, {s.Future, flagFuture}, {s.Malformed, flagMalformed}} {
		if roll(f.p) {
			e.flags |= f.f
		}
	}
	h.events = append(h.events, e)
}

// KnownActivity returns the client's time of the newest user action in a telemetry
// answer at now. LastActivity is newer if it is of an action that no answer contains
// yet, because its event is late. Both exclude BaseHistory and actions of the
// built-in account.
func (h *Host) KnownActivity(now Moment) time.Time {
	var newest int64
	wire := now.Wire.UnixMilli()
	for _, e := range h.events {
		if e.who >= 2 && userMade(e.what) && e.flags&flagMalformed == 0 && e.at > newest && e.at+int64(e.late) <= wire {
			newest = e.at
		}
	}
	if newest == 0 {
		return time.Time{}
	}
	return time.UnixMilli(newest)
}

func (h *Host) whoIs(user string) uint32 {
	switch user {
	case "":
		return 0
	case AdminID:
		return 1
	}
	k := slices.IndexFunc(h.Users, func(u *User) bool { return u.ID == user })
	if k >= 0 {
		return uint32(k) + 2
	}
	if k = slices.Index(h.others, user); k < 0 {
		k = len(h.others)
		h.others = append(h.others, user)
	}
	return whoHashed + uint32(k)
}

// Touch records that an account used CML's web interface or API, as CML itself
// does for every login.
func (h *Host) Touch(now Moment, user string) { h.log(now, catUserActivity, user, -1) }

// Act adds an event as if the user had caused it, and reports whether the category
// exists. The user may be unknown to the host.
func (h *Host) Act(now Moment, category, user string) bool {
	k := slices.Index(Categories, category)
	if k < 0 {
		return false
	}
	h.log(now, uint8(k), user, h.dice.below(len(h.Labs)))
	if user != AdminID && userMade(uint8(k)) {
		h.LastActivity = now.Wire
	}
	return true
}

func userMade(c uint8) bool {
	switch c {
	case catStartLab, catStopLab, catQueueNode, catStopNode, catStartNode, catBootNode, catWipeNode,
		catPacketCapture, catImportLab, catExportLab, catUserActivity:
		return true
	}
	return false
}

// background adds the events that CML logs by itself, up to now: two per interval.
func (w *World) background(now Moment, h *Host) {
	every := w.cfg.Timing.Background.D()
	if every <= 0 || h.reach(now) != Ready {
		return
	}
	if now.World.Sub(h.noisy) > 1000*every {
		h.noisy = now.World.Add(-1000 * every)
	}
	for next := h.noisy.Add(every); !next.After(now.World); next = next.Add(every) {
		at := w.Clock.At(next)
		h.log(at, catSystemStats, "", -1)
		h.log(at, catRunningNodes, "", -1)
		h.noisy = next
	}
}

// BaseHistory is the telemetry from before the simulation. It costs no memory: event
// k is computed from the seed. Of 3,136 events, 30 are about labs, 196 about nodes,
// 207 are system_stats, 207 running_nodes, and the rest automated user_activity and
// inventory.
type BaseHistory struct {
	Events   int       `json:"events,omitempty"`
	Seed     uint64    `json:"seed,omitempty"`
	From, To time.Time `json:",omitzero"` // client's time of the first and last event
}

func (b BaseHistory) event(k int) event {
	const total = 3136
	span := b.To.Sub(b.From)
	at := b.From.Add(time.Duration(float64(span) * float64(k) / float64(max(b.Events-1, 1))))
	r := mix(b.Seed + uint64(k))
	slot := (k*1009 + int(b.Seed%total)) % total // 1009 and 3136 are coprime, so each slot occurs once in 3136
	e := event{at: at.UnixMilli(), lab: -1, extra: uint32(r)}
	switch {
	case slot < 30:
		e.what = []uint8{catStartLab, catStopLab, catImportLab, catExportLab}[r%4]
		e.who, e.lab = 2, int16(r>>8%4)
	case slot < 226:
		e.what = []uint8{catStartNode, catStopNode, catQueueNode, catBootNode}[r%4]
		e.who, e.lab = 2, int16(r>>8%4)
	case slot < 433:
		e.what = catSystemStats
	case slot < 640:
		e.what = catRunningNodes
	case slot < 3000:
		e.what, e.who = catUserActivity, 1
	default:
		e.what = []uint8{catAaaInfo, catLicenseInfo, catDmiinfo, catCpuinfo, catMeminfo, catBlkinfo, catHypervisor, catVMware, catResourcePool, catUserGroup}[r%10]
	}
	return e
}

// Telemetry is an immutable view of a host's events. It can be read without the
// world's lock.
type Telemetry struct {
	base   BaseHistory
	events []event
	users  []string
	others []string
	labs   []string
	now    int64
	offset time.Duration
}

// Telemetry returns the events that an answer at now contains.
func (h *Host) Telemetry(now Moment) *Telemetry {
	t := &Telemetry{base: h.History, events: h.events, others: h.others, now: now.Wire.UnixMilli(), offset: h.Offset}
	for _, u := range h.Users {
		t.users = append(t.users, u.ID)
	}
	for _, l := range h.Labs {
		t.labs = append(t.labs, l.ID)
	}
	return t
}

// Count returns the number of events, without duplicates.
func (t *Telemetry) Count() int { return t.base.Events + len(t.events) }

// Each appends each event as JSON to buf and passes buf to emit. It returns the first
// error of emit.
func (t *Telemetry) Each(buf []byte, emit func([]byte) error) error {
	out := func(e event) error {
		buf = t.render(buf[:0], e)
		if err := emit(buf); err != nil || e.flags&flagDuplicate == 0 {
			return err
		}
		return emit(buf)
	}
	for k := range t.base.Events {
		if err := out(t.base.event(k)); err != nil {
			return err
		}
	}
	var held []event
	for _, e := range t.events {
		if e.at+int64(e.late) > t.now {
			continue
		}
		if e.flags&flagReorder != 0 && len(held) < 8 {
			held = append(held, e)
			continue
		}
		if err := out(e); err != nil {
			return err
		}
		if e.flags&flagReorder != 0 || len(held) == 0 {
			continue
		}
		for _, late := range held {
			if err := out(late); err != nil {
				return err
			}
		}
		held = held[:0]
	}
	for _, e := range held {
		if err := out(e); err != nil {
			return err
		}
	}
	return nil
}

func (t *Telemetry) user(who uint32) string {
	switch {
	case who == 1:
		return AdminID
	case who >= whoHashed && int(who-whoHashed) < len(t.others):
		return t.others[who-whoHashed]
	case who >= 2 && int(who-2) < len(t.users):
		return t.users[who-2]
	case who >= 2:
		return "5f0c7a52-11d4-4d0e-b8a5-0a2f6a7d9c31" // a user whose account was deleted
	}
	return ""
}

// render writes an event in CML's shape.
func (t *Telemetry) render(b []byte, e event) []byte {
	if e.flags&flagMalformed != 0 {
		switch e.extra % 4 {
		case 0:
			return append(b, `{"category":"start_lab","timestamp":"yesterday","data":{}}`...)
		case 1:
			return append(b, `{"category":7,"timestamp":null}`...)
		case 2:
			return append(b, `"not an event"`...)
		}
		return append(b, `{"timestamp":"2025-11-19T10:25:32.810Z","data":[]}`...)
	}
	at := time.UnixMilli(e.at).Add(t.offset)
	if e.flags&flagFuture != 0 {
		at = at.Add(time.Hour)
	}
	b = append(b, `{"category":"`...)
	b = append(b, Categories[e.what]...)
	b = append(b, `","timestamp":"`...)
	b = at.UTC().AppendFormat(b, "2006-01-02T15:04:05.000Z")
	b = append(b, `","data":`...)
	b = t.data(b, e)
	return append(b, '}')
}

func (t *Telemetry) data(b []byte, e event) []byte {
	sep := byte('{')
	field := func(key string) {
		b = append(b, sep, '"')
		b = append(b, key...)
		b = append(b, '"', ':')
		sep = ','
	}
	text := func(key, v string) {
		field(key)
		b = strconv.AppendQuote(b, v)
	}
	if u := t.user(e.who); u != "" {
		text("user_id", u)
	}
	switch {
	case e.lab >= 0 && userMade(e.what):
		if int(e.lab) < len(t.labs) {
			text("lab_id", t.labs[e.lab])
		}
		if e.what != catStartLab && e.what != catStopLab {
			text("node_definition", []string{"iosv", "iosvl2", "nxosv", "csr1000v", "alpine"}[e.extra%5])
		}
	case e.what == catRunningNodes:
		field("running_nodes")
		b = strconv.AppendUint(b, uint64(e.extra%200), 10)
	case e.what == catSystemStats:
		field("cpu_percent")
		b = strconv.AppendUint(b, uint64(e.extra%100), 10)
		field("memory_percent")
		b = strconv.AppendUint(b, uint64(e.extra/100%100), 10)
	case e.what == catUserActivity:
		text("action", []string{"login", "view", "api"}[e.extra%3])
	}
	if sep == '{' {
		return append(b, '{', '}')
	}
	return append(b, '}')
}
