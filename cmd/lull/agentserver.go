//go:build linux

package main

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strings"

	"lull/internal/daemon/agent"
	"lull/internal/link/control"
)

// addServer adds the server that the agent reports to, if there is one.
func addServer(cfg agentConfig, m *agent.Meter, o *agent.Options) error {
	if cfg.Server == "" {
		return nil
	}
	hc, err := cfg.client(m.Transport(http.ProxyFromEnvironment))
	if err != nil {
		return err
	}
	if o.Cloud == nil && strings.HasPrefix(cfg.Machine, "i-") {
		// An instance whose agent is kept from the cloud is still that instance:
		// the server finds its worker by id and region.
		o.InstanceID, o.Region = cfg.Machine, cfg.Region
	}
	r := reporter{cfg: cfg, http: hc}
	r.cloud, _ = o.Cloud.(*ec2Edge)
	if _, err := cfg.token(agentTokens); err != nil {
		return err
	}
	o.Reporter = r
	return nil
}

// reporter reports over HTTP.
type reporter struct {
	cfg   agentConfig
	http  *http.Client
	cloud *ec2Edge // nil in no cloud
}

var _ agent.Reporter = reporter{}

// Report implements agent.Reporter.
func (r reporter) Report(ctx context.Context, report control.AgentReport) (a control.AgentAnswer, err error) {
	cl, err := r.cfg.dial(r.http, agentTokens)
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
	return cl.Report(ctx, machine, report)
}
