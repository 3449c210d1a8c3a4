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
)

var update = flag.Bool("update", false, "write docs/reference/agent-faults.md")

// elsewhere are the rows covered by other tests: what happens, what the agent
// does, and the file and name of the test.
var elsewhere = [][4]string{
	{"any signal is active", "stays; after it ends, stops once the timeout has passed", ".", "TestUseHolds"},
	{"any signal cannot be read, or does not answer", "stays; alarm `unknown_SIGNAL` after 15 min", ".", "TestUnknownHolds"},
	{"hibernated and resumed by the cloud", "same boot id: memory was kept, action `hibernated`, idle clock anew, snooze", ".", "TestResumeFromHibernation"},
	{"the clock steps by 20 s to five years, either way", "durations survive; a lease has as long to go as before", ".", "TestClockSteps"},
	{"killed or rebooted in any phase of an action", "the next agent says what became of it, and the idle clock starts again", ".", "TestRestart"},
	{"its state on disk is damaged", "halted, with an alarm: a halt may have been in it", ".", "TestUnreadableStateMeansHalt"},
	{"halted", "stays, after a restart too", ".", "TestHaltSurvivesARestart"},
	{"ttl-deadline passes on a machine in use", "warned, then stopped or terminated; the record says what was in use", ".", "TestTTLEndsAMachineInUse"},
	{"ttl-deadline is moved, or the agent halted", "stays", ".", "TestTTLMovedAndHalted"},
	{"work is completed, by command or file", "warned, then as `on-complete` says", ".", "TestCompletion"},
	{"hook hangs with a grandchild that holds its output, ignores its end, leaves its group, floods its output", "ended at its deadline; the last 4 KiB are kept", ".", "TestHooks"},
	{"hook hangs and somebody asks", "every question is answered at once", ".", "TestHookThatHangsHoldsNothingUp"},
	{"metadata hangs or answers 401, 403, 503", "DescribeTags is asked instead", ".", "TestAgainstSimulatedCloud"},
	{"metadata fails and DescribeTags is throttled", "nothing cached: only watches, alarm `config_unreadable`", ".", "TestAgainstSimulatedCloud"},
	{"DescribeTags is throttled for a while", "tried again until it answers", ".", "TestAgainstSimulatedCloud"},
	{"StopInstances is denied, throttled, or stop protection is on", "stays, alarm `action_failed`; throttled: tried again", ".", "TestAgainstSimulatedCloud"},
	{"the same as a program, started and restarted during the fault", "the cached policy holds, alarm `config_stale`", "../../test/e2e/agent", "TestTagsUnreadable"},
	{"the server is lost", "does not act on idleness; a TTL and a completion go on", "servertest", "TestLostServer"},
	{"a file is another's, writable by others, in an open folder, a link or of an earlier boot", "not obeyed, alarm", ".", "TestFilesAreDistrusted"},
}

// faultsPage returns the table of faults and the agent's reactions.
func faultsPage() string {
	var b strings.Builder
	b.WriteString("# What can go wrong for the agent\n\nGenerated from the tests: every row is one. An idle machine has a timeout of 30 minutes; " +
		"while any of this goes on, the agent's loop answers at once (each row of `TestFaults` asks it every seven seconds). " +
		"The calls are what reaches EC2; real EC2 was not used.\n\n| what happens | calls | and | alarm | test |\n|---|---|---|---|---|\n")
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

// TestFaultsPage checks that the published table matches the tests.
func TestFaultsPage(t *testing.T) {
	const path = "../../docs/reference/agent-faults.md"
	if *update {
		must(t, os.WriteFile(path, []byte(faultsPage()), 0o644))
	}
	b, err := os.ReadFile(path)
	must(t, err)
	if d := cmp.Diff(string(b), faultsPage()); d != "" {
		t.Errorf("%s is stale, run go test ./internal/agent -run TestFaultsPage -update:\n%s", path, d)
	}
	for _, r := range elsewhere {
		files, err := filepath.Glob(filepath.Join(r[2], "*_test.go"))
		must(t, err)
		if !slices.ContainsFunc(files, func(f string) bool {
			src, err := os.ReadFile(f)
			return err == nil && strings.Contains(string(src), "\nfunc "+r[3]+"(")
		}) {
			t.Errorf("there is no test %s in %s", r[3], r[2])
		}
	}
}
