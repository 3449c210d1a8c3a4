package simtest

import (
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"lull/internal/sim/world"
)

// awscli returns the path of Debian's awscli, or skips the test.
func awscli(t *testing.T) string {
	t.Helper()
	for _, path := range []string{"/usr/bin/aws"} {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("Debian's awscli is missing (apt-get install awscli)")
	}
	t.Skip("SKIP: Debian's awscli is missing (apt-get install awscli)")
	return ""
}

func TestAWSCLI(t *testing.T) {
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	cli := awscli(t)
	c := plain(7)
	c.Workers[0].Up = world.Duration(5 * time.Hour)
	b := start(t, c)
	run := func(args ...string) (string, string) {
		cmd := exec.CommandContext(t.Context(), cli, append(args, "--endpoint-url", b.url, "--output", "json")...)
		cmd.Env = append(os.Environ(), "AWS_ACCESS_KEY_ID=AKIASIM", "AWS_SECRET_ACCESS_KEY=x", "AWS_DEFAULT_REGION="+region,
			"AWS_MAX_ATTEMPTS=1", "AWS_PAGER=", "HOME="+t.TempDir(), "AWS_EC2_METADATA_DISABLED=true")
		var out, errs strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Run(); err != nil && errs.Len() == 0 {
			t.Fatalf("cannot run %v: %v", args, err)
		}
		return out.String(), errs.String()
	}
	parse := func(v any, args ...string) {
		t.Helper()
		out, errs := run(args...)
		if err := json.Unmarshal([]byte(out), v); err != nil {
			t.Fatalf("%v: %v\n%s%s", args, err, out, errs)
		}
	}
	var all []string
	parse(&all, "ec2", "describe-instances", "--page-size", "5", "--query", "Reservations[].Instances[].InstanceId")
	if len(all) != 7 {
		t.Fatalf("describe-instances: %v", all)
	}
	var states []string
	parse(&states, "ec2", "describe-instance-status", "--include-all-instances", "--query", "InstanceStatuses[].InstanceState.Name")
	want(t, "states", strings.Join(states, " "), strings.TrimSpace(strings.Repeat("running ", 7)))
	var launched string
	parse(&launched, "ec2", "run-instances", "--image-id", "ami-00000000000000291", "--instance-type", "m5.large", "--client-token", "cli",
		"--tag-specifications", "ResourceType=instance,Tags=[{Key=Name,Value=by cli}]", "--query", "Instances[0].InstanceId")
	var name string
	parse(&name, "ec2", "describe-tags", "--filters", "Name=resource-id,Values="+launched, "--query", "Tags[0].Value")
	want(t, "name", name, "by cli")
	run("ec2", "create-tags", "--resources", all[0], "--tags", "Key=a,Value=b")
	var stopping string
	parse(&stopping, "ec2", "stop-instances", "--hibernate", "--instance-ids", all[0], "--query", "StoppingInstances[0].CurrentState.Name")
	want(t, "stop-instances", stopping, "stopping")
	b.World.Clock.Advance(3 * time.Minute)
	var down []string
	parse(&down, "ec2", "describe-instances", "--filters", "Name=instance-state-name,Values=stopped", "Name=tag:a,Values=b", "--query", "Reservations[].Instances[].StateReason.Code")
	want(t, "reason", strings.Join(down, " "), "Client.UserInitiatedHibernate")
	_, errs := run("ec2", "stop-instances", "--instance-ids", launched, "--dry-run")
	if !strings.Contains(errs, "DryRunOperation") {
		t.Errorf("dry run: %s", errs)
	}
	_, errs = run("ec2", "terminate-instances", "--instance-ids", "i-00000000000000001")
	if !strings.Contains(errs, "InvalidInstanceID.NotFound") {
		t.Errorf("unknown id: %s", errs)
	}
	b.metricsByCLI(t, parse, all[1])
}

// metricsByCLI reads an instance's CPU metric with both of CloudWatch's operations.
func (b *bench) metricsByCLI(t *testing.T, parse func(any, ...string), id string) {
	t.Helper()
	var values []float64
	now := time.Now().UTC()
	parse(&values, "cloudwatch", "get-metric-data", "--start-time", now.Add(-time.Hour).Format(time.RFC3339), "--end-time", now.Format(time.RFC3339),
		"--metric-data-queries", `[{"Id":"a","MetricStat":{"Metric":{"Namespace":"AWS/EC2","MetricName":"CPUUtilization","Dimensions":[{"Name":"InstanceId","Value":"`+id+`"}]},"Period":300,"Stat":"Average"}}]`,
		"--query", "MetricDataResults[0].Values")
	if len(values) < 11 {
		t.Errorf("get-metric-data: %v", values)
	}
	var points []float64
	parse(&points, "cloudwatch", "get-metric-statistics", "--namespace", "AWS/EC2", "--metric-name", "CPUUtilization", "--dimensions", "Name=InstanceId,Value="+id,
		"--period", "600", "--statistics", "Maximum", "--start-time", now.Add(-time.Hour).Format(time.RFC3339), "--end-time", now.Format(time.RFC3339), "--query", "Datapoints[].Maximum")
	if len(points) < 5 {
		t.Errorf("get-metric-statistics: %v", points)
	}
	var account string
	parse(&account, "sts", "get-caller-identity", "--query", "Account")
	want(t, "account", account, "111122223333")
	calls := b.World.Calls.All()
	if calls["monitoring GetMetricData"] != 1 || calls["ec2 DescribeInstances"] < 3 {
		t.Errorf("calls: %v", calls)
	}
}
