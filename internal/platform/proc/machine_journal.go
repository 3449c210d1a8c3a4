package proc

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"time"
)

// journalLimit is the time limit for journalctl.
const journalLimit = 5 * time.Second

// sessionStart is the message id under which logind logs a new session
// (systemd's SD_MESSAGE_SESSION_START).
const sessionStart = "8d45620c1a4348dbb17410da57c60c66"

// journal returns the newest session in systemd's journal. It returns
// fs.ErrNotExist on a machine without a journal or without journalctl.
func (p *LoginReader) journal() (l logins, err error) {
	dir := p.path("var/log/journal")
	if names, derr := os.ReadDir(dir); derr != nil || len(names) == 0 {
		dir = p.path("run/log/journal")
		if _, err := os.Stat(dir); err != nil {
			return l, err
		}
	}
	program, err := exec.LookPath("journalctl")
	if err != nil {
		return l, os.ErrNotExist
	}
	ctx, cancel := context.WithTimeout(context.Background(), journalLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, "--directory="+dir, "--quiet", "--no-pager", "--output=json", "--lines=1",
		"--output-fields=USER_ID", "MESSAGE_ID="+sessionStart)
	cmd.WaitDelay = time.Second
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		return l, fmt.Errorf("cannot run journalctl: %w: %.200s", err, bytes.TrimSpace(said.Bytes()))
	}
	return parseJournal(out.Bytes())
}

// parseJournal reads the one line that journalctl prints, or none.
func parseJournal(line []byte) (l logins, err error) {
	if len(bytes.TrimSpace(line)) == 0 {
		return l, nil
	}
	var e struct {
		At   string `json:"__REALTIME_TIMESTAMP"` // microseconds
		User any    `json:"USER_ID"`
	}
	if err := json.Unmarshal(line, &e); err != nil {
		return l, fmt.Errorf("cannot read the output of journalctl: %w", err)
	}
	us, err := strconv.ParseInt(e.At, 10, 64)
	if err != nil || us <= 0 {
		return l, fmt.Errorf("journalctl output: %q is not a time", e.At)
	}
	if l.who, _ = e.User.(string); l.who == "" {
		l.who = "an unknown user"
	}
	l.newest = time.UnixMicro(us)
	return l, nil
}
