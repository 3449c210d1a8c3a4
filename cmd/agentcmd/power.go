//go:build linux && !portable

package agentcmd

import (
	"context"
	"fmt"
	"os/exec"
	"syscall"
	"time"

	"lull/internal/agent"
	"lull/internal/protocol/tags"
)

// localPower powers off or hibernates a machine without a cloud, with commands that
// the operator configures.
type localPower struct{ off, hibernate string }

var _ agent.Power = localPower{}

// PowerOff implements agent.Power.
func (p localPower) PowerOff(ctx context.Context) error { return shell(ctx, "power off", p.off) }

// Hibernate implements agent.Power. The command returns after the machine has been
// resumed, or at once if it cannot hibernate.
func (p localPower) Hibernate(ctx context.Context) error { return shell(ctx, "hibernate", p.hibernate) }

func shell(ctx context.Context, what, command string) error {
	if command == "" {
		return fmt.Errorf("cannot %s: no command is configured", what)
	}
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", command)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second // for children that keep the output open
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cannot %s by %s: %w: %.300s", what, tags.Program(command), err, out)
	}
	return nil
}
