package desktop

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"

	"lull/internal/lib/errtest"
)

// bus starts a private session bus of user uid. dir takes the place of /run/user.
func bus(t *testing.T, uid int) (dir, address string) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short starts no program")
	}
	daemon, err := exec.LookPath("dbus-daemon")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skipf("SKIP desktop: %v", err)
	}
	dir, err = os.MkdirTemp("", "lull-desktop-") // a short path: a socket's has 107 bytes
	errtest.None(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	home := filepath.Join(dir, strconv.Itoa(uid))
	errtest.None(t, os.Mkdir(home, 0o700))
	errtest.None(t, os.Chmod(dir, 0o755))
	args := []string{daemon, "--session", "--nofork", "--nosyslog", "--print-address=1", "--address=unix:path=" + filepath.Join(home, "bus")}
	if uid != os.Geteuid() {
		if os.Geteuid() != 0 {
			t.Skip("SKIP another user's desktop: needs root")
		}
		errtest.None(t, os.Chown(home, uid, uid))
		args = append([]string{"setpriv", "--reuid", strconv.Itoa(uid), "--clear-groups"}, args...)
	}
	cmd := exec.Command(args[0], args[1:]...)
	out, err := cmd.StdoutPipe()
	errtest.None(t, err)
	errtest.None(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	buf := make([]byte, 512)
	n, err := out.Read(buf) // the daemon prints its address once it listens
	if err != nil {
		t.Fatalf("dbus-daemon does not start: %v", err)
	}
	return dir, strings.TrimSpace(string(buf[:n]))
}

// shower is a notification service on a session bus. It sends each notification
// to got.
type shower struct{ got chan string }

// Notify is org.freedesktop.Notifications.Notify.
func (s shower) Notify(app string, _ uint32, _ string, summary, body string, _ []string, hints map[string]dbus.Variant, life int32) (uint32, *dbus.Error) {
	s.got <- fmt.Sprintf("%s|%s|%s|%v|%d", app, summary, body, hints["urgency"].Value(), life)
	return 7, nil
}

func serve(t *testing.T, uid int, address string) shower {
	t.Helper()
	path := strings.TrimPrefix(strings.Split(address, ",")[0], "unix:path=")
	c, err := dialAs(t.Context(), path, uid)
	errtest.None(t, err)
	conn, err := dbus.NewConn(c)
	if err == nil {
		err = conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(uid))})
	}
	if err == nil {
		err = conn.Hello()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	s := shower{make(chan string, 1)}
	errtest.None(t, conn.Export(s, object, service))
	if r, err := conn.RequestName(service, dbus.NameFlagDoNotQueue); err != nil || r != dbus.RequestNameReplyPrimaryOwner {
		t.Fatalf("%v, %v", r, err)
	}
	return s
}

// TestNotify shows a message on real session buses, of this user and of user
// nobody. The bus of nobody accepts no other user.
func TestNotify(t *testing.T) {
	for _, uid := range []int{os.Geteuid(), 65534} {
		t.Run(strconv.Itoa(uid), func(t *testing.T) {
			dir, address := bus(t, uid)
			ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
			defer cancel()
			if n, err := Notify(ctx, dir, Message{"s", "b"}); n != 0 || err != nil {
				t.Errorf("without a desktop: %d, %v", n, err)
			}
			s := serve(t, uid, address)
			n, err := Notify(ctx, dir, Message{"It ends", "at noon"})
			if n != 1 || err != nil {
				t.Fatalf("%d, %v", n, err)
			}
			if got := <-s.got; got != "lull|It ends|at noon|2|0" {
				t.Errorf("shown: %s", got)
			}
		})
	}
}

// TestNotifyPassesOver checks that entries without a bus are skipped and are not
// an error.
func TestNotifyPassesOver(t *testing.T) {
	dir := t.TempDir()
	for name, file := range map[string]string{"1": "bus", "abc": "bus", "2": "other"} {
		errtest.None(t, os.MkdirAll(filepath.Join(dir, name), 0o700))
		errtest.None(t, os.WriteFile(filepath.Join(dir, name, file), nil, 0o600))
	}
	if n, err := Notify(t.Context(), dir, Message{}); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if n, err := Notify(t.Context(), filepath.Join(dir, "none"), Message{}); n != 0 || err != nil {
		t.Errorf("no directory: %d, %v", n, err)
	}
}
