package programs

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lull/internal/core/idle"
	"lull/internal/host/daemontest"
	"lull/internal/lib/waittest"
	"lull/internal/protocol/hostctl"
)

// adoptCron adopts a cron daemon that the test started, with a short idle
// timeout.
func adoptCron(h *daemontest.Host, name string, cmd *exec.Cmd) {
	h.T.Helper()
	beside(h.T, cmd)
	h.T.Cleanup(func() { _ = h.ReleaseAdopted(h.T.Context(), name) }) // the daemon may have ended
	var err error
	daemontest.Wait(h.T, "the cron is adopted", func() (bool, string) {
		_, err = h.Adopt(h.T.Context(), hostctl.Adopt{PID: cmd.Process.Pid, Name: name, PauseAfter: daemontest.Seconds(pauseAfter)})
		return err == nil, fmt.Sprint(err)
	})
}

// onTime waits until the job has run in the given number of minutes. It checks
// that the job ran once in each and within seconds of its time, and that the cron
// daemon was asleep in between.
func onTime(h *daemontest.Host, name, file string, minutes int) {
	h.T.Helper()
	last := ""
	waittest.Until(h.T, "the jobs have run", func() bool {
		b, err := os.ReadFile(file)
		last = string(b)
		return err == nil && strings.Count(last, "\n") >= minutes
	})
	seen := map[string]bool{}
	for line := range strings.Lines(last) {
		at, err := time.Parse("15:04:05", strings.TrimSpace(line))
		if minute := at.Format("15:04"); err != nil || at.Second() > 30 || seen[minute] {
			h.T.Errorf("the jobs ran at\n%s", last)
		} else {
			seen[minute] = true
		}
	}
	o := h.Show(name)
	if o.PauseCount < uint64(minutes) || o.LastResumedBy != "timer" || !strings.HasPrefix(o.WakeAtBy, "cron (") {
		h.T.Errorf("it was paused %d times, last resumed by %q, due by %q", o.PauseCount, o.LastResumedBy, o.WakeAtBy)
	}
}

// TestBusyboxCrond checks that BusyBox's crond sleeps between its jobs, runs each
// on time, and is kept awake by a line that cannot be parsed.
func TestBusyboxCrond(t *testing.T) {
	t.Parallel()
	busybox := installed(t, "busybox-static", "/bin/busybox", "busybox")
	h := start(t, nil)
	dir := t.TempDir()
	table, file := filepath.Join(dir, "root"), filepath.Join(t.TempDir(), "ran")
	write := func(text string) {
		if err := os.WriteFile(table, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("# comment\n* * * * * date +\\%T >>" + file + "\n")
	adoptCron(h, "crond", exec.Command(busybox, "crond", "-f", "-c", dir, "-L", "/dev/null"))
	o := h.Await("crond", "paused")
	if o.WakeAt == nil || o.WakeAtBy != "cron ("+table+":2)" {
		t.Errorf("due at %v by %q", o.WakeAt, o.WakeAtBy)
	}
	onTime(h, "crond", file, 1)
	write("* * * * * true\nsometimes true\n")
	o = h.Until("crond", "the crontab is unknown", func(o hostctl.Instance) bool {
		for _, b := range o.Blocks {
			if b.Signal == "cron" && b.Code == idle.SignalUnknown {
				return strings.Contains(b.Sentence, table+":2")
			}
		}
		return false
	})
	if o.State != "running" {
		t.Errorf("it is %s", o.State)
	}
}

// TestDebianCron checks for some minutes that Debian's cron, with its own
// crontabs, sleeps between jobs and runs them on time.
func TestDebianCron(t *testing.T) {
	onlySoak(t)
	t.Parallel()
	cron := installed(t, "cron", "/usr/sbin/cron")
	h := start(t, nil)
	dir := t.TempDir()
	user, system := filepath.Join(dir, "user"), filepath.Join(dir, "system")
	for name, text := range map[string]string{
		"root":    "* * * * * date +\\%T >>" + user + "\n",
		"crontab": "SHELL=/bin/sh\n0-59 0-23 * * * root date +\\%T >>" + system + "\n",
		"pam":     "auth required pam_permit.so\naccount required pam_permit.so\nsession required pam_permit.so\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-ec", `
mount -t tmpfs none /run
mount -t tmpfs none /var/spool/cron
mkdir -m 1730 /var/spool/cron/crontabs
cp root /var/spool/cron/crontabs/root
mount -t tmpfs none /etc/cron.d
mount --bind crontab /etc/crontab
mount --bind pam /etc/pam.d/cron
exec "$0" -f`, cron)
	cmd.Dir = dir
	adoptCron(h, "cron", cmd)
	for n := range 4 {
		onTime(h, "cron", user, n+1)
		onTime(h, "cron", system, n+1)
	}
}

// cronie, in a Debian of its own, does the same.
func TestCronie(t *testing.T) {
	onlySoak(t)
	t.Parallel()
	debootstrap := installed(t, "debootstrap", "/usr/sbin/debootstrap", "debootstrap")
	h := start(t, nil)
	root := t.TempDir()
	sh := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out[max(0, len(out)-4000):])
		}
	}
	sh(debootstrap, "--variant=minbase", "trixie", root) // the first Debian that has it
	sh("chroot", root, "apt-get", "-o", "APT::Sandbox::User=root", "install", "-y", "-qq", "--no-install-recommends", "systemd-standalone-sysusers", "cronie")
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const pam = "auth required pam_permit.so\naccount required pam_permit.so\nsession required pam_permit.so\n"
	write("/etc/pam.d/cron", pam)
	write("/etc/pam.d/crond", pam)
	write("/etc/crontab", "")
	write("/var/spool/cron/crontabs/root", "* * * * * date +\\%T >>/user\n")
	cmd := exec.Command("unshare", "--mount", "--propagation", "private", "sh", "-ec", `mount -t proc proc "$1/proc"; exec chroot "$1" /usr/sbin/crond -n`, "sh", root)
	adoptCron(h, "cronie", cmd)
	onTime(h, "cronie", filepath.Join(root, "user"), 1)
	onTime(h, "cronie", filepath.Join(root, "user"), 2)
	write("/var/spool/cron/crontabs/root", "")
	write("/etc/crontab", "SHELL=/bin/sh\n0-59 0-23 * * * root date +\\%T >>/system\n")
	onTime(h, "cronie", filepath.Join(root, "system"), 1)
	onTime(h, "cronie", filepath.Join(root, "system"), 2)
}
