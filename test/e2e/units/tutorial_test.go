package units

import (
	"os"
	"strconv"
	"testing"

	"lull/internal/lib/errtest"
	"lull/internal/lib/pagetest"
	"lull/internal/lib/waittest"
)

// TestTutorial runs the commands for units in the tutorial about adopting.
func TestTutorial(t *testing.T) {
	b, err := os.ReadFile("../../../docs/tutorial-adopt.md")
	errtest.None(t, err)
	all, err := pagetest.Steps(pagetest.Section(string(b), "A systemd unit"))
	errtest.None(t, err)
	m := boot(t)
	env := []string{"PATH=/usr/sbin:/usr/bin:/opt/lull", "LANG=C.UTF-8", "TZ=UTC"}
	for _, err := range pagetest.Follow(waittest.Context(t), all, t.TempDir(), env, "nsenter", "-t", strconv.Itoa(m.pid), "-a", "--") {
		t.Error(err)
	}
	m.nothingLeft()
}
