package guest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"
)

// maxServed limits the concurrent requests of one side.
const maxServed = 32

// ErrChannelEnded is the error of calls whose channel ended before they were
// answered.
var ErrChannelEnded = errors.New("the control channel has ended")

// Peer is one end of the channel between a host and a guest agent. Both ends can
// call each other. It is safe for concurrent use.
type Peer struct {
	c io.ReadWriter

	wmu sync.Mutex // one line at a time

	sends sync.WaitGroup // calls being written

	// Quick, if not nil, is called first with each line. If it returns ok, the
	// line is handled and answer, without a newline, is sent. Set Quick before
	// Run.
	Quick func(line []byte) (answer []byte, ok bool)

	mu      sync.Mutex
	next    uint64
	waiting map[string]chan answer
	ended   bool
	over    chan struct{}
	junk    int
}

type answer struct {
	result json.RawMessage
	err    error
}

// Request is a call or notification from the other end. Input from a guest is
// untrusted, so read Params only with Message or Bind, which are strict.
type Request struct {
	Method string
	ID     json.RawMessage // nil for a notification
	Params json.RawMessage
}

// Bind decodes the parameters, rejecting unknown fields.
func (q Request) Bind(into any) *Error {
	b := q.Params
	if len(b) == 0 {
		b = json.RawMessage("{}")
	}
	if err := strict(b, into); err != nil {
		return fail(InvalidParams, "cannot use params of %s: %v", q.Method, err)
	}
	return nil
}

// Message decodes a request of the kind that workloads send.
func (q Request) Message() (Message, *Error) {
	m := Message{Method: q.Method, ID: q.ID}
	err := m.params(q.Params)
	return m, err
}

// NewPeer returns a peer on c, which the caller closes after use. If c has
// SetWriteDeadline, writes time out after WriteLimit.
func NewPeer(c io.ReadWriter) *Peer {
	// IDs begin at a random number, so that an answer to an earlier daemon is not
	// taken for an answer to this one.
	return &Peer{c: c, next: uint64(rand.Uint32()) << 16, waiting: map[string]chan answer{}, over: make(chan struct{})}
}

// Over returns a channel that is closed when Run has ended. No answers arrive
// after that.
func (p *Peer) Over() <-chan struct{} { return p.over }

// WriteLimit is how long the other end may accept no data before a write fails.
const WriteLimit = 10 * time.Second

type wire struct {
	Version string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  any             `json:"params,omitempty"`
	Result  any             `json:"result,omitempty"`
	Error   *Error          `json:"error,omitempty"`
}

func (p *Peer) send(w wire) error {
	w.Version = "2.0"
	b, err := json.Marshal(w)
	if err != nil {
		return fmt.Errorf("cannot encode %s: %w", w.Method, err)
	}
	if len(b) > MaxLine {
		return fmt.Errorf("cannot send %s: %d bytes, at most %d", w.Method, len(b), MaxLine)
	}
	return p.write(b)
}

// write sends one line.
func (p *Peer) write(b []byte) error {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if d, ok := p.c.(interface{ SetWriteDeadline(time.Time) error }); ok {
		// The deadline cannot be set on a channel without deadlines (a character
		// device). The caller's context then limits the write.
		_ = d.SetWriteDeadline(time.Now().Add(WriteLimit))
	}
	// The leading newline terminates a line that an earlier sender left
	// incomplete; empty lines are ignored.
	if _, err := p.c.Write(append(append([]byte{'\n'}, b...), '\n')); err != nil {
		return fmt.Errorf("cannot send on the control channel: %w", err)
	}
	return nil
}

// Notify sends a message without an answer.
func (p *Peer) Notify(method string, params any) error {
	return p.send(wire{Method: method, Params: params})
}

// Call sends a request and waits for its answer, which is decoded into result
// unless it is nil. An error response is an *Error.
func (p *Peer) Call(ctx context.Context, method string, params, result any) error {
	ch := make(chan answer, 1)
	p.mu.Lock()
	if p.ended {
		p.mu.Unlock()
		return fmt.Errorf("cannot call %s: %w", method, ErrChannelEnded)
	}
	p.next++
	id := strconv.FormatUint(p.next, 10)
	p.waiting[id] = ch
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.waiting, id)
		p.mu.Unlock()
	}()
	sent := make(chan error, 1)
	p.sends.Go(func() { sent <- p.send(wire{Method: method, ID: json.RawMessage(id), Params: params}) })
	for {
		select {
		case err := <-sent:
			if err != nil {
				return err
			}
			sent = nil
		case a := <-ch:
			if a.err != nil || result == nil {
				return a.err
			}
			if err := json.Unmarshal(a.result, result); err != nil {
				return fmt.Errorf("cannot read the answer to %s: %w", method, err)
			}
			return nil
		case <-ctx.Done():
			return fmt.Errorf("cannot call %s: no answer: %w", method, context.Cause(ctx))
		}
	}
}

// Run reads until the channel ends and then fails every pending call.
// Notifications are handled in order. Each call is handled in its own goroutine,
// and Run waits for those. before, if not nil, is called with the length of every
// line, even an empty one. It may block, so that a guest that sends too much is
// read more slowly.
func (p *Peer) Run(before func(bytes int) error, handle func(Request) (any, error)) error {
	var calls sync.WaitGroup
	defer calls.Wait()
	defer p.end()
	slots := make(chan struct{}, maxServed)
	r := bufio.NewReaderSize(p.c, 16<<10)
	for {
		line, err := readLine(r)
		if errors.Is(err, io.EOF) && len(line) == 0 {
			return nil
		}
		if err != nil {
			return err
		}
		if before != nil {
			if err := before(len(line)); err != nil {
				return err
			}
		}
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		if p.Quick != nil {
			if b, ok := p.Quick(line); ok {
				slots <- struct{}{}
				calls.Go(func() {
					defer func() { <-slots }()
					_ = p.write(b) // if it fails, callers see the channel end
				})
				continue
			}
		}
		q, ok := p.take(line)
		if !ok {
			continue
		}
		if q.ID == nil {
			// No caller waits for the result.
			_, _ = handle(q)
			continue
		}
		slots <- struct{}{}
		calls.Go(func() {
			defer func() { <-slots }()
			out := wire{ID: q.ID}
			v, err := handle(q)
			var refused *Error
			switch {
			case errors.As(err, &refused):
				out.Error = refused
			case err != nil:
				out.Error = fail(Refused, "%v", err)
			case v == nil:
				out.Result = map[string]bool{"ok": true}
			default:
				out.Result = v
			}
			if err := p.send(out); err != nil && out.Error == nil {
				// The answer is too long to send, but the caller must get one.
				_ = p.send(wire{ID: q.ID, Error: fail(Refused, "%v", err)})
			}
		})
	}
}

// take handles one line: it delivers an answer, or returns a request. Anything
// else is counted and dropped, because after a reconnect input may begin in the
// middle of a line.
func (p *Peer) take(line []byte) (Request, bool) {
	var raw struct {
		Version string          `json:"jsonrpc"`
		ID      json.RawMessage `json:"id"`
		Method  string          `json:"method"`
		Params  json.RawMessage `json:"params"`
		Result  json.RawMessage `json:"result"`
		Error   *Error          `json:"error"`
	}
	err := strict(line, &raw)
	id := bytes.TrimSpace(raw.ID)
	if bytes.Equal(id, []byte("null")) {
		id = nil
	}
	if err != nil || raw.Version != "2.0" || len(id) > 128 || len(id) > 0 && (id[0] == '{' || id[0] == '[') {
		p.mu.Lock()
		p.junk++
		p.mu.Unlock()
		return Request{}, false
	}
	if raw.Method != "" {
		return Request{Method: raw.Method, ID: id, Params: raw.Params}, true
	}
	a := answer{result: raw.Result}
	if raw.Error != nil {
		a.err = raw.Error
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if ch := p.waiting[string(id)]; ch != nil {
		delete(p.waiting, string(id))
		ch <- a
	}
	return Request{}, false
}

// Junk returns the number of lines that were neither requests nor answers.
func (p *Peer) Junk() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.junk
}

func (p *Peer) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended {
		close(p.over)
	}
	p.ended = true
	for id, ch := range p.waiting {
		delete(p.waiting, id)
		ch <- answer{err: ErrChannelEnded}
	}
}
