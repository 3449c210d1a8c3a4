package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"lull/internal/cli/term"
	"lull/internal/core/idle"
	"lull/internal/core/policy"
	"lull/internal/core/policy/when"
	"lull/internal/fleet"
	"lull/internal/fleet/channel"
	"lull/internal/fleet/launch"
	"lull/internal/fleet/settings"
	"lull/internal/fleet/worker"
	"lull/internal/protocol/control"
	"lull/internal/protocol/hostctl"
)

// rowsOf maps each verb that prints a table to the type of its rows.
var rowsOf = map[string]reflect.Type{
	"adopt ls": reflect.TypeFor[hostctl.Instance](), "agent ls": reflect.TypeFor[control.Machine](), "budget ls": reflect.TypeFor[control.BudgetState](), "host ls": reflect.TypeFor[control.HostSummary](),
	"image ls": reflect.TypeFor[hostctl.Image](), "image prune": reflect.TypeFor[hostctl.Image](), "lease ls": reflect.TypeFor[idle.Lease](), "agent lease ls": reflect.TypeFor[idle.Lease](),
	"notify dead": reflect.TypeFor[channel.DeadLetter](), "notify ls": reflect.TypeFor[channel.Delivery](), "override ls": reflect.TypeFor[control.Exception](),
	"policy groups": reflect.TypeFor[policy.Group](), "policy ls": reflect.TypeFor[policy.Named](), "ps": reflect.TypeFor[hostctl.Instance](), "top": reflect.TypeFor[hostctl.Instance](),
	"schedule ls": reflect.TypeFor[policy.Schedule](), "settings ls": reflect.TypeFor[settings.Setting](), "template ls": reflect.TypeFor[launch.Template](),
	"token ls": reflect.TypeFor[control.Token](), "worker discovered": reflect.TypeFor[fleet.Discovered](), "worker ls": reflect.TypeFor[worker.Worker](), "worker telemetry": reflect.TypeFor[worker.Event](),
}

// TestListingsFit prints every listing with long names. It checks that at a width of
// 80 no row is wider, and that -o wide leaves nothing out.
func TestListingsFit(t *testing.T) {
	var rows []json.RawMessage
	env := fake(t, func(w http.ResponseWriter, r *http.Request) {
		l, err := json.Marshal(rows)
		if err != nil {
			t.Error(err)
		}
		switch {
		case strings.HasSuffix(r.URL.Path, "/telemetry-events"):
		case strings.HasSuffix(r.URL.Path, "/halt"), r.URL.Path == "/api/v1/status", strings.HasSuffix(r.URL.Path, "/workers/w"):
			l = []byte(`{"id":"w","name":"w"}`)
		case strings.HasPrefix(r.URL.Path, "/api/v1/instances/"):
			l = fmt.Appendf(nil, `{"name":"web","leases":%s}`, l)
		case r.Header.Get("Authorization") != "":
			l = fmt.Appendf(nil, `{"items":%s}`, l)
		}
		_, _ = w.Write(l)
	})
	for _, verb := range append(slices.Clone(listings), "top") {
		if slices.Contains(logs, verb) {
			continue
		}
		of := rowsOf[verb]
		if of == nil {
			t.Errorf("%s is in no table of this test", verb)
			continue
		}
		b, err := json.Marshal(filled(of, 0).Interface())
		if err != nil {
			t.Fatal(verb, err)
		}
		rows = []json.RawMessage{b, b}
		env["COLUMNS"] = "80"
		out, errs, code := lullWith(env, words(t, verb)...)
		if code != term.ExitDone {
			t.Errorf("%s ended with %d: %s", verb, code, errs)
		}
		widest := widestTable(out)
		if widest > 80 || widest == 0 {
			t.Errorf("%s is %d wide:\n%s", verb, widest, out)
		}
		if all, _, _ := lullWith(env, append(strings.Fields(verb), append(words(t, verb)[len(strings.Fields(verb)):], "-o", "wide")...)...); widestTable(all) < widest {
			t.Errorf("%s -o wide is not wider:\n%s", verb, all)
		}
	}
}

// widestTable returns the width of the widest line, from the first header to the end
// of the table.
func widestTable(out string) (n int) {
	in := false
	for line := range strings.Lines(out) {
		line = strings.TrimRight(line, "\n")
		head := regexp.MustCompile(`^[A-Z][A-Z /]+( {2,}|$)`).MatchString(line)
		if in = head || in && line != ""; in {
			n = max(n, utf8.RuneCountInString(line))
		}
	}
	return n
}

// logs are the verbs that print one line per event. Their lines are not shortened.
var logs = []string{"agent history", "audit", "events"}

// filled returns a value of type t with long content in every field.
func filled(t reflect.Type, depth int) reflect.Value {
	v := reflect.New(t).Elem()
	if depth > 8 {
		return v
	}
	switch t {
	case reflect.TypeFor[time.Time]():
		v.Set(reflect.ValueOf(time.Now().Add(100 * time.Hour)))
		return v
	case reflect.TypeFor[json.RawMessage]():
		v.SetBytes([]byte(`{}`))
		return v
	case reflect.TypeFor[when.Clock](), reflect.TypeFor[when.Days]():
		return v // a valid value
	case reflect.TypeFor[idle.State]():
		v.Set(reflect.ValueOf(idle.Active))
		return v
	}
	switch t.Kind() {
	case reflect.String:
		v.SetString("a-name-that-is-as-long-as-the-names-of-some-companies")
	case reflect.Int, reflect.Int64, reflect.Int32, reflect.Uint64:
		if v.CanInt() {
			v.SetInt(123456789)
		} else {
			v.SetUint(123456789)
		}
	case reflect.Float64:
		v.SetFloat(123456789.5)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Pointer:
		p := reflect.New(t.Elem())
		p.Elem().Set(filled(t.Elem(), depth+1))
		v.Set(p)
	case reflect.Slice:
		v = reflect.Append(v, filled(t.Elem(), depth+1), filled(t.Elem(), depth+1))
	case reflect.Map:
		v = reflect.MakeMap(t)
		v.SetMapIndex(filled(t.Key(), depth+1), filled(t.Elem(), depth+1))
	case reflect.Struct:
		for i := range t.NumField() {
			if t.Field(i).IsExported() {
				v.Field(i).Set(filled(t.Field(i).Type, depth+1))
			}
		}
	}
	return v
}
