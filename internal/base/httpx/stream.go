package httpx

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// StallLimit is how long one write to a stream may take before its client is
// given up.
const StallLimit = 30 * time.Second

// stream is an answer that goes on.
type stream struct {
	w  http.ResponseWriter
	rc *http.ResponseController
}

func newStream(w http.ResponseWriter, contentType string) (stream, error) {
	s := stream{w: w, rc: http.NewResponseController(w)}
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Accel-Buffering", "no") // reverse proxies pass it on at once
	// The server's limit for reading a request would end the stream.
	if err := s.rc.SetReadDeadline(time.Time{}); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return s, fmt.Errorf("cannot begin a stream: %w", err)
	}
	w.WriteHeader(http.StatusOK)
	return s, s.send(nil)
}

func (s stream) send(p []byte) error {
	if err := s.rc.SetWriteDeadline(time.Now().Add(StallLimit)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("cannot write to the stream: %w", err)
	}
	if _, err := s.w.Write(p); err != nil {
		return fmt.Errorf("cannot write to the stream: %w", err)
	}
	if err := s.rc.Flush(); err != nil {
		return fmt.Errorf("cannot write to the stream: %w", err)
	}
	return nil
}

// Lines writes newline-delimited JSON, each value at once. It is for one
// goroutine.
type Lines struct{ s stream }

// NewLines begins the answer.
func NewLines(w http.ResponseWriter) (*Lines, error) {
	s, err := newStream(w, "application/x-ndjson")
	return &Lines{s}, err
}

// Send writes one value. An error means that the client has gone or stalls.
func (l *Lines) Send(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("cannot encode a line of the stream: %w", err)
	}
	return l.s.send(append(line, '\n'))
}

// ReadLines reads newline-delimited JSON as NewLines writes it. A line of more
// than limit bytes, or one that is no T, ends it with an error.
func ReadLines[T any](r io.Reader, limit int) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var zero T
		scan := bufio.NewScanner(r)
		scan.Buffer(nil, limit)
		for n := 1; scan.Scan(); n++ {
			if len(bytes.TrimSpace(scan.Bytes())) == 0 {
				continue
			}
			var v T
			if err := json.Unmarshal(scan.Bytes(), &v); err != nil {
				yield(zero, fmt.Errorf("cannot read line %d of the stream: %w", n, err))
				return
			}
			if !yield(v, nil) {
				return
			}
		}
		if err := scan.Err(); err != nil {
			yield(zero, fmt.Errorf("cannot read the stream: %w", err))
		}
	}
}

// Event is one server-sent event. ID and Name hold no line ends.
type Event struct {
	ID   string // what a client sends back as Last-Event-ID
	Name string // empty is "message"
	Data []byte
}

// Events writes server-sent events, each at once. It is for one goroutine.
type Events struct{ s stream }

// NewEvents begins the answer. retry is how long a client waits before it
// connects again; 0 leaves that to it.
func NewEvents(w http.ResponseWriter, retry time.Duration) (*Events, error) {
	s, err := newStream(w, "text/event-stream")
	if err == nil && retry > 0 {
		err = s.send(fmt.Appendf(nil, "retry: %d\n\n", retry.Milliseconds()))
	}
	return &Events{s}, err
}

// Send writes an event.
func (e *Events) Send(ev Event) error {
	if strings.ContainsAny(ev.ID, "\r\n\x00") || strings.ContainsAny(ev.Name, "\r\n") {
		return fmt.Errorf("cannot send the event %q %q: its id or name holds a line end", ev.ID, ev.Name)
	}
	var b bytes.Buffer
	if ev.ID != "" {
		fmt.Fprintf(&b, "id: %s\n", ev.ID)
	}
	if ev.Name != "" {
		fmt.Fprintf(&b, "event: %s\n", ev.Name)
	}
	data := bytes.ReplaceAll(bytes.ReplaceAll(ev.Data, []byte("\r\n"), []byte("\n")), []byte("\r"), []byte("\n"))
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		fmt.Fprintf(&b, "data: %s\n", line)
	}
	b.WriteByte('\n')
	return e.s.send(b.Bytes())
}

// KeepAlive writes a comment, so that a client that has gone is noticed.
func (e *Events) KeepAlive() error { return e.s.send([]byte(":\n\n")) }

// LastEventID is the id after which a client wants to go on: its header, or
// the query parameter last_event_id for those who cannot set one.
func LastEventID(r *http.Request) string {
	return or2(r.Header.Get("Last-Event-ID"), r.URL.Query().Get("last_event_id"))
}

// ReadEvents reads server-sent events. Comments are passed over, and so is a
// retry, and the unfinished event at the end of a stream that was cut off. An
// event of more than limit bytes ends it with an error.
func ReadEvents(r io.Reader, limit int) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		scan := bufio.NewScanner(r)
		scan.Buffer(nil, limit)
		var ev Event
		var id string // stays until the server sends another
		seen, size := false, 0
		for scan.Scan() {
			line := strings.TrimSuffix(scan.Text(), "\r")
			if size += len(line); size > limit {
				yield(Event{}, fmt.Errorf("cannot read the event after %s: it has more than %d bytes", strconv.Quote(id), limit))
				return
			}
			if line == "" {
				if seen {
					ev.ID = id
					if !yield(ev, nil) {
						return
					}
				}
				ev, seen, size = Event{}, false, 0
				continue
			}
			field, value, _ := strings.Cut(line, ":")
			value = strings.TrimPrefix(value, " ")
			switch field {
			case "id":
				if !strings.Contains(value, "\x00") {
					id = value
				}
			case "event":
				ev.Name = value
			case "data":
				if seen {
					ev.Data = append(ev.Data, '\n')
				}
				ev.Data = append(ev.Data, value...)
				seen = true
			}
		}
		if err := scan.Err(); err != nil {
			yield(Event{}, fmt.Errorf("cannot read the events: %w", err))
		}
	}
}
