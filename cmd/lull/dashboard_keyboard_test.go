package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// focus describes the element that has the keyboard focus.
type focus struct {
	Body   bool     // no element has it, so the walk starts over
	First  bool     // it had the focus before on this walk
	Name   string   // its accessible name
	Tag    string   // its element
	Faults []string // why a user cannot see where the focus is
}

// looksAt is a script that returns the focus: the focused element, and whether it is
// inside the window, not covered, and has an outline.
const looksAt = `JSON.stringify((() => {
	const e = document.activeElement
	if (!e || e === document.body || e === document.documentElement) return {Body: true}
	const faults = [], css = getComputedStyle(e)
	if (css.outlineStyle === 'none' || parseFloat(css.outlineWidth) < 1 || /, 0\)$/.test(css.outlineColor)) faults.push('it has no outline')
	const points = [...e.getClientRects()].flatMap((r) => [0.1, 0.3, 0.5, 0.7, 0.9].flatMap((x) => [0.1, 0.5, 0.9].map((y) => [r.left + r.width * x, r.top + r.height * y])))
	if (!points.some(([x, y]) => e.contains(document.elementFromPoint(x, y)))) faults.push('it is outside of the window or covered')
	window.walked ??= new WeakSet()
	const first = window.walked.has(e)
	window.walked.add(e)
	return {First: first, Name: nameOf(e), Tag: e.tagName.toLowerCase(), Faults: faults}
})())`

// calledBy is a script that defines a function for the accessible name of an element.
const calledBy = `window.nameOf = (e) => (e.getAttribute('aria-label') || (e.getAttribute('aria-labelledby') ?? '').split(' ').map((id) => document.getElementById(id)?.innerText ?? '').join(' ').trim() || e.labels?.[0]?.innerText || e.innerText || e.id || '').trim().replace(/\s+/g, ' ').slice(0, 80)`

// missed is a script that finds usable elements that the keyboard has not reached:
// focusable ones, and others over which the mouse pointer shows that they can be
// clicked.
const missed = `(() => {
	const all = document.querySelector('dialog[open]') ?? document
	const shown = (e) => e.checkVisibility({visibilityProperty: true}) && e.getClientRects().length > 0
	const takes = 'a[href], button, input, select, textarea, summary, [tabindex]'
	const stops = [...all.querySelectorAll(takes)].filter((e) => e.tabIndex >= 0 && !e.disabled && shown(e) && !window.walked.has(e)).map((e) => e.tagName.toLowerCase() + ' ' + nameOf(e))
	const mouse = [...all.querySelectorAll('*')].filter((e) => getComputedStyle(e).cursor === 'pointer' && shown(e) && !e.closest(takes + ', label')).map((e) => 'only the mouse presses ' + e.tagName.toLowerCase() + ' ' + nameOf(e))
	return [...stops, ...mouse]
})()`

// tab presses Tab and returns the element that then has the focus.
func (w *window) tab() (f focus) {
	w.t.Helper()
	do(w, chromedp.KeyEvent(kb.Tab))
	if err := json.Unmarshal([]byte(js[string](w, "("+calledBy+", "+looksAt+")")), &f); err != nil {
		w.t.Fatal(err)
	}
	return f
}

// most is the maximum number of Tab presses on a page.
const most = 400

// walk goes around the page, or the open dialog, with Tab alone. It checks that every
// focused element can be seen, and that everything that can be used gets the focus.
func (w *window) walk(what string) {
	w.t.Helper()
	for try := 1; ; try++ {
		faults := w.round()
		if len(faults) == 0 {
			return
		}
		// A page with live data may have changed during the walk.
		if try == 3 {
			for _, f := range faults {
				w.t.Errorf("%s: %s", what, f)
			}
			return
		}
	}
}

func (w *window) round() (faults []string) {
	w.t.Helper()
	js[bool](w, `(window.walked = new WeakSet(), true)`)
	dialog := w.holds(`document.querySelector('dialog[open]')`)
	bodies, last := 0, ""
	for n := 0; ; n++ {
		if n == most {
			return append(faults, fmt.Sprintf("Tab does not come around in %d presses; it is at %s", most, last))
		}
		f := w.tab()
		if f.Body {
			if bodies++; bodies == 2 {
				break
			}
			continue
		}
		at := strings.TrimSpace(f.Tag + " " + f.Name)
		// A field of several parts keeps the focus for several presses.
		if f.First && at != last {
			break
		}
		for _, x := range f.Faults {
			if text := at + ": " + x; !slices.Contains(faults, text) {
				faults = append(faults, text)
			}
		}
		if dialog && !w.holds(`document.querySelector('dialog[open]')?.contains(document.activeElement)`) {
			faults = append(faults, at+": the keyboard has left the dialog")
		}
		last = at
	}
	for _, m := range js[[]string](w, missed) {
		faults = append(faults, m+": Tab does not come to it")
	}
	return faults
}

// tabTo presses Tab until the element called name has the focus.
func (w *window) tabTo(name string) {
	w.t.Helper()
	w.until(finds, name)
	var been []string
	for range most {
		f := w.tab()
		if f.Name == name {
			return
		}
		been = append(been, f.Name)
	}
	w.t.Fatalf("Tab does not come to %q; it comes to %q", name, been[:min(len(been), 60)])
}

// choose moves the focus to the element called name and presses Enter.
func (w *window) choose(name string) {
	w.t.Helper()
	w.tabTo(name)
	do(w, chromedp.KeyEvent(kb.Enter))
}

// TestDashboardByKeyboard signs in, opens every page, and opens and closes every
// dialog, with Tab, Enter and the characters of the token alone. It checks that the
// focus can always be seen, and that everything that the mouse can press can also be
// reached by keyboard.
func TestDashboardByKeyboard(t *testing.T) {
	chrome := startBrowser(t)
	r := newWatched(t)
	r.hosts()
	w := open(t, chrome, r.url)
	w.sees("Sign in with a token")
	w.walk("the login")
	w.tabTo("Token")
	do(w, chromedp.KeyEvent(r.token))
	do(w, chromedp.KeyEvent(kb.Enter))
	w.sees("10 workers")

	for _, p := range []struct {
		way     []string // links and buttons to press, starting on the previous page
		shows   string
		dialogs []string // buttons that open a dialog
	}{
		{[]string{"Fleet"}, "10 workers", []string{"Halt"}},
		{[]string{"routing-2"}, "Activity & Lifecycle.*Rules", []string{"Pause", "Snooze", "Drain", "Add exception", "Change policy"}},
		{[]string{"Templates"}, "No templates yet", []string{"New template"}},
		{[]string{"Savings"}, "Saved", nil},
		{[]string{"Hosts"}, "1 of 2 stopped reporting", nil},
		{[]string{"desk"}, "127.0.0.1:5432", nil},
		{[]string{"db"}, "2 connections are open.*Details", nil},
		{[]string{"Agents"}, "No agents yet", nil},
		{[]string{"Policies"}, "aggressive", []string{"New policy", "Apply balanced", "Add exception"}},
		{[]string{"Preview a policy"}, "Preview", nil},
		{[]string{"Schedules"}, "No schedules yet", []string{"New schedule"}},
		{[]string{"Notifications"}, "mail", []string{"Add channel", "Remove mail"}},
		{[]string{"Audit log"}, "Imported", nil},
		{[]string{"Settings"}, "worker_idle_timeout_minutes", []string{"Change worker_warn_before_minutes"}},
		{[]string{"Tokens"}, "first-admin", []string{"Create token", "Revoke first-admin"}},
	} {
		name := p.way[len(p.way)-1]
		for _, step := range p.way {
			w.choose(step)
		}
		w.sees(p.shows)
		w.walk(name)
		for _, d := range p.dialogs {
			w.choose(d)
			w.until(`document.querySelector('dialog[open]')?.contains(document.activeElement)`)
			w.walk(name + ": " + d)
			w.choose("Cancel")
			w.until(`!document.querySelector('dialog[open]')`)
			w.until(`nameOf(document.activeElement) === $1`, d) // focus returns to the element that opened the dialog
		}
	}
	w.choose("Sign out")
	w.sees("Sign in with a token")

	// Check that the walk notices what only the mouse can press, what has no outline,
	// and what is covered.
	js[bool](w, `(() => {
		for (const [tag, text, css, value] of [['p', 'mouse', 'cursor', 'pointer'], ['button', 'bare', 'outline', 'none'], ['button', 'under', 'margin', '0'], ['div', '', 'position', 'fixed']]) {
			const e = document.createElement(tag)
			e.textContent = text
			e.style[css] = value
			if (tag === 'div') e.style.inset = '0'
			document.body.append(e)
		}
		return true
	})()`)
	faults := strings.Join(w.round(), "\n")
	for _, want := range []string{"only the mouse presses p mouse", "button bare: it has no outline", "button under: it is outside of the window or covered"} {
		if !strings.Contains(faults, want) {
			t.Errorf("the walk does not notice %q:\n%s", want, faults)
		}
	}
}
