package generated

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/santhosh-tekuri/jsonschema/v6"
)

// TestOpenAPIValidates holds the published documents of the server and the
// host to OpenAPI 3.1, by a validator that is not what they are made with, and
// each of their schemas to the meta-schema of JSON Schema 2020-12, which 3.1
// takes its schemas from.
func TestOpenAPIValidates(t *testing.T) {
	files, err := filepath.Glob("../../../../docs/reference/*openapi.json")
	if err != nil || len(files) != 2 {
		t.Fatalf("there are %d documents, want the server's and the host's: %v", len(files), err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			doc, err := openapi3.NewLoader().LoadFromData(data)
			if err != nil {
				t.Fatal(err)
			}
			if !doc.IsOpenAPI31OrLater() || doc.Paths.Len() == 0 {
				t.Errorf("it says %s and has %d paths", doc.OpenAPI, doc.Paths.Len())
			}
			if err := doc.Validate(t.Context()); err != nil {
				t.Error(err)
			}
			whole, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
			if err != nil {
				t.Fatal(err)
			}
			c := jsonschema.NewCompiler()
			c.DefaultDraft(jsonschema.Draft2020)
			if err := c.AddResource("doc.json", whole); err != nil {
				t.Fatal(err)
			}
			names := slices.Sorted(maps.Keys(doc.Components.Schemas))
			for _, name := range names {
				if _, err := c.Compile("doc.json#/components/schemas/" + name); err != nil {
					t.Errorf("schema %s: %v", name, err)
				}
			}
			if len(names) == 0 {
				t.Error("it has no schemas")
			}
			broken := bytes.Replace(data, []byte(`"responses"`), []byte(`"answers"`), 1)
			if doc, err := openapi3.NewLoader().LoadFromData(broken); err == nil && doc.Validate(t.Context()) == nil {
				t.Error("the validator takes an operation without responses")
			}
		})
	}
}
