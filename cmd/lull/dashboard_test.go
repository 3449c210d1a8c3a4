package main

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/core/why"
	"lull/internal/fleet/audit"
	"lull/internal/fleet/halt"
	"lull/internal/fleet/warning"
	"lull/internal/fleet/worker"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/control"
	"lull/internal/sim"
)

// patience bounds every wait of the browser tests: the machine may be loaded.
const patience = 2 * time.Minute

// daemon runs a command of lull in this process until the test ends, and
// returns what the first line of its output that matches says.
func daemon(t *testing.T, says *regexp.Regexp, args ...string) []string {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	out, w := io.Pipe()
	ended, early := make(chan struct{}), false // early is read once ended
	go func() {
		defer close(ended)
		code := run(ctx, args, strings.NewReader(""), w, w, os.Getenv)
		early = ctx.Err() == nil
		w.CloseWithError(fmt.Errorf("lull %s ended with %d", args[0], code))
	}()
	found, done := make(chan []string, 1), make(chan struct{})
	var said strings.Builder // read once done
	t.Cleanup(func() {
		cancel()
		select {
		case <-done: // after ended
		case <-time.After(patience):
			t.Errorf("lull %s does not end", args[0])
			return
		}
		<-ended
		if early {
			t.Errorf("lull %s ended before the test did:\n%s", args[0], said.String())
		}
	})
	go func() {
		defer close(done)
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			said.WriteString(lines.Text() + "\n")
			if m := says.FindStringSubmatch(lines.Text()); m != nil && len(found) == 0 {
				found <- m[1:]
			}
		}
	}()
	select {
	case m := <-found:
		return m
	case <-done:
		t.Fatalf("lull %s ended before it said %s:\n%s", args[0], says, said.String())
	case <-time.After(patience):
		t.Fatalf("lull %s does not say %s", args[0], says)
	}
	return nil
}

// watched is a real server with the simulated cloud beside it, and workers
// that are imported and armed.
type watched struct {
	t      *testing.T
	sim    string // URL
	url    string
	token  string
	client *control.Client
	ids    map[string]string // of workers, by name
	mail   *mailbox
}

func newWatched(t *testing.T) *watched {
	t.Helper()
	dir := filepath.Join("testdata", "dashboard")
	r := &watched{t: t, ids: map[string]string{}}
	at := daemon(t, regexp.MustCompile(`API on (http://\S+), CML on port (\d+)`), "sim", "--listen", "127.0.0.1:0", "--cml-port", "0", "--scenario", filepath.Join(dir, "sim.yaml"))
	r.sim = at[0]
	for k, v := range map[string]string{"AWS_ENDPOINT_URL": r.sim, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "CML_PW": "cml", "RECONCILE_INTERVAL": "1"} {
		t.Setenv(k, v)
	}
	tokens := filepath.Join(t.TempDir(), "token")
	r.url = daemon(t, regexp.MustCompile(`serving on (\S+)`), "server", "--config", filepath.Join(dir, "server.yaml"), "--data", filepath.Join(t.TempDir(), "data"),
		"--listen", "127.0.0.1:0", "--cml-port", at[1], "--admin-token-file", tokens, "--log-level", "error", "--notify-allow", "127.0.0.1")[0]
	b, err := os.ReadFile(tokens)
	if err != nil {
		t.Fatal(err)
	}
	r.token = strings.TrimSpace(string(b))
	if r.client, err = control.NewClient(r.url, r.token, nil); err != nil {
		t.Fatal(err)
	}
	r.mail = &mailbox{links: map[string]map[string]string{}}
	box := httptest.NewServer(r.mail)
	t.Cleanup(box.Close)
	if _, err := control.Write[any](t.Context(), r.client, "PATCH", "/settings", map[string]any{"notify_public_url": r.url,
		"notify_channels": map[string]any{"mail": map[string]any{"type": "webhook", "url": box.URL + "/"}}}); err != nil {
		t.Fatal(err)
	}
	r.fill()
	r.settle()
	return r
}

// mailbox is where warnings arrive.
type mailbox struct {
	mu    sync.Mutex
	links map[string]map[string]string // of the last warning about a worker, by name
}

func (m *mailbox) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var e struct {
		Data struct {
			Worker string            `json:"worker_name"`
			Links  map[string]string `json:"links"`
		} `json:"data"`
	}
	if err := json.NewDecoder(r.Body).Decode(&e); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.Data.Links != nil {
		m.links[e.Data.Worker] = e.Data.Links
	}
}

// link waits for a warning about a worker, and is one of its links.
func (m *mailbox) link(t *testing.T, worker, verb string) (link string) {
	t.Helper()
	eventually(t, func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		if link = m.links[worker][verb]; link == "" {
			return fmt.Errorf("no warning about %s has come", worker)
		}
		return nil
	})
	return link
}

// fill imports what the simulator has, and arms it.
func (r *watched) fill() {
	r.t.Helper()
	res, err := http.Get(r.sim + "/sim/instances")
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	var all []sim.InstanceInfo
	if err := json.NewDecoder(res.Body).Decode(&all); err != nil {
		r.t.Fatal(err)
	}
	for _, i := range all {
		body := map[string]any{"name": i.Name, "aws_region": i.Region, "ec2_instance_id": i.ID, "tls_insecure": true, "owner": strings.Split(i.Name, "-")[0] + "@example.org"}
		if i.Name == "research-1" {
			body["idle_timeout_minutes"] = 7 * 24 * 60
		}
		w, err := control.Write[struct {
			ID string `json:"id"`
		}](r.t.Context(), r.client, "POST", "/workers/import",
			body)
		if err != nil {
			r.t.Fatal(err)
		}
		r.ids[i.Name] = w.ID
	}
	if _, err := control.Write[any](r.t.Context(), r.client, "POST", "/workers/arm", map[string]any{"all": true}); err != nil {
		r.t.Fatal(err)
	}
}

// hosts has two machines with instances report: desk, which answers until the
// test ends, and attic, which falls silent.
func (r *watched) hosts() {
	ctx, end := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	r.t.Cleanup(func() { end(); ended.Wait() })
	now := time.Now()
	tell := func(name string, every time.Duration, l ...control.HostInstance) {
		r.t.Helper()
		counts := map[string]int{}
		for n := range l {
			l[n].ID, l[n].Runtime, l[n].CreatedAt, l[n].StateSince, l[n].Enabled = fmt.Sprint("i", n), "process", now, &now, true
			counts[l[n].State]++
		}
		report := control.HostReport{Host: name, At: now, Sequence: 1, StartedAt: now, Version: version, Interval: idle.Duration(every), Counts: counts, Instances: l,
			Memory: control.HostMemory{Limit: 8 << 30}}
		report.Fit()
		if _, err := r.client.ReportHost(ctx, report); err != nil {
			r.t.Fatal(err)
		}
	}
	tell("attic", time.Second, control.HostInstance{Name: "cam", State: "running"})
	tell("desk", 15*time.Minute,
		control.HostInstance{Name: "db", State: "running", IdleFor: 3, Connections: 2, Memory: 200 << 20, Leases: []idle.Lease{{Holder: "ci", Reason: "backup", ExpiresAt: now.Add(time.Hour)}},
			Blocks: []idle.Block{{Code: idle.ConnectionOpen, Sentence: "2 connections are open."}}, Endpoints: []instance.Endpoint{{Listen: "127.0.0.1:5432", Target: "127.0.0.1:5432", Path: "direct"}}},
		control.HostInstance{Name: "web", State: "paused", StatusReason: "idle for 1m0s", LastPausedAt: &now, LastPausedBy: "idle_timeout"})
	ended.Go(func() { // desk answers
		turn := control.HostTurn{Answers: []control.HostReply{}, Wait: 10}
		for ctx.Err() == nil {
			q, err := r.client.HostTurn(ctx, "desk", turn)
			turn.Answers = []control.HostReply{}
			if err != nil {
				continue // the end
			}
			for _, x := range q.Questions {
				a := control.HostReply{ID: x.ID, Status: http.StatusNotFound, Detail: "cannot find it"}
				if x.Instance == "db" {
					a = control.HostReply{ID: x.ID, Why: &control.HostWhy{Instance: &control.HostInstance{ID: "i0", Name: "db", State: "running", Runtime: "process"},
						Account: why.Account{Object: "i0", Name: "db", Kind: why.KindInstance, State: "running", Question: "why is it running", Answer: "2 connections are open.",
							At: time.Now(), Verdict: &idle.Verdict{At: time.Now(), Blocks: []idle.Block{{Code: idle.ConnectionOpen, Sentence: "2 connections are open."}}}}}}
				}
				a.Fit()
				turn.Answers = append(turn.Answers, a)
			}
		}
	})
}

// used simulates use of a worker, and look has its idleness judged.
func (r *watched) used(name string) {
	r.t.Helper()
	body := strings.NewReader(`{"category": "start_lab", "user": "alice"}`)
	res, err := http.Post(r.sim+"/sim/instances/"+name+"/events", "application/json", body)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		r.t.Fatalf("cannot use %s: %s", name, res.Status)
	}
}

func (r *watched) look(name string) {
	r.t.Helper()
	if _, err := r.client.DetectIdle(r.t.Context(), r.ids[name]); err != nil {
		r.t.Fatal(err)
	}
}

// settle waits until all workers run, has some of them used, and reads all.
func (r *watched) settle() {
	r.t.Helper()
	eventually(r.t, func() error {
		l, err := r.client.Workers(r.t.Context(), url.Values{"status": {"RUNNING"}})
		if err == nil && len(l) != len(r.ids)-1 {
			err = fmt.Errorf("%d of %d workers run", len(l), len(r.ids)-1)
		}
		return err
	})
	for _, name := range []string{"routing-1", "routing-2", "campus-1"} {
		r.used(name)
	}
	for name := range r.ids {
		if name != "classroom-2" {
			r.look(name)
		}
	}
}

// eventually repeats look until it returns no error.
func eventually(t *testing.T, look func() error) {
	t.Helper()
	within(t, patience, look)
}

// within is eventually with another timeout.
func within(t *testing.T, d time.Duration, look func() error) {
	t.Helper()
	var err error
	if !waittest.Within(d, func() bool { err = look(); return err == nil }) {
		t.Fatalf("not within %v: %v", d, err)
	}
}

// window is a page in a real browser. Whatever the browser calls an error
// fails the test when the window is closed.
type window struct {
	t   *testing.T
	ctx context.Context

	mu     sync.Mutex
	faults []string
	cut    bool // the server is out of reach on purpose
	ended  bool // its session was ended on purpose: what was asked with it is refused
}

// browser starts Chromium once for a test.
func startBrowser(t *testing.T) context.Context {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("cannot test the dashboard: chromium is not installed")
		}
		t.Skip("chromium is not installed")
	}
	alloc, cancel := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.DisableGPU, chromedp.Flag("disable-dev-shm-usage", true),
		chromedp.Flag("enable-precise-memory-info", true), chromedp.UserDataDir(t.TempDir()), chromedp.WSURLReadTimeout(patience), chromedp.WindowSize(1360, 900))...)
	t.Cleanup(cancel)
	ctx, end := chromedp.NewContext(alloc)
	// A context with a deadline would end the browser with it.
	hung := time.AfterFunc(patience, cancel)
	if err := chromedp.Do(ctx, chromedp.Navigate("about:blank")); err != nil {
		t.Fatalf("cannot start chromium: %v", err)
	}
	hung.Stop()
	t.Cleanup(func() {
		defer time.AfterFunc(patience, cancel).Stop()
		if err := chromedp.Cancel(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Logf("chromium does not end by itself: %v", err)
		}
		end()
	})
	return ctx
}

// open opens a window of its own, as another user's browser.
func open(t *testing.T, from context.Context, address string) *window {
	t.Helper()
	return tab(t, from, address, chromedp.WithNewBrowserContext())
}

// tab opens another tab of the browser of from, with its cookies and storage,
// unless o says otherwise.
func tab(t *testing.T, from context.Context, address string, o ...chromedp.ContextOption) *window {
	t.Helper()
	ctx, cancel := chromedp.NewContext(from, o...)
	w := &window{t: t, ctx: ctx}
	err := chromedp.Listen(ctx, func(ev any) {
		switch e := ev.(type) {
		case *runtime.EventExceptionThrown:
			text := e.ExceptionDetails.Text
			if x := e.ExceptionDetails.Exception; x != nil {
				text += " " + x.Description
			}
			w.fault("exception: " + text)
		case *runtime.EventConsoleAPICalled:
			if e.Type == "error" || e.Type == "warning" {
				var text []string
				for _, a := range e.Args {
					text = append(text, string(a.Value)+a.Description)
				}
				w.fault("console: " + strings.Join(text, " "))
			}
		case *cdplog.EventEntryAdded:
			if e.Entry.Level == "error" {
				w.fault("browser: " + e.Entry.Text + " " + e.Entry.URL)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, f := range w.faults {
			t.Errorf("the browser says: %s", f)
		}
	})
	w.visit(address)
	return w
}

var unauthorized = regexp.MustCompile(`\b401\b`)

// fault notes what the browser complains about, but for the network when it
// was cut on purpose.
func (w *window) fault(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	// Other tests on this machine change its network, which aborts requests;
	// the page sends them again.
	if w.ended && unauthorized.MatchString(text) || w.cut && strings.Contains(text, "net::ERR_") || strings.Contains(text, "net::ERR_NETWORK_CHANGED") {
		return
	}
	w.faults = append(w.faults, text)
}

// do runs one action within patience.
func do[T any](w *window, a chromedp.Action[T]) T {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	v, err := chromedp.Run(ctx, a)
	if err != nil {
		look, end := context.WithTimeout(w.ctx, patience)
		defer end()
		text, _ := chromedp.Run(look, chromedp.Evaluate[string](`location.href + "\n" + document.body.innerText`))
		w.t.Fatalf("%v; the page says:\n%s", err, text)
	}
	return v
}

// js evaluates an expression on the page and awaits a promise. Each $1 in it is
// an argument, as JSON.
func js[T any](w *window, expression string, arg ...any) T {
	w.t.Helper()
	return do(w, chromedp.Evaluate[T](w.fill(expression, arg), chromedp.EvalAwaitPromise))
}

func (w *window) fill(expression string, arg []any) string {
	w.t.Helper()
	if len(arg) == 0 {
		return expression
	}
	b, err := json.Marshal(arg[0])
	if err != nil {
		w.t.Fatal(err)
	}
	return strings.ReplaceAll(expression, "$1", string(b))
}

// holds reports whether an expression is true on the page. On one that is being
// loaded nothing is.
func (w *window) holds(expression string, arg ...any) bool {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	yes, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("(() => { try { return !!("+w.fill(expression, arg)+") } catch { return false } })()"))
	return err == nil && yes
}

// until waits until an expression is true on the page.
func (w *window) until(expression string, arg ...any) {
	w.t.Helper()
	empty := time.Now()
	for end := time.Now().Add(patience); time.Now().Before(end); pause() {
		if w.holds(expression, arg...) {
			return
		}
		switch {
		case w.holds(`document.querySelector('#app > *')`):
			empty = time.Now()
		case time.Since(empty) > patience/3: // its script was aborted on the way
			empty = time.Now()
			do(w, chromedp.Reload())
		}
	}
	w.t.Fatalf("not within %v: %s %v; the page says:\n%s", patience, expression, arg, js[string](w, `document.body.innerText`))
}

// sees waits until the page's text matches a regular expression.
func (w *window) sees(pattern string) {
	w.t.Helper()
	w.until(`new RegExp($1, 's').test(document.body.innerText)`, pattern)
}

func (w *window) visit(address string) {
	w.t.Helper()
	var err error
	for range 5 {
		ctx, cancel := context.WithTimeout(w.ctx, patience)
		err = chromedp.Do(ctx, chromedp.Navigate(address))
		cancel()
		if err == nil || !strings.Contains(err.Error(), "net::ERR_NETWORK_CHANGED") {
			break
		}
	}
	if err != nil {
		w.t.Fatalf("cannot visit %s: %v", address, err)
	}
}

// finds is an expression for what a user would press under a name: a
// button, link or option, in the open dialog if there is one.
const finds = `[...(document.querySelector('dialog[open]') ?? document).querySelectorAll('button, a, summary, label, select')]
	.find((e) => (e.getAttribute('aria-label') ?? e.innerText).trim() === $1 && e.getAttribute('aria-disabled') !== 'true')`

// press clicks, with the mouse, what has that name.
func (w *window) press(name string) {
	w.t.Helper()
	w.click(finds, name)
}

// pressAt clicks what css finds.
func (w *window) pressAt(css string) {
	w.t.Helper()
	w.click(`document.querySelector($1)`, css)
}

// click repeats a click that missed because the page moved under the pointer,
// or that came while the button was disabled.
func (w *window) click(what, arg string) {
	w.t.Helper()
	for range 50 {
		w.until(`(() => { const e = `+what+`; return e && !e.disabled })()`, arg)
		at := js[[]float64](w, `(() => {
			const e = `+what+`
			if (!e) return []
			e.scrollIntoView({block: 'center'})
			window.lullHit = false
			document.removeEventListener('click', window.lullEar, true)
			window.lullEar = (click) => {
				document.removeEventListener('click', window.lullEar, true)
				const now = `+what+`
				window.lullHit = Boolean(now && now.contains(click.target))
				if (!window.lullHit) { click.stopImmediatePropagation(); click.preventDefault() }
			}
			document.addEventListener('click', window.lullEar, true)
			const r = e.getBoundingClientRect()
			return [r.x + r.width / 2, r.y + r.height / 2]
		})()`, arg)
		if len(at) < 2 {
			continue
		}
		do(w, chromedp.MouseClickXY(at[0], at[1]))
		if !w.holds(`window.lullHit === false`) { // true if it missed; a page that the click led to knows nothing of it
			return
		}
	}
	w.t.Fatalf("no click reached %s %s", what, arg)
}

// enter writes into the field that css finds.
func (w *window) enter(css, text string) {
	w.t.Helper()
	w.until(`document.querySelector($1)`, css)
	js[bool](w, `(document.querySelector($1).focus(), true)`, css)
	do(w, chromedp.KeyEvent(text))
}

// login signs in on the page that asks for a token.
func (w *window) login(token string) {
	w.t.Helper()
	w.enter("#token", token)
	w.press("Sign in")
	w.until(`document.querySelector('nav')`)
}

// colours switches between light and dark.
func (w *window) colours(scheme string) {
	w.t.Helper()
	_, err := chromedp.Call(w.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
	if err != nil {
		w.t.Fatal(err)
	}
}

// artifacts is where a test keeps what it made: below LULL_ARTIFACTS, which make
// test sets, or where go test -artifacts says; empty keeps nothing.
func artifacts(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("LULL_ARTIFACTS"); dir != "" {
		dir = filepath.Join(dir, filepath.FromSlash(t.Name()))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	if f := flag.Lookup("test.artifacts"); f != nil && f.Value.String() == "true" {
		return t.ArtifactDir()
	}
	return ""
}

// keep writes an artifact of a test, if they are kept.
func keep(t *testing.T, name string, make func() []byte) {
	t.Helper()
	dir := artifacts(t)
	if dir == "" {
		return
	}
	if err := os.WriteFile(filepath.Join(dir, name), make(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// picture keeps what the page looks like.
func (w *window) picture(name string) {
	w.t.Helper()
	keep(w.t, name+".png", func() []byte { return do(w, chromedp.CaptureScreenshot()) })
}

// axe is the accessibility checker of Deque (MPL 2.0), as it comes.
//
//go:embed testdata/dashboard/axe.min.js
var axe string

// accessible checks the page as it is: nothing that axe calls serious or
// critical.
func (w *window) accessible(what string) {
	w.t.Helper()
	js[bool](w, "(() => {"+axe+"; return true })()")
	faults := js[[]string](w, `axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations
		.filter((v) => v.impact === 'serious' || v.impact === 'critical')
		.map((v) => v.id + ': ' + v.help + ' ' + v.nodes.slice(0, 3).map((n) => n.html.slice(0, 160)).join(' | ')))`)
	for _, f := range faults {
		w.t.Errorf("%s is not accessible: %s", what, f)
	}
}

// TestDashboard is a user at the dashboard of a real server, with a real
// browser, over a simulated cloud: every page, in light and dark, and what
// can be done on it.
func TestDashboard(t *testing.T) {
	chrome := startBrowser(t)
	r := newWatched(t)
	w := open(t, chrome, r.url)
	w.sees("Sign in with a token")
	w.accessible("the login")
	w.enter("#token", "lull_aaaaaaaaaa_aaaaaaaaaaaaaaaaaaaaaaaaaa")
	w.press("Sign in")
	w.until(`document.querySelector('#login-fault')`)
	w.forgive("status of 401")
	w.clear("#token")
	w.login(r.token)
	for _, step := range []struct {
		name string
		do   func(*window, *watched)
	}{{"tabs", (*window).tabs}, {"fleet", (*window).fleet}, {"warning", (*window).warning}, {"worker", (*window).worker}, {"halt", (*window).halt}, {"pages", (*window).pages}} {
		if !t.Run(step.name, func(t *testing.T) { step.do(w.in(t), r) }) {
			return // the next would wait for what this one left undone
		}
	}
}

// in makes t the test that the window's steps report to.
func (w *window) in(t *testing.T) *window {
	was := w.t
	w.t = t
	t.Cleanup(func() { w.t = was })
	return w
}

// both takes pictures of a page in light and dark, and checks what it looks
// like in some of them.
func (w *window) both(name string, checked ...string) {
	w.t.Helper()
	for _, scheme := range []string{"dark", "light"} {
		w.colours(scheme)
		w.picture(name + "-" + scheme)
		if slices.Contains(checked, scheme) {
			w.accessible(name + " in " + scheme)
		}
	}
}

// tabs signs in once and is signed in in a tab that a link opens. Signing out of
// one, and a token that is revoked, ends the session in both, also in a page that
// is just being loaded. No script can read what the session needs.
func (w *window) tabs(r *watched) {
	const out, in = `document.querySelector('#token')`, `document.querySelector('nav')`
	other := tab(w.t, w.ctx, r.url+"/audit")
	for _, x := range []*window{w, other} {
		x.mu.Lock()
		x.ended = true
		x.mu.Unlock()
	}
	other.until(in + ` && document.querySelector('#entries')`)
	loading := `const frame = window.requestAnimationFrame.bind(window)
		window.requestAnimationFrame = (f) => {
			const oldValue = localStorage.getItem('lull-session')
			if (window.endWhileLoading && oldValue) { // while the page is first rendered
				window.endWhileLoading = false
				localStorage.removeItem('lull-session') // as another tab does
				window.dispatchEvent(new StorageEvent('storage', {key: 'lull-session', oldValue, newValue: null}))
				window.endedWhileLoading = true
			}
			return frame(f)
		}
		window.endWhileLoading = sessionStorage.getItem('endWhileLoading') === 'yes'
		sessionStorage.removeItem('endWhileLoading')`
	if _, err := chromedp.Call(other.ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: loading}); err != nil {
		w.t.Fatal(err)
	}
	js[bool](other, `(sessionStorage.setItem('endWhileLoading', 'yes'), true)`)
	other.visit(r.url)
	other.until(out)
	if !other.holds(`window.endedWhileLoading`) {
		w.t.Error("the session did not end while the page was loading")
	}
	w.until(out)
	w.login(r.token)
	other.until(in)
	if got := js[string](w, `document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage)`); strings.Contains(got, r.token[len(r.token)-20:]) || strings.Contains(got, "lull_session_") {
		w.t.Errorf("a script can read the token or the cookie: %s", got)
	}
	other.press("Sign out")
	other.until(out)
	w.until(out)
	made, err := control.Write[struct{ ID, Token string }](w.t.Context(), r.client, "POST", "/tokens", map[string]any{"name": "guest", "role": "viewer"})
	if err != nil {
		w.t.Fatal(err)
	}
	other.login(made.Token)
	w.until(in)
	if _, err := control.Write[any](w.t.Context(), r.client, "DELETE", "/tokens/"+made.ID, nil); err != nil {
		w.t.Fatal(err)
	}
	other.visit(r.url)
	other.until(out)
	w.until(out)
	w.login(r.token)
	other.until(in)
}

// tile is how many workers the overview counts for a standing.
func (w *window) tile(standing string) string {
	return fmt.Sprintf(`document.querySelector('.tile.%s .count')?.innerText`, standing)
}

func (w *window) fleet(r *watched) {
	w.sees("10 workers")
	for standing, n := range map[string]string{"active": "3", "idle": "1", "pausing_soon": "2", "blocked": "2", "unknown": "1", "paused": "1"} {
		w.until(w.tile(standing)+" === $1", n)
	}
	w.both("fleet", "light", "dark")
	w.pressAt(".tile.unknown")
	w.until(`document.querySelectorAll('.list .body .name').length === 1 && document.querySelector('.list .name').innerText.includes('security-1')`)
	w.pressAt(".tile.unknown")
	w.enter("input[type=search]", "example campus")
	w.until(`document.querySelectorAll('.list .body .name').length === 2`)
	w.until(`location.search === '?q=example+campus'`)
	w.visit(r.url + "/?q=nobody-has-this")
	w.sees("No matching workers")
	w.accessible("an empty list")
}

// warning is answered from its link: to look changes nothing, however often
// and by whom; the button on the page acts, once.
func (w *window) warning(r *watched) {
	link := r.mail.link(w.t, "campus-2", warning.Extend)
	state := func() worker.Worker {
		w.t.Helper()
		f, err := r.client.Worker(w.t.Context(), r.ids["campus-2"])
		if err != nil {
			w.t.Fatal(err)
		}
		return f
	}
	for _, method := range []string{"GET", "HEAD", "GET"} { // as programs that scan mail do
		req, err := http.NewRequestWithContext(w.t.Context(), method, link, nil)
		if err != nil {
			w.t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			w.t.Fatal(err)
		}
		res.Body.Close()
	}
	w.visit(link)
	w.sees(`campus-2.*will be paused at.*Keep it running for another hour\?`)
	w.both("warning", "light", "dark")
	halt := func(on bool) {
		if _, err := control.Write[halt.Halt](w.t.Context(), r.client, "POST", "/halt", map[string]bool{"on": on}); err != nil {
			w.t.Fatal(err)
		}
	}
	halt(true)
	w.visit(link)
	w.sees(`is not stopped for that now: All automatic actions are halted by first-admin since 2.*Keep it running for another hour\?`)
	w.until(`!/will be paused at/.test(document.body.innerText)`)
	halt(false)
	w.visit(link)
	w.sees("will be paused at")
	if s := state(); s.SnoozedUntil != nil {
		w.t.Errorf("to look at a link snoozed the worker until %v", s.SnoozedUntil)
	}
	w.press("Extend by an hour")
	w.sees("It is kept running until")
	if s := state(); s.SnoozedUntil == nil {
		w.t.Error("the answer to a warning changed nothing")
	}
	res, err := http.Post(link, "application/x-www-form-urlencoded", nil)
	if err != nil {
		w.t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusGone {
		w.t.Errorf("the same answer again: %s", res.Status)
	}
	w.visit(r.url + "/workers/" + r.ids["campus-2"])
	w.sees(`Snooze protection\s+until .*\((59|1 h)[^)]* left\)`)
}

func (w *window) worker(r *watched) {
	id := r.ids["routing-2"]
	w.visit(r.url + "/workers/" + id)
	w.until(`document.querySelector('h1 .badge.active')`)
	w.sees(`Why is it still running\?\s+Last used .* ago \(cml\); it is idle after 1 h\..*Activity & Lifecycle.*State\s+Active: \d+ (s|min) of 1 h\b.*Auto-pause\s+in \d+ min.*Recent activity`)
	w.until(`document.querySelectorAll('#recent + .scroll tbody tr').length > 3`)
	w.both("worker", "light", "dark")

	w.press("Snooze")
	w.until(`document.querySelector('dialog[open] #until')`)
	w.accessible("the snooze")
	w.press("For 2 hours")
	w.sees(`Snooze protection\s+until .*by first-admin`)
	w.press("End snooze")
	w.sees(`Snooze protection\s+none`)
	w.more("More commands", "Turn off idle detection")
	w.sees(`Idle detection\s+off`)
	w.more("More commands", "Turn on idle detection")
	w.sees(`Idle detection\s+on`)

	w.alone(r)

	w.press("Pause")
	w.sees("Pause routing-2\\?.*even if someone is using it")
	w.accessible("the question before a pause")
	w.press("Pause")
	w.sees(`Last paused.*manual, by first-admin`)
	w.sees("State\\s+Stopped\\b.*How to resume it.*Recent events")
	w.until(`!/not_idle_yet|signal_unknown|What prevents a pause/.test(document.body.innerText)`)
	w.until(`document.querySelector('h1 .badge.paused')`)
	w.press("Resume")
	w.until(`document.querySelector('h1 .badge:is(.active, .idle, .pausing_soon, .checking)') && /Last resumed\s+[^n].*by first-admin/s.test(document.body.innerText)`)

	// Of one that was not used lately badge, answer and state say the same.
	w.visit(r.url + "/workers/" + r.ids["research-1"])
	w.until(`document.querySelector('h1 .badge.idle')`)
	w.sees(`Why is it still running\?\s+Idle for 1 h[^.]* of 7 d\..*State\s+Idle: 1 h[^.]* of 7 d\b`)
	w.visit(r.url + "/workers/" + r.ids["security-1"])
	w.code("signal_unknown")
	w.until(`document.querySelector('h1 .badge.unknown')`)
	w.visit(r.url + "/workers/w-none")
	w.sees("Worker w-none not found")
	w.forgive("status of 404")
	w.forgive("status of 404")
}

// alone makes an exception and a policy for the worker that is shown, and ends
// them.
func (w *window) alone(r *watched) {
	w.press("Add exception")
	w.until(`document.querySelector('dialog[open] #o-reason')`)
	w.accessible("an exception for one worker")
	w.enter("#o-reason", "a demo")
	w.press("Add")
	w.sees(`Exception\s+Keep running, until .* by first-admin: a demo`)
	l, err := control.Read[control.List[control.Exception]](w.t.Context(), r.client, "/overrides")
	if err != nil || len(l.Items) != 1 || !slices.Equal(l.Items[0].Selector.Workers, []string{r.ids["routing-2"]}) {
		w.t.Errorf("exceptions: %+v, %v", l.Items, err)
	}
	w.picture("worker-exception")
	w.press("End the exception for routing-2")
	w.until(`!/Keep running, until/.test(document.body.innerText)`)
	choose := func(policy, shows string) {
		w.press("Change policy")
		w.until(`document.querySelector('#w-policy')`)
		js[bool](w, `(() => { const e = document.querySelector('#w-policy'); e.value = $1; e.dispatchEvent(new Event('change', {bubbles: true})); return true })()`, policy)
		w.accessible("the choice of a policy")
		w.press("Apply")
		w.sees(shows)
	}
	choose("conservative", `Policy\s+conservative set on this worker\s+Idle timeout\s+4 h\b`)
	choose("", `Idle timeout\s+1 h\b`)
}

// more chooses from a menu by its name.
func (w *window) more(menu, item string) {
	w.t.Helper()
	w.press(menu)
	w.until(`document.querySelector('[role=menu]')?.matches(':popover-open')`)
	w.click(`[...document.querySelectorAll('[role=menu] [role^=menuitem]')].find((e) => e.innerText.replace('↗', '').trim() === $1)`, item)
}

// Modifiers of the DevTools protocol.
const ctrlKey, shiftKey = 2, 8

// code waits for the code of a block, which is under the details.
func (w *window) code(code string) {
	w.t.Helper()
	w.until(`[...document.querySelectorAll('details.codes:not([open]) code')].some((e) => e.textContent === $1)`, code)
}

// refused waits until the open form shows an error that contains text, such as
// the field's name.
func (w *window) refused(text string) {
	w.t.Helper()
	w.until(`document.querySelector('dialog[open] .fault')?.innerText.includes($1)`, text)
}

// clear empties a field.
func (w *window) clear(css string) {
	w.t.Helper()
	w.until(`document.querySelector($1)`, css)
	js[bool](w, `(() => { const v = document.querySelector($1); v.value = ''; v.dispatchEvent(new Event('input', {bubbles: true})); return true })()`, css)
}

func (w *window) halt(r *watched) {
	w.visit(r.url + "/")
	w.press("Halt")
	w.sees("Stop all automatic actions")
	w.enter("#halt-reason", "the network is moved")
	js[bool](w, `(() => { const e = document.querySelector('#halt-hours'); e.value = '4'; e.dispatchEvent(new Event('change', {bubbles: true})); return true })()`)
	w.accessible("the question before a halt")
	w.press("Halt everything")
	w.sees(`Halted\. All.*: the network is moved\. Ends automatically in [34] hours`)
	for _, path := range []string{"/", "/audit", "/settings", "/workers/" + r.ids["campus-1"]} {
		w.visit(r.url + path)
		w.sees(`Halted\. All automatic actions are stopped\s+by first-admin`)
	}
	w.visit(r.url)
	w.until(`document.querySelector('.tile.pausing_soon') && !/paused if nothing happens/.test(document.body.innerText)`)
	w.both("halted", "light")
	w.press("Lift the halt")
	w.until(`!document.querySelector('.banner.halt')`)
}

func (w *window) pages(r *watched) {
	w.hosts(r)
	w.agents(r)
	for i, p := range []struct{ path, text string }{
		{"policies", "aggressive.*hibernates after 15 min.*conservative"},
		{"schedules", "No schedules yet"},
		{"notifications", "mail.*Working.*delivered"},
		{"audit", "Imported.*first-admin"},
		{"settings", "worker_idle_timeout_minutes.*60 minutes"},
		{"tokens", "first-admin"},
	} {
		w.visit(r.url + "/" + p.path)
		w.sees(p.text)
		w.both(p.path, []string{"light", "dark"}[i%2])
	}
	w.visit(r.url + "/settings")
	w.press("Change worker_warn_before_minutes")
	w.clear("#value")
	w.enter("#value", "5000")
	w.press("Save")
	w.refused("is not between")
	w.forgive("status of 422")
	w.clear("#value")
	w.enter("#value", "7")
	w.press("Save")
	w.until(`!document.querySelector('dialog[open]')`)
	w.until(`/worker_warn_before_minutes[^]*?7 minutes\s[^]*?stored/.test(document.body.innerText)`)

	w.visit(r.url + "/tokens")
	w.press("Create token")
	w.enter("#token-name", "night watch")
	w.press("Create")
	w.until(`document.querySelector('dialog[open] .secret')?.innerText.startsWith('lull_')`)
	w.press("Done")
	w.press("Revoke night watch")
	w.sees("Revoke night watch\\?")
	w.press("Revoke")
	w.sees("night watch.*revoked")
	w.visit(r.url + "/nowhere")
	w.sees("Page not found")
	w.early(r)
	w.audit(r)
	w.channels(r)
	w.rules(r)
}

// early reads the savings of a server that has run for minutes: no rate, no
// pattern of a week and no line twice, and the page says that there is not enough
// data yet.
func (w *window) early(r *watched) {
	w.visit(r.url + "/savings")
	w.until(`document.querySelector('[data-testid=early]')`)
	w.until(`!document.querySelector('.heat, .heatmap, [data-chart]')`)
	if text := js[string](w, `document.querySelector('main').innerText`); strings.Contains(text, " a day") {
		w.t.Errorf("the savings of minutes have a rate: %s", text)
	}
	if twice := js[[]string](w, `[...document.querySelectorAll('.causes .what strong, .numbers tbody th')].map((e) => e.innerText).filter((t, i, all) => all.indexOf(t) !== i)`); len(twice) > 0 {
		w.t.Errorf("there twice: %q", twice)
	}
	w.both("savings-early", "light", "dark")
	w.visit(r.url)
	w.until(`document.querySelector('.saved')?.innerText.trim()`)
	if text := js[string](w, `document.querySelector('.saved').innerText`); strings.Contains(text, " a day") {
		w.t.Errorf("the fleet shows a rate: %s", text)
	}
}

// audit looks for what was done: by worker, person and kind, further back than
// one page, and in a table that is saved.
func (w *window) audit(r *watched) {
	for i := range 60 {
		for _, body := range []map[string]any{{"minutes": 60 + i}, {}} {
			if _, err := control.Write[any](w.t.Context(), r.client, "POST", "/workers/"+r.ids["campus-1"]+"/snooze", body); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	w.visit(r.url + "/audit")
	w.sees(`100 entries, older ones not loaded.*Snoozed\s+campus-1\s+first-admin`)
	w.tabTo("Load more")
	do(w, chromedp.KeyEvent(kb.Enter))
	w.until(`document.querySelectorAll('#entries tbody tr').length > 120`)
	w.until(`((all) => new Set(all).size === all.length)([...document.querySelectorAll('#entries tbody tr')].map((e) => e.dataset.entry + e.innerText))`)
	w.enter("input[name=worker]", "routing-2")
	w.enter("input[name=by]", "FIRST")
	js[bool](w, `(document.querySelector('select[name=kind]').value = 'person', true)`)
	w.press("Filter")
	w.until(`/worker_id=/.test(location.search) && document.querySelectorAll('#entries tbody tr').length > 2`)
	w.until(`[...document.querySelectorAll('#entries tbody tr')].every((e) => /routing-2\s+first-admin/.test(e.innerText))`)
	w.until(`document.querySelector('input[name=worker]').value === 'routing-2'`)
	w.both("audit-filtered", "light", "dark")
	js[bool](w, `(() => { const plain = URL.createObjectURL; URL.createObjectURL = (b) => { window.exported = b.text(); return plain.call(URL, b) }; HTMLAnchorElement.prototype.click = () => {}; return true })()`)
	w.press("Export CSV")
	w.until(`window.exported`)
	lines := strings.Split(strings.TrimSpace(js[string](w, `window.exported`)), "\n")
	if want := "at,id,action,worker,worker_id,aws_region,by,by_kind,from,to,reason,detail"; lines[0] != want || len(lines) < 3 ||
		slices.ContainsFunc(lines[1:], func(l string) bool { return !strings.Contains(l, ",routing-2,") }) {
		w.t.Errorf("the exported table is %.400q", lines)
	}
	w.enter("input[name=worker]", "-none")
	w.press("Filter")
	w.until(`document.querySelector('.filters [role=alert]')`)
	w.forgive("status of 404")
	w.visit(r.url + "/audit?by=nobody-at-all")
	w.sees("No matching entries")
}

// channels adds a mailbox that also writes to each worker's contacts, changes
// it where the settings are, and removes it.
func (w *window) channels(r *watched) {
	contacts := func() bool {
		w.t.Helper()
		s, err := control.Read[control.Settings](w.t.Context(), r.client, "/settings")
		if err != nil {
			w.t.Fatal(err)
		}
		for _, v := range s.Items {
			if v.Key == "notify_channels" {
				team, _ := v.Value.(map[string]any)["team"].(map[string]any)
				return team["to_contacts"] == true
			}
		}
		return false
	}
	w.visit(r.url + "/notifications")
	w.press("Add channel")
	w.enter("#c-name", "team")
	w.enter("#c-from", "lull@example.org")
	w.enter("#c-relay", "127.0.0.1:9")
	w.press("Save")
	w.refused("it needs 1 to 50 addresses")
	w.forgive("status of 422")
	w.pressAt("#c-to_contacts")
	w.accessible("a new channel")
	w.picture("channel")
	w.press("Save")
	w.sees("team.*Email to each worker's contacts")
	if !contacts() {
		w.t.Error("the box for the workers' contacts changed nothing")
	}
	w.visit(r.url + "/settings")
	w.sees("team: email to each worker's contacts")
	w.press("Change notify_channels")
	w.until(`document.querySelector('#c-which')`)
	js[bool](w, `(() => { const e = document.querySelector('#c-which'); e.value = 'team'; e.dispatchEvent(new Event('change', {bubbles: true})); return true })()`)
	w.until(`document.querySelector('#c-to_contacts').checked`)
	w.enter("#c-to", "ops@example.org")
	w.pressAt("#c-to_contacts")
	w.press("Save")
	w.sees("team: email to ops@example.org")
	if contacts() {
		w.t.Error("the box for the workers' contacts stays")
	}
	w.visit(r.url + "/notifications")
	w.press("Remove team")
	w.press("Remove")
	w.until(`!/Email to ops/.test(document.body.innerText)`)
	w.sees("mail.*Working")
}

// hosts are on the pages of hosts.
func (w *window) hosts(r *watched) {
	r.hosts()
	w.visit(r.url + "/hosts")
	w.sees(`1 of 2 stopped reporting.*attic\s+stopped reporting.*unknown.*desk\s+reporting.*1 running, 1 paused.*200 MiB of 8 GiB`)
	w.both("hosts", "light", "dark")
	w.press("desk")
	w.sees(`db process\s+running.*keeps running\s+lease ci \(backup\), 2 connections.*127\.0\.0\.1:5432.*web process\s+paused`)
	w.both("host", "light", "dark")
	w.press("db")
	for end := time.Now().Add(patience); time.Now().Before(end); do(w, chromedp.Reload()) {
		w.sees(`Why is it running\?.*2 connections are open`)
		if !w.holds(`/did not answer in time/.test(document.body.innerText)`) {
			break // else the page is as slow as a loaded machine: desk has a second and a half
		}
	}
	w.sees(`Why is it running\?.*2 connections are open.*checked.*2 connections are open`)
	w.code("connection_open")
	w.both("instance", "light", "dark")
	w.visit(r.url + "/hosts/attic")
	w.sees(`It was last heard of at.*cam process\s+unknown\s+was running`)
	w.both("a silent host", "light", "dark")
	w.press("cam")
	w.sees(`Readings: unknown`)
	w.visit(r.url + "/hosts/desk/none")
	w.sees("Host desk has no instance none")
	w.forgive("status of 404")
	w.visit(r.url + "/hosts/nobody")
	w.sees("Host nobody not found")
	w.forgive("status of 404")
}

// agents shows who hears each machine, and which are silent or outdated. That
// another server hears one is laid into the answer: what it looks like is held
// by the server's own tests.
func (w *window) agents(r *watched) {
	w.visit(r.url + "/agents")
	w.sees("No agents yet")
	now := time.Now()
	if _, err := control.Write[any](w.t.Context(), r.client, "POST", "/agents/lab-7/report", control.AgentReport{At: now, StartedAt: now, BootID: "b",
		Version: "1.2.3", Interval: idle.Duration(time.Minute), LastUse: now, Idle: 4, Holder: "agent",
		Readings: []idle.Reading{idle.Judge("cpu", 2, 5, "%", time.Minute, now)}}); err != nil {
		w.t.Fatal(err)
	}
	js[bool](w, `(() => {
		const plain = window.fetch
		window.fetch = async (at, o) => {
			const answer = await plain(at, o)
			if (!String(at.url ?? at).includes('/agents?')) return answer
			const list = await answer.json()
			list.items.push({name: 'lab-8', kind: 'agent', server: 'another', reported_at: new Date().toISOString(), age_seconds: 5, version: '0.9.0', outdated: true},
				{name: 'lab-9', kind: 'agent', server: 'another', reported_at: new Date(0).toISOString(), age_seconds: 5e7, version: '1.2.3', stale: true})
			return new Response(JSON.stringify(list), {headers: {'Content-Type': 'application/json'}})
		}
		return true
	})()`)
	w.sees("2 report to server another.*1 has stopped reporting.*1 runs an older version.*lab-7.*Idle for 4 min.*Version 1\\.2\\.3.*cpu.*quiet.*" +
		"lab-8.*to server another.*Reports to server another.*Version 0\\.9\\.0, older than its server.*lab-9.*Stopped reporting")
	w.both("agents", "light")
}

// rules makes a schedule, a policy and an exception, and puts them on workers.
func (w *window) rules(r *watched) {
	w.visit(r.url + "/schedules")
	w.press("New schedule")
	w.enter("#s-name", "office")
	w.clear("#s-zone")
	w.enter("#s-zone", "Europe/Nowhere")
	w.press("Save")
	w.refused("zone")
	w.forgive("status of 422")
	w.clear("#s-zone")
	w.enter("#s-zone", "Europe/Berlin")
	w.press("Save")
	w.sees("office.*(Open|Closed) now, (opens|closes) in .*Europe/Berlin")
	w.until(`document.querySelectorAll('.week .bar').length === 5`)
	w.both("schedule", "light")
	w.press("Edit office")
	w.until(`document.querySelector('.weekgrid [data-day="4"][data-slot="35"].on') && !document.querySelector('.weekgrid [data-day="5"] .on, .weekgrid [data-slot="36"].on')`)
	w.pressAt(`.weekgrid [data-day="5"][data-slot="20"]`) // Saturday at 10:00
	do(w, chromedp.KeyEvent(kb.ArrowRight, chromedp.KeyModifiers(shiftKey)))
	w.until(`document.querySelector('.weekgrid [data-day="5"][data-slot="21"].on')`)
	w.accessible("the week of a schedule")
	w.picture("week-grid")
	w.press("Save")
	w.until(`!document.querySelector('dialog[open]')`)
	if office, err := control.Read[struct {
		Windows []struct{ Days, From, To string }
	}](w.t.Context(), r.client, "/schedules/office"); err != nil || fmt.Sprint(office.Windows) != "[{mon-fri 08:00 18:00} {sat 10:00 11:00}]" {
		w.t.Errorf("the painted week is %v, %v", office.Windows, err)
	}
	w.press("Edit office")
	w.press("One-time windows, exact times, maintenance and holidays")
	w.clear("#s-windows")
	w.enter("#s-windows", "mon-fri 08:00-18:00\n2026-11-25 22:00-06:00 hold")
	w.enter("#s-grace", "25")
	w.press("Save")
	w.sees(`quiet for 25 min`)
	w.sees(`hold: open, nothing is paused.*2026-11-25 22:00 to 06:00 of the next day\s+hold`)
	w.until(`document.querySelectorAll('.week .bar').length === 6`)
	w.until(`[...document.querySelectorAll('.week text')].every((e) => e.getBoundingClientRect().right <= e.ownerSVGElement.getBoundingClientRect().right)`)
	w.picture("schedule-held")

	w.visit(r.url + "/policies")
	w.press("New policy")
	w.enter("#p-name", "patient")
	w.enter("#p-idle_timeout_minutes", "500")
	w.press("Save")
	w.sees("patient.*pauses after 8 h 20 min")
	w.press("Apply patient")
	w.enter("#a-region", "eu-west-1")
	w.press("Apply")
	w.sees(`Groups.*all in eu-west-1\s+patient`)
	w.press("Add exception")
	w.press("Add")
	w.refused("whole fleet")
	w.enter("#o-workers", "campus-1")
	w.press("Add")
	w.sees("Keep running campus-1, until")
	l, err := control.Read[control.List[control.Exception]](w.t.Context(), r.client, "/overrides")
	if err != nil || len(l.Items) != 1 || !slices.Equal(l.Items[0].Selector.Workers, []string{r.ids["campus-1"]}) {
		w.t.Errorf("exceptions: %+v, %v", l.Items, err)
	}
	w.press("Add exception")
	w.pressAt("#o-all")
	w.press("Add")
	w.sees("Keep running the whole fleet, until")
	w.press("End the exception for the whole fleet")
	w.press("Add exception")
	w.enter("#o-tags", "team=network")
	js[bool](w, `(() => { const e = document.querySelector('#o-until'); e.value = new Date(Date.now() + 7200e3).toISOString().slice(0, 16); e.dispatchEvent(new Event('input', {bubbles: true})); return true })()`)
	w.press("Add")
	w.sees("Keep running team=network, until")
	w.picture("policies-used")
	w.narrow(r.url)
	w.visit(r.url + "/workers/" + r.ids["research-2"])
	w.sees(`Rules.*Policy\s+patient.*Idle timeout\s+8 h 20 min`)
}

// narrow holds pages to the width of a phone: none is wider, and every page is
// in sight in the menu.
func (w *window) narrow(url string) {
	w.t.Helper()
	w.wide(390)
	for page, ready := range map[string]string{"policies": "Groups.*eu-west-1", "settings": "worker_idle_timeout_minutes", "schedules": "office", "": "workers", "tokens": "admin", "audit": "Imported", "notifications": "Notifications"} {
		w.visit(url + "/" + page)
		w.sees(ready)
		if wide := js[[]string](w, `document.documentElement.scrollWidth <= document.documentElement.clientWidth ? []
			: [...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML.slice(0, 80))`); len(wide) > 0 {
			w.t.Errorf("%q is wider than a narrow screen: %q", page, wide)
		}
		w.until(`document.querySelector('nav').getBoundingClientRect().height < 64`) // one line
		w.pressAt("nav button.pages")
		w.until(`[...document.querySelectorAll('nav li a, nav .theme select')].every((a) => { const r = a.getBoundingClientRect(); return r.width > 0 && r.left >= 0 && r.right <= innerWidth && r.bottom <= innerHeight })`)
		w.pressAt("nav button.pages")
		w.picture("narrow-" + page)
	}
	w.wide(1360)
}

// road is the network between a browser and a server; it can be cut.
type road struct {
	l     net.Listener
	mu    sync.Mutex
	to    string // where it leads
	open  map[net.Conn]bool
	shut  bool
	resum []string // Last-Event-ID of every request that had one
}

func newRoad(t *testing.T, to string) *road {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &road{l: l, to: to, open: map[net.Conn]bool{}}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if !r.enter(c) {
				c.Close()
				continue
			}
			all.Go(func() { r.carry(c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		r.set(true)
		all.Wait()
	})
	return r
}

func (r *road) enter(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.shut {
		r.open[c] = true
	}
	return !r.shut
}

// set cuts the road, with everything on it, or mends it.
func (r *road) set(shut bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.shut = shut
	for c := range r.open {
		if shut {
			c.Close()
			delete(r.open, c)
		}
	}
}

var resumes = regexp.MustCompile(`(?i)\r\nLast-Event-ID: (\d+)`)

// lead has the road lead elsewhere from now on.
func (r *road) lead(to string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.to = to
}

func (r *road) carry(c net.Conn) {
	defer c.Close()
	r.mu.Lock()
	to := r.to
	r.mu.Unlock()
	s, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer s.Close()
	if !r.enter(s) {
		return
	}
	back := make(chan struct{})
	go func() {
		defer close(back)
		_, _ = io.Copy(c, s) // a cut connection is expected here
		c.Close()
	}()
	b := make([]byte, 64<<10)
	for {
		n, err := c.Read(b)
		if m := resumes.FindSubmatch(b[:n]); m != nil {
			r.mu.Lock()
			r.resum = append(r.resum, string(m[1]))
			r.mu.Unlock()
		}
		if _, werr := s.Write(b[:n]); err != nil || werr != nil {
			break
		}
	}
	s.Close()
	<-back
}

// TestDashboardReconnects cuts the network under the page while things
// happen: the page says that it is not live, shows everything that happened
// once it is, and never puts older data over newer.
func TestDashboardReconnects(t *testing.T) {
	chrome := startBrowser(t)
	r := newWatched(t)
	way := newRoad(t, strings.TrimPrefix(r.url, "http://"))
	w := open(t, chrome, "http://"+way.l.Addr().String()+"/audit")
	w.login(r.token)
	w.sees("Imported")
	w.until(`document.querySelector('.link.live')`)

	w.mu.Lock()
	w.cut = true
	w.mu.Unlock()
	way.set(true)
	w.until(`document.querySelector('.link.offline')`)
	id := r.ids["campus-1"]
	const many = 30
	for i := range many {
		body := map[string]any{"minutes": 60 + i}
		if i%2 == 1 {
			body = map[string]any{}
		}
		if _, err := control.Write[any](t.Context(), r.client, "POST", "/workers/"+id+"/snooze", body); err != nil {
			t.Fatal(err)
		}
	}
	missed, err := control.Read[control.List[audit.Entry]](t.Context(), r.client, "/audit?newest=true&limit=100&worker_id="+id)
	if err != nil {
		t.Fatal(err)
	}
	want := []int64{}
	for _, e := range missed.Items {
		if strings.HasPrefix(e.Action, "snooze") {
			want = append(want, e.ID)
		}
	}
	if len(want) < many {
		t.Fatalf("only %d of %d changes are in the audit log", len(want), many)
	}
	way.set(false)
	w.until(`document.querySelector('.link.live')`)
	shown := `[...document.querySelectorAll('#entries [data-entry]')].map((e) => Number(e.dataset.entry))`
	w.until(`((all) => $1.every((id) => all.filter((x) => x === id).length === 1))(`+shown+`)`, want)
	got := slices.DeleteFunc(js[[]int64](w, shown), func(id int64) bool { return !slices.Contains(want, id) })
	if !slices.Equal(got, want) {
		t.Errorf("what was missed is shown as %v, want %v", got, want)
	}
	way.mu.Lock()
	resumed := len(way.resum)
	way.mu.Unlock()
	if resumed == 0 {
		t.Error("the page did not continue after the last event that it had")
	}
	w.newerStays(r, "http://"+way.l.Addr().String())
}

// newerStays gives the page what is older than what it shows, in both ways in
// which that comes: the answer to an earlier question that was long on its way,
// and the answer to a new question from a server that is behind. Neither is
// shown, not for a moment.
func (w *window) newerStays(r *watched, address string) {
	id := r.ids["routing-1"]
	snooze := func(minutes int) {
		w.t.Helper()
		if _, err := control.Write[any](w.t.Context(), r.client, "POST", "/workers/"+id+"/snooze", map[string]any{"minutes": minutes}); err != nil {
			w.t.Fatal(err)
		}
	}
	// In the same document, so that the changed fetch stays.
	js[bool](w, `(() => {
		const plain = window.fetch; window.held = []
		window.fetch = async (url, o) => {
			const res = await plain(url, o)
			if (url !== $1) return res
			const body = await res.blob()
			if (window.hold) { window.hold = false; window.old = () => new Response(body, res); await new Promise((go) => window.held.push(go)); return window.late = window.old() }
			if (window.behind) { window.behind = false; return window.late = window.old() }
			return new Response(body, res)
		}
		return true
	})()`, "/api/v1/workers/"+id)
	w.press("Fleet")
	w.press("routing-1")
	w.sees("Snooze protection.*none")
	js[bool](w, `window.hold = true`)
	snooze(120)
	w.until(`window.held.length === 1`) // an answer with two hours is on its way
	snooze(600)
	// Who asked for it is told while the worker has the same end as its standing.
	w.sees(`\((9 h 59|10 h 00) min left\), by first-admin`)
	js[bool](w, `(() => {
		window.older = []; window.late = null
		new MutationObserver(() => { const m = /Snooze protection\s+until.*/.exec(document.querySelector('main').innerText); if (m && !m[0].includes(', by ')) window.older.push(m[0]) })
			.observe(document.querySelector('main'), {subtree: true, childList: true, characterData: true})
		return true
	})()`)
	// taken waits until the page has read the late answer and had time to draw.
	taken := func() {
		w.t.Helper()
		w.until(`window.late?.bodyUsed`)
		js[bool](w, `(window.drawn = false, requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => { window.drawn = true }))), true)`)
		w.until(`window.drawn`)
		if older := js[[]string](w, `window.older`); len(older) > 0 {
			w.t.Errorf("what is older took the place of what is newer: %q", older)
		}
	}
	js[bool](w, `(window.held[0](), true)`)
	taken()
	js[bool](w, `(window.late = null, window.behind = true)`)
	w.press("Check now")
	w.until(`document.querySelector('.toast:not(.bad)')`)
	taken()
	w.sees(`\((9 h 5\d min|10 h 00 min) left`)
}

// forgive waits for a complaint of the browser that a step meant to cause.
func (w *window) forgive(text string) {
	w.t.Helper()
	eventually(w.t, func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		n := len(w.faults)
		w.faults = slices.DeleteFunc(w.faults, func(f string) bool { return strings.Contains(f, text) })
		if len(w.faults) == n {
			return fmt.Errorf("the browser did not complain of %s", text)
		}
		return nil
	})
}
