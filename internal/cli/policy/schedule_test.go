package policy

import (
	"strings"
	"testing"

	"lull/internal/cli/client"
)

// TestLinesOfASchedule checks that an invalid number of boundaries to show is
// rejected before any request, and that the error names the flag.
func TestLinesOfASchedule(t *testing.T) {
	for _, n := range []string{"0", "260", "-1"} {
		cmd := verbs{&client.Session{}}.scheduleCommand()
		cmd.SetArgs([]string{"next", "office", "--lines=" + n})
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), "--lines "+n) {
			t.Errorf("--lines %s: %v", n, err)
		}
	}
}
