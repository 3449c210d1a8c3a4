package proc

import (
	"os"
	"path/filepath"
	"time"

	"lull/internal/core/idle"
)

// sampled is the value of a growing total at a moment.
type sampled struct {
	at    time.Time
	total uint64 // the part that is measured
	whole uint64 // the total of which it is a part, such as all CPU time; 0 for a rate over time
}

// window keeps two samples, so that a reading soon after another (the fence of a
// stop) still covers a long enough interval.
type window struct {
	least      time.Duration // shortest interval over which a rate is computed
	prev, last sampled
}

func (w *window) reset() { w.prev, w.last = sampled{}, sampled{} }

// since adds s and returns the earlier sample to compare it with. ok is false for
// the first sample, and for a second one that comes sooner than least.
func (w *window) since(s sampled) (base sampled, ok bool) {
	switch {
	case w.last.at.IsZero():
		w.last = s
		return sampled{}, false
	case s.at.Sub(w.last.at) >= w.least:
		w.prev, w.last = w.last, s
		return w.prev, s.at.Sub(w.prev.at) > 0
	case w.prev.at.IsZero():
		return sampled{}, false
	default:
		return w.prev, true
	}
}

const firstSample = "first sample, nothing to compare it with"

// cpuTimes are the ticks of all CPUs since boot, from the first line of
// /proc/stat. Time stolen by the hypervisor is left out, because other machines
// used it. Guest time is already part of user.
type cpuTimes struct {
	busy, idle, iowait uint64
	cpus               int
}

// parseCPU parses the CPU lines of /proc/stat. Old kernels lack the last columns.
func parseCPU(b []byte) (cpuTimes, error) {
	var c cpuTimes
	line, rest := cutLine(b)
	name, cols := cutField(line)
	if string(name) != "cpu" {
		return c, cannotParse("/proc/stat", line)
	}
	var v [7]uint64 // user nice system idle iowait irq softirq
	for i := range v {
		n, r, ok := cutUint(cols)
		if !ok {
			if i >= 4 && len(r) == 0 {
				break
			}
			return c, cannotParse("/proc/stat", line)
		}
		v[i], cols = n, r
	}
	c.busy, c.idle, c.iowait = v[0]+v[1]+v[2]+v[5]+v[6], v[3], v[4]
	for len(rest) > 0 {
		line, rest = cutLine(rest)
		if len(line) < 4 || string(line[:3]) != "cpu" {
			break
		}
		c.cpus++
	}
	return c, nil
}

// cpuComplete reports whether b contains all CPU lines.
func cpuComplete(b []byte) bool {
	for len(b) > 0 {
		var line []byte
		line, b = cutLine(b)
		if len(line) >= 3 && string(line[:3]) != "cpu" {
			return true
		}
	}
	return false
}

type cpuProbe struct {
	file machineFile
	old  cpuTimes
	sum  sampled // grows by the ticks between two reads
	win  window
}

func (p *cpuProbe) reset() { p.old = cpuTimes{}; p.win.reset() }

// read compares the busy CPU time with percent of all CPUs, or with cores if that
// is the lower threshold. One busy core of 128 is 0.8 % of the machine and still
// counts as use.
func (p *cpuProbe) read(now time.Time, percent, cores float64) idle.Reading {
	b, err := p.file.read(cpuComplete)
	if err != nil {
		// Every machine has CPUs, so if their times cannot be read they are
		// unknown, not absent.
		return idle.NotKnown(SignalCPU, now, "cannot read it: "+err.Error())
	}
	c, err := parseCPU(b)
	if err != nil {
		return idle.NotKnown(SignalCPU, now, err.Error())
	}
	if c.cpus > 0 && cores > 0 {
		percent = min(percent, cores*100/float64(c.cpus))
	}
	old := p.old
	p.old = c
	if old != (cpuTimes{}) {
		if c.busy < old.busy {
			p.win.reset()
			return idle.NotKnown(SignalCPU, now, "the counters of /proc/stat went backwards")
		}
		busy := c.busy - old.busy
		p.sum.total += busy
		// Per the kernel's documentation, idle and iowait may decrease.
		p.sum.whole += busy + forward(old.idle, c.idle) + forward(old.iowait, c.iowait)
	}
	p.sum.at = now
	base, ok := p.win.since(p.sum)
	if !ok {
		return idle.NotKnown(SignalCPU, now, firstSample)
	}
	if p.sum.whole <= base.whole {
		return idle.NotKnown(SignalCPU, now, "no tick passed since the last sample")
	}
	used := 100 * float64(p.sum.total-base.total) / float64(p.sum.whole-base.whole)
	return idle.Judge(SignalCPU, used, percent, "%", now.Sub(base.at), now)
}

func forward(old, now uint64) uint64 {
	if now < old {
		return 0
	}
	return now - old
}

// failed returns the reading of a source that could not be read: absent if it
// does not exist, otherwise unknown.
func failed(signal string, now time.Time, err error) idle.Reading {
	r := idle.NotKnown(signal, now, "cannot read it: "+err.Error())
	if missing(err) {
		r.State = idle.Absent
	}
	return r
}

// parseNetDev calls each for every interface of /proc/net/dev, with the bytes it
// received and sent.
func parseNetDev(b []byte, each func(name []byte, rx, tx uint64)) error {
	line, rest := cutLine(b)
	first, _ := cutField(line)
	if len(first) < 6 || string(first[:6]) != "Inter-" {
		return cannotParse("/proc/net/dev", line)
	}
	_, rest = cutLine(rest)
	for len(rest) > 0 {
		line, rest = cutLine(rest)
		if len(line) == 0 {
			continue
		}
		colon := -1
		for i := len(line) - 1; i >= 0; i-- { // search from the end: the name of an alias contains a colon
			if line[i] == ':' {
				colon = i
				break
			}
		}
		if colon < 0 {
			return cannotParse("/proc/net/dev", line)
		}
		name, _ := cutField(line[:colon])
		cols := line[colon+1:]
		var v [9]uint64
		for i := range v {
			n, r, ok := cutUint(cols)
			if !ok || len(name) == 0 {
				return cannotParse("/proc/net/dev", line)
			}
			v[i], cols = n, r
		}
		each(name, v[0], v[8])
	}
	return nil
}

type netProbe struct {
	file  machineFile
	sys   string
	own   func() uint64 // bytes that lull itself transferred
	tally tally
	lastN uint64
	win   window
	each  func(name []byte, rx, tx uint64)
}

func (p *netProbe) reset() { p.tally = tally{}; p.win.reset() }

func (p *netProbe) note(name []byte, rx, tx uint64) {
	d := p.tally.find(name)
	if d == nil {
		d = p.tally.add(name, countsNIC(p.sys, string(name)))
	}
	p.tally.set(d, rx, tx)
}

func (p *netProbe) read(now time.Time, perMinute float64) idle.Reading {
	b, err := p.file.read(nil)
	if err != nil {
		return failed(SignalNetwork, now, err)
	}
	p.tally.begin()
	if err := parseNetDev(b, p.each); err != nil {
		p.reset()
		return idle.NotKnown(SignalNetwork, now, err.Error())
	}
	nics := p.tally.end()
	if p.own != nil {
		n := p.own()
		p.tally.total -= min(n-p.lastN, p.tally.total)
		p.lastN = n
	}
	return judgeRate(SignalNetwork, now, &p.tally, &p.win, nics, perMinute, "no network interface")
}

// judgeRate returns the reading of a tally in bytes per minute, over the measured
// time.
func judgeRate(signal string, now time.Time, t *tally, w *window, devices int, perMinute float64, none string) idle.Reading {
	if t.broken {
		w.reset()
		return idle.NotKnown(signal, now, errReset.Error())
	}
	base, ok := w.since(sampled{at: now, total: t.total})
	if devices == 0 {
		r := idle.NotKnown(signal, now, none)
		r.State = idle.Absent
		return r
	}
	if !ok {
		return idle.NotKnown(signal, now, firstSample)
	}
	var gained uint64
	if t.total > base.total {
		gained = t.total - base.total
	}
	span := now.Sub(base.at)
	return idle.Judge(signal, float64(gained)/span.Minutes(), perMinute, "B/min", span, now)
}

// countsNIC reports whether an interface counts. It returns false for loopback,
// and for bridges, bonds, teams and VLANs, because their traffic also passes an
// interface that counts.
func countsNIC(sys, name string) bool {
	if name == "lo" {
		return false
	}
	dir := filepath.Join(sys, "class/net", name)
	for _, mark := range []string{"bridge", "bonding", "lower_team"} {
		if _, err := os.Stat(filepath.Join(dir, mark)); err == nil {
			return false
		}
	}
	if b, err := os.ReadFile(filepath.Join(dir, "uevent")); err == nil {
		for len(b) > 0 {
			var line []byte
			line, b = cutLine(b)
			switch string(line) {
			case "DEVTYPE=bridge", "DEVTYPE=bond", "DEVTYPE=team", "DEVTYPE=vlan":
				return false
			}
		}
		return true
	}
	for _, prefix := range []string{"docker", "br-", "virbr", "cni", "lxcbr", "lxdbr", "podman"} {
		if len(name) >= len(prefix) && name[:len(prefix)] == prefix {
			return false
		}
	}
	return true
}
