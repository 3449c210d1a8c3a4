package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

// onARM64 is the init script of a machine that has only busybox and lull.
const onARM64 = `#!/bin/busybox sh
/bin/busybox --install /bin
export PATH=/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mount -t cgroup2 cgroup /sys/fs/cgroup
for d in tmp run var; do mount -t tmpfs $d /$d; done
ip link set lo up
(
	set -ex
	lull version
	lull doctor || test $? = 1
	lull host 2>/tmp/log &
	until lull ps; do sleep 1; done
	lull run -d --name web --expose 8080 --pause-after 1s -- lull demo --serve 127.0.0.1:8080
	until lull ps | grep 'web *paused'; do sleep 1; done
	lull demo --visit 127.0.0.1:8080
	lull events | grep 'resumed *web'
	echo all passed
) 2>&1
poweroff -f
`

// emulated boots Debian's arm64 kernel in emulation, with lull for arm64. It checks
// that the host there pauses a program and that a connection wakes it.
func emulated(t *testing.T, lull string) {
	t.Helper()
	qemu, busybox := need(t, "qemu-system-aarch64"), need(t, "busybox")
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	for _, d := range []string{"state/lists/partial", "cache/archives/partial", "root/bin", "root/proc", "root/sys", "root/dev", "root/tmp", "root/run", "root/var", "root/etc"} {
		errtest.None(t, os.MkdirAll(in(d), 0o755))
	}
	// apt needs separate lists, because the packages are for another
	// architecture.
	apt := func(program string, arg ...string) string {
		t.Helper()
		cmd := exec.Command(program, append([]string{"-q", "-o", "Dir::State=" + in("state"), "-o", "Dir::State::status=/dev/null", "-o", "Dir::Cache=" + in("cache"),
			"-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64", "-o", "APT::Sandbox::User=root"}, arg...)...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v\n%s", program, arg, err, out)
		}
		return string(out)
	}
	apt("apt-get", "update")
	kernel := regexp.MustCompile(`Depends: (linux-image-\d\S*)`).FindStringSubmatch(apt("apt-cache", "depends", "linux-image-cloud-arm64"))
	if kernel == nil {
		t.Fatal("apt knows no kernel for arm64")
	}
	apt("apt-get", "download", kernel[1], "busybox-static")
	sh(t, "sh", "-ec", `cd "$1"; for d in *.deb; do dpkg -x "$d" .; done; cp "$2" bin/busybox root/bin/`, "sh", dir, lull)
	errtest.None(t, os.WriteFile(in("root/init"), []byte(onARM64), 0o755))
	sh(t, "sh", "-ec", `cd "$1/root"; find . | "$2" cpio -o -H newc >../initramfs`, "sh", dir, busybox)
	vmlinuz, err := filepath.Glob(in("boot/vmlinuz-*"))
	if err != nil || len(vmlinuz) != 1 {
		t.Fatalf("kernels: %v, %v", vmlinuz, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, qemu, "-M", "virt", "-cpu", "cortex-a57", "-m", "1024", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
		"-kernel", vmlinuz[0], "-initrd", in("initramfs"), "-append", "console=ttyAMA0 quiet loglevel=3 panic=-1").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "\nall passed") {
		t.Errorf("%v\n%s", err, out)
	}
}
