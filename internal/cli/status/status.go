// Package status has the verb lull status, which summarizes everything that the
// command line can reach: the host and the agent of this machine, and a server.
package status

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/lib/httpx"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/control"
	"lull/internal/protocol/hostctl"
)

// patience is the time limit for each answer.
const patience = 5 * time.Second

// Summary is the output of lull status --json. A part that did not answer is nil;
// Missing then has the reason under the part's name: host, server or agent.
type Summary struct {
	Host    *hostctl.Status   `json:"host"`
	Server  *Fleet            `json:"server"`
	Agent   *agentctl.Status  `json:"agent"`
	Missing map[string]string `json:"missing"`
}

// Fleet is a server that answered. Overview is nil if the token may not read it.
type Fleet struct {
	URL      string            `json:"url"`
	Ready    bool              `json:"ready"`
	Session  *control.Session  `json:"session"`
	Overview *control.Overview `json:"overview"`
	Error    string            `json:"error,omitempty"` // why the session or the overview is missing
}

type verbs struct{ *client.Session }

// Command returns the verb lull status.
func Command(s *client.Session) *cobra.Command {
	return &cobra.Command{Use: "status", Short: "Sum up the host, the server and the agent", Args: term.Args(cobra.NoArgs),
		Long: `Sum up the host and the agent of this machine and the server, each in a few lines. A part
that does not answer is listed with the reason. The exit code is 1 if nothing answers.`,
		Example: "  lull status\n  lull status --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := verbs{s}.ask(cmd.Context())
			if err := s.Print(v, func(w io.Writer) { verbs{s}.text(w, v) }); err != nil {
				return err
			}
			if v.Host == nil && v.Server == nil && v.Agent == nil {
				return term.Exit(term.ExitFailed)
			}
			return nil
		}}
}

// ask queries host, agent and server concurrently.
func (c verbs) ask(ctx context.Context) Summary {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	v := Summary{Missing: map[string]string{}}
	var mu sync.Mutex
	var wg sync.WaitGroup
	part := func(name string, ask func() error) {
		wg.Go(func() {
			if err := ask(); err != nil {
				mu.Lock()
				defer mu.Unlock()
				v.Missing[name] = reason(name, err)
			}
		})
	}
	part("host", func() error {
		cl, err := c.HostClient()
		if err != nil {
			return err
		}
		st, err := cl.Status(ctx)
		if err == nil {
			v.Host = &st
		}
		return err
	})
	part("agent", func() error {
		st, err := agentctl.Dial(c.AgentSocket("")).Status(ctx)
		if err == nil {
			v.Agent = &st
		}
		return err
	})
	part("server", func() error {
		f, err := c.fleet(ctx)
		v.Server = f
		return err
	})
	wg.Wait()
	return v
}

// fleet queries the server. An HTTP error counts as an answer.
func (c verbs) fleet(ctx context.Context) (*Fleet, error) {
	cl, err := c.ServerClient()
	if err != nil {
		return nil, err
	}
	f := &Fleet{URL: c.ServerURL()}
	_, err = cl.Call(ctx, http.MethodGet, "/readyz", nil, nil)
	if _, answered := errors.AsType[*httpx.Problem](err); err != nil && !answered {
		return nil, err
	}
	f.Ready = err == nil
	s, err := control.Read[control.Session](ctx, cl, "/session")
	if err != nil {
		f.Error = err.Error()
		return f, nil
	}
	f.Session = &s
	o, err := control.Read[control.Overview](ctx, cl, "/overview?limit=1")
	if err != nil {
		f.Error = err.Error()
		return f, nil
	}
	f.Overview = &o
	return f, nil
}

// reason returns why a part did not answer, and how to start it.
func reason(part string, err error) string {
	start := map[string]string{"host": "lull host", "server": "lull server", "agent": "lull agent run"}[part]
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return "not running here. Start it with: " + start
	case errors.Is(err, fs.ErrPermission):
		return "no permission to use its socket; try as root, or as a member of the group lull"
	case errors.Is(err, context.DeadlineExceeded):
		return "no answer within " + term.Span(patience)
	}
	return err.Error()
}

func (c verbs) text(w io.Writer, v Summary) {
	if h := v.Host; h != nil {
		fmt.Fprintf(w, "host    %s, lull %s, up for %s\n", counted(sum(h.Instances), "instance", h.Instances), h.Version, term.Span(time.Since(h.StartedAt)))
		for _, fault := range h.Faults {
			term.Wrapped(w, "        ", fault)
		}
		c.ShowHostHalt(w, *h)
	} else {
		term.Wrapped(w, "host    ", v.Missing["host"])
	}
	c.serverText(w, v)
	if a := v.Agent; a != nil {
		term.Wrapped(w, "agent   ", fmt.Sprintf("%s for %s, lull %s, up for %s. More with: lull agent status", activity(a), idle.HumanMinutes(a.Verdict.IdleMinutes), a.Version, term.Span(time.Since(a.StartedAt))))
	} else {
		term.Wrapped(w, "agent   ", v.Missing["agent"])
	}
}

func activity(a *agentctl.Status) string {
	if a.Verdict.IsIdle {
		return "idle"
	}
	return "not idle yet, quiet"
}

func (c verbs) serverText(w io.Writer, v Summary) {
	f := v.Server
	if f == nil {
		term.Wrapped(w, "server  ", c.ServerURL()+": "+v.Missing["server"])
		return
	}
	if f.Overview == nil {
		term.Wrapped(w, "server  ", fmt.Sprintf("%s answers, but not this token: %s", f.URL, f.Error))
		return
	}
	by := map[string]int{}
	for standing, n := range f.Overview.Counts {
		by[strings.ReplaceAll(string(standing), "_", " ")] = n
	}
	fmt.Fprintf(w, "server  %s, fleet %s, lull %s, as %s (%s)\n", f.URL, f.Session.Fleet, f.Session.Version, f.Session.Name, f.Session.Role)
	fmt.Fprintf(w, "        %s\n", counted(f.Overview.Total, "worker", by))
	if !f.Ready {
		fmt.Fprintln(w, "        It is not ready to work. Details with: lull server doctor")
	}
	if n := f.Overview.Urgent; n > 0 {
		term.Wrapped(w, "        ", fmt.Sprintf("%s. List with: lull worker ls", map[bool]string{true: "1 worker needs attention", false: fmt.Sprintf("%d workers need attention", n)}[n == 1]))
	}
	if h := f.Overview.Halt; h.On {
		fmt.Fprintln(w, c.Red("HALTED: "+term.Localized(h.Sentence())+" Lift it with: lull halt --off"))
	}
}

func sum(by map[string]int) (n int) {
	for _, k := range by {
		n += k
	}
	return n
}

// counted returns text such as "3 instances: 1 paused, 2 running".
func counted(total int, what string, by map[string]int) string {
	text := fmt.Sprintf("%d %ss", total, what)
	if total == 1 {
		text = "1 " + what
	}
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(by)) {
		if by[k] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", by[k], k))
		}
	}
	if len(parts) == 0 {
		return text
	}
	return text + ": " + strings.Join(parts, ", ")
}
