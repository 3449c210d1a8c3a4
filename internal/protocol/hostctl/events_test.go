package hostctl

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/lib/errtest"
)

// daemon serves the given events as a host does that started at began. A stream
// ends after the last event, as when the daemon ends.
func daemon(t *testing.T, socket string, began time.Time, events ...string) *http.Server {
	t.Helper()
	l, err := net.Listen("unix", socket)
	errtest.None(t, err)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/status", func(w http.ResponseWriter, r *http.Request) {
		json.NewEncoder(w).Encode(Status{StartedAt: began})
	})
	mux.HandleFunc("GET /api/v1/events", func(w http.ResponseWriter, r *http.Request) {
		from := 0
		fmt.Sscan(r.URL.Query().Get("since"), &from)
		io.WriteString(w, ": events\n\n")
		for n, what := range events {
			if n+1 > from {
				fmt.Fprintf(w, "id: %d\nevent: event\ndata: {\"seq\":%d,\"type\":%q}\n\n", n+1, n+1, what)
			}
		}
	})
	s := &http.Server{Handler: mux}
	var served sync.WaitGroup
	served.Go(func() { s.Serve(l) })
	t.Cleanup(func() { s.Close(); served.Wait() })
	return s
}

// TestFollowGoesOnWithTheNextDaemon checks that Follow repeats no event when a
// stream of the same daemon ends, and reads all events of the next daemon after a
// call of missing.
func TestFollowGoesOnWithTheNextDaemon(t *testing.T) {
	dir, err := os.MkdirTemp("", "events-")
	errtest.None(t, err)
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "s")
	cl, err := NewClient(socket)
	errtest.None(t, err)
	began := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	first := daemon(t, socket, began, "a", "b")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var seen []string
	err = cl.Follow(ctx, "", func(string) { seen = append(seen, "anew") }, func(e Event) error {
		seen = append(seen, e.Type)
		switch e.Type {
		case "b":
			if err := first.Close(); err != nil {
				t.Error(err)
			}
			daemon(t, socket, began.Add(time.Minute), "c", "d")
		case "d":
			cancel()
		}
		return nil
	})
	if want := []string{"a", "b", "anew", "c", "d"}; err != nil || !slices.Equal(seen, want) {
		t.Errorf("%q, %v; want %q", seen, err, want)
	}
}

// TestFollowSaysWhatFailed checks that a host that is unreachable from the
// beginning is an error, and that an error of the reader ends the stream.
func TestFollowSaysWhatFailed(t *testing.T) {
	dir, err := os.MkdirTemp("", "events-")
	errtest.None(t, err)
	defer os.RemoveAll(dir)
	cl, err := NewClient(filepath.Join(dir, "s"))
	errtest.None(t, err)
	if err := cl.Follow(t.Context(), "", func(string) {}, nil); err == nil || !strings.Contains(err.Error(), "lull host") {
		t.Errorf("nothing there: %v", err)
	}
	daemon(t, filepath.Join(dir, "s"), time.Now(), "a")
	enough := io.ErrClosedPipe
	if err := cl.Follow(t.Context(), "", func(string) {}, func(Event) error { return enough }); err != enough {
		t.Errorf("%v, want %v", err, enough)
	}
}
