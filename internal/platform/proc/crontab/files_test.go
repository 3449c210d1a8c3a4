package crontab

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// cronIn returns a cron whose root is a directory with files.
func cronIn(t *testing.T, kind string, argv []string, files map[string]string) *daemon {
	t.Helper()
	dir := t.TempDir()
	for path, text := range files {
		path = filepath.Join(dir, path)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = os.WriteFile(path, []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return &daemon{pid: os.Getpid(), kind: kind, argv: append([]string{kind}, argv...), root: root}
}

// TestFolders checks in which folders each cron is taken to have its crontabs.
func TestFolders(t *testing.T) {
	files := map[string]string{}
	for _, at := range []string{"var/spool/cron/a", "var/spool/cron/crontabs/b", "var/spool/cron/tabs/c", "own/d", "etc/cron.d/e", "etc/cron.d/f.g", "etc/cron.d/h~"} {
		files[at] = "* * * * * root x\n"
	}
	files["etc/crontab"] = "* * * * * root x\n"
	for _, c := range []struct {
		kind, args string
		want       string
	}{
		{"cron", "-f", "/etc/cron.d/e /etc/crontab /var/spool/cron/crontabs/b /var/spool/cron/tabs/c"},
		{"cron", "-fl", "/etc/cron.d/e /etc/cron.d/f.g /etc/crontab /var/spool/cron/crontabs/b /var/spool/cron/tabs/c"},
		{"cron", "-L l", "/etc/cron.d/e /etc/crontab /var/spool/cron/crontabs/b /var/spool/cron/tabs/c"},
		{"crond", "-n", "/etc/cron.d/e /etc/cron.d/f.g /etc/crontab /var/spool/cron/a /var/spool/cron/crontabs/b"},
		{"busybox", "-f", "/var/spool/cron/crontabs/b"},
		{"busybox", "-f -c /own", "/own/d"},
		{"busybox", "-c/own -f", "/own/d"},
		{"busybox", "-fc /own", "/own/d"},
		{"busybox", "-L -c -l 8", "/var/spool/cron/crontabs/b"},
	} {
		jobs, err := cronIn(t, c.kind, strings.Fields(c.args), files).tables()
		var got []string
		for _, j := range jobs {
			got = append(got, strings.TrimSuffix(j.where, ":1"))
		}
		slices.Sort(got)
		if err != nil || strings.Join(got, " ") != c.want {
			t.Errorf("%s %s: %v, %v, want %s", c.kind, c.args, got, err, c.want)
		}
	}
}

// TestZones compares zones with what date of a program in the same root says: UTC for
// a name that no file in that root has.
func TestZones(t *testing.T) {
	tokyo, err := os.ReadFile("/usr/share/zoneinfo/Asia/Tokyo")
	if err != nil {
		t.Skip(err)
	}
	d := cronIn(t, "cron", nil, map[string]string{"usr/share/zoneinfo/Asia/Tokyo": string(tokyo), "etc/localtime": string(tokyo)})
	at := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	for name, want := range map[string]string{
		"": "12:00", "UTC": "12:00", "Asia/Tokyo": "21:00", ":Asia/Tokyo": "21:00", "/etc/localtime": "21:00", "/no/file": "12:00",
		"Europe/Berlin": "12:00", "Local": "12:00", "../Asia": "12:00",
		"CET-1CEST,M3.5.0,M10.5.0/3": "14:00", "EST5EDT": "08:00", "<+0330>-3:30": "15:30", "UTC-2": "14:00",
	} {
		zone, err := d.zone(name)
		if err != nil {
			t.Errorf("%q: %v", name, err)
		} else if got := at.In(zone).Format("15:04"); got != want {
			t.Errorf("%q: %s, want %s", name, got, want)
		}
	}
}

// TestOpensNoDevice checks that a pipe in place of a crontab is not even opened: to open
// a device can have effects, and a program in a container may make one.
func TestOpensNoDevice(t *testing.T) {
	d := cronIn(t, "cron", nil, map[string]string{"etc/passwd": ""})
	path := filepath.Join(d.root.Name(), "etc/crontab")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	watch, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(watch)
	if _, err := unix.InotifyAddWatch(watch, path, unix.IN_OPEN); err != nil {
		t.Fatal(err)
	}
	if _, err := d.file("/etc/crontab", maxTable); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a pipe is read: %v", err)
	}
	var event [4096]byte
	if n, err := unix.Read(watch, event[:]); err != unix.EAGAIN {
		t.Errorf("it was opened: %d bytes, %v", n, err)
	}
}
