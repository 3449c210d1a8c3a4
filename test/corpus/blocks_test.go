package corpus

import (
	"bufio"
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// second is the running total of a recording at the end of a second.
type second struct {
	cpu, disk, net float64 // CPU microseconds, disk bytes, network bytes
}

// block is a recording that repeats endlessly.
type block struct{ sums []second } // sums[n] is the total of the first n seconds

// blocks reads the recordings of testdata.
var blocks = sync.OnceValues(func() (map[string]*block, error) {
	names, err := filepath.Glob("testdata/*.csv.gz")
	if err != nil {
		return nil, err
	}
	out := map[string]*block{}
	for _, name := range names {
		b, err := readBlock(name)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		out[strings.TrimSuffix(filepath.Base(name), ".csv.gz")] = b
	}
	return out, nil
})

func readBlock(name string) (*block, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	b := &block{sums: []second{{}}}
	lines := bufio.NewScanner(z)
	lines.Scan() // skip the names of the columns
	for lines.Scan() {
		var cpu, disk, rx, tx float64
		var conns, in, out int
		if _, err := fmt.Sscanf(strings.ReplaceAll(lines.Text(), ",", " "), "%g %g %g %g %d %d %d", &cpu, &disk, &rx, &tx, &conns, &in, &out); err != nil {
			return nil, err
		}
		last := b.sums[len(b.sums)-1]
		b.sums = append(b.sums, second{last.cpu + cpu, last.disk + disk, last.net + rx + tx})
	}
	if len(b.sums) < 60 {
		return nil, fmt.Errorf("%d seconds", len(b.sums)-1)
	}
	return b, lines.Err()
}

// total returns what the recording has used after d. It repeats the recording as
// often as needed.
func (b *block) total(d time.Duration) second {
	n := len(b.sums) - 1
	whole := b.sums[n]
	s := d.Seconds()
	rounds := float64(int(s) / n)
	s -= rounds * float64(n)
	i := int(s)
	part := s - float64(i)
	x := b.sums[i]
	if i < n {
		y := b.sums[i+1]
		x = second{x.cpu + (y.cpu-x.cpu)*part, x.disk + (y.disk-x.disk)*part, x.net + (y.net-x.net)*part}
	}
	return second{rounds*whole.cpu + x.cpu, rounds*whole.disk + x.disk, rounds*whole.net + x.net}
}

// used returns what a load uses between two times of the day.
func (l *load) used(b *block, from, to time.Duration) second {
	from, to = max(from, l.from), min(to, l.to)
	if from >= to {
		return second{}
	}
	x, y := b.total(from-l.from+l.shift), b.total(to-l.from+l.shift)
	scale := l.scale
	if scale == 0 {
		scale = 1
	}
	s := second{(y.cpu - x.cpu) * scale, y.disk - x.disk, y.net - x.net}
	if l.quiet {
		s.net = 0
	}
	if l.memory {
		s.disk = 0
	}
	return s
}

// played returns the sum of what the recordings of a day use between two times.
// alive is the last start of the program, at which its base recording begins.
func (t *trace) played(all map[string]*block, from, to, alive time.Duration) (s second) {
	if from >= to {
		return s
	}
	add := func(l *load) {
		x := l.used(all[l.block], from, to)
		s.cpu, s.disk, s.net = s.cpu+x.cpu, s.disk+x.disk, s.net+x.net
	}
	if t.base != "" {
		add(&load{from: alive, to: 2 * day, block: t.base})
	}
	for i := range t.loads {
		if l := &t.loads[i]; l.from < to && from < l.to {
			add(l)
		}
	}
	for _, f := range t.flows {
		if d := min(to, f.to) - max(from, f.from); d > 0 {
			s.net += f.rate * d.Seconds()
		}
	}
	return s
}

// TestBlocks checks that every recording that a script plays exists, and that the
// CPU time of each recording matches its name: idle or busy.
func TestBlocks(t *testing.T) {
	all, err := blocks()
	if err != nil {
		t.Fatal(err)
	}
	share := func(name string) float64 {
		b := all[name]
		return b.sums[len(b.sums)-1].cpu / float64(len(b.sums)-1) / 1e4
	}
	for _, s := range scenarios() {
		d := s.draw(1, 0)
		for _, l := range append(append([]load{{block: d.base}}, d.loads...), d.lab...) {
			if l.block != "" && all[l.block] == nil {
				t.Errorf("%s plays %q, which was not recorded", d.name, l.block)
			}
		}
	}
	for name := range all {
		if strings.HasSuffix(name, "-idle") && share(name) > 1 {
			t.Errorf("%s uses %.2f %% of a processor", name, share(name))
		}
	}
	for _, name := range []string{"train", "build-c", "build-go", "backup"} {
		if share(name) < 5 {
			t.Errorf("%s uses %.2f %% of a processor", name, share(name))
		}
	}
}
