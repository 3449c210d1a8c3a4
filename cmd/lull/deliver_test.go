package main

import (
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"lull/internal/cli/options"
	"lull/internal/lib/errtest"
)

// documents reads every document of a YAML file.
func documents(t *testing.T, name string) []map[string]any {
	t.Helper()
	dec := yaml.NewDecoder(strings.NewReader(contents(t, name)))
	var out []map[string]any
	for {
		var d map[string]any
		err := dec.Decode(&d)
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		out = append(out, d)
	}
}

// at returns the value at a path of names and indexes in decoded YAML.
func at(t *testing.T, v any, path ...any) any {
	t.Helper()
	for _, p := range path {
		switch k := p.(type) {
		case string:
			m, ok := v.(map[string]any)
			if !ok || m[k] == nil {
				t.Fatalf("there is no %v in %v", path, v)
			}
			v = m[k]
		case int:
			l, ok := v.([]any)
			if !ok || len(l) <= k {
				t.Fatalf("there is no %v in %v", path, v)
			}
			v = l[k]
		}
	}
	return v
}

// TestKubernetesManifest checks that the manifest uses only flags and variables of
// lull server, and that every reference in it has a target.
func TestKubernetesManifest(t *testing.T) {
	var set map[string]any
	names := map[string]bool{}
	for _, d := range documents(t, "../../etc/examples/kubernetes.yaml") {
		names[at(t, d, "kind").(string)+" "+at(t, d, "metadata", "name").(string)] = true
		if at(t, d, "kind") == "StatefulSet" {
			set = d
		}
		if at(t, d, "metadata", "namespace") != "lull" {
			t.Errorf("%v is in another namespace", d["metadata"])
		}
	}
	for _, want := range []string{"Service " + at(t, set, "spec", "serviceName").(string), "ServiceAccount lull", "ConfigMap lull", "PodDisruptionBudget lull"} {
		if !names[want] {
			t.Errorf("there is no %s", want)
		}
	}
	pod := at(t, set, "spec", "template", "spec")
	volumes := []string{"data"}
	for _, v := range at(t, pod, "volumes").([]any) {
		volumes = append(volumes, at(t, v, "name").(string))
	}
	box := at(t, pod, "containers", 0)
	mounted := map[string]bool{}
	for _, m := range at(t, box, "volumeMounts").([]any) {
		mounted[at(t, m, "mountPath").(string)] = true
		if name := at(t, m, "name").(string); !slices.Contains(volumes, name) {
			t.Errorf("it mounts %s, which there is not", name)
		}
	}
	env := map[string]string{"MIN_WORKERS": ""}
	for _, e := range at(t, box, "env").([]any) {
		name := at(t, e, "name").(string)
		value, _ := e.(map[string]any)["value"].(string)
		env[name] = value
		known := name == "POD" || slices.ContainsFunc(serverOptions, func(o options.Option[serverConfig]) bool { return o.Env == name })
		if !known {
			t.Errorf("lull server does not know %s", name)
		}
		if strings.HasPrefix(value, "/") && !mounted[filepath.Dir(value)] && !mounted[value] {
			t.Errorf("%s is %s, where nothing is mounted", name, value)
		}
	}
	// A certificate for the names of the pods comes from a private CA.
	if env["LULL_SERVER_PEER_CA"] == "" {
		t.Error("its servers cannot ask each other: no one signs the names of pods but a CA that has to be named")
	}
	// lull server accepts the settings of the manifest as they are.
	dir := t.TempDir()
	env["LULL_SERVER_PEER_CA"] = authority(t, dir)
	file := filepath.Join(dir, "server.yaml")
	for _, d := range documents(t, "../../etc/examples/kubernetes.yaml") {
		if d["kind"] == "ConfigMap" {
			errtest.None(t, os.WriteFile(file, []byte(at(t, d, "data", "server.yaml").(string)), 0o600))
		}
	}
	flags := pflag.NewFlagSet("server", pflag.ContinueOnError)
	bindServerFlags(flags, os.Getenv)
	cfg, _, err := resolveServer(func(name string) string { return env[name] }, file, flags)
	if err != nil || cfg.Etcd == "" || cfg.TLSCert == "" {
		t.Errorf("lull server takes it as %+v, %v", cfg, err)
	}
}

// TestCloudFormation checks that the template parses, and that it grants exactly the
// permissions for the calls that the server makes.
func TestCloudFormation(t *testing.T) {
	var doc yaml.Node
	errtest.None(t, yaml.Unmarshal([]byte(contents(t, "../../etc/examples/cloudformation.yaml")), &doc))
	text := contents(t, "../../etc/examples/cloudformation.yaml")
	for _, ref := range regexp.MustCompile(`!Ref ([\w:]+)`).FindAllStringSubmatch(text, -1) {
		if strings.HasPrefix(ref[1], "AWS::") {
			continue
		}
		if !regexp.MustCompile(`(?m)^  ` + ref[1] + `:$`).MatchString(text) {
			t.Errorf("it refers to %s, which there is not", ref[1])
		}
	}
	_, policies, found := strings.Cut(text, "\n      Policies:\n")
	if !found {
		t.Fatal("the role has no policies")
	}
	// Comments and keys of conditions are not actions.
	policies = regexp.MustCompile(`(?m)^ *#.*$|"(?:ec2|aws):[^"]*": `).ReplaceAllString(policies, "")
	granted := map[string]bool{}
	for _, m := range regexp.MustCompile(`\b(ec2|cloudwatch|sts|iam|ssm|pricing):([A-Z]\w+)`).FindAllStringSubmatch(policies, -1) {
		granted[m[2]] = true
	}
	for _, statement := range strings.Split(policies, "- Sid: ")[1:] {
		changes := regexp.MustCompile(`ec2:(Create|Delete|Start|Stop|Terminate)\w+`).MatchString(statement)
		if changes && !strings.Contains(statement, "Condition:") {
			t.Errorf("without a condition it grants to change what is not the fleet's: %s", statement)
		}
	}
	called := map[string]bool{}
	call := regexp.MustCompile(`\.(?:api|client|ec2|cw)\w*\.([A-Z]\w+)\(|New((?:Describe|Get)\w+)Paginator\(|stscreds\.New(AssumeRole)Provider\(`)
	services := regexp.MustCompile(`"github\.com/aws/aws-sdk-go-v2/service/(\w+)["/]`)
	for _, pattern := range []string{"../../internal/platform/*/*.go", "../../internal/controller/*.go", "../../internal/controller/*/*.go"} {
		files, err := filepath.Glob(pattern)
		errtest.None(t, err)
		for _, f := range files {
			if strings.HasSuffix(f, "_test.go") {
				continue
			}
			used := services.FindAllStringSubmatch(contents(t, f), -1)
			for _, m := range used {
				if !slices.Contains([]string{"ec2", "cloudwatch", "sts", "pricing"}, m[1]) {
					t.Errorf("%s calls the service %s, of which this test knows nothing", f, m[1])
				}
			}
			if len(used) == 0 {
				continue
			}
			for _, m := range call.FindAllStringSubmatch(contents(t, f), -1) {
				called[m[1]+m[2]+m[3]] = true
			}
		}
	}
	for name := range called {
		if regexp.MustCompile(`^(Describe|Get|Start|Stop|Terminate|Create|Delete|Run|Assume)`).MatchString(name) && !granted[name] {
			t.Errorf("the server calls %s, which the role does not grant", name)
		}
	}
	for name := range granted {
		if !called[name] {
			t.Errorf("the role grants %s, which the server does not call", name)
		}
	}
	if len(called) < 5 {
		t.Errorf("only %v are found to be called", called)
	}
}

// authority writes a CA certificate to a PEM file below dir and returns the file's
// path.
func authority(t *testing.T, dir string) string {
	t.Helper()
	web := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(web.Close)
	file := filepath.Join(dir, "ca.crt")
	errtest.None(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: web.Certificate().Raw}), 0o600))
	return file
}
