//go:build linux && !portable

package agentcmd

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lull/internal/agent"
	"lull/internal/cli/client"
	"lull/internal/cli/options"
	"lull/internal/cli/reporting"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/tags"
)

// Settings are the settings of the process lull agent run. The rules by which it
// decides are the policy, in tags and the local file.
type Settings struct {
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

// Options of the process. They come from flags and the environment, which systemd
// reads from /etc/default/lull-agent. The process has no config file.
var option = options.New[Settings]

var agentOptions = []options.Option[Settings]{
	option("config", "LULL_AGENT_CONFIG", "path", "local policy file; the file and its parent directories must be writable only by root", func(c *Settings) any { return &c.Config }),
	option("state", "LULL_AGENT_STATE", "path", "directory of the state, the cached policy and the history; used by one agent at a time", func(c *Settings) any { return &c.State }),
	option("socket", "LULL_AGENT_SOCKET", "path", "control socket, for root and the group lull; the warning file is in the same directory", func(c *Settings) any { return &c.Socket }),
	option("prefix", "LULL_AGENT_PREFIX", "text", "tag prefix; prism: reads and writes Prism's tags", func(c *Settings) any { return &c.Prefix }),
	option("cloud", "LULL_AGENT_CLOUD", "auto, ec2, none", "where the machine runs; auto detects EC2 from the firmware and the metadata service", func(c *Settings) any { return &c.Cloud }),
	option("region", "AWS_REGION", "text", "EC2 region (default: from the metadata service)", func(c *Settings) any { return &c.Region }),
	option("ec2-endpoint", "AWS_ENDPOINT_URL_EC2", "URL", "EC2 endpoint (default: AWS)", func(c *Settings) any { return &c.EC2Endpoint }),
	option("imds-endpoint", "AWS_EC2_METADATA_SERVICE_ENDPOINT", "URL", "endpoint of the metadata service (default: its usual address)", func(c *Settings) any { return &c.IMDSEndpoint }),
	option("power-off", "LULL_AGENT_POWER_OFF", "command", "command that powers the machine off outside a cloud; run by sh", func(c *Settings) any { return &c.PowerOff }),
	option("hibernate", "LULL_AGENT_HIBERNATE", "command", "command that hibernates the machine outside a cloud; run by sh", func(c *Settings) any { return &c.Hibernate }),
	option("shortest-window", "LULL_AGENT_SHORTEST_WINDOW", "duration", "shortest window over which rates of cpu, network and disk are judged", func(c *Settings) any { return &c.ShortestReach }),
	option("server", "LULL_AGENT_SERVER", "URL", "server to report to, https unless it is on this machine; empty disables reporting", func(c *Settings) any { return &c.Server }),
	option("server-token-file", "LULL_AGENT_TOKEN_FILE", "path", "file with this machine's agent token, not readable by others", func(c *Settings) any { return &c.TokenFile }),
	option("server-ca", "LULL_AGENT_SERVER_CA", "path", "CA certificates in PEM for the server's certificate (default: the system's)", func(c *Settings) any { return &c.ServerCA }),
	option("machine", "LULL_AGENT_MACHINE", "text", "machine name in the token (default: the instance ID or, outside a cloud, the host name)", func(c *Settings) any { return &c.Machine }),
}

const (
	cloudAuto = "auto"
	cloudEC2  = "ec2"
	cloudNone = "none"
)

func defaultAgentConfig() Settings {
	return Settings{Config: "/etc/lull/agent.yaml", State: "/var/lib/lull/agent", Socket: agentctl.DefaultSocket,
		Prefix: tags.DefaultPrefix, Cloud: cloudAuto, PowerOff: "systemctl poweroff", Hibernate: "systemctl hibernate",
		ShortestReach: 10 * time.Second}
}

// resolveAgent reads the settings from all sources. The error joins every fault, each
// with its variable or flag.
func resolveAgent(getenv func(string) string, flags *pflag.FlagSet) (Settings, []options.Setting, error) {
	cfg := defaultAgentConfig()
	out, err := options.Read(&cfg, agentOptions, options.File{}, getenv, flags)
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

// bindAgentFlags defines the flags. resolveAgent reads their values.
func bindAgentFlags(f *pflag.FlagSet) {
	options.Bind(f, defaultAgentConfig(), agentOptions)
}

// Config returns the verb that shows the settings of an agent. use is the verb's
// name.
func Config(s *client.Session, use string) *cobra.Command {
	cmd := options.Command(&s.Term, use, "Show the settings of lull agent run", func(flags *pflag.FlagSet) ([]options.Setting, error) {
		_, l, err := resolveAgent(s.Getenv, flags)
		return l, err
	})
	bindAgentFlags(cmd.Flags())
	return cmd
}

// SettingsPage returns the generated reference of the agent's settings: those of the
// process, and those of the policy as tags and as lines of the local file.
func SettingsPage() string {
	var b strings.Builder
	b.WriteString("# Settings of lull agent\n\nGenerated from cmd/agentcmd/config.go and internal/protocol/tags.\n\n" +
		"## The process\n\nPrecedence: flag, environment, default. The systemd unit reads the environment from `/etc/default/lull-agent`.\n\n")
	options.Rows(&b, defaultAgentConfig(), agentOptions)
	b.WriteString("\n## The policy\n\nPrecedence: local file, tags (prefix `lull:` unless set), default. A tag that cannot be read keeps its last good value.\nThe local file also takes `allow-tag-hooks` (run hooks that tags name; default false) and `replace-tags` (ignore tags; default false).\n\n| setting | value | default | meaning |\n|---|---|---|---|\n")
	base := agent.Defaults()
	for _, f := range tags.Fields() {
		v, _ := base.Get(f.Name)
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.Name, strings.ReplaceAll(f.Form, "|", "\\|"), v, f.Doc)
	}
	return b.String()
}
