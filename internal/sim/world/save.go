package world

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"lull/internal/sim/fault"
)

// saved is the form in which a world is saved. It does not contain the configuration:
// a world is restored into one made from the same scenario.
type saved struct {
	Version int                `json:"version"`
	Clock   clockState         `json:"clock"`
	Seq     uint64             `json:"seq"`
	Public  uint32             `json:"public"`
	Private uint32             `json:"private"`
	Tokens  []savedToken       `json:"tokens"`
	Items   []savedInstance    `json:"instances"`
	Faults  []fault.Rule       `json:"faults"`
	Metrics map[string][]Datum `json:"metrics,omitempty"`
}

type savedToken struct {
	Account, Region, Token, Print, Reservation string
	IDs                                        []string
	Until                                      time.Time `json:",omitzero"`
}

type savedInstance struct {
	Instance
	ShownTags Tags          `json:",omitempty"`
	ShownTo   time.Time     `json:",omitzero"`
	CMLBoot   time.Duration `json:",omitempty"`
	HostState *savedHost    `json:",omitempty"`
}

type savedHost struct {
	ReadyAt time.Time
	Session int
	Noisy   time.Time
	Dice    uint64
	Others  []string   `json:",omitempty"`
	Events  [][7]int64 `json:",omitempty"`
}

const saveVersion = 1

// Save writes the whole state.
func (w *World) Save(to io.Writer) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := saved{Version: saveVersion, Clock: w.Clock.save(), Seq: w.seq, Public: w.publicN, Private: w.privateN, Faults: w.Faults.Rules(), Metrics: w.stored}
	for k, t := range w.tokens {
		s.Tokens = append(s.Tokens, savedToken{k.account, k.region, k.token, t.print, t.reservation, t.ids, t.until})
	}
	for _, r := range w.sortedRegions() {
		for _, i := range r.list {
			if !i.purged {
				s.Items = append(s.Items, saveInstance(i))
			}
		}
	}
	if err := json.NewEncoder(to).Encode(s); err != nil {
		return fmt.Errorf("cannot save the simulated world: %w", err)
	}
	return nil
}

func saveInstance(i *Instance) savedInstance {
	out := savedInstance{Instance: *i, ShownTags: i.shown, ShownTo: i.shownTo, CMLBoot: i.cmlBoot}
	if h := i.Host; h != nil {
		hs := &savedHost{ReadyAt: h.readyAt, Session: h.session, Noisy: h.noisy, Dice: uint64(h.dice), Others: h.others}
		for _, e := range h.events {
			hs.Events = append(hs.Events, [7]int64{e.at, int64(e.late), int64(e.who), int64(e.what), int64(e.flags), int64(e.lab), int64(e.extra)})
		}
		out.HostState = hs
	}
	return out
}

// Load replaces the state by a saved one.
func (w *World) Load(from io.Reader) error {
	var s saved
	if err := json.NewDecoder(from).Decode(&s); err != nil {
		return fmt.Errorf("cannot load the simulated world: %w", err)
	}
	if s.Version != saveVersion {
		return fmt.Errorf("cannot load the simulated world: version %d is not %d", s.Version, saveVersion)
	}
	if s.Clock.Speed <= 0 {
		return fmt.Errorf("cannot load the simulated world: clock.speed is %v", s.Clock.Speed)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for k := range s.Items {
		if err := w.checkSaved(&s.Items[k]); err != nil {
			return err
		}
	}
	w.Clock.restore(s.Clock)
	w.seq, w.publicN, w.privateN = s.Seq, s.Public, s.Private
	clear(w.byID)
	clear(w.byName)
	clear(w.byPublic)
	clear(w.byPrivate)
	clear(w.tokens)
	for _, r := range w.regions {
		r.list, r.dead = nil, 0
	}
	for k := range s.Items {
		w.restore(&s.Items[k])
	}
	for _, t := range s.Tokens {
		w.tokens[tokenKey{t.Account, t.Region, t.Token}] = &launched{print: t.Print, reservation: t.Reservation, ids: t.IDs, until: t.Until}
	}
	w.stored = s.Metrics
	if w.stored == nil {
		w.stored = map[string][]Datum{}
	}
	w.Faults.Clear()
	for _, r := range s.Faults {
		if _, err := w.Faults.Add(r); err != nil {
			return err
		}
	}
	return nil
}

func (w *World) checkSaved(s *savedInstance) error {
	if w.regions[regionKey{s.Account, s.Region}] == nil {
		return fmt.Errorf("cannot load the simulated world: instance %s is in account %s and region %s, which the scenario does not have", s.ID, s.Account, s.Region)
	}
	if (s.Host == nil) != (s.HostState == nil) {
		return fmt.Errorf("cannot load the simulated world: instance %s has half a host", s.ID)
	}
	if s.HostState == nil {
		return nil
	}
	for _, e := range s.HostState.Events {
		if e[3] < 0 || int(e[3]) >= len(Categories) {
			return fmt.Errorf("cannot load the simulated world: instance %s has an event of category %d", s.ID, e[3])
		}
	}
	return nil
}

func (w *World) restore(s *savedInstance) {
	i := s.Instance
	i.shown, i.shownTo, i.cmlBoot = s.ShownTags, s.ShownTo, s.CMLBoot
	if h := i.Host; h != nil {
		hs := s.HostState
		h.instance, h.readyAt, h.session, h.noisy, h.dice, h.others = &i, hs.ReadyAt, hs.Session, hs.Noisy, dice(hs.Dice), hs.Others
		for _, e := range hs.Events {
			h.events = append(h.events, event{at: e[0], late: uint32(e[1]), who: uint32(e[2]), what: uint8(e[3]), flags: uint8(e[4]), lab: int16(e[5]), extra: uint32(e[6])})
		}
	}
	r := w.regions[regionKey{i.Account, i.Region}]
	r.list = append(r.list, &i)
	w.byID[i.ID] = &i
	if i.Name != "" {
		w.byName[i.Name] = &i
	}
	if i.PublicIP.IsValid() {
		w.byPublic[i.PublicIP] = &i
	}
	if i.PrivateIP.IsValid() {
		w.byPrivate[i.PrivateIP] = &i
	}
}
