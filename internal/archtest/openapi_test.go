package archtest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"lull/internal/lib/errtest"
)

// published returns the committed OpenAPI documents by file name.
func published(t *testing.T) map[string][]byte {
	t.Helper()
	docs := map[string][]byte{}
	for _, name := range []string{"server-openapi.json", "host-openapi.json"} {
		data, err := os.ReadFile(filepath.Join("..", "..", "docs", "reference", name))
		errtest.None(t, err)
		docs[name] = data
	}
	return docs
}

// TestOpenAPIValidates validates the published documents against OpenAPI 3.1
// with an independent validator, and each schema against the JSON Schema
// 2020-12 meta-schema.
func TestOpenAPIValidates(t *testing.T) {
	for name, data := range published(t) {
		t.Run(name, func(t *testing.T) {
			doc, err := openapi3.NewLoader().LoadFromData(data)
			errtest.None(t, err)
			if !doc.IsOpenAPI31OrLater() || doc.Paths.Len() == 0 {
				t.Errorf("version %s with %d paths", doc.OpenAPI, doc.Paths.Len())
			}
			if err := doc.Validate(t.Context()); err != nil {
				t.Error(err)
			}
			whole, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
			errtest.None(t, err)
			c := jsonschema.NewCompiler()
			c.DefaultDraft(jsonschema.Draft2020)
			errtest.None(t, c.AddResource("doc.json", whole))
			names := slices.Sorted(maps.Keys(doc.Components.Schemas))
			for _, schema := range names {
				if _, err := c.Compile("doc.json#/components/schemas/" + schema); err != nil {
					t.Errorf("schema %s: %v", schema, err)
				}
			}
			if len(names) == 0 {
				t.Error("no schemas")
			}
			broken := bytes.Replace(data, []byte(`"responses"`), []byte(`"answers"`), 1)
			if doc, err := openapi3.NewLoader().LoadFromData(broken); err == nil && doc.Validate(t.Context()) == nil {
				t.Error("the validator accepts an operation without responses")
			}
		})
	}
}

// schema is the part of a JSON schema that the promises name.
type schema struct {
	Ref                  string `json:"$ref"`
	Type                 any
	Items                *schema
	AdditionalProperties json.RawMessage
	Properties           map[string]*schema
	Required             []string
	Enum                 []string
	OneOf                []*schema
}

// name describes s in one word: a type, a reference, or a list or map of one.
func (s *schema) name() string {
	switch {
	case s == nil:
		return "any"
	case s.Ref != "":
		return s.Ref[strings.LastIndex(s.Ref, "/")+1:]
	case s.Items != nil:
		return s.Items.name() + "[]"
	case len(s.AdditionalProperties) > 5: // it was neither true nor false
		var values schema
		if json.Unmarshal(s.AdditionalProperties, &values) == nil {
			return "map:" + values.name()
		}
	case len(s.OneOf) > 0:
		var names []string
		for _, one := range s.OneOf {
			names = append(names, one.name())
		}
		return strings.Join(names, "|")
	}
	switch kind := s.Type.(type) {
	case string:
		return kind
	case []any: // nullable
		return fmt.Sprint(kind[0])
	}
	return "any"
}

// promises lists what a client may rely on in an OpenAPI document, sorted, one
// fact a line: operations, parameters, bodies, answers, and the properties and
// enumerated values of every schema. Inputs that must be given end in "required".
func promises(t *testing.T, data []byte) []string {
	t.Helper()
	var doc struct {
		Paths map[string]map[string]struct {
			Parameters []struct {
				Name, In string
				Required bool
				Schema   *schema
			}
			RequestBody *struct {
				Required bool
				Content  map[string]struct{ Schema *schema }
			}
			Responses map[string]struct {
				Content map[string]struct{ Schema *schema }
			}
		}
		Components struct{ Schemas map[string]*schema }
	}
	errtest.None(t, json.Unmarshal(data, &doc))
	var lines []string
	add := func(required bool, words ...string) {
		if required {
			words = append(words, "required")
		}
		lines = append(lines, strings.Join(words, " "))
	}
	inputs := map[string]bool{} // names of schemas that requests contain
	var input func(*schema)
	input = func(s *schema) {
		if s == nil {
			return
		}
		if s.Ref != "" {
			if name := s.name(); !inputs[name] {
				inputs[name] = true
				input(doc.Components.Schemas[name])
			}
		}
		input(s.Items)
		for _, p := range s.Properties {
			input(p)
		}
		for _, one := range s.OneOf {
			input(one)
		}
	}
	for path, methods := range doc.Paths {
		for method, op := range methods {
			call := strings.ToUpper(method) + " " + path
			add(false, call)
			for _, p := range op.Parameters {
				add(p.Required, call, p.In, p.Name, p.Schema.name())
			}
			if op.RequestBody != nil {
				for media, body := range op.RequestBody.Content {
					input(body.Schema)
					add(op.RequestBody.Required, call, "body", media, body.Schema.name())
				}
			}
			for code, answer := range op.Responses {
				if code > "299" { // errors share one shape
					continue
				}
				for media, body := range answer.Content {
					add(false, call, code, media, body.Schema.name())
				}
			}
		}
	}
	for name, s := range doc.Components.Schemas {
		for property, p := range s.Properties {
			add(inputs[name] && slices.Contains(s.Required, property), "schema", name, property, p.name())
			for _, value := range p.Enum {
				add(false, "schema", name, property, "=", value)
			}
		}
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

// broken lists the promises that now fails to keep: facts that are gone, and
// inputs that clients of then do not send but must send now.
func broken(then, now []string) []string {
	var out []string
	has := func(lines []string, line string) bool { _, ok := slices.BinarySearch(lines, line); return ok }
	for _, line := range then {
		optional, was := strings.CutSuffix(line, " required")
		if !has(now, line) && !(was && has(now, optional)) {
			out = append(out, "gone: "+line)
		}
	}
	for _, line := range now {
		optional, required := strings.CutSuffix(line, " required")
		if !required || has(then, line) || has(then, optional) { // an optional field that became required is reported by its missing optional line
			continue
		}
		words := strings.Fields(line)
		old := slices.ContainsFunc(then, func(l string) bool { // a new operation or schema may have any requirements
			return strings.HasPrefix(l, words[0]+" "+words[1]+" ")
		})
		if old {
			out = append(out, "now required: "+optional)
		}
	}
	return out
}

// TestAPICompatible compares the published documents with what clients were
// promised before. -update adds new promises; one that is broken on purpose has
// to be removed from the file.
func TestAPICompatible(t *testing.T) {
	for name, data := range published(t) {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join("testdata", strings.TrimSuffix(name, ".json")+".promises")
			now := promises(t, data)
			old, err := os.ReadFile(file)
			if err != nil && !(*update && os.IsNotExist(err)) {
				t.Fatal(err)
			}
			then := strings.Split(strings.TrimSpace(string(old)), "\n")
			if len(old) == 0 {
				then = nil
			}
			for _, line := range broken(then, now) {
				t.Errorf("clients break: %s", line)
			}
			if *update && !t.Failed() {
				errtest.None(t, os.WriteFile(file, []byte(strings.Join(now, "\n")+"\n"), 0o644))
			} else if len(now) != len(then) && !t.Failed() {
				t.Errorf("%s lacks new promises: run go test ./internal/archtest -update", file)
			}
		})
	}
}

func TestBroken(t *testing.T) {
	then := []string{"GET /a", "GET /a query x string required", "POST /b", "POST /b body m B required",
		"schema B name string required", "schema B size integer", "schema B state = OLD"}
	now := []string{"GET /a", "GET /a query x string", "POST /b", "POST /b body m B required", "PUT /c", "PUT /c query z string required",
		"schema B color string required", "schema B name string required", "schema B size string"}
	want := []string{"gone: schema B size integer", "gone: schema B state = OLD", "now required: schema B color string"}
	if got := broken(then, now); !slices.Equal(got, want) {
		t.Errorf("broken:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if got := broken(then, then); len(got) != 0 {
		t.Errorf("unchanged promises are broken: %v", got)
	}
}
