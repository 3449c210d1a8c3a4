package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"lull/internal/cli/term"
	"lull/internal/fleet/worker"
	"lull/internal/lib/httpx"
	"lull/internal/lib/spell"
	"lull/internal/protocol/control"
)

// ServerURL returns the URL of the server.
func (c *Session) ServerURL() string {
	return cmp.Or(c.Server, c.Getenv("LULL_SERVER"), "http://127.0.0.1:7070")
}

// ServerClient returns a client of the server.
func (c *Session) ServerClient() (*control.Client, error) {
	where := c.ServerURL()
	token := c.Token
	if token == "" {
		token = c.Getenv("LULL_TOKEN")
	}
	if token == "" {
		var err error
		if token, err = c.loggedIn(where); err != nil {
			return nil, err
		}
	}
	return control.NewClient(where, token, c.HTTP)
}

// AsksServer reports whether a verb that exists for hosts and servers is meant for
// the server: --server is given, or LULL_SERVER is set and neither --host nor
// LULL_HOST is.
func (c *Session) AsksServer() bool {
	return c.Server != "" || c.Getenv("LULL_SERVER") != "" && c.Host == "" && c.Getenv("LULL_HOST") == ""
}

// OrServer makes a host's verb call ask if it is meant for a server.
func (c *Session) OrServer(cmd *cobra.Command, ask func(cmd *cobra.Command, a []string) error) *cobra.Command {
	host := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		if c.AsksServer() {
			return ask(cmd, a)
		}
		err := host(cmd, a)
		if len(a) == 0 || err == nil || term.ExitCode(err) != term.ExitNotFound || c.Getenv("LULL_SERVER") == "" {
			return err
		}
		// The host does not know the name, but the server may.
		if err = ask(cmd, a); err != nil {
			err = fmt.Errorf("%w; checked the host (%s) and the server (%s)", err, c.hostAddress(), c.ServerURL())
		}
		return err
	}
	complete := cmd.ValidArgsFunction
	if complete != nil {
		cmd.ValidArgsFunction = func(cmd *cobra.Command, a []string, to string) ([]string, cobra.ShellCompDirective) {
			if c.AsksServer() {
				return c.CompleteWorkers(cmd, a, to)
			}
			return complete(cmd, a, to)
		}
	}
	return cmd
}

// CompleteWorkers completes the first argument with the names of workers.
func (c *Session) CompleteWorkers(cmd *cobra.Command, a []string, to string) ([]string, cobra.ShellCompDirective) {
	if len(a) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	cl, err := c.ServerClient()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	q := url.Values{"sort": {"name"}, "limit": {"500"}, "q": {to}} // no one reads more than 500
	l, err := control.Read[control.List[worker.Worker]](cmd.Context(), cl, "/workers?"+q.Encode())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	names := make([]string, 0, len(l.Items))
	for _, w := range l.Items {
		names = append(names, w.Name+"\t"+string(w.Status))
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// FindWorker returns the worker with the ID or name ref, and a client of its server.
// The error for an unknown name suggests similar ones.
func (c *Session) FindWorker(ctx context.Context, ref string) (*control.Client, worker.Worker, error) {
	cl, err := c.ServerClient()
	if err != nil {
		return nil, worker.Worker{}, err
	}
	w, err := cl.Worker(ctx, ref)
	if p, ok := errors.AsType[*httpx.Problem](err); ok && p.Status == http.StatusNotFound {
		if near := nearWorkers(ctx, cl, ref); near != "" {
			p.Detail += "; did you mean " + near + "?"
		}
	}
	return cl, w, err
}

// nearWorkers returns up to three names that are similar to ref, ignoring case and
// separators; "" if there are none or the listing fails.
func nearWorkers(ctx context.Context, cl *control.Client, ref string) string {
	l, err := cl.Workers(ctx, url.Values{})
	if err != nil {
		return "" // the error about the worker is enough
	}
	var near []string
	for _, w := range l {
		if spell.Distance(plainName(ref), plainName(w.Name)) <= min(2, len(ref)/3) && !slices.Contains(near, w.Name) {
			near = append(near, w.Name)
		}
	}
	slices.Sort(near)
	return strings.Join(near[:min(len(near), 3)], " or ")
}

// plainName returns a name in lower case and without separators, for comparisons.
func plainName(s string) string {
	return strings.NewReplacer("-", "", "_", "", ".", "").Replace(strings.ToLower(s))
}
