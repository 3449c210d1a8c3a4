package client

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"lull/internal/protocol/hostctl"
)

// HostClient returns a client of the host daemon.
func (c *Session) HostClient() (*hostctl.Client, error) {
	return hostctl.NewClient(c.hostAddress())
}

// hostAddress returns the address of the host.
func (c *Session) hostAddress() string {
	return cmp.Or(c.Host, c.Getenv("LULL_HOST"), DefaultSocket(c.Getenv))
}

// DefaultSocket returns where this user's host listens by default.
func DefaultSocket(getenv func(string) string) string {
	if os.Geteuid() == 0 {
		return "/run/lull/host.sock"
	}
	if dir := getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, "lull", "host.sock")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("lull-%d", os.Geteuid()), "host.sock")
}

// DefaultData returns the default data directory of this user's daemon; place is
// "host" or "server".
func DefaultData(getenv func(string) string, place string) string {
	if os.Geteuid() == 0 {
		return filepath.Join("/var/lib/lull", place)
	}
	if dir := getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "lull", place)
	}
	if home := getenv("HOME"); filepath.IsAbs(home) {
		return filepath.Join(home, ".local", "state", "lull", place)
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("lull-%d", os.Geteuid()), place)
}

// CompleteInstances completes arguments with the names of instances.
func (c *Session) CompleteInstances(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(a) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	cl, err := c.HostClient()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	l, err := cl.List(cmd.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	names := make([]string, 0, len(l))
	for _, o := range l {
		names = append(names, o.Name+"\t"+o.State)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
