package docker

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
)

var id64 = strings.Repeat("0123456789abcdef", 4)

func TestSpecOf(t *testing.T) {
	s, err := SpecOf(id64, "web", map[string]string{LabelPauseAfter: "90s", LabelStopAfter: "1h", LabelReclaim: "10m", LabelQuiet: "5m",
		LabelIdlePolicy: "leases_only", LabelOutbound: "true", "other.label": "x"})
	if err != nil {
		t.Fatal(err)
	}
	if s.Name != "web" || s.Image != id64 || s.Runtime != "docker" || time.Duration(*s.PauseAfter) != 90*time.Second || time.Duration(*s.StopAfter) != time.Hour ||
		time.Duration(s.ReclaimAfter) != 10*time.Minute || time.Duration(s.QuietConnectionAfter) != 5*time.Minute || s.IdlePolicy != instance.PolicyLeasesOnly || !s.WakeOnOutbound {
		t.Errorf("%+v", s)
	}
	s, err = SpecOf(id64, "Web_1-", map[string]string{LabelPauseAfter: "1m"})
	if err != nil || s.Name != "docker-0123456789ab" || s.StopAfter == nil || *s.StopAfter != idle.Duration(0) {
		t.Errorf("a name that is no instance's: %+v, %v", s, err)
	}
	for label, bad := range map[string]string{LabelPauseAfter: "soon", LabelStopAfter: "-5m", LabelOutbound: "perhaps", LabelIdlePolicy: "lazy", "lull.pause": "1m"} {
		l := map[string]string{LabelPauseAfter: "1m"}
		l[label] = bad
		if _, err := SpecOf(id64, "web", l); err == nil || !strings.Contains(err.Error(), label) {
			t.Errorf("%s=%s: %v", label, bad, err)
		}
	}
}

// FuzzLabels checks that labels yield a valid spec or an error.
func FuzzLabels(f *testing.F) {
	f.Add("web", "1m", "5m", "default", "true")
	f.Add("/x", "-1s", "1h", "?", "2")
	f.Fuzz(func(t *testing.T, name, pause, stop, policy, outbound string) {
		s, err := SpecOf(id64, name, map[string]string{LabelPauseAfter: pause, LabelStopAfter: stop, LabelIdlePolicy: policy, LabelOutbound: outbound})
		if err == nil && s.Validate() != nil {
			t.Errorf("%+v is not valid", s)
		}
	})
}

func line(action string) string {
	return fmt.Sprintf(`{"Type":"container","Action":%q,"Actor":{"ID":%q,"Attributes":{"name":"web"}},"time":1}`, action, id64)
}

// FuzzEvents checks that random input as an event stream ends with an error, and
// that every event reported before is well-formed.
func FuzzEvents(f *testing.F) {
	f.Add([]byte(line("start") + "\n" + line("die")))
	f.Add([]byte(`{"Type":"image"}{"Type":"container","Actor":{"ID":"../../x"}}[`))
	f.Add([]byte(`{"Type":"` + strings.Repeat("x", 2000)))
	f.Fuzz(func(t *testing.T, b []byte) {
		err := readEvents(bytes.NewReader(b), func(e event) {
			if e.Type != "container" || !validID(e.Actor.ID) {
				t.Errorf("told %+v", e)
			}
		})
		if err == nil {
			t.Error("the stream has no end")
		}
	})
}

func TestEvents(t *testing.T) {
	var got []string
	err := readEvents(strings.NewReader(line("start")+"\n"+line("pause")+line("die")), func(e event) { got = append(got, e.Action) })
	if err == nil || strings.Join(got, " ") != "start pause die" {
		t.Errorf("%v, %v", got, err)
	}
	long := `{"Type":"` + strings.Repeat("x", maxEvent) + `"}`
	if err := readEvents(strings.NewReader(long), func(event) {}); err == nil || !strings.Contains(err.Error(), "bytes") {
		t.Errorf("a long event: %.200v", err)
	}
}

// FuzzDemux checks that demux reads random output only up to its end.
func FuzzDemux(f *testing.F) {
	piece := func(stream byte, s string) []byte {
		return append(binary.BigEndian.AppendUint32([]byte{stream, 0, 0, 0}, uint32(len(s))), s...)
	}
	f.Add(append(piece(1, "out"), piece(2, "err")...))
	f.Add([]byte{1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 'x'})
	f.Add([]byte{9, 0, 0, 0, 0, 0, 0, 1, 'x'})
	f.Fuzz(func(t *testing.T, b []byte) {
		var out, errOut bytes.Buffer
		err := demux(bytes.NewReader(b), &out, &errOut)
		if n := out.Len() + errOut.Len(); n > len(b) || err == nil && n+8 > len(b) && len(b) > 0 {
			t.Errorf("%d bytes of %d", n, len(b))
		}
	})
}

func TestContainerOf(t *testing.T) {
	for dir, want := range map[string]string{
		"/sys/fs/cgroup/freezer/docker/" + id64:                            id64,
		"/sys/fs/cgroup/system.slice/docker-" + id64 + ".scope":            id64,
		"/sys/fs/cgroup/freezer/libpod_parent/libpod-" + id64:              id64,
		"/sys/fs/cgroup/machine.slice/libpod-" + id64 + ".scope/container": id64,
		"/sys/fs/cgroup/unified/lull/h1/" + id64[:16]:                      "",
		"/sys/fs/cgroup/system.slice/docker-" + id64 + ".mount/":           "",
		"": "",
	} {
		if got := containerOf(dir); got != want {
			t.Errorf("%q is %q", dir, got)
		}
	}
}

func TestExit(t *testing.T) {
	var d details
	if err := json.Unmarshal([]byte(`{"State":{"ExitCode":137,"FinishedAt":"2026-01-02T03:04:05.6Z"}}`), &d); err != nil {
		t.Fatal(err)
	}
	if e := d.exit(); e.Code != 137 || e.Signal != 9 || e.At.Year() != 2026 {
		t.Errorf("%+v", e)
	}
}

// TestAlone checks that a container counts as alone in its network unless its own
// network mode or another container's shares the network, and never before the
// first listing.
func TestAlone(t *testing.T) {
	r := &Runtime{}
	if r.join("b", "container:"+id64); r.alone(id64, "web", "bridge") {
		t.Error("before the first look")
	}
	r.joined = map[string]string{}
	for _, mode := range []string{"host", "container:x"} {
		if r.alone(id64, "web", mode) {
			t.Errorf("in the network mode %s", mode)
		}
	}
	for _, whose := range []string{id64, id64[:12], "web"} {
		if !r.alone(id64, "web", "bridge") {
			t.Error("with no one beside it")
		}
		if r.join("b", "container:"+whose); r.alone(id64, "web", "bridge") {
			t.Errorf("shared with one that names %s", whose)
		}
		r.join("b", "bridge")
	}
}
