// Package elfcheck checks that a program runs without a dynamic loader and
// libraries, as in a guest that has booted with nothing else.
package elfcheck

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
)

// machines maps the Go architectures that lull is built for to ELF machines.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// Static returns an error unless the file at path is a statically linked program
// for this machine's architecture.
func Static(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		if _, ok := errors.AsType[*fs.PathError](err); ok {
			return err
		}
		return fmt.Errorf("%s is not a program: %w", path, err)
	}
	defer f.Close()
	if want, ok := machines[runtime.GOARCH]; ok && f.Machine != want {
		return fmt.Errorf("%s is built for %s, and this machine is %s", path, f.Machine, runtime.GOARCH)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return fmt.Errorf("%s is dynamically linked (built with CGO_ENABLED=1), but there are no libraries where it will run", path)
		}
	}
	return nil
}
