package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"lull/internal/core/instance"
	"lull/internal/lib/waittest"
)

// engine is a fake Docker daemon with containers and an event stream. It can
// disconnect all listeners.
type engine struct {
	mu      sync.Mutex
	running map[string]bool // container -> whether it runs
	names   map[string]string
	ears    map[chan string]bool
}

// set changes a container and sends the event. running is nil if the container is
// removed.
func (e *engine) set(id, action string, running *bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if running == nil {
		delete(e.running, id)
	} else {
		e.running[id] = *running
	}
	for ear := range e.ears {
		ear <- fmt.Sprintf(`{"Type":"container","Action":%q,"Actor":{"ID":%q}}`+"\n", action, id)
	}
}

func (e *engine) cut() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for ear := range e.ears {
		close(ear)
	}
	clear(e.ears)
}

func (e *engine) events(w http.ResponseWriter, q *http.Request) {
	ear := make(chan string, 4096)
	e.mu.Lock()
	e.ears[ear] = true
	e.mu.Unlock()
	_ = http.NewResponseController(w).Flush() // a failure shows at the next write
	for {
		select {
		case line, ok := <-ear:
			if !ok {
				return
			}
			if _, err := fmt.Fprint(w, line); err != nil {
				return
			}
			_ = http.NewResponseController(w).Flush()
		case <-q.Context().Done():
			e.mu.Lock()
			delete(e.ears, ear)
			e.mu.Unlock()
			return
		}
	}
}

func (e *engine) list(w http.ResponseWriter, _ *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := []map[string]string{}
	for id := range e.running {
		out = append(out, map[string]string{"Id": id})
	}
	_ = json.NewEncoder(w).Encode(out)
}

func (e *engine) inspect(w http.ResponseWriter, q *http.Request) {
	id := q.PathValue("id")
	e.mu.Lock()
	running, ok := e.running[id]
	name := e.names[id]
	e.mu.Unlock()
	if name == "" {
		name = "c" + id[:8]
	}
	if !ok {
		http.Error(w, "no such container", http.StatusNotFound)
		return
	}
	fmt.Fprintf(w, `{"Id":%q,"Name":"/%s","Config":{"Labels":{"lull.pause-after":"1m"}},"State":{"Running":%t,"Pid":4000}}`, id, name, running)
}

// ledger is a host that records its calls.
type ledger struct {
	mu       sync.Mutex
	has      map[string]bool // adopted containers
	twice    []string
	observed map[string]bool
	names    map[string]string // by container
}

func (l *ledger) ByImage(_, image string) (string, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return image, l.has[image]
}

func (l *ledger) ImagesOf(string) []string { return l.list() }

func (l *ledger) Create(_ context.Context, s instance.Spec) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.has[s.Image] {
		l.twice = append(l.twice, s.Image)
	}
	l.has[s.Image], l.names[s.Image] = true, s.Name
	return s.Image, nil
}

func (l *ledger) RenamedOutside(_ context.Context, id, name string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for other, has := range l.names {
		if has == name && other != id {
			return errors.New("it is taken")
		}
	}
	l.names[id] = name
	return nil
}

func (l *ledger) called(id string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.names[id]
}

func (l *ledger) StartedOutside(context.Context, string, string) error { return nil }

func (l *ledger) KeepAwake(context.Context, string, string) (leave func(), err error) {
	return func() {}, nil
}

func (l *ledger) Observe(id, _ string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.observed[id] = true
	return nil
}

// AwaitLoaded implements Host: nothing is searched for.
func (l *ledger) AwaitLoaded(context.Context) error { return nil }

func (l *ledger) RelatedOutside(context.Context, string, string, []string) error { return nil }

func (l *ledger) Delete(_ context.Context, id, _ string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.has, id)
	delete(l.names, id)
	return nil
}

func (l *ledger) list() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.has))
}

// looked reports whether Observe was called for all of ids.
func (l *ledger) looked(ids []string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !slices.ContainsFunc(ids, func(id string) bool { return !l.observed[id] })
}

// following returns an engine, and a ledger that follows it until the test ends.
func following(t *testing.T) (*engine, *ledger) {
	e := &engine{running: map[string]bool{}, names: map[string]string{}, ears: map[chan string]bool{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /events", e.events)
	mux.HandleFunc("GET /containers/json", e.list)
	mux.HandleFunc("GET /containers/{id}/json", e.inspect)
	socket := filepath.Join(t.TempDir(), "d.sock")
	ln, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: mux}
	var all sync.WaitGroup
	all.Go(func() { _ = srv.Serve(ln) }) // until it is closed

	r := &Runtime{cfg: Config{Socket: socket}, api: newClient(socket), log: slog.New(slog.DiscardHandler), works: map[string]*Work{}, names: map[string]string{}, faults: map[string]string{}}
	h := &ledger{has: map[string]bool{}, observed: map[string]bool{}, names: map[string]string{}}
	ctx, end := context.WithCancel(t.Context())
	all.Go(func() {
		if err := r.Follow(ctx, h); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		end()
		srv.Close()
		all.Wait()
	})
	return e, h
}

// TestRename checks that an instance takes its container's new name, whether lull
// receives the event or only connects later, and that a generated name replaces one
// that is taken.
func TestRename(t *testing.T) {
	e, h := following(t)
	first, second := strings.Repeat("a", 64), strings.Repeat("b", 64)
	call := func(id, name string) {
		e.mu.Lock()
		e.names[id] = name
		e.mu.Unlock()
	}
	until := func(id, want string) {
		t.Helper()
		waittest.Until(t, "it is called "+want, func() bool { return h.called(id) == want })
	}
	yes := true
	call(first, "d1")
	e.set(first, "start", &yes)
	call(second, "d2")
	e.set(second, "start", &yes)
	until(first, "d1")
	until(second, "d2")
	call(first, "dx")
	e.set(first, "rename", &yes)
	until(first, "dx")
	call(first, "d3")
	e.cut() // disconnect, so that everything is listed again
	until(first, "d3")
	call(second, "d3")
	e.set(second, "rename", &yes)
	until(second, "docker-bbbbbbbbbbbb")
	call(first, "d4")
	e.set(first, "rename", &yes)
	until(first, "d4")
	e.set(second, "pause", &yes) // any event causes a check
	until(second, "d3")
}

// TestFollow creates, changes and removes many containers concurrently while the
// event stream breaks. It checks that the host ends up with exactly the existing
// containers, none of them adopted twice.
func TestFollow(t *testing.T) {
	e, h := following(t)

	yes, no := true, false
	var users sync.WaitGroup
	const each = 20
	for n := range 4 {
		users.Go(func() {
			for k := range each {
				id := fmt.Sprintf("%08x", n*each+k) + strings.Repeat("0", 56)
				e.set(id, "start", &yes)
				e.set(id, "exec_start: true", &yes)
				e.set(id, "pause", &yes)
				switch k % 4 {
				case 1:
					e.set(id, "die", &no)
				case 2:
					e.set(id, "destroy", nil)
				case 3:
					e.cut()
				}
			}
		})
	}
	users.Wait()
	want := func() (out []string) { // running containers must be in the list, removed ones must not
		e.mu.Lock()
		defer e.mu.Unlock()
		for id, running := range e.running {
			if running {
				out = append(out, id)
			}
		}
		slices.Sort(out)
		return out
	}()
	waittest.NoError(t, "the host has the containers that run", func() error {
		got := slices.DeleteFunc(h.list(), func(id string) bool { // containers that have ended may have been adopted before
			e.mu.Lock()
			defer e.mu.Unlock()
			running, there := e.running[id]
			return there && !running
		})
		if slices.Equal(got, want) && h.looked(want) {
			return nil
		}
		return fmt.Errorf("the host has %d containers, want %d:\n%v\n%v", len(got), len(want), got, want)
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.twice) > 0 {
		t.Errorf("taken over twice: %v", h.twice)
	}
}

func TestInstanceName(t *testing.T) {
	const id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	for name, want := range map[string]string{"web": "web", "Web_1": "web_1", "A": "a", "web-": "docker-0123456789ab"} {
		if got := instanceName(id, name); got != want {
			t.Errorf("%s is called %s, want %s", name, got, want)
		}
	}
}
