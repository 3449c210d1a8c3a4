package hosts

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"lull/internal/protocol/control"
)

// command is a command that waits for its host to fetch it.
type command struct {
	control.HostCommand
	fetched chan struct{} // closed when the host has fetched it
}

// Polls reports whether a host polls this server for questions and commands.
func (h *Hosts) Polls(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byID[name]
	return x != nil && x.turns > 0
}

// Command gives a command to a host and returns the reply. If the host does not fetch
// the command in time, it never gets it. If the host has fetched it and no reply
// arrives, the outcome is unknown.
func (h *Hosts) Command(ctx context.Context, name string, c control.HostCommand) control.HostReply {
	fail := func(status int, code, format string, a ...any) control.HostReply {
		return control.HostReply{ID: c.ID, Status: status, Code: code, Detail: fmt.Sprintf(format, a...)}
	}
	ctx, cancel := context.WithTimeout(ctx, control.HostCommandWait)
	defer cancel()
	h.mu.Lock()
	x := h.byID[name]
	switch {
	case x == nil || !x.heard(time.Now()):
		h.mu.Unlock()
		return fail(http.StatusServiceUnavailable, control.HostNotCarriedOut, "host %s does not report; the command was not carried out", name)
	case !x.last.Commands:
		h.mu.Unlock()
		return fail(http.StatusConflict, control.HostCommandsOff, "host %s does not accept commands from the server; its owner can allow them with: lull host --server-commands", name)
	case len(x.asked) >= maxQuestions || x.asked[c.ID] != nil:
		h.mu.Unlock()
		return fail(http.StatusServiceUnavailable, control.HostNotCarriedOut, "host %s has other requests to answer; the command was not carried out", name)
	}
	if id := x.byRef(c.Instance); id != "" {
		c.Instance = id // the instance that the user saw, even if another takes over its name
	}
	to, given := make(chan control.HostReply, 1), command{c, make(chan struct{})}
	x.asked[c.ID] = to
	x.commands = append(x.commands, given)
	x.wake()
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if x.asked[c.ID] == to {
			delete(x.asked, c.ID)
		}
	}()
	timer := time.NewTimer(control.HostCommandFetch)
	defer timer.Stop()
	select {
	case <-given.fetched:
	case <-timer.C:
		if h.withdraw(x, given) {
			return fail(http.StatusServiceUnavailable, control.HostNotCarriedOut, "host %s did not fetch the command in time; it was withdrawn", name)
		}
	case <-ctx.Done():
		if h.withdraw(x, given) {
			return fail(http.StatusServiceUnavailable, control.HostNotCarriedOut, "the request ended before host %s fetched the command; it was withdrawn", name)
		}
	}
	select {
	case a := <-to:
		return a
	case <-ctx.Done():
		return fail(http.StatusGatewayTimeout, control.HostOutcomeUnknown, "host %s fetched the command and has not answered; its outcome is unknown", name)
	}
}

// withdraw takes back a command that the host has not fetched. It returns false
// if the host has it.
func (h *Hosts) withdraw(x *host, c command) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := slices.IndexFunc(x.commands, func(o command) bool { return o.fetched == c.fetched })
	if n < 0 {
		return false
	}
	x.commands = slices.Delete(x.commands, n, n+1)
	return true
}

// byRef returns the ID of the reported instance with this ID or name; empty if there
// is none. h.mu must be held.
func (x *host) byRef(ref string) string {
	if _, known := x.known[ref]; known {
		return ref
	}
	for id, i := range x.known {
		if i.Name == ref {
			return id
		}
	}
	return ""
}
