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
)

// bus starts a private session bus of a user and returns the directory that
// stands for /run/user.
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
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	home := filepath.Join(dir, strconv.Itoa(uid))
	if err := os.Mkdir(home, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	args := []string{daemon, "--session", "--nofork", "--nosyslog", "--print-address=1", "--address=unix:path=" + filepath.Join(home, "bus")}
	if uid != os.Geteuid() {
		if os.Geteuid() != 0 {
			t.Skip("SKIP another user's desktop: needs root")
		}
		if err := os.Chown(home, uid, uid); err != nil {
			t.Fatal(err)
		}
		args = append([]string{"setpriv", "--reuid", strconv.Itoa(uid), "--clear-groups"}, args...)
	}
	cmd := exec.Command(args[0], args[1:]...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	buf := make([]byte, 512)
	n, err := out.Read(buf) // the address is printed when it listens
	if err != nil {
		t.Fatalf("dbus-daemon does not start: %v", err)
	}
	return dir, strings.TrimSpace(string(buf[:n]))
}

// shower is a desktop's notification service.
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
	if err != nil {
		t.Fatal(err)
	}
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
	if err := conn.Export(s, object, service); err != nil {
		t.Fatal(err)
	}
	if r, err := conn.RequestName(service, dbus.NameFlagDoNotQueue); err != nil || r != dbus.RequestNameReplyPrimaryOwner {
		t.Fatalf("%v, %v", r, err)
	}
	return s
}

// TestNotify shows a message on a real session bus, of this user and of user
// nobody, whose bus accepts no other user.
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

// TestNotifyPassesOver what is no bus, and does not wait for one that hangs.
func TestNotifyPassesOver(t *testing.T) {
	dir := t.TempDir()
	for name, file := range map[string]string{"1": "bus", "abc": "bus", "2": "other"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name, file), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := Notify(t.Context(), dir, Message{}); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if n, err := Notify(t.Context(), filepath.Join(dir, "none"), Message{}); n != 0 || err != nil {
		t.Errorf("no directory: %d, %v", n, err)
	}
}
