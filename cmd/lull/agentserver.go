//go:build linux

package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"

	"lull/internal/daemon/agent"
	"lull/internal/link/control"
)

// addServer adds the server that the agent reports to, if there is one.
func addServer(cfg agentConfig, m *agent.Meter, o *agent.Options) error {
	if cfg.Server == "" {
		return nil
	}
	t := m.Transport(http.ProxyFromEnvironment)
	if cfg.ServerCA != "" {
		pem, err := os.ReadFile(cfg.ServerCA)
		if err != nil {
			return fmt.Errorf("cannot read server-ca: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return fmt.Errorf("cannot use server-ca %s: it holds no certificate", cfg.ServerCA)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	r := reporter{cfg: cfg, http: &http.Client{Transport: t}}
	r.cloud, _ = o.Cloud.(*ec2Edge)
	if _, err := r.token(); err != nil {
		return err
	}
	o.Reporter = r
	return nil
}

// reporter reports over HTTP. The token is read for every report, so that a
// new one is used at once.
type reporter struct {
	cfg   agentConfig
	http  *http.Client
	cloud *ec2Edge // nil in no cloud
}

var _ agent.Reporter = reporter{}

// token reads the token's file, which nobody else may read.
func (r reporter) token() (string, error) {
	st, err := os.Stat(r.cfg.TokenFile)
	if err != nil {
		return "", fmt.Errorf("cannot read server-token-file: %w", err)
	}
	if !st.Mode().IsRegular() || st.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("cannot use server-token-file %s: others may read or write it; want a plain file of mode 0600", r.cfg.TokenFile)
	}
	b, err := agent.ReadTrusted(r.cfg.TokenFile, 1024)
	if err != nil {
		return "", fmt.Errorf("cannot read server-token-file: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// Report implements agent.Reporter.
func (r reporter) Report(ctx context.Context, report control.AgentReport) (a control.AgentAnswer, err error) {
	token, err := r.token()
	if err != nil {
		return a, err
	}
	machine := cmp.Or(r.cfg.Machine, hostName())
	if r.cloud != nil {
		i, err := r.cloud.identity(ctx)
		if err != nil {
			return a, fmt.Errorf("cannot tell which instance this is: %w", err)
		}
		report.InstanceID, report.Region = i.InstanceID, i.Region
		machine = cmp.Or(r.cfg.Machine, i.InstanceID)
	}
	cl, err := control.NewClient(r.cfg.Server, token, r.http)
	if err != nil {
		return a, err
	}
	return cl.Report(ctx, machine, report)
}

// checkServer tells what is wrong with the settings of reporting.
func (cfg agentConfig) checkServer() error {
	u, err := url.Parse(cfg.Server)
	switch {
	case cfg.Server == "":
		return nil
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		return fmt.Errorf("cannot use server %q: want https://host:port", cfg.Server)
	case u.Scheme == "http" && !loopbackName(u.Hostname()):
		return fmt.Errorf("cannot use server %q without TLS: everybody on the way could read the token; want https", cfg.Server)
	case cfg.TokenFile == "":
		return fmt.Errorf("cannot report to %s without server-token-file; make a token with: lull token create NAME --role agent --machine NAME", cfg.Server)
	}
	return nil
}
