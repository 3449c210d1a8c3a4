package proc

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// seed adds every fixture file with that name to the corpus, whole and cut in
// two.
func seed(f *testing.F, name string) {
	f.Helper()
	paths, err := filepath.Glob(filepath.Join("testdata/machine/*", name))
	if err != nil || len(paths) == 0 {
		f.Fatalf("no fixture of %s: %v", name, err)
	}
	for _, p := range paths {
		b, err := os.ReadFile(p)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(b[:len(b)/2])
	}
}

func FuzzMachineCPU(f *testing.F) {
	seed(f, "proc/stat")
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := parseCPU(b); err == nil && c.cpus > bytes.Count(b, []byte("\n"))+1 {
			t.Fatalf("%d CPUs in %q", c.cpus, b)
		}
		cpuComplete(b)
	})
}

func FuzzMachineNet(f *testing.F) {
	seed(f, "proc/net/dev")
	f.Fuzz(func(t *testing.T, b []byte) {
		var tl tally
		for range 2 {
			tl.begin()
			err := parseNetDev(b, func(name []byte, rx, tx uint64) {
				if len(name) == 0 {
					t.Fatal("an interface without a name")
				}
				d := tl.find(name)
				if d == nil {
					d = tl.add(name, true)
				}
				tl.set(d, rx, tx)
			})
			if err != nil {
				return
			}
			tl.end()
		}
	})
}

func FuzzMachineDisk(f *testing.F) {
	seed(f, "proc/diskstats")
	f.Fuzz(func(t *testing.T, b []byte) {
		err := parseDiskstats(b, func(d diskLine) {
			if len(d.name) == 0 {
				t.Fatal("a disk without a name")
			}
			if p := parentOf(d.name); p != nil && (len(p) == 0 || !bytes.HasPrefix(d.name, p) || len(p) == len(d.name)) {
				t.Fatalf("%q is a partition of %q", d.name, p)
			}
		})
		if err == nil && len(bytes.TrimSpace(b)) > 0 && bytes.Equal(bytes.TrimSpace(b), []byte("x")) {
			t.Fatalf("%q is read", b)
		}
	})
}

func FuzzUtmp(f *testing.F) {
	seed(f, "var/log/wtmp")
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, l := range []UtmpLayout{UtmpNarrow, UtmpWide} {
			rs := parseUtmp(b, l)
			if len(rs) != len(b)/l.size {
				t.Fatalf("%d records in %d bytes", len(rs), len(b))
			}
			at, _ := newestLogin(rs)
			if !at.IsZero() && (at.Year() < 1970 || at.Year() > 9999) {
				t.Fatalf("a login in %s", at)
			}
			parseLastlog(b, l)
		}
	})
}

func FuzzLoginDatabase(f *testing.F) {
	for _, p := range []string{"testdata/machine/debian13/var/lib/wtmpdb/wtmp.db", "testdata/machine/debian13/var/lib/lastlog/lastlog2.db"} {
		b, err := os.ReadFile(p)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[:min(len(b), 12<<10)])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		started := time.Now()
		for _, parse := range []func(*bytes.Reader) (logins, error){
			func(r *bytes.Reader) (logins, error) { return parseWtmpdb(r, int64(len(b))) },
			func(r *bytes.Reader) (logins, error) { return parseLastlog2(r, int64(len(b))) },
		} {
			l, err := parse(bytes.NewReader(b))
			if err == nil && l.newest.Year() > 9999 {
				t.Fatalf("a login in %s", l.newest)
			}
		}
		if took := time.Since(started); took > 30*time.Second {
			t.Fatalf("took %s", took)
		}
	})
}

func FuzzMachineTCP(f *testing.F) {
	f.Add([]byte("  sl  local_address rem_address   st\n   0: 0100007F:1F90 0200000A:C001 01 00000000:00000000\n"))
	f.Add([]byte("  sl  local_address rem_address   st\n   0: 00000000000000000000000001000000:1F90 00000000000000000000000001000000:C001 01\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		parseTCP(b, func(tcpLine) {})
		parseMeminfo(b)
		processOf(1, b, b)
	})
}
