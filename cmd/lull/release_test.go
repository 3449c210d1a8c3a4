package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"lull/internal/lib/programtest"
)

// TestRelease packs a release twice, from files of different age and mode, and gets
// the same bytes. Its programs are small ones in place of lull.
func TestRelease(t *testing.T) {
	if os.Getenv("LULL_SOAK") == "" {
		t.Skip("compiling the packager takes minutes: make soak has it")
	}
	need(t, "dpkg-deb")
	shim := programtest.Build(t, "lull/cmd/lull-shim")
	runs := t.TempDir()
	const answers = "#!/bin/sh\ncase $1 in man) mkdir -p $2; echo .TH LULL 1 >$2/lull.1; echo .TH LULL-AGENT 1 >$2/lull-agent.1;; *) echo $2;; esac\n"
	for _, name := range []string{"lull", "lull-agent"} {
		if err := os.WriteFile(filepath.Join(runs, name), []byte(answers), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	pack := func(at time.Time, umask string) map[string][]byte {
		t.Helper()
		bin, out := t.TempDir(), t.TempDir()
		for _, name := range []string{"lull", "lull-agent"} {
			file := filepath.Join(bin, name)
			if err := programtest.Copy(shim, file); err != nil {
				t.Fatal(err)
			}
			if err := os.Chtimes(file, at, at); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command("bash", "-c", "umask "+umask+`; exec ../../etc/release/build "$@"`, "bash", "v1.2.3", "linux/arm64", bin, out, runs)
		cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=1700000000")
		if said, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, said)
		}
		all := map[string][]byte{}
		for name := range files(t, out) {
			b, err := os.ReadFile(filepath.Join(out, name))
			if err != nil {
				t.Fatal(err)
			}
			all[filepath.Base(name)] = b
		}
		return all
	}
	one, two := pack(time.Unix(1e9, 0), "022"), pack(time.Unix(1.1e9, 0), "077")
	var names []string
	for name, b := range one {
		names = append(names, name)
		if !bytes.Equal(b, two[name]) {
			t.Errorf("%s differs when it is packed again", name)
		}
	}
	slices.Sort(names)
	want := []string{"lull-agent_1.2.3_arm64.deb", "lull_1.2.3_arm64.deb", "lull_1.2.3_linux_arm64.apk", "lull_1.2.3_linux_arm64.cdx.json", "lull_1.2.3_linux_arm64.rpm", "lull_1.2.3_linux_arm64.tar.gz"}
	if !slices.Equal(names, want) {
		t.Errorf("packed %v, want %v", names, want)
	}
	var bill struct{ Components []struct{ PURL string } }
	if err := json.Unmarshal(one["lull_1.2.3_linux_arm64.cdx.json"], &bill); err != nil || len(bill.Components) == 0 {
		t.Errorf("the bill of materials: %v, %d components", err, len(bill.Components))
	}
}
