package control

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"time"

	"lull/internal/core/idle"
)

// Verbs of commands for an instance of a host.
const (
	HostPause  = "pause"
	HostResume = "resume"
	HostStart  = "start"
	HostStop   = "stop"
	HostSnooze = "snooze"
	HostLogs   = "logs"
)

var hostVerbs = []string{HostPause, HostResume, HostStart, HostStop, HostSnooze, HostLogs}

// Limits of commands.
const (
	// HostCommandFetch is the time in which a host must fetch a command. After
	// that the server withdraws it.
	HostCommandFetch = 5 * time.Second
	// HostCommandWait is how long a server waits for the outcome of a command
	// after it received the command.
	HostCommandWait  = 20 * time.Second
	MaxHostLog       = 64 << 10 // bytes of logs in one reply
	MaxHostLogLines  = 10_000
	DefaultHostLines = 200
	MaxHostSnooze    = 30 * 24 * time.Hour
)

// Codes of a HostReply to a command.
const (
	HostCommandsOff    = "commands_off"    // the host does not accept commands
	HostNotCarriedOut  = "not_carried_out" // the host did not and will not carry it out
	HostOutcomeUnknown = "outcome_unknown" // the host fetched it; whether it was carried out is unknown
	HostRefused        = "refused"
	HostNotFound       = "not_found"
	HostInvalid        = "invalid"
	HostFailed         = "host_failed" // the host tried and failed
)

// HostCommand is a command for one instance of a host. A host carries out each ID
// at most once, and only within the time Valid after it received the command.
type HostCommand struct {
	ID       string        `json:"id"`
	Verb     string        `json:"verb"`
	Instance string        `json:"instance"` // ID or name
	By       string        `json:"by"`       // the user who issued it
	Force    bool          `json:"force,omitempty"`
	Snooze   idle.Duration `json:"snooze_seconds,omitempty"` // of snooze; 0 ends a snooze
	Lines    int           `json:"lines,omitempty"`          // number of lines; only for logs
	Valid    idle.Duration `json:"valid_seconds"`
}

// Check validates a command.
func (c *HostCommand) Check() error {
	switch {
	case !hostIdent.MatchString(c.ID):
		return errors.New("id: want 1 to 64 letters, digits, '.', '_' and '-'")
	case !slices.Contains(hostVerbs, c.Verb):
		return fmt.Errorf("verb: %.40q is not one of %v", c.Verb, hostVerbs)
	case !hostIdent.MatchString(c.Instance):
		return errors.New("instance: it is neither a name nor an id")
	case c.Snooze < 0 || time.Duration(c.Snooze) > MaxHostSnooze:
		return fmt.Errorf("snooze_seconds: it is not between 0 and %s", MaxHostSnooze)
	case c.Lines < 0 || c.Lines > MaxHostLogLines:
		return fmt.Errorf("lines: it is not between 0 and %d", MaxHostLogLines)
	}
	return plain(c)
}

// HostDone is a host's report of a command that it carried out.
type HostDone struct {
	Instance *HostInstance `json:"instance"` // the instance afterwards
	Log      []byte        `json:"log,omitempty"`
	Cut      bool          `json:"cut,omitempty"` // earlier lines were left out to limit the size
}

// HostOutcome is the server's answer to a command for an instance.
type HostOutcome struct {
	ID   string `json:"id"`
	Host string `json:"host"`
	Verb string `json:"verb"`
	// Outcome is unknown if the host has fetched the command and its answer did
	// not arrive.
	Outcome  string        `json:"outcome" enum:"done,unknown"`
	Detail   string        `json:"detail,omitempty"`
	Instance *HostInstance `json:"instance" doc:"As the host described it afterwards; null if the outcome is unknown"`
}

// HostLog is the end of an instance's output.
type HostLog struct {
	Host     string `json:"host"`
	Instance string `json:"instance" doc:"Its name"`
	Text     string `json:"text" doc:"Without control characters other than newlines and tabs"`
	Cut      bool   `json:"cut" doc:"Earlier lines that were asked for are left out: they exceed 64 KiB"`
}

// CommandHost issues a command for an instance of a host. in is the request body;
// nil for none.
func (c *Client) CommandHost(ctx context.Context, host, inst, verb string, force bool, in any) (o HostOutcome, err error) {
	path := api + hostPath(host, "instances", inst, verb)
	if force {
		path += "?force=true"
	}
	_, err = c.Call(ctx, http.MethodPost, path, in, &o)
	return o, err
}

// HostLogs returns the last lines that an instance of a host printed.
func (c *Client) HostLogs(ctx context.Context, host, inst string, lines int) (HostLog, error) {
	return get[HostLog](ctx, c, api+hostPath(host, "instances", inst, "logs")+"?"+url.Values{"lines": {fmt.Sprint(lines)}}.Encode())
}
