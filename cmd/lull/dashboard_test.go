package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"lull/internal/link/control"
	"lull/internal/sim"
)

// patience bounds every wait of the browser tests: the machine may be loaded.
const patience = 90 * time.Second

// daemon runs a command of lull in this process until the test ends, and
// returns what the first line of its output that matches says.
func daemon(t *testing.T, says *regexp.Regexp, args ...string) []string {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	out, w := io.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		code := run(ctx, args, strings.NewReader(""), w, w, os.Getenv)
		w.CloseWithError(fmt.Errorf("lull %s ended with %d", args[0], code))
	}()
	found, done := make(chan []string, 1), make(chan struct{})
	var said strings.Builder // read once done
	t.Cleanup(func() {
		cancel()
		<-ended
		<-done
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
		"--listen", "127.0.0.1:0", "--cml-port", at[1], "--admin-token-file", tokens, "--log-level", "error")[0]
	b, err := os.ReadFile(tokens)
	if err != nil {
		t.Fatal(err)
	}
	r.token = strings.TrimSpace(string(b))
	if r.client, err = control.NewClient(r.url, r.token, nil); err != nil {
		t.Fatal(err)
	}
	r.fill()
	return r
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
		w, err := control.Write[struct {
			ID string `json:"id"`
		}](r.t.Context(), r.client, "POST", "/workers/import",
			map[string]any{"name": i.Name, "aws_region": i.Region, "ec2_instance_id": i.ID, "tls_insecure": true, "owner": i.Name[:4] + "@example.org"})
		if err != nil {
			r.t.Fatal(err)
		}
		r.ids[i.Name] = w.ID
	}
	if _, err := control.Write[any](r.t.Context(), r.client, "POST", "/workers/arm", map[string]any{"all": true}); err != nil {
		r.t.Fatal(err)
	}
}

// eventually repeats look until it returns no error.
func eventually(t *testing.T, look func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); pause() {
		if err = look(); err == nil {
			return
		}
	}
	t.Fatalf("not within %v: %v", patience, err)
}

// window is a page in a real browser. Whatever the browser calls an error
// fails the test when the window is closed.
type window struct {
	t   *testing.T
	ctx context.Context

	mu     sync.Mutex
	faults []string
	cut    bool // the server is out of reach on purpose
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
	if err := chromedp.Do(ctx, chromedp.Navigate("about:blank")); err != nil {
		t.Fatalf("cannot start chromium: %v", err)
	}
	t.Cleanup(func() {
		if err := chromedp.Cancel(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Logf("chromium does not end by itself: %v", err)
		}
		end()
	})
	return ctx
}

func open(t *testing.T, from context.Context, url string) *window {
	t.Helper()
	ctx, cancel := chromedp.NewContext(from, chromedp.WithNewBrowserContext())
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
	w.visit(url)
	return w
}

// fault notes what the browser complains about, but for the network when it
// was cut on purpose.
func (w *window) fault(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cut && strings.Contains(text, "net::ERR_") {
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
		look, end := context.WithTimeout(w.ctx, 10*time.Second)
		defer end()
		text, _ := chromedp.Run(look, chromedp.Evaluate[string](`location.href + "\n" + document.body.innerText`))
		w.t.Fatalf("%v; the page says:\n%s", err, text)
	}
	return v
}

// js is what an expression says on the page; a promise is waited for.
func js[T any](w *window, expression string, args ...any) T {
	w.t.Helper()
	for i, a := range args {
		b, err := json.Marshal(a)
		if err != nil {
			w.t.Fatal(err)
		}
		args[i] = string(b)
	}
	return do(w, chromedp.Evaluate[T](fmt.Sprintf(expression, args...), chromedp.EvalAwaitPromise))
}

// until waits until an expression is true on the page.
func (w *window) until(expression string, args ...any) {
	w.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); pause() {
		if js[bool](w, "!!("+expression+")", append([]any(nil), args...)...) {
			return
		}
	}
	w.t.Fatalf("not within %v: %s %v; the page says:\n%s", patience, expression, args, js[string](w, `document.body.innerText`))
}

// sees waits until the page's text matches a regular expression.
func (w *window) sees(pattern string) {
	w.t.Helper()
	w.until(`new RegExp(%s, 's').test(document.body.innerText)`, pattern)
}

func (w *window) visit(url string) {
	w.t.Helper()
	do(w, chromedp.Navigate(url))
}

// finds is an expression for what a person would press under a name: a
// button, link or option, in the open dialog if there is one.
const finds = `[...(document.querySelector('dialog[open]') ?? document).querySelectorAll('button, a, summary, label, select')]
	.find((e) => (e.getAttribute('aria-label') ?? e.innerText).trim() === %s && e.getAttribute('aria-disabled') !== 'true')`

// press clicks, with the mouse, what has that name.
func (w *window) press(name string) {
	w.t.Helper()
	w.until(finds, name)
	at := js[[]float64](w, `(() => { const e = `+finds+`; e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()`, name)
	do(w, chromedp.MouseClickXY(at[0], at[1]))
}

// enter writes into the field that css finds.
func (w *window) enter(css, text string) {
	w.t.Helper()
	w.until(`document.querySelector(%s)`, css)
	js[bool](w, `(document.querySelector(%s).focus(), true)`, css)
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

// picture keeps what the page looks like among the artifacts of the test.
func (w *window) picture(name string) {
	w.t.Helper()
	shot := do(w, chromedp.CaptureScreenshot())
	if err := os.WriteFile(filepath.Join(w.t.ArtifactDir(), name+".png"), shot, 0o644); err != nil {
		w.t.Fatal(err)
	}
}

// TestDashboard is a person at the dashboard of a real server, with a real
// browser, over a simulated cloud.
func TestDashboard(t *testing.T) {
	chrome := startBrowser(t)
	r := newWatched(t)
	w := open(t, chrome, r.url)
	w.sees("Sign in with a token")
	w.login(r.token)
	w.sees("10 workers")
	w.sees("routing-1")
	w.picture("fleet")
}
