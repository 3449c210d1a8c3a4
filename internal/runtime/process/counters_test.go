package process

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/platform/proc"
)

// TestCounters checks that a JVM's writes to its mapped counters do not count as
// disk traffic, and that its other writes and the same writes by another program
// do.
func TestCounters(t *testing.T) {
	const jvm = "7f0000000000-7f0000008000 rw-s 00000000 fe:00 42 /tmp/hsperfdata_ada/100\n"
	type step struct{ written, calls uint64 }
	for _, c := range []struct {
		name  string
		maps  string // "" for unreadable
		steps []step
		want  uint64 // bytes of disk traffic at the end
	}{
		{"idle JVM", jvm, []step{{4096, 10}, {8192, 10}, {40960, 10}, {40960, 10}, {45056, 10}}, 4096},
		{"it writes a file", jvm, []step{{4096, 10}, {8192, 4106}, {12288, 4106}}, 8192},
		{"it changes another mapped file", jvm, []step{{4096, 10}, {4096 + 64<<10, 10}}, 4096 + 64<<10},
		{"it could change another file", jvm + "7f1000000000-7f1000008000 rw-s 00000000 fe:00 43 /data/queue\n", []step{{4096, 10}, {8192, 10}}, 8192},
		{"another program", "7f0000000000-7f0000008000 rw-s 00000000 fe:00 42 /data/log\n", []step{{4096, 10}, {8192, 10}}, 8192},
		{"unreadable", "", []step{{4096, 10}, {8192, 10}}, 8192},
		{"the pid is used again", jvm, []step{{40960, 10}, {4096, 5}, {8192, 5}}, 4096},
	} {
		root := t.TempDir()
		fs := proc.At(root)
		dir := filepath.Join(root, "100")
		errtest.None(t, os.MkdirAll(dir, 0o755))
		if c.maps != "" {
			errtest.None(t, os.WriteFile(filepath.Join(dir, "maps"), []byte(c.maps), 0o644))
		}
		var x counters
		var got uint64
		for _, s := range c.steps {
			text := fmt.Sprintf("wchar: %d\nread_bytes: 0\nwrite_bytes: %d\n", s.calls, s.written)
			errtest.None(t, os.WriteFile(filepath.Join(dir, "io"), []byte(text), 0o644))
			io, err := fs.IO(100)
			errtest.None(t, err)
			got = io.Written - x.upkeep(fs, 100, io)
			x.keep(map[int]uint64{100: got})
		}
		if got != c.want {
			t.Errorf("%s: %d bytes of disk traffic, want %d", c.name, got, c.want)
		}
	}
}
