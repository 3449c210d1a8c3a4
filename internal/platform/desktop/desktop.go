// Package desktop shows a notification on the desktops of the users who are
// logged in, over the session bus of each.
//
// A session bus accepts only its own user, not even root. The connection is
// therefore made by a thread that switches to that user and ends afterwards. A
// session without a desktop is skipped.
package desktop

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
)

// Runtime is the parent of the users' runtime directories.
const Runtime = "/run/user"

// Message is a notification. It stays until a user closes it.
type Message struct{ Summary, Body string }

// Notify shows m on every desktop whose user has a runtime directory below dir,
// and returns how many accepted it. If it fails for one user, the error says so
// and the others are still tried.
func Notify(ctx context.Context, dir string, m Message) (shown int, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("cannot list desktop sessions: %w", err)
	}
	var errs []error
	for _, e := range entries {
		uid, perr := strconv.ParseUint(e.Name(), 10, 31)
		if perr != nil {
			continue
		}
		bus := filepath.Join(dir, e.Name(), "bus")
		st, serr := os.Lstat(bus)
		if serr != nil || st.Mode()&fs.ModeSocket == 0 || !owns(st, int(uid)) {
			continue
		}
		ok, nerr := notify(ctx, bus, int(uid), m)
		if nerr != nil {
			errs = append(errs, fmt.Errorf("cannot notify user %d: %w", uid, nerr))
		}
		if ok {
			shown++
		}
	}
	return shown, errors.Join(errs...)
}

func owns(st fs.FileInfo, uid int) bool {
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && int(sys.Uid) == uid
}

const service, object = "org.freedesktop.Notifications", "/org/freedesktop/Notifications"

// notify shows m over the session bus of user uid. It returns false without an
// error if no program on the bus shows notifications.
func notify(ctx context.Context, bus string, uid int, m Message) (bool, error) {
	c, err := dialAs(ctx, bus, uid)
	if err != nil {
		return false, err
	}
	conn, err := dbus.NewConn(c)
	if err != nil {
		return false, errors.Join(err, c.Close())
	}
	defer conn.Close()
	// dbus.Dial takes no context; closing the connection cancels it.
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if err = conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(uid))}); err == nil {
		err = conn.Hello()
	}
	if err != nil {
		return false, errors.Join(ctx.Err(), err)
	}
	const never = int32(0)
	hints := map[string]dbus.Variant{"urgency": dbus.MakeVariant(byte(2))}
	call := conn.Object(service, object).CallWithContext(ctx, service+".Notify", dbus.FlagNoAutoStart,
		"lull", uint32(0), "system-shutdown", m.Summary, m.Body, []string{}, hints, never)
	if e, ok := errors.AsType[dbus.Error](call.Err); ok && (e.Name == "org.freedesktop.DBus.Error.ServiceUnknown" || e.Name == "org.freedesktop.DBus.Error.NameHasNoOwner") {
		return false, nil
	}
	return call.Err == nil, call.Err
}

// dialAs connects to a unix socket as user uid. The thread that switched to the
// user is not reused.
func dialAs(ctx context.Context, path string, uid int) (net.Conn, error) {
	var d net.Dialer
	if uid == os.Geteuid() {
		return d.DialContext(ctx, "unix", path)
	}
	type result struct {
		c   net.Conn
		err error
	}
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with this function
		// A raw system call affects this thread only.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			done <- result{err: fmt.Errorf("cannot become user %d: %w", uid, errno)}
			return
		}
		c, err := d.DialContext(ctx, "unix", path)
		done <- result{c, err}
	}()
	r := <-done
	return r.c, r.err
}
