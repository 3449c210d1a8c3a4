package httpx

import (
	"bufio"
	"fmt"
	"io"
	"iter"
	"strings"
)

// Event is one server-sent event. Unlike in a browser, an event without an id
// does not inherit one, and an event without data is delivered, because its id
// marks a position in the stream.
type Event struct {
	ID   string
	Name string
	Data []byte // data lines, joined by newlines
}

// ReadEvents reads server-sent events from r. It skips comments, unknown fields,
// and an unfinished event at the end of the stream. An event of more than limit
// bytes ends the iteration with an error.
func ReadEvents(r io.Reader, limit int) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		scan := bufio.NewScanner(r)
		scan.Buffer(nil, limit)
		var ev Event
		known, data, size := false, false, 0
		for scan.Scan() {
			line := strings.TrimSuffix(scan.Text(), "\r")
			if size += len(line); size > limit {
				yield(Event{}, fmt.Errorf("cannot read an event: it has more than %d bytes", limit))
				return
			}
			if line == "" {
				if known && !yield(ev, nil) {
					return
				}
				ev, known, data, size = Event{}, false, false, 0
				continue
			}
			field, value, _ := strings.Cut(line, ":")
			value = strings.TrimPrefix(value, " ")
			switch field {
			case "id":
				ev.ID = value
			case "event":
				ev.Name = value
			case "data":
				if data {
					ev.Data = append(ev.Data, '\n')
				}
				ev.Data, data = append(ev.Data, value...), true
			default:
				continue
			}
			known = true
		}
		if err := scan.Err(); err != nil {
			yield(Event{}, fmt.Errorf("cannot read the events: %w", err))
		}
	}
}
