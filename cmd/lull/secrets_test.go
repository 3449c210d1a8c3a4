package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"lull/cmd/agentcmd"
	"lull/internal/core/idle"
	"lull/internal/fleet"
	"lull/internal/fleet/channel"
	"lull/internal/fleet/sealed"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/lib/errtest"
	"lull/internal/platform/cml"
	"lull/internal/platform/etcd"
	"lull/internal/platform/oidc"
	"lull/internal/platform/smtp"
	"lull/internal/platform/webhook"
	"lull/internal/protocol/control"
	"lull/internal/sim/world"
	"lull/internal/store"
)

// TestLiteralSecret checks that a literal password in CML_DEFAULT_PASSWORD is used,
// and that neither it nor a wrong one appears in an answer, a log, a record, the
// output of a command or an error.
func TestLiteralSecret(t *testing.T) {
	const right = "hunter2: quite a literal"
	scenario := twoRegions()
	scenario.Profiles["locked"] = world.Profile{Labs: 1, Password: right}
	for _, given := range []string{right, "wrong:literal"} {
		inCloud(t, scenario, map[string]any{"cml_default_password": given}, func(r *cloudRig) {
			t := r.t
			r.pass(time.Minute)
			insecure := true
			w, err := r.imports(fleet.ImportedWorker{Name: "locked", AWSRegion: home, EC2InstanceID: r.id("locked"),
				Profile: worker.Profile{TLSInsecure: &insecure, ActivitySources: []string{"cml"}}})
			if err != nil {
				t.Fatal(err)
			}
			r.pass(10 * time.Minute)
			st, err := control.Read[worker.IdleStatus](t.Context(), r.asks, "/workers/"+w.ID+"/idle-status")
			errtest.None(t, err)
			unknown := slices.ContainsFunc(st.Blocks, func(b idle.Block) bool { return b.Code == idle.SignalUnknown })
			if unknown == (given == right) || len(st.Readings) == 0 {
				t.Errorf("with %q, CML was read: %t; %+v", given, !unknown, st)
			}
			hides := func(where, text string) {
				t.Helper()
				if strings.Contains(text, given) {
					t.Errorf("%s shows the password: %s", where, text)
				}
			}
			for _, path := range []string{"/settings", "/workers", "/workers/" + w.ID, "/workers/" + w.ID + "/why", "/workers/" + w.ID + "/idle-status", "/audit", "/overview"} {
				body, err := control.Read[json.RawMessage](t.Context(), r.asks, path)
				errtest.None(t, err)
				hides(path, string(body))
			}
			for _, v := range []any{given, strings.Repeat(given, 400)} { // there is no key to encrypt it with
				_, err := control.Write[json.RawMessage](t.Context(), r.asks, "PATCH", "/settings", map[string]any{"cml_default_password": v})
				if code(err) != "invalid" {
					t.Errorf("it was taken: %v", err)
				}
				hides("the refusal", fmt.Sprint(err))
			}
			page, err := store.List(t.Context(), r.fleet.Store(), store.Prefix(""))
			if err != nil || len(page.Values) == 0 {
				t.Fatal(page, err)
			}
			for _, v := range page.Values {
				hides(v.Key, string(v.Data))
			}
			r.with(func() { hides("the log", r.log.String()) })
		})
	}

	for _, c := range []struct {
		env  map[string]string
		args []string
	}{
		{map[string]string{"CML_DEFAULT_PASSWORD": right}, []string{"config", "server"}},
		{map[string]string{"CML_DEFAULT_PASSWORD": right}, []string{"config", "server", "--json"}},
		{map[string]string{"CML_DEFAULT_PASSWORD": right}, []string{"server", "--help"}},
		{map[string]string{"CML_DEFAULT_PASSWORD": strings.Repeat(right, 400)}, []string{"config", "server"}},
		{nil, []string{"config", "server", "--cml-default-password", right}},
		{nil, []string{"config", "server", "--cml-default-password", right, "--min-workers", "x"}},
	} {
		out, errs, _ := lullWith(c.env, c.args...)
		if strings.Contains(out+errs, right) || out+errs == "" {
			t.Errorf("%v: %s%s", c.args, out, errs)
		}
	}
	file := filepath.Join(t.TempDir(), "server.yaml")
	for _, text := range []string{`"` + right + `"`, "4096123", "[" + right + "]"} {
		errtest.None(t, os.WriteFile(file, []byte("cml_default_password: "+text+"\n"), 0o600))
		out, errs, _ := lullWith(nil, "config", "server", "--config", file)
		if strings.Contains(out+errs, right) || strings.Contains(out+errs, "4096123") {
			t.Errorf("%s in a file: %s%s", text, out, errs)
		}
	}
}

// secretName matches the names of fields that contain secrets.
var secretName = regexp.MustCompile(`(Password|Secret|Token|^Key)$`)

// TestSecretsHaveTheirType checks that every setting with a secret has a type
// whose content fmt, JSON and slog do not print.
func TestSecretsHaveTheirType(t *testing.T) {
	const content = "hunter2"
	secret, plain := reflect.TypeFor[sealed.Secret](), reflect.TypeFor[sealed.Plain]()
	found := map[string]bool{}
	var walk func(reflect.Type)
	walk = func(at reflect.Type) {
		switch at.Kind() {
		case reflect.Map, reflect.Pointer, reflect.Slice:
			walk(at.Elem())
		case reflect.Struct:
			if strings.HasPrefix(at.PkgPath(), "lull/") || at.PkgPath() == "main" {
				for i := range at.NumField() {
					f := at.Field(i)
					if typed := f.Type == secret || f.Type == plain; typed {
						found[at.String()+"."+f.Name] = true
					} else if secretName.MatchString(f.Name) && (f.Type.Kind() == reflect.String || f.Type.Kind() == reflect.Slice) {
						t.Errorf("%v.%s is a %v", at, f.Name, f.Type)
					}
					walk(f.Type)
				}
			}
		}
	}
	for _, at := range []reflect.Type{reflect.TypeFor[settings.Settings](), reflect.TypeFor[channel.Channel](), reflect.TypeFor[serverConfig](), reflect.TypeFor[hostConfig](),
		reflect.TypeFor[agentcmd.Settings](), reflect.TypeFor[cml.Config](), reflect.TypeFor[smtp.Config](), reflect.TypeFor[webhook.Config](), reflect.TypeFor[oidc.Config](), reflect.TypeFor[etcd.ExternalConfig]()} {
		walk(at)
	}
	for _, name := range []string{"settings.Settings.CMLDefaultPassword", "channel.Channel.Key", "channel.Channel.Password", "cml.Config.Password", "smtp.Config.Password",
		"webhook.Config.Key", "oidc.Config.ClientSecret", "etcd.ExternalConfig.Password"} {
		if !found[name] {
			t.Errorf("%s was not found to be a secret", name)
		}
	}
	for _, v := range []any{sealed.Secret(content), sealed.Plain(content), sealed.Secret("sealed:" + content), sealed.Plain("env:" + content),
		settings.Settings{CMLDefaultPassword: content}, cml.Config{Password: content}, smtp.Config{Password: content}, &oidc.Config{ClientSecret: content}} {
		var log strings.Builder
		slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "v", v)
		slog.New(slog.NewTextHandler(&log, nil)).Info("x", "v", v)
		text := log.String() + fmt.Sprint(v) + fmt.Sprintf("%s %q %+v %#v %x %d", v, v, v, v, v, v)
		if b, err := json.Marshal(v); err == nil { // functions cannot be encoded
			text += string(b)
		}
		if _, isSealed := v.(sealed.Secret); isSealed && strings.HasPrefix(string(v.(sealed.Secret)), "sealed:") {
			text = fmt.Sprint(v) // an encrypted secret is allowed in a record
		}
		if strings.Contains(text, content) || strings.Contains(text, fmt.Sprintf("%x", content)) {
			t.Errorf("%T shows it: %s", v, text)
		}
	}
}
