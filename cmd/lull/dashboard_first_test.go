package main

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"lull/internal/protocol/control"
	"lull/internal/sim"
)

// emptyFleet runs a server without workers beside a simulated cloud, and returns
// where it is, its admin token, and a client.
func emptyFleet(t *testing.T, scenario string, settings ...string) (string, string, *control.Client, []sim.InstanceInfo) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "sim.yaml")
	if err := os.WriteFile(file, []byte(scenario), 0o600); err != nil {
		t.Fatal(err)
	}
	at := daemon(t, regexp.MustCompile(`API on (http://\S+), CML on port (\d+)`), "sim", "--listen", "127.0.0.1:0", "--cml-port", "0", "--scenario", file)
	env := map[string]string{"AWS_ENDPOINT_URL": at[0], "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "CML_PW": "cml", "RECONCILE_INTERVAL": "1",
		"CML_DEFAULT_PASSWORD": "env:CML_PW", "DISCOVERY_SCAN_INTERVAL_SECONDS": "30"}
	for _, s := range settings {
		k, v, _ := strings.Cut(s, "=")
		env[k] = v
	}
	for k, v := range env {
		t.Setenv(k, v)
	}
	tokens := filepath.Join(dir, "token")
	url := daemon(t, regexp.MustCompile(`serving on (\S+)`), "server", "--data", filepath.Join(dir, "data"), "--listen", "127.0.0.1:0", "--cml-port", at[1],
		"--admin-token-file", tokens, "--log-level", "error")[0]
	b, err := os.ReadFile(tokens)
	if err != nil {
		t.Fatal(err)
	}
	token := strings.TrimSpace(string(b))
	client, err := control.NewClient(url, token, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.Get(at[0] + "/sim/instances")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var machines []sim.InstanceInfo
	if err := json.NewDecoder(res.Body).Decode(&machines); err != nil {
		t.Fatal(err)
	}
	return url, token, client, machines
}

const oneMachine = `
speed: 1
timing: {pending: 1s, stopping: 1s, cml_boot: 1s, background: 1h}
profiles: {quiet: {labs: 2}}
workers: [{name: first-1, type: m5.large, profile: quiet, elastic_ip: true}]
`

// TestDashboardFirstWorker signs in to a server without workers and sees the
// first one appear, without a reload.
func TestDashboardFirstWorker(t *testing.T) {
	chrome := startBrowser(t)
	url, token, client, machines := emptyFleet(t, oneMachine)
	w := open(t, chrome, url)
	w.login(token)
	w.sees(`There are no workers yet`)
	w.accessible("an empty fleet")
	js[bool](w, `(window.notReloaded = true)`)
	if _, err := control.Write[any](t.Context(), client, "POST", "/workers/import",
		map[string]any{"name": "first-1", "aws_region": machines[0].Region, "ec2_instance_id": machines[0].ID, "tls_insecure": true}); err != nil {
		t.Fatal(err)
	}
	w.until(`document.querySelector('.row a')?.innerText === 'first-1'`)
	if !js[bool](w, `window.notReloaded === true`) {
		t.Error("the page was loaded again")
	}
}

// TestDashboardBoundary: a part of a page that cannot be drawn says so, leaves
// the rest alive, and is drawn again once it can be.
func TestDashboardBoundary(t *testing.T) {
	chrome := startBrowser(t)
	url, token, client, machines := emptyFleet(t, oneMachine)
	w := open(t, chrome, url)
	// The server never answers like this; a proxy or a newer server might.
	spoil := `window.spoiled = true
		const real = window.fetch
		window.fetch = async (u, o) => {
			const res = await real(u, o)
			if (!window.spoiled || !String(u).includes('/overview?')) return res
			const v = await res.json()
			return new Response(JSON.stringify({...v, aws_regions: null}), {status: 200, headers: {'Content-Type': 'application/json'}})
		}`
	if _, err := chromedp.Call(w.ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: spoil}); err != nil {
		t.Fatal(err)
	}
	w.visit(url)
	w.login(token)
	w.sees(`cannot show the search`)
	w.sees(`There are no workers yet`)
	if _, err := control.Write[any](t.Context(), client, "POST", "/workers/import",
		map[string]any{"name": "first-1", "aws_region": machines[0].Region, "ec2_instance_id": machines[0].ID, "tls_insecure": true}); err != nil {
		t.Fatal(err)
	}
	w.until(`document.querySelector('.row a')?.innerText === 'first-1'`)
	w.accessible("a page of which a part failed")
	js[bool](w, `(window.spoiled = false, true)`)
	w.until(`document.querySelector('input[type=search]') && !document.querySelector('.fault')`)
}
