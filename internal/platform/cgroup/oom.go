package cgroup

import (
	"bytes"
	"errors"
	"io/fs"
	"strconv"
)

// OOMKills returns how many processes of the group and its descendants, in every
// hierarchy, the kernel killed because memory ran out. limit is the smallest
// memory limit found, in bytes, 0 for none. A group without a memory controller
// has no count.
func (g *Group) OOMKills() (kills uint64, limit int64, err error) {
	_, dirs, err := g.namesakes()
	if err != nil {
		return 0, 0, err
	}
	for _, dir := range dirs {
		werr := (&Group{dir: dir}).each(func(d string) error {
			// In the unified hierarchy a group's count includes its descendants.
			kills = max(kills, counter(d+"/memory.events", "oom_kill"), counter(d+"/memory.oom_control", "oom_kill"))
			for _, name := range []string{"/memory.max", "/memory.limit_in_bytes"} {
				b, err := readFile(d + name)
				n, perr := strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64)
				if err == nil && perr == nil && n > 0 && n < unlimited && (limit == 0 || n < limit) {
					limit = n
				}
			}
			return nil
		})
		if werr != nil && !errors.Is(werr, fs.ErrNotExist) {
			err = errors.Join(err, g.fail("read", werr))
		}
	}
	return kills, limit, err
}

// unlimited is above any real v1 limit. Where no limit is set, the file contains
// the largest number of whole pages.
const unlimited = 1 << 60

// counter reads a number from a file of name-value lines, 0 if it is missing.
func counter(path, name string) uint64 {
	b, err := readFile(path)
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(b) {
		if v, ok := bytes.CutPrefix(line, []byte(name+" ")); ok {
			n, _ := strconv.ParseUint(string(bytes.TrimSpace(v)), 10, 64) // 0 if not a number
			return n
		}
	}
	return 0
}
