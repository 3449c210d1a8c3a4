package guestagent

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/protocol/guest"
)

// Paths in the guest's initramfs.
const (
	ModuleDir  = "/lib/lull" // the modules, and the file "order", which lists them in load order
	PortName   = "lull.0"    // the virtio-serial port of the control channel
	rootDir    = "/newroot"
	upperDir   = "/upper"
	groupDir   = "/sys/fs/cgroup/workload"
	socketPath = "/run/lull.sock"
	bootLimit  = 30 * time.Second // wait for a device to appear
)

// Plan is the boot configuration in the kernel's command line.
type Plan struct {
	Address  netip.Prefix // lull.ip: the guest's address in its network
	Gateway  netip.Addr   // lull.gw
	Resolver netip.Addr   // lull.dns
	Root     string       // lull.root: block device with the workload's files; if empty, the workload runs in the initramfs
	Upper    string       // lull.upper: block device for changes to those files; if empty, changes are kept in memory
	Name     string       // lull.host: host name
	Timer    string       // lull.timer: the timer that the kernel must use; empty accepts any
}

// ParsePlan parses the kernel's command line. It ignores other parameters.
func ParsePlan(cmdline string) (Plan, error) {
	var p Plan
	var errs []error
	for _, w := range strings.Fields(cmdline) {
		k, v, _ := strings.Cut(w, "=")
		var err error
		switch k {
		case "lull.ip":
			p.Address, err = netip.ParsePrefix(v)
		case "lull.gw":
			p.Gateway, err = netip.ParseAddr(v)
		case "lull.dns":
			p.Resolver, err = netip.ParseAddr(v)
		case "lull.root":
			p.Root, err = device(v)
		case "lull.upper":
			p.Upper, err = device(v)
		case "lull.host":
			p.Name = v
		case "lull.timer":
			p.Timer = v
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("cannot use %s of the kernel command line: %w", k, err))
		}
	}
	return p, errors.Join(errs...)
}

func device(name string) (string, error) {
	if !strings.HasPrefix(name, "/dev/") {
		return name, errors.New("want a device")
	}
	return name, nil
}

// Boot initializes the guest as process 1. It returns the configuration for New.
func Boot() (Config, error) {
	if err := mountBasics(); err != nil {
		return Config{}, err
	}
	cmdline, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return Config{}, fmt.Errorf("cannot read the kernel command line: %w", err)
	}
	p, err := ParsePlan(string(cmdline))
	if err != nil {
		return Config{}, err
	}
	if err := checkTimer(p.Timer, timerInUse); err != nil { // before the steps that wait for devices
		return Config{}, err
	}
	if err := loadModules(ModuleDir); err != nil {
		return Config{}, err
	}
	if p.Name != "" {
		if err := unix.Sethostname([]byte(p.Name)); err != nil {
			return Config{}, fmt.Errorf("cannot set the host name: %w", err)
		}
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &openFiles); err != nil {
		return Config{}, fmt.Errorf("cannot raise the limit of open files: %w", err)
	}
	cfg := Config{Init: true, Socket: socketPath, SockEnv: socketPath}
	if err := bringUp("lo", netip.Prefix{}, netip.Addr{}); err != nil {
		return Config{}, err
	}
	if p.Address.IsValid() {
		// The guest's network has no IPv6, and neighbor discovery would only delay
		// a guest that has just been restored. Programs can still listen on [::],
		// and lo has ::1.
		if err := setKernel("net/ipv6/conf/eth0/disable_ipv6", "1"); err != nil {
			return Config{}, err
		}
		if err := bringUp("eth0", p.Address, p.Gateway); err != nil {
			return Config{}, err
		}
	}
	if p.Root != "" {
		if err := mountRoot(p.Root, p.Upper); err != nil {
			return Config{}, err
		}
		cfg.Root, cfg.Socket = rootDir, filepath.Join(rootDir, socketPath)
	}
	// Any user may listen on low ports such as 80, as in containers.
	if err := setKernel("net/ipv4/ip_unprivileged_port_start", "0"); err != nil {
		return Config{}, err
	}
	if _, err := randomPool(); err != nil {
		return Config{}, fmt.Errorf("cannot open the random pool: %w", err)
	}
	if err := writeNames(cmp.Or(cfg.Root, "/"), p); err != nil {
		return Config{}, err
	}
	if err := os.Mkdir(groupDir, 0o755); err == nil || errors.Is(err, os.ErrExist) {
		cfg.Group = groupDir
	}
	cfg.Channel, err = openPort(PortName)
	return cfg, err
}

// timerInUse is the file with the name of the first CPU's timer.
const timerInUse = "/sys/devices/system/clockevents/clockevent0/current_device"

// checkTimer returns an error if the file inUse names another timer than want. It
// accepts any timer if want is empty or the kernel has no such file.
//
// A kernel measures its CPU's timer while it boots. If the host does not let the
// guest run just then, the kernel rejects the timer until the next boot. What it
// uses instead can be wrong by seconds, or stop.
func checkTimer(want, inUse string) error {
	if want == "" {
		return nil
	}
	b, err := os.ReadFile(inUse)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("cannot read the kernel's timer: %w", err)
	}
	if got := strings.TrimSpace(string(b)); got != want {
		return fmt.Errorf("%s: it uses %q instead of %q", guest.TimerRejected, got, want)
	}
	return nil
}

// setKernel sets a kernel parameter below /proc/sys. It ignores one that the kernel
// does not have.
func setKernel(name, value string) error {
	err := os.WriteFile("/proc/sys/"+name, []byte(value), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("cannot set the kernel's %s to %s: %w", name, value, err)
	}
	return nil
}

type mount struct {
	from, to, kind, data string
	flags                uintptr
}

func mountAll(ms []mount) error {
	for _, m := range ms {
		if err := os.MkdirAll(m.to, 0o755); err != nil {
			return fmt.Errorf("cannot mount %s: %w", m.to, err)
		}
		if err := unix.Mount(m.from, m.to, m.kind, m.flags, m.data); err != nil && err != unix.EBUSY {
			return fmt.Errorf("cannot mount %s on %s: %w", m.from, m.to, err)
		}
	}
	return nil
}

const safe = unix.MS_NOSUID | unix.MS_NODEV

func mountBasics() error {
	err := mountAll([]mount{
		{"proc", "/proc", "proc", "", safe | unix.MS_NOEXEC},
		{"sysfs", "/sys", "sysfs", "", safe | unix.MS_NOEXEC},
		{"devtmpfs", "/dev", "devtmpfs", "", unix.MS_NOSUID},
		{"devpts", "/dev/pts", "devpts", "ptmxmode=0666", unix.MS_NOSUID | unix.MS_NOEXEC},
		{"tmpfs", "/run", "tmpfs", "mode=755", safe},
		{"tmpfs", "/tmp", "tmpfs", "mode=1777", safe},
		{"tmpfs", "/dev/shm", "tmpfs", "mode=1777", safe},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", "", safe | unix.MS_NOEXEC},
	})
	for name, to := range map[string]string{"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"} {
		if lerr := os.Symlink("/proc/self/fd"+to, "/dev/"+name); lerr != nil && !errors.Is(lerr, os.ErrExist) {
			err = errors.Join(err, lerr)
		}
	}
	return err
}

// openFiles holds a program's soft and hard limit on open files. Container runtimes
// set the same.
var openFiles = syscall.Rlimit{Cur: 1 << 16, Max: 1 << 19}

// mountRoot mounts the read-only image with a writable layer over it, and the
// kernel's file systems inside. The layer is the disk upper with the changes of
// earlier boots or, if upper is empty, in memory.
func mountRoot(device, upper string) error {
	if err := await(device); err != nil {
		return err
	}
	if err := mountAll([]mount{{device, "/lower", "ext4", "", unix.MS_RDONLY}}); err != nil {
		return err
	}
	if err := mountUpper(upper); err != nil {
		return err
	}
	for _, d := range []string{upperDir + "/data", upperDir + "/work"} {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("cannot make the writable layer: %w", err)
		}
	}
	ms := []mount{{"overlay", rootDir, "overlay", "lowerdir=/lower,upperdir=" + upperDir + "/data,workdir=" + upperDir + "/work", 0}}
	for _, d := range []string{"/proc", "/sys", "/dev", "/run", "/tmp"} {
		ms = append(ms, mount{d, rootDir + d, "", "", unix.MS_BIND | unix.MS_REC})
	}
	return mountAll(ms)
}

// mountUpper mounts the writable layer. It fails if the disk cannot be mounted, so
// that an empty layer never hides existing data.
func mountUpper(device string) error {
	if device == "" {
		return mountAll([]mount{{"tmpfs", upperDir, "tmpfs", "mode=755", 0}})
	}
	if err := errors.Join(await(device), os.MkdirAll(upperDir, 0o755)); err != nil {
		return err
	}
	// With discard, freed blocks are returned to the host. The inode tables of a
	// new disk are already zero, so initializing them would only cause writes.
	if err := unix.Mount(device, upperDir, "ext4", 0, "discard,noinit_itable"); err != nil {
		return fmt.Errorf("cannot mount the guest's writable disk: %w; the kernel says: %s", err, lastOf(kernelLog(), "("+filepath.Base(device)+")"))
	}
	return nil
}

// kernelLog returns the kernel's log, as far as it can be read.
func kernelLog() string {
	b := make([]byte, 256<<10)
	n, err := unix.Klogctl(unix.SYSLOG_ACTION_READ_ALL, b)
	if err != nil {
		return ""
	}
	return string(b[:n])
}

// lastOf returns the last line of log that contains of, or "".
func lastOf(log, of string) (last string) {
	last = "nothing"
	for line := range strings.Lines(log) {
		if _, text, ok := strings.Cut(line, "] "); ok && strings.Contains(text, of) {
			last = strings.TrimSpace(text)
		}
	}
	return last
}

func await(path string) error {
	deadline := time.Now().Add(bootLimit)
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("cannot find %s: it did not appear within %s", path, bootLimit)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// rename gives a cloned guest its own host name and machine id.
func rename(root, name, machine string) error {
	was, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("cannot read the host name: %w", err)
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("cannot set the host name: %w", err)
	}
	r, err := os.OpenRoot(root)
	if err != nil {
		return fmt.Errorf("cannot open the root: %w", err)
	}
	defer r.Close()
	hosts, err := r.ReadFile("etc/hosts")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("cannot read etc/hosts: %w", err)
	}
	for _, f := range []struct{ name, text string }{{"etc/hostname", name + "\n"}, {"etc/machine-id", machine + "\n"},
		{"etc/hosts", strings.ReplaceAll(string(hosts), was, name)}} {
		if err := r.Remove(f.name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("cannot write %s: %w", f.name, err)
		}
		if err := r.WriteFile(f.name, []byte(f.text), 0o644); err != nil {
			return fmt.Errorf("cannot write %s: %w", f.name, err)
		}
	}
	return nil
}

// ownHosts is the prefix of the line in etc/hosts that lull manages.
const ownHosts = "127.0.0.1 localhost "

// writeNames configures the resolver and the guest's own name. It replaces the
// image's resolv.conf, because the guest cannot reach those servers, and keeps the
// image's hosts file.
func writeNames(root string, p Plan) error {
	r, err := os.OpenRoot(root)
	if err != nil {
		return fmt.Errorf("cannot open the root: %w", err)
	}
	defer r.Close()
	if err := r.MkdirAll("etc", 0o755); err != nil {
		return fmt.Errorf("cannot write names: %w", err)
	}
	put := func(name, text string, always bool) error {
		if _, err := r.Stat(name); err == nil && !always {
			return nil
		}
		if err := r.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("cannot write %s: %w", name, err)
		}
		if err := r.WriteFile(name, []byte(text), 0o644); err != nil {
			return fmt.Errorf("cannot write %s: %w", name, err)
		}
		return nil
	}
	if p.Resolver.IsValid() {
		if err := put("etc/resolv.conf", "nameserver "+p.Resolver.String()+"\n", true); err != nil {
			return err
		}
	}
	// The image's hosts file may have lull's entries of the guest that was cloned.
	was, _ := r.ReadFile("etc/hosts") // unreadable means not managed by lull
	return put("etc/hosts", ownHosts+p.Name+"\n", strings.HasPrefix(string(was), ownHosts) && strings.Count(string(was), "\n") == 1)
}

// loadModules loads the modules listed in the file "order", in that order. It
// ignores modules that are already loaded or built in.
func loadModules(dir string) error {
	f, err := os.Open(filepath.Join(dir, "order"))
	if errors.Is(err, os.ErrNotExist) {
		return nil // everything is built in
	}
	if err != nil {
		return fmt.Errorf("cannot read the list of modules: %w", err)
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if err := loadModule(filepath.Join(dir, filepath.Base(sc.Text()))); err != nil {
			return err
		}
	}
	return nil
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("cannot load a module: %w", err)
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && err != unix.EEXIST {
		return fmt.Errorf("cannot load %s: %w", path, err)
	}
	return nil
}

// openPort opens a virtio-serial port by name. It does not wait for the host: while
// the host is disconnected, reads return io.EOF.
func openPort(name string) (*os.File, error) {
	deadline := time.Now().Add(bootLimit)
	for {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			b, err := os.ReadFile(n)
			if err != nil || strings.TrimSpace(string(b)) != name {
				continue
			}
			f, err := os.OpenFile(filepath.Join("/dev", filepath.Base(filepath.Dir(n))), os.O_RDWR|unix.O_NONBLOCK, 0)
			if err != nil {
				return nil, fmt.Errorf("cannot open the control channel: %w", err)
			}
			return f, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("cannot find the control channel: no virtio port is named %s", name)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
