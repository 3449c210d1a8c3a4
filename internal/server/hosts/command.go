package hosts

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"lull/internal/protocol/control"
)

// command is a command for a host to fetch.
type command struct {
	control.HostCommand
	fetched chan struct{} // closed when the host has it
}

// Polls reports whether a host waits for questions and commands here.
func (h *Hosts) Polls(name string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byID[name]
	return x != nil && x.turns > 0
}

// Command gives a host a command and returns its reply. A host that does not
// fetch the command in time never gets it. Once it was fetched, an outcome that
// does not arrive is unknown.
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
		c.Instance = id // the instance that the user saw, even if its name is taken over
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

// byRef returns the ID of an instance as reported; empty if unknown. The caller
// holds the lock.
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
