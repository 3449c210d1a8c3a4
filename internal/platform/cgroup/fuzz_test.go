package cgroup

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func FuzzEvents(f *testing.F) {
	for _, s := range []string{"populated 1\nfrozen 0\n", "populated 0\nfrozen 1\n", "", "frozen 1", "populated 2\nfrozen x\n", "a b c\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		populated, frozen, err := parseEvents(b)
		if err != nil && (populated && frozen) {
			t.Errorf("an error beside a full answer: %v", err)
		}
		if err == nil && (!strings.Contains(string(b), "populated") || !strings.Contains(string(b), "frozen")) {
			t.Errorf("%q was understood", b)
		}
	})
}

func FuzzUsage(f *testing.F) {
	for _, s := range []string{"usage_usec 12\nuser_usec 1\n", "usage_usec -1\n", "usage_usec 9223372036854775807\n", "usage_usec \n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if d, err := parseUsage(b); err == nil && d < 0 {
			t.Errorf("%q used %v", b, d)
		}
	})
}

func FuzzMounts(f *testing.F) {
	f.Add([]byte("30 24 0:26 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n"), []byte("0::/user.slice\n"))
	f.Add([]byte("31 24 0:27 / /sys/fs/cg\\040roup/freezer rw - cgroup cgroup rw,freezer\n"), []byte("6:freezer:/\n1:cpu,cpuacct:/a\n"))
	f.Add([]byte(" - \n\\"), []byte("::\n"))
	f.Fuzz(func(t *testing.T, mounts, own []byte) {
		l := layout{mounts: parseMounts(mounts), own: parseOwn(own), uid: 1}
		for _, m := range l.mounts {
			if !m.v2 && m.controllers == nil {
				t.Errorf("%+v is no hierarchy", m)
			}
		}
		l.bases("")
		l.bases("freezer")
	})
}

func FuzzID(f *testing.F) {
	for _, s := range []string{"web", "..", "a/b", "cgroup.procs", strings.Repeat("x", 129), "a\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, id string) {
		if validID(id) == nil && filepath.Join("/x", id) != "/x/"+id {
			t.Errorf("%q leaves its directory", id)
		}
	})
}

func TestParse(t *testing.T) {
	mounts := parseMounts([]byte(`24 1 0:22 / /sys rw - sysfs sysfs rw
30 24 0:26 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
31 24 0:27 /docker/1 /sys/fs/cg\040roup/freezer rw - cgroup cgroup rw,freezer
`))
	want := []mount{{root: "/", dir: "/sys/fs/cgroup/unified", v2: true},
		{root: "/docker/1", dir: "/sys/fs/cg roup/freezer", controllers: []string{"rw", "freezer"}}}
	if diff := cmp.Diff(want, mounts, cmp.AllowUnexported(mount{})); diff != "" {
		t.Error(diff)
	}
	l := layout{mounts: mounts, own: parseOwn([]byte("6:freezer:/docker/1/app\n0::/system.slice/lull.service\n")), uid: 0}
	if diff := cmp.Diff([]string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified/system.slice/lull.service"}, l.bases("")); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"/sys/fs/cg roup/freezer", "/sys/fs/cg roup/freezer/app"}, l.bases("freezer")); diff != "" {
		t.Error(diff)
	}
	if d, err := parseUsage([]byte("nr 1\nusage_usec 1500\n")); err != nil || d != 1500*time.Microsecond {
		t.Errorf("parseUsage = %v, %v", d, err)
	}
}
