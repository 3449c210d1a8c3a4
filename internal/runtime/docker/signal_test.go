package docker

import (
	"encoding/json"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"

	"lull/internal/lib/errtest"
)

// TestSignalToACommandThatStarts checks that a signal waits until Docker reports
// the PID of a command, which it does some time after it reports the command as
// running.
func TestSignalToACommandThatStarts(t *testing.T) {
	if testing.Short() {
		t.Skip("-short")
	}
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	errtest.None(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	errtest.None(t, err)
	var asked atomic.Int32
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		x := execDetails{Running: true}
		if asked.Add(1) > 3 {
			x.Pid = cmd.Process.Pid
		}
		_ = json.NewEncoder(w).Encode(x)
	})}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	newClient(socket).signalExec("/", "made", syscall.SIGKILL) // "/" is part of every control group's path
	select {
	case <-ended:
	default:
		if n := asked.Load(); n < 4 {
			t.Fatalf("it gave up after asking %d times", n)
		}
		<-ended
	}
}
