package containers

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/core/instance"
	"lull/internal/host/daemontest"
	"lull/internal/protocol/hostctl"
)

func TestMain(m *testing.M) {
	daemontest.Main(m, "lull/cmd/lull-harness", "lull/test/e2e/host/testdata/guest")
}

// host starts a daemon for the test.
func host(t *testing.T, args ...string) *daemontest.Host {
	t.Helper()
	daemontest.NeedRunc(t)
	return daemontest.Start(t, daemontest.Config{Args: append([]string{"--probe", "200ms"}, args...)})
}

// box returns the spec of a container that never pauses and is not restarted. Its
// stop grace is short, because most programs in these tests ignore a request to
// exit.
func box(name, image string, command ...string) instance.Spec {
	return instance.Spec{Name: name, Runtime: "container", Image: image, Command: command, Restart: instance.RestartNo,
		PauseAfter: new(idle.Duration), StopAfter: new(idle.Duration), StopGrace: *daemontest.Seconds(200 * time.Millisecond)}
}

func script(s string) []string { return []string{"/bin/sh", "-c", s} }

// ends runs a container until it exits, and returns its output and its final
// state.
func ends(d *daemontest.Host, s instance.Spec) (string, hostctl.Instance) {
	d.T.Helper()
	d.Launch(s)
	o := d.Await(s.Name, "stopped")
	return d.Said(s.Name), o
}

// inside runs a shell command in a container.
func inside(d *daemontest.Host, name, text string) instance.Outcome {
	d.T.Helper()
	out, err := d.Exec(d.T.Context(), name, hostctl.ExecRequest{Command: script(text)})
	if err != nil {
		d.T.Fatalf("%s: %v", text, err)
	}
	return out
}

// refuses checks that an instance cannot be created or started and that the
// reason contains words. It then removes what is left.
func refuses(d *daemontest.Host, s instance.Spec, words ...string) {
	d.T.Helper()
	_, err := d.Create(d.T.Context(), hostctl.Create{Spec: s, Start: true})
	if err == nil {
		d.T.Errorf("%s runs", s.Name)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			d.T.Errorf("%s: %v; want %q in it", s.Name, err, w)
		}
	}
	if _, err := d.Get(d.T.Context(), s.Name); err == nil {
		if err := d.Remove(d.T.Context(), s.Name); err != nil {
			d.T.Error(err)
		}
	}
}

// leftOf returns the files in the data directory that belong to an instance, and
// those of incomplete images.
func leftOf(d *daemontest.Host, id string) (left []string) {
	d.T.Helper()
	err := filepath.WalkDir(filepath.Join(d.Dir, "data"), func(p string, e os.DirEntry, err error) error {
		if err == nil && (id != "" && strings.Contains(e.Name(), id) || strings.HasPrefix(e.Name(), "new-")) {
			left = append(left, p)
		}
		return nil // files come and go during the walk
	})
	if err != nil {
		d.T.Fatal(err)
	}
	return left
}

// ask sends a line to a server and returns the answer. When it returns, both
// sides have closed the connection, so that its end cannot cancel a later pause.
func ask(addr, line string) (string, error) {
	c, err := net.DialTimeout("tcp", addr, daemontest.WaitLimit)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(daemontest.WaitLimit)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		return "", err
	}
	r := bufio.NewReader(c)
	got, err := r.ReadString('\n')
	if err == nil {
		err = c.(*net.TCPConn).CloseWrite()
	}
	if err == nil {
		_, err = io.Copy(io.Discard, r)
	}
	return strings.TrimSuffix(got, "\n"), err
}

// say sends a line to a server and returns an error unless the server echoes it.
func say(addr, line string) error {
	got, err := ask(addr, line)
	if err == nil && got != "echo "+line {
		err = fmt.Errorf("sent %q, got %q", line, got)
	}
	return err
}
