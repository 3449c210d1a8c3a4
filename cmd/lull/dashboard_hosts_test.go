package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/httpx"
	"lull/internal/lib/programtest"
	"lull/internal/protocol/control"
	"lull/internal/protocol/hostctl"
	"lull/internal/sim"
)

// localHost is a lull host with real programs, in processes of their own. Tests query
// it through its own socket.
type localHost struct {
	t      *testing.T
	dir    string
	client *hostctl.Client
	said   *bytes.Buffer // output of the current daemon; read it only after the daemon has ended
	end    func()
}

func newLocalHost(t *testing.T) *localHost {
	t.Helper()
	dir, err := os.MkdirTemp("", "lull") // short, because the path of a socket is limited in length
	errtest.None(t, err)
	h := &localHost{t: t, dir: dir}
	t.Cleanup(func() {
		h.removeAll()
		h.stop()
		endShim(filepath.Join(dir, "data", "shim"))
		_ = os.RemoveAll(dir) // the shim may still be writing
	})
	if h.client, err = hostctl.NewClient("unix://" + h.socket()); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *localHost) socket() string { return filepath.Join(h.dir, "host.sock") }

func (h *localHost) command(args ...string) *exec.Cmd {
	h.t.Helper()
	path, err := exec.LookPath("lull")
	if err != nil {
		h.t.Fatal(err)
	}
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), "LULL_HOST_SHIM="+programtest.Build(h.t, "lull/cmd/lull-shim"), "LULL_HOST=unix://"+h.socket())
	return cmd
}

// start starts a daemon with additional flags.
func (h *localHost) start(flags ...string) {
	h.t.Helper()
	cmd := h.command(append([]string{"host", "--data", filepath.Join(h.dir, "data"), "--socket", h.socket(), "--pause-after", "0"}, flags...)...)
	h.said = &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = h.said, h.said
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	h.end = func() {
		_ = cmd.Process.Signal(os.Interrupt) // it may have ended already
		if err := <-ended; err != nil {
			h.t.Errorf("lull host ended with %v:\n%s", err, h.said)
		}
	}
	eventually(h.t, func() error {
		_, err := h.client.Status(context.Background())
		return err
	})
}

func (h *localHost) stop() {
	if h.end != nil {
		h.end()
		h.end = nil
	}
}

// removeAll removes every program, because programs outlive the daemon.
func (h *localHost) removeAll() {
	if h.end == nil {
		return
	}
	l, err := h.client.List(context.Background())
	for _, o := range l {
		err = errors.Join(err, h.client.Remove(context.Background(), o.Name))
	}
	if err != nil {
		h.t.Error(err)
	}
}

// web runs a web server as an instance and returns its address.
func (h *localHost) web(name string) (address string) {
	h.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		h.t.Fatal(err)
	}
	address = l.Addr().String()
	if err := l.Close(); err != nil {
		h.t.Fatal(err)
	}
	_, port, _ := strings.Cut(address, ":")
	if out, err := h.command("run", "-d", "--name", name, "--expose", port, "--", "python3", "-u", "-m", "http.server", port, "--bind", "127.0.0.1").CombinedOutput(); err != nil {
		h.t.Fatalf("lull run: %v\n%s", err, out)
	}
	h.answers(address)
	return address
}

// answers waits until a web server answers.
func (h *localHost) answers(address string) {
	h.t.Helper()
	eventually(h.t, func() error {
		res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get("http://" + address)
		if err != nil {
			return err
		}
		return res.Body.Close()
	})
}

// becomes waits until the host itself reports an instance for which is returns true.
func (h *localHost) becomes(name, what string, is func(hostctl.Instance) bool) (o hostctl.Instance) {
	h.t.Helper()
	eventually(h.t, func() (err error) {
		if o, err = h.client.Get(context.Background(), name); err == nil && !is(o) {
			err = fmt.Errorf("%s is not %s: %+v", name, what, o)
		}
		return err
	})
	return o
}

func (h *localHost) state(name, state string) hostctl.Instance {
	h.t.Helper()
	return h.becomes(name, state, func(o hostctl.Instance) bool { return o.State == state })
}

// event returns the last event of a kind about an instance.
func (h *localHost) event(name, kind string) (last hostctl.Event) {
	h.t.Helper()
	eventually(h.t, func() error {
		err := h.client.Kept(context.Background(), "", func(string) {}, func(e hostctl.Event) error {
			if e.Instance == name && e.Type == kind {
				last = e
			}
			return nil
		})
		if err == nil && last.Type == "" {
			err = fmt.Errorf("no event %s of %s", kind, name)
		}
		return err
	})
	return last
}

// instances commands an instance of a real host that reports to the server. It checks
// the effects at the host itself.
func (p *dashboardUser) instances([]sim.InstanceInfo) {
	made, err := control.Write[control.Token](p.t.Context(), p.client, "POST", "/tokens", control.NewToken{Name: "desk", Role: "host", Machine: "desk"})
	if err != nil {
		p.t.Fatal(err)
	}
	h := newLocalHost(p.t)
	token := filepath.Join(h.dir, "token")
	if err := os.WriteFile(token, []byte(made.Secret), 0o600); err != nil {
		p.t.Fatal(err)
	}
	reports := []string{"--server", p.url, "--token-file", token, "--name", "desk", "--heartbeat-interval", "2s"}
	h.start(reports...)
	address := h.web("web")

	// The host's owner has not allowed commands.
	p.visit(p.url + "/hosts/desk")
	p.press("Actions for web")
	p.until(`(() => { const e = [...document.querySelectorAll('[role=menu] button')]; return e.length === 4 && e.every((e) => e.getAttribute('aria-disabled') === 'true' && e.title) })()`)
	p.accessible("the disabled menu of an instance")
	p.click(`[...document.querySelectorAll('[role=menu] button')].find((e) => e.innerText.trim() === $1)`, "Stop…")
	p.until(`!document.querySelector('dialog[open]') && document.querySelector('[data-testid=no-commands]')`)
	var refused *httpx.Problem
	if _, err := p.client.CommandHost(p.t.Context(), "desk", "web", control.HostPause, false, nil); !errors.As(err, &refused) || refused.Code() != control.HostCommandsOff {
		p.t.Errorf("the API says %v", err)
	}
	h.state("web", "running")
	h.stop()
	h.start(append(slices.Clone(reports), "--server-commands")...)
	p.until(`!document.querySelector('[data-testid=no-commands]')`)

	p.visit(p.url + "/hosts/desk")
	p.more("Actions for web", "Pause…")
	p.accessible("the question before a pause of an instance")
	p.press("Pause")
	h.state("web", "paused")
	if e := h.event("web", "paused"); e.By != "manual" || !strings.HasSuffix(e.Reason, " via server") {
		p.t.Errorf("the host recorded the pause as %+v", e)
	}
	p.until(`document.querySelector('tbody td .state')?.innerText === 'paused'`)
	p.both("commands", "light", "dark")
	p.more("Actions for web", "Resume")
	h.state("web", "running")
	p.until(`document.querySelector('tbody td .state')?.innerText === 'running'`)

	p.more("Actions for web", "Snooze…")
	p.accessible("the snooze of an instance")
	p.press("For 4 hours")
	h.becomes("web", "snoozed for four hours", func(o hostctl.Instance) bool {
		return o.SnoozeUntil != nil && time.Until(*o.SnoozeUntil).Round(time.Hour) == 4*time.Hour
	})
	p.until(`/snoozed until/.test(document.querySelector('tbody').innerText)`)
	p.more("Actions for web", "Snooze…")
	p.press("End snooze")
	h.becomes("web", "no longer snoozed", func(o hostctl.Instance) bool { return o.SnoozeUntil == nil })

	if err := exec.Command("curl", "-s", "http://"+address+"/said-by-the-test").Run(); err != nil {
		p.t.Fatal(err)
	}
	p.more("Actions for web", "Logs")
	p.until(`document.querySelector('[data-testid=logs]')?.innerText.includes('/said-by-the-test')`)
	p.until(`((e) => e.scrollHeight <= e.clientHeight && e.scrollWidth <= e.clientWidth)(document.querySelector('[data-testid=logs]'))`) // they scroll with the page
	p.both("logs", "light", "dark")

	p.more("Actions for web", "Stop…")
	p.press("Stop")
	o := h.state("web", "stopped")
	if !strings.HasSuffix(o.StatusReason, " via server") {
		p.t.Errorf("it stopped because %q", o.StatusReason)
	}
	p.until(`[...document.querySelectorAll('.facts .state')].some((e) => e.innerText === 'stopped')`)
	p.more("Actions for web", "Start")
	h.state("web", "running")
	h.answers(address)
	p.until(`[...document.querySelectorAll('.facts .state')].some((e) => e.innerText === 'running')`)

	// A silent host gets no commands.
	h.stop()
	p.visit(p.url + "/hosts/desk")
	p.until(`document.querySelector('tbody td .state')?.innerText === 'unknown'`)
	p.press("Actions for web")
	p.until(`(() => { const e = [...document.querySelectorAll('[role=menu] button')]; return e.length > 0 && e.every((e) => e.getAttribute('aria-disabled') === 'true' && e.title) })()`)
}

// open returns a sign-in link from lull open.
func (h *localHost) open() string {
	h.t.Helper()
	var link hostctl.Link
	out, err := h.command("open", "--json").Output()
	if err == nil {
		err = json.Unmarshal(out, &link)
	}
	if err != nil {
		h.t.Fatalf("lull open: %v\n%s", err, out)
	}
	return link.URL
}

// TestLocalDashboard opens the dashboard of a single host in a browser, with a link
// that is valid once, and acts on real programs. It checks the effects at the host
// itself.
func TestLocalDashboard(t *testing.T) {
	chrome := startBrowser(t)
	h := newLocalHost(t)
	h.start()
	if err := h.command("open").Run(); err == nil {
		t.Error("a host without --listen gives a link")
	}
	h.stop()
	h.start("--listen", "127.0.0.1:"+freePort(t), "--name", "desk")
	address := h.web("web")
	h.web("api")
	link := h.open()
	base, _, _ := strings.Cut(link, "/sign-in")
	w := open(t, chrome, link)
	w.until(`location.pathname === '/hosts/desk'`)
	w.until(`document.querySelectorAll('tbody tr').length === 2`)
	w.until(`[...document.querySelectorAll('nav li')].map((e) => e.innerText).join() === 'Hosts'`)
	w.until(`!document.querySelector('[data-testid=no-commands]')`)
	w.more("Actions for web", "Pause…")
	w.press("Pause")
	h.state("web", "paused")
	if e := h.event("web", "paused"); e.By != "manual" || !strings.HasSuffix(e.Reason, " via dashboard") {
		t.Errorf("the host recorded the pause as %+v", e)
	}
	h.state("api", "running")
	state := func(want string) {
		t.Helper()
		w.until(`[...document.querySelectorAll('tbody tr')].find((e) => e.querySelector('th').innerText.startsWith('web')).querySelector('.state').innerText === $1`, want)
	}
	state("paused")
	w.both("local host", "light", "dark")
	w.press("web")
	w.until(`location.pathname === '/hosts/desk/web' && document.querySelector('[data-testid=counters]')`)
	woken := js[string](w, `document.querySelector('[data-testid=counters]').innerText`)
	h.answers(address) // the connection wakes it
	h.state("web", "running")
	w.until(`document.querySelector('[data-testid=counters]').innerText !== $1`, woken)
	w.until(`[...document.querySelectorAll('[data-testid=timeline] tbody tr')].some((e) => e.dataset.type === 'paused') && [...document.querySelectorAll('[data-testid=timeline] tbody tr')].some((e) => e.dataset.type === 'resumed')`)
	w.both("local instance", "light", "dark")

	w.press("Halt")
	w.press("Halt everything")
	eventually(t, func() error {
		if s, err := h.client.Status(t.Context()); err != nil || !s.Halted {
			return fmt.Errorf("halted %t, %v", s.Halted, err)
		}
		return nil
	})
	w.until(`document.querySelector('.banner.halt')`)
	w.press("Lift the halt")
	eventually(t, func() error {
		if s, err := h.client.Status(t.Context()); err != nil || s.Halted {
			return fmt.Errorf("halted %t, %v", s.Halted, err)
		}
		return nil
	})

	ask := func(method, path, body string, header ...string) int {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, base+path, strings.NewReader(body))
		errtest.None(t, err)
		for n := 0; n < len(header); n += 2 {
			req.Header.Set(header[n], header[n+1])
		}
		res, err := http.DefaultClient.Do(req)
		errtest.None(t, err)
		defer res.Body.Close()
		return res.StatusCode
	}
	_, secret, _ := strings.Cut(link, "#")
	if got := ask("POST", "/sign-in", `{"link":"`+secret+`"}`, "Content-Type", "application/json"); got != http.StatusGone {
		t.Errorf("a link that was used: %d", got)
	}
	for _, path := range []string{"/api/v1/hosts", "/api/v1/hosts/desk", "/api/v1/hosts/desk/instances/web/why", "/api/v1/hosts/desk/instances/web/logs", "/api/v1/session", "/api/v1/halt", "/api/v1/events"} {
		if got := ask("GET", path, ""); got != http.StatusUnauthorized {
			t.Errorf("%s without a token: %d", path, got)
		}
	}
	if got := ask("POST", "/api/v1/hosts/desk/instances/web/stop", ""); got != http.StatusUnauthorized {
		t.Errorf("a command without a token: %d", got)
	}
	_, secret, _ = strings.Cut(h.open(), "#")
	if got := ask("POST", "/sign-in", `{"link":"`+secret+`"}`, "Content-Type", "application/json", "Origin", "http://elsewhere.example", "Sec-Fetch-Site", "cross-site"); got != http.StatusForbidden {
		t.Errorf("another origin: %d", got)
	}
	for _, path := range []string{"/api/v1/workers", "/api/v1/tokens", "/api/v1/settings", "/api/v1/overview"} {
		if got := ask("GET", path, ""); got != http.StatusNotFound {
			t.Errorf("%s, which belongs to a fleet: %d", path, got)
		}
	}
	h.state("web", "running")
	w.visit(base + "/workers/none")
	w.sees("Page not found")
}
