package main

import (
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"lull/internal/fleet/audit"
	"lull/internal/lib/errtest"
	"lull/internal/protocol/control"
)

// road is a proxy between a browser and a server whose connections can be cut.
type road struct {
	l     net.Listener
	mu    sync.Mutex
	to    string // address of the server
	open  map[net.Conn]bool
	shut  bool
	resum []string // Last-Event-ID of every request that had one
}

func newRoad(t *testing.T, to string) *road {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	errtest.None(t, err)
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

// set cuts all connections and refuses new ones, or allows them again.
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

// lead makes new connections go to another address.
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
		_, _ = io.Copy(c, s) // an error means that the connection was cut
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

// TestDashboardReconnects cuts the network under an open page while things change. It
// checks that the page says that it is not live, shows every change once it is live
// again, and never replaces newer data by older.
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
		errtest.Get(control.Write[any](t.Context(), r.client, "POST", "/workers/"+id+"/snooze", body))(t)
	}
	missed, err := control.Read[control.List[audit.Entry]](t.Context(), r.client, "/audit?newest=true&limit=100&worker_id="+id)
	errtest.None(t, err)
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

// newerStays sends the page data that is older than what it shows, in both ways in
// which that happens: a late answer to an earlier request, and an answer of a server
// that lags behind. It checks that the page never shows either, not even briefly.
func (w *window) newerStays(r *watched, address string) {
	id := r.ids["routing-1"]
	snooze := func(minutes int) {
		w.t.Helper()
		if _, err := control.Write[any](w.t.Context(), r.client, "POST", "/workers/"+id+"/snooze", map[string]any{"minutes": minutes}); err != nil {
			w.t.Fatal(err)
		}
	}
	// Stay in the same document, which keeps the replaced fetch.
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
	w.until(`window.held.length === 1`) // the answer with two hours left is being delayed
	snooze(600)
	// The user who requested the change is informed when the worker reaches the
	// requested state, although the page already showed that state.
	w.sees(`\((9 h 59|10 h 00) min left\), by first-admin`)
	js[bool](w, `(() => {
		window.older = []; window.late = null
		new MutationObserver(() => { const m = /Snooze protection\s+until.*/.exec(document.querySelector('main').innerText); if (m && !m[0].includes(', by ')) window.older.push(m[0]) })
			.observe(document.querySelector('main'), {subtree: true, childList: true, characterData: true})
		return true
	})()`)
	// taken waits until the page has read the late answer and could have drawn it.
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
