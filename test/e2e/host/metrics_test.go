package host

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

// TestMetrics reads a host's metrics as Prometheus does, and over the API socket.
// The address for Prometheus must serve nothing else.
func TestMetrics(t *testing.T) {
	t.Parallel()
	open := daemontest.Addr(t)
	d := host(t, "--probe", "100ms", "--pause-after", "200ms", "--metrics", open)
	s, addr := web(t, "measured", false)
	d.Launch(s)
	d.Await(s.Name, "paused")
	c := mustDial(t, addr)
	errtest.None(t, c.echo("hello"))
	local := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", d.Dir+"/host.sock")
	}}}
	t.Cleanup(local.CloseIdleConnections)
	get := func(cl *http.Client, url string) (int, string) {
		t.Helper()
		res, err := cl.Get(url)
		errtest.None(t, err)
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		errtest.None(t, err)
		return res.StatusCode, string(b)
	}
	const woken = `lull_instance_wake_seconds_count{from="paused",runtime="process"} 1`
	waittest.Until(t, "its wake is counted", func() bool { _, body := get(local, "http://lull/metrics"); return strings.Contains(body, woken) })
	for name, cl := range map[string]*http.Client{"http://" + open: http.DefaultClient, "http://lull": local} {
		code, body := get(cl, name+"/metrics")
		for _, want := range []string{woken, `lull_instances{runtime="process",state="running"} 1`,
			`lull_instance_events_total{type="paused"} 1`, "lull_host_halted 0", "process_resident_memory_bytes ", "go_goroutines "} {
			if code != http.StatusOK || !strings.Contains(body, "\n"+want) {
				t.Errorf("%s answers %d and does not say %s", name, code, want)
			}
		}
	}
	for _, path := range []string{"/", "/api/v1/instances", "/api/v1/status", "/openapi.json"} {
		if code, body := get(http.DefaultClient, "http://"+open+path); code != http.StatusNotFound {
			t.Errorf("%s is served where only metrics are: %d %q", path, code, body)
		}
	}
}
