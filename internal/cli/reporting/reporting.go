// Package reporting determines how the agent and the host of this machine reach the
// server that they report to: the server's address and CA, and the token.
package reporting

import (
	"fmt"
	"net"
	"net/url"
)

// Settings that name the file of a daemon's token.
const (
	AgentOption = "server-token-file"
	HostOption  = "token-file"
)

// Target is the server that a daemon of this machine reports to, and the credentials
// that it uses.
type Target struct {
	Server, TokenFile, ServerCA, Machine string
}

// Check validates r. role is the role of the token, and option the setting that names
// the token's file.
func (r Target) Check(role, option string) error {
	u, err := url.Parse(r.Server)
	switch {
	case r.Server == "":
		return nil
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return fmt.Errorf("cannot use server %q: want https://host:port", r.Server)
	case u.Scheme == "http" && !Loopback(u.Hostname()):
		return fmt.Errorf("cannot use server %q without TLS: the token could be read in transit; use https", r.Server)
	case r.TokenFile == "":
		return fmt.Errorf("cannot report to %s without %s; create a token with: lull token create NAME --role %s --machine NAME", r.Server, option, role)
	}
	return nil
}

// Loopback reports whether host is localhost or a loopback address.
func Loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
