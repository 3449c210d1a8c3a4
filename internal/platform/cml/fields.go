package cml

// state is the state of a required member of an event.
type state uint8

const (
	missing state = iota
	bad           // not a string, or a string that is too long
	unknown       // an unknown category
	good
)

// fields are the relevant fields of one event.
type fields struct {
	start    int64 // stream offset of the event
	category *category
	catState state
	name     [maxShort]byte // an unknown category
	nameLen  int
	stamp    [48]byte
	stampLen int
	stamped  state
	data     int64 // stream offset of the data's value, 0 if there is none
	dataLen  int64
}

// reset prepares for the next event; the bytes beyond the lengths need no
// clearing.
func (e *fields) reset(start int64) {
	e.start, e.category, e.catState, e.nameLen = start, nil, missing, 0
	e.stampLen, e.stamped, e.data, e.dataLen = 0, missing, 0, 0
}

// member reads one member of an event, whose first byte is c. If a member
// occurs twice, the last one counts.
func (p *pass) member(e *fields, c byte) error {
	if c != '"' {
		return p.in.syntax("unexpected %q, want a key", c)
	}
	p.in.pos++
	which, err := p.which()
	if err != nil {
		return err
	}
	if err := p.in.colon(); err != nil {
		return err
	}
	if c, err = p.in.next(); err != nil {
		return err
	}
	switch which {
	case keyCategory:
		return p.category(e, c)
	case keyTimestamp:
		return p.timestamp(e, c)
	case keyData:
		e.data = p.in.offset()
		err := p.in.value()
		e.dataLen = p.in.offset() - e.data
		return err
	}
	return p.in.value()
}

// The relevant members of an event.
const (
	keyOther = iota
	keyCategory
	keyTimestamp
	keyData
)

// which consumes the rest of a key after its opening quote and returns which
// member it names. A key without escapes is recognized in the buffer, without a
// copy.
func (p *pass) which() (int, error) {
	in := &p.in
	switch {
	case in.skip(`category"`):
		return keyCategory, nil
	case in.skip(`timestamp"`):
		return keyTimestamp, nil
	case in.skip(`data"`):
		return keyData, nil
	}
	key, _, err := in.short(p.scratch[:])
	switch string(key) {
	case "category":
		return keyCategory, err
	case "timestamp":
		return keyTimestamp, err
	case "data":
		return keyData, err
	}
	return keyOther, err
}

func (p *pass) category(e *fields, c byte) error {
	e.category, e.catState = nil, bad
	if c != '"' {
		return p.in.value()
	}
	p.in.pos++
	text, ok, err := p.in.short(p.scratch[:])
	if err != nil || !ok {
		return err
	}
	if e.category = p.f.categories[string(text)]; e.category != nil {
		e.catState = good
		return nil
	}
	e.catState = unknown
	e.nameLen = copy(e.name[:], text)
	return nil
}

func (p *pass) timestamp(e *fields, c byte) error {
	e.stamped = bad
	if c != '"' {
		return p.in.value()
	}
	p.in.pos++
	text, ok, err := p.in.short(p.scratch[:])
	if err != nil || !ok || len(text) > len(e.stamp) {
		return err
	}
	e.stamped = good
	e.stampLen = copy(e.stamp[:], text)
	return nil
}
