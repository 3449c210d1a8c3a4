package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"lull/internal/lib/segment"
	"lull/internal/platform/oidc"
)

// SavedLogin is a user's login at the issuer of a server. It is stored in a
// file that only this user can read.
type SavedLogin struct {
	Issuer   string `json:"issuer"`
	ClientID string `json:"client_id"`
	oidc.Login
}

// loginFile returns the path of the file that holds this user's logins, by
// server.
func (c *Session) loginFile() string {
	dir := c.Getenv("XDG_CONFIG_HOME")
	if dir == "" {
		dir = filepath.Join(c.Getenv("HOME"), ".config")
	}
	return filepath.Join(dir, "lull", "logins.json")
}

func (c *Session) logins() (map[string]SavedLogin, error) {
	out := map[string]SavedLogin{}
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

// KeepLogin stores the login to a server; nil removes it.
func (c *Session) KeepLogin(server string, l *SavedLogin) error {
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

// loggedIn returns the token of the stored login to a server, renewed if it is about
// to expire; empty if there is no login.
func (c *Session) loggedIn(server string) (string, error) {
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
	return l.IDToken, c.KeepLogin(server, &l)
}
