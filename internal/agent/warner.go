package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"lull/internal/lib/segment"
	"lull/internal/platform/desktop"
	"lull/internal/platform/proc"
)

// UserWarner is the Warner of a real machine. It writes to every terminal, a file,
// the desktops of sessions, and a webhook. If one of them fails, the others are still
// notified.
type UserWarner struct {
	Terminals string          // directory of terminals, such as /dev/pts; empty for none
	Consoles  []string        // further terminals, such as /dev/tty1
	Own       *proc.OwnWrites // records lull's own writes, so that they do not count as use
	File      string          // path of the warning file, such as /run/lull/warning; empty for none
	Desktops  string          // directory of the users' session buses, such as /run/user; empty for none
	HTTP      *http.Client    // client for the webhook; nil for none
	Host      string
}

var _ Warner = UserWarner{}

// Warn implements Warner.
func (p UserWarner) Warn(ctx context.Context, w Warning) error {
	text := fmt.Sprintf("\r\n*** lull on %s: %s ***\r\n", p.Host, strings.ReplaceAll(w.Text(), "\n", "\r\n"))
	reached, err := p.terminals(text)
	errs := []error{}
	if err != nil {
		errs = append(errs, err)
	}
	if err != nil && reached == 0 {
		errs = append(errs, p.wall(ctx, w.Text()))
	}
	if p.File != "" {
		b, _ := json.Marshal(w) // plain data
		errs = append(errs, segment.WriteFile(p.File, append(b, '\n'), 0o644))
	}
	if p.Desktops != "" {
		_, err := desktop.Notify(ctx, p.Desktops, desktop.Message{Summary: "lull on " + p.Host, Body: w.Text()})
		errs = append(errs, err)
	}
	errs = append(errs, p.webhook(ctx, "idle_warning", "", w))
	return errors.Join(errs...)
}

// Withdraw implements Warner. It writes a line to every terminal, updates the file,
// and calls the webhook.
func (p UserWarner) Withdraw(ctx context.Context, w Withdrawal) error {
	var errs []error
	switch {
	case p.File == "":
	case len(w.Left) > 0:
		b, _ := json.Marshal(w.Left[0]) // plain data
		errs = append(errs, segment.WriteFile(p.File, append(b, '\n'), 0o644))
	default:
		if err := os.Remove(p.File); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("cannot remove the warning: %w", err))
		}
	}
	if w.Warning.Action == "" {
		return errors.Join(errs...)
	}
	reached, err := p.terminals(fmt.Sprintf("\r\n*** lull on %s: %s ***\r\n", p.Host, w.Text()))
	errs = append(errs, err)
	if err != nil && reached == 0 {
		errs = append(errs, p.wall(ctx, w.Text()))
	}
	if p.Desktops != "" {
		_, err := desktop.Notify(ctx, p.Desktops, desktop.Message{Summary: "lull on " + p.Host, Body: w.Text()})
		errs = append(errs, err)
	}
	errs = append(errs, p.webhook(ctx, "idle_warning_withdrawn", w.Why, w.Warning))
	return errors.Join(errs...)
}

// terminals writes text to every terminal and returns how many it reached. It skips a
// terminal that accepts nothing because output to it is stopped.
func (p UserWarner) terminals(text string) (reached int, err error) {
	var paths []string
	if p.Terminals != "" {
		names, rerr := os.ReadDir(p.Terminals)
		err = rerr
		for _, n := range names {
			if _, nerr := strconv.ParseUint(n.Name(), 10, 32); nerr == nil {
				paths = append(paths, filepath.Join(p.Terminals, n.Name()))
			}
		}
	}
	paths = append(paths, p.Consoles...)
	for _, path := range paths {
		if werr := p.write(path, text); werr != nil && !errors.Is(werr, os.ErrNotExist) {
			err = errors.Join(err, werr)
			continue
		}
		reached++
	}
	return reached, err
}

func (p UserWarner) write(path, text string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	// Note the time before and after the write, because the kernel's time of the
	// write is in between.
	p.Own.Note(time.Now())
	defer func() { p.Own.Note(time.Now()) }()
	if _, err := unix.Write(fd, []byte(text)); err != nil {
		return &os.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

// wall writes text with the wall command, for when the terminals cannot be listed or
// written.
func (p UserWarner) wall(ctx context.Context, text string) error {
	cmd := exec.CommandContext(ctx, "wall")
	cmd.Stdin = strings.NewReader(text)
	cmd.WaitDelay = time.Second
	p.Own.Note(time.Now())
	defer func() { p.Own.Note(time.Now()) }()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot run wall: %w: %.200s", err, out)
	}
	return nil
}

func (p UserWarner) webhook(ctx context.Context, event, why string, w Warning) error {
	if p.HTTP == nil || w.URL == "" {
		return nil
	}
	b, err := json.Marshal(struct {
		Event string `json:"event"` // idle_warning, idle_warning_withdrawn
		Host  string `json:"host"`
		Why   string `json:"why,omitempty"` // why a warning was withdrawn
		Warning
	}{event, p.Host, why, w})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.URL, bytes.NewReader(b))
	if err != nil {
		return fmt.Errorf("cannot post the warning: %w", withoutURL(err))
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := p.HTTP.Do(req)
	if err != nil {
		return fmt.Errorf("cannot post the warning: %w", withoutURL(err))
	}
	resp.Body.Close()
	if !slices.Contains([]int{200, 201, 202, 204}, resp.StatusCode) {
		return fmt.Errorf("cannot post the warning: the answer is %s", resp.Status)
	}
	return nil
}

// withoutURL removes the URL from an HTTP error. A webhook's URL is a secret, and the
// error is shown and reported.
func withoutURL(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		return e.Err
	}
	return err
}
