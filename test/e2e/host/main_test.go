package host

import (
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/lib/httpx"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

const nobody = 65534

func TestMain(m *testing.M) {
	daemontest.Main(m, "lull/cmd/lull-harness", "lull/test/e2e/host/testdata/guest")
}

// host starts a daemon for the test.
func host(t *testing.T, args ...string) *daemontest.Host {
	t.Helper()
	return daemontest.Start(t, daemontest.Config{Args: args})
}

// spec returns the spec of an instance that runs the guest program.
func spec(name string, args ...string) instance.Spec {
	return instance.Spec{Name: name, Command: append([]string{daemontest.Program("guest")}, args...), StopAfter: daemontest.Seconds(0)}
}

// web returns the spec of a guest program that serves on an address, directly or
// behind the relay, and the address.
func web(t *testing.T, name string, relay bool, args ...string) (s instance.Spec, listen string) {
	t.Helper()
	listen = daemontest.Addr(t)
	target := listen
	if relay {
		target = daemontest.Addr(t)
	}
	s = spec(name, append([]string{"serve", "-listen", target}, args...)...)
	s.Expose = []instance.Endpoint{{Listen: listen, Target: target}}
	return s, listen
}

// force pauses an instance, even in use. A connection that its client has closed
// and the program has not prevents that for a moment.
func force(d *daemontest.Host, name string) {
	d.T.Helper()
	waittest.NoError(d.T, "pause "+name+" by force", func() error { return d.Force(name) })
}

// hold takes a lease.
func hold(d *daemontest.Host, name, holder string) {
	d.T.Helper()
	if _, err := d.Hold(d.T.Context(), name, hostctl.LeaseRequest{Holder: holder, Reason: "a test", TTL: *daemontest.Seconds(time.Hour)}); err != nil {
		d.T.Fatalf("cannot hold %s: %v", name, err)
	}
}

// refused returns the reason for which a command was refused; "" if it was not
// refused.
func refused(err error) string {
	var p *httpx.Problem
	if errors.As(err, &p) && p.Status == 409 {
		return p.Error()
	}
	return ""
}

// random returns a random number generator. Its seed is logged and differs in
// each run.
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

// ownAddress returns an address of this machine that is not loopback.
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

// port returns the port of an address.
func port(addr string) string {
	_, p, _ := net.SplitHostPort(addr)
	return p
}
