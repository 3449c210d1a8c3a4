package archtest

import (
	"go/build"
	"path/filepath"
	"strings"
	"testing"
)

// onlyLinux are the packages below internal that need a Linux kernel.
var onlyLinux = []string{"agent", "host", "platform/cgroup", "platform/desktop", "platform/oci", "platform/proc", "platform/sockets", "protocol/shimctl", "relay", "runtime", "shim"}

// TestPortable checks that the command line for macOS carries none of them. That
// it compiles is checked by make build-darwin.
func TestPortable(t *testing.T) {
	tree := module(t)
	darwin := build.Default
	darwin.GOOS, darwin.GOARCH, darwin.CgoEnabled = "darwin", "arm64", false
	carried := map[string]bool{"cmd/lull": true}
	for queue := []string{"cmd/lull"}; len(queue) > 0; queue = queue[1:] {
		for _, f := range tree.Packages[queue[0]].Files {
			dir, name := filepath.Split(filepath.Join("..", "..", f.Path))
			if match, err := darwin.MatchFile(dir, name); err != nil || !match || f.Test {
				if err != nil {
					t.Fatal(err)
				}
				continue
			}
			for _, spec := range f.AST.Imports {
				if to, ok := own(strings.Trim(spec.Path.Value, "\"`")); ok && !carried[to] {
					carried[to] = true
					queue = append(queue, to)
				}
			}
		}
	}
	for dir := range carried {
		for _, p := range onlyLinux {
			if under(dir, "internal/"+p) {
				t.Errorf("lull for macOS carries %s, which is for Linux", dir)
			}
		}
	}
	if !carried["internal/protocol/control"] {
		t.Error("the walk did not find the client of a server")
	}
}
