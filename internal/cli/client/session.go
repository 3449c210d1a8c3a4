// Package client finds what a verb talks to: the host daemon or agent of this
// machine, or a server. It reads the addresses and tokens from flags, the
// environment and the stored logins, in this order, and completes the names of
// instances and workers.
package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/cli/term"
)

// Session is one run of the command line. Host, Server and Token are the values of
// the flags of these names; empty if not given. HTTP is the client for requests to a
// server; nil means a new one. A Session is not safe for concurrent use.
type Session struct {
	term.Term
	Host   string
	Server string
	Token  string
	HTTP   *http.Client
}

// Prepare gives a program's root command the streams, flags and error handling that
// all verbs share.
func (c *Session) Prepare(root *cobra.Command) {
	root.SilenceErrors, root.SilenceUsage = true, true
	root.PersistentPreRunE = func(*cobra.Command, []string) error { return c.CheckOutput() }
	root.SetOut(c.Out)
	root.SetErr(c.Err)
	root.SetIn(c.In)
	root.SetFlagErrorFunc(term.FlagFault)
	root.Args = func(cmd *cobra.Command, a []string) error { // otherwise cobra would print an error of its own
		if len(a) > 0 {
			return term.UnknownVerb(cmd, a[0])
		}
		return nil
	}
	root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	c.Bind(root.PersistentFlags())
	c.WrapHelp(root)
}

// Execute runs the verb that args select and returns the exit code.
func (c *Session) Execute(ctx context.Context, root *cobra.Command, args []string) int {
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return term.ExitDone
	}
	if exit, ok := errors.AsType[*term.ExitError](err); ok {
		return exit.Code
	}
	c.Complain(err)
	return term.ExitCode(err)
}

// VersionCommand returns the verb that prints the version.
func (c *Session) VersionCommand(version string) *cobra.Command {
	return &cobra.Command{Use: "version", Short: "Print the version", Example: "  lull version", Args: term.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.Print(map[string]string{"version": version}, func(w io.Writer) { fmt.Fprintln(w, cmd.Root().Name(), version) })
		}}
}

// Bind adds the flags that all verbs share to f.
func (c *Session) Bind(f *pflag.FlagSet) {
	c.Term.Bind(f)
	f.StringVar(&c.Server, "server", "", "server URL (default $LULL_SERVER, then http://127.0.0.1:7070)")
	f.StringVar(&c.Token, "token", "", "server token (default $LULL_TOKEN, which process listings do not show)")
	f.StringVar(&c.Host, "host", "", "socket of the host daemon, unix:///path (default $LULL_HOST, then the default socket)")
}
