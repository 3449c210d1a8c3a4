package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

// TestPackages installs the packages of a release in a Debian that debootstrap
// makes: the .deb while systemd runs there as the first process, the .rpm with rpm,
// and the .apk as far as that goes without its own tool.
func TestPackages(t *testing.T) {
	dist, version := released(t)
	if os.Geteuid() != 0 {
		t.Skip("debootstrap needs root")
	}
	base := filepath.Join(t.TempDir(), "debian")
	sh(t, need(t, "debootstrap"), "--variant=minbase", "--include=systemd,systemd-sysv,dbus", "bookworm", base)
	root := func(t *testing.T) string {
		t.Helper()
		dir := filepath.Join(t.TempDir(), "root")
		sh(t, "cp", "-a", base, dir)
		return dir
	}
	name := filepath.Join(dist, "lull_"+version+"_linux_amd64.")
	t.Run("deb", func(t *testing.T) { bootedDeb(t, root(t), dist) })
	t.Run("make", func(t *testing.T) { bootedMake(t, root(t), name+"tar.gz") })
	t.Run("rpm", func(t *testing.T) { installedRPM(t, root(t), name+"rpm") })
	t.Run("apk", func(t *testing.T) { unpackedAPK(t, root(t), name+"apk", name+"rpm") })
}

// allUp has the functions used by the scripts that run in a booted system.
const allUp = `
all_up() {
	until lull ps && lull agent status; do sleep 1; done
	until (exec 3<>/dev/tcp/127.0.0.1/7070 && printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3 && grep -q ' 200 ' <&3); do sleep 1; done
	for u in server host agent; do systemctl is-active lull-$u.service; done
	test $(stat -c %U /proc/$(pid server)) = lull-server
}
no() { if "$@"; then return 1; fi; } # set -e passes over !
all_down() { for u in server host agent; do no systemctl is-active lull-$u.service; done; }
pid() { systemctl show -p MainPID --value lull-$1.service; }
perl_pid() { grep -lx perl /proc/[0-9]*/comm; }
`

// inBoot is the script that runs as root in a system with the .deb.
const inBoot = allUp + `
all_up
systemd-analyze verify --man=no lull-server.service lull-host.service lull-agent.service

# The host pauses a program, and its client is answered.
lull run -d --name web --expose 8080 --pause-after 1s -- perl -MIO::Socket -e '
	$s = IO::Socket::INET->new(LocalAddr => "127.0.0.1:8080", Listen => 9, ReuseAddr => 1) or die;
	while ($c = $s->accept) { print $c "awake\n"; close $c }'
until lull ps | grep 'web *paused'; do sleep 1; done
test "$(cat </dev/tcp/127.0.0.1/8080)" = awake
web=$(perl_pid)

# An upgrade restarts the daemons and keeps programs and changed settings.
echo '# mine' >>/etc/default/lull-host
before="$(pid server) $(pid host) $(pid agent)"
dpkg --install --force-confold /new.deb
all_up
for old in $before; do no kill -0 $old; done
test "$web" = "$(perl_pid)"
grep mine /etc/default/lull-host
lull rm web

# A removal stops them and keeps settings and data, a purge does not.
dpkg --remove lull
all_down
grep mine /etc/default/lull-host
test -e /var/lib/lull/server -a -e /var/lib/lull/host
dpkg --purge lull
test ! -e /etc/default/lull-host -a ! -e /etc/lull/agent.yaml -a ! -e /var/lib/lull

# The agent's own package.
dpkg --install /slim.deb
systemctl enable --now lull-agent.service
until lull agent status; do sleep 1; done
test ! -e /lib/systemd/system/lull-host.service
dpkg --purge lull-agent
test ! -e /var/lib/lull
`

// inMakeInstall is the script that runs make install and make uninstall.
const inMakeInstall = allUp + `
install() { /src/etc/install "$@" '' /usr/local /src/bin; }
install
systemctl enable --now lull-server.service lull-host.service lull-agent.service
all_up
install --remove
all_down
test ! -e /usr/local/bin/lull -a ! -e /etc/systemd/system/multi-user.target.wants/lull-host.service
test -e /var/lib/lull/server -a -e /var/lib/lull/host
`

// bootedMake boots a system and runs inMakeInstall in it.
func bootedMake(t *testing.T, root, programs string) {
	sh(t, "mkdir", filepath.Join(root, "src"))
	sh(t, "cp", "-a", "../../etc", filepath.Join(root, "src/etc"))
	sh(t, "tar", "-C", filepath.Join(root, "src"), "--strip-components=1", "-xzf", programs)
	booted(t, root, inMakeInstall)
}

// bootedDeb boots a system that has the .deb and in which its units are enabled.
func bootedDeb(t *testing.T, root, dist string) {
	deb := func(name string) string {
		found, err := filepath.Glob(filepath.Join(dist, name+"_*_amd64.deb"))
		if err != nil || len(found) != 1 {
			t.Fatalf("%v, %v", found, err)
		}
		return found[0]
	}
	newer := filepath.Join(t.TempDir(), "new")
	sh(t, "dpkg-deb", "-R", deb("lull"), newer)
	sh(t, "sed", "-i", "s/^Version: .*/&+later/", filepath.Join(newer, "DEBIAN/control"))
	sh(t, "dpkg-deb", "-Znone", "-b", newer, filepath.Join(root, "new.deb"))
	sh(t, "cp", deb("lull"), filepath.Join(root, "lull.deb"))
	sh(t, "cp", deb("lull-agent"), filepath.Join(root, "slim.deb"))
	sh(t, "chroot", root, "dpkg", "--install", "/lull.deb")
	for _, u := range []string{"server", "host", "agent"} {
		if out, err := exec.Command("chroot", root, "systemctl", "is-enabled", "lull-"+u+".service").Output(); err == nil {
			t.Errorf("the package enables lull-%s: %s", u, out)
		}
		sh(t, "chroot", root, "systemctl", "enable", "lull-"+u+".service")
	}
	booted(t, root, inBoot)
}

// booted boots a system in a container and runs a script in it. It fails the test at
// the first command that fails.
func booted(t *testing.T, root, script string) {
	t.Helper()
	nspawn := need(t, "systemd-nspawn")
	write := func(name string, mode os.FileMode, text string) {
		t.Helper()
		errtest.None(t, os.WriteFile(filepath.Join(root, name), []byte(text), mode))
	}
	write("check", 0o755, "#!/bin/bash\nexec >/said 2>&1\nset -eEx\ntrap 'systemctl poweroff --no-block' EXIT\n"+script+"\ntouch /passed\n")
	write("etc/systemd/system/check.service", 0o644, "[Unit]\nAfter=lull-server.service lull-host.service lull-agent.service\n[Service]\nExecStart=/check\nTimeoutStopSec=5\n[Install]\nWantedBy=multi-user.target\n")
	sh(t, "chroot", root, "systemctl", "enable", "check.service")
	// The container's control groups are below a group that the test removes.
	group := fmt.Sprint("lull-boot-", os.Getpid())
	t.Cleanup(func() {
		dirs, err := filepath.Glob("/sys/fs/cgroup/*/" + group)
		if err != nil {
			t.Error(err)
		}
		for _, d := range dirs {
			sh(t, "find", d, "-depth", "-type", "d", "-exec", "rmdir", "{}", ";")
		}
	})
	const enter = `for g in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
	[ ! -e $g/cgroup.procs ] || { mkdir -p $g/$1 && echo $$ >$g/$1/cgroup.procs; }
done; shift; exec "$@"`
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	// The host duplicates the sockets of the programs that it pauses. By default,
	// systemd-nspawn does not permit that.
	cmd := exec.CommandContext(ctx, "sh", "-ec", enter, "sh", group, nspawn, "--quiet", "--register=no", "--keep-unit", "--private-network",
		"--system-call-filter=pidfd_getfd", "--console=pipe", "--boot", "-D", root)
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	if err := cmd.Run(); err != nil {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(filepath.Join(root, "passed")); err != nil {
		t.Errorf("%v\n%s", err, contents(t, filepath.Join(root, "said")))
	}
}

// inEvery are files that the .rpm and the .apk must contain.
var inEvery = []string{"/usr/bin/lull", "/usr/bin/lull-agent", "/etc/lull/agent.yaml", "/etc/default/lull-host", "/etc/default/lull-server", "/etc/default/lull-agent",
	"/usr/lib/systemd/system/lull-host.service", "/usr/lib/systemd/system/lull-server.service", "/usr/lib/systemd/system/lull-agent.service", "/usr/lib/sysusers.d/lull.conf",
	"/usr/share/bash-completion/completions/lull", "/usr/share/zsh/site-functions/_lull", "/usr/share/fish/vendor_completions.d/lull.fish", "/usr/share/man/man1/lull.1.gz", "/usr/share/man/man1/lull-agent.1.gz"}

// accounts checks that a package has created the group and the server's user.
func accounts(t *testing.T, root string) {
	t.Helper()
	for file, want := range map[string]string{"etc/group": `(?m)^lull:`, "etc/passwd": `(?m)^lull-server:.*:/var/lib/lull/server:`} {
		if text := contents(t, filepath.Join(root, file)); !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("%s has no %s:\n%s", file, want, text)
		}
	}
}

// installedRPM installs, upgrades and removes the package with rpm.
func installedRPM(t *testing.T, root, file string) {
	rpm := func(arg ...string) string {
		t.Helper()
		return sh(t, need(t, "rpm"), append([]string{"--root", root}, arg...)...)
	}
	copied := filepath.Join(root, "lull.rpm")
	sh(t, "cp", file, copied)
	rpm("--initdb")
	rpm("--install", "--nodeps", copied)
	accounts(t, root)
	in := func(p string) string { return filepath.Join(root, p) }
	for _, f := range inEvery {
		mode := os.FileMode(0o644)
		switch {
		case strings.Contains(f, "/bin/"):
			mode = 0o755
		case f == "/etc/lull/agent.yaml":
			mode = 0o600
		}
		modeIs(t, in(f), mode)
	}
	if out := rpm("--verify", "lull"); out != "" {
		t.Errorf("rpm --verify: %s", out)
	}
	if v := sh(t, "chroot", root, "lull", "version"); !strings.HasPrefix(v, "lull ") {
		t.Errorf("lull version says %q", v)
	}
	const mine = "idle-timeout: 3h\n"
	errtest.None(t, os.WriteFile(in("etc/lull/agent.yaml"), []byte(mine), 0o600))
	data := in("var/lib/lull/server/state")
	errtest.None(t, os.MkdirAll(data, 0o700))
	rpm("--upgrade", "--nodeps", "--replacepkgs", copied)
	if got := contents(t, in("etc/lull/agent.yaml")); got != mine {
		t.Errorf("after an upgrade the policy file is %q", got)
	}
	rpm("--erase", "lull")
	if got := contents(t, in("etc/lull/agent.yaml.rpmsave")); got != mine {
		t.Errorf("after the removal the policy file is %q", got)
	}
	if _, err := os.Stat(data); err != nil {
		t.Error(err)
	}
	for _, f := range inEvery {
		if _, err := os.Stat(in(f)); err == nil {
			t.Errorf("%s outlives the removal", f)
		}
	}
}

// unpackedAPK checks an .apk as apk would: the checksums of its data and of each
// file, and that it has the same files as the .rpm. It is unpacked with GNU tar, and
// its script is run.
func unpackedAPK(t *testing.T, root, file, rpm string) {
	packed := []byte(contents(t, file))
	r, z := bytes.NewReader(packed), new(gzip.Reader)
	// member reads the next gzip stream. It returns the compressed bytes too.
	member := func() (files map[string]*tar.Header, text map[string][]byte, raw []byte) {
		start := len(packed) - r.Len()
		errtest.None(t, z.Reset(r))
		z.Multistream(false)
		files, text = map[string]*tar.Header{}, map[string][]byte{}
		all, err := io.ReadAll(z)
		errtest.None(t, err)
		for tr := tar.NewReader(bytes.NewReader(all)); ; {
			h, err := tr.Next()
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return files, text, packed[start : len(packed)-r.Len()]
			}
			if err != nil {
				t.Fatal(err)
			}
			files["/"+h.Name] = h
			if text["/"+h.Name], err = io.ReadAll(tr); err != nil {
				t.Fatal(err)
			}
		}
	}
	_, control, _ := member()
	files, text, raw := member()
	if r.Len() > 0 {
		t.Errorf("%d bytes follow the data", r.Len())
	}
	info := string(control["/.PKGINFO"])
	for _, want := range []string{"pkgname = lull\n", "arch = x86_64\n", fmt.Sprintf("datahash = %x\n", sha256.Sum256(raw))} {
		if !strings.Contains(info, want) {
			t.Errorf("want %q in\n%s", want, info)
		}
	}
	listed := strings.Fields(sh(t, need(t, "rpm"), "-qlp", rpm))
	for _, f := range slices.Concat(inEvery, listed) {
		h := files[f]
		if h == nil {
			t.Errorf("there is no %s", f)
			continue
		}
		sum := sha1.Sum(text[f])
		if got := h.PAXRecords["APK-TOOLS.checksum.SHA1"]; h.Typeflag == tar.TypeReg && got != hex.EncodeToString(sum[:]) {
			t.Errorf("the sum of %s is %q", f, got)
		}
		if h.Uid != 0 || h.Gid != 0 {
			t.Errorf("%s belongs to %d:%d", f, h.Uid, h.Gid)
		}
	}
	sh(t, "tar", "-C", root, "--warning=no-unknown-keyword", "-xzf", file)
	sh(t, "chroot", root, "/.post-install")
	accounts(t, root)
	if v := sh(t, "chroot", root, "lull", "version"); !strings.HasPrefix(v, "lull ") {
		t.Errorf("lull version says %q", v)
	}
}
