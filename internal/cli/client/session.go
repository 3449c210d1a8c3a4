// Package client finds what a verb talks to: the host daemon or agent of this
// machine, or a server. It reads the addresses and tokens from flags, the
// environment and the stored logins, in this order, and completes the names of
// instances and workers.
package client

import (
	"github.com/spf13/pflag"

	"lull/internal/cli/term"
)

// Session is one run of the command line. Host, Server and Token are the values
// of the flags of these names, empty if not given. A Session is not safe for
// concurrent use.
type Session struct {
	term.Term
	Host   string
	Server string
	Token  string
}

// Bind adds the flags that all verbs have to f.
func (c *Session) Bind(f *pflag.FlagSet) {
	c.Term.Bind(f)
	f.StringVar(&c.Server, "server", "", "server URL (default $LULL_SERVER, then http://127.0.0.1:7070)")
	f.StringVar(&c.Token, "token", "", "server token (default $LULL_TOKEN, which process listings do not show)")
	f.StringVar(&c.Host, "host", "", "socket of the host daemon, unix:///path (default $LULL_HOST, then the default socket)")
}
