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

	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
	"lull/internal/sim"
)

// emptyFleet runs a server without workers next to a simulated cloud. It returns the
// server's URL, its admin token, a client and the cloud's instances.
func emptyFleet(t *testing.T, scenario string, settings ...string) (string, string, *control.Client, []sim.InstanceInfo) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "sim.yaml")
	errtest.None(t, os.WriteFile(file, []byte(scenario), 0o600))
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
	errtest.None(t, err)
	token := strings.TrimSpace(string(b))
	client, err := control.NewClient(url, token, nil)
	errtest.None(t, err)
	res, err := http.Get(at[0] + "/sim/instances")
	errtest.None(t, err)
	defer res.Body.Close()
	var machines []sim.InstanceInfo
	errtest.None(t, json.NewDecoder(res.Body).Decode(&machines))
	return url, token, client, machines
}

const oneMachine = `
speed: 1
timing: {pending: 1s, stopping: 1s, cml_boot: 1s, background: 1h}
profiles: {quiet: {labs: 2}}
workers: [{name: first-1, type: m5.large, profile: quiet, elastic_ip: true}]
`

// TestDashboardFirstWorker signs in to a server without workers. It checks that the
// page shows what discovery scanned and what to do next, and that the first worker
// appears without a reload.
func TestDashboardFirstWorker(t *testing.T) {
	chrome := startBrowser(t)
	url, token, client, machines := emptyFleet(t, oneMachine)
	w := open(t, chrome, url)
	// Answers that the simulated cloud cannot give.
	instead := `const real = window.fetch
		window.fetch = async (u, o) => {
			const res = await real(u, o)
			if (!window.scan || !String(u).includes('/workers/discovered')) return res
			return new Response(JSON.stringify(window.scan(await res.json())), {status: 200, headers: {'Content-Type': 'application/json'}})
		}`
	errtest.Get(chromedp.Call(w.ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: instead}))(t)
	w.visit(url)
	w.login(token)
	js[bool](w, `(window.notReloaded = true)`)
	state := func(name string, steps ...string) {
		t.Helper()
		w.until(`document.querySelector('[data-testid=discovery]')?.dataset.state === $1`, name)
		for _, s := range steps {
			if !w.holds(`document.querySelector('[data-testid=discovery] [data-step=' + $1 + ']') !== null`, s) {
				t.Errorf("%s: without the step %s", name, s)
			}
		}
		w.accessible("an empty fleet: " + name)
	}
	region, id := machines[0].Region, machines[0].ID
	cell := `document.querySelector('[data-testid=scanned-region][data-region="' + $1[0] + '"] [data-field=' + $1[1] + ']')?.innerText === $1[2]`

	state("found", "regions", "create")
	w.until(cell, []string{region, "instances", "1"})
	w.until(cell, []string{region, "found", "1"})
	w.until(`document.querySelector('[data-testid=discovered-instance][data-instance="' + $1 + '"] input[type=checkbox]') !== null`, id)

	settings := func(change map[string]any) {
		t.Helper()
		errtest.Get(control.Write[any](t.Context(), client, "PATCH", "/settings", change))(t)
	}
	settings(map[string]any{"discovery_ami_name_patterns": "*none-has-this*"})
	state("none", "import", "patterns", "regions", "create")
	w.until(cell, []string{region, "found", "0"})
	w.until(cell, []string{region, "patterns", "*none-has-this*"})
	w.until(`document.querySelector('[data-skip=no_match]')?.dataset.count === '1'`)
	w.until(`document.querySelector('[data-testid=scan-tag]')?.innerText.includes('=')`)

	settings(map[string]any{"discovery_import": "off"})
	state("off", "import", "create")
	settings(map[string]any{"discovery_import": "confirm"})
	state("none")

	js[bool](w, `(window.scan = (v) => ({...v, scan: {...v.scan, regions: [{...v.scan.regions[0], error: 'UnauthorizedOperation', instances: 0, found: 0, skipped: {}}]}}), true)`)
	state("failed", "access", "import", "regions")
	if !w.holds(`document.querySelector('[data-testid=scanned-region][data-error] [data-field=error]').innerText.includes('UnauthorizedOperation')`) {
		t.Error("the error of a region is missing")
	}
	js[bool](w, `(window.scan = (v) => ({items: []}), true)`)
	state("never", "import", "create")
	js[bool](w, `(window.scan = undefined, true)`)

	if _, err := control.Write[any](t.Context(), client, "POST", "/workers/import",
		map[string]any{"name": "first-1", "aws_region": region, "ec2_instance_id": id, "tls_insecure": true}); err != nil {
		t.Fatal(err)
	}
	w.until(`document.querySelector('.row a')?.innerText === 'first-1'`)
	if !js[bool](w, `window.notReloaded === true`) {
		t.Error("the page was loaded again")
	}
}

// TestDashboardBoundary checks that a part of a page that fails to render says so,
// does not affect the rest, and is rendered again as soon as possible.
func TestDashboardBoundary(t *testing.T) {
	chrome := startBrowser(t)
	url, token, client, machines := emptyFleet(t, oneMachine)
	w := open(t, chrome, url)
	// The server itself never answers like this, but a proxy or a newer server might.
	spoil := `window.spoiled = true
		const real = window.fetch
		window.fetch = async (u, o) => {
			const res = await real(u, o)
			if (!window.spoiled || !String(u).includes('/overview?')) return res
			const v = await res.json()
			return new Response(JSON.stringify({...v, aws_regions: null}), {status: 200, headers: {'Content-Type': 'application/json'}})
		}`
	errtest.Get(chromedp.Call(w.ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: spoil}))(t)
	w.visit(url)
	w.login(token)
	w.until(`document.querySelector('[data-testid=discovery]')`)
	if _, err := control.Write[any](t.Context(), client, "POST", "/workers/import",
		map[string]any{"name": "first-1", "aws_region": machines[0].Region, "ec2_instance_id": machines[0].ID, "tls_insecure": true}); err != nil {
		t.Fatal(err)
	}
	w.sees(`Cannot show the search`)
	w.until(`document.querySelector('.row a')?.innerText === 'first-1'`)
	w.accessible("a page of which a part failed")
	js[bool](w, `(window.spoiled = false, true)`)
	w.until(`document.querySelector('input[type=search]') && !document.querySelector('.fault')`)
}
