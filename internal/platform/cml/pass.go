package cml

import (
	"cmp"
	"fmt"
	"time"
)

const (
	maxUnknownNames = 32   // distinct unknown categories counted by name
	maxFaults       = 5    // malformed events described
	maxVerdicts     = 1024 // user ids whose verdict is cached within a pass
)

// pass is the state of one reading of one history.
type pass struct {
	f      *Filter
	in     scanner
	inner  scanner // for the data of one event
	now    time.Time
	offset Offset
	future time.Time // events later than this are future-dated
	memory *memory
	keep   shelf
	fields fields // fields of the event being read
	newest time.Time
	host   time.Time // the timestamp behind newest

	tally   []int64 // by category.index
	counts  Counts
	faults  []Fault
	users   map[string]bool // user id -> excluded
	scratch [maxShort]byte  // decoded short strings
	userKey [maxShort]byte  // the same, inside data
	user    [maxShort]byte
}

func newPass(f *Filter, now time.Time, offset Offset, seen Seen) *pass {
	return &pass{
		f: f, now: now, offset: offset,
		future: now.Add(f.cfg.FutureAfter),
		memory: newMemory(seen, f.cfg.MaxFuture),
		keep:   shelf{max: f.cfg.MaxStored},
		tally:  make([]int64, len(f.names)),
		users:  map[string]bool{},
	}
}

// array reads the history from its opening bracket to the end of the stream.
func (p *pass) array() error {
	c, err := p.in.next()
	if err != nil {
		return err
	}
	if c != '[' {
		return p.in.syntax("the answer is not an array: it starts with %q", c)
	}
	p.in.pos++
	if c, err = p.in.next(); err != nil {
		return err
	}
	for c != ']' {
		if err := p.event(c); err != nil {
			return err
		}
		if c, err = p.in.next(); err != nil {
			return err
		}
		if c == ']' {
			break
		}
		if c != ',' {
			return p.in.syntax("unexpected %q after an event", c)
		}
		p.in.pos++
		if c, err = p.in.next(); err != nil {
			return err
		}
		if c == ']' {
			return p.in.syntax("a comma before the closing bracket")
		}
	}
	p.in.pos++
	return p.tail()
}

// tail makes sure that only white space follows the array.
func (p *pass) tail() error {
	c, err := p.in.next()
	switch {
	case err == nil:
		return p.in.syntax("unexpected %q after the array", c)
	case err == errTruncated:
		return nil
	default:
		return err
	}
}

// event reads one element of the array. c is its first byte.
func (p *pass) event(c byte) error {
	p.counts.Events++
	p.in.hold = p.in.pos
	e := &p.fields
	e.reset(p.in.offset())
	if c != '{' {
		if err := p.in.value(); err != nil {
			return err
		}
		p.oversized(e)
		p.malformed(e, "an event that is not an object")
		p.in.hold = -1
		return nil
	}
	p.in.pos++
	c, err := p.in.next()
	if err != nil {
		return err
	}
	for c != '}' {
		if err := p.member(e, c); err != nil {
			return err
		}
		if c, err = p.in.next(); err != nil {
			return err
		}
		if c == '}' {
			break
		}
		if c != ',' {
			return p.in.syntax("unexpected %q after a member of an event", c)
		}
		p.in.pos++
		if c, err = p.in.next(); err != nil {
			return err
		}
		if c == '}' {
			return p.in.syntax("a comma before the closing brace")
		}
	}
	p.in.pos++
	p.judge(e)
	p.in.hold = -1
	return nil
}

// oversized reports whether the event that ends here is too long, and counts
// it.
func (p *pass) oversized(e *fields) bool {
	if p.in.offset()-e.start <= int64(p.f.cfg.MaxEventBytes) {
		return false
	}
	p.counts.Oversized++
	return true
}

// judge evaluates a complete event. An event whose category is not relevant is
// only counted; its time and data are not read.
func (p *pass) judge(e *fields) {
	oversized := p.oversized(e)
	switch e.catState {
	case missing:
		p.malformed(e, "an event without a category")
		return
	case bad:
		p.malformed(e, "a category that is not a string of at most %d bytes", maxShort)
		return
	case unknown:
		p.unknownCategory(string(e.name[:e.nameLen]))
		return
	}
	if !e.category.relevant {
		p.tally[e.category.index]++
		return
	}
	stamp, ok := parseTimestamp(e.stamp[:e.stampLen])
	switch {
	case e.stamped == missing:
		p.malformed(e, "an event without a timestamp")
		return
	case e.stamped == bad || !ok:
		p.malformed(e, "a timestamp that is not a date and time")
		return
	}
	p.tally[e.category.index]++
	var data []byte
	if !oversized && e.dataLen > 0 {
		from := e.data - p.in.base
		data = p.in.buf[from : from+e.dataLen]
	}
	if e.category.byUser && p.excluded(data) {
		p.counts.ExcludedUsers++
		return
	}
	p.counts.Relevant++
	p.activity(found{stamp: stamp, category: e.category.name, data: data, dropped: oversized})
}

// activity processes a relevant event. ev.data points into the buffer.
func (p *pass) activity(ev found) {
	ev.at = p.offset.ours(ev.stamp)
	if p.memory.concerns(ev.at) || ev.at.After(p.future) {
		p.dated(&ev)
	}
	if p.newest.Before(ev.at) {
		p.newest, p.host = ev.at, ev.stamp
	}
	if p.keep.put(ev) {
		p.counts.Duplicates++
	}
}

// dated replaces the time of an event that is future-dated, or was when it was
// first seen, by the time at which it was first seen. With an unknown offset
// nothing is stored.
func (p *pass) dated(ev *found) {
	ahead := ev.at.After(p.future)
	if ahead {
		p.counts.Future++
	}
	if !p.offset.Known {
		ev.at = earlier(ev.at, p.now)
		return
	}
	first, known := p.memory.recall(ev)
	switch {
	case known:
		ev.at = earlier(ev.at, earlier(first, p.now))
	case ahead:
		ev.at = p.now
		if !p.memory.store(ev, p.now) {
			p.counts.FutureForgotten++
		}
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// excluded reports whether the data of a user_activity event names an excluded
// user. Data that names no user is not excluded.
func (p *pass) excluded(data []byte) bool {
	if len(data) == 0 || data[0] != '{' {
		return false
	}
	id, ok := p.userID(data)
	if !ok {
		return false
	}
	verdict, known := p.users[string(id)]
	if !known {
		verdict = p.f.excludedIDs[string(id)] ||
			p.f.cfg.ExcludedUsers != nil && p.f.cfg.ExcludedUsers.Match(id)
		if len(p.users) == maxVerdicts {
			clear(p.users)
		}
		p.users[string(id)] = verdict
	}
	return verdict
}

// userID finds the last member user_id of a valid object. ok is false if there
// is none, or if it is not a string of at most maxShort bytes.
func (p *pass) userID(data []byte) (id []byte, ok bool) {
	in := &p.inner
	in.resetBytes(data)
	in.pos++
	for {
		c, err := in.next()
		if err != nil || c == '}' {
			break
		}
		if c == ',' {
			in.pos++
			if _, err = in.next(); err != nil {
				break
			}
		}
		in.pos++
		mine := in.skip(`user_id"`)
		if !mine {
			key, _, err := in.short(p.userKey[:])
			if err != nil {
				break
			}
			mine = string(key) == "user_id"
		}
		if in.colon() != nil {
			break
		}
		if c, err = in.next(); err != nil {
			break
		}
		if mine && c == '"' {
			in.pos++
			if id, ok, err = in.short(p.user[:]); err != nil {
				break
			}
			continue
		}
		if mine {
			id, ok = nil, false
		}
		if in.value() != nil {
			break
		}
	}
	return id, ok
}

func (p *pass) unknownCategory(name string) {
	if _, ok := p.counts.UnknownCategories[name]; !ok {
		if len(p.counts.UnknownCategories) == maxUnknownNames {
			p.counts.UnknownOther++
			return
		}
		if p.counts.UnknownCategories == nil {
			p.counts.UnknownCategories = map[string]int64{}
		}
	}
	p.counts.UnknownCategories[name]++
}

// malformed counts an event that is skipped and describes the first few.
func (p *pass) malformed(e *fields, format string, args ...any) {
	p.counts.Malformed++
	if len(p.faults) == maxFaults {
		return
	}
	fault := Fault{Offset: e.start, Fault: fmt.Sprintf(format, args...)}
	if p.in.hold >= 0 {
		fault.Sample = sample(p.in.buf[p.in.hold:p.in.pos])
	}
	p.faults = append(p.faults, fault)
}

// result returns the evidence of the pass, which ended with err.
func (p *pass) result(err error) Activity {
	p.counts.Bytes = p.in.offset()
	for i, n := range p.tally {
		if n > 0 {
			if p.counts.ByCategory == nil {
				p.counts.ByCategory = map[string]int64{}
			}
			p.counts.ByCategory[p.f.names[i]] = n
		}
	}
	a := Activity{
		CheckedAt: p.now, Newest: p.newest, NewestHost: p.host, Recent: p.keep.events(),
		Counts: p.counts, Faults: p.faults, Offset: p.offset,
		Seen: p.memory.seen(err == nil && p.offset.Known),
	}
	a.Unknown, a.Err = reasonOf(err), err
	if !p.offset.Known {
		a.Newest = time.Time{}
		a.Unknown = cmp.Or(a.Unknown, ReasonOffsetUnknown)
		if a.Err == nil {
			a.Err = errOffsetUnknown
		}
	}
	if a.Err != nil {
		a.Err = fmt.Errorf("cannot read telemetry events: %w", a.Err)
	}
	return a
}
