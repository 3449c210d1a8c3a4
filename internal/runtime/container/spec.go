package container

import (
	"os"
	"strconv"
	"strings"
	"syscall"

	"lull/internal/core/instance"
	"lull/internal/platform/oci"
)

// bundle is the part of an OCI runtime configuration (config.json) that lull sets.
type bundle struct {
	Version  string   `json:"ociVersion"`
	Process  ociProc  `json:"process"`
	Root     ociRoot  `json:"root"`
	Hostname string   `json:"hostname,omitempty"`
	Mounts   []mount  `json:"mounts"`
	Linux    ociLinux `json:"linux"`
	// Annotations keep data for a later daemon.
	Annotations map[string]string `json:"annotations,omitempty"`
}

// stopSignal is the annotation of the program's stop signal.
const stopSignal = "org.opencontainers.image.stopSignal"

type ociProc struct {
	Terminal        bool                `json:"terminal"`
	User            ociUser             `json:"user"`
	Args            []string            `json:"args"`
	Env             []string            `json:"env"`
	Cwd             string              `json:"cwd"`
	Capabilities    map[string][]string `json:"capabilities"`
	NoNewPrivileges bool                `json:"noNewPrivileges"`
}

type ociUser struct {
	UID    int   `json:"uid"`
	GID    int   `json:"gid"`
	Groups []int `json:"additionalGids,omitempty"`
}

type ociRoot struct {
	Path     string `json:"path"`
	Readonly bool   `json:"readonly"`
}

type mount struct {
	Destination string   `json:"destination"`
	Type        string   `json:"type"`
	Source      string   `json:"source"`
	Options     []string `json:"options,omitempty"`
}

type ociLinux struct {
	Namespaces  []namespace `json:"namespaces"`
	CgroupsPath string      `json:"cgroupsPath"`
	Resources   resources   `json:"resources"`
	Masked      []string    `json:"maskedPaths"`
	Readonly    []string    `json:"readonlyPaths"`
	Seccomp     *seccomp    `json:"seccomp,omitempty"`
}

type namespace struct {
	Type string `json:"type"`
}

type resources struct {
	Devices []device `json:"devices"`
	Memory  *memory  `json:"memory,omitempty"`
	CPU     *cpu     `json:"cpu,omitempty"`
}

type device struct {
	Allow  bool   `json:"allow"`
	Access string `json:"access"`
}

type memory struct {
	Limit int64 `json:"limit"`
}

type cpu struct {
	Quota  int64  `json:"quota"`
	Period uint64 `json:"period"`
}

// caps are the capabilities of root inside a container: Docker's defaults.
var caps = []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID",
	"CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE"}

// guestDir is where the directory of LULL_SOCKET is mounted in a container.
const guestDir = "/run/lull"

// plan collects the inputs of a container.
type plan struct {
	workspace instance.Workspace
	below     []string // mount points below the workspace, outer ones first
	launch    instance.Launch
	config    oci.Config // configuration of the image
	user      oci.User
	rootfs    string
	group     string // cgroupsPath
	guests    string // host directory of LULL_SOCKET, empty for none
	limits    bool   // set the limits here because the parent group does not have them
	stop      syscall.Signal
	filter    bool // runc and the kernel support system call filters
}

func (p plan) bundle() bundle {
	l := p.launch
	bounding := map[string][]string{"bounding": caps}
	if p.user.UID == 0 { // other users have no capabilities unless a program grants them
		bounding["effective"], bounding["permitted"] = caps, caps
	}
	b := bundle{Version: "1.0.2", Hostname: l.ID, Root: ociRoot{Path: p.rootfs},
		Process: ociProc{User: ociUser{p.user.UID, p.user.GID, p.user.Groups}, Args: p.args(), Env: p.env(), Cwd: p.config.Dir(p.launch.Dir),
			Capabilities: bounding, NoNewPrivileges: true},
		Mounts: p.mounts(),
		Linux: ociLinux{CgroupsPath: p.group,
			// There is no network namespace: the program listens on the host's
			// ports itself, which is the direct path.
			Namespaces: []namespace{{"pid"}, {"mount"}, {"ipc"}, {"uts"}, {"cgroup"}},
			Resources:  resources{Devices: []device{{false, "rwm"}}},
			Masked: []string{"/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
				"/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap"},
			Readonly: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}}}
	if p.stop != 0 {
		b.Annotations = map[string]string{stopSignal: strconv.Itoa(int(p.stop))}
	}
	if p.filter {
		b.Linux.Seccomp = filter()
	}
	if p.limits && l.Memory > 0 {
		b.Linux.Resources.Memory = &memory{l.Memory}
	}
	if p.limits && l.CPUs > 0 {
		b.Linux.Resources.CPU = &cpu{quota(l.CPUs), period}
	}
	return b
}

// period is the length of a period of the CPU limit, in microseconds.
const period = 100_000

func quota(cpus float64) int64 { return max(int64(cpus*period), 1000) }

func (p plan) args() []string { return p.config.Args(p.launch.Command) }

func (p plan) env() []string {
	own := []string{"LULL_INSTANCE_ID=" + p.launch.ID}
	if p.guests != "" {
		own = append(own, "LULL_SOCKET="+guestDir+"/guest.sock")
	}
	return p.config.Environ(p.user.Home, p.launch.Env, own...)
}

func (p plan) mounts() []mount {
	m := []mount{
		{"/proc", "proc", "proc", []string{"nosuid", "noexec", "nodev"}},
		{"/dev", "tmpfs", "tmpfs", []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{"/dev/pts", "devpts", "devpts", []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"}},
		{"/dev/shm", "tmpfs", "shm", []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
		{"/dev/mqueue", "mqueue", "mqueue", []string{"nosuid", "noexec", "nodev"}},
		{"/sys", "sysfs", "sysfs", []string{"nosuid", "noexec", "nodev", "ro"}},
	}
	for _, f := range []string{"/etc/resolv.conf", "/etc/hosts"} { // the host's network needs the host's name resolution
		if st, err := os.Stat(f); err == nil && st.Mode().IsRegular() {
			m = append(m, mount{f, "bind", f, []string{"bind", "ro", "nosuid", "nodev"}})
		}
	}
	if p.guests != "" {
		m = append(m, mount{guestDir, "bind", p.guests, []string{"bind", "ro", "nosuid", "nodev", "noexec"}})
	}
	if ws := p.workspace; ws.Dir != "" && !ws.ReadOnly {
		m = append(m, mount{ws.Path, "bind", ws.Dir, []string{"rbind", "rw", "nosuid", "nodev"}})
	} else if ws.Dir != "" {
		// "ro" applies to one mount only, so nested mounts are bound separately.
		for _, dir := range append([]string{ws.Dir}, p.below...) {
			m = append(m, mount{ws.Path + strings.TrimPrefix(dir, ws.Dir), "bind", dir, []string{"bind", "ro", "nosuid", "nodev"}})
		}
	}
	return m
}
