package containers

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"lull/internal/host/daemontest"
	"lull/internal/lib/errtest"
	"lull/internal/lib/programtest"
)

// TestReleaseImage loads the image of a release into Docker. It checks that the
// image runs as an ordinary user without capabilities on a read-only root file
// system, serves, exits immediately on SIGTERM, and continues with its volume.
// LULL_RELEASE_IMAGE names the tar of a real release.
func TestReleaseImage(t *testing.T) {
	t.Parallel()
	k := daemontest.StartDockerd(t)
	file := os.Getenv("LULL_RELEASE_IMAGE")
	if file == "" {
		file = filepath.Join(t.TempDir(), "lull.tar")
		cmd := exec.Command("go", "run", "./bench/image", "-version", "9.8.7+x", programtest.Build(t, "lull/cmd/lull"))
		cmd.Dir, cmd.Env = filepath.Join("..", "..", ".."), append(os.Environ(), "SOURCE_DATE_EPOCH=1700000000")
		var said bytes.Buffer
		cmd.Stderr = &said
		packed, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v\n%s", err, said.String())
		}
		errtest.None(t, os.WriteFile(file, packed, 0o600))
	}
	_, image, ok := strings.Cut(k.Must("load", "-i", file), "Loaded image: ")
	if !ok {
		t.Fatal("docker does not name the image it loaded")
	}
	if got := k.Must("run", "--rm", image, "version"); !strings.HasPrefix(got, "lull ") {
		t.Errorf("lull version says %q", got)
	}

	at := daemontest.Addr(t)
	k.Must("run", "-d", "--name", "server", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "-v", "state:/data", "-p", at+":7070", image)
	ready := func() {
		t.Helper()
		daemontest.Wait(t, "the server is ready", func() (bool, string) {
			resp, err := http.Get("http://" + at + "/readyz")
			if err != nil {
				return false, err.Error() + "\n" + k.Say("logs", "server")
			}
			resp.Body.Close()
			return resp.StatusCode == http.StatusOK, resp.Status
		})
	}
	ready()
	pid := k.Must("inspect", "-f", "{{.State.Pid}}", "server")
	status, err := os.ReadFile("/proc/" + pid + "/status")
	errtest.None(t, err)
	for _, want := range []string{"Uid:\t65532\t65532\t65532\t65532\n", "CapEff:\t0000000000000000\n"} {
		if !bytes.Contains(status, []byte(want)) {
			t.Errorf("want %q in\n%s", want, status)
		}
	}
	token := func() string { return k.Must("cp", "server:/data/admin-token", "-") }
	first := token()
	k.Must("stop", "-t", fmt.Sprint(int(daemontest.WaitLimit.Seconds())), "server")
	if code := k.Must("inspect", "-f", "{{.State.ExitCode}}", "server"); code != "0" {
		t.Errorf("it ended with %s", code)
	}
	k.Must("start", "server")
	ready()
	if token() != first {
		t.Error("another admin token after a restart")
	}
}
