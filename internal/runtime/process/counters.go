package process

import (
	"slices"
	"strings"
	"sync"

	"lull/internal/platform/proc"
)

// countersFile is part of the path of the file in which a JVM keeps its performance
// counters. countersSize is the usual size of that file. The JVM maps the file and
// updates it many times a second, even if it is idle. Whenever the kernel has
// written the pages back, the next update counts as a write again.
const (
	countersFile = "/hsperfdata_"
	countersSize = 32 << 10
)

// counters determines how many of the bytes that processes write are a JVM's
// performance counters. The zero value is ready for use. It is safe for concurrent
// use.
type counters struct {
	mu   sync.Mutex
	last []counted // by PID
}

// counted is the state of a process at the last sample.
type counted struct {
	pid    int
	io     proc.IO
	upkeep uint64 // cumulative bytes that were only counters
}

// upkeep returns how many of the bytes that a process has written were only a JVM's
// counters. What a process wrote since the last sample counts as that if it made no
// write calls, wrote at most countersSize bytes, and has no other shared file
// mapped. Whatever cannot be read counts as use.
func (c *counters) upkeep(fs *proc.FS, pid int, io proc.IO) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	at, known := slices.BinarySearchFunc(c.last, pid, func(p counted, pid int) int { return p.pid - pid })
	if !known {
		c.last = slices.Insert(c.last, at, counted{})
	}
	old := c.last[at]
	known = known && io.Written >= old.io.Written && io.Calls >= old.io.Calls // otherwise the PID belongs to another process now
	now := counted{pid: pid, io: io}
	if known {
		now.upkeep = old.upkeep
		if n := io.Written - old.io.Written; n > 0 && n <= countersSize && io.Calls == old.io.Calls {
			if files, err := fs.SharedFiles(pid); err == nil && onlyCounters(files) {
				now.upkeep += n
			}
		}
	}
	c.last[at] = now
	return now.upkeep
}

func onlyCounters(files []string) bool {
	return len(files) > 0 && !slices.ContainsFunc(files, func(f string) bool { return !strings.Contains(f, countersFile) })
}

// keep forgets the processes that are not keys of now.
func (c *counters) keep(now map[int]uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = slices.DeleteFunc(c.last, func(p counted) bool { _, ok := now[p.pid]; return !ok })
}
