package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"lull/internal/cli/options"
	"lull/internal/lib/errtest"
)

func flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("host", pflag.ContinueOnError)
	bindFlags(f, func(string) string { return "" })
	return f
}

// TestResolvePrecedence sets one value in every source, and checks which one applies
// as the sources are removed one by one.
func TestResolvePrecedence(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	errtest.None(t, os.WriteFile(file, []byte("pause-after: 1s\n"), 0o600))
	env := map[string]string{"LULL_HOST_PAUSE_AFTER": "2s"}
	getenv := func(k string) string { return env[k] }
	check := func(want time.Duration, source, file string, f *pflag.FlagSet) {
		t.Helper()
		cfg, l, err := resolve(getenv, file, f)
		if err != nil || cfg.PauseAfter != want {
			t.Errorf("pause-after %s, %v; want %s", cfg.PauseAfter, err, want)
		}
		for _, s := range l {
			if s.Name == "pause-after" && !strings.HasPrefix(s.Source, source) {
				t.Errorf("source %q, want %q", s.Source, source)
			}
		}
	}
	f := flags()
	errtest.None(t, f.Set("pause-after", "3s"))
	check(3*time.Second, "flag", file, f)
	check(2*time.Second, "environment", file, flags())
	delete(env, "LULL_HOST_PAUSE_AFTER")
	check(time.Second, "file", file, flags())
	check(time.Minute, "default", "", flags())
}

// TestSocketIsAbsolute checks that the socket's path is made absolute, because
// programs and containers use it with other working directories.
func TestSocketIsAbsolute(t *testing.T) {
	t.Chdir(t.TempDir())
	none := func(string) string { return "" }
	for socket, want := range map[string]string{"s": "s", "run/host.sock": "run/host.sock"} {
		f := flags()
		errtest.None(t, f.Set("socket", socket))
		wd, err := os.Getwd()
		errtest.None(t, err)
		if cfg, _, err := resolve(none, "", f); err != nil || cfg.Socket != filepath.Join(wd, want) {
			t.Errorf("%s: %s, %v", socket, cfg.Socket, err)
		}
	}
	for _, bad := range []string{"", "/" + strings.Repeat("x", 107), "/" + strings.Repeat("x", 100) + "/s"} {
		f := flags()
		errtest.None(t, f.Set("socket", bad))
		if _, _, err := resolve(none, "", f); err == nil || !strings.Contains(err.Error(), "--socket") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestDashboardAddress checks that the dashboard is not served without TLS outside
// loopback unless that is allowed explicitly, and that commands require a server.
func TestDashboardAddress(t *testing.T) {
	for args, ok := range map[string]bool{
		"--listen 127.0.0.1:7071": true, "--listen [::1]:0": true, "--listen localhost:0": true, "--listen 0.0.0.0:7071": false, "--listen :7071": false,
		"--listen 192.0.2.1:7071": false, "--listen 192.0.2.1:7071 --insecure": true, "--listen 192.0.2.1:7071 --tls-cert c --tls-key k": true,
		"--listen 127.0.0.1:7071 --tls-cert c": false, "--listen 7071": false, "--server-commands": false,
	} {
		f := flags()
		errtest.None(t, f.Parse(strings.Fields(args)))
		if _, _, err := resolve(func(string) string { return "" }, "", f); (err == nil) != ok {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// TestFormerNames checks that the names that flags and config keys had in the last
// release still work, and that help does not show them.
func TestFormerNames(t *testing.T) {
	none := func(string) string { return "" }
	value := func(l []options.Setting, name string) string {
		for _, s := range l {
			if s.Name == name {
				return s.Value
			}
		}
		return "no such setting"
	}
	for former, value1 := range map[string]string{"probe": "2s", "files": "4096", "wakes": "3", "wake-wait": "7s", "image-age": "1h0m0s",
		"image-space": "3G", "layer": "4G", "machine": "desk", "report-every": "8s"} {
		now := formerHostOptions[former]
		f := flags()
		f.VisitAll(func(x *pflag.Flag) {
			if x.Name == former {
				t.Errorf("--%s is shown", former)
			}
		})
		if err := f.Parse([]string{"--" + former, value1}); err != nil {
			t.Errorf("--%s: %v", former, err)
		}
		if _, l, err := resolve(none, "", f); err != nil || value(l, now) != value1 {
			t.Errorf("--%s %s: %s is %s, %v", former, value1, now, value(l, now), err)
		}
		file := filepath.Join(t.TempDir(), "c.yaml")
		errtest.None(t, os.WriteFile(file, []byte(former+": "+value1+"\n"), 0o600))
		if _, l, err := resolve(none, file, flags()); err != nil || value(l, now) != value1 {
			t.Errorf("%s: %s in a file: %s is %s, %v", former, value1, now, value(l, now), err)
		}
		errtest.None(t, os.WriteFile(file, []byte(now+": "+value1+"\n"+former+": "+value1+"\n"), 0o600))
		if _, _, err := resolve(none, file, flags()); err == nil || !strings.Contains(err.Error(), "line 2") {
			t.Errorf("%s and %s in a file: %v", now, former, err)
		}
	}
	if len(formerHostOptions) != 9 {
		t.Errorf("%d former names, 9 are tested", len(formerHostOptions))
	}
	image := newCLI(nil, nil, nil, none).root()
	prune, _, err := image.Find([]string{"image", "prune"})
	if err != nil {
		t.Fatal(err)
	}
	if err := prune.ParseFlags([]string{"--older", "24h"}); err != nil || prune.Flag("older-than").Value.String() != "1d" {
		t.Errorf("--older: %v, %s", err, prune.Flag("older-than").Value)
	}
}

// FuzzConfigFile checks that any config file is either accepted or rejected with an
// error that names the file.
func FuzzConfigFile(f *testing.F) {
	f.Add("probe-interval: 2s\nstop-after: 1m\n")
	f.Add("probe: [1]\n")
	f.Add("- a\n")
	f.Add("a: &x {b: *x}\n")
	f.Fuzz(func(t *testing.T, text string) {
		file := filepath.Join(t.TempDir(), "c.yaml")
		errtest.None(t, os.WriteFile(file, []byte(text), 0o600))
		cfg, _, err := resolve(func(string) string { return "" }, file, flags())
		if err == nil && (cfg.Probe <= 0 || cfg.PauseAfter < 0) {
			t.Fatalf("%q gave %+v", text, cfg)
		}
		if err != nil && !strings.Contains(err.Error(), "c.yaml") && !strings.Contains(err.Error(), "cannot use") {
			t.Fatalf("%q: %v", text, err)
		}
	})
}
