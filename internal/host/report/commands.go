package report

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"lull/internal/host"
	"lull/internal/lib/delay"
	"lull/internal/protocol/control"
	"lull/internal/protocol/hostctl"
)

const (
	maxCommands  = 1024        // number of IDs that are kept
	deliverLimit = time.Minute // how long a reply is offered to the server
)

// CommandStore stores the IDs of commands across restarts.
type CommandStore interface {
	Commands() ([]string, error)
	KeepCommands(ids []string) error // durable once it returns nil
}

// Commands makes sure that each command from a server is carried out at most once:
// its ID is stored durably before it begins. It is safe for concurrent use.
type Commands struct {
	store CommandStore

	mu   sync.Mutex
	ids  []string // IDs of commands that have begun, oldest first
	runs map[string]*commandRun
}

// commandRun is a command that this process has begun. reply is valid once done is
// closed.
type commandRun struct {
	done  chan struct{}
	reply control.HostReply
}

// NewCommands returns Commands that keep their IDs in store.
func NewCommands(store CommandStore) (*Commands, error) {
	ids, err := store.Commands()
	if err != nil {
		return nil, fmt.Errorf("cannot read which commands of the server have begun: %w", err)
	}
	return &Commands{store: store, ids: ids, runs: map[string]*commandRun{}}, nil
}

// begin returns the run of a command, and whether the caller must carry it out. The
// run is nil if an earlier process began the command.
func (c *Commands) begin(id string) (run *commandRun, mine bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if slices.Contains(c.ids, id) {
		return c.runs[id], false, nil
	}
	ids := append(c.ids[max(0, len(c.ids)-maxCommands+1):len(c.ids):len(c.ids)], id)
	if err := c.store.KeepCommands(ids); err != nil {
		return nil, false, err
	}
	for _, old := range c.ids[:len(c.ids)+1-len(ids)] {
		delete(c.runs, old)
	}
	run = &commandRun{done: make(chan struct{})}
	c.ids, c.runs[id] = ids, run
	return run, true, nil
}

// since returns the time since t, including time in which the machine was
// suspended.
func since(t time.Time) time.Duration {
	return max(time.Since(t), time.Now().Round(0).Sub(t.Round(0)))
}

func refusal(c *control.HostCommand, status int, code, detail string) control.HostReply {
	return control.HostReply{ID: c.ID, Status: status, Code: code, Detail: detail}
}

// carryOut carries out a command of the server and returns the reply. late is the
// longest time that may have passed since the server sent the command.
func (r *Reporter) carryOut(ctx context.Context, c control.HostCommand, late time.Duration) control.HostReply {
	switch err := c.Check(); {
	case r.Commands == nil:
		return refusal(&c, http.StatusConflict, control.HostCommandsOff, "this host does not accept commands from the server")
	case err != nil:
		return refusal(&c, http.StatusUnprocessableEntity, control.HostInvalid, err.Error())
	case late > time.Duration(c.Valid):
		return refusal(&c, http.StatusServiceUnavailable, control.HostNotCarriedOut, "the command reached the host too late and was not carried out")
	}
	run, mine, err := r.Commands.begin(c.ID)
	switch {
	case err != nil:
		return refusal(&c, http.StatusServiceUnavailable, control.HostNotCarriedOut, "the host cannot record the command and did not carry it out: "+err.Error())
	case run == nil:
		return refusal(&c, http.StatusGatewayTimeout, control.HostOutcomeUnknown, "the host began the command before it restarted; its outcome is unknown")
	case !mine:
		select {
		case <-run.done:
			return run.reply
		case <-ctx.Done():
			return refusal(&c, http.StatusGatewayTimeout, control.HostOutcomeUnknown, "the host is stopping; the outcome of the command is unknown")
		}
	}
	run.reply = r.do(ctx, &c)
	run.reply.Fit()
	close(run.done)
	r.Log.Info("command from the server", "verb", c.Verb, "instance", c.Instance, "by", c.By, "id", c.ID, "status", run.reply.Status, "detail", run.reply.Detail)
	return run.reply
}

// do carries out a command as if a local user had requested it.
func (r *Reporter) do(ctx context.Context, c *control.HostCommand) control.HostReply {
	h, ref, done := r.Host, c.Instance, &control.HostDone{}
	verbs := map[string]func(context.Context) error{
		control.HostPause:  func(ctx context.Context) error { return h.Pause(ctx, ref, host.ByManual, c.Force) },
		control.HostResume: func(ctx context.Context) error { return h.Resume(ctx, ref, host.ByManual) },
		control.HostStart:  func(ctx context.Context) error { return h.Start(ctx, ref, host.ByManual) },
		control.HostStop:   func(ctx context.Context) error { return h.Stop(ctx, ref, host.ByManual, false) },
		control.HostSnooze: func(ctx context.Context) error {
			var until time.Time
			if c.Snooze > 0 {
				until = h.Now().Add(time.Duration(c.Snooze)).Round(time.Second)
			}
			return h.Snooze(ctx, ref, until)
		},
		control.HostLogs: func(ctx context.Context) (err error) {
			done.Log, done.Cut, err = r.tail(ctx, ref, c.Lines)
			return err
		},
	}
	err := h.Complete(ctx, func(ctx context.Context) error {
		return verbs[c.Verb](host.For(ctx, c.By+" via "+r.Via))
	})
	var o hostctl.Instance
	if err == nil {
		o, err = h.Get(ref)
	}
	if err != nil {
		status, code := http.StatusServiceUnavailable, control.HostFailed
		switch {
		case errors.As(err, new(*host.NotFoundError)):
			status, code = http.StatusNotFound, control.HostNotFound
		case errors.As(err, new(*host.RefusedError)):
			status, code = http.StatusConflict, control.HostRefused
		case errors.As(err, new(*host.InvalidError)):
			status, code = http.StatusUnprocessableEntity, control.HostInvalid
		case ctx.Err() != nil:
			status, code = http.StatusGatewayTimeout, control.HostOutcomeUnknown
		}
		return refusal(c, status, code, err.Error())
	}
	i := reported(o)
	done.Instance = &i
	return control.HostReply{ID: c.ID, Done: done}
}

// deliver offers a reply to the server until the server accepts it or no longer
// waits for it.
func (r *Reporter) deliver(ctx context.Context, a control.HostReply) {
	ctx, cancel := context.WithTimeout(ctx, deliverLimit)
	defer cancel()
	for failures := 0; ctx.Err() == nil; failures++ {
		within, end := context.WithTimeout(ctx, reportLimit)
		_, err := r.Server.HostTurn(within, r.Name, control.HostTurn{Answers: []control.HostReply{a}})
		end()
		if err == nil {
			return
		}
		_ = delay.For(ctx, delay.Backoff(failures, reportRetry, reportMost))
	}
}

// tail returns the last lines of an instance's output as text, at most
// control.MaxHostLog bytes. cut reports whether that was not enough for all of
// them.
func (r *Reporter) tail(ctx context.Context, ref string, lines int) (log []byte, cut bool, err error) {
	id, err := r.Host.IDOf(ref)
	if err != nil {
		return nil, false, err
	}
	var end lastBytes
	if err := r.Host.Logs(ctx, &end, id, hostctl.Logs{Tail: lines}); err != nil {
		return nil, false, err
	}
	return printable(end.kept), end.cut, nil
}

// lastBytes is a response writer that keeps the last control.MaxHostLog bytes, if
// possible from the beginning of a line.
type lastBytes struct {
	kept []byte
	cut  bool
}

var _ http.ResponseWriter = (*lastBytes)(nil)

// Header implements http.ResponseWriter.
func (l *lastBytes) Header() http.Header { return http.Header{} }

// WriteHeader implements http.ResponseWriter.
func (l *lastBytes) WriteHeader(int) {}

// Flush implements http.Flusher.
func (l *lastBytes) Flush() {}

// Write implements io.Writer.
func (l *lastBytes) Write(b []byte) (int, error) {
	l.kept = append(l.kept, b...)
	if over := len(l.kept) - control.MaxHostLog; over > 0 {
		l.cut = true
		if line := bytes.IndexByte(l.kept[over-1:len(l.kept)-1], '\n'); line >= 0 {
			over += line
		}
		l.kept = bytes.Clone(l.kept[over:])
	}
	return len(b), nil
}

// escapes matches the control sequences of terminals.
var escapes = regexp.MustCompile(`\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\^_])`)

// printable returns b without control sequences and control characters, so that it
// can be shown on pages and terminals.
func printable(b []byte) []byte {
	text := strings.ToValidUTF8(escapes.ReplaceAllString(string(b), ""), "?")
	return []byte(strings.Map(func(c rune) rune {
		if c < ' ' && c != '\n' && c != '\t' || c >= 0x7f && c < 0xa0 {
			return -1
		}
		return c
	}, text))
}
