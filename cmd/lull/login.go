package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/lib/segment"
	"lull/internal/platform/oidc"
	"lull/internal/protocol/control"
)

// savedLogin is a user's login at the issuer of a server, in a file of that
// person alone.
type savedLogin struct {
	Issuer   string `json:"issuer"`
	ClientID string `json:"client_id"`
	oidc.Login
}

// loginWithin is how long a user may take to log in.
const loginWithin = 10 * time.Minute

func (c *cli) loginCommand() *cobra.Command {
	var device bool
	cmd := &cobra.Command{Use: "login", Short: "Log in to the server with your organization's account", Args: args(cobra.NoArgs),
		Long: `Log in to a server that has an OIDC issuer. The login completes in a browser on this
machine, or with --device in a browser anywhere. It is stored in
$XDG_CONFIG_HOME/lull and renewed until the issuer ends it. --token and LULL_TOKEN
take precedence.`,
		Example: "  lull login --server https://lull.example.com:7070\n  lull login --device",
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), loginWithin)
			defer cancel()
			where := c.serverURL()
			cl, err := control.NewClient(where, "", nil)
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
				l, err = p.Device(ctx, func(uri, code string) { fmt.Fprintf(c.err, "open %s and enter the code %s\n", uri, code) })
			} else {
				l, err = c.loginHere(ctx, p)
			}
			if err != nil {
				return err
			}
			if err := c.keepLogin(where, &savedLogin{a.Issuer, a.ClientID, l}); err != nil {
				return err
			}
			me, err := control.NewClient(where, l.IDToken, nil)
			if err != nil {
				return err
			}
			s, err := control.Read[control.Session](ctx, me, "/session")
			if err != nil {
				return fmt.Errorf("logged in, but the server rejects the login: %w", err)
			}
			return c.print(s, func(w io.Writer) { fmt.Fprintf(w, "logged in to %s as %s (%s)\n", where, s.Name, s.Role) })
		}}
	cmd.Flags().BoolVar(&device, "device", false, "show a code instead of waiting for a browser on this machine")
	return cmd
}

func (c *cli) logoutCommand() *cobra.Command {
	return &cobra.Command{Use: "logout", Short: "Log out of the server on this machine", Args: args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error { return c.keepLogin(c.serverURL(), nil) }}
}

// loginHere waits on loopback for the browser to come back from the issuer.
func (c *cli) loginHere(ctx context.Context, p *oidc.Provider) (l oidc.Login, err error) {
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
		default: // a page that is loaded again
		}
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(listener) }()
	defer func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = srv.Shutdown(last) // the page is written; a browser that keeps its connection is cut off
		_ = srv.Close()
		<-ended
	}()
	fmt.Fprintf(c.err, "open this page in a browser on this machine, or use --device:\n%s\n", where)
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

// loginFile keeps the logins of this person, by server.
func (c *cli) loginFile() string {
	dir := c.getenv("XDG_CONFIG_HOME")
	if dir == "" {
		dir = filepath.Join(c.getenv("HOME"), ".config")
	}
	return filepath.Join(dir, "lull", "logins.json")
}

func (c *cli) logins() (map[string]savedLogin, error) {
	out := map[string]savedLogin{}
	b, err := os.ReadFile(c.loginFile())
	if errors.Is(err, fs.ErrNotExist) {
		return out, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot read the logins in %s: %w", c.loginFile(), err)
	}
	return out, nil
}

// keepLogin writes the login to a server, or forgets it.
func (c *cli) keepLogin(server string, l *savedLogin) error {
	all, err := c.logins()
	if err != nil {
		return err
	}
	delete(all, server)
	if l != nil {
		all[server] = *l
	}
	b, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(c.loginFile()), 0o700); err != nil {
		return fmt.Errorf("cannot store the login: %w", err)
	}
	return segment.WriteFile(c.loginFile(), append(b, '\n'), 0o600)
}

// loggedIn is the token of the login to a server, renewed where it is about
// to end; empty without one.
func (c *cli) loggedIn(server string) (string, error) {
	all, err := c.logins()
	l, ok := all[server]
	if err != nil || !ok {
		return "", err
	}
	if time.Until(l.Expires) > 30*time.Second {
		return l.IDToken, nil
	}
	p, err := oidc.New(oidc.Config{Issuer: l.Issuer, ClientID: l.ClientID})
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if l.Login, err = p.Refresh(ctx, l.Login); err != nil {
		return "", fmt.Errorf("the login to %s has expired (%w); log in again: lull login", server, err)
	}
	return l.IDToken, c.keepLogin(server, &l)
}
