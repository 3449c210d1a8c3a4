package house_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// onlyLinux are packages that speak to a Linux kernel, below Root.
var onlyLinux = []string{"daemon/agent", "daemon/host", "edge/cgroup", "edge/desktop", "edge/oci", "edge/proc", "edge/runtime", "edge/sockets", "link/shimctl", "router", "shim"}

// TestPortable: the command line for macOS carries none of them. That it
// builds is shown by make cross, which make test ends with.
func TestPortable(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", "lull/cmd/lull")
	cmd.Env = append(os.Environ(), "GOOS=darwin", "GOARCH=arm64", "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	for path := range strings.FieldsSeq(string(out)) {
		dir, own := strings.CutPrefix(path, "lull/internal/")
		for _, p := range onlyLinux {
			if own && (dir == p || strings.HasPrefix(dir, p+"/")) {
				t.Errorf("lull for macOS carries %s, which is for Linux", path)
			}
		}
	}
	if !strings.Contains(string(out), "lull/internal/link/control\n") {
		t.Error("the listing has no client of a server")
	}
}
