//go:build linux

package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"lull/internal/agent"
	"lull/internal/platform/imds"
)

// TestFindCloud checks what the agent makes of a metadata service that does not
// answer: no cloud only where the firmware names another vendor or the operator
// says so.
func TestFindCloud(t *testing.T) {
	for _, c := range []struct {
		name, vendor, cloud string
		none                bool
	}{
		{"no names", "", cloudAuto, false},
		{"no names, told none", "", cloudNone, true},
		{"no names, told ec2", "", cloudEC2, false},
		{"a laptop", "LENOVO", cloudAuto, true},
		{"a laptop, told ec2", "LENOVO", cloudEC2, false},
		{"an instance", "Amazon EC2", cloudAuto, false},
	} {
		root := t.TempDir() + "/"
		if c.vendor != "" {
			f := filepath.Join(root, "sys/class/dmi/id/sys_vendor")
			if err := errors.Join(os.MkdirAll(filepath.Dir(f), 0o755), os.WriteFile(f, []byte(c.vendor+"\n"), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // reaches no metadata service, also on an instance
		e, err := findCloud(ctx, agentConfig{Cloud: c.cloud}, &agent.Meter{}, root)
		if (e == nil) != c.none || (err == nil) != c.none {
			t.Errorf("%s: none %v, error %v", c.name, e == nil, err)
		}
		if !c.none && imds.KindOf(err) != imds.Unreachable {
			t.Errorf("%s: %v is no unreachable metadata service", c.name, err)
		}
	}
}
