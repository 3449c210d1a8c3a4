package foreign

import (
	"bytes"
	"errors"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/ec2"
	"github.com/aws/aws-sdk-go-v2/service/ec2/types"

	"lull/internal/core/idle"
	"lull/internal/core/power"
	"lull/internal/fleet"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/control"
)

const (
	home = "us-east-1"
	away = "eu-north-1"
)

// output collects the output of a process.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

var serving = regexp.MustCompile(`serving on (http://\S+)`)

// start runs a program until the test ends and returns the URL that it prints.
func start(t *testing.T, env []string, program string, args ...string) string {
	t.Helper()
	said := &output{}
	cmd := exec.Command(program, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), env...), said, said
	errtest.None(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("%s said:\n%s", filepath.Base(program), said)
		}
	})
	waittest.Until(t, program, func() bool { return serving.MatchString(said.String()) })
	return serving.FindStringSubmatch(said.String())[1]
}

// cloud is a running emulator.
type cloud struct {
	t   *testing.T
	url string
}

func (c *cloud) config(region string) aws.Config {
	return aws.Config{Region: region, BaseEndpoint: &c.url, Credentials: credentials.NewStaticCredentialsProvider("test", "test", "")}
}

func (c *cloud) ec2(region string) *ec2.Client { return ec2.NewFromConfig(c.config(region)) }

func (c *cloud) run(region string, n int32) (ids []string) {
	c.t.Helper()
	out, err := c.ec2(region).RunInstances(c.t.Context(), &ec2.RunInstancesInput{ImageId: aws.String("ami-0123456789abcdef0"), InstanceType: "t3.small", MinCount: &n, MaxCount: &n})
	if err != nil {
		c.t.Fatal(err)
	}
	for _, i := range out.Instances {
		ids = append(ids, *i.InstanceId)
	}
	return ids
}

func (c *cloud) state(id string) types.InstanceStateName {
	out, err := c.ec2(home).DescribeInstances(c.t.Context(), &ec2.DescribeInstancesInput{InstanceIds: []string{id}})
	if err != nil {
		c.t.Fatal(err)
	}
	return out.Reservations[0].Instances[0].State.Name
}

// code returns the error code of an API error.
func code(err error) string {
	var p interface{ Code() string }
	if errors.As(err, &p) {
		return p.Code()
	}
	return ""
}

// TestForeignCloud checks import, power, tags and idleness with an EC2 that has
// only about a third of the calls that lull makes. Missing data must be unknown,
// and must not lead to a stop unless a user has accepted that risk.
func TestForeignCloud(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	emulator := filepath.Join(dir, "foreign")
	build := exec.Command("go", "build", "-o", emulator, ".")
	build.Dir = filepath.Join("testdata", "emulator")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	c := &cloud{t, start(t, nil, emulator, home, away)}
	machines, far := c.run(home, 3), c.run(away, 1)[0]
	plain, risky, moved := machines[0], machines[1], machines[2]

	token := filepath.Join(dir, "token")
	address := start(t, []string{"AWS_ENDPOINT_URL=" + c.url, "AWS_ACCESS_KEY_ID=test", "AWS_SECRET_ACCESS_KEY=test",
		"WORKER_IDLE_TIMEOUT_MINUTES=1", "WORKER_AUTO_PAUSE_SNOOZE_MINUTES=0", "WORKER_WARN_BEFORE_MINUTES=0", "RECONCILE_INTERVAL=5",
		"IDLE_DETECTION_INTERVAL=10", "DISCOVERY_IMPORT=off", "DISCOVERY_REGIONS=" + home + "," + away},
		programtest.Build(t, "lull/cmd/lull"), "server", "--listen", "127.0.0.1:0", "--data", filepath.Join(dir, "data"), "--admin-token-file", token)
	secret, err := os.ReadFile(token)
	errtest.None(t, err)
	asks, err := control.NewClient(address, strings.TrimSpace(string(secret)), nil)
	errtest.None(t, err)
	ctx := t.Context()
	waittest.Until(t, "the API", func() bool {
		_, err := asks.Workers(ctx, url.Values{})
		return err == nil
	})

	// Import looks up the instance.
	take := func(in fleet.ImportedWorker) (worker.Worker, error) {
		return control.Write[worker.Worker](ctx, asks, "POST", "/workers/import", in)
	}
	for _, in := range []fleet.ImportedWorker{{AWSRegion: home, EC2InstanceID: "i-0123456789abcdef0"}, {EC2InstanceID: "i-0123456789abcdef0"}, {AWSRegion: home, EC2InstanceID: far}} {
		if w, err := take(in); code(err) != "not_found" {
			t.Errorf("%+v: %q, %v", in, w.ID, err)
		} else if in.EC2InstanceID == far && !strings.Contains(err.Error(), away) {
			t.Errorf("the region of %s is not named: %v", far, err)
		}
	}
	ids := map[string]string{}
	for _, m := range machines {
		in := fleet.ImportedWorker{AWSRegion: home, EC2InstanceID: m}
		in.ActivitySources = []string{worker.SourceCloudWatch}
		if m != risky {
			in.AcceptedRisks = []string{worker.RiskInstanceStore, worker.RiskNoElasticIP, worker.RiskStopProtected}
		}
		w, err := take(in)
		errtest.None(t, err)
		ids[m] = w.ID
		if _, _, err := asks.Do(ctx, w.ID, "arm", nil); err != nil {
			t.Fatal(err)
		}
	}
	record := func(m string) worker.Worker {
		w, err := control.Read[worker.Worker](ctx, asks, "/workers/"+ids[m])
		errtest.None(t, err)
		return w
	}
	becomes := func(m string, s power.Worker) {
		t.Helper()
		waittest.Until(t, m+" "+string(s), func() bool { return record(m).Status == s })
	}
	command := func(m, verb string, body any) error {
		_, _, err := asks.Do(ctx, ids[m], verb, body)
		return err
	}
	for _, m := range machines {
		becomes(m, power.WorkerRunning)
	}
	// Power on request, and a stop from outside, which lull must respect.
	errtest.None(t, command(moved, "stop", nil))
	becomes(moved, power.WorkerStopped)
	if s := c.state(moved); s != types.InstanceStateNameStopped {
		t.Errorf("STOPPED, and EC2 says %s", s)
	}
	errtest.None(t, command(moved, "start", nil))
	becomes(moved, power.WorkerRunning)
	errtest.Get(c.ec2(home).StopInstances(ctx, &ec2.StopInstancesInput{InstanceIds: []string{moved}}))(t)
	becomes(moved, power.WorkerStopped)
	if w := record(moved); w.DesiredStatus != power.WorkerStopped || w.ExternalPauseCount == 0 {
		t.Errorf("stopped from outside: desired %s, %d external pauses", w.DesiredStatus, w.ExternalPauseCount)
	}
	tags, err := c.ec2(home).DescribeTags(ctx, &ec2.DescribeTagsInput{Filters: []types.Filter{{Name: aws.String("resource-id"), Values: []string{moved}}}})
	if err != nil {
		t.Fatal(err)
	}
	owned := false
	for _, tag := range tags.Tags {
		owned = owned || aws.ToString(tag.ResourceId) == moved && strings.HasSuffix(aws.ToString(tag.Key), "managed-by")
	}
	if !owned {
		t.Errorf("the tags of a machine that lull stopped: %v", tags.Tags)
	}

	// A termination needs its confirmation.
	if err := command(moved, "terminate", nil); err == nil {
		t.Error("terminated without a confirmation")
	}
	errtest.None(t, command(moved, "terminate", control.Confirmation{Confirm: record(moved).Name}))
	becomes(moved, power.WorkerTerminated)
	if s := c.state(moved); s != types.InstanceStateNameTerminated {
		t.Errorf("TERMINATED, and EC2 says %s", s)
	}

	// The emulator ignores the times of metrics, so CloudWatch has none for any
	// machine. The machines' risks are unknown and not accepted. No worker may be
	// stopped when the timeout of a minute has passed.
	if waittest.Within(90*time.Second, func() bool {
		return c.state(plain) != types.InstanceStateNameRunning || c.state(risky) != types.InstanceStateNameRunning
	}) {
		t.Error("a machine of which nothing is known was stopped")
	}
	for _, m := range []string{plain, risky} {
		why, err := control.Read[worker.IdleStatus](ctx, asks, "/workers/"+ids[m]+"/idle-status")
		if err != nil || !why.Has(idle.SignalUnknown) || why.Eligible {
			t.Errorf("%s: %+v, %v", m, why.Blocks, err)
		}
	}
}
