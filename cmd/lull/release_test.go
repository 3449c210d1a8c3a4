package main

import (
	"debug/elf"
	"debug/macho"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
)

// released returns the directory of a release built by make release, and the version
// in its file names. Building a release takes many minutes, so only make soak does.
func released(t *testing.T) (dist, version string) {
	t.Helper()
	dist = os.Getenv("LULL_RELEASE")
	if dist == "" {
		t.Skip("LULL_RELEASE names no release: make soak builds one")
	}
	found, err := filepath.Glob(filepath.Join(dist, "lull_*_darwin_arm64.tar.gz"))
	if err != nil || len(found) != 1 {
		t.Fatalf("want one release in %s: %v, %v", dist, found, err)
	}
	version, _, _ = strings.Cut(strings.TrimPrefix(filepath.Base(found[0]), "lull_"), "_darwin_")
	return dist, version
}

// sums returns the checksums of a release, after sha256sum has checked them.
func sums(t *testing.T, dist string) map[string]string {
	t.Helper()
	cmd := exec.Command("sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS")
	cmd.Dir = dist
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	all := map[string]string{}
	for line := range strings.Lines(contents(t, filepath.Join(dist, "SHA256SUMS"))) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		all[name] = sum
	}
	return all
}

// TestRelease checks what make release has built: every file exists, is complete, and
// is for its platform. Another clone of the same commit, in a directory with another
// name, must give the same bytes.
func TestRelease(t *testing.T) {
	dist, version := released(t)
	all := sums(t, dist)
	deb := regexp.MustCompile(`_(alpha|beta|rc)`).ReplaceAllString(version, "~$1")
	deb = strings.ReplaceAll(deb, "_", "+")
	var want []string
	for _, arch := range []string{"amd64", "arm64"} {
		for _, kind := range []string{"tar.gz", "cdx.json", "rpm", "apk", "oci.tar"} {
			want = append(want, "lull_"+version+"_linux_"+arch+"."+kind)
		}
		want = append(want, "lull_"+version+"_darwin_"+arch+".tar.gz", "lull_"+version+"_darwin_"+arch+".cdx.json",
			"lull_"+deb+"_"+arch+".deb", "lull-agent_"+deb+"_"+arch+".deb")
	}
	slices.Sort(want)
	if got := slices.Sorted(maps.Keys(all)); !slices.Equal(got, want) {
		t.Errorf("released %v, want %v", got, want)
	}

	t.Run("programs", func(t *testing.T) {
		for _, platform := range []string{"linux_amd64", "linux_arm64", "darwin_amd64", "darwin_arm64"} {
			programs(t, filepath.Join(dist, "lull_"+version+"_"+platform+".tar.gz"), "lull_"+version+"_"+platform)
			var bill struct{ Components []struct{ PURL string } }
			if err := json.Unmarshal([]byte(contents(t, filepath.Join(dist, "lull_"+version+"_"+platform+".cdx.json"))), &bill); err != nil || len(bill.Components) < 50 {
				t.Errorf("the bill of materials of %s: %v, %d components", platform, err, len(bill.Components))
			}
		}
	})
	t.Run("image", func(t *testing.T) {
		skopeo := need(t, "skopeo")
		for _, arch := range []string{"amd64", "arm64"} {
			for _, kind := range []string{"oci-archive:", "docker-archive:"} {
				var image struct{ Architecture, Os string }
				if err := json.Unmarshal([]byte(sh(t, skopeo, "inspect", kind+filepath.Join(dist, "lull_"+version+"_linux_"+arch+".oci.tar"))), &image); err != nil || image.Architecture != arch || image.Os != "linux" {
					t.Errorf("%s%s: %+v, %v", kind, arch, image, err)
				}
			}
		}
	})
	t.Run("arm64", func(t *testing.T) {
		dir := t.TempDir()
		sh(t, "tar", "-C", dir, "--strip-components=1", "-xzf", filepath.Join(dist, "lull_"+version+"_linux_arm64.tar.gz"))
		emulated(t, filepath.Join(dir, "bin/lull"))
	})
	t.Run("again", func(t *testing.T) {
		clone := filepath.Join(t.TempDir(), "a folder with another name")
		sh(t, "git", "clone", "--quiet", "../..", clone)
		sh(t, "env", "GOCACHE="+t.TempDir(), "make", "-C", clone, "release") // with an empty cache, so that everything is compiled again
		other := sums(t, filepath.Join(clone, "dist"))
		for name, sum := range all {
			if other[name] != sum {
				t.Errorf("%s differs when it is built again", name)
			}
		}
		if len(other) != len(all) {
			t.Errorf("built again it has %d files, want %d", len(other), len(all))
		}
	})
}

// programs checks the programs in a release file, and that manual pages and
// completions are included.
func programs(t *testing.T, file, name string) {
	t.Helper()
	dir := t.TempDir()
	sh(t, "tar", "-C", dir, "-xzf", file)
	dir = filepath.Join(dir, name)
	for _, f := range []string{"bin/lull", "README.md", "CHANGELOG.md", "share/man/man1/lull.1", "share/man/man1/lull-worker-ls.1",
		"share/bash-completion/completions/lull", "share/zsh/site-functions/_lull", "share/fish/vendor_completions.d/lull.fish"} {
		if st, err := os.Stat(filepath.Join(dir, f)); err != nil || st.Size() == 0 {
			t.Errorf("%s of %s: %v", f, name, err)
		}
	}
	lull := filepath.Join(dir, "bin/lull")
	_, err := os.Stat(filepath.Join(dir, "share/man/man1/lull-demo.1"))
	if mac := strings.Contains(name, "darwin"); mac != (err != nil) {
		t.Errorf("%s has a manual page of a verb for Linux: %v", name, err == nil)
	} else if mac {
		f, err := macho.Open(lull)
		errtest.None(t, err)
		defer f.Close()
		cpu, signed := map[bool]macho.Cpu{true: macho.CpuArm64, false: macho.CpuAmd64}[strings.HasSuffix(name, "arm64")], false
		for _, l := range f.Loads {
			signed = signed || f.ByteOrder.Uint32(l.Raw()) == 0x1d // LC_CODE_SIGNATURE
		}
		// macOS on arm64 runs only signed programs; an ad hoc signature is enough.
		if f.Type != macho.TypeExec || f.Cpu != cpu || cpu == macho.CpuArm64 && !signed {
			t.Errorf("%s is %v for %v, signed: %t", name, f.Type, f.Cpu, signed)
		}
		return
	}
	for _, p := range []string{"lull", "lull-agent"} {
		f, err := elf.Open(filepath.Join(dir, "bin", p))
		errtest.None(t, err)
		defer f.Close()
		machine := map[bool]elf.Machine{true: elf.EM_AARCH64, false: elf.EM_X86_64}[strings.HasSuffix(name, "arm64")]
		libs, err := f.ImportedLibraries()
		if f.Machine != machine || err != nil || len(libs) > 0 || slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
			t.Errorf("%s of %s is for %v and needs %v, %v", p, name, f.Machine, libs, err)
		}
	}
}

// TestReleaseVersion checks that the version in each kind of package has the required
// form, and that Debian sorts the versions in the order of the commits.
func TestReleaseVersion(t *testing.T) {
	previous := ""
	for _, c := range []struct{ described, deb, rpm, apk string }{
		{"9abcdef", "0.0.0+git202311142213", "0.0.0_git202311142213", "0.0.0_git202311142213"},
		{"dev", "0.0.0+git202311142213", "0.0.0_git202311142213", "0.0.0_git202311142213"},
		{"v1.2.3-rc1", "1.2.3~rc1", "1.2.3~rc1", "1.2.3_rc1"},
		{"v1.2.3-rc1-2-gabcdef0-dirty", "1.2.3~rc1+p2", "1.2.3~rc1_p2", "1.2.3_rc1_p2"},
		{"v1.2.3", "1.2.3", "1.2.3", "1.2.3"},
		{"v1.2.3-4-gabcdef0", "1.2.3+p4", "1.2.3_p4", "1.2.3_p4"},
		{"v1.2.4", "1.2.4", "1.2.4", "1.2.4"},
	} {
		for kind, want := range map[string]string{"deb": c.deb, "rpm": c.rpm, "apk": c.apk} {
			cmd := exec.Command("../../etc/release/version", c.described, kind)
			cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=1700000000")
			out, err := cmd.Output()
			if got := strings.TrimSpace(string(out)); got != want || err != nil {
				t.Errorf("%s as %s is %q, want %q: %v", c.described, kind, got, want, err)
			}
		}
		if previous != "" {
			sh(t, need(t, "dpkg"), "--compare-versions", previous, "le", c.deb)
		}
		previous = c.deb
	}
}

// TestPortableHelp builds the command line for other systems, with the tag portable
// so that it runs here. It checks that help and manual pages list no verb that only
// Linux has, and that such a verb says so.
func TestPortableHelp(t *testing.T) {
	t.Parallel()
	lull := filepath.Join(t.TempDir(), "lull")
	sh(t, "go", "build", "-trimpath", "-tags", "portable", "-ldflags", "-X main.version="+programtest.Version, "-o", lull, ".")
	pages := t.TempDir()
	sh(t, lull, "man", pages)
	all := files(t, pages)
	for _, verb := range []string{"demo", "doctor", "guest-kernel", "agent run", "agent install", "agent enroll", "config agent", "reference"} {
		if _, ok := all["/lull-"+strings.ReplaceAll(verb, " ", "-")+".1"]; ok {
			t.Errorf("help lists lull %s", verb)
		}
		out, err := exec.Command(lull, append(strings.Fields(verb), "--help")...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "needs Linux") {
			t.Errorf("lull %s: %v\n%s", verb, err, out)
		}
	}
	for _, verb := range []string{"run", "ps", "host ls", "worker ls", "server", "sim", "login", "agent ls"} {
		if _, ok := all["/lull-"+strings.ReplaceAll(verb, " ", "-")+".1"]; !ok {
			t.Errorf("help does not list lull %s", verb)
		}
	}
}
