package evidence_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"lull/internal/core/evidence"
	"lull/internal/core/idle"
)

// machine is a day, minute by minute, of a machine that measures itself.
type machine struct {
	begun   time.Time
	cpu     []float64
	network []float64
	logins  []bool // a key was pressed in that minute
	thrifty bool   // logins are not read while cpu or network is active
	list    []evidence.Record
}

// minutes draws days with quiet times and with use of several strengths.
func minutes(n int, thrifty bool) machine {
	m := machine{begun: time.Date(2026, 3, 2, 0, 0, 0, 0, time.UTC), thrifty: thrifty}
	for len(m.cpu) < n*24*60 {
		cpu, network, typing := 1.0, 2.0, false
		switch rand.IntN(6) {
		case 0:
			cpu = 8
		case 1:
			cpu = 40
		case 2:
			network = 30
		case 3:
			typing = true
		}
		for range 10 + rand.IntN(200) {
			m.cpu = append(m.cpu, cpu+rand.Float64())
			m.network = append(m.network, network+rand.Float64())
			m.logins = append(m.logins, typing && rand.IntN(3) > 0)
		}
	}
	return m
}

// records returns the records that the machine would have reported each minute,
// after packing and unpacking.
func (m *machine) records(t *testing.T) []evidence.Record {
	if m.list != nil {
		return m.list
	}
	rec := evidence.Recorder{Beat: 30 * time.Minute}
	p := idle.Policy{Name: "agent", Timeout: idle.Duration(100 * time.Hour), CheckInterval: idle.Duration(time.Minute), Detection: true, AutoPause: true, Action: "stop"}
	used, event := m.begun, m.begun
	var list []evidence.Record
	for i := range m.cpu {
		at := m.begun.Add(time.Duration(i) * time.Minute)
		if m.logins[i] {
			event = at
		}
		cpu, network := idle.Judge("cpu", m.cpu[i], 5, "%", time.Minute, at), idle.Judge("network", m.network[i], 10, "KB/min", time.Minute, at)
		e := idle.Evidence{Status: "running", Running: true, CreatedAt: m.begun, Readings: []idle.Reading{cpu, network}}
		busy := cpu.State == idle.Active || network.State == idle.Active
		var unasked []string
		if m.thrifty && busy {
			unasked = []string{"users"}
		} else {
			e.Readings = append(e.Readings, idle.Reading{Signal: "users", State: idle.Quiet, At: at, LastEvent: event})
			if event.After(used) {
				used = event
			}
		}
		if busy {
			used = at
		}
		e.LastActivityAt = used
		d := evidence.Decide(at, p, e)
		list = append(list, rec.Take(evidence.Record{At: d.Verdict.At, Object: "agent/m", Next: at.Add(time.Minute), Unasked: unasked, Decision: d,
			Levels: evidence.LevelsAt(at, map[string]float64{"cpu": m.cpu[i], "network": m.network[i]})})...)
	}
	list = append(list, rec.Flush()...)
	for i, r := range list {
		b, err := r.Pack()
		if err == nil {
			list[i], err = evidence.Unpack(b)
		}
		if err != nil || list[i].Differs {
			t.Fatalf("record %d: %v", i, err)
		}
	}
	m.list = list
	return list
}

func (m *machine) end() time.Time { return m.begun.Add(time.Duration(len(m.cpu)-1) * time.Minute) }

// stops computes from the minutes alone, without engine and records, when the
// machine would have been paused and when use resumed.
func (m *machine) stops(cpu, network float64, timeout time.Duration, users bool) (out []evidence.Stop) {
	used := m.begun
	for i := range m.cpu {
		at := m.begun.Add(time.Duration(i) * time.Minute)
		if m.cpu[i] < cpu && m.network[i] < network && !(users && m.logins[i]) {
			continue
		}
		if at.Sub(used) > timeout {
			out = append(out, evidence.Stop{From: used.Add(timeout), To: at, Back: true})
		}
		used = at
	}
	if m.end().Sub(used) > timeout {
		out = append(out, evidence.Stop{From: used.Add(timeout), To: m.end()})
	}
	return out
}

func (m *machine) replay(t *testing.T, p idle.Policy, thresholds map[string]float64) *evidence.Trial {
	trial := &evidence.Trial{Object: "m", Policy: &p, Measured: true, Thresholds: thresholds, From: m.begun, To: m.end(), Window: 15 * time.Minute}
	var follow evidence.Follow
	for _, r := range m.records(t) {
		follow.Add(&r, trial.Add)
	}
	follow.End(m.end(), trial.Add)
	trial.End()
	if sum := trial.Running + trial.Paused + trial.Other + trial.Unknown; sum != m.end().Sub(m.begun) {
		t.Errorf("the hours add up to %s of %s", sum, m.end().Sub(m.begun))
	}
	return trial
}

// TestTrialOfThresholds replays random days and compares the outcome with what
// the minutes themselves say. With the thresholds that were in force, the two
// must agree to the second. With others, the machine must never be taken for
// quiet while in use, and at most a slot of five minutes may be lost at either
// end of a pause.
func TestTrialOfThresholds(t *testing.T) {
	pauses := 0
	defer func() {
		if pauses < 30 {
			t.Errorf("only %d pauses were compared", pauses)
		}
	}()
	for n := range 4 {
		m := minutes(4, false)
		for _, c := range []struct {
			name         string
			cpu, network float64
			given        map[string]float64
			timeout      time.Duration
			lose         time.Duration
		}{
			{"as they were", 5, 10, nil, 40 * time.Minute, 0},
			{"as they were, patient", 5, 10, nil, 90 * time.Minute, 0},
			{"cpu 20", 20, 10, map[string]float64{"cpu": 20}, 40 * time.Minute, 5 * time.Minute},
			{"cpu 20 and network 50", 20, 50, map[string]float64{"cpu": 20, "network": 50}, 30 * time.Minute, 5 * time.Minute},
			{"cpu 8.5, within the noise", 8.5, 10, map[string]float64{"cpu": 8.5}, 30 * time.Minute, 5 * time.Minute},
			{"cpu 1.5", 1.5, 10, map[string]float64{"cpu": 1.5}, 30 * time.Minute, 5 * time.Minute},
		} {
			t.Run(fmt.Sprintf("%s %d", c.name, n), func(t *testing.T) {
				trial := m.replay(t, idle.Policy{Name: "x", Timeout: idle.Duration(c.timeout), Action: "stop"}, c.given)
				want := m.stops(c.cpu, c.network, c.timeout, true)
				paused := time.Duration(0)
				for _, s := range trial.Stops {
					i := slices.IndexFunc(want, func(w evidence.Stop) bool { return !s.From.Before(w.From) && !s.To.After(w.To) })
					if i < 0 {
						t.Fatalf("paused from %s to %s, when it was in use or not idle long enough: %v", s.From, s.To, want)
					}
					if w := want[i]; s.From.Sub(w.From) > c.lose || w.To.Sub(s.To) > c.lose || s.Back != w.Back {
						t.Errorf("paused from %s to %s, back %t; the minutes say %s to %s, back %t", s.From, s.To, s.Back, w.From, w.To, w.Back)
					}
					paused += s.To.Sub(s.From)
					pauses++
				}
				if trial.Paused != paused || trial.Unknown != 0 {
					t.Errorf("paused for %s, of %s in stops; %s unknown", trial.Paused, paused, trial.Unknown)
				}
				for _, w := range want {
					long := w.To.Sub(w.From) > 2*c.lose
					if found := slices.ContainsFunc(trial.Stops, func(s evidence.Stop) bool { return !s.From.Before(w.From) && !s.To.After(w.To) }); long && !found {
						t.Errorf("not paused from %s to %s", w.From, w.To)
					}
				}
			})
		}
	}
}

// TestTrialOfSignals checks that a signal that the trial leaves out does not
// prevent a pause.
func TestTrialOfSignals(t *testing.T) {
	m := minutes(4, false)
	trial := m.replay(t, idle.Policy{Name: "x", Timeout: idle.Duration(40 * time.Minute), Action: "stop", Signals: []string{"cpu", "network"}}, nil)
	want := m.stops(5, 10, 40*time.Minute, false)
	if len(trial.Stops) != len(want) {
		t.Fatalf("%d pauses, want %d", len(trial.Stops), len(want))
	}
	for i, s := range trial.Stops {
		if !s.From.Equal(want[i].From) || !s.To.Equal(want[i].To) {
			t.Errorf("paused from %s to %s, want %s to %s", s.From, s.To, want[i].From, want[i].To)
		}
	}
	none := m.replay(t, idle.Policy{Name: "x", Timeout: idle.Duration(40 * time.Minute), Action: "stop", Signals: []string{"cpu", "gpu"}}, nil)
	if none.Paused != 0 || none.Unknown == 0 {
		t.Errorf("with a signal that was never read: %s paused, %s unknown", none.Paused, none.Unknown)
	}
}

// TestTrialOfWhatWasNotAsked checks that the state is unknown, and nothing is
// paused, if a signal was not read because cpu was active and the trial counts
// that cpu as quiet.
func TestTrialOfWhatWasNotAsked(t *testing.T) {
	for range 8 {
		m := minutes(4, true)
		same := m.replay(t, idle.Policy{Name: "x", Timeout: idle.Duration(40 * time.Minute), Action: "stop"}, nil)
		if same.Unknown != 0 {
			t.Errorf("under the thresholds that were in force %s are unknown", same.Unknown)
		}
		trial := m.replay(t, idle.Policy{Name: "x", Timeout: idle.Duration(40 * time.Minute), Action: "stop"}, map[string]float64{"cpu": 20})
		quiet := 0
		for i := range m.cpu {
			if m.cpu[i] >= 5 && m.cpu[i] < 20 && m.network[i] < 10 {
				quiet++
			}
		}
		if least := time.Duration(quiet)*time.Minute/2 - 20*time.Minute; trial.Unknown < least {
			t.Errorf("%s unknown, in %d minutes users were not asked for", trial.Unknown, quiet)
		}
		for _, s := range trial.Stops {
			for i := range m.cpu {
				at := m.begun.Add(time.Duration(i) * time.Minute)
				if at.After(s.From) && at.Before(s.To) && (m.cpu[i] >= 20 || m.network[i] >= 10) {
					t.Fatalf("paused from %s to %s, in use at %s", s.From, s.To, at)
				}
			}
		}
	}
}
