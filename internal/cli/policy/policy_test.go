package policy

import (
	"strings"
	"testing"
	"time"

	"lull/internal/cli/client"
	"lull/internal/cli/explain"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/protocol/control"
)

// TestWarningsThatCount checks that the effective warning time is shown if it is
// shorter than the configured one: next to the timeout and next to a schedule's
// grace.
func TestWarningsThatCount(t *testing.T) {
	for asked, want := range map[time.Duration]string{
		3 * time.Minute:                "3m, of which 2m30s counts: at most half of the timeout",
		150 * time.Second:              "2m30s",
		2 * time.Minute:                "2m",
		0:                              "0s",
		5*time.Minute + 30*time.Second: "5m30s, of which 2m30s counts: at most half of the timeout",
	} {
		if got := explain.WarningText(asked, 5*time.Minute, "timeout"); got != want {
			t.Errorf("%s before a pause after 5m: %q, want %q", asked, got, want)
		}
	}
	p := control.WorkerPolicy{Resolved: policy.Resolved{Timeout: idle.Duration(time.Hour), WarnBefore: idle.Duration(5 * time.Minute), ScheduleState: &policy.ScheduleState{Schedule: "office", Grace: 6}}}
	var out strings.Builder
	resolvedText(&out, p)
	if want := "Warning before in closed hours: 5m, of which 3m counts: at most half of the grace."; !strings.Contains(out.String(), want) {
		t.Errorf("without %q:\n%s", want, out.String())
	}
	p.ScheduleState.Grace = 15
	out.Reset()
	resolvedText(&out, p)
	if strings.Contains(out.String(), "which") {
		t.Errorf("all of the warning counts:\n%s", out.String())
	}
}

// TestVerbsThatSoundAlike checks that the error for an unknown verb suggests similar
// verbs of the same command.
func TestVerbsThatSoundAlike(t *testing.T) {
	cmd := verbs{&client.Session{}}.policyCommand()
	cmd.SetArgs([]string{"resolv"})
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), "resolve?") {
		t.Errorf("got %v", err)
	}
	cmd.SetArgs([]string{"qqqqqqqq"})
	if err := cmd.Execute(); err == nil || strings.HasSuffix(err.Error(), "?") {
		t.Errorf("of what is like nothing: %v", err)
	}
}

func TestResults(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{policyText(policy.Named{Name: "p"}), "Policy p pauses idle workers after the inherited timeout."},
		{policyText(policy.Named{Name: "p", Values: policy.Values{Enabled: new(false), Shadow: new(true)}}),
			"Policy p does not pause idle workers. It is in dry-run mode: it decides and records, and takes no action."},
		{policyText(policy.Named{Name: "p", Values: policy.Values{IdleTimeoutMinutes: new(20), WarnBeforeMinutes: new(5), PauseAction: new("hibernate"), Schedule: new("office")}}),
			"Policy p pauses idle workers (hibernate) after 20m, with a warning 5m before. It keeps the hours of schedule office."},
		{scheduleText(policy.Schedule{Name: "s", Zone: "UTC", Start: true, GraceMinutes: new(10)}),
			"Schedule s (UTC) pauses workers that are quiet for 10m outside its hours, and starts them when it opens. A warning comes at most 5m before a pause."},
	} {
		if c.got != c.want {
			t.Errorf("%s\nwant\n%s", c.got, c.want)
		}
	}
}
