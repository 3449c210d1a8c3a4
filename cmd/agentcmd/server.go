//go:build linux && !portable

package agentcmd

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strings"

	"lull/internal/agent"
	"lull/internal/cli/reporting"
	"lull/internal/protocol/control"
)

// addServer adds the server that the agent reports to to o, if one is configured.
func addServer(cfg Settings, m *agent.Meter, o *agent.Options) error {
	if cfg.Server == "" {
		return nil
	}
	hc, err := cfg.HTTPClient(m.Transport(http.ProxyFromEnvironment))
	if err != nil {
		return err
	}
	if o.Cloud == nil && strings.HasPrefix(cfg.Machine, "i-") {
		// An instance whose agent has no access to the cloud is still known to the
		// server by its ID and region.
		o.InstanceID, o.Region = cfg.Machine, cfg.Region
	}
	r := reporter{cfg: cfg, http: hc}
	r.cloud, _ = o.Cloud.(*ec2Edge)
	if _, err := cfg.ReadToken(reporting.AgentTokens); err != nil {
		return err
	}
	o.Reporter = r
	return nil
}

// reporter is an agent.Reporter over HTTP.
type reporter struct {
	cfg   Settings
	http  *http.Client
	cloud *ec2Edge // nil without a cloud
}

var (
	_ agent.Reporter     = reporter{}
	_ agent.HaltFollower = reporter{}
)

// Report implements agent.Reporter.
func (r reporter) Report(ctx context.Context, report control.AgentReport) (a control.AgentAnswer, err error) {
	cl, err := r.cfg.Dial(r.http, reporting.AgentTokens)
	if err != nil {
		return a, err
	}
	machine, id, region, err := r.identity(ctx)
	if err != nil {
		return a, err
	}
	if id != "" {
		report.InstanceID, report.Region = id, region
	}
	return cl.Report(ctx, machine, report)
}

// AwaitHalt implements agent.HaltFollower.
func (r reporter) AwaitHalt(ctx context.Context, t control.HaltTurn) (a control.HaltAnswer, err error) {
	cl, err := r.cfg.Dial(r.http, reporting.AgentTokens)
	if err != nil {
		return a, err
	}
	machine, _, _, err := r.identity(ctx)
	if err != nil {
		return a, err
	}
	return cl.AwaitAgentHalt(ctx, machine, t)
}

// identity returns the name under which this machine reports. In a cloud it also
// returns the instance's ID and region.
func (r reporter) identity(ctx context.Context) (machine, id, region string, err error) {
	if r.cloud == nil {
		return cmp.Or(r.cfg.Machine, hostName()), "", "", nil
	}
	i, err := r.cloud.identity(ctx)
	if err != nil {
		return "", "", "", fmt.Errorf("cannot determine which instance this is: %w", err)
	}
	return cmp.Or(r.cfg.Machine, i.InstanceID), i.InstanceID, i.Region, nil
}
