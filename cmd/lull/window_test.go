package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"lull/internal/lib/errtest"
	"lull/internal/lib/waittest"
)

// window is a page in a real browser. Errors that the browser reports fail the test
// when the window is closed.
type window struct {
	t   *testing.T
	ctx context.Context

	mu     sync.Mutex
	faults []string
	cut    bool // the test has made the server unreachable
	ended  bool // the test has ended the session, so requests may be refused
}

// startBrowser starts Chromium for a test.
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
	// not a context with a deadline, because that would also end the browser
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

// open opens a separate window, like another user's browser.
func open(t *testing.T, from context.Context, address string) *window {
	t.Helper()
	return tab(t, from, address, chromedp.WithNewBrowserContext())
}

// tab opens another tab of the browser of from. It shares cookies and storage, unless
// o says otherwise.
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

// fault records an error that the browser reports. Network errors are ignored while
// the test has made the server unreachable.
func (w *window) fault(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	// Other tests on this machine change its network, which aborts requests. The page
	// repeats them.
	if w.ended && unauthorized.MatchString(text) || w.cut && strings.Contains(text, "net::ERR_") || strings.Contains(text, "net::ERR_NETWORK_CHANGED") {
		return
	}
	w.faults = append(w.faults, text)
}

// do runs one browser action, for at most patience.
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

// js evaluates an expression on the page and, if the result is a promise, awaits it.
// $1, $2 and so on in it are replaced by the arguments, as JSON.
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

// holds reports whether an expression is true on the page. It returns false while the
// page is loading.
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
		case time.Since(empty) > patience/3: // the page's script may not have been loaded
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

// press clicks the element called name with the mouse.
func (w *window) press(name string) {
	w.t.Helper()
	w.click(finds, name)
}

// pressAt clicks the element that the selector css finds.
func (w *window) pressAt(css string) {
	w.t.Helper()
	w.click(`document.querySelector($1)`, css)
}

// click clicks an element. It repeats a click that missed because the page moved, or
// that came while the button was disabled.
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
		if !w.holds(`window.lullHit === false`) { // lullHit is true if the click missed; on a page that the click opened, the variable does not exist
			return
		}
	}
	w.t.Fatalf("no click reached %s %s", what, arg)
}

// enter types text into the field that the selector css finds.
func (w *window) enter(css, text string) {
	w.t.Helper()
	w.until(`document.querySelector($1)`, css)
	js[bool](w, `(document.querySelector($1).focus(), true)`, css)
	do(w, chromedp.KeyEvent(text))
}

// login signs in with a token.
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

// artifacts returns the directory in which a test keeps its artifacts: below
// LULL_ARTIFACTS, which make test sets, or that of go test -artifacts; empty if none
// are kept.
func artifacts(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("LULL_ARTIFACTS"); dir != "" {
		dir = filepath.Join(dir, filepath.FromSlash(t.Name()))
		errtest.None(t, os.MkdirAll(dir, 0o755))
		return dir
	}
	if f := flag.Lookup("test.artifacts"); f != nil && f.Value.String() == "true" {
		return t.ArtifactDir()
	}
	return ""
}

// keep writes an artifact of a test, if artifacts are kept.
func keep(t *testing.T, name string, make func() []byte) {
	t.Helper()
	dir := artifacts(t)
	if dir == "" {
		return
	}
	errtest.None(t, os.WriteFile(filepath.Join(dir, name), make(), 0o644))
}

// picture stores a screenshot.
func (w *window) picture(name string) {
	w.t.Helper()
	keep(w.t, name+".png", func() []byte { return do(w, chromedp.CaptureScreenshot()) })
}

// accessible checks that axe finds nothing serious or critical on the current page.
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

// fits waits until nothing on the page is wider than the window, but for what
// scrolls by itself. A page follows a change of the window's width one or more
// frames later.
func (w *window) fits(what string) {
	w.t.Helper()
	const wide = `(document.documentElement.scrollWidth <= document.documentElement.clientWidth ? []
		: [...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML.slice(0, 100)))`
	if !waittest.Within(patience, func() bool { return w.holds(wide + `.length === 0`) }) {
		w.t.Errorf("%s is wider than the window: %q", what, js[[]string](w, wide))
	}
}

// in makes w report failures to t.
func (w *window) in(t *testing.T) *window {
	was := w.t
	w.t = t
	t.Cleanup(func() { w.t = was })
	return w
}

// both takes pictures of a page in light and dark. It checks the accessibility in the
// schemes that checked lists.
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

// tile returns a script for the number of workers with a standing in the overview.
func (w *window) tile(standing string) string {
	return fmt.Sprintf(`document.querySelector('.tile.%s .count')?.innerText`, standing)
}

// more selects an item in a menu.
func (w *window) more(menu, item string) {
	w.t.Helper()
	w.press(menu)
	w.until(`document.querySelector('[role=menu]')?.matches(':popover-open')`)
	w.click(`[...document.querySelectorAll('[role=menu] [role^=menuitem]')].find((e) => e.innerText.replace('↗', '').trim() === $1)`, item)
}

// code waits until the details of a block show its code.
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

// forgive waits for an error of the browser that a step caused on purpose, and
// removes it from the faults.
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
