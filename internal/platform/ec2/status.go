package ec2

import (
	"bytes"
	"context"
	"io"

	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

// statusReader extracts the states from answers to DescribeInstanceStatus before
// the SDK decodes them. Only two of about fifty elements per instance are needed,
// and decoding the rest is most of the cost of observing a large region. The SDK
// gets the answer without the list of instances. An answer that is not written as
// plainly as EC2 writes it is left to the SDK unchanged.
type statusReader struct {
	buf    bytes.Buffer
	states []idState // states of the last answer; nil if the SDK got it unchanged
}

type idState struct{ id, state string }

// option adds the reader to the middleware stack of one call.
func (r *statusReader) option(stack *middleware.Stack) error {
	return stack.Deserialize.Add(middleware.DeserializeMiddlewareFunc("ReadStates", func(
		ctx context.Context, in middleware.DeserializeInput, next middleware.DeserializeHandler,
	) (middleware.DeserializeOutput, middleware.Metadata, error) {
		r.states = nil
		out, metadata, err := next.HandleDeserialize(ctx, in)
		response, ok := out.RawResponse.(*smithyhttp.Response)
		if err != nil || !ok || response.StatusCode != 200 {
			return out, metadata, err
		}
		r.buf.Reset()
		if _, err := r.buf.ReadFrom(response.Body); err != nil {
			return out, metadata, err
		}
		body := r.buf.Bytes()
		if states, rest, ok := readStates(body); ok {
			r.states, body = states, rest
		}
		response.Body = readCloser{bytes.NewReader(body), response.Body}
		return out, metadata, nil
	}), middleware.After)
}

// readCloser reads from one source and closes another.
type readCloser struct {
	io.Reader
	io.Closer
}

const (
	statusOpen  = "<instanceStatusSet>"
	statusClose = "</instanceStatusSet>"
)

// readStates reads the list in an answer, and returns the answer without it. It
// returns false for anything unusual: attributes, comments, references in the
// wanted elements, elements that do not match, an instance without id or state.
func readStates(body []byte) (states []idState, rest []byte, ok bool) {
	start, end := bytes.Index(body, []byte(statusOpen)), bytes.LastIndex(body, []byte(statusClose))
	if start < 0 || end < start {
		return nil, nil, false
	}
	head, list, tail := body[:start+len(statusOpen)], body[start+len(statusOpen):end], body[end:]
	if bytes.Contains(head, []byte("<!")) || bytes.Contains(tail, []byte("<!")) {
		return nil, nil, false
	}
	states = make([]idState, 0, pageSize)
	if states, ok = scanItems(list, states); !ok {
		return nil, nil, false
	}
	return states, append(append(make([]byte, 0, len(head)+len(tail)), head...), tail...), true
}

// scanItems adds every item of a list to states.
func scanItems(list []byte, states []idState) ([]idState, bool) {
	var open [16][]byte // names of the open elements
	var now idState
	depth, leaf := 0, false
	for {
		at := bytes.IndexByte(list, '<')
		if at < 0 {
			return states, depth == 0 && len(bytes.TrimSpace(list)) == 0
		}
		text := list[:at]
		name, closes, rest, ok := tag(list[at:])
		if !ok || depth == 0 && len(bytes.TrimSpace(text)) > 0 {
			return nil, false
		}
		list = rest
		if !closes {
			if depth == len(open) || depth == 0 && string(name) != "item" {
				return nil, false
			}
			open[depth], leaf = name, true
			depth++
			continue
		}
		if depth == 0 || !bytes.Equal(open[depth-1], name) {
			return nil, false
		}
		var into *string
		switch {
		case depth == 2 && string(name) == "instanceId":
			into = &now.id
		case depth == 3 && string(name) == "name" && string(open[1]) == "instanceState":
			into = &now.state
		}
		if into != nil {
			if !leaf || bytes.ContainsAny(text, "&\r") {
				return nil, false
			}
			*into = string(text)
		}
		leaf = false
		if depth--; depth == 0 {
			if now.id == "" || now.state == "" {
				return nil, false
			}
			states, now = append(states, now), idState{}
		}
	}
}

// tag parses a start or an end tag that consists only of a name.
func tag(b []byte) (name []byte, closes bool, rest []byte, ok bool) {
	b = b[1:]
	if len(b) > 0 && b[0] == '/' {
		closes, b = true, b[1:]
	}
	for i, c := range b {
		switch {
		case c == '>':
			return b[:i], closes, b[i+1:], i > 0
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', i > 0 && c >= '0' && c <= '9':
		default:
			return nil, false, nil, false
		}
	}
	return nil, false, nil, false
}
