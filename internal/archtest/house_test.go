package archtest

import (
	"flag"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"lull/internal/lib/errtest"
)

var update = flag.Bool("update", false, "write docs/reference/topology.md")

// rules is every guard-rail.
var rules = map[string]func(*Tree) []Fault{
	"imports": Imports, "light": Light, "comments": Comments, "names": Names,
	"unfinished": Unfinished, "sleeps": Sleeps, "process": Process,
}

var load = sync.OnceValues(func() (*Tree, error) { return Load(os.DirFS(filepath.Join("..", ".."))) })

func module(t *testing.T) *Tree {
	tree, err := load()
	errtest.None(t, err)
	if tree.Packages["internal/archtest"] == nil || tree.Packages["internal/core/idle"] == nil {
		t.Fatal("the sources were not found")
	}
	return tree
}

func TestModule(t *testing.T) {
	tree := module(t)
	for name, rule := range rules {
		t.Run(name, func(t *testing.T) {
			for _, f := range rule(tree) {
				t.Error(f)
			}
		})
	}
}

func TestTopologyIsFresh(t *testing.T) {
	want := Topology(module(t))
	path := filepath.Join("..", "..", "docs", "reference", "topology.md")
	if *update {
		errtest.None(t, os.MkdirAll(filepath.Dir(path), 0o755))
		errtest.None(t, os.WriteFile(path, []byte(want), 0o644))
	}
	got, err := os.ReadFile(path)
	errtest.None(t, err)
	if d := cmp.Diff(want, string(got)); d != "" {
		t.Errorf("%s is stale, run go test ./internal/archtest -update:\n%s", path, d)
	}
}

// TestRulesBite runs each rule on a file that breaks it and on one that does
// not.
func TestRulesBite(t *testing.T) {
	for _, tc := range []struct {
		rule, path, src string
		want            string // part of the only fault; empty for none
	}{
		{"imports", "internal/core/idle/a.go", `package idle; import _ "lull/internal/lib/task"`, "internal/core/idle may not import internal/lib/task"},
		{"imports", "internal/core/idle/a.go", `package idle; import _ "lull/internal/core/power"`, ""},
		{"imports", "internal/host/a.go", `package host; import _ "lull/internal/agent"`, "may not import internal/agent"},
		{"imports", "internal/host/a.go", `package host; import _ "lull/internal/host/fence"`, ""},
		{"imports", "internal/host/a.go", `package host; import _ "lull/internal/sim/ec2sim"`, "may not import internal/sim/ec2sim"},
		{"imports", "internal/host/a.go", `package host; import _ "lull/internal/platform/proc"`, ""},
		{"imports", "internal/host/a.go", `package host; import _ "lull/internal/host/hosttest"`, "is for tests"},
		{"imports", "internal/host/a_test.go", `package host; import _ "lull/internal/host/hosttest"`, ""},
		{"imports", "internal/sim/ec2sim/a.go", `package ec2sim; import _ "lull/internal/platform/ec2"`, "may not import internal/platform/ec2"},
		{"imports", "internal/platform/ec2/a.go", `package ec2; import _ "lull/internal/platform/imds"`, "may not import internal/platform/imds"},
		{"imports", "internal/runtime/process/a.go", `package process; import _ "lull/internal/platform/cgroup"`, ""},
		{"imports", "internal/runtime/process/a.go", `package process; import _ "lull/internal/runtime/container"`, "may not import"},
		{"imports", "internal/relay/a.go", `package relay; import _ "lull/internal/core/idle"`, "may not import internal/core/idle"},
		{"imports", "internal/lib/task/a.go", `package task; import _ "lull/internal/core/idle"`, "may not import internal/core/idle"},
		{"imports", "internal/shim/a.go", `package shim; import _ "lull/internal/store"`, "may not import internal/store"},
		{"imports", "cmd/lull/a.go", `package main; import _ "lull/internal/sim"`, ""},
		{"imports", "internal/cli/worker/a.go", `package worker; import _ "lull/internal/protocol/control"`, ""},
		{"imports", "internal/cli/worker/a.go", `package worker; import _ "lull/internal/controller"`, "may not import internal/controller"},
		{"imports", "internal/server/a.go", `package server; import _ "lull/internal/cli/term"`, "may not import internal/cli/term"},
		{"imports", "bench/load/a.go", `package main; import _ "lull/internal/cli/term"`, "may not import internal/cli/term"},
		{"imports", "internal/misc/a.go", `package misc`, "cannot place the package"},
		{"light", "cmd/lull-shim/main.go", `package main; import _ "go.etcd.io/etcd/client/v3"`, "cmd/lull-shim must stay small"},
		{"light", "cmd/lull/main.go", `package main; import _ "go.etcd.io/etcd/client/v3"`, ""},
		{"comments", "internal/core/idle/a.go", "package idle", "0 package comments"},
		{"comments", "internal/core/idle/a.go", "// It is idle.\npackage idle", `does not begin with "Package idle "`},
		{"comments", "internal/core/idle/a.go", "// Package idle judges.\npackage idle", ""},
		{"comments", "internal/core/idle/a_test.go", "package idle", ""},
		{"names", "internal/x/a.go", "package util", "package util says nothing"},
		{"names", "internal/x/a.go", "package x; type Manager struct{}", "type Manager says nothing"},
		{"names", "internal/x/a.go", "package x; type HandlerCount int", ""},
		{"unfinished", "internal/x/a.go", "package x // TO" + "DO later", "finish it"},
		{"unfinished", "internal/x/a.go", "package x // to do later", ""},
		{"sleeps", "internal/x/a_test.go", sleeping("", "time.Sleep(1)"), "on the real clock"},
		{"sleeps", "internal/x/a_test.go", sleeping(`; import "testing/synctest"`, "time.Sleep(1)"), "on the real clock"},
		{"sleeps", "internal/x/a_test.go", sleeping(`; import "testing/synctest"`, "t.Run(n, func(t *testing.T) { time.Sleep(1) })"), "on the real clock"},
		{"sleeps", "internal/x/a_test.go", sleeping(`; import "testing/synctest"`, "synctest.Test(t, func(t *testing.T) { time.Sleep(1) })"), ""},
		{"sleeps", "internal/x/a_test.go", sleeping("", "\n// outside a bubble: the kernel's own timer\ntime.Sleep(1)\n"), ""},
		{"sleeps", "internal/x/a_test.go", sleeping("", "\n// outside a bubble:\ntime.Sleep(1)\n"), "on the real clock"},
		{"sleeps", "internal/x/a_test.go", sleeping("", "for !ok() { if time.Now().After(end) { t.Fatal() }; time.Sleep(1) }"), ""},
		{"sleeps", "internal/x/a_test.go", sleeping("", "for !ok() { time.Sleep(1) }"), "on the real clock"},
		{"sleeps", "internal/x/a.go", sleeping("", "time.Sleep(1)"), ""},
		{"process", "internal/x/a.go", `package x; import "os"; var _ = os.Getenv("X")`, "os.Getenv: only cmd"},
		{"process", "cmd/lull/a.go", `package main; import "os"; var _ = os.Getenv("X")`, ""},
	} {
		tree, err := Load(fstest.MapFS{tc.path: {Data: []byte(tc.src)}})
		if err != nil {
			t.Fatalf("%s: %v", tc.src, err)
		}
		faults := rules[tc.rule](tree)
		switch {
		case tc.want == "" && len(faults) > 0:
			t.Errorf("%s on %s: %v", tc.rule, tc.src, faults)
		case tc.want != "" && (len(faults) != 1 || !strings.Contains(faults[0].String(), tc.want)):
			t.Errorf("%s on %s: %v, want %q", tc.rule, tc.src, faults, tc.want)
		}
	}
}

// maxExceptions is the maximum number of exceptions to the law.
const maxExceptions = 5

// TestExceptions checks that the import law has few exceptions, that each has a
// reason, and that each is in use.
func TestExceptions(t *testing.T) {
	if len(exceptions) > maxExceptions {
		t.Errorf("%d exceptions to the import law, at most %d are allowed", len(exceptions), maxExceptions)
	}
	tree := module(t)
	for pair, reason := range exceptions {
		from, to := pair[0], pair[1]
		if strings.Count(reason, " ") < 3 {
			t.Errorf("%s imports %s without a reason: %q", from, to, reason)
		}
		used := false
		if p := tree.Packages[from]; p != nil {
			for _, f := range p.Files {
				f.imports(func(path string, _ token.Pos) { used = used || !f.Test && path == Module+"/"+to })
			}
		}
		if !used {
			t.Errorf("%s does not import %s: drop the exception", from, to)
		}
	}
}

func sleeping(imports, body string) string {
	return `package x; import "testing"; import "time"` + imports + "; func TestX(t *testing.T) { " + body + " }"
}

// TestLightFollowsImports checks that a heavy dependency two packages away is
// found.
func TestLightFollowsImports(t *testing.T) {
	tree, err := Load(fstest.MapFS{
		"cmd/lull-harness/main.go":        {Data: []byte(`package main; import _ "lull/internal/guestagent"`)},
		"internal/guestagent/a.go":        {Data: []byte(`package guestagent; import _ "lull/internal/protocol/guest"`)},
		"internal/guestagent/a_test.go":   {Data: []byte(`package guestagent; import _ "net/http"`)},
		"internal/protocol/guest/a.go":    {Data: []byte(`package guest; import _ "github.com/aws/aws-sdk-go-v2/aws"`)},
		"internal/protocol/testdata/b.go": {Data: []byte(`this is not Go`)},
	})
	if err != nil {
		t.Fatal(err)
	}
	if faults := Light(tree); len(faults) != 2 || faults[0].Where != "internal/protocol/guest/a.go:1" {
		t.Errorf("%v", faults)
	}
	if _, err := Load(fstest.MapFS{"internal/x/a.go": {Data: []byte("no")}}); err == nil || !strings.Contains(err.Error(), "internal/x/a.go") {
		t.Errorf("a file that is not Go: %v", err)
	}
}
