package agent

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"lull/internal/lib/errtest"
)

var update = flag.Bool("update", false, "write docs/reference/agent-faults.md")

// elsewhere lists the faults that other tests cover: what happens, what the agent
// does, and the file and name of the test.
var elsewhere = [][4]string{
	{"any signal is active", "keeps running; stops once the timeout has passed after the activity ends", ".", "TestUseHolds"},
	{"any signal cannot be read, or does not answer", "keeps running; alarm `unknown_SIGNAL` after 15 min", ".", "TestUnknownHolds"},
	{"hibernated and resumed by the cloud", "the boot ID is unchanged, so memory was kept: action `hibernated`, idle time starts over, snooze", ".", "TestResumeFromHibernation"},
	{"the clock steps by 20 s to five years, either way", "durations survive; a lease keeps its remaining time", ".", "TestClockSteps"},
	{"killed or rebooted in any phase of an action", "the next agent records the outcome, and idle time starts over", ".", "TestRestart"},
	{"its state on disk is damaged", "halts, with an alarm: the state may have contained a halt", ".", "TestUnreadableStateMeansHalt"},
	{"halted", "keeps running, after a restart too", ".", "TestHaltSurvivesARestart"},
	{"ttl-deadline passes on a machine in use", "warned, then stopped or terminated; the record says what was in use", ".", "TestTTLEndsAMachineInUse"},
	{"ttl-deadline is moved, or the agent halted", "keeps running", ".", "TestTTLMovedAndHalted"},
	{"work is completed, by command or file", "warned, then does what `on-complete` says", ".", "TestCompletion"},
	{"hook hangs with a grandchild that holds its output, ignores SIGTERM, leaves its group or floods its output", "killed at its deadline; the last 4 KiB of output are kept", ".", "TestHooks"},
	{"hook hangs while the control socket is queried", "every request is answered at once", ".", "TestHookThatHangsHoldsNothingUp"},
	{"metadata hangs or answers 401, 403, 503", "falls back to DescribeTags", ".", "TestAgainstSimulatedCloud"},
	{"metadata fails and DescribeTags is throttled", "nothing is cached: only monitors, alarm `config_unreadable`", ".", "TestAgainstSimulatedCloud"},
	{"DescribeTags is throttled for a while", "retried until it answers", ".", "TestAgainstSimulatedCloud"},
	{"StopInstances is denied, throttled, or stop protection is on", "keeps running, alarm `action_failed`; a throttled call is retried", ".", "TestAgainstSimulatedCloud"},
	{"the same with the real program, started and restarted during the fault", "the cached policy applies, alarm `config_stale`", "../../test/e2e/agent", "TestTagsUnreadable"},
	{"the server is lost", "does not act on idleness; a TTL and a completion still take effect", "servertest", "TestLostServer"},
	{"a file belongs to another user, is writable by others, lies in a folder that others can write to, is a link, or is from an earlier boot", "ignored, with an alarm", ".", "TestFilesAreDistrusted"},
}

// faultsPage returns the table of faults and the agent's reactions.
func faultsPage() string {
	var b strings.Builder
	b.WriteString("# Faults and how the agent reacts\n\nThis page is generated from the tests: every row is a test. The machine is idle and its timeout is 30 minutes. " +
		"During every fault the agent's loop keeps answering at once; each row of `TestFaults` queries it every seven seconds. " +
		"The calls are those that reach simulated EC2; real EC2 was not used.\n\n| what happens | calls | outcome | alarm | test |\n|---|---|---|---|---|\n")
	for _, f := range faults() {
		calls := strings.Join(f.calls, ", ")
		if calls == "" {
			calls = "none"
		}
		alarm := ""
		if f.alarm != "" {
			alarm = "`" + f.alarm + "`"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | `TestFaults/%s` |\n", f.name, calls, f.then, alarm, strings.ReplaceAll(f.name, " ", "_"))
	}
	b.WriteString("\n| what happens | what the agent does | test |\n|---|---|---|\n")
	for _, r := range elsewhere {
		fmt.Fprintf(&b, "| %s | %s | `%s` in %s |\n", r[0], r[1], r[3], filepath.Join("internal/agent", r[2]))
	}
	return b.String()
}

// TestFaultsPage checks that the published table is the one generated from the tests.
func TestFaultsPage(t *testing.T) {
	const path = "../../docs/reference/agent-faults.md"
	if *update {
		errtest.None(t, os.WriteFile(path, []byte(faultsPage()), 0o644))
	}
	b, err := os.ReadFile(path)
	errtest.None(t, err)
	if d := cmp.Diff(string(b), faultsPage()); d != "" {
		t.Errorf("%s is stale, run go test ./internal/agent -run TestFaultsPage -update:\n%s", path, d)
	}
	for _, r := range elsewhere {
		files, err := filepath.Glob(filepath.Join(r[2], "*_test.go"))
		errtest.None(t, err)
		if !slices.ContainsFunc(files, func(f string) bool {
			src, err := os.ReadFile(f)
			return err == nil && strings.Contains(string(src), "\nfunc "+r[3]+"(")
		}) {
			t.Errorf("there is no test %s in %s", r[3], r[2])
		}
	}
}
