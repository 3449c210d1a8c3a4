package wall

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"lull/internal/lib/errtest"
)

// machine has three clocks that tests can move.
type machine struct{ r Reading }

func newMachine() *machine {
	return &machine{Reading{Wall: time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC), Boot: time.Hour, Mono: 40 * time.Minute}}
}

func (m *machine) run(d time.Duration) {
	m.r.Wall, m.r.Boot, m.r.Mono = m.r.Wall.Add(d), m.r.Boot+d, m.r.Mono+d
}
func (m *machine) suspend(d time.Duration) { m.r.Wall, m.r.Boot = m.r.Wall.Add(d), m.r.Boot+d }
func (m *machine) step(d time.Duration)    { m.r.Wall = m.r.Wall.Add(d) }

func TestDetector(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(*machine)
		want []string
	}{
		{"nothing", func(m *machine) { m.run(time.Hour) }, nil},
		{"suspend", func(m *machine) { m.run(time.Second); m.suspend(8 * time.Hour); m.run(time.Second) },
			[]string{"the machine was suspended for 8h0m0s"}},
		{"forward", func(m *machine) { m.step(time.Hour) }, []string{"the wall clock was set forward by 1h0m0s"}},
		{"back", func(m *machine) { m.step(-time.Hour) }, []string{"the wall clock was set back by 1h0m0s"}},
		{"both", func(m *machine) { m.suspend(time.Minute); m.step(-time.Hour) },
			[]string{"the machine was suspended for 1m0s", "the wall clock was set back by 1h0m0s"}},
		{"hardware clock stood still", func(m *machine) { m.suspend(time.Minute); m.step(-time.Minute) },
			[]string{"the machine was suspended for 1m0s", "the wall clock was set back by 1m0s"}},
		{"below the tolerance", func(m *machine) { m.suspend(999 * time.Millisecond); m.step(-999 * time.Millisecond) }, nil},
		{"another boot", func(m *machine) {
			*m = machine{Reading{Wall: m.r.Wall.Add(time.Hour), Boot: time.Second, Mono: time.Second}}
		}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newMachine()
			var d Detector
			if e := d.Observe(m.r); e != nil {
				t.Errorf("the baseline gave %v", e)
			}
			tc.do(m)
			var got []string
			for _, e := range d.Observe(m.r) {
				got = append(got, e.String())
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
			m.run(time.Minute)
			if e := d.Observe(m.r); e != nil {
				t.Errorf("told twice: %v", e)
			}
		})
	}
}

// TestNothingIsLost checks that the sum of the reported steps differs from the
// true sum by less than the tolerance, whatever the sizes of the steps, and that
// suspends are reported exactly.
func TestNothingIsLost(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		m := newMachine()
		var d Detector
		d.Observe(m.r)
		first := m.r
		var ran, slept, stepped, toldSlept, toldStepped time.Duration
		for range rapid.IntRange(1, 30).Draw(r, "moves") {
			by := time.Duration(rapid.IntRange(1, 3_000_000).Draw(r, "µs")) * time.Microsecond
			switch rapid.SampledFrom([]string{"run", "suspend", "forward", "back"}).Draw(r, "move") {
			case "run":
				m.run(by)
				ran += by
			case "suspend":
				m.suspend(by)
				slept += by
			case "forward":
				m.step(by)
				stepped += by
			case "back":
				m.step(-by)
				stepped -= by
			}
			for _, e := range d.Observe(m.r) {
				if e.Kind == Suspended {
					toldSlept += e.By
				} else {
					toldStepped += e.By
				}
			}
		}
		if off := slept - toldSlept; off < 0 || off >= Tolerance {
			r.Fatalf("slept %v, told %v", slept, toldSlept)
		}
		if off := (stepped - toldStepped).Abs(); off >= Tolerance {
			r.Fatalf("stepped %v, told %v", stepped, toldStepped)
		}
		if got := m.r.Since(first); got != ran+slept {
			r.Fatalf("duration %v, want %v", got, ran+slept)
		}
	})
}

func TestMachine(t *testing.T) {
	a, err := Read()
	errtest.None(t, err)
	b, err := Read()
	errtest.None(t, err)
	if a.Boot <= 0 || a.Mono <= 0 || b.Since(a) < 0 || a.Boot-a.Mono < -Tolerance || a.Wall.Year() < 2020 {
		t.Errorf("read %+v, then %+v", a, b)
	}
}
