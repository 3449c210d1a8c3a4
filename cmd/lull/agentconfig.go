//go:build linux

package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/agent"
	"lull/internal/cli/reporting"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/tags"
)

// agentConfig is everything that can be set about the process lull agent run.
// What it decides by is the policy: tags and the local file.
type agentConfig struct {
	Config        string
	State         string
	Socket        string
	Prefix        string
	Cloud         string
	Region        string
	EC2Endpoint   string
	IMDSEndpoint  string
	PowerOff      string
	Hibernate     string
	ShortestReach time.Duration

	reporting.Target
}

// agentOptions come from flags and the environment, which systemd reads from
// /etc/default/lull-agent; there is no config file of the process.
var agentOptions = []option[agentConfig]{
	{"config", "LULL_AGENT_CONFIG", "path", "local policy file; only root may be able to write to it and its parent directories", func(c *agentConfig) any { return &c.Config }},
	{"state", "LULL_AGENT_STATE", "path", "directory of the state, the cached policy and the history; used by one agent at a time", func(c *agentConfig) any { return &c.State }},
	{"socket", "LULL_AGENT_SOCKET", "path", "control socket, for root and the group lull; the warning file is in the same directory", func(c *agentConfig) any { return &c.Socket }},
	{"prefix", "LULL_AGENT_PREFIX", "text", "tag prefix; prism: reads and writes Prism's tags", func(c *agentConfig) any { return &c.Prefix }},
	{"cloud", "LULL_AGENT_CLOUD", "auto, ec2, none", "where the machine runs; auto detects EC2 from the firmware and the metadata service", func(c *agentConfig) any { return &c.Cloud }},
	{"region", "AWS_REGION", "text", "EC2 region (default: from the metadata service)", func(c *agentConfig) any { return &c.Region }},
	{"ec2-endpoint", "AWS_ENDPOINT_URL_EC2", "URL", "EC2 endpoint (default: AWS)", func(c *agentConfig) any { return &c.EC2Endpoint }},
	{"imds-endpoint", "AWS_EC2_METADATA_SERVICE_ENDPOINT", "URL", "endpoint of the metadata service (default: its usual address)", func(c *agentConfig) any { return &c.IMDSEndpoint }},
	{"power-off", "LULL_AGENT_POWER_OFF", "command", "command that powers the machine off outside a cloud; run by sh", func(c *agentConfig) any { return &c.PowerOff }},
	{"hibernate", "LULL_AGENT_HIBERNATE", "command", "command that hibernates the machine outside a cloud; run by sh", func(c *agentConfig) any { return &c.Hibernate }},
	{"shortest-window", "LULL_AGENT_SHORTEST_WINDOW", "duration", "shortest window over which rates of cpu, network and disk are judged", func(c *agentConfig) any { return &c.ShortestReach }},
	{"server", "LULL_AGENT_SERVER", "URL", "server to report to, https unless it is on this machine; empty disables reporting", func(c *agentConfig) any { return &c.Server }},
	{"server-token-file", "LULL_AGENT_TOKEN_FILE", "path", "file with this machine's agent token, not readable by others", func(c *agentConfig) any { return &c.TokenFile }},
	{"server-ca", "LULL_AGENT_SERVER_CA", "path", "CA certificates in PEM for the server's certificate (default: the system's)", func(c *agentConfig) any { return &c.ServerCA }},
	{"machine", "LULL_AGENT_MACHINE", "text", "machine name in the token (default: the instance ID or, outside a cloud, the host name)", func(c *agentConfig) any { return &c.Machine }},
}

const (
	cloudAuto = "auto"
	cloudEC2  = "ec2"
	cloudNone = "none"
)

func defaultAgentConfig() agentConfig {
	return agentConfig{Config: "/etc/lull/agent.yaml", State: "/var/lib/lull/agent", Socket: agentctl.DefaultSocket,
		Prefix: tags.DefaultPrefix, Cloud: cloudAuto, PowerOff: "systemctl poweroff", Hibernate: "systemctl hibernate",
		ShortestReach: 10 * time.Second}
}

// resolveAgent reads every source. Every fault is reported, each naming the
// variable or flag.
func resolveAgent(getenv func(string) string, flags *pflag.FlagSet) (agentConfig, []setting, error) {
	cfg := defaultAgentConfig()
	out, err := readOptions(&cfg, agentOptions, configFile{}, getenv, flags)
	errs := []error{err}
	switch cfg.Cloud {
	case cloudAuto, cloudEC2, cloudNone:
	default:
		errs = append(errs, fmt.Errorf("cannot use cloud %q: want auto, ec2 or none", cfg.Cloud))
	}
	if err := cfg.Check("agent", reporting.AgentOption); err != nil {
		errs = append(errs, err)
	}
	if cfg.ShortestReach < 100*time.Millisecond || cfg.ShortestReach > time.Hour {
		errs = append(errs, fmt.Errorf("cannot use shortest-window %s: want between 100ms and 1h", cfg.ShortestReach))
	}
	for name, v := range map[string]string{"config": cfg.Config, "state": cfg.State, "socket": cfg.Socket} {
		if v == "" || v[0] != '/' {
			errs = append(errs, fmt.Errorf("cannot use %s %q: want an absolute path", name, v))
		}
	}
	if !strings.HasSuffix(cfg.Prefix, ":") || len(cfg.Prefix) > 64 || strings.HasPrefix(cfg.Prefix, "aws:") {
		errs = append(errs, fmt.Errorf("cannot use prefix %q: want a word that ends in a colon, other than aws:", cfg.Prefix))
	}
	return cfg, out, errors.Join(errs...)
}

// bindAgentFlags declares the flags; their values are read by resolveAgent.
func bindAgentFlags(f *pflag.FlagSet) {
	bindOptions(f, defaultAgentConfig(), agentOptions)
}

// configAgent is lull config agent.
func (c *cli) configAgent() *cobra.Command {
	cmd := c.configOf("agent", "Show the settings of lull agent run", func(flags *pflag.FlagSet) ([]setting, error) {
		_, l, err := resolveAgent(c.Getenv, flags)
		return l, err
	})
	bindAgentFlags(cmd.Flags())
	return cmd
}

// agentSettingsPage is the generated reference of the agent's settings: the
// process's own, and the policy's as tags and as lines of the local file.
func agentSettingsPage() string {
	var b strings.Builder
	b.WriteString("# Settings of lull agent\n\nGenerated from cmd/lull/agentconfig.go and internal/protocol/tags.\n\n" +
		"## The process\n\nPrecedence: flag, environment, default. The systemd unit reads the environment from `/etc/default/lull-agent`.\n\n")
	optionRows(&b, defaultAgentConfig(), agentOptions)
	b.WriteString("\n## The policy\n\nPrecedence: local file, tags (prefix `lull:` unless set), default. A tag that cannot be read keeps its last good value.\nThe local file also takes `allow-tag-hooks` (run hooks that tags name; default false) and `replace-tags` (ignore tags; default false).\n\n| setting | value | default | meaning |\n|---|---|---|---|\n")
	base := agent.Defaults()
	for _, f := range tags.Fields() {
		v, _ := base.Get(f.Name)
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.Name, strings.ReplaceAll(f.Form, "|", "\\|"), v, f.Doc)
	}
	return b.String()
}
