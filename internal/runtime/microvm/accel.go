package microvm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Accel is how QEMU runs the guest's CPU.
type Accel string

// The accelerators.
const (
	KVM Accel = "kvm"
	TCG Accel = "tcg" // software emulation
)

// machineFiles are the directories from which choose reads; tests supply others.
type machineFiles struct{ dev, sys, proc string }

var liveFiles = machineFiles{"/dev", "/sys", "/proc"}

// choose returns the accelerator for this machine and, for display, why. It returns
// KVM only if /dev/kvm opens for reading and writing, and either a KVM module is
// loaded or the CPU has the extensions: on some machines /dev/kvm opens, but no
// stock kernel boots.
func (m machineFiles) choose() (a Accel, why string) {
	f, err := os.OpenFile(filepath.Join(m.dev, "kvm"), os.O_RDWR, 0)
	if err != nil {
		return TCG, "no KVM: " + err.Error()
	}
	f.Close()
	for _, mod := range []string{"kvm_intel", "kvm_amd"} {
		if _, err := os.Stat(filepath.Join(m.sys, "module", mod)); err == nil {
			return KVM, mod + " is loaded"
		}
	}
	if b, err := os.ReadFile(filepath.Join(m.proc, "cpuinfo")); err == nil {
		for line := range strings.Lines(string(b)) {
			if !strings.HasPrefix(line, "flags") {
				continue
			}
			for _, f := range strings.Fields(line) {
				if f == "vmx" || f == "svm" {
					return KVM, "the processor has " + f
				}
			}
			break
		}
	}
	return TCG, "/dev/kvm opens, but neither kvm_intel nor kvm_amd is loaded and the processor shows neither vmx nor svm"
}

// processor returns the model name of the host's CPU, as a guest sees it.
func (m machineFiles) processor() string {
	b, err := os.ReadFile(filepath.Join(m.proc, "cpuinfo"))
	if err != nil {
		return ""
	}
	var out []string
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(line, "model name") || strings.HasPrefix(line, "flags") {
			out = append(out, line)
		}
		if line == "\n" { // all CPUs are the same
			break
		}
	}
	return strings.Join(out, "")
}

// fallbackFile is the file that records that KVM does not work here, and why.
const fallbackFile = "no-kvm"

// accel returns the accelerator to use, and why: because it is configured, because
// KVM has failed here before, or as choose decides.
func (r *Runtime) accel() (Accel, string) {
	if r.cfg.Accel != "" {
		return r.cfg.Accel, "configured"
	}
	if b, err := os.ReadFile(filepath.Join(r.cfg.Dir, fallbackFile)); err == nil {
		return TCG, strings.TrimSpace(string(b))
	}
	return r.files.choose()
}

// kvmBoots reports whether a guest has booted with KVM since this machine started.
// If it has, KVM is not the cause when a later guest does not boot.
func (r *Runtime) kvmBoots() bool {
	b, err := os.ReadFile(filepath.Join(r.cfg.Dir, worksFile))
	return err == nil && string(b) == r.boot
}

// worksFile is the file that records the boot ID of this machine when a guest boots
// with KVM.
const worksFile = "kvm-boot"

func (r *Runtime) noteKVM() {
	if r.kvmBoots() {
		return
	}
	if err := os.WriteFile(filepath.Join(r.cfg.Dir, worksFile), []byte(r.boot), 0o600); err != nil {
		r.log.Warn("cannot record that KVM works here", "err", err)
	}
}

// remember records that KVM has failed, so that later starts do not try it. A user
// who wants them to deletes the file.
func (r *Runtime) remember(cause error) error {
	text := fmt.Sprintf("KVM failed at %s: %v\n", time.Now().Format(time.RFC3339), cause)
	if err := os.WriteFile(filepath.Join(r.cfg.Dir, fallbackFile), []byte(text), 0o600); err != nil {
		return fmt.Errorf("cannot record that KVM does not work: %w", err)
	}
	return nil
}

// errNoBoot means that a guest never answered. If the same guest answers with
// another accelerator, the first one does not work.
var errNoBoot = errors.New("the guest did not answer")

// ChooseAccel returns the accelerator that suits this machine, and why.
func ChooseAccel() (Accel, string) { return liveFiles.choose() }
