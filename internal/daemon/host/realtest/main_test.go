package realtest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"lull/internal/base/freeport"
)

// bin is the directory of lull, lull-shim and guest.
var bin string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "lull-real")
	if err == nil {
		err = os.Chmod(dir, 0o755) // an ordinary user runs them too
	}
	if err == nil {
		err = build(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cannot build what is tested:", err)
		os.Exit(1)
	}
	bin = dir
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// build puts the programs into dir: fresh ones, or those of LULL_BIN_DIR.
func build(dir string) error {
	given := os.Getenv("LULL_BIN_DIR")
	for _, p := range []string{"lull/cmd/lull", "lull/cmd/lull-shim", "./testdata/guest"} {
		to := filepath.Join(dir, filepath.Base(p))
		if given != "" && p != "./testdata/guest" {
			b, err := os.ReadFile(filepath.Join(given, filepath.Base(p)))
			if err != nil {
				return err
			}
			if err := os.WriteFile(to, b, 0o755); err != nil {
				return err
			}
			continue
		}
		args, cgo := []string{"build", "-o", to}, "0"
		if raceBuild() && p == "lull/cmd/lull" {
			args, cgo = append(args, "-race"), "1"
		}
		cmd := exec.Command("go", append(args, p)...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED="+cgo)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("cannot build %s: %w\n%s", p, err, out)
		}
	}
	return nil
}

func raceBuild() bool { return os.Getenv("LULL_RACE") == "1" }

// count is a number of the environment, or def.
func count(t *testing.T, name string, def int) int {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		return def
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 {
		t.Fatalf("cannot use %s=%q: want a number above 0", name, v)
	}
	return n
}

// random gives a source whose seed is printed and differs per run.
func random(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("LULL_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			t.Fatalf("cannot use LULL_SEED=%q: want a number", v)
		}
		seed = n
	}
	t.Logf("LULL_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// waitFor looks until ok, within limit.
func waitFor(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	if !waits(limit, ok) {
		t.Fatalf("not within %s: %s", limit, what)
	}
}

func waits(limit time.Duration, ok func() bool) bool {
	for end := time.Now().Add(limit); ; {
		if ok() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// stays is true when ok holds at every look for as long as d.
func stays(d time.Duration, ok func() bool) bool {
	return !waits(d, func() bool { return !ok() })
}

// freePort finds a port that nobody uses.
func freePort(t *testing.T) int {
	t.Helper()
	port, err := freeport.Take()
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// ownAddress is an address of this machine that is not loopback.
func ownAddress(t *testing.T) string {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
			return n.IP.String()
		}
	}
	const own = "198.51.100.77"
	if out, err := exec.Command("ip", "addr", "add", own+"/32", "dev", "lo").CombinedOutput(); err != nil {
		t.Skipf("this machine has only loopback addresses, and none can be added: %s", out)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "addr", "del", own+"/32", "dev", "lo").Run() })
	return own
}
