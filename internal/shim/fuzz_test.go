package shim

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"lull/internal/protocol/shimctl"
)

// FuzzStateFile checks that a state file with any content is either usable or
// refused with an error that names it.
func FuzzStateFile(f *testing.F) {
	for _, s := range []string{`{"id":"web","run":1,"pid":77,"start":5,"boot_id":"x"}`, `{"id":"../x","run":1,"pid":77}`, `{"id":"web","pid":1,"run":1}`, `{`, ``, `null`} {
		f.Add([]byte(s))
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		path := filepath.Join(dir, "one.json")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		runs, err := loadAll(dir, validRun)
		if len(runs) == 1 == (err != nil) {
			t.Errorf("%q: %+v, %v", b, runs, err)
		}
		for _, r := range runs {
			d := directory{path: dir}
			if r.PID <= 1 || filepath.Dir(d.runFile(r.ID)) != filepath.Join(dir, "runs") {
				t.Errorf("%q was taken as %+v", b, r)
			}
		}
	})
}

func FuzzStart(f *testing.F) {
	f.Add([]byte(`{"id":"web","run":1,"command":["x"],"dir":"/","log_path":"/l"}`))
	f.Add([]byte(`{"id":"web","run":1,"command":[""],"dir":"x"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var m shimctl.Start
		if json.Unmarshal(b, &m) != nil {
			return
		}
		if checkStart(m) == nil && (validID(m.ID) != nil || m.Run == 0 || m.Command[0] == "" || !filepath.IsAbs(m.Dir) || !filepath.IsAbs(m.LogPath)) {
			t.Errorf("%+v was allowed", m)
		}
	})
}

func FuzzAddress(f *testing.F) {
	for _, s := range []string{"127.0.0.1:80", ":80", "[::1]:80", "[fe80::1%lo]:1", "localhost:1", "x:80", "1.2.3.4:99999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if ip, port, _, err := parseAddr(s); err == nil && (!ip.IsValid() || port < 0 || port > 65535) {
			t.Errorf("%q is %v port %d", s, ip, port)
		}
	})
}

func FuzzUser(f *testing.F) {
	f.Add("nobody")
	f.Add("0:0")
	f.Add("1:x")
	f.Fuzz(func(t *testing.T, who string) {
		if uid, gid, _, err := lookup(who); err == nil && (uid < 0 || gid < 0) {
			t.Errorf("%q is %d:%d", who, uid, gid)
		}
	})
}
