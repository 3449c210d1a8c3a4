//go:build linux

package agentcmd

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"lull/internal/agent"
	"lull/internal/lib/errtest"
	"lull/internal/platform/imds"
)

// TestFindCloud checks what the agent concludes if the metadata service does not
// answer: there is no cloud only if the firmware names another vendor or the operator
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
			errtest.None(t, errors.Join(os.MkdirAll(filepath.Dir(f), 0o755), os.WriteFile(f, []byte(c.vendor+"\n"), 0o644)))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // so that even an EC2 instance reaches no metadata service
		e, err := findCloud(ctx, Settings{Cloud: c.cloud}, &agent.Meter{}, root)
		if (e == nil) != c.none || (err == nil) != c.none {
			t.Errorf("%s: none %v, error %v", c.name, e == nil, err)
		}
		if !c.none && imds.KindOf(err) != imds.Unreachable {
			t.Errorf("%s: %v is no unreachable metadata service", c.name, err)
		}
	}
}

// TestFirmware checks that EC2 is recognized by the names in the firmware.
func TestFirmware(t *testing.T) {
	for _, c := range []struct {
		file, text   string
		isEC2, known bool
	}{
		{"sys/class/dmi/id/sys_vendor", "Amazon EC2\n", true, true},
		{"sys/class/dmi/id/board_vendor", "Amazon EC2\n", true, true},
		{"sys/class/dmi/id/sys_vendor", "QEMU\n", false, true},
		{"sys/hypervisor/uuid", "ec2e1916-9099-7caf-fd21-012345abcdef\n", true, true},
		{"sys/hypervisor/uuid", "4c4c4544-0000-2010-8020-000000000000\n", false, false},
		{"etc/unrelated", "", false, false},
	} {
		root := t.TempDir() + "/"
		errtest.None(t, os.MkdirAll(filepath.Dir(root+c.file), 0o755))
		errtest.None(t, os.WriteFile(root+c.file, []byte(c.text), 0o644))
		if isEC2, known := firmware(root); isEC2 != c.isEC2 || known != c.known {
			t.Errorf("%s %q: EC2 %t, known %t", c.file, c.text, isEC2, known)
		}
	}
}
