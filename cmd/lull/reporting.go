package main

import (
	"fmt"
	"net/url"
)

// Settings that name the file of a daemon's token.
const (
	agentToken = "server-token-file"
	hostToken  = "token-file"
)

// reporting is where a daemon of this machine reports to, and as whom.
type reporting struct {
	Server, TokenFile, ServerCA, Machine string
}

// check tells what is wrong with it; role is the token's, option the setting
// that names its file.
func (r reporting) check(role, option string) error {
	u, err := url.Parse(r.Server)
	switch {
	case r.Server == "":
		return nil
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return fmt.Errorf("cannot use server %q: want https://host:port", r.Server)
	case u.Scheme == "http" && !loopbackName(u.Hostname()):
		return fmt.Errorf("cannot use server %q without TLS: the token could be read in transit; use https", r.Server)
	case r.TokenFile == "":
		return fmt.Errorf("cannot report to %s without %s; create a token with: lull token create NAME --role %s --machine NAME", r.Server, option, role)
	}
	return nil
}
