package microvm

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"lull/internal/core/instance"
	"lull/internal/lib/errtest"
	"lull/internal/lib/tartree"
)

// talk sends a line and expects it back.
func talk(t testing.TB, c net.Conn, line string) {
	t.Helper()
	errtest.None(t, c.SetDeadline(time.Now().Add(waitLimit)))
	errtest.Get(c.Write([]byte(line + "\n")))(t)
	b := make([]byte, len(line)+1)
	for n := 0; n < len(b); {
		k, err := c.Read(b[n:])
		if err != nil {
			t.Fatalf("%s: %v after %q", line, err, b[:n])
		}
		n += k
	}
	if string(b) != line+"\n" {
		t.Fatalf("sent %q, got %q", line, b)
	}
}

func dial(t testing.TB, w *Work) net.Conn {
	t.Helper()
	c, err := w.Dial(t.Context(), "127.0.0.1:80")
	errtest.None(t, err)
	return c
}

func listening(t testing.TB, w *Work, port string) {
	t.Helper()
	until(t, "it listens", func() bool {
		ls, err := w.Listeners()
		if err != nil {
			return false
		}
		for _, l := range ls {
			if l.Network == "tcp" && strings.HasSuffix(l.Addr, ":"+port) {
				return true
			}
		}
		return false
	})
}

// TestStreamsByName checks that a program, also one of another user, can open its
// output by name, to which images link their logs, and that it may open as many
// files as in a container.
func TestStreamsByName(t *testing.T) {
	b := newBench(t, nil)
	as := func(id string, command ...string) *Work {
		t.Helper()
		l := b.launch(id, 1, command...)
		l.User = "1234:2345"
		w, err := b.Start(t.Context(), l)
		errtest.None(t, err)
		return w.(*Work)
	}
	as("writes", "guest", "write", "/dev/stdout")
	if e := b.exit(); e.Code != 0 || b.log("writes") != "by a guestwritten\n" {
		t.Errorf("exit %+v, log %q", e, b.log("writes"))
	}
	w := as("serves", "guest", "serve", ":80")
	listening(t, w, "80")
	for stream, want := range map[string]instance.Outcome{
		"/dev/stdout": {Stdout: "by a guestwritten\n"}, "/dev/stderr": {Stdout: "written\n", Stderr: "by a guest"}, "/dev/fd/2": {Stdout: "written\n", Stderr: "by a guest"},
	} {
		if o, err := b.Exec(t.Context(), "serves", instance.Command{Command: []string{"guest", "write", stream}}); err != nil || o != want {
			t.Errorf("%s: %+v, %v", stream, o, err)
		}
	}
	o, err := b.Exec(t.Context(), "serves", instance.Command{Command: []string{"guest", "cat", "/proc/self/limits"}})
	if err != nil || !regexp.MustCompile(`Max open files +[0-9]+ +524288 `).MatchString(o.Stdout) {
		t.Errorf("limits: %+v, %v", o, err)
	}
	errtest.None(t, w.Kill(t.Context()))
	b.exit()
}

// TestGuest checks the whole life of one guest.
func TestGuest(t *testing.T) {
	b := newBench(t, nil)
	began := time.Now()
	w := b.start("life", "guest", "serve", ":80")
	a, why := b.Accelerator()
	t.Logf("booted in %s on %s (%s)", time.Since(began).Round(time.Millisecond), a, why)
	listening(t, w, "80")
	c := dial(t, w)
	talk(t, c, "hello")

	errtest.None(t, w.Freeze(t.Context()))
	woken := make(chan string, 1)
	g, err := w.Guard(nil, false, func(why string) { woken <- why })
	if err != nil {
		t.Fatal(err)
	}
	if what := g.Pending(); what != "" {
		t.Fatalf("pending at once: %s", what)
	}
	errtest.Get(c.Write([]byte("again\n")))(t)
	select {
	case why := <-woken:
		if !strings.Contains(why, "6 bytes") {
			t.Errorf("woken by %q", why)
		}
	case <-time.After(waitLimit):
		t.Fatal("data for a frozen guest did not wake it")
	}
	if g.Pending() == "" {
		t.Error("nothing is pending after data came")
	}
	g.Close()
	errtest.None(t, w.Thaw())
	if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != "again\n" {
		t.Fatalf("after the thaw: %q, %v", line, err)
	}
	talk(t, c, "and on")
	c.Close()

	o, err := b.Exec(t.Context(), "life", instance.Command{Command: []string{"guest", "exit", "3"}})
	if err != nil || o.ExitCode != 3 || o.Stdout != "leaving with 3\n" {
		t.Errorf("exec: %+v, %v", o, err)
	}
	b.copies(t, "life")
	// Start more commands than may run concurrently, and abandon each.
	for range 33 {
		ctx, leave := context.WithCancel(t.Context())
		gone := make(chan error, 1)
		go func() {
			_, err := b.Exec(ctx, "life", instance.Command{Command: []string{"guest", "serve", ":81"}})
			gone <- err
		}()
		listening(t, w, "81")
		leave()
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Fatalf("who left was told %v", err)
		}
		until(t, "the command is ended", func() bool {
			ls, err := w.Listeners()
			return err == nil && !slices.ContainsFunc(ls, func(l instance.Listener) bool { return strings.HasSuffix(l.Addr, ":81") })
		})
	}
	errtest.None(t, w.Kill(t.Context()))
	if e := b.exit(); e.Signal != 9 {
		t.Errorf("exit %+v", e)
	}
	if log := b.log("life"); !strings.Contains(log, "serving :80") {
		t.Errorf("log: %q", log)
	}
	b.clean("life")
}

// copies checks that files can be copied into and out of a guest, and that a copy
// fails if its stream on this machine does: an interrupted stream must not be taken
// for complete.
func (b *bench) copies(t *testing.T, id string) {
	t.Helper()
	var in, out bytes.Buffer
	w := tar.NewWriter(&in)
	err := w.WriteHeader(&tar.Header{Name: "f", Mode: 0o600, Size: 7})
	if err == nil {
		_, err = io.WriteString(w, "content")
	}
	if err = errors.Join(err, w.Flush()); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken off")
	if err := b.WriteFiles(t.Context(), id, "/copied", io.MultiReader(bytes.NewReader(in.Bytes()), iotest.ErrReader(broken))); !errors.Is(err, broken) {
		t.Errorf("after half an archive: %v", err)
	}
	errtest.None(t, w.Close())
	if err := b.WriteFiles(t.Context(), id, "/copied", &in); err != nil {
		t.Error(err)
	}
	if begun, err := b.ReadFiles(t.Context(), id, "/copied", &out); err != nil || !begun {
		t.Errorf("begun %v, %v", begun, err)
	}
	r := tar.NewReader(&out)
	if h, err := r.Next(); err != nil || h.Name != "copied" || h.Mode != 0o600 {
		t.Errorf("copied out: %+v, %v", h, err)
	} else if c, err := io.ReadAll(r); err != nil || string(c) != "content" {
		t.Errorf("copied out: %q, %v", c, err)
	}
	if _, err := b.ReadFiles(t.Context(), id, "/bin/guest", writer(func([]byte) (int, error) { return 0, broken })); !errors.Is(err, broken) {
		t.Errorf("to a broken stream: %v", err)
	}
	if begun, err := b.ReadFiles(t.Context(), id, "/none", &out); begun || !errors.Is(err, tartree.ErrNoPath) {
		t.Errorf("a missing file: begun %v, %v", begun, err)
	}
	if err := b.WriteFiles(t.Context(), id, "/copied/x", strings.NewReader("no archive")); err == nil {
		t.Error("no archive was unpacked below a file")
	}
}
