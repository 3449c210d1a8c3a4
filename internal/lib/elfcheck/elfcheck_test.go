package elfcheck

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"lull/internal/lib/errtest"
)

// program returns an ELF file with segments of the given types.
func program(machine elf.Machine, types ...elf.ProgType) []byte {
	var b bytes.Buffer
	h := elf.Header64{Type: uint16(elf.ET_EXEC), Machine: uint16(machine), Version: 1, Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: uint16(len(types))}
	copy(h.Ident[:], elf.ELFMAG+"\x02\x01\x01")
	_ = binary.Write(&b, binary.LittleEndian, h) // a bytes.Buffer cannot fail
	for _, typ := range types {
		_ = binary.Write(&b, binary.LittleEndian, elf.Prog64{Type: uint32(typ)})
	}
	return b.Bytes()
}

func TestStatic(t *testing.T) {
	here, other := machines[runtime.GOARCH], elf.EM_PPC64
	for _, c := range []struct {
		name string
		file []byte
		want string // part of the error; empty for none
	}{
		{"static", program(here, elf.PT_LOAD, elf.PT_NOTE), ""},
		{"dynamic", program(here, elf.PT_LOAD, elf.PT_INTERP), "dynamically linked"},
		{"of another machine", program(other, elf.PT_LOAD), "EM_PPC64"},
		{"a script", []byte("#!/bin/sh\n"), "not a program"},
		{"empty", nil, "not a program"},
	} {
		path := filepath.Join(t.TempDir(), "x")
		errtest.None(t, os.WriteFile(path, c.file, 0o755))
		if err := Static(path); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	if err := Static("/nowhere/x"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// FuzzStatic checks random files. It must not panic.
func FuzzStatic(f *testing.F) {
	f.Add(program(elf.EM_X86_64, elf.PT_LOAD, elf.PT_INTERP))
	f.Fuzz(func(t *testing.T, b []byte) {
		path := filepath.Join(t.TempDir(), "x")
		errtest.None(t, os.WriteFile(path, b, 0o600))
		if Static(path) == nil && !bytes.HasPrefix(b, []byte(elf.ELFMAG)) {
			t.Errorf("%q is a program", b)
		}
	})
}
