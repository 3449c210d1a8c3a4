// Package etcdtest runs clusters of Debian's etcd-server for tests. Each member
// is a child process on loopback ports with its own directory, and can be killed,
// paused, resumed and restarted.
//
// The package uses HTTP only, so that a test binary does not link etcd. The
// members are connected to each other by Links, so that each can be cut off. A
// test can put Links between the members and its clients too.
package etcdtest

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/lib/freeport"
)

// waitLimit is the time in which a member must become healthy.
const waitLimit = 60 * time.Second

// Cluster is a running cluster. It must be used by one goroutine only.
type Cluster struct {
	t       testing.TB
	members []*member
	known   []string // ids of the members, once requested
}

type member struct {
	link                    *Link // forwards to its peer address
	name, client, peer, dir string
	args                    []string
	cmd                     *exec.Cmd
	log                     *os.File
}

// Require skips the test if etcd-server is not installed. In CI (environment
// CI=true), where everything is installed, it fails the test.
func Require(t testing.TB) string {
	t.Helper()
	for _, name := range []string{"etcd", "/usr/bin/etcd"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	const why = "etcd is not installed (Debian package etcd-server)"
	if os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
	return ""
}

// Start runs a cluster of n members until the test ends, with further arguments
// for each, and waits until it is healthy. CLIENT in an argument is replaced by
// the member's client address (host:port). The URL scheme is https if an
// argument begins with --cert-file.
func Start(t testing.TB, n int, args ...string) *Cluster {
	t.Helper()
	binary := Require(t)
	c := &Cluster{t: t}
	addrs := freeAddrs(t, 2*n)
	var initial []string
	for i := range n {
		m := &member{name: fmt.Sprintf("m%d", i), dir: t.TempDir(), client: "http://" + addrs[2*i], peer: "http://" + addrs[2*i+1], link: NewLink(t, addrs[2*i+1])}
		for _, a := range args {
			if strings.HasPrefix(a, "--cert-file") {
				m.client = "https://" + addrs[2*i]
			}
		}
		initial = append(initial, m.name+"="+m.link.URL())
		c.members = append(c.members, m)
	}
	for i, m := range c.members {
		m.args = []string{
			binary, "--name", m.name, "--data-dir", filepath.Join(m.dir, "data"),
			"--listen-client-urls", m.client, "--advertise-client-urls", m.client,
			"--listen-peer-urls", m.peer, "--initial-advertise-peer-urls", m.link.URL(),
			"--initial-cluster", strings.Join(initial, ","), "--initial-cluster-token", "lull-test",
			"--heartbeat-interval", "50", "--election-timeout", "500", "--logger", "zap",
		}
		for _, a := range args {
			m.args = append(m.args, strings.ReplaceAll(a, "CLIENT", addrs[2*i]))
		}
		c.start(m)
	}
	t.Cleanup(c.stop)
	for i := range c.members {
		c.AwaitHealthy(i)
	}
	return c
}

// freeAddrs returns n unused loopback addresses. They stay reserved while a
// member is down.
func freeAddrs(t testing.TB, n int) []string {
	t.Helper()
	var addrs []string
	for range n {
		port, err := freeport.Take()
		if err != nil {
			t.Fatal(err)
		}
		addrs = append(addrs, net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	}
	return addrs
}

func (c *Cluster) start(m *member) {
	c.t.Helper()
	log, err := os.OpenFile(filepath.Join(m.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		c.t.Fatal(err)
	}
	m.log = log
	m.cmd = exec.Command(m.args[0], m.args[1:]...)
	m.cmd.Stdout, m.cmd.Stderr = log, log
	// The kernel kills the members when the test binary ends, in whatever way.
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := m.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
}

// Endpoints returns the client URLs of the members, in order.
func (c *Cluster) Endpoints() []string {
	var urls []string
	for _, m := range c.members {
		urls = append(urls, m.client)
	}
	return urls
}

// Kill ends member i as kill -9 does.
func (c *Cluster) Kill(i int) {
	c.t.Helper()
	m := c.members[i]
	if m.cmd == nil {
		return
	}
	c.signal(i, syscall.SIGKILL)
	_ = m.cmd.Wait() // reports that the process was killed
	m.cmd = nil
	if err := m.log.Close(); err != nil {
		c.t.Error(err)
	}
}

// Restart starts member i again, with its data, after a Kill.
func (c *Cluster) Restart(i int) {
	c.t.Helper()
	c.Kill(i)
	c.start(c.members[i])
}

// Pause freezes member i. Its connections stay open but silent.
func (c *Cluster) Pause(i int) { c.signal(i, syscall.SIGSTOP) }

// Resume resumes member i.
func (c *Cluster) Resume(i int) { c.signal(i, syscall.SIGCONT) }

func (c *Cluster) signal(i int, s syscall.Signal) {
	c.t.Helper()
	if err := c.members[i].cmd.Process.Signal(s); err != nil {
		c.t.Errorf("cannot signal member %d: %v", i, err)
	}
}

// AwaitHealthy waits until member i answers and belongs to a cluster with a
// leader. With https or users it waits only until the port accepts connections.
func (c *Cluster) AwaitHealthy(i int) {
	c.t.Helper()
	m := c.members[i]
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	for {
		if m.healthy(ctx) {
			return
		}
		select {
		case <-ctx.Done():
			log, err := os.ReadFile(filepath.Join(m.dir, "log"))
			c.t.Fatalf("member %d is not healthy after %v; its log (%v):\n%s", i, waitLimit, err, log[max(0, len(log)-4000):])
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (m *member) healthy(ctx context.Context) bool {
	if addr, ok := strings.CutPrefix(m.client, "https://"); ok {
		conn, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			return false
		}
		return conn.Close() == nil
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, m.client+"/health", nil)
	if err != nil {
		return false
	}
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: transport, Timeout: 2 * time.Second}).Do(req)
	if err != nil {
		return false
	}
	return resp.Body.Close() == nil && resp.StatusCode == http.StatusOK
}

func (c *Cluster) stop() {
	for i := range c.members {
		if c.members[i].cmd != nil {
			c.Kill(i)
		}
	}
}
