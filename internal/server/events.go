package server

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"lull/internal/protocol/control"
	"lull/internal/server/access"
	"lull/internal/server/feed"
)

// sendWithin is how long a client of the stream may take to read a message.
const sendWithin = 30 * time.Second

func (s *Server) eventRoutes() {
	r := route{id: "events", method: "GET", path: base + "/events", role: access.Viewer,
		doc: "Audit entries as they happen, as server-sent events; Last-Event-ID resumes after that entry"}
	register(s, r, func(ctx context.Context, in *struct {
		Last     string `header:"Last-Event-ID" maxLength:"20"`
		Since    string `query:"since" maxLength:"20" doc:"Same as Last-Event-ID, which takes precedence"`
		WorkerID string `query:"worker_id" maxLength:"128" doc:"Entries about this worker only"`
	}) (*huma.StreamResponse, error) {
		start, err := startOf(in.Last, in.Since)
		if err != nil {
			return nil, err
		}
		select {
		case s.streams <- struct{}{}:
		default:
			return nil, fault(http.StatusServiceUnavailable, "too_many_streams", fmt.Sprintf("cannot open another event stream: %d are open", maxStreams))
		}
		return &huma.StreamResponse{Body: func(hc huma.Context) {
			defer func() { <-s.streams }()
			s.stream(hc, start, in.WorkerID)
		}}, nil
	})
	describe(s, r, "text/event-stream", "Events named event (an audit entry) and reset (entries may be missing); ids are revisions of the store")
}

func startOf(last, since string) (feed.Start, error) {
	field, text := "header.Last-Event-ID", last
	if text == "" {
		field, text = "query.since", since
	}
	if text == "" {
		return feed.Start{}, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return feed.Start{}, fault(http.StatusUnprocessableEntity, "invalid", "cannot resume after that event: it is not an ID of this stream",
			&huma.ErrorDetail{Message: "not an id of this stream", Location: field, Value: text})
	}
	return feed.Start{After: n, Known: true}, nil
}

// stream writes the feed until the client disconnects or the server ends.
func (s *Server) stream(hc huma.Context, start feed.Start, worker string) {
	_, w := humago.Unwrap(hc)
	control := http.NewResponseController(w)
	begun := false
	err := s.feed.Follow(hc.Context(), start, func(m feed.Message) error {
		if !begun {
			begun = true
			hc.SetHeader("Content-Type", "text/event-stream")
			hc.SetStatus(http.StatusOK)
		}
		if m.Entry != nil && worker != "" && m.Entry.WorkerID != worker {
			m.Entry = nil
		}
		frame, err := frameOf(m)
		if err != nil {
			return err
		}
		if err := control.SetWriteDeadline(time.Now().Add(sendWithin)); err != nil {
			return fmt.Errorf("cannot set the write deadline of the stream: %w", err)
		}
		if _, err := w.Write(frame); err != nil {
			return fmt.Errorf("cannot write the stream: %w", err)
		}
		if err := control.Flush(); err != nil {
			return fmt.Errorf("cannot write the stream: %w", err)
		}
		return nil
	})
	if !begun && err != nil {
		refuse(hc, problem(err))
	}
}

// frameOf encodes a message as a server-sent event. A message without data
// advances the client's last ID and shows it nothing.
func frameOf(m feed.Message) ([]byte, error) {
	var b bytes.Buffer
	if m.ID > 0 {
		fmt.Fprintf(&b, "id: %d\n", m.ID)
	}
	body := m.Data
	switch {
	case m.Reset != "":
		b.WriteString("event: reset\n")
		var err error
		if body, err = json.Marshal(control.Reset{Reason: m.Reset}); err != nil {
			return nil, fmt.Errorf("cannot encode an event: %w", err)
		}
	case m.Entry != nil:
		b.WriteString("event: event\n")
	default:
		b.WriteString(": so far\n\n")
		return b.Bytes(), nil
	}
	b.WriteString("data: ")
	b.Write(body)
	b.WriteString("\n\n")
	return b.Bytes(), nil
}
