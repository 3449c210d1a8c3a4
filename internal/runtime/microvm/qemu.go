package microvm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/runtime/microvm/vnet"
)

// runRecord contains everything that a daemon needs to adopt a run. It is
// written to disk before QEMU starts.
type runRecord struct {
	Run     uint64  `json:"run"`
	LogPath string  `json:"log_path"`
	LogMax  int64   `json:"log_max"`
	Machine Machine `json:"machine"`
	Accel   Accel   `json:"accel"`
	Initrd  string  `json:"initrd"`
	Root    string  `json:"root,omitempty"`
	Layer   bool    `json:"layer,omitempty"` // has its own disk on top of the root (layer.go)
	// Template is the instance whose memory this guest maps copy-on-write.
	// Clone is set until the guest has been given its new identity (clone.go).
	Template string `json:"template,omitempty"`
	Clone    bool   `json:"clone,omitempty"`
	// FilesPort reports whether the guest has a workspace port. Workspace is in the
	// form of instance.ParseWorkspace. A clone without a workspace may still have
	// the port, and then Workspace is empty.
	FilesPort bool   `json:"files_port,omitempty"`
	Workspace string `json:"workspace,omitempty"`
	// CID is the context id of the guest's vsock device, 0 without one. It may
	// differ for each QEMU of the run.
	CID uint32 `json:"cid,omitempty"`
	// AnyTimer makes an emulated guest run even if its kernel rejects its timer.
	AnyTimer bool `json:"any_timer,omitempty"`
}

// restored returns rec without a kernel, for a QEMU that restores its guest's
// memory.
func (rec runRecord) restored() runRecord {
	rec.Initrd = ""
	return rec
}

const recordFile = "run.json"

func readRecord(dir string) (rec runRecord, err error) {
	b, err := os.ReadFile(filepath.Join(dir, recordFile))
	if err != nil {
		return rec, fmt.Errorf("cannot read the record of a virtual machine: %w", err)
	}
	if err := json.Unmarshal(b, &rec); err != nil {
		return rec, fmt.Errorf("cannot read the record of a virtual machine in %s: %w", dir, err)
	}
	return rec, nil
}

// writeRecord replaces the record atomically.
func writeRecord(dir string, rec runRecord) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("cannot encode the record of a virtual machine: %w", err)
	}
	tmp := filepath.Join(dir, recordFile+".new")
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = f.Write(b)
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err == nil {
		err = os.Rename(tmp, filepath.Join(dir, recordFile))
	}
	if err != nil {
		return fmt.Errorf("cannot write the record of a virtual machine: %w", err)
	}
	return nil
}

// Files in an instance's directory.
const (
	qmpSocket   = "qmp.sock"
	goSocket    = "go.sock" // a second monitor, for the shim
	ctlSocket   = "ctl.sock"
	netSocket   = "net.sock"
	filesSocket = "fil.sock"
	memoryFile  = "ram"
	errorsFile  = "qemu.err"
)

// commandLine returns the kernel's command line.
func commandLine(id string, rec runRecord, khz int) string {
	words := []string{"console=ttyS0", "panic=-1", "quiet", "loglevel=3", "init_on_alloc=0", "apparmor=0", "audit=0", "cryptomgr.notests", "lsm=",
		fmt.Sprintf("lull.ip=%s/%d", vnet.Guest, vnet.Subnet.Bits()), "lull.gw=" + vnet.Gateway.String(), "lull.host=" + hostName(id)}
	if rec.Machine.Net != vnet.None {
		words = append(words, "lull.dns="+vnet.Gateway.String())
	}
	if rec.Root != "" {
		words = append(words, "lull.root=/dev/vda")
	}
	if rec.Layer {
		words = append(words, "lull.upper=/dev/vdb")
	}
	if rec.Accel == TCG {
		// Mitigations and address randomization protect nothing in emulation: the
		// CPU is not shared, and the emulator sees the whole memory.
		words = append(words, "nopti", "mitigations=off", "nokaslr",
			// If the host is busy for ten ticks, the kernel would otherwise
			// distrust its timer.
			"no_timer_check",
			// The emulator's TSC is as steady as the guest's other clocks. After a
			// pause the clocks would disagree, and the kernel would abandon the TSC
			// permanently.
			"tsc=reliable", "nowatchdog",
			// The kernel passes unknown parameters to init, the guest agent, as
			// environment variables. In emulation a goroutine often runs for 10 ms,
			// so preempting it has no benefit.
			"GODEBUG=asyncpreemptoff=1")
		if !rec.AnyTimer {
			words = append(words, "lull.timer=lapic")
		}
	}
	if (rec.Machine.Kind == "microvm" || rec.Accel == TCG) && khz > 0 {
		// Without this the kernel would calibrate the TSC against another clock. On a
		// busy host it would wait indefinitely in a microvm, and elsewhere its clock
		// would be wrong by a few percent, or by a multiple.
		words = append(words, "tsc_early_khz="+strconv.Itoa(khz))
	}
	return strings.Join(words, " ")
}

// hostName returns a name valid both on the kernel's command line and in DNS.
func hostName(id string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(id))
}

// openFile returns the path by which QEMU opens inherited descriptor n.
func openFile(n int) string { return "/proc/self/fd/" + strconv.Itoa(n) }

// arguments returns QEMU's arguments. QEMU listens on its sockets, so that a
// later daemon can connect as well.
func (r *Runtime) arguments(id string, rec runRecord) []string {
	m := rec.Machine
	socket := func(name string, n int) string {
		return "socket,id=" + name + ",fd=" + strconv.Itoa(n) + ",server=on,wait=off"
	}
	share := "on"
	if rec.Template != "" {
		share = "off"
	}
	mib := strconv.FormatInt(m.Memory>>20, 10)
	cpu, bus := "host", "-pci"
	machine := "q35,usb=off,vmport=off,smbus=off,sata=off"
	accel := string(rec.Accel)
	if rec.Accel == TCG {
		accel += ",tb-size=" + strconv.Itoa(translated>>20)
		// This CPU is cheaper to emulate than "max" and boots faster. With arat, a
		// timer that also runs while the CPU sleeps, the kernel can go tickless and
		// use finer timers.
		cpu = "qemu64,arat=on"
	}
	if m.Kind == "microvm" {
		machine, bus = "microvm,rtc=on", "-device"
	}
	args := []string{
		"-name", qemuName(r.dir(id)), "-nodefaults", "-no-user-config", "-display", "none",
		"-machine", machine + ",memory-backend=ram", "-accel", accel,
		"-cpu", cpu, "-smp", strconv.Itoa(m.CPUs), "-m", mib,
		"-object", "memory-backend-file,id=ram,size=" + mib + "M,mem-path=" + openFile(ramFile) + ",share=" + share,
		"-global", "virtio-mmio.force-legacy=false",
		// Keep the machine when the guest ends, so that its console can be read.
		"-action", "reboot=shutdown,shutdown=pause",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-chardev", socket("qmp", qmpFile), "-mon", "chardev=qmp,mode=control",
		"-chardev", "ringbuf,id=con,size=" + strconv.Itoa(consoleSize), "-serial", "chardev:con",
		"-device", "virtio-serial" + bus + ",id=vs",
		"-chardev", socket("ctl", ctlFile), "-device", "virtserialport,bus=vs.0,chardev=ctl,name=lull.0",
		"-netdev", "stream,id=n0,server=on,addr.type=fd,addr.str=" + strconv.Itoa(netFile),
		"-device", "virtio-net" + bus + ",netdev=n0,mac=" + vnet.GuestMAC + romless(bus),
		"-object", "rng-builtin,id=rng", "-device", "virtio-rng" + bus + ",rng=rng",
	}
	if rec.Initrd != "" {
		args = append(args, "-kernel", openFile(kernelFile), "-initrd", openFile(initrdFile), "-append", commandLine(id, rec, tscKHz()))
	} else {
		args = append(args, "-S", "-incoming", "defer")
	}
	next := rootFile
	if rec.Root != "" {
		next++
	}
	layer := next
	if rec.Layer {
		next++
	}
	if rec.FilesPort {
		args = append(args, "-chardev", socket("fil", next), "-device", "virtserialport,bus=vs.0,chardev=fil,name=lull.1")
		next++
	}
	if rec.CID != 0 {
		args = append(args, "-device", "vhost-vsock"+bus+",guest-cid="+strconv.FormatUint(uint64(rec.CID), 10)+",vhostfd="+strconv.Itoa(next))
	}
	if rec.Root != "" {
		args = append(args, "-add-fd", "fd="+strconv.Itoa(rootFile)+",set=1", "-drive", "if=none,id=root,format=raw,readonly=on,file=/dev/fdset/1",
			"-device", "virtio-blk"+bus+",drive=root")
	}
	if rec.Layer {
		// A write is durable once the guest has flushed it, and discarded blocks
		// are returned to the host. If the host's disk is full, the guest is
		// stopped until there is space, because an error would lose data that the
		// guest considers written (full.go).
		args = append(args, "-add-fd", "fd="+strconv.Itoa(layer)+",set=2",
			"-drive", "if=none,id=layer,format=raw,cache=writeback,discard=unmap,auto-read-only=off,file=/dev/fdset/2",
			"-device", "virtio-blk"+bus+",drive=layer,werror=enospc,rerror=report")
	}
	return args
}

// romless returns the property that keeps QEMU from loading a boot ROM, which may
// not be installed.
func romless(bus string) string {
	if bus == "-pci" {
		return ",romfile="
	}
	return ""
}

// qemuName returns the name in the command line of an instance's QEMU by which
// findQEMU finds it. Commas, which separate QEMU's options, are doubled.
func qemuName(dir string) string { return "lull in " + strings.ReplaceAll(dir, ",", ",,") }

// spawn starts QEMU unprivileged in its own session, so that it outlives the
// daemon. vsock is the descriptor of its vsock device, or nil.
func (r *Runtime) spawn(id string, rec runRecord, vsock *os.File) (*exec.Cmd, error) {
	files, err := r.open(id, rec)
	if err != nil {
		return nil, err
	}
	defer shut(files)
	if vsock != nil {
		files = append(files[:len(files):len(files)], vsock)
	}
	errs, err := os.OpenFile(filepath.Join(r.dir(id), errorsFile), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("cannot open QEMU's error log: %w", err)
	}
	defer errs.Close()
	// A saved guest does not depend on this monitor.
	monitor, err := listen(filepath.Join(r.dir(id), goSocket))
	if err != nil {
		return nil, fmt.Errorf("cannot listen for QEMU: %w", err)
	}
	defer monitor.Close()
	files = append(files[:len(files):len(files)], monitor)
	args := append(r.arguments(id, rec), "-chardev", "socket,id=go,fd="+strconv.Itoa(2+len(files))+",server=on,wait=off", "-mon", "chardev=go,mode=control")
	cmd := exec.Command(r.parts().qemu, args...)
	cmd.Dir, cmd.Stderr, cmd.ExtraFiles = "/", errs, files
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.SysProcAttr = r.rights.attributes(id, rec.Accel)
	if err := r.rights.start(cmd); err != nil {
		return nil, fmt.Errorf("cannot start %s: %w", r.parts().qemu, err)
	}
	return cmd, nil
}

// complaint returns what an instance's QEMU printed, for use in an error.
func (r *Runtime) complaint(id string) string {
	b, err := os.ReadFile(filepath.Join(r.dir(id), errorsFile))
	if err != nil {
		return ""
	}
	if len(b) > 2000 {
		b = b[len(b)-2000:]
	}
	return strings.TrimSpace(string(b))
}

// process identifies a QEMU by pid and start time.
type process struct {
	pid   int
	start uint64
}

// alive reports whether the process still runs.
func (p process) alive() bool {
	s, state, err := startTime(p.pid)
	return err == nil && s == p.start && state != 'Z'
}

// kill kills the process and waits until it has ended.
func (p process) kill(ctx context.Context) error {
	for p.alive() {
		if err := unix.Kill(p.pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
			return fmt.Errorf("cannot kill process %d: %w", p.pid, err)
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("cannot end process %d: %w", p.pid, context.Cause(ctx))
		}
	}
	return nil
}

// startTime returns a process's start time, in ticks since boot, and its state.
func startTime(pid int) (uint64, byte, error) {
	f, err := statFields(pid)
	if err != nil {
		return 0, 0, err
	}
	n, err := strconv.ParseUint(f[19], 10, 64)
	return n, f[0][0], err
}

// usedTicks returns the CPU time used by all threads of a process.
func usedTicks(pid int) (uint64, error) {
	f, err := statFields(pid)
	if err != nil {
		return 0, err
	}
	user, uerr := strconv.ParseUint(f[11], 10, 64)
	system, serr := strconv.ParseUint(f[12], 10, 64)
	return user + system, errors.Join(uerr, serr)
}

// statFields returns the fields of /proc/PID/stat after the name, beginning
// with the state. There are at least 20.
func statFields(pid int) ([]string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	i := bytes.LastIndexByte(b, ')')
	f := strings.Fields(string(b[i+1:]))
	if i < 0 || len(f) < 20 {
		return nil, fmt.Errorf("cannot read /proc/%d/stat: it has too few fields", pid)
	}
	return f, nil
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("cannot read the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// findQEMU returns the QEMU processes of an instance's directory. It searches
// command lines, so it also finds a QEMU whose daemon died before recording the
// PID.
func findQEMU(dir string) (out []process, err error) {
	mark := []byte("\x00" + qemuName(dir) + "\x00")
	ents, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("cannot list processes: %w", err)
	}
	for _, e := range ents {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err != nil || !bytes.Contains(b, mark) {
			continue
		}
		if start, state, err := startTime(pid); err == nil && state != 'Z' {
			out = append(out, process{pid, start})
		}
	}
	return out, nil
}
