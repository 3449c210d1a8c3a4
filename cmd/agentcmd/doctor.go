//go:build linux && !portable

package agentcmd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lull/internal/agent"
	"lull/internal/cli/term"
	"lull/internal/platform/ec2"
	"lull/internal/platform/imds"
	"lull/internal/platform/proc"
	"lull/internal/protocol/agentctl"
	"lull/internal/protocol/tags"
)

func (c verbs) doctor() *cobra.Command {
	cmd := &cobra.Command{Use: "doctor", Short: "Check this machine for what the agent needs", Example: "  lull agent doctor", Args: term.Args(cobra.NoArgs),
		Long: `Check what the agent needs on this machine: its group, its policy, where it reads
logins, and the cloud's metadata, tags, permissions (tested with dry runs) and
hibernation. Exit code 1 means that something is missing.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := resolveAgent(c.Getenv, cmd.Flags())
			if err != nil {
				return term.Usage(err)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), time.Minute)
			defer cancel()
			d := &agentCheck{cfg: cfg}
			d.look(ctx)
			return c.ShowFindings(d.Findings)
		}}
	bindAgentFlags(cmd.Flags())
	return cmd
}

// agentCheck collects the findings about an agent with cfg on this machine.
type agentCheck struct {
	cfg Settings
	term.Findings
}

func (d *agentCheck) look(ctx context.Context) {
	d.Add("root", os.Geteuid() == 0, fmt.Sprintf("user id %d", os.Geteuid()), "the agent needs root to write to terminals, run hooks as others and power off")
	_, err := user.LookupGroup(agent.Group)
	d.Add("group "+agent.Group, err == nil, "its members and root may use the agent's control socket", "create it: groupadd --system "+agent.Group)
	d.running(ctx)
	d.policyFile()
	d.sources(ctx)
	d.cloud(ctx)
}

func (d *agentCheck) running(ctx context.Context) {
	s, err := agentctl.Dial(d.cfg.Socket).Status(ctx)
	if err != nil {
		d.Add("agent", false, err.Error(), "start it: systemctl enable --now lull-agent (or run this as root or a member of group lull)")
		return
	}
	d.Add("agent", true, "version "+s.Version+", since "+term.Time(s.StartedAt), "")
	for _, a := range s.Alarms {
		d.Add("alarm "+a.Code, false, a.Sentence, "see: lull agent why")
	}
	if h := s.Halted; h != nil {
		d.Add("halt", false, h.Sentence("automatic actions are"), "end it: lull agent halt --off")
	}
	if l := s.Server; l != nil && l.Halted {
		d.Add("fleet halt", false, l.Halt, "end it: lull halt --off --server URL")
	}
}

func (d *agentCheck) policyFile() {
	b, err := agent.Files{ConfigFile: d.cfg.Config}.Config()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		d.Add("policy file", true, "none at "+d.cfg.Config+": settings come from tags only", "")
		return
	case errors.Is(err, fs.ErrPermission):
		d.Add("policy file", false, err.Error(), "run this as root: the file is readable by root only, since it may contain a webhook's address")
		return
	case err != nil:
		d.Add("policy file", false, err.Error(), "make root the owner of it and its parent directories, not writable by others")
		return
	}
	l, faults, err := agent.ParseLocal(d.cfg.Config, b)
	if err != nil {
		d.Add("policy file", false, err.Error(), "fix it")
		return
	}
	for _, f := range faults {
		d.Add("policy file", false, f.Error(), "fix that line")
	}
	if len(faults) == 0 {
		d.Add("policy file", true, fmt.Sprintf("%s, %d settings", d.cfg.Config, len(l.Settings.Encode(""))), "")
	}
}

// sources checks the sources of the signals about users.
func (d *agentCheck) sources(ctx context.Context) {
	bus := &proc.Logind{}
	defer bus.Close()
	_, source, err := (&proc.LoginReader{Logins: bus}).Sessions(ctx)
	if err != nil {
		source = err.Error()
	}
	d.Add("sessions", err == nil, "read from "+source, "install libpam-systemd for systemd-logind, or give the agent access to utmp")
	_, err = os.ReadDir("/dev/pts")
	d.Add("terminals", err == nil, "/dev/pts", "mount devpts there")
}

func (d *agentCheck) cloud(ctx context.Context) {
	e, err := findCloud(ctx, d.cfg, &agent.Meter{}, "/")
	if e == nil {
		d.Add("cloud", true, "no cloud: idle machines are powered off by "+d.cfg.PowerOff, "")
		d.localHibernation(false)
		return
	}
	if err != nil {
		do := "let this network reach the metadata service; from a container the hop limit must be 2: aws ec2 modify-instance-metadata-options --http-put-response-hop-limit 2"
		if imds.KindOf(err) == imds.Disabled {
			do = "enable it: aws ec2 modify-instance-metadata-options --http-endpoint enabled"
		}
		d.Add("instance metadata", false, err.Error(), do)
		return
	}
	i, err := e.identity(ctx)
	if err != nil {
		d.Add("instance metadata", false, err.Error(), "see above")
		return
	}
	d.Add("instance metadata", true, i.InstanceID+" in "+i.Region, "")
	d.instanceTags(ctx, e)
	inst, err := e.instance(ctx)
	if err != nil {
		d.Add("AWS credentials", false, err.Error(), "attach an instance profile: lull agent iam --script")
		return
	}
	d.mayStop(ctx, inst)
	d.hibernation(ctx, inst)
}

// instanceTags reads the tags from the metadata service and with DescribeTags. One of
// them is enough.
func (d *agentCheck) instanceTags(ctx context.Context, e *ec2Edge) {
	direct, err1 := e.imds.Tags(ctx)
	if err1 == nil {
		d.Add("tags in metadata", true, fmt.Sprintf("%d tags", len(direct)), "")
	}
	described, err2 := describedTags{e}.Tags(ctx)
	if err2 == nil {
		d.Add("DescribeTags", true, fmt.Sprintf("%d tags", len(described)), "")
	}
	if err1 != nil && err2 != nil {
		d.Add("tags in metadata", false, err1.Error(), "enable them: aws ec2 modify-instance-metadata-options --instance-metadata-tags enabled")
		d.Add("DescribeTags", false, err2.Error(), "or allow ec2:DescribeTags: lull agent iam")
		return
	}
	t := direct
	if err1 != nil {
		t = described
	}
	s, faults := tags.Parse(d.cfg.Prefix, t)
	for _, f := range faults {
		d.Add("tag "+f.Tag, false, f.Error(), "fix the tag")
	}
	if len(faults) == 0 {
		d.Add("policy tags", true, fmt.Sprintf("%d settings under %s", len(s.Encode("")), d.cfg.Prefix), "")
	}
}

// mayStop asks EC2 with a dry run whether stopping this instance is permitted.
func (d *agentCheck) mayStop(ctx context.Context, i agent.EC2) {
	err := i.Client.DryRun(ctx, "StopInstances", i.ID)
	switch {
	case err == nil:
		d.Add("StopInstances", true, "EC2 would stop "+i.ID, "")
	case ec2.KindOf(err) == ec2.Unauthorized:
		d.Add("StopInstances", false, "this machine's role does not allow it", "lull agent iam --script creates one that does")
	default:
		d.Add("StopInstances", false, fmt.Sprint(err), "see the cause")
	}
}

func (d *agentCheck) hibernation(ctx context.Context, i agent.EC2) {
	s, err := i.Describe(ctx)
	switch {
	case err != nil:
		d.Add("hibernation", false, err.Error(), "allow ec2:DescribeInstances: lull agent iam")
	case !s.HibernationConfigured:
		d.Add("hibernation", true, "not configured at launch: idle instances are stopped instead", "")
		d.Hint("launch a new instance: aws ec2 run-instances --hibernation-options Configured=true, with an encrypted root volume")
	default:
		d.Add("hibernation", true, "configured at launch", "")
		d.localHibernation(true)
	}
}

// localHibernation checks the kernel's prerequisites for hibernation. A missing
// one is a fault only if hibernation is expected to work.
func (d *agentCheck) localHibernation(wanted bool) {
	note := func(what string, ok bool, found, do string) {
		d.Add(what, ok || !wanted, found, do)
		if !ok {
			d.Hint(do)
		}
	}
	state, err := os.ReadFile("/sys/power/state")
	note("kernel hibernation", err == nil && strings.Contains(string(state), "disk"), "/sys/power/state: "+strings.TrimSpace(string(state)), "boot a kernel with CONFIG_HIBERNATION")
	var ram, swap uint64
	if b, err := os.ReadFile("/proc/meminfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			fmt.Sscanf(line, "MemTotal: %d kB", &ram)
			fmt.Sscanf(line, "SwapTotal: %d kB", &swap)
		}
	}
	note("swap for hibernation", swap >= ram && ram > 0, fmt.Sprintf("%d MiB of swap for %d MiB of memory", swap>>10, ram>>10), "add swap at least as large as the memory; on EC2, ec2-hibinit-agent does this")
	line, _ := os.ReadFile("/proc/cmdline")
	resume, _ := os.ReadFile("/sys/power/resume")
	has := strings.Contains(string(line), "resume=") || len(resume) > 0 && strings.TrimSpace(string(resume)) != "0:0"
	note("resume device", has, "/sys/power/resume: "+strings.TrimSpace(string(resume)), "set resume= on the kernel command line; on EC2, ec2-hibinit-agent does this")
}
