// Sbom prints the bill of materials of a Go program, as CycloneDX JSON: the
// modules that the linker recorded in it, and Go itself. The same program gives
// the same bytes.
//
//	go run ./bench/sbom -name lull -version 1.2.3 FILE
package main

import (
	"cmp"
	"debug/buildinfo"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
)

type component struct {
	Type    string `json:"type"`
	Name    string `json:"name"`
	Version string `json:"version"`
	PURL    string `json:"purl,omitempty"`
}

type bill struct {
	Format   string `json:"bomFormat"`
	Spec     string `json:"specVersion"`
	Version  int    `json:"version"`
	Metadata struct {
		Component component `json:"component"`
	} `json:"metadata"`
	Components []component `json:"components"`
}

func main() {
	name := flag.String("name", "lull", "name of the program")
	version := flag.String("version", "dev", "version of the program")
	flag.Parse()
	info, err := buildinfo.ReadFile(flag.Arg(0))
	if err == nil {
		e := json.NewEncoder(os.Stdout)
		e.SetIndent("", "  ")
		err = e.Encode(of(info, *name, *version))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

// of returns the bill of materials of a program.
func of(info *debug.BuildInfo, name, version string) bill {
	b := bill{Format: "CycloneDX", Spec: "1.5", Version: 1}
	b.Metadata.Component = component{"application", name, version, ""}
	add := func(path, version string) {
		b.Components = append(b.Components, component{"library", path, version, "pkg:golang/" + path + "@" + version})
	}
	add("stdlib", strings.TrimPrefix(info.GoVersion, "go"))
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		add(m.Path, m.Version)
	}
	slices.SortFunc(b.Components, func(x, y component) int { return cmp.Compare(x.PURL, y.PURL) })
	return b
}
