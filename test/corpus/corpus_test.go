package corpus

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/scaletest"
	"lull/internal/sim/truth"
)

var update = flag.Bool("update", false, "write docs/reference/corpus.md")

const page = "../../docs/reference/corpus.md"

// each is the number of days replayed for each scenario.
const each = 4

// baseSeed is the seed of the days whose figures are on the page.
const baseSeed = 1

// replay replays days through lull. Days of instances and machines are replayed
// one by one, those of workers together in one fleet.
func replay(t *testing.T, days []*trace) []replayed {
	out := make([]replayed, len(days))
	var workers []*trace
	var places []int
	for n, d := range days {
		switch d.place {
		case "host":
			out[n] = onHost(t, d, 0)
		case "agent":
			out[n] = onMachine(t, d)
		default:
			workers, places = append(workers, d), append(places, n)
		}
	}
	if len(workers) > 0 {
		for n, r := range onFleet(t, workers) {
			out[places[n]] = r
		}
	}
	return out
}

// assess scores a replayed day, including the answers of why.
func assess(d *trace, r *replayed) tally {
	x := weigh(d, r.slept, r.timeout)
	x.judged(d, *r)
	return x
}

// report fails the test if lull paused inside labeled use, or if why named the
// cause of fewer than 99 % of the verdicts.
func report(t *testing.T, x tally) {
	t.Helper()
	if x.wrong > 0 {
		t.Errorf("%d pauses inside labeled use", x.wrong)
	}
	if share := float64(x.right) / float64(max(x.verdicts, 1)); share < 0.99 {
		t.Errorf("why named the cause in %.2f %% of %d verdicts", 100*share, x.verdicts)
	}
	if t.Failed() {
		for _, f := range x.faults {
			t.Log(f)
		}
	}
}

// TestCorpus replays the corpus. It checks that nothing is paused inside labeled
// use, that nearly all idle time is found, that why names the causes, and that
// the page with the figures is up to date. With -short it replays one day of each
// scenario.
func TestCorpus(t *testing.T) {
	n := each
	if testing.Short() {
		n = 1
	}
	var days []*trace
	for _, s := range scenarios() {
		for k := range n {
			days = append(days, s.draw(baseSeed, k))
		}
	}
	results := replay(t, days)
	f := &figures{}
	for k, d := range days {
		f.take(d, assess(d, &results[k]))
	}
	report(t, f.all)
	for place, x := range f.places {
		if share := float64(x.right) / float64(x.verdicts); share < 0.999 {
			t.Errorf("%s: why named the cause in %.2f %% of %d verdicts", place, 100*share, x.verdicts)
		}
	}
	if share := f.all.slept.Hours() / f.all.findable.Hours(); share < 0.95 {
		t.Errorf("%.1f %% of the idle time beyond the timeouts was found", 100*share)
	}
	if testing.Short() {
		return
	}
	if len(days) < 200 {
		t.Errorf("%d days", len(days))
	}
	f.others(t, days)
	f.quiet(t, days, results)
	f.unseen(t)
	f.check(t)
}

// TestMoreDays replays new random days in each run. In make soak there are
// hundreds.
func TestMoreDays(t *testing.T) {
	rng := scaletest.Random(t)
	var days []*trace
	all := scenarios()
	for range scaletest.N(t, 12) {
		days = append(days, all[rng.IntN(len(all))].draw(rng.Uint64(), len(days)))
	}
	results := replay(t, days)
	var x tally
	for k, d := range days {
		x.add(assess(d, &results[k]))
	}
	report(t, x)
	t.Logf("%d days, %d pauses, %s of use slept through, %.1f of %.1f idle hours beyond the timeouts found, %d of %d verdicts right",
		x.days, x.pauses, x.lost.Round(time.Second), x.slept.Hours(), x.findable.Hours(), x.right, x.verdicts)
}

// figures are the contents of the page of results.
type figures struct {
	all     tally
	kinds   []kindFigures
	places  map[string]tally
	rules   map[string]map[string]tally // by rule and place
	withOut [2]tally                    // days with held connections: without and with quiet-connection-after
	hidden  []kindFigures               // days with use that no signal shows
}

type kindFigures struct {
	place, name string
	tally
}

func (f *figures) take(d *trace, x tally) {
	f.all.add(x)
	if f.places == nil {
		f.places = map[string]tally{}
	}
	p := f.places[d.place]
	p.add(x)
	f.places[d.place] = p
	n := slices.IndexFunc(f.kinds, func(k kindFigures) bool { return k.place == d.place && k.name == d.kind })
	if n < 0 {
		n, f.kinds = len(f.kinds), append(f.kinds, kindFigures{place: d.place, name: d.kind})
	}
	f.kinds[n].add(x)
}

// held reports whether something on the day keeps an unused instance up for
// long.
func (t *trace) held() bool {
	return t.place == "host" && length(t.spans(held)) > time.Hour
}

// others replays the days with the rules of other tools.
func (f *figures) others(t *testing.T, days []*trace) {
	all, err := blocks()
	errtest.None(t, err)
	f.rules = map[string]map[string]tally{}
	for _, r := range rules {
		f.rules[r.name] = map[string]tally{}
	}
	for _, d := range days {
		o := observe(d, all)
		for _, r := range rules {
			x := f.rules[r.name][d.place]
			x.add(weigh(d, r.sleeps(d, o), r.timeout))
			f.rules[r.name][d.place] = x
		}
	}
}

// quietAfter is the quiet-connection-after of the second replay.
const quietAfter = 5 * time.Minute

// quiet replays the days on which something holds an instance, with
// quiet-connection-after set.
func (f *figures) quiet(t *testing.T, days []*trace, results []replayed) {
	for n, d := range days {
		if !d.held() || d.kind == "scraped service" || d.kind == "bot" || d.kind == "health-checked service" { // these have data more often than every 5 minutes
			continue
		}
		f.withOut[0].add(weigh(d, results[n].slept, time.Minute))
		r := onHost(t, d, quietAfter)
		f.withOut[1].add(weigh(d, r.slept, r.timeout))
	}
	if f.withOut[1].wrong > 0 {
		t.Errorf("%d pauses inside labeled use with quiet-connection-after: %v", f.withOut[1].wrong, f.withOut[1].faults)
	}
}

// unseen replays the days whose use shows in no signal. Each kind must have a
// false pause; otherwise it belongs to the ordinary days.
func (f *figures) unseen(t *testing.T) {
	var days []*trace
	for _, s := range unseenScenarios() {
		for k := range each {
			days = append(days, s.draw(baseSeed, k))
		}
	}
	for k, r := range replay(t, days) {
		if k%each == 0 {
			f.hidden = append(f.hidden, kindFigures{place: days[k].place, name: days[k].kind})
		}
		f.hidden[k/each].add(weigh(days[k], r.slept, r.timeout))
	}
	for _, h := range f.hidden {
		if h.wrong == 0 {
			t.Errorf("%s: no false pause, so it is no limit", h.name)
		}
	}
}

// check writes the page, or compares it with the figures. Some figures depend on
// the moments at which lull probes, so numbers may differ a little.
func (f *figures) check(t *testing.T) {
	text := f.text()
	if *update {
		errtest.None(t, os.WriteFile(page, []byte(text), 0o644))
		return
	}
	old, err := os.ReadFile(page)
	errtest.None(t, err)
	if difference := stale(string(old), text); difference != "" {
		t.Errorf("docs/reference/corpus.md is stale: run make generate. %s", difference)
	}
}

var number = regexp.MustCompile(`\d+(\.\d+)?`)

// stale returns the first difference between two pages, ignoring numbers that
// differ by at most a tenth or 1.
func stale(old, text string) string {
	x, y := strings.Split(old, "\n"), strings.Split(text, "\n")
	if len(x) != len(y) {
		return fmt.Sprintf("It has %d lines, now %d.", len(x), len(y))
	}
	for n := range x {
		if number.ReplaceAllString(x[n], "#") != number.ReplaceAllString(y[n], "#") {
			return fmt.Sprintf("Was %q, is %q.", x[n], y[n])
		}
		a, b := number.FindAllString(x[n], -1), number.FindAllString(y[n], -1)
		for k := range a {
			p, _ := strconv.ParseFloat(a[k], 64)
			q, _ := strconv.ParseFloat(b[k], 64)
			if d := max(p, q) - min(p, q); d > 1 && d > max(p, q)*0.1 {
				return fmt.Sprintf("Was %q, is %q.", x[n], y[n])
			}
		}
	}
	return ""
}

func TestStale(t *testing.T) {
	for _, c := range []struct {
		old, text string
		stale     bool
	}{
		{"| a | 100 |", "| a | 104 |", false},
		{"| a | 100 |", "| a | 112 |", true},
		{"| a | 3 |", "| b | 3 |", true},
		{"| a | 3 |", "| a | 3 |\n", true},
		{"| a | 0 |", "| a | 2 |", true},
	} {
		if got := stale(c.old, c.text) != ""; got != c.stale {
			t.Errorf("%q and %q: stale %t", c.old, c.text, got)
		}
	}
}

// TestLabels checks that the labels of a day add up to a whole day, and that use
// takes precedence over other labels.
func TestLabels(t *testing.T) {
	for _, s := range scenarios() {
		for k := range 3 {
			d := s.draw(7, k)
			used, kept, free := d.spans(use), d.spans(held), d.spans(idleLabel)
			if sum := length(used) + length(kept) + length(free); sum < day-time.Millisecond || sum > day+time.Millisecond {
				t.Errorf("%s: %s of labels", d.name, sum)
			}
			if o := both(used, kept) + both(used, free) + both(kept, free); o > time.Millisecond {
				t.Errorf("%s: labels overlap by %s", d.name, o)
			}
		}
	}
}

// TestWeigh checks that a rule that always sleeps and a rule that never sleeps
// get bad scores.
func TestWeigh(t *testing.T) {
	d := &trace{name: "x", acts: []act{{from: hm(8, 0), to: hm(10, 0), label: use}, {from: hm(9, 0), to: hm(12, 0), label: held}}}
	always := truth.Of(truth.Span{From: at0, To: at0.Add(day)})
	x := weigh(d, always, time.Hour)
	if x.used != 2*time.Hour || x.held != 2*time.Hour || x.idle != 20*time.Hour || x.findable != 18*time.Hour || x.lost != x.used || x.slept != x.idle || x.wrong != 0 {
		t.Errorf("always: %+v", x)
	}
	if x := weigh(d, truth.Of(), time.Hour); x.slept != 0 || x.lost != 0 || x.pauses != 0 {
		t.Errorf("never: %+v", x)
	}
	if x := weigh(d, truth.Of(truth.Span{From: at0.Add(hm(9, 0)), To: at0.Add(hm(9, 1))}), time.Hour); x.wrong != 1 || len(x.faults) != 1 {
		t.Errorf("in use: %+v", x)
	}
}
