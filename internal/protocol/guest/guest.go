// Package guest is the protocol between a host and its workloads and guest
// agents: newline-delimited JSON-RPC 2.0 for heartbeats, leases and busy reports,
// and the calls between host and guest agent.
//
// Input from the guest is untrusted: lines are bounded, unknown fields and
// methods are errors, and a message without an id gets no answer.
package guest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// MaxLine limits one message, in bytes.
const MaxLine = 64 << 10

// Methods that a workload may call. The default holder is "default".
const (
	Keepalive        = "keepalive"         // {ttl_ms, reason, holder}: take or renew a lease
	KeepaliveRelease = "keepalive.release" // {holder}: drop the caller's own lease
	Busy             = "busy"              // {}: working, whatever the readings say
	Waiting          = "waiting"           // {}: no longer working; readings decide again
	NextDue          = "next_due"          // {in_ms} or {at}: when the workload wants to run next
	Activity         = "activity"          // {tcp, cpu_ms, net_bytes}: a guest agent's heartbeat
)

// Codes of JSON-RPC 2.0, and Refused for a valid call that was not executed.
const (
	ParseError     = -32700
	InvalidRequest = -32600
	MethodNotFound = -32601
	InvalidParams  = -32602
	Refused        = -32000
	CannotRun      = -32001 // the command exists but could not be started
	NotThere       = -32002 // the command does not exist
)

// Message is one request or notification.
type Message struct {
	Method string
	ID     json.RawMessage // nil for a notification
	Params Params
}

// Params are the parameters of all methods. Decode checks that only those of the
// message's method are set.
type Params struct {
	TTL      time.Duration
	Reason   string
	Holder   string
	At       time.Time
	In       time.Duration
	TCP      int
	CPU      time.Duration
	NetBytes uint64
}

// Error is a JSON-RPC error object.
type Error struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

func (e *Error) Error() string { return e.Message }

func fail(code int, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Decode parses one line. It sets the message's ID even if it rejects the
// message, so that the error can be sent as an answer.
func Decode(line []byte) (m Message, _ *Error) {
	var raw struct {
		Version string          `json:"jsonrpc"`
		Method  string          `json:"method"`
		ID      json.RawMessage `json:"id"`
		Params  json.RawMessage `json:"params"`
	}
	if err := strict(line, &raw); err != nil {
		return m, fail(ParseError, "cannot read the message: %v", err)
	}
	if id := bytes.TrimSpace(raw.ID); len(id) > 0 && !bytes.Equal(id, []byte("null")) {
		if c := id[0]; c == '{' || c == '[' || len(id) > 128 {
			return m, fail(InvalidRequest, "cannot use id: it is neither a short string nor a number")
		}
		m.ID = id
	}
	if raw.Version != "2.0" {
		return m, fail(InvalidRequest, "cannot use jsonrpc: want \"2.0\"")
	}
	m.Method = raw.Method
	err := m.params(raw.Params)
	return m, err
}

func strict(b []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one value on the line")
	}
	return nil
}

// MaxTTL is the longest TTL of a lease.
const MaxTTL = 24 * time.Hour

func (m *Message) params(b json.RawMessage) *Error {
	if len(b) == 0 || bytes.Equal(b, []byte("null")) {
		b = json.RawMessage("{}")
	}
	var err error
	switch m.Method {
	case Keepalive:
		var p struct {
			TTL    *int64 `json:"ttl_ms"`
			Reason string `json:"reason"`
			Holder string `json:"holder"`
		}
		if err = strict(b, &p); err == nil {
			if p.TTL == nil || *p.TTL <= 0 || *p.TTL > MaxTTL.Milliseconds() {
				return fail(InvalidParams, "cannot use ttl_ms: want a number from 1 to %d", MaxTTL.Milliseconds())
			}
			m.Params = Params{TTL: time.Duration(*p.TTL) * time.Millisecond, Reason: p.Reason, Holder: p.Holder}
		}
	case KeepaliveRelease:
		var p struct {
			Holder string `json:"holder"`
		}
		err = strict(b, &p)
		m.Params.Holder = p.Holder
	case Busy, Waiting:
		err = strict(b, &struct{}{})
	case NextDue:
		var p struct {
			At time.Time `json:"at"`
			In *int64    `json:"in_ms"`
		}
		if err = strict(b, &p); err == nil {
			if p.At.IsZero() == (p.In == nil) {
				return fail(InvalidParams, "cannot use params: want either at or in_ms")
			}
			if p.In != nil {
				if *p.In < 0 || *p.In > (366*24*time.Hour).Milliseconds() {
					return fail(InvalidParams, "cannot use in_ms: %d is not between 0 and a year", *p.In)
				}
				m.Params.In = time.Duration(*p.In) * time.Millisecond
			}
			m.Params.At = p.At
		}
	case Activity:
		var p struct {
			TCP int    `json:"tcp"`
			CPU int64  `json:"cpu_ms"`
			Net uint64 `json:"net_bytes"`
		}
		if err = strict(b, &p); err == nil {
			if p.TCP < 0 || p.CPU < 0 || p.CPU > (24*time.Hour).Milliseconds() {
				return fail(InvalidParams, "cannot use params: tcp and cpu_ms must not be negative, nor cpu_ms above a day")
			}
			m.Params = Params{TCP: p.TCP, CPU: time.Duration(p.CPU) * time.Millisecond, NetBytes: p.Net}
		}
	default:
		return fail(MethodNotFound, "cannot call %.64q: there is no such method", m.Method)
	}
	if err != nil {
		return fail(InvalidParams, "cannot use params of %s: %v", m.Method, err)
	}
	if len(m.Params.Holder) > 128 || len(m.Params.Reason) > 1024 {
		return fail(InvalidParams, "cannot use params: holder must have at most 128 bytes and reason at most 1024")
	}
	return nil
}

// Serve reads messages from c until it ends, calls do for each, and answers those
// with an id. It returns nil if c ends after a complete line.
func Serve(c io.ReadWriter, do func(Message) error) error {
	r := bufio.NewReaderSize(c, 4096)
	for {
		line, err := readLine(r)
		if errors.Is(err, io.EOF) && len(line) == 0 {
			return nil
		}
		if err != nil {
			return err
		}
		if len(bytes.TrimSpace(line)) == 0 { // a Peer sends an empty line before each message
			continue
		}
		m, bad := Decode(line)
		if bad == nil {
			if err := do(m); err != nil {
				bad = fail(Refused, "%v", err)
			}
		}
		if m.ID == nil && (bad == nil || bad.Code != ParseError) {
			continue
		}
		if err := reply(c, m.ID, bad); err != nil {
			return err
		}
	}
}

func reply(w io.Writer, id json.RawMessage, bad *Error) error {
	out := map[string]any{"jsonrpc": "2.0", "id": id}
	if bad != nil {
		out["error"] = bad
	} else {
		out["result"] = map[string]bool{"ok": true}
	}
	b, err := json.Marshal(out)
	if err != nil {
		return fmt.Errorf("cannot encode an answer: %w", err)
	}
	_, err = w.Write(append(b, '\n'))
	return err
}

// readLine reads one line without its newline. A line longer than MaxLine is an
// error.
func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		if len(line) > MaxLine {
			return nil, fmt.Errorf("cannot read a message of more than %d bytes", MaxLine)
		}
		switch {
		case err == nil:
			return line, nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(line) > 0:
			return line, nil // the last line may lack its newline
		default:
			return nil, err
		}
	}
}
