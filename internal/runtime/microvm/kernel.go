package microvm

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"lull/internal/protocol/guest/vsock"
)

// modules lists what a guest loads, in order: virtio_ring must precede virtio.
// Names ending in "?" are optional.
var modules = []string{"virtio_ring", "virtio", "virtio_mmio?", "virtio_pci_legacy_dev?", "virtio_pci_modern_dev?", "virtio_pci",
	"failover", "net_failover", "virtio_net", "virtio_console", "virtio_blk", "virtio-rng?", "overlay"}

// Kernel is a guest kernel with its modules.
type Kernel struct {
	Image   string   // a bzImage or an ELF vmlinux
	Version string   // version of the modules; empty if the kernel needs none
	Modules []string // files in load order, without built-in modules
	FUSE    bool     // supports workspaces
	Fuse    string   // the module's file; empty if built in
	VSOCK   bool     // supports vsock devices
	Vsock   []string // like Modules
}

// FindKernel reads a tree like that of an unpacked linux-image package:
// boot/vmlinuz-VERSION and lib/modules/VERSION. It picks the newest version; the
// error names what is missing. A plain file is a kernel with everything built in.
func FindKernel(path string) (Kernel, error) {
	st, err := os.Stat(path)
	if err != nil {
		return Kernel{}, fmt.Errorf("cannot find a guest kernel: %w; lull guest-kernel DIR fetches Debian's", err)
	}
	if !st.IsDir() {
		return Kernel{Image: path, VSOCK: true}, nil
	}
	found, err := filepath.Glob(filepath.Join(path, "boot", "vmlinuz-*"))
	if err != nil || len(found) == 0 {
		return Kernel{}, fmt.Errorf("cannot find a guest kernel: %s has no boot/vmlinuz-VERSION; lull guest-kernel DIR fetches Debian's", path)
	}
	image := slices.MaxFunc(found, func(a, b string) int { return slices.CompareFunc(digits(a), digits(b), cmp.Compare) })
	k := Kernel{Image: image, Version: strings.TrimPrefix(filepath.Base(image), "vmlinuz-")}
	dir := filepath.Join(path, "lib", "modules", k.Version)
	files, err := moduleFiles(dir)
	if err != nil {
		return Kernel{}, err
	}
	builtin := builtins(dir)
	var errs []error
	for _, m := range modules {
		name, optional := strings.CutSuffix(m, "?")
		switch f := files[plain(name)]; {
		case f != "":
			k.Modules = append(k.Modules, f)
		case !optional && !builtin[plain(name)]:
			errs = append(errs, fmt.Errorf("cannot use the kernel %s: module %s is neither in %s nor built in", image, name, dir))
		}
	}
	k.Fuse = files["fuse"]
	k.FUSE = k.Fuse != "" || builtin["fuse"]
	k.VSOCK = true
	for _, name := range vsock.Modules {
		f := files[plain(name)]
		if f != "" {
			k.Vsock = append(k.Vsock, f)
		}
		k.VSOCK = k.VSOCK && (f != "" || builtin[plain(name)])
	}
	return k, errors.Join(errs...)
}

// digits returns the numbers in a version, so that 6.1.0-10 sorts after 6.1.0-9.
func digits(s string) (out []int) {
	in := false
	for _, c := range filepath.Base(s) {
		switch {
		case c < '0' || c > '9':
			in = false
		case !in:
			out, in = append(out, int(c-'0')), true
		default:
			out[len(out)-1] = out[len(out)-1]*10 + int(c-'0')
		}
	}
	return out
}

// plain normalizes a module's name.
func plain(name string) string { return strings.ReplaceAll(name, "-", "_") }

func moduleFiles(dir string) (map[string]string, error) {
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name, ok := strings.CutSuffix(d.Name(), ".ko"); ok {
			out[plain(name)] = path
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("cannot read the kernel's modules: %w", err)
	}
	return out, nil
}

func builtins(dir string) map[string]bool {
	out := map[string]bool{}
	f, err := os.Open(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return out
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		out[plain(strings.TrimSuffix(filepath.Base(sc.Text()), ".ko"))] = true
	}
	return out
}
