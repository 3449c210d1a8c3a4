package agent

import (
	"debug/buildinfo"
	"fmt"
	"os"
	"strings"
	"testing"

	"lull/internal/lib/errtest"
)

// TestSlim checks limits on what lull-agent costs a machine without other parts
// of lull: its size on disk, its dependencies and its memory.
func TestSlim(t *testing.T) {
	t.Parallel()
	const most = 20e6 // bytes of the file
	st, err := os.Stat(program)
	errtest.None(t, err)
	if st.Size() > most {
		t.Errorf("lull-agent has %.1f MB, want at most %.0f", float64(st.Size())/1e6, most/1e6)
	}
	info, err := buildinfo.ReadFile(program)
	errtest.None(t, err)
	for _, m := range info.Deps {
		for _, heavy := range []string{"go.etcd.io/", "google.golang.org/grpc", "github.com/danielgtaylor/huma", "gvisor.dev/", "github.com/containers/", "github.com/prometheus/",
			"github.com/google/go-containerregistry", "go.opentelemetry.io/otel/exporters", "aws-sdk-go-v2/service/cloudwatch"} {
			if strings.Contains(m.Path, heavy) {
				t.Errorf("lull-agent contains %s", m.Path)
			}
		}
	}
	if len(info.Deps) < 10 {
		t.Errorf("lull-agent names %d modules only", len(info.Deps))
	}

	m := newMachine(t)
	m.agent("idle-timeout: 1h")
	var kB int
	found := m.sh("for p in /proc/[0-9]*; do [ \"$(readlink $p/exe)\" != " + program + " ] || grep VmRSS: $p/status; done")
	if _, err := fmt.Sscanf(found, "VmRSS: %d kB\n", &kB); err != nil {
		t.Fatalf("%q: %v", found, err)
	}
	t.Logf("file %.1f MB, resident %.1f MB", float64(st.Size())/1e6, float64(kB)*1024/1e6)
	// Resident memory depends on the kernel's page cache and on when Go returns
	// memory, so the limit is twice what is aimed at. lull agent run uses 44 MB.
	if kB*1024 > 40e6 {
		t.Errorf("lull-agent has %d kB resident, want at most 40 MB", kB)
	}
}
