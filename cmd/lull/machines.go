//go:build linux && !portable

package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/core/instance"
	"lull/internal/host"
	"lull/internal/lib/elfcheck"
	"lull/internal/platform/oci"
	"lull/internal/protocol/guest"
	"lull/internal/runtime/microvm"
	"lull/internal/runtime/process"
)

// openMachines returns the microVM runtime. Its Missing lists missing prerequisites.
func openMachines(cfg hostConfig, images *oci.Store, log *slog.Logger, rt *process.Runtime, h func() *host.Host) (*microvm.Runtime, error) {
	if err := guestsFit(); err != nil {
		return nil, err
	}
	layer, err := cfg.layer()
	if err != nil {
		return nil, err
	}
	harness, err := findHelper(cfg.Harness, cfg.Data, harnessName)
	if err != nil {
		return nil, fmt.Errorf("cannot find lull-harness, the guest agent: %w; build it with: make build", err)
	}
	return microvm.New(microvm.Config{Dir: filepath.Join(cfg.Data, "vm"), Harness: harness, FindKernel: func() (string, error) { return findKernel(cfg) }, Images: images, Layer: layer, Log: log,
		Channel: microvm.Channel(cfg.Channel), WhenGone: rt.ContinueWhenGone,
		Machine: func(string) (microvm.Machine, error) { return microvm.Machine{Kind: cfg.Machine}, nil },
		OnExit:  func(id string, run uint64, e instance.Exit) { h().OnExit(id, run, e) },
		OnMessage: func(ctx context.Context, id string, m guest.Message) error {
			return h().FromHarness(ctx, id, m)
		}})
}

// guestsFit returns an error if this machine cannot run guests. Guests are x86-64
// machines that contain the helper program of this machine.
func guestsFit() error {
	if runtime.GOARCH != "amd64" {
		return errors.New("microVMs need an x86-64 machine, and this one is " + runtime.GOARCH)
	}
	return nil
}

// kernelDir returns the directory in which a host looks for a guest kernel of its
// own.
func kernelDir(cfg hostConfig) string { return filepath.Join(cfg.Data, "guest-kernel") }

// findKernel returns the configured guest kernel or, without one, the first that can
// be used.
func findKernel(cfg hostConfig) (string, error) {
	if cfg.Kernel != "" {
		_, err := microvm.FindKernel(cfg.Kernel)
		return cfg.Kernel, err
	}
	for _, dir := range []string{kernelDir(cfg), "/usr/share/lull/guest-kernel", "/"} {
		if k, err := microvm.FindKernel(dir); err == nil && readable(k.Image) {
			return dir, nil
		}
	}
	return "", fmt.Errorf("cannot find a guest kernel in %s, /usr/share/lull/guest-kernel or /boot: fetch Debian's with lull guest-kernel", kernelDir(cfg))
}

func readable(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	return f.Close() == nil
}

//go:embed guest-kernel.sh
var guestKernel string

func (c *cli) guestKernelCommand() *cobra.Command {
	return &cobra.Command{Use: "guest-kernel [DIR]", Short: "Download a kernel for microVMs", Example: "  lull guest-kernel",
		Long: `Download Debian's cloud kernel and unpack it, without installing it, into DIR or where
the running host looks for it. That host uses it at once. Without a running host, the
directory is the one that a host with this environment uses. Needs apt-get and dpkg. On
other systems, set LULL_GUEST_KERNEL to any kernel with virtio.`,
		Args: term.Args(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, a []string) error {
			cfg, _, err := resolve(c.Getenv, "", cmd.Flags())
			if err != nil {
				return term.Usage(err)
			}
			run, rerr := c.runningHost(cmd.Context())
			if rerr == nil {
				cfg.Data = run.DataDir
			}
			dir := append(a, kernelDir(cfg))[0]
			if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil && !os.IsExist(err) {
				return fmt.Errorf("cannot create a directory for the kernel: %w", err)
			}
			sh := exec.CommandContext(cmd.Context(), "sh", "-c", guestKernel, "guest-kernel", dir)
			sh.Stdout, sh.Stderr = c.Err, c.Err
			if err := sh.Run(); err != nil {
				return fmt.Errorf("cannot fetch a guest kernel: %w", err)
			}
			k, err := microvm.FindKernel(dir)
			if err != nil {
				return err
			}
			fmt.Fprintf(c.Out, "%s in %s\n", k.Version, dir)
			if rerr == nil && dir == kernelDir(cfg) {
				fmt.Fprintln(c.Err, "The running host uses it from now on.")
			}
			return nil
		}}
}

// machineFindings checks the prerequisites of microVMs.
func machineFindings(cfg hostConfig) (l term.Findings) {
	if err := guestsFit(); err != nil {
		l.Optional("microvm", err, "", "run programs and containers here")
		return l
	}
	qemu, err := exec.LookPath("qemu-system-x86_64")
	l.Optional("microvm: QEMU", err, qemu, "apt-get install qemu-system-x86")
	harness, file, err := describeHelper(cfg.Harness, cfg.Data, harnessName)
	if file != "" {
		err = elfcheck.Static(file)
	}
	l.Optional("microvm: lull-harness", err, harness, "build it with: make build")
	kernel, err := findKernel(cfg)
	var k microvm.Kernel
	if err == nil {
		if k, err = microvm.FindKernel(kernel); err == nil {
			kernel = k.Version + " in " + kernel
		}
	}
	l.Optional("microvm: guest kernel", err, kernel, "lull guest-kernel")
	if err == nil && k.Version != "" && !k.FUSE {
		l.Optional("microvm: workspaces", errors.New("the guest kernel has no fuse module"), "", "lull guest-kernel")
	}
	mke2fs, err := microvm.FindTool("mke2fs")
	l.Optional("microvm: images of directories, own files", err, mke2fs, "apt-get install e2fsprogs (ext4 images work without it if disk-size is 0)")
	accel, why := microvm.ChooseAccel()
	l.Optional("microvm: accelerator", nil, string(accel)+": "+why, "")
	channel, err := microvm.FindChannel(microvm.Channel(cfg.Channel), k)
	l.Optional("microvm: control channel", err, channel, "modprobe vhost_vsock, or set vm-channel to auto")
	l.Optional("microvm: QEMU runs as", nil, microvm.Privileges(), "")
	if st, err := os.Stat(cfg.Data); err == nil && st.Mode()&fs.ModeDir != 0 {
		if b, err := os.ReadFile(filepath.Join(cfg.Data, "vm", "no-kvm")); err == nil {
			l.Optional("microvm: KVM disabled after failures", nil, string(b), "")
			l.Hint("remove " + filepath.Join(cfg.Data, "vm", "no-kvm") + " to try it again")
		}
	}
	return l
}
