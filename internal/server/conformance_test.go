package server_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"lull/internal/server/access"
	"lull/internal/store"
)

// operation is one operation of the served OpenAPI document.
type operation struct {
	Method, Path string
	ID           string `json:"operationId"`
	Role         string `json:"x-lull-role"`
	Parameters   []struct {
		Name, In string
		Required bool
		Schema   map[string]any
	}
	RequestBody *struct {
		Content map[string]struct{ Schema map[string]any }
	}
	Responses map[string]any
	Security  []map[string][]string
}

type document struct {
	OpenAPI    string
	Info       struct{ Title, Version string }
	Paths      map[string]map[string]json.RawMessage
	Components struct {
		Schemas         map[string]map[string]any
		SecuritySchemes map[string]any
	}
}

func (b *bench) document() (document, []operation, []byte) {
	b.t.Helper()
	res, data := b.ask("GET", "/openapi.json", "", nil)
	if res.StatusCode != http.StatusOK {
		b.t.Fatalf("/openapi.json: %d", res.StatusCode)
	}
	var d document
	if err := json.Unmarshal(data, &d); err != nil {
		b.t.Fatal(err)
	}
	var ops []operation
	for _, path := range slices.Sorted(maps.Keys(d.Paths)) {
		for _, method := range slices.Sorted(maps.Keys(d.Paths[path])) {
			var op operation
			if err := json.Unmarshal(d.Paths[path][method], &op); err != nil {
				b.t.Fatalf("%s %s: %v", method, path, err)
			}
			op.Method, op.Path = strings.ToUpper(method), path
			ops = append(ops, op)
		}
	}
	if len(ops) < 80 {
		b.t.Fatalf("the document has %d operations only", len(ops))
	}
	return d, ops, data
}

var inPath = regexp.MustCompile(`\{([^}]+)\}`)

// TestOpenAPIDocument checks the served document: every reference resolves, IDs are
// unique, and the parameters match the path.
func TestOpenAPIDocument(t *testing.T) {
	b := newBench(t, memory(t))
	d, ops, raw := b.document()
	if !strings.HasPrefix(d.OpenAPI, "3.1") || d.Info.Title == "" || d.Info.Version == "" {
		t.Errorf("the head is %q %+v", d.OpenAPI, d.Info)
	}
	for _, m := range regexp.MustCompile(`"\$ref":"([^"]+)"`).FindAllStringSubmatch(string(raw), -1) {
		if name, ok := strings.CutPrefix(m[1], "#/components/schemas/"); !ok || d.Components.Schemas[name] == nil {
			t.Errorf("reference %s leads nowhere", m[1])
		}
	}
	seen := map[string]bool{}
	for _, op := range ops {
		where := op.Method + " " + op.Path
		if op.ID == "" || seen[op.ID] {
			t.Errorf("%s: operation id %q is empty or not unique", where, op.ID)
		}
		seen[op.ID] = true
		if len(op.Responses) == 0 || op.Role == "" || (op.Role == "none") != (len(op.Security) == 0) {
			t.Errorf("%s: %d responses, role %q, security %v", where, len(op.Responses), op.Role, op.Security)
		}
		var want, got []string
		for _, m := range inPath.FindAllStringSubmatch(op.Path, -1) {
			want = append(want, m[1])
		}
		for _, p := range op.Parameters {
			if p.In == "path" {
				got = append(got, p.Name)
				if !p.Required || p.Schema == nil {
					t.Errorf("%s: path parameter %s is not required or has no schema", where, p.Name)
				}
			}
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(want, got) {
			t.Errorf("%s: path parameters are %v", where, got)
		}
		if twin := "-in-region"; strings.HasPrefix(op.Path, "/api/v1/workers") {
			found := slices.ContainsFunc(ops, func(o operation) bool { return o.ID == op.ID+twin && o.Method == op.Method })
			if !found {
				t.Errorf("%s: there is no such route below a region", where)
			}
		}
	}
}

// TestReferencePage checks that the page lists every operation except the regional
// copies.
func TestReferencePage(t *testing.T) {
	b := newBench(t, memory(t))
	_, ops, _ := b.document()
	res, data := b.ask("GET", "/docs", "", nil)
	if res.StatusCode != http.StatusOK || bytes.Contains(data, []byte("<script")) {
		t.Fatalf("%d, or it has a script", res.StatusCode)
	}
	for _, op := range ops {
		if shown := bytes.Contains(data, []byte(`id="`+op.ID+`"`)); shown == strings.HasSuffix(op.ID, "-in-region") {
			t.Errorf("%s: shown %t", op.ID, shown)
		}
	}
}

// bodies are the requests of operations that need more than an empty object.
var bodies = map[string]string{
	"create-worker":    `{"name":"new","template_name":"small"}`,
	"import-worker":    `{"name":"imp","aws_region":"us-east-1","ec2_instance_id":"i-0123456789abcdef0"}`,
	"update-worker":    `{"owner":"me"}`,
	"snooze-worker":    `{"minutes":5}`,
	"terminate-worker": `{"confirm":"w"}`,
	"arm-workers":      `{"all":true}`,
	"scale-up":         `{"template":"small","reason":"test"}`,
	"register-license": `{"token":"env:LICENSE"}`,
	"put-template":     `{"instance_type":"m5.large","ami_name_filter":"cml*"}`,
	"change-settings":  `{"min_workers":1}`,
	"halt":             `{"on":false}`,
	"enroll-agent":     `{"instance_id":"i-0123456789abcdef0"}`,
	"create-token":     `{"name":"t","role":"viewer"}`,
	"report-agent":     `{"at":"2026-01-01T00:00:00Z","sequence":1,"interval_seconds":60,"version":"test","last_use":"2026-01-01T00:00:00Z"}`,
	"report-host": `{"host":"m1","at":"2026-01-01T00:00:00Z","sequence":1,"after":0,"started_at":"2026-01-01T00:00:00Z","interval_seconds":60,"version":"test",
		"counts":{"running":1},"instances":[{"id":"i1","name":"web","state":"running","runtime":"process","created_at":"2026-01-01T00:00:00Z"}]}`,
	"ask-host":       `{"answers":[]}`,
	"put-schedule":   officeHours,
	"put-budget":     `{"for":"stop","max_actions":3,"per_minutes":10}`,
	"add-override":   `{"kind":"freeze","all":true,"until":"tomorrow 08:00 Europe/Berlin"}`,
	"simulate":       `{"policies":[{"name":"balanced"},{"name":"mine","timeout_minutes":45}]}`,
	"simulate-told":  `{"policies":[{"name":"balanced"},{"name":"mine","timeout_minutes":45}]}`,
	"apply-policy":   `{"tags":{"team":"x"}}`,
	"apply-schedule": `{"tags":{"team":"y"}}`,
}

const officeHours = `{"zone":"Europe/Berlin","windows":[{"days":"mon-fri","from":"08:00","to":"18:00"}]}`

// rule creates a rule of the kind that path needs and returns its name.
func (b *bench) rule(path string) string {
	b.t.Helper()
	for _, r := range []struct{ prefix, method, path, body string }{
		{"/policies", "PUT", "/policies/m1", `{"idle_timeout_minutes":20}`},
		{"/schedules", "PUT", "/schedules/m1", officeHours},
		{"/budgets", "PUT", "/budgets/m1", bodies["put-budget"]},
		{"/policy-groups", "POST", "/policies/balanced/apply", `{"aws_region":"us-east-1"}`},
		{"/overrides", "POST", "/overrides", bodies["add-override"]},
	} {
		if !strings.HasPrefix(path, "/api/v1"+r.prefix+"/") {
			continue
		}
		res, data := b.ask(r.method, "/api/v1"+r.path, b.admin, []byte(r.body))
		var made struct {
			ID    string
			Group struct{ ID string }
		}
		if err := json.Unmarshal(data, &made); err != nil || res.StatusCode != http.StatusOK {
			b.t.Fatalf("cannot make %s: %d %s", r.path, res.StatusCode, data)
		}
		if id := made.ID + made.Group.ID; id != "" {
			return id
		}
	}
	return "m1"
}

func (op operation) plain() string { return strings.TrimSuffix(op.ID, "-in-region") }

func (op operation) body() []byte {
	if s, ok := bodies[op.plain()]; ok {
		return []byte(s)
	}
	if op.RequestBody != nil {
		return []byte(`{}`)
	}
	return nil
}

// target fills the path of an operation with existing objects.
func (b *bench) target(op operation) string {
	b.t.Helper()
	return inPath.ReplaceAllStringFunc(op.Path, func(m string) string {
		switch m {
		case "{worker_id}":
			return b.worker()
		case "{aws_region}":
			return "us-east-1"
		case "{request_id}":
			return "none"
		case "{id}":
			tok, _, err := b.tokens.Create(b.t.Context(), access.Wanted{Name: "to be revoked", Role: access.Viewer})
			if err != nil {
				b.t.Fatal(err)
			}
			return tok.ID
		case "{channel}":
			return "ops"
		case "{letter}", "{instance}":
			return "none"
		case "{token}":
			return "made-up"
		case "{name}":
			if strings.HasPrefix(op.Path, "/api/v1/templates") {
				b.worker()
				return "small"
			}
			return b.rule(op.Path)
		}
		b.t.Fatalf("no value for %s", m)
		return ""
	})
}

// TestEveryRouteRefuses calls every operation of the document without a token, with
// invalid ones, with an insufficient role, and with broken bodies. It checks that
// each answer is the right problem document and that the store does not change.
func TestEveryRouteRefuses(t *testing.T) {
	b := newBench(t, memory(t))
	_, ops, _ := b.document()
	viewer, operator := b.token(access.Viewer, ""), b.token(access.Operator, "")
	agent := b.token(access.Agent, "other")
	tok, revoked, err := b.tokens.Create(t.Context(), access.Wanted{Name: "gone", Role: access.Admin})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.tokens.Revoke(t.Context(), tok.ID, "test"); err != nil {
		t.Fatal(err)
	}
	_, expired, err := b.tokens.Create(t.Context(), access.Wanted{Name: "old", Role: access.Admin, TTL: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	checks := 0
	for _, op := range ops {
		path, body := b.target(op), op.body()
		before := b.revision()
		refuse := func(what, token string, body []byte, want ...int) {
			t.Helper()
			checks++
			res, data := b.ask(op.Method, path, token, body)
			b.problem(op.Method+" "+op.Path+" "+what, res, data, want...)
			if now := b.revision(); now != before {
				t.Errorf("%s %s %s: the store moved by %d", op.Method, op.Path, what, now-before)
				before = now
			}
		}
		if op.plain() == "agent-program" {
			path += "?architecture=x86_64"
		}
		if op.plain() == "wake-worker" || op.plain() == "enroll-agent" || op.plain() == "agent-program" {
			refuse("without a token", "", body, 401)
			refuse("with a token of the API", b.admin, body, 401)
			continue
		}
		if op.Role == "none" {
			continue
		}
		refuse("without a token", "", body, 401)
		for what, token := range map[string]string{"with a revoked token": revoked, "with an expired token": expired,
			"with a made-up token": madeUp(b.admin), "with nonsense": "x"} {
			refuse(what, token, body, 401)
		}
		refuse("with another machine's token", agent, body, 403)
		if op.Role == "operator" || op.Role == "admin" {
			refuse("as viewer", viewer, body, 403)
		}
		if op.Role == "admin" {
			refuse("as operator", operator, body, 403)
		}
		for name, value := range op.badQueries() {
			checks++
			at := path + "?" + name + "=" + value
			res, data := b.ask(op.Method, at, b.admin, body)
			b.problem(op.Method+" "+op.Path+"?"+name+"="+value, res, data, 422)
			if now := b.revision(); now != before {
				t.Errorf("%s %s: the store moved by %d", op.Method, at, now-before)
				before = now
			}
		}
		if op.RequestBody == nil {
			if op.Method == "GET" {
				continue
			}
			for what, bad := range map[string]string{"with a body": `{}`, "with a list": `[1]`, "with a malformed body": `{bad`, "with text": "stop"} {
				refuse(what, b.admin, []byte(bad), 422)
			}
			continue
		}
		refuse("without a body", b.admin, nil, 422)
		for what, bad := range map[string]string{"malformed": `{"a":`, "not an object": `[1,2]`, "text": `"x"`, "null": `null`, "with surplus": string(body) + "}"} {
			refuse(what, b.admin, []byte(bad), 422)
		}
		refuse("oversized", b.admin, []byte(`{"name":"`+strings.Repeat("x", 300<<10)+`"}`), 413)
		if free := op.plain(); free != "report-agent" && free != "report-host" && free != "ask-host" {
			refuse("with an unknown field", b.admin, append(bytes.TrimSuffix(body, []byte("}")), []byte(map[bool]string{true: `,"nope":1}`, false: `"nope":1}`}[len(body) > 2])...), 422)
		}
	}
	t.Logf("%d refusals over %d operations", checks, len(ops))
}

// freeText are the query parameters that accept any text.
var freeText = []string{"q", "worker_id", "aws_region", "template", "tag", "after", "actor", "action", "object", "owner", "by", "name", "region"}

// badQueries returns invalid queries of an operation, by parameter: an unknown
// parameter, and for each known one an invalid value, or two.
func (op operation) badQueries() map[string]string {
	out := map[string]string{"banana": "1", "%zz": "1"}
	for _, p := range op.Parameters {
		if p.In != "query" {
			continue
		}
		if array := p.Schema["type"] != "string"; !slices.Contains(freeText, p.Name) || p.Schema["enum"] != nil {
			out[p.Name] = "banana%20split"
			if array {
				continue
			}
		}
		if fmt.Sprint(p.Schema["type"]) == "string" {
			out[p.Name+"=a&"+p.Name] = "b"
		}
	}
	return out
}

// TestEveryRouteAnswers calls every operation as admin. It checks that the operation
// exists, that its answer matches the document, and that a repeat with the same
// idempotency key gets the same answer and changes nothing.
func TestEveryRouteAnswers(t *testing.T) {
	b := newBench(t, memory(t))
	_, ops, _ := b.document()
	for i, op := range ops {
		if op.plain() == "events" || op.plain() == "wake-worker" || op.plain() == "detect-idle" || op.plain() == "enroll-agent" || op.plain() == "agent-program" {
			continue // tested elsewhere: the stream never ends, detect-idle waits for a controller, the others need secrets
		}
		path, body := b.target(op), op.body()
		key := fmt.Sprintf("key-%d", i)
		res, data := b.ask(op.Method, path, b.admin, body, "Idempotency-Key", key)
		where := op.Method + " " + op.Path
		switch {
		case res.StatusCode >= 500, res.StatusCode == 405, res.StatusCode == 400, res.StatusCode == 422, res.StatusCode == 401, res.StatusCode == 403:
			t.Errorf("%s: %d %s", where, res.StatusCode, data)
			continue
		case res.StatusCode == 404 && !slices.Contains([]string{"get-request", "get-agent", "get-host", "why-instance", "pause-instance", "resume-instance", "start-instance", "stop-instance", "snooze-instance", "instance-logs", "worker-agent", "metrics", "look-at-answer", "give-answer", "retry-dead-letter", "drop-dead-letter"}, op.plain()):
			t.Errorf("%s: %d %s", where, res.StatusCode, data)
			continue
		}
		if strings.HasPrefix(op.Path, "/answer/") {
			continue // HTML pages, with any content
		}
		b.fits(op, res, data)
		if op.Method == "GET" || op.Role == "none" {
			continue
		}
		before := b.revision()
		again, same := b.ask(op.Method, path, b.admin, body, "Idempotency-Key", key)
		if secret := op.plain() == "create-token" || op.plain() == "new-wake-token"; secret {
			b.problem(where+" again", again, same, 409) // a secret is shown once and never stored
			b.noSecret(data)
		} else if again.StatusCode != res.StatusCode || !bytes.Equal(data, same) || again.Header.Get("Idempotency-Replayed") != "true" ||
			again.Header.Get("Location") != res.Header.Get("Location") {
			t.Errorf("%s again: %d %s, was %d %s", where, again.StatusCode, same, res.StatusCode, data)
		}
		other, told := b.ask(op.Method, path, b.admin, []byte(`{"other":true}`), "Idempotency-Key", key)
		b.problem(where+" with a used key", other, told, 422)
		if now := b.revision(); now != before {
			t.Errorf("%s again: the store moved by %d", where, now-before)
		}
	}
}

// noSecret checks that the store does not contain the token of an answer.
func (b *bench) noSecret(answer []byte) {
	b.t.Helper()
	var shown struct{ Token string }
	if err := json.Unmarshal(answer, &shown); err != nil || len(shown.Token) < 20 {
		b.t.Fatalf("no token in %s", answer)
	}
	page, err := store.List(b.t.Context(), b.db, store.Prefix(""))
	if err != nil {
		b.t.Fatal(err)
	}
	encoded := base64.StdEncoding.EncodeToString([]byte(shown.Token))
	for _, v := range page.Values {
		if secret := shown.Token[len(shown.Token)-20:]; bytes.Contains(v.Data, []byte(secret)) || bytes.Contains(v.Data, []byte(encoded[8:24])) {
			b.t.Errorf("%s holds the token in the clear", v.Key)
		}
		var r struct {
			Answer struct{ Body []byte }
		}
		if json.Unmarshal(v.Data, &r) == nil && bytes.Contains(r.Answer.Body, []byte(shown.Token)) {
			b.t.Errorf("%s holds the answer with the token", v.Key)
		}
	}
}

// fits checks an answer against its schema in the document.
func (b *bench) fits(op operation, res *http.Response, data []byte) {
	b.t.Helper()
	item := b.api.API().OpenAPI().Paths[op.Path]
	var own *huma.Operation
	for _, o := range []*huma.Operation{item.Get, item.Put, item.Post, item.Patch, item.Delete} {
		if o != nil && o.OperationID == op.ID {
			own = o
		}
	}
	doc := own.Responses[fmt.Sprint(res.StatusCode)]
	if doc == nil || doc.Content == nil {
		doc = own.Responses["200"]
		for _, status := range []string{"201", "202"} {
			if r := own.Responses[status]; r != nil && r.Content != nil {
				doc = r
			}
		}
		if res.StatusCode >= 400 {
			doc = own.Responses["404"]
		}
	}
	if len(data) == 0 || doc == nil {
		return
	}
	media := doc.Content["application/json"]
	if res.StatusCode >= 400 {
		media = doc.Content["application/problem+json"]
	}
	if media == nil {
		return
	}
	var v any
	if err := json.Unmarshal(data, &v); err != nil {
		b.t.Errorf("%s %s: %v", op.Method, op.Path, err)
		return
	}
	var found huma.ValidateResult
	huma.Validate(b.api.API().OpenAPI().Components.Schemas, media.Schema, huma.NewPathBuffer([]byte("body"), 0), huma.ModeReadFromServer, v, &found)
	for _, e := range found.Errors {
		b.t.Errorf("%s %s: the answer is not what the document says: %v\n%s", op.Method, op.Path, e, data)
	}
}

// madeUp returns the token with its last character replaced by another of the
// alphabet.
func madeUp(token string) string {
	last := byte('A')
	if token[len(token)-1] == last {
		last = 'B'
	}
	return token[:len(token)-1] + string(last)
}
