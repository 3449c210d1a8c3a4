package main

import (
	"debug/elf"
	"testing"
)

func TestPackageOf(t *testing.T) {
	for symbol, want := range map[string]string{
		"lull/internal/host.(*Host).Run":             "lull/internal/host",
		"main.main":                                  "main",
		"gopkg.in/yaml%2ev3.Marshal":                 "gopkg.in/yaml.v3",
		"a/b.F[go.shape.struct { x/y.Z }]":           "a/b",
		"type:.eq.lull/internal/core/idle.Signal":    "type:.eq.lull/internal/core/idle",
		"runtime.etext":                              "runtime",
		"_cgo_init":                                  "",
		"go.etcd.io/bbolt.(*DB).Update.func1.gowrap": "go.etcd.io/bbolt",
	} {
		if got := packageOf(symbol); got != want {
			t.Errorf("%s is of %q, want %q", symbol, got, want)
		}
	}
}

// TestDivide checks that the parts add up to the loaded size, and that the table
// of lines is divided like the code.
func TestDivide(t *testing.T) {
	section := func(name string, kind elf.SectionType, size uint64) *elf.Section {
		return &elf.Section{SectionHeader: elf.SectionHeader{Name: name, Type: kind, Flags: elf.SHF_ALLOC, FileSize: size, Size: size}}
	}
	sections := []*elf.Section{section("", elf.SHT_NULL, 0), section(".text", elf.SHT_PROGBITS, 100), section(".gopclntab", elf.SHT_PROGBITS, 50),
		section(".rodata", elf.SHT_PROGBITS, 40), section(".bss", elf.SHT_NOBITS, 1000)}
	symbols := []elf.Symbol{{Name: "a.F", Section: 1, Size: 60}, {Name: "b/c.G", Section: 1, Size: 20}, {Name: "a.table", Section: 3, Size: 10},
		{Name: "a.zero", Section: 4, Size: 500}, {Name: "type:x", Section: 3, Size: 30}}
	got := divide(symbols, sections, map[string]string{"a": "A", "b/c": "B"})
	// 37 and 12 are the table of 50 bytes, divided in the ratio 60 to 20.
	for module, want := range map[string]int64{"A": 60 + 10 + 37, "B": 20 + 12, other: 190 - 107 - 32} {
		if got[module] != want {
			t.Errorf("%s has %d bytes, want %d", module, got[module], want)
		}
	}
}
