package proc

import (
	"time"

	"lull/internal/core/idle"
)

// sectorSize is the unit of /proc/diskstats in bytes, whatever the device's own
// sector size is.
const sectorSize = 512

// diskLine is one block device of /proc/diskstats.
type diskLine struct {
	name            []byte
	read, written   uint64 // bytes
	stacked, memory bool   // built on other devices; in memory or without a medium of its own
}

// parseDiskstats calls each for every line of /proc/diskstats.
func parseDiskstats(b []byte, each func(diskLine)) error {
	for len(b) > 0 {
		var line []byte
		line, b = cutLine(b)
		if len(line) == 0 {
			continue
		}
		cols := line
		var ok bool
		for range 2 { // major, minor
			if _, cols, ok = cutUint(cols); !ok {
				return cannotParse("/proc/diskstats", line)
			}
		}
		var d diskLine
		d.name, cols = cutField(cols)
		var v [7]uint64 // reads, merged, sectors, ms, writes, merged, sectors
		for i := range v {
			if v[i], cols, ok = cutUint(cols); !ok {
				return cannotParse("/proc/diskstats", line)
			}
		}
		if len(d.name) == 0 {
			return cannotParse("/proc/diskstats", line)
		}
		d.read, d.written = v[2]*sectorSize, v[6]*sectorSize
		d.stacked = hasPrefixNumber(d.name, "dm-", "md", "bcache", "drbd", "zd") || nvmePath(d.name)
		d.memory = hasPrefixNumber(d.name, "loop", "ram", "zram", "sr", "fd")
		each(d)
	}
	return nil
}

// hasPrefixNumber reports whether name is one of the prefixes followed by a
// digit or an underscore (md_d0, md_home).
func hasPrefixNumber(name []byte, prefixes ...string) bool {
	for _, p := range prefixes {
		if len(name) > len(p) && string(name[:len(p)]) == p && (digit(name[len(p)]) || name[len(p)] == '_') {
			return true
		}
	}
	return false
}

// nvmePath reports whether name is one path of a multipath disk (nvme0c0n1). The
// disk itself (nvme0n1) counts the same traffic.
func nvmePath(name []byte) bool {
	if len(name) < 5 || string(name[:4]) != "nvme" {
		return false
	}
	i := 4
	for i < len(name) && digit(name[i]) {
		i++
	}
	return i < len(name) && name[i] == 'c'
}

func digit(c byte) bool { return c >= '0' && c <= '9' }

// parentOf returns the name of the disk of which name may be a partition: name
// without its number, and without the p between two numbers. It returns nil if
// name cannot be a partition.
func parentOf(name []byte) []byte {
	i := len(name)
	for i > 0 && digit(name[i-1]) {
		i--
	}
	if i == len(name) || i == 0 {
		return nil
	}
	if i >= 2 && name[i-1] == 'p' && digit(name[i-2]) {
		return name[:i-1]
	}
	if digit(name[i-1]) {
		return nil
	}
	return name[:i]
}

type diskProbe struct {
	file  machineFile
	tally tally
	stack tally // dm, md and similar; used only if no device below them is seen
	win   window
	deep  window
	each  func(diskLine)
}

func (p *diskProbe) reset() {
	p.tally, p.stack = tally{}, tally{}
	p.win.reset()
	p.deep.reset()
}

// note processes one line. A partition follows its disk in /proc/diskstats, so a
// name whose disk is already known is a partition. An xvda1 without an xvda is a
// disk, as on EC2.
func (p *diskProbe) note(d diskLine) {
	t := &p.tally
	if d.stacked {
		t = &p.stack
	}
	dev := t.find(d.name)
	if dev == nil {
		parent := parentOf(d.name)
		part := parent != nil && t.find(parent) != nil
		dev = t.add(d.name, !part && !d.memory)
	}
	t.set(dev, d.read, d.written)
}

func (p *diskProbe) read(now time.Time, perMinute float64) idle.Reading {
	b, err := p.file.read(nil)
	if err != nil {
		return failed(SignalDisk, now, err)
	}
	p.tally.begin()
	p.stack.begin()
	if err := parseDiskstats(b, p.each); err != nil {
		p.reset()
		return idle.NotKnown(SignalDisk, now, err.Error())
	}
	disks, stacked := p.tally.end(), p.stack.end()
	if disks == 0 && stacked > 0 {
		return judgeRate(SignalDisk, now, &p.stack, &p.deep, stacked, perMinute, "")
	}
	return judgeRate(SignalDisk, now, &p.tally, &p.win, disks, perMinute, "no disk")
}
