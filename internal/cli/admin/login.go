package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/cli/client"
	"lull/internal/cli/term"
	"lull/internal/platform/oidc"
	"lull/internal/protocol/control"
)

// loginWithin is how long the user may take to log in.
const loginWithin = 10 * time.Minute

func (c verbs) loginCommand() *cobra.Command {
	var device bool
	cmd := &cobra.Command{Use: "login", Short: "Log in to the server with your organization's account", Args: term.Args(cobra.NoArgs),
		Long: `Log in to a server that has an OIDC issuer. The login completes in a browser on this
machine, or with --device in a browser anywhere. It is stored in
$XDG_CONFIG_HOME/lull and renewed until the issuer ends it. --token and LULL_TOKEN
take precedence.`,
		Example: "  lull login --server https://lull.example.com:7070\n  lull login --device",
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), loginWithin)
			defer cancel()
			where := c.ServerURL()
			cl, err := control.NewClient(where, "", c.HTTP)
			if err != nil {
				return err
			}
			a, err := control.Read[control.Auth](ctx, cl, "/auth")
			if err != nil {
				return err
			}
			if a.Issuer == "" {
				return fmt.Errorf("cannot log in to %s: it has no OIDC issuer; use a token (lull token create)", where)
			}
			p, err := oidc.New(oidc.Config{Issuer: a.Issuer, ClientID: a.ClientID})
			if err != nil {
				return err
			}
			var l oidc.Login
			if device {
				l, err = p.Device(ctx, func(uri, code string) { fmt.Fprintf(c.Err, "open %s and enter the code %s\n", uri, code) })
			} else {
				l, err = c.loginHere(ctx, p)
			}
			if err != nil {
				return err
			}
			if err := c.KeepLogin(where, &client.SavedLogin{Issuer: a.Issuer, ClientID: a.ClientID, Login: l}); err != nil {
				return err
			}
			me, err := control.NewClient(where, l.IDToken, c.HTTP)
			if err != nil {
				return err
			}
			s, err := control.Read[control.Session](ctx, me, "/session")
			if err != nil {
				return fmt.Errorf("logged in, but the server rejects the login: %w", err)
			}
			return c.Print(s, func(w io.Writer) { fmt.Fprintf(w, "logged in to %s as %s (%s)\n", where, s.Name, s.Role) })
		}}
	cmd.Flags().BoolVar(&device, "device", false, "show a code instead of waiting for a browser on this machine")
	return cmd
}

func (c verbs) logoutCommand() *cobra.Command {
	return &cobra.Command{Use: "logout", Short: "Log out of the server on this machine", Example: "  lull logout", Args: term.Args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error { return c.KeepLogin(c.ServerURL(), nil) }}
}

// loginHere listens on loopback until the browser comes back from the issuer, and
// returns the login.
func (c verbs) loginHere(ctx context.Context, p *oidc.Provider) (l oidc.Login, err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return l, fmt.Errorf("cannot wait for the browser: %w", err)
	}
	redirect := "http://" + listener.Addr().String() + "/callback"
	f := oidc.NewFlow()
	where, err := p.URL(ctx, f, redirect)
	if err != nil {
		return l, errors.Join(err, listener.Close())
	}
	type back struct{ code, fault string }
	got := make(chan back, 1)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /callback", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if q.Get("state") != f.State {
			http.Error(w, "this request does not belong to the pending login", http.StatusBadRequest)
			return
		}
		fmt.Fprintln(w, "You may close this page and return to the terminal.")
		select {
		case got <- back{q.Get("code"), q.Get("error")}:
		default: // the page was loaded again
		}
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(listener) }()
	defer func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = srv.Shutdown(last) // the page has been written; connections that the browser keeps open are cut
		_ = srv.Close()
		<-ended
	}()
	fmt.Fprintf(c.Err, "open this page in a browser on this machine, or use --device:\n%s\n", where)
	select {
	case b := <-got:
		if b.fault != "" {
			return l, fmt.Errorf("cannot log in: the issuer reports %s", b.fault)
		}
		return p.Exchange(ctx, f, redirect, b.code)
	case <-ctx.Done():
		return l, fmt.Errorf("cannot log in: the browser did not return: %w", context.Cause(ctx))
	}
}
