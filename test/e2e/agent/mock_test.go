package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"lull/internal/lib/errtest"
	"lull/internal/lib/freeport"
	"lull/internal/platform/imds"
	"lull/internal/protocol/agentctl"
)

// Amazon's own mock of the metadata service. It is built as a separate module, so
// that this one does not depend on it.
const (
	mockModule  = "github.com/aws/amazon-ec2-metadata-mock/cmd/ec2-metadata-mock@v1.13.0"
	mockID      = "i-1234567890abcdef0"
	mockKey     = "AKIAFROMTHEMOCK"
	mockTimeout = 5 * time.Minute
)

// amazonsMock builds the mock and returns its path.
func amazonsMock(t *testing.T) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), mockTimeout)
	defer cancel()
	dir := t.TempDir()
	c := exec.CommandContext(ctx, "go", "install", mockModule)
	c.Dir = dir
	c.Env = append(os.Environ(), "GOBIN="+dir, "GOFLAGS=-mod=mod", "CGO_ENABLED=0", "GOWORK=off")
	if out, err := c.CombinedOutput(); err != nil {
		t.Skipf("Amazon's metadata mock cannot be fetched or built: %v: %.400s", err, out)
	}
	return filepath.Join(dir, "ec2-metadata-mock")
}

// serveMock starts the mock on a port, with version 2 only, the given tags, and
// credentials that have not expired. It returns once the mock answers.
func serveMock(t *testing.T, binary string, port int, tags map[string]string) {
	t.Helper()
	home := t.TempDir()
	paths, values := map[string]string{}, map[string]any{
		"iam-security-credentials": map[string]string{"Code": "Success", "LastUpdated": "2020-04-02T18:50:40Z", "Type": "AWS-HMAC", "AccessKeyId": mockKey,
			"SecretAccessKey": "secret", "Token": "session", "Expiration": "2099-01-01T00:00:00Z"},
	}
	names := []string{"tags-instance-name", "tags-instance-test"} // the only two tags that the mock supports
	for k, v := range tags {
		paths[names[0]], values[names[0]] = "/latest/meta-data/tags/instance/"+k, v
		names = names[1:]
	}
	b, err := json.Marshal(map[string]any{"imdsv2": true, "metadata": map[string]any{"paths": paths, "values": values}})
	file := filepath.Join(home, "mock.json")
	if err == nil {
		err = os.WriteFile(file, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(binary, "--imdsv2", "--config-file", file, "--hostname", "127.0.0.1", "--port", strconv.Itoa(port))
	said := &log{}
	c.Env, c.Stdout, c.Stderr = []string{"HOME=" + home, "PATH=" + os.Getenv("PATH")}, said, said
	errtest.None(t, c.Start())
	t.Cleanup(func() {
		_ = c.Process.Kill() // may have ended already
		_ = c.Wait()
		if t.Failed() {
			t.Logf("the mock said:\n%s", said)
		}
	})
	for end := time.Now().Add(mockTimeout); ; pause() {
		r, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/latest/meta-data/", port))
		if err == nil {
			r.Body.Close()
			if r.StatusCode != http.StatusUnauthorized {
				t.Fatalf("without a token it answers %d, want 401", r.StatusCode)
			}
			return
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// TestAmazonsMock runs the metadata client and the agent against Amazon's own
// mock of the metadata service, with version 2 only. It checks identity, tags, an
// agent that starts before the service, and credentials from the endpoint that
// --imds-endpoint names. The mock also serves notices of Spot and Auto Scaling,
// which lull does not read.
func TestAmazonsMock(t *testing.T) {
	t.Parallel()
	binary := amazonsMock(t)
	port, err := freeport.Take()
	errtest.None(t, err)
	endpoint := fmt.Sprintf("http://127.0.0.1:%d", port)
	client := imds.New(imds.Options{Endpoint: endpoint})
	if _, err := client.Identity(t.Context()); imds.KindOf(err) != imds.Unreachable {
		t.Errorf("nothing listens: %v is not %s", err, imds.Unreachable)
	}

	// The EC2 endpoint records the access keys that sign the calls.
	var mu sync.Mutex
	signed := map[string]bool{}
	ec2 := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, rest, _ := strings.Cut(r.Header.Get("Authorization"), "Credential=")
		key, _, _ := strings.Cut(rest, "/")
		mu.Lock()
		signed[key] = true
		mu.Unlock()
		http.Error(w, "<Response><Errors><Error><Code>UnauthorizedOperation</Code></Error></Errors></Response>", http.StatusForbidden)
	}))
	t.Cleanup(ec2.Close)

	dir := t.TempDir()
	cmd := exec.Command(program, "agent", "run", "--imds-endpoint", endpoint, "--ec2-endpoint", ec2.URL, "--cloud", "ec2",
		"--socket", filepath.Join(dir, "agent.sock"), "--state", filepath.Join(dir, "state"), "--config", filepath.Join(dir, "agent.yaml"))
	said := &log{}
	// No environment variable names the endpoint, and only the instance has
	// credentials.
	cmd.Env, cmd.Stdout, cmd.Stderr = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir}, said, said
	errtest.None(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // may have ended already
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the agent said:\n%s", said)
		}
	})
	await := func(what string, ok func(agentctl.Status) bool) {
		t.Helper()
		var s agentctl.Status
		for end := time.Now().Add(5 * time.Minute); ; pause() {
			var err error
			if s, err = agentctl.Dial(filepath.Join(dir, "agent.sock")).Status(t.Context()); err == nil && ok(s) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("did not happen in five minutes: %s: %+v, %v", what, s, err)
			}
		}
	}
	await("the agent runs before the metadata service", func(s agentctl.Status) bool { return s.InstanceID == "" })

	serveMock(t, binary, port, map[string]string{"lull:idle-timeout": "45m", "Name": "tested"})
	id, err := client.Identity(t.Context())
	if err != nil || id.InstanceID != mockID || id.Region != "us-east-1" || id.Type != "m4.xlarge" || id.Account != "0123456789" || id.Architecture != "x86_64" {
		t.Errorf("identity %+v, %v", id, err)
	}
	tags, err := client.Tags(t.Context())
	if err != nil || len(tags) != 2 || tags["lull:idle-timeout"] != "45m" || tags["Name"] != "tested" {
		t.Errorf("tags %v, %v", tags, err)
	}
	await("it learns which instance it is", func(s agentctl.Status) bool { return s.InstanceID == mockID })
	if _, err := agentctl.Dial(filepath.Join(dir, "agent.sock")).Reload(t.Context()); err != nil {
		t.Error(err)
	}
	await("it reads the tags", func(s agentctl.Status) bool {
		return slices.ContainsFunc(s.Settings, func(x agentctl.Setting) bool {
			d, err := time.ParseDuration(x.Value)
			return x.Name == "idle-timeout" && err == nil && d == 45*time.Minute && x.Source == "tags"
		})
	})
	await("it writes its state tags with the mock's credentials", func(agentctl.Status) bool {
		mu.Lock()
		defer mu.Unlock()
		return signed[mockKey]
	})
	if len(signed) != 1 {
		t.Errorf("calls were signed by %v", signed)
	}
}
