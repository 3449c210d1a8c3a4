package server

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"lull/internal/fleet/launch"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/lib/freeport"
	"lull/internal/protocol/control"
	"lull/internal/sim"
	"lull/internal/sim/world"
)

// TestLaunchedAgent launches a worker from a template with agent, and runs the
// user data that EC2 received with /bin/sh, as the first boot would. The program
// must be downloaded from the server, whose certificate no system trusts, the
// instance ID must come from the metadata service, and the agent that is then
// started must report as that worker. Only the root directory and systemd are
// replaced.
func TestLaunchedAgent(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil && os.Getenv("CI") == "" {
		t.Skip("curl is not installed")
	}
	if os.Geteuid() != 0 {
		t.Skip("lull agent install needs root")
	}
	cloud, err := sim.ParseScenario([]byte("speed: 30\nregions: [{name: us-east-1}]\nworkers: [{name: other, type: m5.large}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	aws, err := sim.New(sim.Options{Scenario: cloud})
	if err != nil {
		t.Fatal(err)
	}
	everywhere, err := net.Listen("tcp", "0.0.0.0:0") // each instance has its own address for the metadata service
	errtest.None(t, err)
	port := everywhere.Addr().(*net.TCPAddr).Port
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- aws.Run(ctx, sim.Listeners{API: sim.LoopbackOnly(everywhere)}) }()
	r := &region{t: t, sim: fmt.Sprintf("http://127.0.0.1:%d", port), dir: t.TempDir(), cml: "1"}
	t.Cleanup(func() {
		for _, p := range r.servers {
			p.kill()
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the simulator ended with %v", err)
		}
	})
	free, err := freeport.Take()
	errtest.None(t, err)
	listen := fmt.Sprintf("127.0.0.1:%d", free)
	cert, key, trusted := certificate(t, r.dir)
	r.http = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: trusted}}}
	t.Cleanup(r.http.CloseIdleConnections)
	config := "aws_region_configs:\n  us-east-1: {security_group_ids: [sg-0000000a], subnet_id: subnet-000000a0}\nreconcile_interval: 1\nagent_server_url: https://" + listen +
		"\nagent_server_ca: |\n  " + strings.ReplaceAll(strings.TrimSpace(contents(t, cert)), "\n", "\n  ") + "\n"
	errtest.None(t, os.WriteFile(filepath.Join(r.dir, "s.yaml"), []byte(config), 0o600))
	r.add("one", r.sim, "--data", filepath.Join(r.dir, "data"), "--listen", listen, "--tls-cert", cert, "--tls-key", key).start()
	server := r.any(nil)

	own := "#!/bin/sh\necho the template's own part, with @secret@\n"
	for name, text := range map[string]string{"plain": "", "combined": own} {
		body := control.TemplateBody{InstanceType: "m5.large", AMINameFilter: "cisco-cml2.9*", Agent: true, UserData: text}
		errtest.Get(control.Write[launch.Template](t.Context(), server.Client, "PUT", "/templates/"+name, body))(t)
	}
	launch := func(template string) (w worker.Worker, data string) {
		t.Helper()
		made, err := control.Write[worker.Worker](t.Context(), server.Client, "POST", "/workers", map[string]any{"name": template, "template_name": template, "aws_region": "us-east-1"})
		if err != nil {
			t.Fatal(err)
		}
		r.until("the instance of "+template+" is there", 2*time.Minute, func() bool {
			w, err = control.Read[worker.Worker](t.Context(), server.Client, "/workers/"+made.ID)
			running := false
			if err == nil && w.EC2InstanceID != "" {
				aws.World.Locate(w.EC2InstanceID, func(i *world.Instance, _ world.Moment) { running, data = i.State == world.Running, string(i.UserData) })
			}
			return running
		})
		return w, data
	}

	w, script := launch("plain")
	file := filepath.Join(r.dir, "user-data")
	errtest.None(t, os.WriteFile(file, []byte(script), 0o700))
	if out, err := exec.Command("/bin/sh", "-n", file).CombinedOutput(); err != nil {
		t.Fatalf("the user data is no script: %v\n%s", err, out)
	}
	root, err := os.MkdirTemp("/var/lib", "lull-test-") // the agent trusts no file below /tmp
	errtest.None(t, err)
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	errtest.None(t, os.MkdirAll(filepath.Join(root, "etc"), 0o755))
	var metadata string
	aws.World.Locate(w.EC2InstanceID, func(i *world.Instance, _ world.Moment) {
		metadata = "http://" + net.JoinHostPort(i.MetadataAddr().String(), fmt.Sprint(port))
	})
	boot := func() ([]byte, error) {
		cmd := exec.Command("/bin/sh", file)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LULL_ROOT=" + root, "AWS_EC2_METADATA_SERVICE_ENDPOINT=" + metadata}
		return cmd.CombinedOutput()
	}
	// A server with another certificate must get neither the secret nor any
	// request of the machine.
	stranger, _, _ := certificate(t, t.TempDir())
	errtest.None(t, os.WriteFile(file, []byte(strings.ReplaceAll(strings.ReplaceAll(script, strings.TrimSpace(contents(t, cert)), strings.TrimSpace(contents(t, stranger))), "sleep 10", "sleep 0")), 0o700))
	if out, err := boot(); err == nil || !strings.Contains(string(out), "curl: (60)") { // curl's error for a certificate that is not trusted
		t.Errorf("the machine spoke to a server that it cannot verify: %v\n%s", err, out)
	} else if _, err := os.Stat(filepath.Join(root, "etc/lull/agent-token")); !os.IsNotExist(err) {
		t.Errorf("the refused enrollment left a token: %v", err)
	}
	errtest.None(t, os.WriteFile(file, []byte(script), 0o700))
	if out, err := boot(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}

	// Systemd would read the settings from the environment file.
	env := []string{"PATH=" + os.Getenv("PATH"), "AWS_EC2_METADATA_SERVICE_ENDPOINT=" + metadata, "AWS_ENDPOINT_URL_EC2=" + r.sim, "AWS_ACCESS_KEY_ID=test", "AWS_SECRET_ACCESS_KEY=test"}
	for line := range strings.Lines(contents(t, filepath.Join(root, "etc/default/lull-agent"))) {
		env = append(env, strings.Replace(strings.TrimSpace(line), "=/etc/", "="+root+"/etc/", 1))
	}
	agent := exec.Command(filepath.Join(root, "usr/local/bin/lull-agent"), "run", "--cloud", "ec2", "--state", filepath.Join(root, "var/lib/lull/agent"),
		"--socket", filepath.Join(root, "agent.sock"), "--config", filepath.Join(root, "etc/lull/agent.yaml"))
	agent.Env, agent.SysProcAttr = env, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var said strings.Builder
	agent.Stdout, agent.Stderr = &said, &said
	errtest.None(t, agent.Start())
	var seen control.Machine
	defer func() {
		_ = agent.Process.Kill() // may have ended already
		_ = agent.Wait()
		if seen.WorkerID == "" {
			t.Logf("the agent:\n%s", said.String())
		}
	}()
	r.until("the agent reports as its worker", 2*time.Minute, func() bool {
		l, err := control.All[control.Machine](t.Context(), server.Client, "/api/v1/agents", nil)
		if err == nil && len(l) == 1 {
			seen = l[0]
		}
		return seen.WorkerID != ""
	})
	if seen.WorkerID != w.ID || seen.Name != w.EC2InstanceID {
		t.Errorf("it reports as worker %q and machine %q, want %q and %q", seen.WorkerID, seen.Name, w.ID, w.EC2InstanceID)
	}
	token := strings.TrimSpace(contents(t, filepath.Join(root, "etc/lull/agent-token")))
	if l, err := control.All[control.Token](t.Context(), server.Client, "/api/v1/tokens", nil); err != nil || len(l) != 2 || l[1].Role != "agent" || l[1].Machine != w.EC2InstanceID {
		t.Errorf("the tokens are %+v, %v", l, err)
	}

	// Once the agent has reported, no other program on the machine can replace
	// its token.
	if out, err := boot(); err == nil {
		t.Errorf("the machine enrolled twice:\n%s", out)
	} else if now := strings.TrimSpace(contents(t, filepath.Join(root, "etc/lull/agent-token"))); now != token {
		t.Error("the refused enrollment changed the token")
	}

	// If the template has user data of its own, one of its parts is the same
	// script.
	w, archive := launch("combined")
	if !strings.Contains(archive, own) {
		t.Errorf("the template's own part is missing or changed:\n%s", archive)
	}
	secret := fleetSecret(t, archive)
	other := fleetSecret(t, script)
	enroll := func(secret, instance string) int {
		t.Helper()
		q, err := http.NewRequestWithContext(t.Context(), "POST", server.url+"/api/v1/agents/enroll", strings.NewReader(`{"instance_id":"`+instance+`"}`))
		if err != nil {
			t.Fatal(err)
		}
		q.Header.Set("Content-Type", "application/json")
		q.Header.Set("Authorization", "Bearer "+secret)
		res, err := r.http.Do(q)
		errtest.None(t, err)
		res.Body.Close()
		return res.StatusCode
	}
	for _, c := range []struct {
		secret, instance string
		want             int
	}{{secret, "i-0123456789abcdef0", 403}, {other, w.EC2InstanceID, 403}, {other, seen.Name, 409}, {secret[:len(secret)-1] + "x", w.EC2InstanceID, 401},
		{token, seen.Name, 401}, {secret, w.EC2InstanceID, 200}, {secret, w.EC2InstanceID, 200}} {
		if got := enroll(c.secret, c.instance); got != c.want {
			t.Errorf("%s... as %s: %d, want %d", c.secret[:16], c.instance, got, c.want)
		}
	}
}

// certificate writes a self-signed certificate for 127.0.0.1 and its key to a
// directory.
func certificate(t *testing.T, dir string) (cert, key string, trusted *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	errtest.None(t, err)
	of := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "lull test"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(24 * time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	public, err := x509.CreateCertificate(rand.Reader, of, of, private.Public(), private)
	errtest.None(t, err)
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	errtest.None(t, err)
	cert, key, trusted = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"), x509.NewCertPool()
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: public}, key: {Type: "PRIVATE KEY", Bytes: secret}} {
		errtest.None(t, os.WriteFile(path, pem.EncodeToMemory(block), 0o600))
	}
	trusted.AppendCertsFromPEM([]byte(contents(t, cert)))
	return cert, key, trusted
}

// fleetSecret returns the enrollment secret that user data contains.
func fleetSecret(t *testing.T, data string) string {
	t.Helper()
	_, rest, ok := strings.Cut(data, "lullenroll_")
	line, _, _ := strings.Cut(rest, "\n")
	if !ok || strings.Count(data, "lullenroll_") != 1 {
		t.Fatalf("the user data has no secret, or more than one:\n%s", data)
	}
	return "lullenroll_" + line
}

func contents(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	}
	return string(b)
}
